// The kind of topology follows the fleet: the learner compares kinds now and then, and changes after several wins in a
// row.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "overlay/sizes.hpp"
#include "tests/overlay/desk.hpp"

namespace echoline::overlay {
namespace {

using chains::TopologyPolicy;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

struct ChoosingDesk : Desk {
  explicit ChoosingDesk(TopologyPolicy policy, double up_mbit = 8) : Desk(choosing_config(policy, up_mbit)) {}
  static LearnerConfig choosing_config(TopologyPolicy policy, double up_mbit) {
    LearnerConfig c = config(up_mbit);
    c.policy = policy;
    c.chooses_policy = true;
    return c;
  }
  Duration choice_interval() const { return TopologyPlan::kChooseBeats * LearnerConfig{}.heartbeat; }
  void all_install(std::uint64_t version) {
    for (const auto& [id, conn] : control)
      deliver_control(id.value, Installed{Version{version}, digest_of(version), 0});
  }
  TopologyPolicy policy() const { return core.topology().policy; }
  std::vector<act::ReportTopologyChoice> choices() const { return all<act::ReportTopologyChoice>(); }
};

TEST(TopologyChoice, AnotherKindIsChosenAfterItWasFasterSeveralTimes) {
  ChoosingDesk desk(TopologyPolicy::kStar);  // eight copies over the learner's uplink, where one would do
  desk.join_all(8);
  desk.pass_time(5 * desk.choice_interval());
  EXPECT_THAT(desk.choices(), IsEmpty()) << "the payload's size is not known yet";
  ASSERT_TRUE(desk.publish(make(full(0), 300'000)).has_value());
  desk.all_install(0);
  desk.pass_time((TopologyPlan::kFasterInARow - 2) * desk.choice_interval());
  EXPECT_EQ(desk.policy(), TopologyPolicy::kStar);
  desk.pass_time(3 * desk.choice_interval());
  EXPECT_NE(desk.policy(), TopologyPolicy::kStar);
  ASSERT_THAT(desk.choices(), SizeIs(1));
  EXPECT_THAT(desk.choices()[0].text, HasSubstr(" instead of star: it is expected to bring 300 kB to 8 workers in "));
  desk.pass_time(20 * desk.choice_interval());
  EXPECT_THAT(desk.choices(), SizeIs(1)) << "the topology stays";
  for (const auto& [id, conn] : desk.control)
    EXPECT_THAT(desk.sent<Assign>(conn).back().parents, ::testing::Not(IsEmpty()));
}

// Three workers are near and three far away. Each states its place, and that place decides its parents.
TEST(TopologyChoice, AFarRegionIsFedOnce) {
  LearnerConfig c = Desk::config(64);
  c.policy = TopologyPolicy::kTrees;
  c.regions.links.assign(2, std::vector<chains::RegionLink>(2));
  c.regions.links[0][1].rate = c.regions.links[1][0].rate = BitRate::from_mbit_per_s(4);
  c.region_of = [](const MemberInfo& info) { return info.place == "far" ? 1u : 0u; };
  Desk desk(std::move(c));
  const auto join = [&](std::uint64_t id) {
    trust::PeerIdentity identity{trust::PeerIdentity::Kind::kWorker, WorkerId{id}};
    identity.key = made_key("worker " + std::to_string(id)).public_key();
    const std::string host = "10.0.0." + std::to_string(id);
    const ConnId conn = desk.control[WorkerId{id}] = desk.accept_peer(identity, host);
    desk.deliver_control(conn, Hello{"run", "w", {host, 9}, kMegabytePerS, kMegabytePerS, {}, id > 3 ? "far" : ""});
    desk.core.on_connected(desk.all<act::Dial>().back().conn, desk.now);
    desk.take();
  };
  const auto payloads_crossing = [&] {  // copies of a payload that go between the regions
    const chains::Topology& topology = desk.core.topology();
    double shares = 0;
    for (const auto& [id, parents] : topology.parents())
      for (const WorkerId parent : parents) shares += (id.value > 3) != (parent.value > 3);
    return shares / topology.stripes();
  };
  for (std::uint64_t id = 1; id <= 6; ++id) join(id);
  desk.pass_time(2 * TopologyPlan::kDelay);
  EXPECT_EQ(desk.core.topology().size(), 6u);
  EXPECT_NEAR(payloads_crossing(), 1, 1e-9) << desk.core.topology().to_text();
  EXPECT_EQ(desk.core.stats().workers[5].info.place, "far");
  ASSERT_TRUE(desk.publish(make(full(0), 300'000)).has_value());
  // The relay leaves. Another worker takes its place, and still only one copy goes to the far region.
  WorkerId relay;
  for (const auto& [id, parents] : desk.core.topology().parents())
    if (id.value > 3 && parents.front().value <= 3) relay = id;
  desk.core.on_closed(desk.control[relay], "reset", desk.now);
  desk.take();
  desk.control.erase(relay);
  desk.pass_time(seconds(1));
  EXPECT_EQ(desk.core.topology().size(), 5u);
  EXPECT_NEAR(payloads_crossing(), 1, 1e-9) << desk.core.topology().to_text();
}

// The chunk size follows the largest stored publication of its kind, and before the first one the policy's size.
TEST(TopologyChoice, TheChunkSizeFollowsThePayload) {
  LearnerConfig c = Desk::config(64);
  c.policy = TopologyPolicy::kTrees;
  c.policy_bytes = {2'000'000'000};
  Desk desk(std::move(c));
  desk.join_all(6);
  const auto chunk = [&](const PublicationKey& key) { return desk.core.chunk_size_for(key, desk.now).count; };
  const std::uint64_t snapshot = chunk(full(0)), first_delta = chunk(delta(1, 0));
  EXPECT_GT(snapshot, first_delta);
  EXPECT_GE(first_delta, 32u * 1024);
  ASSERT_TRUE(desk.publish(make(full(0), 400'000)).has_value());
  ASSERT_TRUE(desk.publish(make(delta(1, 0), 30'000)).has_value());
  EXPECT_LT(chunk(full(2)), snapshot);
  // Otherwise a snapshot of the policy would have too many chunks.
  EXPECT_GE(chunk(full(2)), chunk_bytes_min({2'000'000'000}).count);
  // A nearly empty delta does not make the next one's chunks tiny.
  EXPECT_LT(chunk(delta(2, 1)), first_delta);
  EXPECT_GE(chunk(delta(2, 1)), 16u * 1024);
}

TEST(TopologyChoice, TheChunkSizeFollowsTheLargestRecentPublication) {
  LearnerConfig c = Desk::config(64);
  c.policy = TopologyPolicy::kTrees;
  c.policy_bytes = {4'000'000};
  Desk desk(std::move(c));
  desk.join_all(6);
  ASSERT_TRUE(desk.publish(make(full(0), 400'000)).has_value());
  ASSERT_TRUE(desk.publish(make(delta(1, 0), 300'000)).has_value());
  const auto chunk = desk.core.chunk_size_for(delta(2, 1), desk.now);
  EXPECT_GT(chunk, Bytes{1024});
  ASSERT_TRUE(desk.publish(make(delta(2, 1), 900)).has_value());
  EXPECT_EQ(desk.core.chunk_size_for(delta(3, 2), desk.now), chunk);
}

TEST(TopologyChoice, ASmallGainMovesNoWorker) {
  for (const TopologyPolicy policy : {TopologyPolicy::kTrees, TopologyPolicy::kStripes, TopologyPolicy::kBestChains}) {
    ChoosingDesk desk(policy, 64);
    desk.join_all(3);
    ASSERT_TRUE(desk.publish(make(full(0), 300'000)).has_value());
    desk.all_install(0);
    desk.pass_time(10 * desk.choice_interval());
    EXPECT_EQ(desk.policy(), policy);
  }
}

TEST(TopologyChoice, NoWorkerMovesDuringABroadcast) {
  ChoosingDesk desk(TopologyPolicy::kStar);
  desk.join_all(8);
  ASSERT_TRUE(desk.publish(make(full(0), 60'000)).has_value());
  desk.all_install(0);
  desk.pass_time(2 * desk.choice_interval());
  ASSERT_TRUE(desk.publish(make(delta(1, 0), 60'000)).has_value());
  desk.pass_time(desk.choice_interval() + milliseconds(500));
  EXPECT_EQ(desk.policy(), TopologyPolicy::kStar);
  desk.all_install(1);
  desk.pass_time(2 * desk.choice_interval());
  EXPECT_NE(desk.policy(), TopologyPolicy::kStar);
}

TEST(TopologyChoice, WorkersMoveIfABroadcastIsAlwaysUnderWay) {
  ChoosingDesk desk(TopologyPolicy::kStar);
  desk.join_all(8);
  ASSERT_TRUE(desk.publish(make(full(0), 60'000)).has_value());
  for (std::uint64_t version = 1; version < 12; ++version) {
    ASSERT_TRUE(desk.publish(make(delta(version, version - 1), 60'000)).has_value());
    desk.all_install(version - 1);
    desk.pass_time(desk.choice_interval());
  }
  EXPECT_NE(desk.policy(), TopologyPolicy::kStar);
}

TEST(TopologyChoice, TheKindStaysUnlessTheConfigurationAllowsAChange) {
  LearnerConfig c = Desk::config(8);
  c.policy = TopologyPolicy::kStar;
  Desk desk(std::move(c));
  desk.join_all(8);
  ASSERT_TRUE(desk.publish(make(full(0), 300'000)).has_value());
  for (std::uint64_t id = 1; id <= 8; ++id) desk.deliver_control(id, Installed{Version{0}, digest_of(0), 0});
  desk.pass_time(seconds(600));
  EXPECT_EQ(desk.core.topology().policy, TopologyPolicy::kStar);
}

// The receiver measures an uplink.
TEST(LearnerRates, ChildrenReportTheirParentsDeliveries) {
  LearnerConfig c = Desk::config(8);
  c.reports_heartbeats = true;
  Desk desk(std::move(c));
  desk.join_all(2);
  ASSERT_EQ(desk.chain(), (std::vector<std::uint64_t>{1, 2}));
  const Made made = make(full(0), 100'000);
  ASSERT_TRUE(desk.publish(made).has_value());
  const auto delivered = [&] { return desk.core.stats().workers[0].bytes_delivered.count; };
  const auto beat = [&](std::uint64_t worker, std::uint32_t chunks) {
    Heartbeat heartbeat;
    heartbeat.chunk_bytes_forwarded = 1'000'000'000;
    heartbeat.progress = {{made.id, {chunks}}};
    desk.deliver_control(worker, heartbeat);
  };
  beat(1, 50);
  EXPECT_EQ(delivered(), 0u) << "the learner sent its own chunks";
  beat(2, 20);
  beat(2, 20);
  EXPECT_EQ(delivered(), 20 * 1024u);
  beat(2, 30);
  EXPECT_EQ(delivered(), 30 * 1024u);
  desk.deliver_control(2, Installed{Version{0}, digest_of(0), 0});
  EXPECT_EQ(delivered(), made.chunks.size() * 1024u) << "the rest has arrived since";
  beat(2, static_cast<std::uint32_t>(made.chunks.size()));
  EXPECT_EQ(delivered(), made.chunks.size() * 1024u);
  beat(1, 50);
  EXPECT_EQ(desk.all<act::ReportHeartbeat>().back().heartbeat.bytes_delivered.count, delivered());
}

}  // namespace
}  // namespace echoline::overlay
