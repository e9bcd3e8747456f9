// Hashes, signatures, the authority of a run and its certificates, join tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "base/files.hpp"
#include "overlay/trust/authority.hpp"
#include "overlay/trust/hash.hpp"
#include "overlay/trust/secret.hpp"
#include "overlay/trust/signature.hpp"
#include "overlay/trust/token.hpp"

namespace echoline::overlay::trust {
namespace {

using testing::HasSubstr;
using testing::Not;
using Kind = PeerIdentity::Kind;
namespace fs = std::filesystem;

constexpr double kNow = 1.7e9;

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

std::string to_hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte b : bytes) text += fmt::format("{:02x}", std::to_integer<unsigned>(b));
  return text;
}

template <std::size_t kSize>
std::array<std::byte, kSize> from_hex(std::string_view text) {
  std::array<std::byte, kSize> bytes;
  for (std::size_t i = 0; i < kSize; ++i)
    bytes[i] = static_cast<std::byte>(std::stoi(std::string(text.substr(2 * i, 2)), nullptr, 16));
  return bytes;
}

SigningKey key_number(int i) { return SigningKey(blake3(bytes_of(fmt::format("key {}", i)))); }
Authority authority_of(const std::string& run) { return *Authority::create(run, key_number(0)); }

// ---- hashes ----

TEST(Blake3, OfficialVectors) {
  EXPECT_EQ(to_hex(blake3({})), "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262");
  EXPECT_EQ(to_hex(blake3(bytes_of("abc"))), "6437b3ac38465133ffb63b75273a8db548c558465d79db03fd359c6cd5bd9d85");
  // The official test vectors hash bytes 0, 1, ... 250, 0, 1, ...
  const auto official = [](std::size_t size) {
    std::vector<std::byte> input(size);
    for (std::size_t i = 0; i < size; ++i) input[i] = static_cast<std::byte>(i % 251);
    return to_hex(blake3(input));
  };
  EXPECT_EQ(official(1), "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213");
  EXPECT_EQ(official(1024), "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7");
  EXPECT_EQ(official(1025), "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444");
  EXPECT_EQ(official(102400), "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085");
}

TEST(Blake3, PiecesGiveTheSameHash) {
  std::vector<std::byte> input(100'000);
  for (std::size_t i = 0; i < input.size(); ++i) input[i] = static_cast<std::byte>(i * i >> 3);
  Hasher hasher;
  std::size_t done = 0;
  for (std::size_t step = 1; done < input.size(); step = step * 3 + 1) {
    const std::size_t n = std::min(step, input.size() - done);
    hasher.update(std::span(input).subspan(done, n));
    done += n;
    const Hasher fork = hasher;
    EXPECT_EQ(fork.finish(), blake3(std::span(input).first(done)));
  }
  EXPECT_EQ(hasher.finish(), blake3(input));
  EXPECT_EQ(trust::to_hex(blake3({})), to_hex(blake3({})));
}

// ---- secrets ----

TEST(Secret, IsNotPrinted) {
  const Secret secret(std::string("open sesame"));
  std::ostringstream out;
  out << secret;
  EXPECT_EQ(out.str(), "(hidden)");
  EXPECT_EQ(fmt::format("{}", secret), "(hidden)");
  EXPECT_EQ(fmt::format("{:>10}", secret), "  (hidden)");
  EXPECT_EQ(secret.reveal(), "open sesame");
}

TEST(Secret, AMovedSecretLeavesNothingBehind) {
  for (const std::size_t size : {5u, 500u}) {
    std::string text(size, 'x');
    Secret a(std::move(text));
    EXPECT_TRUE(text.empty());  // NOLINT(bugprone-use-after-move)
    Secret b(std::move(a));
    EXPECT_TRUE(a.empty());  // NOLINT(bugprone-use-after-move)
    a = b;
    EXPECT_EQ(a, b);
    EXPECT_EQ(b.reveal(), std::string(size, 'x'));
    EXPECT_FALSE(b == Secret(std::string(size, 'y')));
    EXPECT_FALSE(b == Secret());
  }
}

// ---- signatures ----

TEST(Signature, Rfc8032Key) {
  // RFC 8032, section 7.1, test 1: the public key of a seed.
  const SigningKey key(from_hex<32>("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"));
  EXPECT_EQ(to_hex(key.public_key().bytes), "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
  EXPECT_EQ(trust::to_hex(key.public_key()), to_hex(key.public_key().bytes));
  EXPECT_EQ(SigningKey(key.seed()).public_key(), key.public_key());
}

TEST(Signature, IsValidOnlyForItsBytesContextAndKey) {
  const SigningKey key = key_number(1);
  const auto bytes = bytes_of("policy 7");
  const Signature signature = key.sign("manifest", bytes);
  EXPECT_EQ(signature, key.sign("manifest", bytes)) << "deterministic";
  const Verifier verifier(key.public_key());
  EXPECT_EQ(verifier.public_key(), key.public_key());
  for (int again = 0; again < 2; ++again) EXPECT_TRUE(verifier.verify("manifest", bytes, signature));
  EXPECT_TRUE(verify(key.public_key(), "manifest", bytes, signature));
  EXPECT_FALSE(verifier.verify("heartbeat", bytes, signature));
  EXPECT_FALSE(verifier.verify("manifest", bytes_of("policy 8"), signature));
  EXPECT_FALSE(verifier.verify("manifes", bytes_of("tpolicy 7"), signature));
  EXPECT_FALSE(verify(key_number(2).public_key(), "manifest", bytes, signature));
  for (std::size_t i = 0; i < 64; ++i) {
    Signature wrong = signature;
    wrong.bytes[i] ^= std::byte{1};
    EXPECT_FALSE(verifier.verify("manifest", bytes, wrong)) << i;
  }
  EXPECT_TRUE(verifier.verify("empty", {}, key.sign("empty", {})));
}

TEST(Signature, GeneratedKeysDiffer) {
  EXPECT_NE(SigningKey::generate().public_key(), SigningKey::generate().public_key());
}

TEST(Signature, InvalidKeysVerifyNothing) {
  PublicKey no_key;
  no_key.bytes.fill(std::byte{0xff});
  EXPECT_FALSE(verify(no_key, "manifest", {}, key_number(1).sign("manifest", {})));
}

TEST(SignatureDeathTest, ContextHasNoZeroByte) {
  EXPECT_DEATH((void)key_number(1).sign(std::string_view("a\0b", 3), {}), "context");
}

TEST(Signature, OneKeyInManyThreads) {
  const SigningKey key = key_number(1);
  const Verifier verifier(key.public_key());
  std::atomic<int> good = 0;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < 50; ++i) {
          const std::string text = fmt::format("{} {}", t, i);
          good += verifier.verify("test", bytes_of(text), key.sign("test", bytes_of(text)));
        }
      });
  }
  EXPECT_EQ(good, 200);
}

