// The publisher of a store and its readers.
#include <algorithm>

#include "base/files.hpp"
#include "tests/store/world.hpp"

namespace echoline::store {
namespace {

class PolicyStore : public testing::Test {
 protected:
  void open(Version resumed_at = {}) {
    auto opened = world_.open_writer(store_, resumed_at);
    ASSERT_TRUE(opened) << opened.error().message();
    writer_ = std::move(*opened);
  }
  // As the learner does: a snapshot first, then deltas, and a snapshot when the store wants one.
  void publish(std::uint64_t version, std::uint64_t branch = 0) {
    const auto newest = writer_->newest();
    const bool is_first = !newest || newest->value >= version;
    const std::optional<Version> base = is_first ? std::nullopt : newest;
    const Status stored =
        writer_->publish(Version{version}, base,
                         base ? policies().delta(base->value, version, branch) : policies().snapshot(version, branch));
    ASSERT_TRUE(stored) << stored.error().message();
    if (writer_->wants_anchor()) {
      ASSERT_TRUE(writer_->publish(Version{version}, std::nullopt, policies().snapshot(version, branch)));
    }
  }
  void publish_to(std::uint64_t last) {
    for (std::uint64_t version = writer_->newest() ? writer_->newest()->value + 1 : 0; version <= last; ++version)
      publish(version);
  }
  std::unique_ptr<PolicyReader> reader() {
    auto opened = PolicyReader::open(store_, world_.key.public_key());
    EXPECT_TRUE(opened) << opened.error().message();
    return std::move(*opened);
  }
  Result<ReplicaStep> follow(const std::string& name) {
    ECHO_ASSIGN(const auto reader, PolicyReader::open(store_, world_.key.public_key()));
    ECHO_ASSIGN(Replica replica, Replica::open(world_.folder(name), *reader));
    return replica.follow();
  }
  Policies& policies() { return world_.policies; }
  std::string& object(const std::string& key) { return world_.objects.objects.at(key); }
  bool has(const std::string& key) const { return world_.objects.objects.count(key) > 0; }

  World world_;
  MemoryStore store_{world_.objects};
  std::unique_ptr<PolicyWriter> writer_;
};

TEST_F(PolicyStore, AReplicaFollowsEachVersionByOneDelta) {
  open();
  publish(0);
  auto step = follow("r");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->snapshots, 1u);
  for (std::uint64_t version = 1; version <= 4; ++version) {
    publish(version);
    step = follow("r");
    ASSERT_TRUE(step) << step.error().message();
    EXPECT_EQ(step->snapshots, 0u);
    EXPECT_EQ(step->deltas, 1u);
    EXPECT_EQ(step->name.version, Version{version});
    EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(version));
  }
  EXPECT_EQ(follow("r")->deltas, 0u);  // current
}

TEST_F(PolicyStore, APublicationTakesFourRequestsAndTheLease) {
  open();
  publish_to(2);
  std::vector<std::string> requests;
  store_.observer = [&](const std::string& request) { requests.push_back(request); };
  publish(3);
  const std::string folder = "deltas/00000000.000000000003";
  EXPECT_EQ(requests,
            (std::vector<std::string>{"put " + folder + "/000000000001.patch", "put_if_absent " + folder + "/manifest",
                                      "put " + folder + "/ready", "put latest"}));
  // After a third of the lease, the next request renews it.
  world_.clock.advance(std::chrono::seconds(11));
  requests.clear();
  publish(4);
  EXPECT_EQ(requests.size(), 6u);
}

TEST_F(PolicyStore, AFollowerNeedsTwoRequestsPerVersionAfterItsStart) {
  open();
  publish_to(1);
  const auto reader = this->reader();
  auto replica = Replica::open(world_.folder("r"), *reader);
  ASSERT_TRUE(replica);
  ASSERT_TRUE(replica->follow());
  publish(2);
  std::vector<std::string> requests;
  store_.observer = [&](const std::string& request) { requests.push_back(request); };
  ASSERT_TRUE(replica->follow());
  EXPECT_EQ(requests, (std::vector<std::string>{"get latest", "get deltas/00000000.000000000002/000000000001.patch",
                                                "get model/files"}));
}

