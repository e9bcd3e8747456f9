// echoline store, on a folder: every verb, and a run that publishes to it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/files.hpp"
#include "delta/checkpoint.hpp"
#include "store/directory_store.hpp"
#include "store/policy_writer.hpp"
#include "tests/cli/program.hpp"
#include "tests/store/policies.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;
namespace fs = std::filesystem;

class StoreVerbs : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kNewest = 6;

  // Versions 0 to kNewest; anchors at 0, 3 and 6.
  void SetUp() override {
    store::StoreSettings settings;
    settings.anchor_every = 3;
    auto writer = store::PolicyWriter::open(
        objects_, key_, {.run_id = "run", .holder = std::string(32, 'a'), .settings = settings, .resumed_at = {}},
        clock_, [](Duration) { return ok(); });
    ASSERT_TRUE(writer) << writer.error().message();
    ASSERT_TRUE((*writer)->publish_files({{"config.json", "{}"}}));
    for (std::uint64_t version = 0; version <= kNewest; ++version) {
      const auto base = (*writer)->newest();
      ASSERT_TRUE((*writer)->publish(Version{version}, base,
                                     base ? policies_.delta(version - 1, version) : policies_.snapshot(version)));
      if (!(*writer)->wants_anchor()) continue;
      ASSERT_TRUE((*writer)->publish(Version{version}, std::nullopt, policies_.snapshot(version)));
    }
    ASSERT_TRUE((*writer)->lease().end());
  }
  Outcome run(const std::string& verb, std::vector<std::string> more = {}) const {
    std::vector<std::string> arguments{"store", verb, url()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run_program(arguments);
  }
  json run_json(const std::string& verb, std::vector<std::string> more = {}) const {
    more.push_back("--json");
    const Outcome outcome = run(verb, std::move(more));
    EXPECT_EQ(outcome.status, 0) << outcome.err << outcome.out;
    return json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  }
  std::string url() const { return (folder_.path() / "store").string(); }
  std::string out(const std::string& name) const { return (folder_.path() / name).string(); }
  static std::string digest_of(const std::string& path) {
    const auto checkpoint = delta::Checkpoint::open(path);
    return checkpoint ? delta::digest_state(checkpoint->view())->hex() : checkpoint.error().message();
  }
  std::string digest(std::uint64_t version) { return policies_.digest(version).hex(); }

  TemporaryFolder folder_;
  store::DirectoryStore objects_{folder_.path() / "store"};
  overlay::trust::SigningKey key_ = overlay::trust::SigningKey::generate();
  SystemClock clock_;
  store::Policies policies_;
};

TEST_F(StoreVerbs, LsListsVersions) {
  const json listed = run_json("ls");
  EXPECT_EQ(listed.at("run"), "run");
  EXPECT_EQ(listed.at("run_key"), overlay::trust::to_hex(key_.public_key()));
  EXPECT_EQ(listed.at("newest"), kNewest);
  EXPECT_EQ(listed.at("versions").size(), 9u);
  EXPECT_EQ(listed.at("versions").back().at("digest"), digest(kNewest));
  const Outcome text = run("ls");
  EXPECT_NE(text.out.find(digest(4)), std::string::npos) << text.out;
  EXPECT_EQ(run("ls", {"--key", std::string(64, '0')}).status, 2);
  EXPECT_EQ(run_program({"store", "ls", out("nothing")}).status, 1);
}

TEST_F(StoreVerbs, FetchAndExportWriteAVersion) {
  run_json("fetch", {"--version", "4", "-o", out("4.safetensors")});
  EXPECT_EQ(digest_of(out("4.safetensors")), digest(4));
  run_json("fetch", {"--version", "2", "-o", out("2")});
  EXPECT_EQ(digest_of(out("2")), digest(2));
  const json exported = run_json("export", {"-o", out("model")});
  EXPECT_EQ(exported.at("version"), kNewest);
  EXPECT_EQ(digest_of(out("model")), digest(kNewest));
  EXPECT_EQ(*read_file(out("model") + "/config.json"), "{}");
  EXPECT_FALSE(fs::exists(out("model") + "/.echoline"));
  EXPECT_EQ(run("export", {"-o", out("model")}).status, 2);  // exists
  const Outcome missing = run("fetch", {"--version", "9", "-o", out("9")});
  EXPECT_EQ(missing.status, 1);
  EXPECT_NE(missing.err.find("7 versions from 0 to 6"), std::string::npos) << missing.err;
}

TEST_F(StoreVerbs, VerifyFindsDamage) {
  const json verified = run_json("verify");
  EXPECT_EQ(verified.at("deltas"), 6);
  EXPECT_EQ(verified.at("snapshots"), 3);
  EXPECT_TRUE(verified.at("damaged").empty());
  const fs::path patch = fs::path(url()) / "deltas/00000000.000000000002/000000000001.patch";
  std::string bytes = *read_file(patch);
  bytes[50] ^= 1;
  std::ofstream(patch, std::ios::binary) << bytes;
  const Outcome damaged = run("verify");
  EXPECT_EQ(damaged.status, 1);
  EXPECT_NE(damaged.out.find("deltas/00000000.000000000002/manifest: "), std::string::npos) << damaged.out;
  EXPECT_NE(damaged.out.find("2 are damaged"), std::string::npos) << damaged.out;  // and the delta after it
}