// ---- certificates ----

CertificateRequest worker_request(std::uint64_t worker) {
  return {.subject = key_number(5).public_key(),
          .kind = Kind::kWorker,
          .worker = WorkerId{worker},
          .serial = 42,
          .now_unix_s = kNow};
}

TEST(Certificate, NamesItsIdentity) {
  const Authority authority = authority_of("run 1");
  for (const std::uint64_t worker : {std::uint64_t{1}, std::uint64_t{77}, ~std::uint64_t{0}}) {
    const auto leaf = authority.issue(worker_request(worker));
    ASSERT_TRUE(leaf.has_value()) << leaf.error().message();
    EXPECT_LE(leaf->size(), kCertificateBytesMax);
    EXPECT_EQ(*leaf, *authority.issue(worker_request(worker))) << "deterministic";
    const auto identity = check_certificate(*leaf, authority.public_key(), "run 1", kNow);
    ASSERT_TRUE(identity.has_value()) << identity.error().message();
    const PeerIdentity expected{Kind::kWorker, WorkerId{worker}, 42, kNow + 3600, key_number(5).public_key()};
    EXPECT_EQ(*identity, expected);
    EXPECT_EQ(to_text(*identity), fmt::format("worker {}", worker));
  }
  const auto leaf = authority.issue({.subject = key_number(6).public_key(),
                                     .kind = Kind::kLearner,
                                     .serial = (std::uint64_t{1} << 63) - 1,
                                     .now_unix_s = 0,
                                     .lifetime = std::chrono::hours(24 * 365)});
  ASSERT_TRUE(leaf.has_value()) << leaf.error().message();
  const auto identity = check_certificate(*leaf, authority.public_key(), "run 1", 5.0);
  ASSERT_TRUE(identity.has_value()) << identity.error().message();
  EXPECT_EQ(identity->kind, Kind::kLearner);
  EXPECT_EQ(identity->worker, kLearnerId);
  EXPECT_EQ(identity->serial, (std::uint64_t{1} << 63) - 1);
  EXPECT_EQ(to_text(*identity), "the learner");
  EXPECT_EQ(to_text(PeerIdentity{}), "nobody");
}