TEST_F(PolicyStore, ALateReaderTakesTheNewestAnchor) {
  world_.settings.anchor_every = 5;
  open();
  publish_to(12);
  EXPECT_TRUE(has("snapshots/00000000.000000000005/ready"));
  EXPECT_TRUE(has("snapshots/00000000.000000000010/ready"));
  EXPECT_TRUE(has("deltas/00000000.000000000010/ready"));
  const auto step = follow("r");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->snapshots, 1u);
  EXPECT_EQ(step->deltas, 2u);
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(12));
}

// Eight small deltas cost less than an anchor, even beyond one.
TEST_F(PolicyStore, AReaderThatMissedVersionsTakesTheCheapestWay) {
  world_.settings.anchor_every = 5;
  open();
  publish_to(3);
  ASSERT_TRUE(follow("r"));
  publish_to(11);
  const auto step = follow("r");
  ASSERT_TRUE(step) << step.error().message();
  const std::size_t anchor_bytes = policies().snapshot(10).size(), delta_bytes = policies().delta(3, 4).size();
  ASSERT_GT(delta_bytes * 7, anchor_bytes);  // the anchor of version 10 and one delta are cheaper
  EXPECT_EQ(step->snapshots, 1u);
  EXPECT_EQ(step->deltas, 1u);
  const Latest latest = *reader()->latest();
  const HeldVersion held{.name = {.epoch = 0, .version = Version{8}}, .digest = policies().digest(8)};
  const auto path = reader()->path_to(latest.newest, held, latest.anchor);
  ASSERT_TRUE(path);
  EXPECT_EQ(path->size(), 3u);  // 9, 10, 11: three deltas are cheaper than an anchor and one
  EXPECT_FALSE(path->front().is_snapshot());
}

TEST_F(PolicyStore, ADamagedDeltaIsBypassedByTheAnchor) {
  world_.settings.anchor_every = 3;
  open();
  publish_to(2);
  ASSERT_TRUE(follow("r"));
  publish_to(4);  // with an anchor at 3
  object("deltas/00000000.000000000003/000000000001.patch")[100] ^= 1;
  const auto step = follow("r");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->snapshots, 1u);
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(4));
}

TEST_F(PolicyStore, ADamagedAnchorIsBypassedByAnEarlierOne) {
  world_.settings.anchor_every = 3;
  open();
  publish_to(7);
  object("snapshots/00000000.000000000006/000000000001.patch")[200] ^= 1;
  const auto step = follow("r");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->snapshots, 1u);
  EXPECT_EQ(step->deltas, 4u);  // from the anchor of version 3
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(7));
}

// A store whose owner is dishonest cannot make a reader install anything that the run's key has not signed.
TEST_F(PolicyStore, NothingUnsignedIsInstalled) {
  open();
  publish_to(2);
  ASSERT_TRUE(follow("r"));
  publish(3);
  const overlay::trust::SigningKey other = overlay::trust::SigningKey::generate();
  Manifest forged = reader()->latest()->newest;
  const Manifest anchor = reader()->latest()->anchor;
  object("latest") = sign(forged, other) + sign(anchor, other);
  EXPECT_EQ(follow("r").error().code, Code::kCorrupt);
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(2));
}

TEST_F(PolicyStore, AWrongBaseIsReplacedByTheAnchor) {
  open();
  publish_to(2);
  ASSERT_TRUE(follow("r"));
  publish(3);
  // Something else has written to the weights.
  const auto file = world_.folder("r") / "model.safetensors";
  std::string bytes = *read_file(file);
  bytes[bytes.size() - 2] ^= 1;
  ASSERT_TRUE(write_file_atomic(file, bytes));
  const auto step = follow("r");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->snapshots, 1u);
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(3));
}

TEST_F(PolicyStore, AnInterruptedDownloadGoesOnByRange) {
  open();
  publish(0);
  MemoryStore torn(world_.objects);
  const auto reader = PolicyReader::open(torn, world_.key.public_key());
  ASSERT_TRUE(reader);
  const Manifest manifest = (*reader)->latest()->newest;
  torn.requests_left = 1;
  torn.torn_bytes = 100;
  const auto file = world_.folder("patch");
  EXPECT_EQ((*reader)->download(manifest, file).error().code, Code::kCancelled);
  EXPECT_EQ(std::filesystem::file_size(file), 100u);
  std::uint64_t received = 0;
  torn.requests_left = MemoryStore::kUnlimited;
  ASSERT_TRUE((*reader)->download(manifest, file));
  received = std::filesystem::file_size(file);
  EXPECT_EQ(received, manifest.patch_bytes);
}

