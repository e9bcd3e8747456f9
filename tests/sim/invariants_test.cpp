// Every invariant is broken on purpose once, because a rule that cannot fail protects nothing.
#include "sim/invariants.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/log.hpp"

namespace echoline::sim {
namespace {

using namespace overlay;
using std::chrono::milliseconds;
using std::chrono::seconds;

// A small healthy fleet under watch.
class WatchedFleet : public testing::Test {
 protected:
  WatchedFleet() : world_(options()), fleet_(world_, fleet_options()), invariants_(world_, fleet_) {
    log::configure(log::Level::kOff, "simulation");
    world_.set_observer(&invariants_);
    fleet_.set_observer(&invariants_);
    fleet_.start_learner();
    WorkerOptions o;
    o.enrols = false;
    o.link = {BitRate::from_mbit_per_s(50), BitRate::from_mbit_per_s(50)};
    for (int i = 0; i < 4; ++i) fleet_.start_worker(fleet_.add_worker(o));
    run(seconds(1));
  }
  static WorldOptions options() {
    WorldOptions o;
    o.delay = milliseconds(10);
    return o;
  }
  static FleetOptions fleet_options() {
    FleetOptions o;
    o.learner.uplink_min = o.learner.chain_rate;
    o.learner.network.heartbeat_timeout = seconds(5);
    return o;
  }
  void run(Duration time) { world_.run(world_.now() + time); }
  void publish(std::uint64_t bytes = 400'000) {
    PublishSpec spec;
    spec.base = fleet_.newest();
    spec.bytes = bytes;
    fleet_.publish(spec);
  }
  // The rules that were violated.
  std::set<std::string> violated_rules() const {
    std::set<std::string> rules;
    for (const Violation& v : invariants_.violations()) rules.insert(v.rule);
    return rules;
  }
  // Makes a worker misbehave while the invariants take it for honest.
  void corrupt(std::size_t worker, MaliceOptions malice) {
    malice.parents = [this, worker] { return fleet_.parents_of(worker); };
    world_.set_rewriter(fleet_.worker(worker).host, std::make_unique<MaliciousRewriter>(malice, 1, 1));
  }
  // A worker that forwards to another one.
  std::size_t forwarding_worker() {
    for (const auto& chain : fleet_.learner()->topology().chains)
      if (chain.size() > 1) return *fleet_.worker_with_id(chain.front());
    ADD_FAILURE() << "no worker forwards";
    return 0;
  }
  const PublishedContent::Publication& published(Version version, PublicationId& id) const {
    for (const auto& [key, p] : fleet_.published_content().all())
      if (p.key.version == version) {
        id = key;
        return p;
      }
    return fleet_.published_content().all().begin()->second;
  }

  World world_;
  Fleet fleet_;
  Invariants invariants_;
};

TEST_F(WatchedFleet, AHealthyFleetBreaksNothing) {
  publish();
  run(seconds(2));
  publish();
  run(seconds(2));
  invariants_.check_learner_statistics();
  invariants_.check_liveness();
  EXPECT_THAT(violated_rules(), testing::IsEmpty());
  EXPECT_EQ(invariants_.counts().deliveries, 8u);
  EXPECT_EQ(invariants_.counts().learner_wasted_bytes, 0u);
}

TEST_F(WatchedFleet, BytesThatChangeOnTheWay) {
  MaliceOptions malice;
  malice.flip_share = 1;
  corrupt(forwarding_worker(), malice);
  publish();
  run(seconds(3));
  EXPECT_TRUE(violated_rules().contains(Invariants::kBytes));
}

TEST_F(WatchedFleet, BytesThatReachTheApplication) {
  publish();
  run(seconds(2));
  ASSERT_THAT(violated_rules(), testing::IsEmpty());
  PublicationId id{};
  const PublishedContent::Publication& p = published(Version{0}, id);
  act::DeliverPublication delivery;
  delivery.publication.version = Version{0};
  delivery.publication.policy_digest = *p.policy_digest;
  std::vector<Slice> pieces;
  for (const SealedChunk& chunk : p.chunks) pieces.push_back(chunk.data);
  delivery.publication.payload = Payload(pieces);
  invariants_.on_delivered(0, delivery);
  ASSERT_THAT(violated_rules(), testing::IsEmpty());
  std::vector<std::byte> other(pieces[1].bytes().begin(), pieces[1].bytes().end());
  other[17] ^= std::byte{1};
  pieces[1] = Slice(std::move(other));
  delivery.publication.payload = Payload(pieces);
  invariants_.on_delivered(0, delivery);
  EXPECT_TRUE(violated_rules().contains(Invariants::kBytes));
}

TEST_F(WatchedFleet, AWrongDigestReachesTheApplication) {
  publish();
  run(seconds(2));
  PublicationId id{};
  const PublishedContent::Publication& p = published(Version{0}, id);
  act::DeliverPublication delivery;
  std::vector<Slice> pieces;
  for (const SealedChunk& chunk : p.chunks) pieces.push_back(chunk.data);
  delivery.publication.payload = Payload(pieces);
  delivery.publication.policy_digest = *p.policy_digest;
  delivery.publication.policy_digest[3] ^= std::byte{1};
  invariants_.on_delivered(0, delivery);
  EXPECT_TRUE(violated_rules().contains(Invariants::kBytes));
}

TEST_F(WatchedFleet, AWayBack) {
  publish();
  run(seconds(2));
  publish();
  run(seconds(2));
  ASSERT_THAT(violated_rules(), testing::IsEmpty());
  PublicationId id{};
  invariants_.on_activated(0, {Version{0}, *published(Version{0}, id).policy_digest, 0});
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kMonotonicVersion});
}

