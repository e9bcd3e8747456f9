// The learner's outbox with a real store, threads and files; and the Python decoder on what it stores.
#include "store/outbox.hpp"

#include <array>
#include <chrono>
#include <cstdio>

#include "tests/store/s3_server.hpp"
#include "tests/store/world.hpp"

namespace echoline::store {
namespace {

namespace fs = std::filesystem;

constexpr Duration kPatience = std::chrono::seconds(30);

class OutboxTest : public testing::Test {
 protected:
  OutboxTest() {
    options_.settings.address.url = (world_.folder("store")).string();
    options_.settings.anchor_every = 4;
    options_.folder = world_.folder("outbox");
    options_.run_id = "run";
    options_.model_files = {{"config.json", "{}"}};
    options_.stored = [this](const StoredVersion& stored) {
      const std::lock_guard lock(mutex_);
      stored_.push_back(stored);
    };
  }
  std::unique_ptr<Outbox> open() {
    auto outbox = Outbox::open(world_.key, options_);
    EXPECT_TRUE(outbox) << outbox.error().message();
    return std::move(*outbox);
  }
  // As the learner's publisher does. Returns whether the outbox took the version.
  bool publish(Outbox& outbox, std::uint64_t version, std::optional<std::uint64_t> base) {
    bool is_taken = write(outbox, version, base);
    if (outbox.wants_anchor(Version{version})) is_taken |= write(outbox, version, std::nullopt);
    return is_taken;
  }
  bool write(Outbox& outbox, std::uint64_t version, std::optional<std::uint64_t> base) {
    const auto outgoing = outbox.begin(Version{version}, base ? std::optional(Version{*base}) : std::nullopt);
    if (!outgoing) return false;
    const auto patch = base ? world_.policies.delta(*base, version) : world_.policies.snapshot(version);
    outgoing->write(std::span(patch).first(patch.size() / 2));
    outgoing->write(std::span(patch).subspan(patch.size() / 2));
    outgoing->finish();
    return true;
  }
  void expect_newest(std::uint64_t version) {
    auto objects = open_object_store(options_.settings.address);
    ASSERT_TRUE(objects) << objects.error().message();
    const auto reader = PolicyReader::open(**objects, world_.key.public_key());
    ASSERT_TRUE(reader) << reader.error().message();
    auto replica = Replica::open(world_.folder("replica"), **reader);
    ASSERT_TRUE(replica) << replica.error().message();
    const auto step = replica->follow();
    ASSERT_TRUE(step) << step.error().message();
    EXPECT_EQ(step->name.version, Version{version});
    EXPECT_EQ(World::digest_in(world_.folder("replica")), world_.policies.digest(version));
  }
  std::size_t waiting_files() const {
    std::size_t files = 0;
    for (const auto& file : fs::directory_iterator(options_.folder)) files += file.path().extension() == ".patch";
    return files;
  }