TEST_F(PolicyStore, AnOldLatestTakesNoReaderBack) {
  open();
  publish_to(2);
  const std::string old = object("latest");
  publish(3);
  ASSERT_TRUE(follow("r"));
  object("latest") = old;
  const auto step = follow("r");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->name.version, Version{3});
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(3));
}

// The learner goes back to a checkpoint: what it had published later is void, and readers go with it.
TEST_F(PolicyStore, AResumeBehindAPublishedVersionBeginsAnEpoch) {
  policies().set_fork(3);
  open();
  publish_to(5);
  ASSERT_TRUE(follow("r"));
  writer_.reset();
  open(Version{3});
  EXPECT_EQ(writer_->epoch(), 1u);
  publish(3, 1);
  publish(4, 1);
  const auto step = follow("r");
  ASSERT_TRUE(step) << step.error().message();
  EXPECT_EQ(step->name, (VersionName{.epoch = 1, .version = Version{4}}));
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(4, 1));
  EXPECT_NE(policies().digest(4, 1), policies().digest(4, 0));
  EXPECT_EQ(reader()->find(Version{4})->name.epoch, 1u);
  EXPECT_EQ(reader()->find(Version{5})->name.epoch, 0u);
}

TEST_F(PolicyStore, AResumeAtTheNewestVersionPublishesNothingAgain) {
  open();
  publish_to(3);
  writer_.reset();
  open(Version{3});
  EXPECT_EQ(writer_->epoch(), 0u);
  std::vector<std::string> requests;
  store_.observer = [&](const std::string& request) { requests.push_back(request); };
  ASSERT_TRUE(writer_->publish(Version{3}, std::nullopt, policies().snapshot(3)));
  EXPECT_EQ(requests.size(), 0u);
  publish(4);
  EXPECT_EQ(follow("r")->name.version, Version{4});
}

TEST_F(PolicyStore, ADeltaWithoutItsBaseIsRefused) {
  open();
  publish_to(2);
  const Status missing = writer_->publish(Version{4}, Version{3}, policies().delta(3, 4));
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, Code::kNotFound);
  EXPECT_TRUE(writer_->publish(Version{4}, std::nullopt, policies().snapshot(4)));
  EXPECT_EQ(follow("r")->name.version, Version{4});
}

TEST_F(PolicyStore, APrefixBelongsToOneRun) {
  open();
  world_.key = overlay::trust::SigningKey::generate();
  EXPECT_EQ(world_.open_writer(store_).error().code, Code::kInvalid);
  EXPECT_EQ(PolicyReader::open(store_, world_.key.public_key()).error().code, Code::kInvalid);
}

TEST_F(PolicyStore, FilesOfTheModelAreStoredOnce) {
  open();
  publish(0);
  ASSERT_TRUE(writer_->publish_files({{"config.json", "{}"}, {"tokenizer.json", "[1]"}}));
  std::vector<std::string> requests;
  store_.observer = [&](const std::string& request) { requests.push_back(request); };
  ASSERT_TRUE(writer_->publish_files({{"config.json", "{}"}, {"tokenizer.json", "[1]"}}));
  EXPECT_EQ(requests, std::vector<std::string>{"get model/files"});
  store_.observer = [](const std::string&) {};
  ASSERT_TRUE(follow("r"));
  EXPECT_EQ(*read_file(world_.folder("r") / "config.json"), "{}");
  EXPECT_EQ(*read_file(world_.folder("r") / "tokenizer.json"), "[1]");
}

TEST_F(PolicyStore, AForeignFolderIsNotTouched) {
  open();
  publish(0);
  std::filesystem::create_directories(world_.folder("mine"));
  ASSERT_TRUE(write_file_atomic(world_.folder("mine") / "notes", "x"));
  EXPECT_EQ(follow("mine").error().code, Code::kInvalid);
}

// ---- the lease ----

TEST_F(PolicyStore, ASecondPublisherIsRefused) {
  open();
  MemoryStore second(world_.objects);
  // The first publisher renews while the second one watches.
  second.observer = [&](const std::string& request) {
    if (request != "get " + lease_key(1)) return;
    EXPECT_TRUE(writer_->lease().renew());
  };
  const auto refused = world_.open_writer(second, {}, kHolderB);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kUnavailable);
}