TEST_F(WatchedFleet, MoreMemoryThanAllowed) {
  const StoreLimits limits{Bytes{1'000'000}, Bytes{5'000'000}, true};
  invariants_.check_budget(0, limits, 900'000, 4'000'000, /*disk_failed=*/false);
  EXPECT_THAT(violated_rules(), testing::IsEmpty());
  invariants_.check_budget(0, limits, 9'000'000, 4'000'000, /*disk_failed=*/false);
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kBudget});
}

TEST_F(WatchedFleet, MoreDiskThanAllowed) {
  const StoreLimits limits{Bytes{1'000'000}, Bytes{5'000'000}, true};
  // Heads and proofs come on top: here of chunks of the fleet's size.
  const std::uint64_t heads = 5'000'000 / fleet_.chunk_bytes() * kChunkHeadBytesMax;
  invariants_.check_budget(0, limits, 0, 5'000'000 + heads, /*disk_failed=*/false);
  EXPECT_THAT(violated_rules(), testing::IsEmpty());
  invariants_.check_budget(0, limits, 0, 5'000'000 + heads + 42 * fleet_.chunk_bytes(), false);
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kBudget});
}

TEST_F(WatchedFleet, TopologiesThatAreNone) {
  using Parents = std::map<WorkerId, std::vector<WorkerId>>;  // per stripe
  const WorkerId a{1}, b{2}, c{3};
  const auto breaks = [&](const Parents& parents) {
    const std::size_t before = invariants_.violations().size();
    invariants_.check_parents(parents, 1);
    return invariants_.violations().size() > before;
  };
  EXPECT_FALSE(breaks({{a, {kLearnerId}}, {b, {a}}, {c, {kLearnerId}}}));
  EXPECT_FALSE(breaks({{a, {kLearnerId, b}}, {b, {a, kLearnerId}}}));  // two stripes
  EXPECT_TRUE(breaks({{a, {b}}, {b, {a}}}));                           // a circle
  EXPECT_TRUE(breaks({{a, {kLearnerId}}, {b, {a}}, {c, {a}}}));        // two children
  EXPECT_TRUE(breaks({{a, {kLearnerId}}, {b, {c}}}));                  // c is not connected to the learner
  EXPECT_TRUE(breaks({{a, {kLearnerId, kLearnerId}}, {b, {a}}}));      // no parent for a stripe
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kTree});
}

TEST_F(WatchedFleet, ALearnerThatSendsEverythingTwice) {
  publish(8'000'000);
  run(seconds(10));
  ASSERT_THAT(violated_rules(), testing::IsEmpty());
  PublicationId id{};
  const PublishedContent::Publication& p = published(Version{0}, id);
  const std::size_t seed = forwarding_worker();
  for (const SealedChunk& chunk : p.chunks)
    invariants_.on_frame(fleet_.learner_host(), fleet_.worker(seed).host, {},
                         {FrameType::kChunk, chunk.data, {}, chunk.head});
  invariants_.check_learner_statistics();
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kFrugal});
}

TEST_F(WatchedFleet, AnHonestWorkerIsExpelled) {
  MaliceOptions malice;
  malice.flood = true;  // by a machine that is taken to be honest
  corrupt(1, malice);
  run(seconds(10));
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kBlame});
}

