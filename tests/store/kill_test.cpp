// A publisher and three replicas, each killed at random requests. No replica ever has a wrong policy, no published
// version is lost, and at the end all are current without help.
#include <random>

#include "tests/store/world.hpp"

namespace echoline::store {
namespace {

constexpr std::uint64_t kSeeds = 400;
constexpr std::uint64_t kVersions = 14;
constexpr int kReplicas = 3;

// One learner's life: it goes on from its checkpoint, publishes, and dies at some request.
class Scenario {
 public:
  explicit Scenario(std::uint64_t seed) : random_(seed), old_(world_.objects) {
    world_.settings.anchor_every = 1 + static_cast<std::uint32_t>(random_() % 5);
    world_.settings.retention.deltas_kept = 3 + static_cast<std::uint32_t>(random_() % 10);
    world_.settings.retention.anchors_kept = 1 + static_cast<std::uint32_t>(random_() % 3);
  }

  void run() {
    for (int rounds = 0; published_ < kVersions && rounds < 200; ++rounds) {
      publish(random_() % 4 == 0 ? MemoryStore::kUnlimited : 1 + random_() % 40);
      for (int replica = 0; replica < kReplicas; ++replica)
        if (random_() % 2 == 0) follow(replica, 1 + random_() % 8);
      if (testing::Test::HasFailure()) return;
    }
    ASSERT_EQ(published_, kVersions);
    for (int replica = 0; replica < kReplicas; ++replica) {
      follow(replica, MemoryStore::kUnlimited);
      EXPECT_EQ(installed(replica), world_.policies.digest(published_)) << "replica " << replica;
    }
    check_kept_versions();
  }

 private:
  // A client that is killed after some requests, with or without the effect of the last one.
  MemoryStore client(std::uint64_t requests) {
    MemoryStore store(world_.objects);
    store.requests_left = requests;
    store.last_has_effect = random_() % 2 == 0;
    store.torn_bytes = random_() % 300;
    if (random_() % 3 == 0) {
      store.lists_are_old = true;
    } else {
      world_.objects.earlier = world_.objects.objects;
    }
    return store;
  }

  void publish(std::uint64_t requests) {
    MemoryStore store = client(requests);
    auto writer = world_.open_writer(store, Version{trained_});
    if (!writer) return is_killed(writer.error());
    while (published_ < kVersions) {
      const bool is_first = published_ == 0 && !has_first_;
      const std::uint64_t next = is_first ? 0 : published_ + 1;
      trained_ = next;
      // The outbox keeps a version until it is stored, so after a kill it is published again.
      const Status stored =
          (*writer)->publish(Version{next}, is_first ? std::nullopt : std::optional(Version{published_}),
                             is_first ? world_.policies.snapshot(next) : world_.policies.delta(published_, next));
      if (!stored) return is_killed(stored.error());
      published_ = next;
      has_first_ = true;
      if ((*writer)->wants_anchor())
        if (const Status anchor = (*writer)->publish(Version{next}, std::nullopt, world_.policies.snapshot(next));
            !anchor)
          return is_killed(anchor.error());
      check_published();
      if (testing::Test::HasFailure()) return;
    }
  }
  static void is_killed(const Error& error) { EXPECT_EQ(error.code, Code::kCancelled) << error.message(); }

  // A reader now gets the version that publish() has acknowledged.
  void check_published() {
    MemoryStore store(world_.objects);
    const auto reader = PolicyReader::open(store);
    ASSERT_TRUE(reader) << reader.error().message();
    const auto latest = (*reader)->latest();
    ASSERT_TRUE(latest) << latest.error().message();
    EXPECT_EQ(latest->newest.name.version, Version{published_});
    EXPECT_EQ(latest->newest.digest, world_.policies.digest(published_));
    EXPECT_TRUE((*reader)->path_to(latest->newest, std::nullopt, latest->anchor));
  }

  void follow(int replica, std::uint64_t requests) {
    MemoryStore store = client(requests);
    const auto reader = PolicyReader::open(store, world_.key.public_key());
    if (!reader) {
      EXPECT_TRUE(reader.error().code == Code::kCancelled || reader.error().code == Code::kNotFound)
          << reader.error().message();
      return;
    }
    auto opened = Replica::open(folder(replica), **reader);
    ASSERT_TRUE(opened) << opened.error().message();
    const auto step = opened->follow();
    if (!step) {
      EXPECT_TRUE(step.error().code == Code::kCancelled || step.error().code == Code::kNotFound)
          << step.error().message();
    } else {
      EXPECT_EQ(installed(replica), world_.policies.digest(step->name.version.value));
    }
    // Also after a kill: what the replica says it has, it has.
    if (opened->held()) {
      EXPECT_EQ(installed(replica), world_.policies.digest(opened->held()->name.version.value));
    }
  }

  void check_kept_versions() {
    MemoryStore store(world_.objects);
    const auto reader = PolicyReader::open(store);
    ASSERT_TRUE(reader);
    const auto kept = (*reader)->contents();
    ASSERT_TRUE(kept) << kept.error().message();
    EXPECT_GE(kept->size(), world_.settings.retention.deltas_kept);
    for (const auto& [entry, manifest] : *kept) {
      const auto path = (*reader)->path_to(manifest, std::nullopt);
      ASSERT_TRUE(path) << manifest.key() << ": " << path.error().message();
      auto replica = Replica::open(world_.folder("fetched"), **reader);
      ASSERT_TRUE(replica);
      const auto step = replica->install(manifest);
      ASSERT_TRUE(step) << step.error().message();
      EXPECT_EQ(World::digest_in(world_.folder("fetched")), world_.policies.digest(manifest.name.version.value));
    }
    // Nothing that was half written is left when the next learner starts.
    auto writer = world_.open_writer(store, Version{published_});
    ASSERT_TRUE(writer) << writer.error().message();
    std::size_t objects = 0;
    for (const auto& [key, content] : world_.objects.objects) objects += parse_publication_key(key).has_value();
    EXPECT_EQ(objects, 3 * (*writer)->contents().size());
  }

  std::filesystem::path folder(int replica) const { return world_.folder(fmt::format("replica-{}", replica)); }
  delta::Digest installed(int replica) const { return World::digest_in(folder(replica)); }

  World world_;
  std::mt19937_64 random_;
  MemoryStore old_;
  std::uint64_t trained_ = 0;    // the newest version that the learner gave to the store
  bool has_first_ = false;       // the store has acknowledged version 0
  std::uint64_t published_ = 0;  // the newest version that the store has acknowledged
};

TEST(Kills, NeverAWrongPolicyAndNeverALostVersion) {
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Scenario(seed).run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace echoline::store