TEST_F(PolicyStore, APublisherThatEndedIsSucceededAtOnce) {
  open();
  publish(0);
  ASSERT_TRUE(writer_->lease().end());
  MemoryStore second(world_.objects);
  const TimePoint before = world_.clock.now();
  ASSERT_TRUE(world_.open_writer(second, {}, kHolderB));
  EXPECT_EQ(world_.clock.now(), before);
}

TEST_F(PolicyStore, APublisherThatWasLostIsSucceededAfterItsLease) {
  open();
  publish_to(2);
  MemoryStore second(world_.objects);
  const TimePoint before = world_.clock.now();
  auto successor = world_.open_writer(second, Version{2}, kHolderB);
  ASSERT_TRUE(successor) << successor.error().message();
  EXPECT_GE(world_.clock.now() - before, world_.settings.lease);
  ASSERT_TRUE((*successor)->publish(Version{3}, Version{2}, policies().delta(2, 3)));
  // The lost one comes back. It can neither renew nor publish.
  EXPECT_EQ(writer_->lease().check().error().code, Code::kStale);
  EXPECT_EQ(writer_->publish(Version{3}, Version{2}, policies().delta(2, 3)).error().code, Code::kStale);
  ASSERT_TRUE(follow("r"));
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(3));
}

// Its last request was on the way for longer than the lease: the manifest exists already, so it has no effect.
TEST_F(PolicyStore, ALateManifestOfALostPublisherHasNoEffect) {
  open();
  publish_to(2);
  MemoryStore second(world_.objects);
  bool is_late = false;
  store_.observer = [&](const std::string& request) {
    if (is_late || !request.starts_with("put_if_absent deltas/")) return;
    is_late = true;
    world_.clock.advance(world_.settings.lease);
    auto successor = world_.open_writer(second, Version{2}, kHolderB);
    ASSERT_TRUE(successor) << successor.error().message();
    policies().set_fork(2);
    ASSERT_TRUE((*successor)->publish(Version{3}, Version{2}, policies().delta(2, 3, 1)));
  };
  EXPECT_EQ(writer_->publish(Version{3}, Version{2}, policies().delta(2, 3)).error().code, Code::kStale);
  ASSERT_TRUE(follow("r"));
  EXPECT_EQ(World::digest_in(world_.folder("r")), policies().digest(3, 1));
}

TEST_F(PolicyStore, AServiceWithoutConditionalWritesIsRefused) {
  store_.ignores_conditions = true;
  const auto refused = world_.open_writer(store_);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, Code::kInvalid);
  EXPECT_NE(refused.error().message().find("If-None-Match"), std::string::npos) << refused.error().message();
}

// ---- old lists ----

TEST_F(PolicyStore, AnOldListLosesNoVersion) {
  world_.settings.anchor_every = 4;
  open();
  publish_to(6);
  const auto complete = world_.objects.objects;
  // Lists that lack each single object, and everything after each point of the history.
  for (const auto& [missing, content] : complete) {
    for (const bool all_later : {false, true}) {
      world_.objects.objects = complete;
      world_.objects.earlier = complete;
      for (auto object = world_.objects.earlier.begin(); object != world_.objects.earlier.end();)
        object = object->first == missing || (all_later && object->first >= missing)
                     ? world_.objects.earlier.erase(object)
                     : std::next(object);
      MemoryStore old(world_.objects);
      old.lists_are_old = true;
      auto writer = world_.open_writer(old, Version{6});
      ASSERT_TRUE(writer) << missing << ": " << writer.error().message();
      EXPECT_EQ((*writer)->epoch(), 0u) << missing;
      EXPECT_EQ((*writer)->newest(), Version{6}) << missing;
      ASSERT_TRUE((*writer)->publish(Version{7}, Version{6}, policies().delta(6, 7))) << missing;
      for (const auto& [key, before] : complete) {
        const bool is_pointer = key == "latest" || key.starts_with("lease/");
        EXPECT_TRUE(is_pointer || world_.objects.objects[key] == before) << missing << ": " << key;
      }
    }
  }
}

}  // namespace
}  // namespace echoline::store