TEST_F(WatchedFleet, AWorkerThatForwardsBadChunksStays) {
  // Its children's complaints are lost on the way.
  class Mute final : public MessageRewriter {
    std::vector<act::Send> rewrite(act::Send&& send, TimePoint) override {
      std::vector<act::Send> out;
      const auto message = decode_control(send.head.bytes().subspan(kFrameHeaderBytes));
      if (!message || !(std::holds_alternative<Poisoned>(*message) || std::holds_alternative<EdgeFailed>(*message)))
        out.push_back(std::move(send));
      return out;
    }
  };
  const std::size_t poisoner = forwarding_worker();
  MaliceOptions malice;
  malice.flip_share = 1;
  corrupt(poisoner, malice);
  for (std::size_t i = 0; i < fleet_.worker_count(); ++i)
    if (i != poisoner) world_.set_rewriter(fleet_.worker(i).host, std::make_unique<Mute>());
  invariants_.set_faults_over();
  for (int i = 0; i < 6; ++i) {
    publish();
    run(seconds(30));
  }
  invariants_.check_liveness();
  EXPECT_TRUE(violated_rules().contains(Invariants::kBlame));
}

TEST_F(WatchedFleet, EventsDuringALearnersPauseAreNotItsFault) {
  const std::size_t poisoner = forwarding_worker();
  MaliceOptions malice;
  malice.flip_share = 1;
  corrupt(poisoner, malice);
  invariants_.set_faults_over();
  publish();
  run(milliseconds(50));  // seeds have something to forward
  world_.pause(fleet_.learner_host(), world_.now() + seconds(30));
  run(seconds(60));
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < fleet_.worker_count(); ++i)
    if (fleet_.member(i)) most = std::max(most, fleet_.member(i)->stats().chunks_corrupt);
  EXPECT_GE(most, 10u) << "it was dialled again and again";
  invariants_.check_liveness();
  for (const Violation& v : invariants_.violations())  // the invariants take the quarantined worker for honest
    EXPECT_EQ(v.text.find("were not separated"), std::string::npos) << v.text;
}

TEST_F(WatchedFleet, AnIntruderAsksEveryNodeAndGetsNothing) {
  MaliceOptions malice;
  malice.leak = true;
  WorkerOptions accomplice;
  accomplice.malice = malice;
  fleet_.start_worker(fleet_.add_worker(accomplice));
  run(seconds(1));
  fleet_.add_intruder(milliseconds(20));
  for (int i = 0; i < 5; ++i) {
    publish();
    run(seconds(2));
  }
  EXPECT_GT(fleet_.intruder()->requests_sent(), 200u);
  EXPECT_GT(invariants_.counts().intrusions, 200u);
  EXPECT_EQ(fleet_.intruder()->chunks_received(), 0u);
  ASSERT_THAT(violated_rules(), testing::IsEmpty());
  PublicationId id{};
  const SealedChunk& chunk = published(Version{0}, id).chunks[0];
  invariants_.on_frame(fleet_.worker(0).host, fleet_.intruder_host(), {},
                       {FrameType::kChunk, chunk.data, {}, chunk.head});
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kOnlyAssignedChildren});
}

// Floods of every kind of message, by a worker that reconnects all the time.
TEST_F(WatchedFleet, AFlooderIsExpelledAlthoughItReconnects) {
  using enum MessageBudget::Kind;
  WorkerOptions o;
  o.enrols = false;
  o.link = {BitRate::from_mbit_per_s(50), BitRate::from_mbit_per_s(50)};
  std::vector<std::size_t> flooders;
  for (const auto kind : {kRenew, kNeedHelp, kAck, kTrouble}) {
    o.malice.flood_kind = kind;
    flooders.push_back(fleet_.add_worker(o));
    fleet_.start_worker(flooders.back());
  }
  for (int i = 0; i < 40; ++i) {
    run(milliseconds(500));
    for (const std::size_t flooder : flooders) world_.reset_all_connections(fleet_.worker(flooder).host);
  }
  EXPECT_GE(invariants_.counts().floods, flooders.size());
  EXPECT_GE(fleet_.learner()->stats().floods, flooders.size());
  EXPECT_THAT(violated_rules(), testing::IsEmpty());
  Frame frame{FrameType::kControl, Slice(), {}, {}};
  const std::vector<std::byte> renew = encode_control(Renew{});
  frame.body = Slice(renew).part(kFrameHeaderBytes, renew.size() - kFrameHeaderBytes);
  for (int i = 0; i < 2000; ++i)  // as if the learner still took its messages
    invariants_.on_frame(fleet_.worker(flooders[0]).host, fleet_.learner_host(), {}, frame);
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kFlood});
}