TEST(Certificate, HoldsForItsTime) {
  const Authority authority = authority_of("run");
  const auto leaf = authority.issue(worker_request(1));
  const auto at = [&](std::optional<double> now) {
    return check_certificate(*leaf, authority.public_key(), "run", now);
  };
  EXPECT_TRUE(at(std::nullopt));
  EXPECT_TRUE(at(kNow - 300));
  EXPECT_TRUE(at(kNow + 3600));
  const auto early = at(kNow - 301), late = at(kNow + 3601.5);
  ASSERT_FALSE(early || late);
  EXPECT_EQ(early.error().code, Code::kStale);
  EXPECT_THAT(early.error().detail, HasSubstr("becomes valid in 1 s"));
  EXPECT_EQ(late.error().code, Code::kStale);
  EXPECT_THAT(late.error().detail, HasSubstr("worker 1 expired 2 s ago"));
  EXPECT_FALSE(at(std::numeric_limits<double>::quiet_NaN()));
  // After 2049, times have another format.
  auto far = worker_request(1);
  far.now_unix_s = 4e9;
  const auto later = check_certificate(*authority.issue(far), authority.public_key(), "run", 4e9);
  ASSERT_TRUE(later.has_value());
  EXPECT_EQ(later->expires_unix_s, 4e9 + 3600);
}

TEST(Certificate, AnotherAuthorityRunOrKindIsRefused) {
  const Authority authority = authority_of("run"), same_key = authority_of("other run");
  const Authority other = *Authority::create("run", key_number(9));
  const auto leaf = authority.issue(worker_request(1));
  const auto expect = [&](const std::vector<std::byte>& certificate, const Authority& by, Code code,
                          const std::string& text) {
    const auto identity = check_certificate(certificate, by.public_key(), by.run_id(), kNow);
    ASSERT_FALSE(identity.has_value());
    EXPECT_EQ(identity.error().code, code);
    EXPECT_THAT(identity.error().detail, HasSubstr(text));
  };
  expect(*leaf, other, Code::kInvalid, "found one of another");
  expect(*leaf, same_key, Code::kInvalid, "expected a certificate of run 'other run', found one of run 'run'");
  expect(authority.certificate(), authority, Code::kCorrupt, "found another kind");
  expect({}, authority, Code::kCorrupt, "found something else");
  auto longer = *leaf;
  longer.push_back(std::byte{0});
  expect(longer, authority, Code::kCorrupt, "found something else");
  expect(std::vector<std::byte>(kCertificateBytesMax + 1), authority, Code::kCorrupt, "at most 2048 bytes");
}

TEST(Certificate, EveryChangedBitIsNoticed) {
  const Authority authority = authority_of("run");
  const auto leaf = *authority.issue(worker_request(1));
  const auto right = *check_certificate(leaf, authority.public_key(), "run", kNow);
  for (std::size_t i = 0; i < leaf.size() * 8; ++i) {
    auto wrong = leaf;
    wrong[i / 8] ^= static_cast<std::byte>(1u << (i % 8));
    const auto identity = check_certificate(wrong, authority.public_key(), "run", kNow);
    // Other encodings of the same content are harmless.
    if (identity) {
      EXPECT_EQ(*identity, right) << "bit " << i;
    }
  }
}

TEST(Certificate, RequestsHaveLimits) {
  const Authority authority = authority_of("run");
  const auto refused = [&](auto change) {
    CertificateRequest request = worker_request(1);
    change(request);
    const auto leaf = authority.issue(request);
    return !leaf && leaf.error().code == Code::kInvalid;
  };
  EXPECT_FALSE(refused([](auto&) {}));
  EXPECT_TRUE(refused([](auto& r) { r.lifetime = kWorkerLifetimeMax + Duration(1); }));
  EXPECT_TRUE(refused([](auto& r) { r.lifetime = Duration{}; }));
  EXPECT_TRUE(refused([](auto& r) { r.serial = 0; }));
  EXPECT_TRUE(refused([](auto& r) { r.serial = std::uint64_t{1} << 63; }));
  EXPECT_TRUE(refused([](auto& r) { r.kind = Kind::kAnonymous; }));
  EXPECT_TRUE(refused([](auto& r) { r.kind = Kind::kLearner; }));
  EXPECT_TRUE(refused([](auto& r) { r.worker = kLearnerId; }));
  EXPECT_TRUE(refused([](auto& r) { r.now_unix_s = -1; }));
  EXPECT_TRUE(refused([](auto& r) { r.now_unix_s = 1e18; }));
  EXPECT_TRUE(refused([](auto& r) { r.now_unix_s = std::numeric_limits<double>::quiet_NaN(); }));
}

