// S3's requests against the test server, which checks signatures and injects faults; and the whole store over it. With
// ECHOLINE_TEST_S3 (an endpoint) and ECHOLINE_TEST_BUCKET, the contract is checked against another server as well.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <random>

#include "store/s3_store.hpp"
#include "tests/store/contract.hpp"
#include "tests/store/s3_server.hpp"
#include "tests/store/world.hpp"

namespace echoline::store {
namespace {

class S3 : public testing::Test {
 protected:
  // A client whose pauses cost no time.
  std::unique_ptr<S3Store> client(const S3Server& server, std::uint64_t part_bytes = 32u << 20,
                                  const std::atomic<bool>* stop = nullptr) {
    S3Options options;
    options.url = server.endpoint() + "/" + server.settings().bucket;
    options.prefix = "runs/a/";
    options.region = server.settings().region;
    options.part_bytes = part_bytes;
    options.stop = stop;
    options.credentials = [&server, this]() -> Result<S3Credentials> {
      ++credentials_read_;
      return S3Credentials{.access_key = server.settings().access_key,
                           .secret_key = overlay::trust::Secret(std::string(server.settings().secret_key)),
                           .session_token = overlay::trust::Secret(std::string(token_))};
    };
    options.wait = [this](Duration pause) {
      pauses_.push_back(pause);
      return ok();
    };
    auto store = S3Store::make(std::move(options));
    EXPECT_TRUE(store) << store.error().message();
    return std::move(*store);
  }
  // The first `count` requests that begin with `prefix` have this fault.
  static std::function<S3Fault(const std::string&)> first(int count, const std::string& prefix, S3Fault fault) {
    auto left = std::make_shared<int>(count);
    return [left, prefix, fault](const std::string& request) {
      if (*left == 0 || request.rfind(prefix, 0) != 0) return S3Fault::kNone;
      --*left;
      return fault;
    };
  }