TEST_F(WatchedFleet, AMovedWorkerIsFoundWhereItIs) {
  publish();
  run(seconds(2));
  const std::size_t mover = forwarding_worker();
  world_.change_address(fleet_.worker(mover).host);
  run(seconds(15));
  publish();
  run(seconds(5));
  EXPECT_EQ(fleet_.worker(mover).processes, 1u);
  EXPECT_EQ(invariants_.counts().lost, 0u);
  invariants_.set_faults_over();
  invariants_.check_liveness();
  EXPECT_THAT(violated_rules(), testing::IsEmpty());
}

TEST_F(WatchedFleet, AnAcknowledgementOfSomethingElse) {
  class WrongDigest final : public MessageRewriter {
    std::vector<act::Send> rewrite(act::Send&& send, TimePoint) override {
      auto message = decode_control(send.head.bytes().subspan(kFrameHeaderBytes));
      if (auto* ack = message ? std::get_if<Installed>(&*message) : nullptr) {
        ack->policy_digest[0] ^= std::byte{1};
        send.head = Slice(encode_control(*ack));
      }
      std::vector<act::Send> out;
      out.push_back(std::move(send));
      return out;
    }
  };
  world_.set_rewriter(fleet_.worker(2).host, std::make_unique<WrongDigest>());
  publish();
  run(seconds(3));
  invariants_.check_learner_statistics();
  EXPECT_THAT(violated_rules(), testing::IsEmpty()) << "no invariant is violated";
  for (const auto& view : fleet_.learner()->stats().workers)
    EXPECT_EQ(view.installed.has_value(), view.info.id != fleet_.worker(2).id()) << view.info.id.value;
}

TEST_F(WatchedFleet, APauseCostsAPlaceOrLeasesButNoWorker) {
  publish();
  run(seconds(2));
  const std::size_t sleeper = forwarding_worker();
  const WorkerId id = fleet_.worker(sleeper).id();
  world_.pause(fleet_.worker(sleeper).host, world_.now() + milliseconds(3500));
  run(milliseconds(3400));
  EXPECT_FALSE(fleet_.learner()->topology().contains(id)) << "silent";
  run(seconds(3));
  EXPECT_TRUE(fleet_.learner()->topology().contains(id));
  EXPECT_EQ(invariants_.counts().away, 0u);
  world_.pause(fleet_.worker(sleeper).host, world_.now() + seconds(30));
  publish();
  run(seconds(60));
  EXPECT_EQ(invariants_.counts().away, 1u);
  EXPECT_EQ(invariants_.counts().back, 1u);
  EXPECT_EQ(fleet_.worker(sleeper).processes, 1u) << "the same process";
  world_.pause(fleet_.learner_host(), world_.now() + seconds(30));
  run(seconds(60));
  EXPECT_EQ(invariants_.counts().lost, 0u);
  invariants_.set_faults_over();
  invariants_.check_learner_statistics();
  invariants_.check_liveness();
  EXPECT_THAT(violated_rules(), testing::IsEmpty());
}

TEST_F(WatchedFleet, AWorkerIsGivenUpTooEarly) {
  const WorkerId id = fleet_.worker(0).id();
  invariants_.on_away(id, "no heartbeat for 1 s");  // its heartbeat came just now
  EXPECT_THAT(violated_rules(), testing::ElementsAre(Invariants::kPresence));
}

TEST_F(WatchedFleet, AWorkerIsLostTooEarly) {
  const WorkerId id = fleet_.worker(0).id();
  invariants_.on_away(id, "its connection was lost");
  run(seconds(200));
  EXPECT_THAT(violated_rules(), testing::IsEmpty());
  invariants_.on_lost(id, "it has been away");
  EXPECT_THAT(violated_rules(), testing::ElementsAre(Invariants::kPresence));
}

TEST_F(WatchedFleet, AMemberWithoutAPlace) {
  invariants_.set_faults_over();
  invariants_.check_liveness();
  EXPECT_THAT(violated_rules(), testing::IsEmpty());
  world_.call(fleet_.learner_host(),
              [&](TimePoint now) { fleet_.learner()->give_up(fleet_.worker(0).id(), "forgotten", now); });
  invariants_.check_liveness();
  EXPECT_TRUE(violated_rules().contains(Invariants::kPresence));
}

TEST_F(WatchedFleet, AWorkerIsLeftBehind) {
  std::vector<HostId> others{fleet_.learner_host()};
  for (std::size_t i = 1; i < fleet_.worker_count(); ++i) others.push_back(fleet_.worker(i).host);
  world_.start_partition({fleet_.worker(0).host}, others, /*one_way=*/false);
  publish();
  run(seconds(10));
  invariants_.check_liveness();
  EXPECT_EQ(violated_rules(), std::set<std::string>{Invariants::kLiveness});
}

}  // namespace
}  // namespace echoline::sim
