// Links of a limited rate, shares of one uplink, and the meters of silence and speed.
#include "overlay/uplink.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>

#include "overlay/learner/catch_ups.hpp"
#include "overlay/learner/hop_monitor.hpp"
#include "overlay/member/upstream.hpp"
#include "tests/overlay/made.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

const BitRate kMegabytePerS = BitRate::from_mbit_per_s(8);
TimePoint at(double s) { return TimePoint(from_seconds(s)); }

TEST(Pacer, HoldsItsRateAndGrantsNothingForIdleTime) {
  Pacer link(kMegabytePerS);
  EXPECT_EQ(link.occupy({1000}, at(5), false), at(5.001));  // idle time earns nothing
  EXPECT_EQ(link.occupy({1000}, at(5.0003), true), at(5.002));
  EXPECT_EQ(link.occupy({1000}, at(5.010), true), at(5.003));  // late, and allowed to catch up
  EXPECT_EQ(link.occupy({1000}, at(6), true), at(5.951));      // but by no more than kLatenessMax
  EXPECT_EQ(link.occupy({1000}, at(7), false), at(7.001));
  EXPECT_EQ(Pacer().occupy({1 << 30}, at(1), true), at(1));
  EXPECT_EQ(Pacer().slice_bytes(12345), 12345u);
  EXPECT_EQ(link.slice_bytes(1 << 20), 8000u);  // 8 ms at its rate
  EXPECT_EQ(Pacer(BitRate{1000}).slice_bytes(1 << 20), 2048u);
}

// ---- the uplink ----

// A source of frames of the same size.
struct Frames final : Source {
  std::size_t frames_left = 0, bytes = 1000;
  double uplink_weight = 1;
  double weight() const override { return uplink_weight; }
  std::vector<ConnId> asked;
  std::optional<OutFrame> next(ConnId conn) override {
    if (frames_left == 0) return std::nullopt;
    --frames_left;
    asked.push_back(conn);
    return OutFrame{Slice(std::vector<std::byte>(100)), Slice(std::vector<std::byte>(bytes - 100))};
  }
};

struct Wire {
  explicit Wire(std::optional<BitRate> rate = {}) : pacer(rate), uplink(pacer, actions) {}
  Pacer pacer;
  std::vector<Action> actions;
  Uplink uplink;
  std::map<ConnId, std::uint64_t> take() {
    std::map<ConnId, std::uint64_t> bytes;
    for (const Action& a : std::exchange(actions, {})) {
      const auto& send = std::get<act::Send>(a);
      bytes[send.conn] += send.head.size() + send.tail.size();
    }
    return bytes;
  }
  std::vector<std::size_t> sizes() {  // of each send, in order
    std::vector<std::size_t> sizes;
    for (const Action& a : std::exchange(actions, {}))
      sizes.push_back(std::get<act::Send>(a).head.size() + std::get<act::Send>(a).tail.size());
    return sizes;
  }
};

// Timers come up to `late` after their time; the rate holds over all and over every 100 ms.
TEST(Uplink, LimitHoldsAcrossSourcesAndLateTimers) {
  for (const double late_ms : {0.0, 4.0, 20.0}) {
    SCOPED_TRACE(late_ms);
    Wire wire(BitRate::from_mbit_per_s(24));
    Frames sources[3];
    for (std::uint64_t i = 0; i < 3; ++i) {
      sources[i].frames_left = 100'000;
      sources[i].bytes = 20'000;
      wire.uplink.open(ConnId{2 * i + 2}, sources[i]);
    }
    wire.uplink.pump(at(1));
    Random random(7);
    TimePoint now = at(1);
    std::map<std::int64_t, std::uint64_t> per_100ms;
    std::map<ConnId, std::uint64_t> per_conn;
    while (now < at(11)) {
      for (const auto& [conn, bytes] : wire.take()) {
        per_100ms[(now - at(1)) / milliseconds(100)] += bytes;
        per_conn[conn] += bytes;
        wire.uplink.on_sent(conn, bytes, now);
      }
      ASSERT_NE(wire.uplink.next_deadline(), kNever);
      now = std::max(now, wire.uplink.next_deadline()) + from_seconds(random.uniform() * late_ms / 1000);
      wire.uplink.on_timer(now);
    }
    std::uint64_t total = 0;
    for (const auto& [slot, bytes] : per_100ms) {
      total += bytes;
      EXPECT_LE(static_cast<double>(bytes), 300e3 + 3e6 * (0.010 + 2 * late_ms / 1000)) << slot;
    }
    EXPECT_NEAR(static_cast<double>(total), 30e6, 0.03 * 30e6);
    for (const auto& [conn, bytes] : per_conn) EXPECT_NEAR(static_cast<double>(bytes), 10e6, 0.03 * 10e6);
    ASSERT_TRUE(wire.uplink.measured_rate().has_value());
    EXPECT_NEAR(wire.uplink.measured_rate()->mbit_per_s(), 24, 1);
    const Uplink::Usage usage = wire.uplink.usage(sources[0], now);
    EXPECT_TRUE(usage.own_limit || late_ms > 0);  // a late timer finds the link free
    EXPECT_NEAR(static_cast<double>(usage.bytes), 10e6, 0.03 * 10e6);
  }
}

