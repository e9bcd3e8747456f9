// The helpers that the learner assigns to workers whose parents cannot serve them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/desk.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using testing::SizeIs;

// A worker with the whole publication helps few at a time. The learner sends the next ones elsewhere, or lets them ask
// again.
TEST(Learner, SpreadsWorkersThatNeedHelp) {
  Desk desk(8);
  desk.join_all(20);
  const Made made = make(full(0), 10);
  ASSERT_TRUE(desk.publish(made).has_value());
  for (const std::uint64_t holder : {1, 2}) {
    Heartbeat beat;
    beat.holdings = {{{Version{0}, {}}, 10}};
    desk.deliver_control(holder, beat);
  }
  std::map<WorkerId, std::size_t> helps;
  for (std::uint64_t id = 3; id <= 20; ++id) {
    desk.deliver_control(id, NeedHelp{Version{0}, false, {}});
    ++helps[desk.sent<Help>(id).back().from.worker];
  }
  // The learner's uplink counts twice.
  EXPECT_EQ(helps, (std::map<WorkerId, std::size_t>{{kLearnerId, 3}, {WorkerId{1}, 8}, {WorkerId{2}, 7}}));
  desk.deliver_control(3, Installed{Version{0}, digest_of(0), 0});
  desk.deliver_control(20, NeedHelp{Version{0}, false, {}});
  EXPECT_THAT(desk.sent<Help>(20), SizeIs(2));
}

// A worker that asks without end finds all helpers busy, and waits.
TEST(Learner, AWorkerHelpsOnlyAFewAtATime) {
  LearnerConfig c = Desk::config(8);
  c.catch_ups_on_demand = false;
  Desk desk(std::move(c));
  desk.join_all(12);
  const Made made = make(full(0), 10);
  ASSERT_TRUE(desk.publish(made).has_value());
  Heartbeat beat;
  beat.holdings = {{{Version{0}, {}}, 10}};
  desk.deliver_control(1, beat);
  std::size_t waiting = 0;
  for (std::uint64_t id = 2; id <= 12; ++id) {
    desk.deliver_control(id, NeedHelp{Version{0}, false, {}});
    waiting += desk.sent<Help>(id).empty();
  }
  EXPECT_EQ(waiting, 11 - Helpers::kHelpedMax);
}

// If the learner served dozens at once over one uplink, all of them would finish late. The bytes it has begun to send
// count, not the number of workers that have the version.
TEST(Learner, HelpsOnlyAsManyAsItCanSendTo) {
  LearnerConfig c = Desk::config(8);
  c.catch_ups_on_demand = false;
  Desk desk(std::move(c));
  desk.join_all(40);
  const Made made = make(full(0), 1'000'000, {.chunk_bytes = 65536});  // one second of the uplink
  ASSERT_TRUE(desk.publish(made).has_value());
  const auto helped_among = [&](std::uint64_t first, std::uint64_t last) {
    std::size_t helped = 0;
    for (std::uint64_t id = first; id <= last; ++id) {
      const std::size_t before = desk.sent<Help>(id).size();
      desk.deliver_control(id, NeedHelp{Version{0}, false, {}});
      helped += desk.sent<Help>(id).size() - before;
    }
    return helped;
  };
  // One now, two for the two seconds until the others ask again, and two more.
  EXPECT_EQ(helped_among(1, 20), 5u);
  EXPECT_EQ(helped_among(1, 20), 5u);  // the same ones, which have asked before
  desk.now += milliseconds(2500);
  EXPECT_EQ(helped_among(21, 40), 2u);
  Heartbeat beat;  // a worker with the whole publication helps others at once
  beat.holdings = {{{Version{0}, {}}, 1'000'000}};
  desk.deliver_control(1, beat);
  EXPECT_EQ(helped_among(31, 40), Helpers::kHelpedMax);
}

// The measured rate to the helped workers counts, not the expected rate of the uplink.
TEST(Learner, HelpsAsFastAsItSends) {
  LearnerConfig c = Desk::config(8);
  c.catch_ups_on_demand = false;
  c.core.limits.up.reset();
  c.uplink_min = BitRate::from_mbit_per_s(0.008);
  Desk desk(std::move(c));
  desk.join_all(12);
  ASSERT_TRUE(desk.publish(make(full(0), 1'000'000, {.chunk_bytes = 65536})).has_value());
  for (std::uint64_t id = 1; id <= 12; ++id) {
    desk.deliver_control(id, NeedHelp{Version{0}, false, {}});
    ASSERT_THAT(desk.sent<Help>(id), SizeIs(1)) << "earlier helped workers have received everything";
    trust::PeerIdentity identity{trust::PeerIdentity::Kind::kWorker, WorkerId{id}};
    identity.key = made_key("worker " + std::to_string(id)).public_key();
    const ConnId edge = desk.accept_peer(identity, "10.0.0." + std::to_string(id));
    desk.deliver_control(edge, PeerHello{"run", 0, Version{0}, false, {}, desk.sent<Help>(id).back().grant});
    for (int i = 0; i < 20; ++i) desk.core.on_sent(edge, Uplink::kWindowBytes, desk.now);
    desk.take();
  }
  EXPECT_GE(desk.core.stats().chunk_bytes_sent.count, 12'000'000u);
}

}  // namespace
}  // namespace echoline::overlay
