// The parts of a broadcast's time: the learner's report, the worker's early work, and its measurements.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/desk.hpp"
#include "tests/overlay/member.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::SizeIs;

// The parts of T_b follow each other and add up to it. The worker that completes the quorum reports its own part.
TEST(Learner, ReportsThePartsOfABroadcastsTime) {
  LearnerConfig c = Desk::config(16);
  c.durable = true;
  Desk desk(std::move(c));
  desk.core.on_saved(ok(), desk.now);
  const auto join = [&](std::uint64_t id) {  // the learner's dial takes 8 ms, so one way takes 2 ms
    desk.next_conn += 2;
    trust::PeerIdentity identity{trust::PeerIdentity::Kind::kWorker, WorkerId{id}};
    identity.key = made_key("worker " + std::to_string(id)).public_key();
    const std::string host = "10.0.0." + std::to_string(id);
    const ConnId conn = desk.control[WorkerId{id}] = desk.accept_peer(identity, host);
    desk.deliver_control(conn, Hello{"run", "w", {host, 9}, kMegabytePerS, kMegabytePerS, {}});
    desk.now += milliseconds(8);
    desk.core.on_connected(desk.all<act::Dial>().back().conn, desk.now);
    desk.take();
  };
  join(1);
  join(2);
  const Made made = make(full(0), 1000);
  ASSERT_TRUE(desk.core.begin(made.announcement, made.opening, false, desk.now).has_value());
  ASSERT_TRUE(desk.core.add(made.id, made.chunks, desk.now).has_value());
  desk.now += milliseconds(30);
  ASSERT_TRUE(desk.core.finish(made.manifest, made.closing, desk.now, milliseconds(10)).has_value());
  desk.now += milliseconds(5);
  desk.core.on_saved(ok(), desk.now);
  desk.now += milliseconds(40);
  desk.deliver_control(1, Installed{Version{0}, digest_of(0), 0, milliseconds(1), milliseconds(2)});
  desk.now += milliseconds(25);
  desk.deliver_control(2, Installed{Version{0}, digest_of(0), 0, milliseconds(7), milliseconds(11)});
  ASSERT_THAT(desk.all<act::ReportBroadcast>(), SizeIs(1));
  const BroadcastReport report = desk.all<act::ReportBroadcast>()[0].report;
  EXPECT_EQ(report.t_b, milliseconds(100));
  EXPECT_EQ(report.parts.encode, milliseconds(20));
  EXPECT_EQ(report.parts.seal, milliseconds(10 + 5));  // sealing the chunks, and then saving
  EXPECT_EQ(report.parts.send, milliseconds(65 - 7 - 11 - 2));
  EXPECT_EQ(report.parts.verify, milliseconds(7));
  EXPECT_EQ(report.parts.install, milliseconds(11));
  EXPECT_EQ(report.parts.acknowledge, milliseconds(2));

  // A reported time beyond the possible one is cut to it.
  ASSERT_TRUE(desk.publish(make(delta(1, 0), 1000)).has_value());
  desk.core.on_saved(ok(), desk.now);
  for (std::uint64_t id : {1, 2}) {
    desk.now += milliseconds(10);
    desk.deliver_control(id, Installed{Version{1}, digest_of(1), 0, std::chrono::hours(1), milliseconds(15)});
  }
  const BroadcastParts parts = desk.all<act::ReportBroadcast>().at(1).report.parts;
  EXPECT_EQ(parts.install, milliseconds(15));
  EXPECT_EQ(parts.verify, milliseconds(5));
  EXPECT_EQ(parts.send + parts.acknowledge + parts.encode + parts.seal, Duration{});
}