TEST(Uplink, SourcesTakeTurnsAndAWindowHoldsEach) {
  Wire wire;
  Frames busy, slow, idle;
  busy.frames_left = slow.frames_left = 1000;
  wire.uplink.open(ConnId{2}, busy);
  wire.uplink.open(ConnId{4}, slow);
  wire.uplink.open(ConnId{6}, idle);
  wire.uplink.pump(at(1));
  auto sent = wire.take();
  EXPECT_EQ(sent[ConnId{2}], sent[ConnId{4}]);
  EXPECT_GE(sent[ConnId{2}], Uplink::kWindowBytes);
  EXPECT_LT(sent[ConnId{2}], Uplink::kWindowBytes + 1000);  // at most one frame beyond the window
  EXPECT_EQ(sent[ConnId{6}], 0u);
  EXPECT_EQ(wire.uplink.in_flight(ConnId{2}), sent[ConnId{2}]);
  // Only the connection whose bytes were sent gets more.
  wire.uplink.on_sent(ConnId{2}, 10'000, at(2));
  sent = wire.take();
  EXPECT_EQ(sent[ConnId{2}], 10'000u);
  EXPECT_EQ(sent[ConnId{4}], 0u);
  // The uplink asks an idle source again only after wake().
  idle.frames_left = 1;
  wire.uplink.pump(at(2));
  EXPECT_TRUE(wire.take().empty());
  wire.uplink.wake(idle);
  wire.uplink.pump(at(2));
  EXPECT_EQ(wire.take()[ConnId{6}], 1000u);
  EXPECT_EQ(wire.uplink.next_deadline(), kNever);
}

TEST(Uplink, TheLimitIsSharedByWeight) {
  Wire wire(kMegabytePerS);
  Frames whole, quarter, late;
  whole.frames_left = quarter.frames_left = 100'000;
  quarter.uplink_weight = late.uplink_weight = 0.25;
  wire.uplink.open(ConnId{2}, whole);
  wire.uplink.open(ConnId{4}, quarter);
  wire.uplink.open(ConnId{6}, late);
  std::map<ConnId, std::uint64_t> total;
  TimePoint now = at(1);
  const auto run_until = [&](TimePoint end) {
    total.clear();
    while (now < end) {
      wire.uplink.pump(now);
      for (const auto& [conn, bytes] : wire.take()) {
        total[conn] += bytes;
        wire.uplink.on_sent(conn, bytes, now);
      }
      now = std::max(now, wire.uplink.next_deadline());
    }
  };
  run_until(at(11));
  EXPECT_NEAR(static_cast<double>(total[ConnId{2}]), 8e6, 0.1e6);
  EXPECT_NEAR(static_cast<double>(total[ConnId{4}]), 2e6, 0.1e6);
  // A source that comes later gets its share from then on, and makes up for no more than a window.
  late.frames_left = 100'000;
  wire.uplink.wake(late);
  run_until(at(23));
  EXPECT_NEAR(static_cast<double>(total[ConnId{2}]), 8e6, 0.3e6);
  EXPECT_NEAR(static_cast<double>(total[ConnId{4}]), 2e6, 0.3e6);
  EXPECT_NEAR(static_cast<double>(total[ConnId{6}]), 2e6, 0.3e6);
}

TEST(Uplink, ParallelConnectionsShareASource) {
  Wire wire;
  Frames source;
  source.frames_left = 100;
  wire.uplink.open(ConnId{2}, source);
  wire.uplink.open(ConnId{4}, source);
  wire.uplink.pump(at(1));
  auto sent = wire.take();
  EXPECT_EQ(sent[ConnId{2}], 50'000u);
  EXPECT_EQ(sent[ConnId{4}], 50'000u);
  // The connection whose bytes leave faster carries more.
  source.frames_left = 1000;
  wire.uplink.wake(source);
  wire.uplink.on_sent(ConnId{2}, 50'000, at(2));
  wire.take();
  for (int i = 0; i < 10; ++i) wire.uplink.on_sent(ConnId{2}, 20'000, at(2));
  sent = wire.take();
  EXPECT_GE(sent[ConnId{2}], 190'000u);
  EXPECT_EQ(sent[ConnId{4}], 0u);
  // A closed connection loses its waiting bytes, and the other goes on.
  wire.uplink.close(ConnId{2});
  wire.uplink.on_sent(ConnId{2}, 1000, at(3));  // not counted, since it is closed
  wire.uplink.on_sent(ConnId{4}, 5000, at(3));
  EXPECT_GE(wire.take()[ConnId{4}], 5000u);
  wire.uplink.close(ConnId{4});
  wire.uplink.wake(source);  // without effect, since it has no connection
  wire.uplink.pump(at(4));
  EXPECT_TRUE(wire.take().empty());
  EXPECT_EQ(wire.uplink.usage(source, at(4)).bytes, 0u);
}

TEST(Uplink, AFrameStaysOnTheConnectionThatBeganIt) {
  Wire wire(kMegabytePerS);
  Frames source;
  source.frames_left = 2;
  source.bytes = 50'000;
  wire.uplink.open(ConnId{2}, source);
  wire.uplink.open(ConnId{4}, source);
  TimePoint now = at(1);
  wire.uplink.pump(now);
  std::vector<ConnId> order;
  while (wire.uplink.next_deadline() != kNever) {
    now = wire.uplink.next_deadline();
    wire.uplink.on_timer(now);
    for (const auto& [conn, bytes] : wire.take())
      if (order.empty() || order.back() != conn) order.push_back(conn);
  }
  EXPECT_EQ(order.size(), 2u);
  EXPECT_NEAR(seconds(now - at(1)), 0.1, 0.001);
}

TEST(MessageQueue, CutsMessagesAndCountsWaitingBytes) {
  MessageQueue queue;
  queue.push(Slice(random_bytes(1, MessageQueue::kPartBytes + 100)));
  queue.push(Slice(random_bytes(2, 200)));
  EXPECT_EQ(queue.bytes(), MessageQueue::kPartBytes + 300);
  const auto first = queue.next(ConnId{2}), second = queue.next(ConnId{2});
  ASSERT_TRUE(first && second);
  EXPECT_EQ(first->size(), MessageQueue::kPartBytes + kFrameHeaderBytes);
  EXPECT_EQ(first->head.data()[3], std::byte{1}) << "more follows";
  EXPECT_EQ(second->size(), 100 + kFrameHeaderBytes);
  EXPECT_EQ(second->head.data()[3], std::byte{0});
  EXPECT_EQ(queue.bytes(), 200u);
  queue.clear();
  EXPECT_EQ(queue.bytes(), 0u);
  EXPECT_FALSE(queue.next(ConnId{2}).has_value());
}

// An urgent frame must not split the frame that is being sent.
TEST(Uplink, AnUrgentFrameFollowsTheFrameBeingSent) {
  Wire wire(BitRate::from_mbit_per_s(8));
  MessageQueue queue;
  queue.push(Slice(std::vector<std::byte>(30'000)));
  wire.uplink.open(ConnId{2}, queue);
  TimePoint now = at(1);
  wire.uplink.pump(now);
  const auto step = [&] {
    now = wire.uplink.next_deadline();
    wire.uplink.on_timer(now);
    return wire.sizes();
  };
  ASSERT_EQ(step().size(), 1u) << "a slice of the frame has left";
  const Slice urgent(std::vector<std::byte>(77));
  wire.uplink.send_now(ConnId{2}, urgent);
  EXPECT_EQ(wire.sizes().size(), 0u);
  std::vector<std::size_t> sizes;
  while (wire.uplink.next_deadline() != kNever)
    for (const std::size_t bytes : step()) sizes.push_back(bytes);
  ASSERT_FALSE(sizes.empty());
  EXPECT_EQ(sizes.back(), 77u);
  wire.uplink.send_now(ConnId{2}, urgent);
  EXPECT_EQ(wire.sizes().size(), 1u) << "no frame is being sent";
  // A closed connection still sends its last frame.
  queue.push(Slice(std::vector<std::byte>(30'000)));
  wire.uplink.wake(queue);
  wire.uplink.pump(now);
  ASSERT_EQ(step().size(), 1u);
  wire.uplink.send_now(ConnId{2}, urgent);
  wire.uplink.close(ConnId{2});
  const auto last = wire.sizes();
  ASSERT_EQ(last.size(), 2u);
  EXPECT_EQ(last.back(), 77u);
}

// ---- silence ----

TEST(SilenceMeter, LearnsTheIntervalsOfAPeer) {
  SilenceMeter meter;
  EXPECT_EQ(meter.deadline(), kNever);
  meter.begin(milliseconds(100), at(1));
  EXPECT_EQ(meter.deadline(), at(1.4));
  TimePoint now = at(1);
  for (int i = 0; i < 100; ++i) meter.on_regular_message(now += milliseconds(100));
  EXPECT_EQ(meter.deadline() - now, milliseconds(400));  // never less than four intervals
  Random random(1);
  for (int i = 0; i < 100; ++i) meter.on_regular_message(now += milliseconds(random.between(10, 400)));
  EXPECT_GT(meter.deadline() - now, milliseconds(600));  // irregular, so the deadline is later
  EXPECT_LE(meter.deadline() - now, milliseconds(1200));
  for (int i = 0; i < 20; ++i) meter.on_regular_message(now += std::chrono::seconds(3));
  EXPECT_EQ(meter.deadline() - now, milliseconds(1200));  // never more than twelve
}

// ---- parallel streams ----

// The number of connections that the probe settles on, if `rate` gives the path's rate for a number. [bytes/s]
template <class Rate>
std::uint32_t probed_streams(Rate&& rate) {
  StreamProbe probe;
  double bytes = 0;
  std::uint32_t streams = 1;
  for (TimePoint now = at(1); now < at(60); now += milliseconds(100)) {
    streams = probe.observe(static_cast<std::uint64_t>(bytes), true, now);
    bytes += rate(streams) * 0.1;
  }
  return streams;
}

TEST(StreamProbe, DoublesWhileTheRateGrows) {
  // Loss limits each connection alone.
  EXPECT_EQ(probed_streams([](auto n) { return 1e6 * n; }), StreamProbe::kStreamsMax);
  // Four are no better than two, so the probe stops there.
  EXPECT_EQ(probed_streams([](auto n) { return n < 2 ? 1e6 : 2e6; }), 4u);
  // One fills the link, and two are tried once.
  EXPECT_EQ(probed_streams([](auto) { return 5e6; }), 2u);
}

TEST(StreamProbe, KeepsTheNumberThatCouldBeOpened) {
  StreamProbe probe;
  probe.settle(3);
  TimePoint now{};
  for (std::uint64_t bytes = 0; bytes < 10'000'000; bytes += 100'000, now += std::chrono::milliseconds(100))
    ASSERT_EQ(probe.observe(bytes, true, now), 3u);
}

TEST(StreamProbe, CountsOnlyWhileThereIsMoreToSend) {
  StreamProbe probe;
  std::uint64_t bytes = 0;
  for (TimePoint now = at(1); now < at(60); now += milliseconds(500))
    EXPECT_EQ(probe.observe(bytes += 1000, (now - at(1)) / milliseconds(500) % 3 != 0, now), 1u);
}

// ---- slow hops ----

constexpr HopMonitor::Hop kHop{WorkerId{1}, WorkerId{2}};

TEST(HopMonitor, ReportsAHopWhoseSenderStaysAhead) {
  HopMonitor monitor;
  std::vector<HopMonitor::Finding> found;
  const HopMonitor::Hop before{kLearnerId, WorkerId{1}}, after{WorkerId{2}, WorkerId{3}};
  double arrived = 0, passed = 0;
  TimePoint now = at(1);
  for (; found.empty() && now < at(20); now += milliseconds(200)) {
    arrived += 1e6 * 0.2;
    passed += 0.2e6 * 0.2;
    monitor.observe(before, static_cast<std::uint64_t>(arrived), static_cast<std::uint64_t>(arrived), kMegabytePerS,
                    now);
    monitor.observe(kHop, static_cast<std::uint64_t>(arrived), static_cast<std::uint64_t>(passed), kMegabytePerS, now);
    monitor.observe(after, static_cast<std::uint64_t>(passed), static_cast<std::uint64_t>(passed), kMegabytePerS, now);
    found = monitor.find();
  }
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].hop, kHop);
  EXPECT_NEAR(found[0].rate.bytes_per_s(), 0.2e6, 0.05e6);
  EXPECT_EQ(found[0].expected, kMegabytePerS);
  EXPECT_LT(now, at(6));
  EXPECT_TRUE(monitor.find().empty());  // reported once, then measured from the start
}

TEST(HopMonitor, DoesNotReportAHopThatIsOnlyBehindOrFastEnough) {
  HopMonitor monitor;
  double passed = 0;
  for (TimePoint now = at(1); now < at(20); now += milliseconds(200)) {
    passed += 0.8e6 * 0.2;  // most of the planned rate, though the gap grows
    monitor.observe(kHop, static_cast<std::uint64_t>(passed * 2), static_cast<std::uint64_t>(passed), kMegabytePerS,
                    now);
    EXPECT_TRUE(monitor.find().empty());
  }
  HopMonitor small;  // the gap is too small to report
  for (TimePoint now = at(1); now < at(20); now += milliseconds(200)) {
    small.observe(kHop, HopMonitor::kGapBytesMin - 1, 0, kMegabytePerS, now);
    EXPECT_TRUE(small.find().empty());
  }
  HopMonitor unplanned;  // without a rate to compare with
  for (TimePoint now = at(1); now < at(20); now += milliseconds(200)) {
    unplanned.observe(kHop, 1 << 30, 0, {}, now);
    EXPECT_TRUE(unplanned.find().empty());
  }
}

TEST(HopMonitor, ComparesWithTheFleetIfNoRateWasPlanned) {
  HopMonitor monitor;
  std::vector<HopMonitor::Finding> found;
  double fast = 0, slow = 0;
  for (TimePoint now = at(1); found.empty() && now < at(20); now += milliseconds(200)) {
    fast += 1e6 * 0.2;
    slow += 0.1e6 * 0.2;
    for (std::uint64_t w = 10; w < 14; ++w)
      monitor.observe({kLearnerId, WorkerId{w}}, static_cast<std::uint64_t>(fast), static_cast<std::uint64_t>(fast), {},
                      now);
    monitor.observe(kHop, static_cast<std::uint64_t>(fast), static_cast<std::uint64_t>(slow), {}, now);
    found = monitor.find();
  }
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].hop, kHop);
  EXPECT_NEAR(found[0].expected.bytes_per_s(), 1e6, 0.1e6);
}

// A measuring window that began while the hop was fast does not hide that it is slow now.
TEST(HopMonitor, ReportsAHopThatBecomesSlowWithinTwiceTheGapTime) {
  for (int offset_ms = 0; offset_ms < 2000; offset_ms += 100) {
    SCOPED_TRACE(offset_ms);
    HopMonitor monitor;
    std::vector<HopMonitor::Finding> found;
    double passed = 0;
    const TimePoint slow_from = at(6) + milliseconds(offset_ms);
    TimePoint now = at(1);
    for (; found.empty() && now < at(20); now += milliseconds(200)) {
      passed += (now < slow_from ? 0.9e6 : 0.05e6) * 0.2;
      monitor.observe(kHop, 100'000'000, static_cast<std::uint64_t>(passed), kMegabytePerS, now);
      found = monitor.find();
    }
    ASSERT_EQ(found.size(), 1u);
    EXPECT_GT(now, slow_from);
    EXPECT_LT(now, slow_from + 2 * HopMonitor::kGapTimeMin);
  }
}

// The owner's acknowledgements queue behind its data, so its downlink is slow as well.
TEST(HopMonitor, BlamesAnExhaustedUplinkForItsOwnersSlowDownload) {
  HopMonitor monitor;
  const HopMonitor::Hop incoming{kLearnerId, WorkerId{1}};
  std::vector<HopMonitor::Finding> found;
  for (int s = 0; s < 20 && found.empty(); ++s) {
    const TimePoint now = TimePoint(milliseconds(500) * s);
    const std::uint64_t arrived = static_cast<std::uint64_t>(s) * 200'000;
    monitor.observe(incoming, 100'000'000, arrived, BitRate::from_mbit_per_s(16), now);
    // The gap at the next hop becomes significant only later.
    monitor.observe(kHop, arrived, arrived / 20, kMegabytePerS, now);
    found = monitor.find();
  }
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].hop, kHop);
}

TEST(HopMonitor, ForgetsAWorker) {
  HopMonitor monitor;
  for (TimePoint now = at(1); now < at(4); now += milliseconds(200))
    monitor.observe(kHop, 1 << 30, 0, kMegabytePerS, now);
  monitor.forget(WorkerId{2});
  EXPECT_TRUE(monitor.find().empty());
}

TEST(HopMonitor, ForgetsHopsWithoutReports) {
  HopMonitor monitor;
  for (std::uint64_t w = 2; w < 100; ++w)
    for (TimePoint now = at(static_cast<double>(w) * 10); now < at(static_cast<double>(w) * 10 + 5);
         now += milliseconds(1000)) {
      monitor.observe({WorkerId{1}, WorkerId{w}}, 1 << 30, 1, kMegabytePerS, now);
      monitor.find();
    }
  EXPECT_LE(monitor.size(), 8u);
}

// ---- catching up ----

TEST(CatchUp, FindsTheCheapestPath) {
  const std::map<PublicationKey, std::uint64_t> held{
      {full(0), 1000},    {delta(1, 0), 100}, {delta(2, 1), 100}, {delta(3, 2), 100},
      {delta(3, 0), 150}, {full(2), 900},     {delta(5, 4), 10},  {delta(6, 3), 70},
  };
  const auto path_bytes = [&](std::optional<std::uint64_t> from, std::uint64_t to, bool full_only = false) {
    return cheapest_path_bytes(held, from ? std::optional(Version{*from}) : std::nullopt, Version{to}, full_only);
  };
  EXPECT_EQ(path_bytes({}, 0), 900u);  // the newer snapshot is the cheaper one
  EXPECT_EQ(path_bytes({}, 3), 1000u);
  EXPECT_EQ(path_bytes(0, 3), 150u);  // by the folded delta
  EXPECT_EQ(path_bytes(1, 3), 200u);
  EXPECT_EQ(path_bytes(2, 3), 100u);
  EXPECT_EQ(path_bytes(3, 3), 0u);
  EXPECT_EQ(path_bytes(0, 4), 220u);  // version 4 is not held, so up to 6
  EXPECT_EQ(path_bytes(0, 6), 220u);
  EXPECT_EQ(path_bytes(0, 7), std::nullopt);
  EXPECT_EQ(path_bytes(4, 5), 10u);
  EXPECT_EQ(path_bytes(4, 6), 1070u);  // by a snapshot, because no deltas lead from 4 to 6
  EXPECT_EQ(path_bytes(0, 2, true), 900u);
  EXPECT_EQ(path_bytes(0, 3, true), std::nullopt);
  EXPECT_EQ(cheapest_path_bytes({}, Version{1}, Version{2}, false), std::nullopt);
}

}  // namespace
}  // namespace echoline::overlay