TEST(Authority, CertificateNamesItsKeyAndRun) {
  const Authority authority = authority_of("run 1");
  EXPECT_EQ(authority.certificate(), authority_of("run 1").certificate()) << "deterministic";
  const auto info = read_authority(authority.certificate());
  ASSERT_TRUE(info.has_value()) << info.error().message();
  EXPECT_EQ(info->key, authority.public_key());
  EXPECT_EQ(info->run_id, "run 1");
  EXPECT_EQ(fingerprint(info->key), authority.fingerprint());
  // A leaf is no authority.
  EXPECT_FALSE(read_authority(*authority.issue(worker_request(1))));
  EXPECT_FALSE(read_authority({}));
}

TEST(Authority, RunIdsHaveLimits) {
  for (const std::string& bad : {std::string(), std::string(65, 'a'), std::string("a\nb"), std::string("\xc3\xa4")}) {
    const auto authority = Authority::create(bad, key_number(0));
    ASSERT_FALSE(authority);
    EXPECT_EQ(authority.error().code, Code::kInvalid);
  }
  EXPECT_TRUE(Authority::create(std::string(64, '~'), key_number(0)));
}

// ---- the authority's files ----

class AuthorityFiles : public testing::Test {
 protected:
  ~AuthorityFiles() override { fs::remove_all(folder_); }
  static mode_t mode_of(const fs::path& path) {
    struct stat info {};
    return ::stat(path.c_str(), &info) == 0 ? info.st_mode & 0777 : 0;
  }
  void write(const fs::path& path, const std::string& text) { std::ofstream(path, std::ios::trunc) << text; }
  void expect_refused(Code code, const std::string& text, const std::string& run = "run") {
    const auto authority = Authority::open_or_create(folder_, run);
    ASSERT_FALSE(authority);
    EXPECT_EQ(authority.error().code, code) << authority.error().message();
    EXPECT_THAT(authority.error().message(), HasSubstr(text));
    EXPECT_THAT(authority.error().message(), Not(HasSubstr("PRIVATE")));
  }

  const fs::path folder_ = fs::path(testing::TempDir()) / fmt::format("echoline_authority_{}", getpid());
  const fs::path key_ = folder_ / "run.key", certificate_ = folder_ / "run.crt";
};

TEST_F(AuthorityFiles, AreCreatedOnceAndReadAgain) {
  const auto first = Authority::open_or_create(folder_, "run");
  ASSERT_TRUE(first.has_value()) << first.error().message();
  EXPECT_EQ(mode_of(key_), 0600u);
  EXPECT_EQ(mode_of(certificate_), 0644u);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 2) << "no temporary files";
  const auto second = Authority::open_or_create(folder_, "run");
  ASSERT_TRUE(second.has_value()) << second.error().message();
  EXPECT_EQ(first->public_key(), second->public_key());
  EXPECT_EQ(first->certificate(), second->certificate());
  fs::remove(certificate_);  // as after a crash between the two writes
  ASSERT_TRUE(Authority::open_or_create(folder_, "run"));
  EXPECT_TRUE(fs::exists(certificate_));
}

TEST_F(AuthorityFiles, ReadableByOthersAreRefused) {
  ASSERT_TRUE(Authority::open_or_create(folder_, "run"));
  for (const auto bit : {fs::perms::group_read, fs::perms::others_read, fs::perms::others_write}) {
    fs::permissions(key_, fs::perms::owner_read | fs::perms::owner_write | bit);
    expect_refused(Code::kInvalid, "only its owner can read (mode 600)");
  }
}

TEST_F(AuthorityFiles, FilesOfAnotherRunAreRefused) {
  ASSERT_TRUE(Authority::open_or_create(folder_, "run"));
  expect_refused(Code::kInvalid, "expected the key of run 'other', found that of run 'run'", "other");
}

TEST_F(AuthorityFiles, TornOrMixedAreRefused) {
  ASSERT_TRUE(Authority::open_or_create(folder_, "run"));
  const std::string whole = *read_file(key_);
  for (const std::size_t size : {std::size_t{0}, std::size_t{40}, whole.find("-----BEGIN CERT"), whole.size() - 40}) {
    write(key_, whole.substr(0, size));
    expect_refused(Code::kCorrupt, "run.key: expected an Ed25519 key and its certificate");
  }
  fs::create_directories(folder_ / "b");
  ASSERT_TRUE(Authority::open_or_create(folder_ / "b", "run"));
  const std::string other = *read_file(folder_ / "b" / "run.key");
  write(key_, whole.substr(0, whole.find("-----BEGIN CERT")) + other.substr(other.find("-----BEGIN CERT")));
  expect_refused(Code::kCorrupt, "the certificate does not belong to the key");
  write(key_, whole);
  write(certificate_, *read_file(folder_ / "b" / "run.crt"));
  expect_refused(Code::kCorrupt, "run.crt: expected the certificate in run.key");
  fs::remove(key_);
  fs::create_directories(key_);
  expect_refused(Code::kInvalid, "expected a plain file");
}