  World world_;
  OutboxOptions options_;
  std::mutex mutex_;
  std::vector<StoredVersion> stored_;
};

TEST_F(OutboxTest, StoresEveryVersionAndAnchors) {
  const auto outbox = open();
  for (std::uint64_t version = 0; version <= 9; ++version)
    EXPECT_TRUE(publish(*outbox, version, version > 0 ? std::optional(version - 1) : std::nullopt));
  ASSERT_TRUE(outbox->wait_until_stored(kPatience));
  outbox->stop();
  EXPECT_EQ(waiting_files(), 0u);
  std::size_t snapshots = 0;
  for (const StoredVersion& stored : stored_) snapshots += stored.snapshot;
  EXPECT_EQ(snapshots, 3u);  // 0, 4 and 8
  EXPECT_EQ(stored_.size(), 12u);
  expect_newest(9);
  // Independent of this program.
  const std::string command = fmt::format("python3 tests/store/decode.py {} 2>&1", options_.settings.address.url);
  std::FILE* const decoder = ::popen(command.c_str(), "r");
  ASSERT_NE(decoder, nullptr);
  std::string printed;
  std::array<char, 4096> block{};
  while (const std::size_t count = std::fread(block.data(), 1, block.size(), decoder))
    printed.append(block.data(), count);
  EXPECT_EQ(::pclose(decoder), 0) << printed;
  std::string expected;
  for (std::uint64_t version = 0; version <= 9; ++version) {
    const std::string name = to_text(VersionName{.epoch = 0, .version = Version{version}});
    const std::string digest = world_.policies.digest(version).hex();
    if (version > 0) expected += fmt::format("{} delta {}\n", name, digest);
    if (version % 4 == 0) expected += fmt::format("{} snapshot {}\n", name, digest);
  }
  EXPECT_EQ(std::count(printed.begin(), printed.end(), '\n'), 12) << printed;
  for (std::size_t begin = 0; begin < expected.size();) {
    const std::size_t end = expected.find('\n', begin) + 1;
    EXPECT_NE(printed.find(expected.substr(begin, end - begin)), std::string::npos) << printed;
    begin = end;
  }
}

// The learner was killed before its versions were stored: the next one stores them.
TEST_F(OutboxTest, ARestartStoresWhatWasLeft) {
  S3Server server;
  ::setenv("AWS_ACCESS_KEY_ID", server.settings().access_key.c_str(), 1);
  ::setenv("AWS_SECRET_ACCESS_KEY", server.settings().secret_key.c_str(), 1);
  options_.settings.address = {.url = "s3://policies/run", .endpoint = server.endpoint(), .region = "eu-central-1"};
  server.set_fault([](const std::string& request) {
    return request.rfind("PUT run/deltas/", 0) == 0 ? S3Fault::kSlowDown : S3Fault::kNone;
  });
  {
    const auto outbox = open();
    for (std::uint64_t version = 0; version <= 3; ++version)
      EXPECT_TRUE(publish(*outbox, version, version > 0 ? std::optional(version - 1) : std::nullopt));
    while (outbox->waiting() > 3) EXPECT_FALSE(outbox->wait_until_stored(std::chrono::milliseconds(50)));
    outbox->stop();
    EXPECT_EQ(waiting_files(), 3u);
  }
  server.set_fault([](const std::string&) { return S3Fault::kNone; });
  options_.resumed_at = Version{2};  // version 3 is void: it is trained again
  const auto outbox = open();
  EXPECT_LE(waiting_files(), 2u);
  EXPECT_TRUE(publish(*outbox, 2, std::nullopt));
  EXPECT_TRUE(publish(*outbox, 3, 2));
  ASSERT_TRUE(outbox->wait_until_stored(kPatience));
  outbox->stop();
  expect_newest(3);
  EXPECT_EQ(server.requests()["refused"], 0u);
}

// The store is slower than training: versions are left out, and an anchor begins a new chain.
TEST_F(OutboxTest, AFullFolderLeavesVersionsOut) {
  options_.settings.address.url = "/proc/no-such-place/store";  // cannot be written
  options_.settings.backlog_max = Bytes{world_.policies.snapshot(0).size() + 1};
  const auto outbox = open();
  EXPECT_TRUE(publish(*outbox, 0, std::nullopt));
  EXPECT_TRUE(publish(*outbox, 1, 0));
  EXPECT_FALSE(publish(*outbox, 2, 1));
  EXPECT_FALSE(publish(*outbox, 3, 2));
  EXPECT_TRUE(outbox->wants_anchor(Version{3}));
  EXPECT_EQ(outbox->waiting(), 2u);
  outbox->stop();
  options_.settings.address.url = world_.folder("store").string();
  options_.resumed_at = Version{3};
  const auto next = open();
  ASSERT_TRUE(next->wait_until_stored(kPatience));
  EXPECT_FALSE(write(*next, 4, 3));
  EXPECT_TRUE(publish(*next, 4, 3));  // as an anchor
  ASSERT_TRUE(next->wait_until_stored(kPatience));
  expect_newest(4);
}

TEST_F(OutboxTest, AMissingBaseNeedsASnapshot) {
  const auto outbox = open();
  EXPECT_FALSE(write(*outbox, 5, 4));
  EXPECT_TRUE(outbox->wants_anchor(Version{5}));
  EXPECT_TRUE(write(*outbox, 5, std::nullopt));
  EXPECT_FALSE(outbox->wants_anchor(Version{5}));
  EXPECT_TRUE(outbox->wait_until_stored(kPatience));
  expect_newest(5);
}

// A publication that ends in the middle is no version, and its base is not one for the next.
TEST_F(OutboxTest, AnAbortedPublicationIsLeftOut) {
  const auto outbox = open();
  EXPECT_TRUE(publish(*outbox, 0, std::nullopt));
  {
    const auto outgoing = outbox->begin(Version{1}, Version{0});
    ASSERT_TRUE(outgoing);
    outgoing->write(world_.policies.delta(0, 1));
  }
  EXPECT_EQ(outbox->begin(Version{2}, Version{1}), nullptr);
  EXPECT_TRUE(outbox->wait_until_stored(kPatience));
  expect_newest(0);
  EXPECT_EQ(waiting_files(), 0u);
}

TEST_F(OutboxTest, ASecondLearnerIsHeldOff) {
  const auto outbox = open();
  EXPECT_TRUE(publish(*outbox, 0, std::nullopt));
  ASSERT_TRUE(outbox->wait_until_stored(kPatience));
  options_.folder = world_.folder("other");
  options_.settings.lease = std::chrono::seconds(5);
  const auto second = open();
  EXPECT_TRUE(publish(*second, 0, std::nullopt));
  EXPECT_FALSE(second->wait_until_stored(std::chrono::milliseconds(500)));
  second->stop();
  EXPECT_TRUE(publish(*outbox, 1, 0));
  ASSERT_TRUE(outbox->wait_until_stored(kPatience));
  expect_newest(1);
}

}  // namespace
}  // namespace echoline::store