TEST_F(StoreVerbs, PruneKeepsWhatIsNeeded) {
  const json planned = run_json("prune", {"--deltas", "2", "--anchors", "1", "--dry-run"});
  EXPECT_EQ(planned.at("removed").size(), 4u);  // the snapshot of 0, and the deltas of 1, 2 and 3
  EXPECT_EQ(run_json("ls").at("versions").size(), 9u);
  run_json("prune", {"--deltas", "2", "--anchors", "1"});
  EXPECT_EQ(run_json("ls").at("versions").size(), 5u);
  EXPECT_TRUE(run_json("verify").at("damaged").empty());
}

TEST_F(StoreVerbs, PullFollowsAndRunsTheHook) {
  const std::string seen = out("seen");
  EXPECT_EQ(run("pull", {out("model"), "--hook", "echo $ECHOLINE_VERSION $ECHOLINE_DIGEST >> " + seen}).status, 0);
  EXPECT_EQ(digest_of(out("model")), digest(kNewest));
  EXPECT_EQ(*read_file(seen), fmt::format("{} {}\n", kNewest, digest(kNewest)));
  Program follower({"store", "pull", url(), out("model"), "--follow", "--poll", "0.1", "--json", "--hook",
                    "echo $ECHOLINE_VERSION >> " + seen});
  auto writer = store::PolicyWriter::open(
      objects_, key_, {.run_id = "run", .holder = std::string(32, 'a'), .settings = {}, .resumed_at = Version{kNewest}},
      clock_, [](Duration) { return ok(); });
  ASSERT_TRUE(writer) << writer.error().message();
  for (std::uint64_t version = kNewest + 1; version <= kNewest + 3; ++version) {
    ASSERT_TRUE((*writer)->publish(Version{version}, Version{version - 1}, policies_.delta(version - 1, version)));
    EXPECT_TRUE(eventually(seconds(30), [&] {
      const auto lines = read_file(seen);
      return lines && lines->ends_with(fmt::format("\n{}\n", version));
    })) << version;
    EXPECT_EQ(digest_of(out("model")), digest(version));
  }
  follower.signal(SIGTERM);
  const Outcome outcome = follower.wait(seconds(30));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("\"deltas\":1"), std::string::npos) << outcome.out;
}

TEST_F(StoreVerbs, AFailedHookIsReported) {
  const Outcome outcome = run("pull", {out("model"), "--hook", "exit 3"});
  EXPECT_EQ(outcome.status, 1);
  EXPECT_NE(outcome.err.find("ended with status 3"), std::string::npos) << outcome.err;
}

// A run publishes to a folder beside its overlay, is interrupted, and goes on.
TEST(StoreRun, EveryVersionIsStored) {
  if (!kWithTorch) GTEST_SKIP() << "needs the built-in trainer";
  const TemporaryFolder folder;
  const std::string url = (folder.path() / "store").string();
  const std::vector<std::string> arguments{"up",
                                           "configs/quickstart.yaml",
                                           "--json",
                                           "--set",
                                           "run.folder=" + folder.path().string(),
                                           "--set",
                                           "run.steps=5",
                                           "--set",
                                           "rollout.prompts_per_step=8",
                                           "--set",
                                           "evaluation.problems=8",
                                           "--set",
                                           "learner.checkpoint_every=1",
                                           "--set",
                                           "store.url=" + url,
                                           "--set",
                                           "store.anchor_every=2"};
  Program first(arguments);
  const fs::path run = folder.path() / "quickstart";
  const bool got_on = eventually(seconds(120), [&] {
    const json status = json_file(run / "status.json");
    return status.is_object() && status.value("step", 0) >= 2;
  });
  ASSERT_TRUE(got_on);
  first.signal(SIGKILL);
  first.wait(seconds(60));
  std::vector<std::string> resumed = arguments;
  resumed.push_back("--resume");
  const Outcome outcome = run_program(resumed, seconds(240));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json_file(run / "report.json");
  const Outcome listed = run_program({"store", "ls", url, "--json"});
  ASSERT_EQ(listed.status, 0) << listed.err;
  const json versions = json::parse(listed.out).at("versions");
  EXPECT_EQ(versions.back().at("version"), 5);
  EXPECT_EQ(versions.back().at("digest"), report.at("weights").at("digest"));
  std::set<std::uint64_t> all;
  for (const json& version : versions) all.insert(version.at("version").get<std::uint64_t>());
  EXPECT_EQ(all, (std::set<std::uint64_t>{0, 1, 2, 3, 4, 5}));
  const Outcome verified = run_program({"store", "verify", url, "--json"});
  EXPECT_EQ(verified.status, 0) << verified.out;
  const std::string model = (folder.path() / "model").string();
  EXPECT_EQ(run_program({"store", "export", url, "-o", model}).status, 0);
  EXPECT_TRUE(fs::exists(model + "/config.json"));
  EXPECT_EQ(run_program({"model", "info", model}).status, 0);
  std::error_code ignored;
  std::size_t waiting = 0;
  for (const auto& file : fs::directory_iterator(run / "outbox", ignored))
    waiting += file.path().extension() == ".patch";
  EXPECT_EQ(waiting, 0u);
}

}  // namespace
}  // namespace echoline::testing