  std::string token_;
  int credentials_read_ = 0;
  std::vector<Duration> pauses_;
};

const std::string kLarge(700'000, 'l');

TEST_F(S3, KeepsTheContract) {
  S3Server::Settings settings;
  settings.page_keys = 2;
  S3Server server(settings);
  check_contract(*client(server, /*part_bytes=*/100'000), kLarge);
  EXPECT_EQ(server.requests()["refused"], 0u);
  EXPECT_EQ(server.uploads_in_parts(), 0u);
  EXPECT_TRUE(pauses_.empty());
}

TEST_F(S3, AnotherServerKeepsTheContract) {
  const char* const endpoint = std::getenv("ECHOLINE_TEST_S3");
  const char* const bucket = std::getenv("ECHOLINE_TEST_BUCKET");
  if (!endpoint || !bucket) GTEST_SKIP() << "ECHOLINE_TEST_S3 and ECHOLINE_TEST_BUCKET name no other server";
  auto store = open_object_store({.url = fmt::format("s3://{}/contract", bucket), .endpoint = endpoint});
  ASSERT_TRUE(store) << store.error().message();
  check_contract(**store, std::string(70u << 20, 'l'));  // three parts
}

TEST_F(S3, AWrongSecretIsAnErrorThatDoesNotShowIt) {
  S3Server server;
  S3Options options;
  options.url = server.endpoint() + "/" + server.settings().bucket;
  options.region = server.settings().region;
  options.wait = [](Duration) { return ok(); };
  options.credentials = [&server]() -> Result<S3Credentials> {
    return S3Credentials{.access_key = server.settings().access_key,
                         .secret_key = overlay::trust::Secret(std::string("hush-hush")),
                         .session_token = {}};
  };
  const auto store = S3Store::make(options);
  ASSERT_TRUE(store);
  const Status stored = (*store)->put("a", as_bytes("x"));
  ASSERT_FALSE(stored);
  EXPECT_EQ(stored.error().code, Code::kInvalid);
  EXPECT_NE(stored.error().message().find("SignatureDoesNotMatch"), std::string::npos) << stored.error().message();
  EXPECT_EQ(stored.error().message().find("hush"), std::string::npos);
}

TEST_F(S3, TemporaryFailuresAreTriedAgain) {
  for (const S3Fault fault : {S3Fault::kInternalError, S3Fault::kSlowDown, S3Fault::kLostAnswer}) {
    S3Server server;
    const auto store = client(server);
    pauses_.clear();
    server.set_fault(first(3, "PUT", fault));
    ASSERT_TRUE(store->put("a", as_bytes("x")));
    ASSERT_EQ(pauses_.size(), 3u);
    EXPECT_LT(pauses_[0], pauses_[2]);
    server.set_fault(first(3, "GET", fault));
    EXPECT_EQ(store->read("a", 9).value(), "x");
    server.set_fault(first(3, "LIST", fault));
    EXPECT_EQ(store->list("").value().size(), 1u);
    server.set_fault(first(3, "DELETE", fault));
    EXPECT_TRUE(store->remove("a"));
    EXPECT_TRUE(server.objects().empty());
  }
}

TEST_F(S3, AServiceThatStaysDownIsReported) {
  S3Server server;
  const auto store = client(server);
  server.set_fault(first(1000, "", S3Fault::kSlowDown));
  const Status stored = store->put("a", as_bytes("x"));
  ASSERT_FALSE(stored);
  EXPECT_EQ(stored.error().code, Code::kUnavailable);
  EXPECT_NE(stored.error().message().find("8 tries: it answers 503 SlowDown"), std::string::npos)
      << stored.error().message();
}

TEST_F(S3, ATruncatedBodyGoesOnByRange) {
  S3Server server;
  const auto store = client(server);
  std::string content;
  std::mt19937 random(1);
  for (int i = 0; i < 2'000'000; ++i) content += static_cast<char>(random());
  ASSERT_TRUE(store->put("a", as_bytes(content)));
  server.set_fault(first(5, "GET", S3Fault::kTruncatedBody));
  const auto read = store->read("a", content.size());
  ASSERT_TRUE(read) << read.error().message();
  EXPECT_TRUE(*read == content);
  EXPECT_EQ(server.requests()["GET"], 6u);
  // No byte is sent twice.
  EXPECT_EQ(store->traffic().bytes_received, content.size());
}

TEST_F(S3, AnObjectThatChangesDuringAReadIsNotMixed) {
  S3Server server;
  const auto store = client(server);
  ASSERT_TRUE(store->put("a", as_bytes(std::string(100'000, 'a'))));
  const auto other = client(server);
  server.set_fault(first(1, "GET", S3Fault::kTruncatedBody));
  bool is_replaced = false, is_stored = false;
  const auto read = store->get("a", 0, [&](std::span<const std::byte>) {
    if (!is_replaced) is_stored = other->put("a", as_bytes(std::string(100'000, 'b'))).has_value();
    is_replaced = true;
    return ok();
  });
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, Code::kStale);
}

TEST_F(S3, AServiceThatIgnoresRangesIsNotBelieved) {
  S3Server server;
  const auto store = client(server);
  ASSERT_TRUE(store->put("a", as_bytes("abcdef")));
  server.set_fault(first(1, "GET", S3Fault::kIgnoredRange));
  EXPECT_EQ(read_from(*store, "a", 2), std::string(to_string(Code::kUnavailable)));
}

TEST_F(S3, WrongEntityTagsOfPartsAreNoticed) {
  S3Server server;
  const auto store = client(server, 100'000);
  server.set_fault(first(1, "PUT", S3Fault::kWrongEtag));
  ASSERT_TRUE(store->put("a", as_bytes(kLarge)));  // the upload is begun again
  EXPECT_TRUE(store->read("a", kLarge.size()).value() == kLarge);
  EXPECT_EQ(server.uploads_in_parts(), 0u);
  server.set_fault(first(1000, "PUT", S3Fault::kWrongEtag));
  EXPECT_FALSE(store->put("b", as_bytes(kLarge)));
  EXPECT_EQ(server.uploads_in_parts(), 0u);  // aborted: parts cost money
  EXPECT_EQ(server.objects().count("runs/a/b"), 0u);
}

TEST_F(S3, ExpiredCredentialsAreReadAgain) {
  S3Server server;
  token_ = "first";
  server.set_session_token("first");
  const auto store = client(server);
  ASSERT_TRUE(store->put("a", as_bytes("x")));
  server.set_session_token("second");  // the first is refused from now on
  const Status refused = store->put("a", as_bytes("y"));
  ASSERT_FALSE(refused);  // the environment still has the first
  EXPECT_EQ(refused.error().code, Code::kInvalid);
  token_ = "second";  // another program has renewed the profile file
  EXPECT_TRUE(store->put("a", as_bytes("z")));
  EXPECT_EQ(credentials_read_, 3);
  server.set_fault(first(1, "PUT", S3Fault::kExpiredCredentials));
  EXPECT_EQ(store->put("a", as_bytes("w")).error().code, Code::kInvalid);
}

TEST_F(S3, AWrongRegionIsNamed) {
  S3Server server;
  const auto store = client(server);
  server.set_fault(first(1, "PUT", S3Fault::kWrongRegion));
  const Status stored = store->put("a", as_bytes("x"));
  ASSERT_FALSE(stored);
  EXPECT_NE(stored.error().message().find("the bucket's region is us-west-2"), std::string::npos)
      << stored.error().message();
}

TEST_F(S3, AStoppedClientEndsItsRequests) {
  S3Server server;
  std::atomic<bool> stop = true;
  EXPECT_EQ(client(server, 1 << 20, &stop)->put("a", as_bytes("x")).error().code, Code::kCancelled);
}

// ---- the store over S3 ----

TEST_F(S3, AServiceWithoutConditionalWritesIsRefused) {
  S3Server::Settings settings;
  settings.keeps_conditions = false;
  S3Server server(settings);
  const auto store = client(server);
  World world;
  const auto writer =
      PolicyWriter::open(*store, world.key, {.run_id = "run", .holder = kHolderA, .settings = {}, .resumed_at = {}},
                         world.clock, world.waiter());
  ASSERT_FALSE(writer);
  EXPECT_EQ(writer.error().code, Code::kInvalid);
}

// Each request fails with some probability in some way; publisher and reader get on without help.
TEST_F(S3, PublisherAndReaderGetOnWithABadService) {
  for (std::uint64_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    S3Server server;
    World world;
    world.settings.anchor_every = 4;
    world.settings.retention = {.deltas_kept = 6, .anchors_kept = 2};
    std::mt19937_64 random(seed);
    server.set_fault([&](const std::string&) {
      constexpr S3Fault kFaults[] = {S3Fault::kInternalError, S3Fault::kLostAnswer, S3Fault::kSlowDown,
                                     S3Fault::kTruncatedBody, S3Fault::kWrongEtag};
      const std::uint64_t draw = random() % 15;
      return draw < std::size(kFaults) ? kFaults[draw] : S3Fault::kNone;
    });
    const auto store = client(server, /*part_bytes=*/600);
    auto writer = PolicyWriter::open(
        *store, world.key, {.run_id = "run", .holder = kHolderA, .settings = world.settings, .resumed_at = {}},
        world.clock, world.waiter());
    ASSERT_TRUE(writer) << writer.error().message();
    for (std::uint64_t version = 0; version <= 9; ++version) {
      const auto base = (*writer)->newest();
      Status stored;
      // The outbox repeats a publication that fails.
      for (int tries = 0; tries < 20; ++tries) {
        stored =
            (*writer)->publish(Version{version}, version > 0 ? std::optional(Version{version - 1}) : std::nullopt,
                               base ? world.policies.delta(version - 1, version) : world.policies.snapshot(version));
        if (stored) break;
      }
      ASSERT_TRUE(stored) << stored.error().message();
      const auto reader = PolicyReader::open(*store, world.key.public_key());
      ASSERT_TRUE(reader) << reader.error().message();
      auto replica = Replica::open(world.folder("r"), **reader);
      ASSERT_TRUE(replica);
      const auto step = replica->follow();
      ASSERT_TRUE(step) << step.error().message();
      EXPECT_EQ(World::digest_in(world.folder("r")), world.policies.digest(version));
    }
  }
}

}  // namespace
}  // namespace echoline::store