TEST_F(AuthorityFiles, CreatedAtOnceAreTheSame) {
  fs::create_directories(folder_);
  std::vector<PublicKey> keys(4);
  {
    std::vector<std::jthread> threads;
    for (PublicKey& key : keys)
      threads.emplace_back([&] {
        const auto authority = Authority::open_or_create(folder_, "run");
        if (authority) key = authority->public_key();
      });
  }
  for (const PublicKey& key : keys) EXPECT_EQ(key, keys[0]);
  EXPECT_NE(keys[0], PublicKey{});
}

// ---- tokens ----

TEST(Token, NamesItsRunAndInstance) {
  const Authority authority = authority_of("run");
  const Nonce nonce = from_hex<16>("000102030405060708090a0b0c0d0e0f");
  for (std::size_t size = 1; size <= kInstanceBytesMax; ++size) {
    const std::string instance(size, 'i');
    const auto text = issue_token(authority, instance, nonce, kNow);
    ASSERT_TRUE(text.has_value());
    EXPECT_TRUE(text->reveal().starts_with("echo1."));
    EXPECT_EQ(text->reveal().find_first_not_of("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_", 6),
              std::string_view::npos);
    const JoinToken expected{authority.fingerprint(), nonce, 1'700'000'600, instance};
    const auto read = read_token(*text);
    ASSERT_TRUE(read.has_value()) << read.error().message();
    EXPECT_EQ(*read, expected);
    const auto checked = check_token(*text, authority, kNow, instance);
    ASSERT_TRUE(checked.has_value()) << checked.error().message();
    EXPECT_EQ(*checked, expected);
  }
  EXPECT_NE(random_nonce(), random_nonce());
}

TEST(Token, HoldsForItsTimeInstanceAndRun) {
  const Authority authority = authority_of("run"), other = *Authority::create("run", key_number(3));
  const Secret text = *issue_token(authority, "vast-7", Nonce{}, kNow, std::chrono::seconds(60));
  const auto expect = [&](const Authority& by, double now, const std::string& instance, Code code) {
    const auto token = check_token(text, by, now, instance);
    ASSERT_FALSE(token.has_value());
    EXPECT_EQ(token.error().code, code) << token.error().message();
    EXPECT_THAT(token.error().message(), Not(HasSubstr("vast-7")));
  };
  EXPECT_TRUE(check_token(text, authority, kNow + 59.9, "vast-7"));
  expect(authority, kNow + 60, "vast-7", Code::kStale);
  expect(authority, kNow, "vast-8", Code::kInvalid);
  expect(other, kNow, "vast-7", Code::kCorrupt);
}

TEST(Token, EveryChangedCharacterIsRefusedAndNoneIsShown) {
  const Authority authority = authority_of("run");
  const Secret text = *issue_token(authority, "vast-7", random_nonce(), kNow);
  const auto expect_refused = [&](std::string changed) {
    const Secret wrong{std::string(changed)};
    const auto token = check_token(wrong, authority, kNow, "vast-7");
    ASSERT_FALSE(token.has_value()) << changed;
    EXPECT_THAT(token.error().message(), Not(HasSubstr(changed.substr(changed.size() / 2, 8)))) << changed;
  };
  const std::string whole(text.reveal());
  for (std::size_t i = 0; i < whole.size(); ++i) {
    for (const char c : {'A', 'z', '-', '_', '=', ' ', '\0', '\xff'}) {
      std::string changed = whole;
      changed[i] = c;
      if (changed != whole) expect_refused(changed);
    }
    if (i > 16) expect_refused(whole.substr(0, i));
  }
  expect_refused(whole + "A");
  expect_refused(whole + "=");
  expect_refused(whole + std::string(1 << 20, 'A'));
  EXPECT_FALSE(read_token(Secret()));
}

TEST(Token, RequestsHaveLimits) {
  const Authority authority = authority_of("run");
  for (const std::string& bad : {std::string(), std::string(129, 'a'), std::string("a\tb")})
    EXPECT_FALSE(issue_token(authority, bad, Nonce{}, kNow));
  EXPECT_FALSE(issue_token(authority, "a", Nonce{}, -1));
  EXPECT_FALSE(issue_token(authority, "a", Nonce{}, kNow, Duration{}));
}

}  // namespace
}  // namespace echoline::overlay::trust