TEST(Learner, FindsTheStoredDeltasUpToTheNewestVersion) {
  LearnerConfig c = Desk::config(16);
  c.folded_deltas_max = 4;
  c.policy_bytes = {1'000'000};
  Desk desk(std::move(c));
  ASSERT_TRUE(desk.publish(make(full(0), 5000)).has_value());
  for (std::uint64_t v = 1; v <= 6; ++v) ASSERT_TRUE(desk.publish(make(delta(v, v - 1), 1000 + v)).has_value());
  // A folded delta for a late worker is not one of them.
  ASSERT_TRUE(desk.publish(make(delta(6, 3), 1500), true).has_value());
  const auto found = desk.core.deltas_from(Version{3});
  ASSERT_TRUE(found.has_value()) << found.error().message();
  EXPECT_EQ(found->from, Version{3});
  EXPECT_EQ(found->to, Version{6});
  EXPECT_EQ(found->base_digest, digest_of(3));
  EXPECT_EQ(found->digest, digest_of(6));
  ASSERT_THAT(found->deltas, SizeIs(3));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(found->deltas[i].size(), 1004 + i);
  EXPECT_TRUE(desk.core.deltas_from(Version{2}).has_value());
  EXPECT_EQ(desk.core.deltas_from(Version{1}).error().code, Code::kNotFound);  // more than folded_deltas_max
  EXPECT_EQ(desk.core.deltas_from(Version{6}).error().code, Code::kNotFound);
  ASSERT_TRUE(desk.publish(make(delta(7, 6), 130'000)).has_value());  // an eighth of the policy is 125 kB
  EXPECT_EQ(desk.core.deltas_from(Version{6}).error().code, Code::kNotFound);
}

// The floor is on disk before the last chunk of a delta arrives, so that activation need not wait for the disk.
TEST(Member, SavesItsFloorWhileTheLastChunksArrive) {
  MemberConfig c = config();
  c.durable = true;
  MemberCore core(c);
  TimePoint now(seconds(1));
  core.start(now);
  const auto take = [&] {
    std::pair<std::vector<WorkerState>, std::vector<act::DeliverPublication>> found;
    for (Action& a : core.take_actions()) {
      if (const auto* s = std::get_if<act::SaveState>(&a)) found.first.push_back(*decode_worker_state(s->bytes));
      if (auto* d = std::get_if<act::DeliverPublication>(&a)) found.second.push_back(std::move(*d));
    }
    return found;
  };
  const auto deliver_control = [&](ConnId conn, const ControlMessage& m) {
    const Slice frame(encode_control(m));
    core.on_frame(conn, {FrameType::kControl, frame.part(8, frame.size() - 8), {}, {}}, now);
  };
  core.on_saved(ok(), now);
  core.on_connected(kControl, now);
  deliver_control(kControl, Welcome{kSelf, kBeat, seconds(9), static_cast<std::uint64_t>(kMadeUnix_s * 1e3), ""});
  deliver_control(kControl, Assign{1, {{kLearnerId, {"10.0.0.0", 1}, 1, false}}});
  core.on_connected(ConnId{3}, now);
  const Made first = make(full(0), 500), next = make(delta(1, 0), 3000), snapshot = make(full(2), 3000);
  deliver_control(ConnId{3}, first.opening);
  core.on_frame(ConnId{3}, first.chunk(0), now);
  deliver_control(ConnId{3}, first.closing);
  core.on_saved(ok(), now);
  EXPECT_EQ(take().second.size(), 1u);

  deliver_control(ConnId{3}, next.opening);
  deliver_control(ConnId{3}, next.closing);
  const auto [saved, delivered_early] = take();
  ASSERT_EQ(saved.size(), 1u);
  EXPECT_EQ(saved[0].floor, (Installed{Version{1}, digest_of(1), 0}));
  EXPECT_TRUE(delivered_early.empty());
  for (std::uint32_t i = 0; i + 1 < next.chunks.size(); ++i) core.on_frame(ConnId{3}, next.chunk(i), now);
  core.on_saved(ok(), now);
  EXPECT_TRUE(take().second.empty());
  core.on_frame(ConnId{3}, next.chunk(static_cast<std::uint32_t>(next.chunks.size() - 1)), now);
  const auto [saved_again, delivered] = take();
  EXPECT_TRUE(saved_again.empty());
  ASSERT_EQ(delivered.size(), 1u);
  EXPECT_EQ(delivered[0].publication.version, Version{1});

  // A snapshot ahead does not raise the floor early, because deltas that arrive in the meantime must still be accepted.
  deliver_control(ConnId{3}, snapshot.opening);
  deliver_control(ConnId{3}, snapshot.closing);
  EXPECT_TRUE(take().first.empty());
  // A delta that is complete before the save ends waits for that save, and needs no other.
  const Made last = make(delta(2, 1), 500);
  deliver_control(ConnId{3}, last.opening);
  deliver_control(ConnId{3}, last.closing);
  core.on_frame(ConnId{3}, last.chunk(0), now);
  const auto [saved_for_last, last_early] = take();
  EXPECT_EQ(saved_for_last.size(), 1u);
  EXPECT_TRUE(last_early.empty());
  core.on_saved(ok(), now);
  const auto [saved_later, last_delivered] = take();
  EXPECT_TRUE(saved_later.empty());
  ASSERT_EQ(last_delivered.size(), 1u);
  EXPECT_EQ(last_delivered[0].publication.version, Version{2});
}

TEST(Member, ReportsTheTimeFromTheLastByteToTheActivePolicy) {
  MemberConfig c = config();
  c.durable = true;
  Member m(c);
  m.deliver_publication(make(full(0), 500));
  m.core.installed(Version{0}, digest_of(0), m.now);
  m.take();
  const Made made = make(full(1), 500);
  m.deliver_control(m.parent, made.opening);
  m.saves = false;
  m.deliver_frame(m.parent, made.chunk(0));
  m.deliver_control(m.parent, made.closing);
  m.now += milliseconds(3);
  m.core.on_saved(ok(), m.now);
  m.take();
  m.now += milliseconds(5);
  m.core.installed(Version{1}, digest_of(1), m.now);
  m.take();
  EXPECT_EQ(m.sent<Installed>(kControl).back(),
            (Installed{Version{1}, digest_of(1), 0, milliseconds(3), milliseconds(5)}));
}

}  // namespace
}  // namespace echoline::overlay
