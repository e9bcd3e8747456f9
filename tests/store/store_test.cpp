// Objects in folders, credentials, and the texts of a store.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/files.hpp"
#include "overlay/trust/sha256.hpp"
#include "store/directory_store.hpp"
#include "store/manifest.hpp"
#include "store/s3_answers.hpp"
#include "store/s3_credentials.hpp"
#include "tests/store/contract.hpp"

namespace echoline::store {
namespace {

namespace fs = std::filesystem;

class TemporaryFolder {
 public:
  TemporaryFolder() : path_(fs::path(testing::TempDir()) / fmt::format("echoline_store_{}", ::getpid())) {
    fs::remove_all(path_);
    fs::create_directories(path_);
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

TEST(DirectoryStore, KeepsTheContract) {
  const TemporaryFolder folder;
  DirectoryStore store(folder.path() / "store");
  check_contract(store, std::string(3 << 20, 'l'));
}

// A writer that was killed leaves its temporary file, which is no object.
TEST(DirectoryStore, DoesNotListTemporaryFiles) {
  const TemporaryFolder folder;
  DirectoryStore store(folder.path());
  ASSERT_TRUE(store.put("a/b", as_bytes("1")));
  std::ofstream(folder.path() / "a" / "b.new.Xy12ab") << "half";
  EXPECT_EQ(store.list("").value(), (std::vector<ObjectInfo>{{"a/b", 1}}));
}

TEST(ObjectStore, AddressesAreChecked) {
  for (const char* url : {"", "http://x", "s3://", "s3://ab", "s3://bucket/a b", "s3://buck et/a"}) {
    const auto store = open_object_store({.url = url, .endpoint = "http://127.0.0.1:1"});
    ASSERT_FALSE(store) << url;
    EXPECT_EQ(store.error().code, Code::kInvalid) << url;
  }
}

TEST(Sha256, OfKnownTexts) {
  EXPECT_EQ(overlay::trust::sha256_hex(as_bytes("")),
            "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(overlay::trust::sha256_hex(as_bytes("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

// The variables that a test sets, instead of the process's.
Environment environment_of(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

TEST(Credentials, ComeFromTheEnvironmentFirst) {
  const auto found = find_s3_credentials(
      "",
      environment_of({{"AWS_ACCESS_KEY_ID", "id"}, {"AWS_SECRET_ACCESS_KEY", "secret"}, {"AWS_SESSION_TOKEN", "t"}}));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->access_key, "id");
  EXPECT_EQ(found->secret_key.reveal(), "secret");
  EXPECT_EQ(found->session_token.reveal(), "t");
  EXPECT_EQ(find_s3_credentials("", environment_of({{"AWS_ACCESS_KEY_ID", "id"}})).error().code, Code::kInvalid);
}

TEST(Credentials, ComeFromTheProfileFile) {
  const TemporaryFolder folder;
  const std::string file = (folder.path() / "credentials").string();
  std::ofstream(file) << "# keys\n[default]\naws_access_key_id = d\naws_secret_access_key=ds\n"
                         "[other]\naws_access_key_id=o\n  aws_secret_access_key = os \n[half]\naws_access_key_id=h\n";
  const std::map<std::string, std::string> base{{"AWS_SHARED_CREDENTIALS_FILE", file}};
  EXPECT_EQ(find_s3_credentials("", environment_of(base))->access_key, "d");
  auto with_profile = base;
  with_profile["AWS_PROFILE"] = "other";
  EXPECT_EQ(find_s3_credentials("", environment_of(with_profile))->secret_key.reveal(), "os");
  // A profile that the run file names wins over the environment.
  auto with_keys = base;
  with_keys["AWS_ACCESS_KEY_ID"] = "e";
  with_keys["AWS_SECRET_ACCESS_KEY"] = "es";
  EXPECT_EQ(find_s3_credentials("other", environment_of(with_keys))->access_key, "o");
  const auto half = find_s3_credentials("half", environment_of(base));
  ASSERT_FALSE(half);
  EXPECT_EQ(half.error().code, Code::kInvalid);
  EXPECT_NE(half.error().message().find("no secret key"), std::string::npos) << half.error().message();
  EXPECT_EQ(find_s3_credentials("", environment_of({{"HOME", "/nonexistent"}})).error().code, Code::kInvalid);
}

TEST(Credentials, RegionComesFromEnvironmentOrProfile) {
  const TemporaryFolder folder;
  const std::string file = (folder.path() / "config").string();
  std::ofstream(file)
      << "[default]\nregion = eu-central-1\ns3 =\n  max_concurrent_requests = 2\n[profile b]\nregion=b\n";
  const std::map<std::string, std::string> base{{"AWS_CONFIG_FILE", file}};
  EXPECT_EQ(find_s3_region("", environment_of(base)).value(), "eu-central-1");
  EXPECT_EQ(find_s3_region("b", environment_of(base)).value(), "b");
  auto with_region = base;
  with_region["AWS_REGION"] = "r";
  EXPECT_EQ(find_s3_region("", environment_of(with_region)).value(), "r");
  EXPECT_EQ(find_s3_region("", environment_of({{"HOME", "/nonexistent"}})).value(), "us-east-1");
}

TEST(S3Answers, ListsAreParsed) {
  const auto list = parse_s3_list(
      "<ListBucketResult><IsTruncated>true</IsTruncated><Contents><Key>a&amp;&#x62;</Key><Size>12</Size></Contents>"
      "<Contents><Key>c</Key><Size>0</Size></Contents><NextContinuationToken>x=/&lt;</NextContinuationToken>"
      "</ListBucketResult>");
  ASSERT_TRUE(list) << list.error().message();
  EXPECT_EQ(list->objects, (std::vector<ObjectInfo>{{"a&b", 12}, {"c", 0}}));
  EXPECT_EQ(list->next, "x=/<");
  for (const char* wrong :
       {"", "<html>", "<IsTruncated>true</IsTruncated>", "<IsTruncated>false</IsTruncated><Contents></Contents>",
        "<IsTruncated>false</IsTruncated><Contents><Key>a</Key><Size>-1</Size></Contents>",
        "<IsTruncated>false</IsTruncated><Contents><Key>&bad;</Key><Size>1</Size></Contents>"})
    EXPECT_FALSE(parse_s3_list(wrong)) << wrong;
}

TEST(Keys, NamesAreParsedStrictly) {
  const VersionName name{.epoch = 3, .version = Version{41}};
  EXPECT_EQ(to_text(name), "00000003.000000000041");
  EXPECT_EQ(parse_version_name(to_text(name)), name);
  EXPECT_FALSE(parse_version_name("00000003.00000000004x"));
  const auto key = parse_publication_key("deltas/00000003.000000000041/000000000007.patch");
  ASSERT_TRUE(key);
  EXPECT_EQ(key->name, name);
  EXPECT_EQ(key->kind, delta::PatchKind::kDelta);
  EXPECT_EQ(key->file, "000000000007.patch");
  for (const char* other : {"", "deltas", "deltas/x/y", "other/00000003.000000000041/ready"})
    EXPECT_FALSE(parse_publication_key(other)) << other;
  EXPECT_EQ(parse_lease_key("lease/000000000007"), 7u);
  EXPECT_FALSE(parse_lease_key("lease/7"));
}

class Texts : public testing::Test {
 protected:
  const overlay::trust::SigningKey key_{overlay::trust::SigningKey::Seed{}};
  const overlay::trust::Verifier verifier_{key_.public_key()};
  const Manifest manifest_{.run_id = "run",
                           .kind = delta::PatchKind::kDelta,
                           .name = {.epoch = 1, .version = Version{5}},
                           .base = VersionName{.epoch = 0, .version = Version{4}},
                           .base_digest = {},
                           .digest = {},
                           .state_bytes = 100,
                           .patch_bytes = 10,
                           .sha256 = std::string(64, 'a'),
                           .term = 3,
                           .published_unix_ms = 1'700'000'000'000};
};

TEST_F(Texts, ManifestsAreReadBack) {
  const std::string text = sign(manifest_, key_);
  const auto read = read_manifest(text, verifier_, "m");
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(*read, manifest_);
  EXPECT_LE(text.size(), kManifestBytesMax);
}

TEST_F(Texts, AChangedByteIsFound) {
  const std::string text = sign(manifest_, key_);
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] ^= 1;
    EXPECT_FALSE(read_manifest(changed, verifier_, "m")) << i;
    EXPECT_FALSE(read_manifest(text.substr(0, i), verifier_, "m")) << i;
  }
  const overlay::trust::SigningKey other = overlay::trust::SigningKey::generate();
  EXPECT_EQ(read_manifest(sign(manifest_, other), verifier_, "m").error().code, Code::kCorrupt);
}

// A signature for one purpose is none for another.
TEST_F(Texts, ASignatureIsBoundToItsPurpose) {
  const std::string run = sign(RunDescription{.run_id = "run", .key = key_.public_key()}, key_);
  EXPECT_FALSE(read_manifest(run, verifier_, "m"));
  EXPECT_FALSE(read_file_list(run, verifier_));
  const auto description = read_run_description(run);
  ASSERT_TRUE(description) << description.error().message();
  EXPECT_EQ(description->run_id, "run");
  EXPECT_EQ(description->key, key_.public_key());
}

TEST_F(Texts, FileListsHaveNoPaths) {
  const std::vector<StoredFile> files{{"config.json", 3, std::string(64, 'b')}};
  const auto read = read_file_list(sign(files, key_), verifier_);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->at(0).name, "config.json");
  for (const char* name : {"../x", "a/b", ".echoline", "model.safetensors", "a b"})
    EXPECT_FALSE(read_file_list(sign({{name, 3, std::string(64, 'b')}}, key_), verifier_)) << name;
}

TEST_F(Texts, LatestNamesASnapshotOfTheHistory) {
  Manifest snapshot = manifest_;
  snapshot.kind = delta::PatchKind::kSnapshot;
  snapshot.base.reset();
  snapshot.name.version = Version{2};
  const auto read = read_latest(sign(manifest_, key_) + sign(snapshot, key_), verifier_);
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_EQ(read->newest, manifest_);
  EXPECT_EQ(read->anchor, snapshot);
  EXPECT_FALSE(read_latest(sign(manifest_, key_) + sign(manifest_, key_), verifier_));
  EXPECT_FALSE(read_latest(sign(manifest_, key_), verifier_));
}

}  // namespace
}  // namespace echoline::store
