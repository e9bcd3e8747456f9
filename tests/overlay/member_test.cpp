// A worker's protocol, driven by hand: its checks, its refusals, and its timeouts.
#include "tests/overlay/member.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

TEST(Member, JoinsAndReportsItsHoldings) {
  Member m;
  const auto dial = m.all<act::Dial>();
  ASSERT_EQ(dial.size(), 2u);
  EXPECT_EQ(dial[0].service, act::Service::kControl);
  EXPECT_EQ(dial[0].expected, kLearnerId);
  EXPECT_EQ(dial[1].service, act::Service::kData);
  EXPECT_EQ(dial[1].expected, kParent);
  EXPECT_EQ(m.sent<Hello>(kControl).at(0).name, "offer");
  EXPECT_EQ(m.last<act::ReportWelcome>()->welcome, "welcome");
  EXPECT_EQ(m.sent<PeerHello>(m.parent).size(), 1u);
  EXPECT_EQ(m.all<act::UseCertificate>().size(), 1u);
}

TEST(Member, DeliversInAnOrderThatCanBeInstalled) {
  Member m;
  m.deliver_publication(make(delta(2, 1), 1500));
  m.deliver_publication(make(delta(1, 0), 1500));
  EXPECT_THAT(m.delivered(), IsEmpty());
  m.deliver_publication(make(full(0), 3000));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0), delta(1, 0), delta(2, 1)));
  std::vector<bool> activated;
  for (const auto& d : m.all<act::DeliverPublication>()) activated.push_back(d.publication.activate);
  EXPECT_THAT(activated, ElementsAre(false, false, true));  // only the last of those delivered together
  m.deliver_publication(make(delta(1, 0), 500));            // behind: ignored
  m.deliver_publication(make(full(5), 500));                // ahead: a jump
  m.deliver_publication(make(delta(6, 5), 0));              // nothing changed
  m.deliver_publication(make(delta(4, 3), 10));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0), delta(1, 0), delta(2, 1), full(5), delta(6, 5)));
  m.core.installed(Version{5}, digest_of(5), m.now);
  m.core.installed(Version{2}, digest_of(2), m.now);  // never backwards
  m.core.installed(Version{9}, digest_of(9), m.now);  // never delivered
  m.take();
  EXPECT_THAT(m.sent<Installed>(kControl), ElementsAre(Installed{Version{5}, digest_of(5), 0}));
}

// ---- bad chunks and forged messages ----

TEST(Member, ABadChunkIsRefusedAskedForAgainAndReported) {
  Member m;
  const Made made = make(full(0), 3000);
  m.deliver_control(m.parent, made.opening);
  m.deliver_frame(m.parent, made.chunk(0));
  m.deliver_frame(m.parent, with_flipped_bit(made.chunk(1), 3));
  m.deliver_frame(m.parent, made.chunk(2));
  m.deliver_control(m.parent, made.closing);
  EXPECT_THAT(m.delivered(), IsEmpty());
  const auto requests = m.sent<ChunkRequest>(m.parent);
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].publication, made.id);
  EXPECT_EQ(requests[0].index, 1u);
  const auto poisoned = m.sent<Poisoned>(kControl);
  ASSERT_EQ(poisoned.size(), 1u);
  EXPECT_EQ(poisoned[0].parent, kParent);
  EXPECT_EQ(poisoned[0].publication, made.id);
  EXPECT_EQ(poisoned[0].index, 1u);
  m.deliver_frame(m.parent, made.chunk(1));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
  EXPECT_EQ(m.core.stats().chunks_corrupt, 1u);
  EXPECT_FALSE(m.closed(m.parent));
}

TEST(Member, GivesUpAnEdgeAfterTheSecondBadChunk) {
  Member m;
  const Made made = make(full(0), 3000);
  m.deliver_control(m.parent, made.opening);
  m.deliver_frame(m.parent, with_flipped_bit(made.chunk(1), 3));
  m.deliver_frame(m.parent, with_flipped_bit(made.chunk(0), 3));
  EXPECT_EQ(m.sent<Poisoned>(kControl).size(), 2u);
  const auto failed = m.sent<EdgeFailed>(kControl);
  ASSERT_EQ(failed.size(), 1u);
  EXPECT_EQ(failed[0].parent, kParent);
  EXPECT_EQ(failed[0].kind, EdgeTroubleKind::kRefused);
  EXPECT_TRUE(m.closed(m.parent));
}

TEST(Member, ReleasesAHelperAfterTheSecondBadChunk) {
  Member m;
  m.newest = Version{3};
  m.pass_time(kBeat * (StallWatch::kStallHeartbeats + 2));
  const std::size_t asked = m.sent<NeedHelp>(kControl).size();
  ASSERT_GE(asked, 1u);
  m.deliver_control(kControl, Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{3}, false});
  const ConnId helper = m.last<act::Dial>()->conn;
  m.core.on_connected(helper, m.now);
  const Made made = make(full(3), 3000);
  m.deliver_control(helper, made.opening);
  m.deliver_frame(helper, with_flipped_bit(made.chunk(1), 3));
  m.deliver_frame(helper, made.chunk(0));  // a valid chunk in between does not reset the count
  EXPECT_FALSE(m.closed(helper));
  m.deliver_frame(helper, with_flipped_bit(made.chunk(2), 3));
  EXPECT_TRUE(m.closed(helper));
  EXPECT_EQ(m.last<act::Dial>()->conn, helper) << "it is not dialled again";
  EXPECT_EQ(m.sent<NeedHelp>(kControl).size(), asked + 1) << "it asks for another helper";
}

// If seconds of earlier data wait in the network, a newly dialled helper queues behind them. A helper that is heard but
// brings no chunk gets no more time.
TEST(Member, GivesEachHelperMoreTimeWhileItIsSilent) {
  constexpr int kPatience = StallWatch::kStallHeartbeats;
  for (const bool heard : {false, true}) {
    Member m;
    m.newest = Version{3};
    std::vector<TimePoint> asked;
    ConnId helper{};
    const auto pass = [&](int beats) {
      for (const TimePoint end = m.now + kBeat * beats; m.now < end;) {
        const std::size_t calls = m.sent<NeedHelp>(kControl).size(), dials = m.all<act::Dial>().size();
        m.pass_time(kBeat);
        if (m.sent<NeedHelp>(kControl).size() > calls) {
          asked.push_back(m.now);
          m.deliver_control(kControl, Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{3}, false});
        }
        if (m.all<act::Dial>().size() > dials) m.core.on_connected(helper = m.last<act::Dial>()->conn, m.now);
        m.take();
        if (heard && helper != ConnId{}) m.deliver_control(helper, EdgeStatus{});
      }
    };
    pass(heard ? 5 * kPatience : 17 * kPatience);
    ASSERT_GE(asked.size(), 4u) << heard;
    for (std::size_t i = 1; i < asked.size(); ++i) {
      const Duration gap = asked[i] - asked[i - 1];
      if (heard)
        EXPECT_LE(gap, kBeat * (kPatience + 1)) << i;
      else
        EXPECT_GE(gap, kBeat * kPatience * std::min(1 << (i - 1), 4)) << i;
    }
    const Made made = make(full(3), 3000);
    m.deliver_control(m.parent, made.opening);
    m.deliver_frame(m.parent, made.chunk(0));
    const TimePoint came = m.now;
    const std::size_t before = asked.size();
    pass(kPatience + 2);
    ASSERT_EQ(asked.size(), before + 1) << heard;
    EXPECT_LE(asked.back() - came, kBeat * (kPatience + 1));
  }
}

TEST(Member, RefusesPublicationsOfOtherSigners) {
  const auto poisoned = [](const MadeOptions& options) {
    Member m;
    m.deliver_publication(make(full(0), 500, options));
    EXPECT_THAT(m.delivered(), IsEmpty());
    return m.sent<Poisoned>(kControl).size();
  };
  EXPECT_GE(poisoned({.key = "mallory"}), 1u);
  EXPECT_GE(poisoned({.run_id = "another run"}), 1u);  // even by the same key
}

TEST(Member, RefusesPublicationsThatExpiredByTheLearnersClock) {
  const MadeOptions old{.issued_unix_s = kMadeUnix_s - 100'000};  // a day ago and more
  Member m;
  m.deliver_publication(make(full(0), 500, old));
  EXPECT_THAT(m.delivered(), IsEmpty());
  EXPECT_THAT(m.sent<Poisoned>(kControl), IsEmpty());  // genuine, only old
  m.deliver_publication(make(full(0), 500));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
  // A worker whose clock is two days late still refuses old publications, and one whose clock is early accepts new
  // ones.
  Member late(config(kMadeUnix_s - 200'000));
  late.deliver_publication(make(full(0), 500, old));
  EXPECT_THAT(late.delivered(), IsEmpty());
  Member early(config(kMadeUnix_s + 200'000));
  early.deliver_publication(make(full(0), 500));
  EXPECT_THAT(early.delivered(), ElementsAre(full(0)));
}

TEST(Member, RefusesADeltaOnAnotherBaseAndAsksForASnapshot) {
  Member m;
  m.deliver_publication(make(full(0), 500));
  m.deliver_publication(make(delta(1, 0), 500, {.base_digest = digest_of(99)}));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
  const auto help = m.sent<NeedHelp>(kControl);
  ASSERT_EQ(help.size(), 1u);
  EXPECT_EQ(help[0].target, Version{1});
  EXPECT_TRUE(help[0].full_only);
  m.deliver_publication(make(full(1), 500));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0), full(1)));
}

TEST(Member, NeverGoesBackBehindItsFloor) {
  MemberConfig c = config();
  c.durable = true;
  c.state.floor = Installed{Version{5}, digest_of(5), 0};
  {
    Member m(c);
    m.deliver_publication(make(full(3), 500));  // genuine and not expired, and perhaps on the path to version 5
    EXPECT_THAT(m.delivered(), IsEmpty());
    m.deliver_publication(make(delta(4, 3), 500));
    EXPECT_THAT(m.delivered(), IsEmpty());
    m.deliver_publication(make(delta(5, 4), 500));
    EXPECT_THAT(m.delivered(), ElementsAre(full(3), delta(4, 3), delta(5, 4)));
    m.deliver_publication(make(full(4), 500));
    EXPECT_EQ(m.delivered().size(), 3u);
  }
  {  // a version has one digest, also for a learner that changed its mind
    Member m(c);
    m.deliver_publication(make(full(5), 500, {.policy_digest = digest_of(6)}));
    EXPECT_THAT(m.delivered(), IsEmpty());
    m.deliver_publication(make(full(6), 500));
    EXPECT_THAT(m.delivered(), ElementsAre(full(6)));
  }
}

TEST(Member, ANewEpochInvalidatesTheVersionsBeforeIt) {
  Member m;
  m.deliver_publication(make(full(0), 500));
  m.deliver_publication(make(delta(1, 0), 500));
  m.deliver_publication(make(full(0), 600, {.epoch = 1}));  // the learner went back
  EXPECT_THAT(m.delivered(), ElementsAre(full(0), delta(1, 0), full(0)));
  m.core.installed(Version{0}, digest_of(0), m.now);  // the application has not yet read the new one
  m.core.installed(Version{1}, digest_of(1), m.now);
  m.take();
  EXPECT_TRUE(m.sent<Installed>(kControl).empty());
  m.core.installed(Version{0}, digest_of(0), m.now);
  m.take();
  ASSERT_FALSE(m.sent<Installed>(kControl).empty());
  EXPECT_EQ(m.sent<Installed>(kControl).back(), (Installed{Version{0}, digest_of(0), 1}));
  m.deliver_publication(make(delta(2, 1), 500));  // of the old one
  m.deliver_publication(make(full(9), 500));
  EXPECT_EQ(m.delivered().size(), 3u);
  m.deliver_publication(make(delta(1, 0), 700, {.epoch = 1}));
  EXPECT_EQ(m.delivered().size(), 4u);
}

TEST(Member, SavesBeforeItActivates) {
  MemberConfig c = config();
  c.durable = true;
  MemberCore core(c);
  const TimePoint now(seconds(1));
  core.start(now);
  ASSERT_FALSE(core.take_actions().empty());
  core.on_saved(ok(), now);
  const Made made = make(full(0), 500);
  core.on_connected(kControl, now);
  const auto deliver_control = [&](ConnId conn, const ControlMessage& m) {
    const Slice frame(encode_control(m));
    core.on_frame(conn, {FrameType::kControl, frame.part(8, frame.size() - 8), {}, {}}, now);
  };
  deliver_control(kControl, Welcome{kSelf, kBeat, seconds(9), static_cast<std::uint64_t>(kMadeUnix_s * 1e3), ""});
  deliver_control(kControl, Assign{1, {{kLearnerId, {"10.0.0.0", 1}, 1, false}}});
  core.on_connected(ConnId{3}, now);
  deliver_control(ConnId{3}, made.opening);
  core.on_frame(ConnId{3}, made.chunk(0), now);
  deliver_control(ConnId{3}, made.closing);
  std::optional<act::SaveState> save;
  for (Action& a : core.take_actions()) {
    EXPECT_FALSE(std::holds_alternative<act::DeliverPublication>(a));
    if (auto* s = std::get_if<act::SaveState>(&a)) save = *s;
  }
  ASSERT_TRUE(save.has_value());
  EXPECT_EQ(decode_worker_state(save->bytes)->floor, (Installed{Version{0}, digest_of(0), 0}));
  core.on_saved(ok(), now);
  const auto actions = core.take_actions();
  EXPECT_TRUE(std::any_of(actions.begin(), actions.end(),
                          [](const Action& a) { return std::holds_alternative<act::DeliverPublication>(a); }));
}

// ---- beacons ----

TEST(Member, AcceptsBeaconsOnlyByTheirSignature) {
  const auto after = [](auto&& change, std::string_view key = "authority") {
    Member m;
    Beacon b = m.beacon(10);
    b.revoked = {kSelf};
    change(b);
    m.deliver_control(m.parent, EdgeStatus{sign(b, made_key(key)), {}});  // passed on by the parent
    return m.end();
  };
  EXPECT_THAT(after([](Beacon&) {}), HasSubstr("revoked"));
  EXPECT_EQ(after([](Beacon&) {}, "mallory"), "");
  EXPECT_EQ(after([](Beacon& b) { b.run_id = "another"; }), "");
  EXPECT_EQ(after([](Beacon& b) { b.expires_unix_ms = b.issued_unix_ms - 5000; }), "");
  EXPECT_EQ(after([](Beacon& b) { b.revoked = {WorkerId{8}}; }), "");
  Member m;  // replayed: older than one that was heard
  Beacon b = m.beacon(10);
  m.deliver_control(kControl, sign(b, made_key("authority")));
  b = m.beacon(9);
  b.revoked = {kSelf};
  m.deliver_control(kControl, sign(b, made_key("authority")));
  EXPECT_EQ(m.end(), "");
}

// A welcome that waited in a socket while the machine was suspended has a time of hours ago.
TEST(Member, ABeaconIsNotFromTheLearnersFuture) {
  Member m;
  Beacon b = m.beacon(10);
  const std::uint64_t later_ms = 3 * 3'600'000;
  b.issued_unix_ms += later_ms;
  b.expires_unix_ms += later_ms;
  const double before = m.core.run_unix_s(m.now);
  m.deliver_control(m.parent, EdgeStatus{sign(b, made_key("authority")), {}});
  EXPECT_NEAR(m.core.run_unix_s(m.now), before, 1) << "a beacon from another worker does not set the clock";
  b = m.beacon(11);
  b.issued_unix_ms += later_ms;
  b.expires_unix_ms += later_ms;
  m.deliver_control(kControl, sign(b, made_key("authority")));
  EXPECT_NEAR(m.core.run_unix_s(m.now), before + 3 * 3600, 5);
  m.pass_time(seconds(1));
  EXPECT_FALSE(m.sent<Renew>(kControl).empty()) << "its certificate has expired by that time";
  b = m.beacon(12);  // a delayed beacon
  m.deliver_control(kControl, sign(b, made_key("authority")));
  EXPECT_NEAR(m.core.run_unix_s(m.now), before + 3 * 3600, 5);
}

TEST(Member, TurnsAwayARevokedWorker) {
  Member m;
  m.core.on_accepted(ConnId{2}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, m.now);
  m.deliver_control(ConnId{2}, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
  EXPECT_FALSE(m.closed(ConnId{2}));
  Beacon b = m.beacon(10);
  b.revoked = {kParent, WorkerId{9}};
  m.deliver_control(kControl, sign(b, made_key("authority")));
  EXPECT_TRUE(m.closed(ConnId{2}));
  EXPECT_TRUE(m.closed(m.parent));
  m.core.on_accepted(ConnId{4}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, m.now);
  m.take();
  EXPECT_TRUE(m.closed(ConnId{4}));
}

TEST(Member, AsksForHelpIfNoParentSendsAnAnnouncedVersion) {
  Member m;
  m.newest = Version{3};
  m.pass_time(kBeat * (StallWatch::kStallHeartbeats - 2));
  EXPECT_THAT(m.sent<NeedHelp>(kControl), IsEmpty());
  m.pass_time(kBeat * 4);
  ASSERT_EQ(m.sent<NeedHelp>(kControl).size(), 1u);
  EXPECT_EQ(m.sent<NeedHelp>(kControl)[0].target, Version{3});
  EXPECT_TRUE(m.sent<NeedHelp>(kControl)[0].stalled);
}

TEST(Member, ForgetsAVersionThatTheLearnerWithdrew) {
  Member m;
  const Made taken_back = make(full(3), 3000);
  m.deliver_control(m.parent, taken_back.opening);
  m.deliver_frame(m.parent, taken_back.chunk(0));
  m.pass_time(kBeat);  // it may not have counted it yet
  EXPECT_GT(m.core.stats().memory.count, 0u);
  m.pass_time(seconds(2));
  EXPECT_EQ(m.core.stats().memory.count, 0u);
  m.pass_time(kBeat * (StallWatch::kStallHeartbeats + 2));
  EXPECT_THAT(m.sent<NeedHelp>(kControl), IsEmpty());
}

// The beacon's sequence number grows even if the learner's clock goes back.
TEST(Member, ForgetsAWithdrawnVersionThoughTheLearnersClockWentBack) {
  Member m;
  const Made taken_back = make(full(3), 3000);
  m.deliver_control(m.parent, taken_back.opening);
  m.deliver_frame(m.parent, taken_back.chunk(0));
  Beacon beacon = m.beacon(taken_back.announcement.issued + 10'000);
  beacon.issued_unix_ms -= 3 * 3'600'000;
  m.deliver_control(kControl, sign(beacon, made_key("authority")));
  EXPECT_EQ(m.core.stats().memory.count, 0u);
}

// Each announcement ends before the publication is complete, and the same chunks arrive again. This is no progress.
TEST(Member, AsksForHelpThoughItsPublicationRestartsAgainAndAgain) {
  Member m;
  m.newest = Version{3};
  for (int i = 0; i < 6; ++i) {
    MadeOptions again;
    again.issued_unix_s += i;
    const Made made = make(full(3), 3000, again);
    m.deliver_control(m.parent, made.opening);
    m.deliver_frame(m.parent, made.chunk(0));
    EXPECT_EQ(m.core.stats().memory.count, made.chunk(0).body.size());
    m.pass_time(kBeat * StallWatch::kStallHeartbeats / 4);
  }
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
}

// The learner signed the version again after a restart. This worker alone has some of the new copy, and all others have
// the old one whole.
TEST(Member, DropsANewerCopyThatNoParentFinishes) {
  Member m;
  MadeOptions before, after;
  before.seed = 1;
  after.issued_unix_s = before.issued_unix_s + 1;
  const Made older = make(full(3), 3000, before), newer = make(full(3), 3000, after);
  m.newest = Version{3};
  m.deliver_control(m.parent, newer.opening);
  m.deliver_frame(m.parent, newer.chunk(0));
  m.deliver_publication(older);  // the parent with the older copy may be behind itself, so the copy is refused for now
  EXPECT_THAT(m.delivered(), IsEmpty());
  m.pass_time(kBeat * (StallWatch::kStallHeartbeats - 2));
  EXPECT_GT(m.core.stats().memory.count, 0u);
  m.pass_time(kBeat * 4);
  ASSERT_EQ(m.sent<NeedHelp>(kControl).size(), 1u);
  EXPECT_EQ(m.core.stats().memory.count, 0u);
  m.deliver_control(kControl, Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{3}, false});
  const ConnId helper = m.last<act::Dial>()->conn;
  m.core.on_connected(helper, m.now);
  m.deliver_publication(helper, older);
  EXPECT_THAT(m.delivered(), ElementsAre(full(3)));
}

// ---- edges ----

TEST(Member, ForwardsEachProvenChunkAsItComes) {
  Member m;
  const Made made = make(full(0), 3000);
  m.core.on_accepted(ConnId{2}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, m.now);
  m.deliver_control(ConnId{2}, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
  m.deliver_control(m.parent, made.opening);
  m.deliver_frame(m.parent, made.chunk(2));
  EXPECT_EQ(m.core.stats().chunk_bytes_forwarded.count, made.chunks[2].data.size());
  m.deliver_frame(m.parent, with_flipped_bit(made.chunk(0), 3));  // a bad chunk is never forwarded
  EXPECT_EQ(m.core.stats().chunk_bytes_forwarded.count, made.chunks[2].data.size());
  // The forwarded chunk shares its bytes with the received one.
  const auto sends = m.all<act::Send>();
  EXPECT_TRUE(std::any_of(sends.begin(), sends.end(), [&](const act::Send& s) {
    return s.conn == ConnId{2} && s.tail.data() == made.chunks[2].data.data();
  }));
}

TEST(Member, RefusesChildrenItShouldNotHave) {
  using Kind = trust::PeerIdentity::Kind;
  Member m;
  std::uint64_t next = 2;
  const auto comes = [&](const trust::PeerIdentity& identity, std::optional<ControlMessage> says) {
    const ConnId conn{next};
    next += 2;
    m.core.on_accepted(conn, {"10.0.0.9", identity}, m.now);
    m.take();
    if (says) m.deliver_control(conn, *says);
    return m.closed(conn);
  };
  const PeerHello hello{"run", 0, {}, false, {}, made_grant(9, 7)};
  EXPECT_FALSE(comes({Kind::kWorker, WorkerId{9}}, hello));
  EXPECT_TRUE(comes({Kind::kAnonymous, {}}, {}));
  EXPECT_TRUE(comes({Kind::kLearner, kLearnerId}, hello));
  EXPECT_TRUE(comes({Kind::kWorker, kSelf}, hello));
  EXPECT_TRUE(comes({Kind::kWorker, WorkerId{10}}, PeerHello{"another", 0, {}, false, {}}));
  EXPECT_TRUE(comes({Kind::kWorker, WorkerId{10}}, Draining{}));
  EXPECT_TRUE(comes({Kind::kWorker, WorkerId{10}}, EdgeStatus{}));  // no dial was requested
  // A silent connection is closed in time.
  const ConnId silent{next};
  EXPECT_FALSE(comes({Kind::kWorker, WorkerId{11}}, {}));
  m.pass_time(Core::kHandshakeTimeout);
  EXPECT_TRUE(m.closed(silent));
}

TEST(Member, TheConnectionsOfOneCertificateKeepNoWorkerOut) {
  using Kind = trust::PeerIdentity::Kind;
  MemberConfig c = config();
  c.core.connections = ConnectionLimits::of(1024);
  const ConnectionLimits limits = c.core.connections;
  Member m(std::move(c));
  std::uint64_t next = 2;
  const auto comes = [&](WorkerId who) {
    const ConnId conn{std::exchange(next, next + 2)};
    m.core.on_accepted(conn, {"10.0.0.9", {Kind::kWorker, who}}, m.now);
    m.take();
    return conn;
  };
  const ConnId patient = comes(WorkerId{8});
  std::size_t open = 0;
  std::vector<ConnId> flood;
  for (int i = 0; i < 900; ++i) flood.push_back(comes(WorkerId{9}));
  for (const ConnId conn : flood) open += !m.closed(conn);
  EXPECT_EQ(open, limits.per_identity);
  for (const auto& admitted : m.all<act::Admit>())  // no more than a little memory for any of them
    EXPECT_EQ(std::count(flood.begin(), flood.end(), admitted.conn), 0);
  const ConnId child = comes(WorkerId{10});
  m.deliver_control(child, PeerHello{"run", 0, {}, false, {}, made_grant(10, 7)});
  m.deliver_control(patient, PeerHello{"run", 0, {}, false, {}, made_grant(8, 7)});
  EXPECT_FALSE(m.closed(child));
  EXPECT_FALSE(m.closed(patient));
  m.deliver_publication(make(full(0), 500));
  EXPECT_EQ(m.core.stats().chunk_bytes_forwarded.count, 1000u);
}

// A worker that holds parts of many versions lists them in a second message, because a parent accepts no long message
// from an unknown peer.
TEST(Member, ReportsItsHoldingsInMessagesThatAnUnknownPeerMaySend) {
  Member m;
  for (std::uint64_t v = 1; v <= 200; ++v) {
    const Made made = make(full(v), 9000);
    m.deliver_control(m.parent, made.opening);
    m.deliver_frame(m.parent, made.chunk(v % 9));
  }
  m.assign({{WorkerId{5}, {"10.0.0.5", 1}, 1, false}});
  const ConnId conn = m.last<act::Dial>()->conn;
  m.core.on_connected(conn, m.now);
  m.take();
  std::size_t largest = 0;
  const auto hello = m.sent<PeerHello>(conn);
  ASSERT_EQ(hello.size(), 1u);
  EXPECT_LE(encode_control(hello[0]).size(), kFrameHeaderBytes + kPendingPeerBytesMax);
  EXPECT_TRUE(hello[0].have_follows);
  const auto have = m.sent<Have>(conn);
  ASSERT_EQ(have.size(), 1u);
  for (const auto& [key, item] : have[0].items) largest = std::max<std::size_t>(largest, item.chunks.count());
  EXPECT_GT(have[0].items.size(), 50u);
  EXPECT_EQ(largest, 1u);
  // The parent accepts such a child after both messages.
  Member parent;
  const Made made = make(full(300), 500);
  parent.core.on_accepted(ConnId{2}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, parent.now);
  parent.deliver_publication(made);
  PeerHello granted = hello[0];
  granted.grant = made_grant(9, 7);
  parent.deliver_control(ConnId{2}, granted);
  EXPECT_EQ(parent.core.stats().chunk_bytes_forwarded.count, 0u);
  parent.deliver_control(ConnId{2}, have[0]);
  EXPECT_EQ(parent.core.stats().chunk_bytes_forwarded.count, 500u);
}

// A certificate alone does not make a child. The child needs a recent grant of the learner for this parent and these
// stripes.
TEST(Member, ServesOnlyChildrenThatTheLearnerHasSent) {
  Member m;
  std::uint64_t next = 2;
  const auto comes = [&](const PeerHello& hello, std::uint64_t who = 9) {
    const ConnId conn{std::exchange(next, next + 2)};
    m.core.on_accepted(conn, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{who}}}, m.now);
    m.deliver_control(conn, hello);
    return conn;
  };
  const auto served = [&](const PeerHello& hello) { return !m.closed(comes(hello)); };
  Have half;
  half.wanted = {2, 0b01};
  const GrantOptions halves{.stripes = 2, .mask = 0b01};
  EXPECT_FALSE(served({"run", 0, {}, false, {}}));
  EXPECT_FALSE(served({"run", 0, {}, false, {}, made_grant(8, 7)})) << "another child's grant";
  EXPECT_FALSE(served({"run", 0, {}, false, {}, made_grant(9, 6)})) << "a grant for another parent";
  EXPECT_FALSE(served({"run", 0, {}, false, {}, made_grant(9, 7, {.key = "mallory"})})) << "a forged grant";
  EXPECT_FALSE(served({"run", 0, {}, false, {}, made_grant(9, 7, {.issued_unix_s = kMadeUnix_s - 9, .lifetime_s = 5})}))
      << "an expired grant";
  EXPECT_FALSE(served({"run", 0, {}, false, {}, made_grant(9, 7, halves)}))
      << "it asks for all stripes with a grant for one";
  EXPECT_FALSE(served({"run", 1, {}, false, {}, made_grant(9, 7, halves)})) << "the same in a further stream";
  EXPECT_FALSE(served({"run", 0, Version{3}, false, {}, made_grant(9, 7)}))
      << "it asks for help with a grant for a place";
  EXPECT_FALSE(served({"run", 0, Version{3}, true, {}, made_grant(9, 7, {.catch_up_to = Version{3}})}));
  EXPECT_FALSE(served({"run", 0, Version{3}, false, {}, made_grant(9, 6, {.catch_up_to = Version{3}})}))
      << "another's help";
  EXPECT_TRUE(served({"run", 0, Version{3}, false, {}, made_grant(9, 7, {.catch_up_to = Version{3}})}));
  const ConnId child = comes({"run", 0, {}, false, half, made_grant(9, 7, halves)});
  EXPECT_FALSE(m.closed(child));
  // The grant of an open edge may change. Its other properties may not.
  Have both;
  both.wanted = {2, 0b11};
  m.deliver_control(child, made_grant(9, 7, {.stripes = 2, .mask = 0b11}));
  m.deliver_control(child, both);
  EXPECT_FALSE(m.closed(child));
  m.deliver_control(child, Have{});
  EXPECT_TRUE(m.closed(child));
}

TEST(Member, ServesAChildAsLongAsTheLearnerWantsItTo) {
  Member m;
  const auto comes = [&](std::uint64_t conn, std::uint64_t who, double lifetime_s) {
    m.core.on_accepted(ConnId{conn}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{who}}}, m.now);
    m.deliver_control(ConnId{conn}, PeerHello{"run", 0, {}, false, {}, made_grant(who, 7, {.lifetime_s = lifetime_s})});
  };
  comes(2, 9, 20);
  comes(4, 10, 20);
  m.pass_time(seconds(18), false);  // also while the learner is out of reach
  EXPECT_FALSE(m.closed(ConnId{2}));
  m.deliver_control(ConnId{4}, made_grant(10, 7, {.issued_unix_s = kMadeUnix_s + 18}));
  m.pass_time(seconds(8), false);
  EXPECT_TRUE(m.closed(ConnId{2}));
  EXPECT_FALSE(m.closed(ConnId{4}));
  Member n;  // released, because the learner has given it another parent
  n.core.on_accepted(ConnId{2}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, n.now);
  n.deliver_control(ConnId{2}, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
  n.deliver_control(kControl, Release{WorkerId{9}, static_cast<std::uint64_t>(kMadeUnix_s * 1e3) + 1});
  EXPECT_TRUE(n.closed(ConnId{2}));
  n.core.on_accepted(ConnId{4}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, n.now);
  n.deliver_control(ConnId{4}, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
  EXPECT_TRUE(n.closed(ConnId{4}));
  n.core.on_accepted(ConnId{6}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, n.now);
  n.deliver_control(ConnId{6},
                    PeerHello{"run", 0, {}, false, {}, made_grant(9, 7, {.issued_unix_s = kMadeUnix_s + 1})});
  EXPECT_FALSE(n.closed(ConnId{6})) << "it is assigned here again";
}

TEST(Member, AnExpiredGrantStaysExpiredIfTheLearnersClockGoesBack) {
  Member m;
  const auto served = [&](ConnId conn, double issued_unix_s) {
    m.core.on_accepted(conn, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, m.now);
    const auto grant = made_grant(9, 7, {.issued_unix_s = issued_unix_s, .lifetime_s = 36'000});
    m.deliver_control(conn, PeerHello{"run", 0, {}, false, {}, grant});
    return !m.closed(conn);
  };
  EXPECT_TRUE(served(ConnId{2}, kMadeUnix_s - 7'200)) << "by the clock, it has not expired";
  m.deliver_control(kControl, SignedBeacon{m.beacon_now()});
  EXPECT_FALSE(served(ConnId{4}, kMadeUnix_s - 7'200)) << "the learner has issued grants later by more than a lifetime";
  EXPECT_TRUE(served(ConnId{6}, kMadeUnix_s));
}

TEST(Member, ShowsItsGrantAndTheOneThatFollows) {
  Member m;
  const SignedGrant first = made_grant(7, 4), second = made_grant(7, 4, {.issued_unix_s = kMadeUnix_s + 60});
  m.deliver_control(kControl, Assign{1, {{WorkerId{5}, {"10.0.0.5", 1}, 1, false}}, first});
  const ConnId conn = m.last<act::Dial>()->conn;
  m.core.on_connected(conn, m.now);
  m.take();
  EXPECT_EQ(m.sent<PeerHello>(conn).at(0).grant, first);
  m.deliver_control(kControl, Assign{1, {{WorkerId{5}, {"10.0.0.5", 1}, 1, false}}, second});
  EXPECT_THAT(m.sent<SignedGrant>(conn), ElementsAre(second));
  EXPECT_TRUE(m.sent<Have>(conn).empty()) << "nothing else has changed";
}

// The certificate expired while the machine slept or the learner was unreachable. The worker's key gets it another one.
TEST(Member, ComesBackThoughItsCertificateHasExpired) {
  const auto certificate = [](double now_unix_s) {
    return *made_authority().issue({made_key("worker 7").public_key(), trust::PeerIdentity::Kind::kWorker, kSelf, 2,
                                    now_unix_s, trust::kWorkerLifetimeMax});
  };
  // The worker knows that it has expired, by the learner's clock.
  Member late(
      [] {
        MemberConfig c = config(kMadeUnix_s);
        c.core.unix_origin_s += 2 * 3600;
        return c;
      }(),
      kMadeUnix_s, false);
  late.take();
  ASSERT_EQ(late.all<act::Dial>().size(), 1u);
  EXPECT_EQ(late.all<act::Dial>()[0].service, act::Service::kEnrol);
  late.core.on_connected(kControl, late.now);
  late.take();
  const auto wish = late.sent<Return>(kControl);
  ASSERT_EQ(wish.size(), 1u);
  EXPECT_TRUE(
      trust::verify(made_key("worker 7").public_key(), "return 4", made_authority().fingerprint(), wish[0].proof));
  late.deliver_control(kControl, Enrolled{kSelf, certificate(kMadeUnix_s + 2 * 3600), made_authority().certificate(),
                                          static_cast<std::uint64_t>((kMadeUnix_s + 2 * 3600) * 1e3)});
  ASSERT_EQ(late.all<act::Dial>().size(), 2u);
  EXPECT_EQ(late.all<act::Dial>()[1].service, act::Service::kControl);
  EXPECT_EQ(late.all<act::UseCertificate>().size(), 2u);
  // The worker does not know, but the learner closes before any message.
  Member m2;
  m2.core.on_closed(kControl, "reset", m2.now);
  m2.pass_time(seconds(1), false);
  const act::Dial first = *m2.last<act::Dial>();
  EXPECT_EQ(first.service, act::Service::kControl);
  m2.core.on_connected(first.conn, m2.now);
  m2.core.on_closed(first.conn, "certificate expired", m2.now);
  m2.pass_time(seconds(1), false);
  EXPECT_EQ(m2.last<act::Dial>()->service, act::Service::kEnrol);
  m2.core.on_connected(m2.last<act::Dial>()->conn, m2.now);
  m2.deliver_control(m2.last<act::Dial>()->conn, Goodbye{"not known here"});
  EXPECT_EQ(m2.end(), "") << "as far as it knows, its certificate is valid";
  m2.pass_time(seconds(1), false);
  EXPECT_EQ(m2.last<act::Dial>()->service, act::Service::kControl);
}

// With a clock that is hours off, the worker uses the learner's time, and both ends report it.
TEST(Member, WorksWithAWrongClockAndSaysSo) {
  for (const double off_s : {-3 * 3600.0, 3 * 3600.0}) {
    MemberConfig c = config(kMadeUnix_s);
    c.core.unix_origin_s += off_s;
    c.state.clock_offset_ms = static_cast<std::int64_t>(-off_s * 1e3);  // as it was when it had joined before
    Member m(std::move(c));
    EXPECT_NEAR(m.core.run_unix_s(m.now), kMadeUnix_s, 1);
    const auto told = m.sent<Trouble>(kControl);
    ASSERT_EQ(told.size(), 1u);
    EXPECT_THAT(told[0].text, HasSubstr(off_s < 0 ? "is 3 h behind the learner's" : "is 3 h ahead of the learner's"));
    m.core.on_accepted(ConnId{2}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, m.now);
    m.deliver_control(ConnId{2}, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
    EXPECT_FALSE(m.closed(ConnId{2}));
    m.deliver_publication(make(full(0), 500));
    EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
  }
  EXPECT_TRUE(Member().sent<Trouble>(kControl).empty());
}

TEST(Member, TellsTheLearnerOfAPathThatSwallowsLargePackets) {
  Member m;
  m.core.on_large_packets_dropped(WorkerId{5}, "the path to 10.0.0.5 swallows packets of 1500 bytes", m.now);
  m.take();
  ASSERT_EQ(m.sent<Trouble>(kControl).size(), 1u);
  EXPECT_THAT(m.sent<Trouble>(kControl)[0].text, HasSubstr("swallows packets"));
}

TEST(Member, KeepsTheParentsThatStay) {
  Member m;
  const Made made = make(full(0), 3000);
  m.deliver_control(m.parent, made.opening);
  m.deliver_frame(m.parent, made.chunk(1));
  m.assign({{kParent, {"10.0.0.4", 1}, 0b01, false}, {WorkerId{5}, {"10.0.0.5", 1}, 0b10, false}}, 2);
  EXPECT_FALSE(m.closed(m.parent));
  ASSERT_FALSE(m.sent<Have>(m.parent).empty());
  EXPECT_EQ(m.sent<Have>(m.parent).back().wanted, (StripeMask{2, 0b01}));
  const ConnId second = m.last<act::Dial>()->conn;
  m.core.on_connected(second, m.now);
  m.take();
  const auto hello = m.sent<PeerHello>(second);
  ASSERT_EQ(hello.size(), 1u);
  EXPECT_EQ(hello[0].have.wanted, (StripeMask{2, 0b10}));
  EXPECT_TRUE(hello[0].have.items.at(full(0)).chunks.contains(1));
  EXPECT_EQ(hello[0].have.items.at(full(0)).chunks.count(), 1u);
  m.assign({{WorkerId{5}, {"10.0.0.5", 1}, 1, false}});
  EXPECT_TRUE(m.closed(m.parent));
  EXPECT_FALSE(m.closed(second));
}

TEST(Member, ReportsABrokenEdgeAndDialsAgainAfterLongerPauses) {
  Member m;
  std::vector<Duration> waits;
  ConnId conn = m.parent;
  for (int i = 0; i < 8; ++i) {
    m.core.on_closed(conn, "reset", m.now);
    m.take();
    const TimePoint broke = m.now;
    while (m.last<act::Dial>()->conn == conn) m.pass_time(milliseconds(10));
    waits.push_back(m.now - broke);
    conn = m.last<act::Dial>()->conn;
  }
  EXPECT_EQ(m.sent<EdgeFailed>(kControl).size(), 8u);
  EXPECT_EQ(m.sent<EdgeFailed>(kControl)[0].kind, EdgeTroubleKind::kLost);
  EXPECT_EQ(m.sent<EdgeFailed>(kControl)[1].kind, EdgeTroubleKind::kUnreachable);
  EXPECT_LE(waits.front(), milliseconds(100));
  EXPECT_GE(waits.back(), milliseconds(1500));
  EXPECT_LE(waits.back(), milliseconds(2100));
}

TEST(Member, LetsItsParentDialIfItCannot) {
  Member m;
  m.assign({{WorkerId{5}, {"10.0.0.5", 1}, 1, true}});
  EXPECT_EQ(m.all<act::Dial>().size(), 2u);  // none to the new parent
  m.core.on_accepted(ConnId{2}, {"10.0.0.5", {trust::PeerIdentity::Kind::kWorker, WorkerId{5}}}, m.now);
  m.deliver_control(ConnId{2}, EdgeStatus{});
  EXPECT_EQ(m.sent<PeerHello>(ConnId{2}).size(), 1u);
  m.deliver_publication(ConnId{2}, make(full(0), 500));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
  // The worker reports a parent that does not dial.
  m.assign({{WorkerId{6}, {"10.0.0.6", 1}, 1, true}});
  m.pass_time(Core::kHandshakeTimeout + milliseconds(10));
  ASSERT_EQ(m.sent<EdgeFailed>(kControl).size(), 1u);
  EXPECT_EQ(m.sent<EdgeFailed>(kControl)[0].kind, EdgeTroubleKind::kUnreachable);
}

TEST(Member, DialsAChildThatCannotReachIt) {
  Member m;
  m.deliver_publication(make(full(0), 500));
  m.deliver_control(kControl, DialChild{WorkerId{9}, {"10.0.0.9", 1}});
  const act::Dial dial = *m.last<act::Dial>();
  EXPECT_EQ(dial.expected, WorkerId{9});
  m.core.on_connected(dial.conn, m.now);
  m.take();
  EXPECT_EQ(m.sent<EdgeStatus>(dial.conn).size(), 1u);
  m.deliver_control(dial.conn, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
  EXPECT_EQ(m.core.stats().chunk_bytes_forwarded.count, 500u);
  m.deliver_control(dial.conn, MoreStreams{4});
  EXPECT_EQ(m.all<act::Dial>().size(), 2u + 1 + 3);
  m.deliver_control(kControl, DialChild{kSelf, {"10.0.0.9", 1}});  // itself, which is invalid
  EXPECT_EQ(m.all<act::Dial>().size(), 2u + 1 + 3);
}

// On a long path, the parent repeats its refusal before the helper has sent anything.
TEST(Member, AHelperGetsItsTimeThoughAParentRefusesInBetween) {
  Member m;
  m.newest = Version{5};
  m.pass_time(kBeat);
  m.deliver_control(m.parent, CannotServe{Version{5}, false});
  ASSERT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
  m.pass_time(kBeat);
  m.deliver_control(m.parent, CannotServe{Version{5}, false});
  m.deliver_control(kControl, Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{5}, false});
  const ConnId helper = m.last<act::Dial>()->conn;
  m.core.on_connected(helper, m.now);
  m.take();
  for (int beat = 0; beat < 8; ++beat) {  // longer than from one call for help to the next
    m.pass_time(kBeat);
    if (!m.closed(helper)) m.deliver_control(helper, EdgeStatus{});
  }
  EXPECT_FALSE(m.closed(helper));
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
}

TEST(Member, AsksTheLearnerWhenItsParentCannotServe) {
  Member m;
  m.deliver_control(m.parent, CannotServe{Version{5}, false});
  ASSERT_EQ(m.sent<NeedHelp>(kControl).size(), 1u);
  m.deliver_control(m.parent, CannotServe{Version{5}, false});  // a repetition, which is not reported again
  EXPECT_EQ(m.sent<NeedHelp>(kControl).size(), 1u);
  EXPECT_FALSE(m.sent<NeedHelp>(kControl)[0].stalled) << "its parent reports it";
  m.deliver_control(kControl, Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{5}, false});
  const act::Dial dial = *m.last<act::Dial>();
  EXPECT_EQ(dial.to, (Endpoint{"10.0.0.6", 1}));
  m.core.on_connected(dial.conn, m.now);
  m.take();
  EXPECT_EQ(m.sent<PeerHello>(dial.conn).at(0).catch_up_to, Version{5});
  EXPECT_EQ(m.sent<PeerHello>(dial.conn).at(0).have.position, std::nullopt);
  EXPECT_EQ(m.sent<Have>(m.parent).back().position, Version{5});  // the parent need not send it as well
  m.deliver_publication(dial.conn, make(full(5), 100));
  EXPECT_THAT(m.delivered(), ElementsAre(full(5)));
  EXPECT_TRUE(m.closed(dial.conn));
  EXPECT_EQ(m.sent<Have>(m.parent).back().position, Version{5});
}

TEST(Member, AsksAgainWhenTheHelperFails) {
  Member m;
  m.deliver_control(m.parent, CannotServe{Version{5}, false});
  m.deliver_control(kControl, Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{5}, false});
  for (int i = 0; i < 3; ++i) {
    const ConnId conn = m.last<act::Dial>()->conn;
    m.core.on_closed(conn, "refused", m.now);
    m.take();
    m.pass_time(kBeat * 4);
  }
  EXPECT_GE(m.sent<NeedHelp>(kControl).size(), 2u);
  EXPECT_THAT(m.sent<EdgeFailed>(kControl), IsEmpty());  // a helper is no parent
  EXPECT_EQ(m.sent<Have>(m.parent).back().position, std::nullopt);
}

// ---- the learner ----

TEST(Member, GoesOnWithoutTheLearnerForAWhileAndComesBack) {
  Member m;
  const TimePoint heard = m.now;
  while (m.all<act::ReportLearnerAway>().empty()) m.pass_time(milliseconds(100), false);
  EXPECT_GE(m.now - heard, seconds(9));  // the agreed time
  EXPECT_LE(m.now - heard, seconds(10));
  m.deliver_publication(make(full(0), 500));  // the edges still work
  EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
  while (m.last<act::Dial>()->service != act::Service::kControl) m.pass_time(milliseconds(100), false);
  const ConnId again = m.last<act::Dial>()->conn;
  m.core.installed(Version{0}, digest_of(0), m.now);
  m.core.on_connected(again, m.now);
  m.take();
  EXPECT_EQ(m.sent<Hello>(again).at(0).installed, (Installed{Version{0}, digest_of(0), 0}));
  m.core.on_closed(m.parent, "reset", m.now);  // before the learner has sent a message
  m.take();
  EXPECT_THAT(m.sent<EdgeFailed>(again), IsEmpty());
  m.pass_time(seconds(1), false);
  m.parent = m.last<act::Dial>()->conn;
  m.core.on_connected(m.parent, m.now);
  m.take();
  m.welcome(again);
  EXPECT_EQ(m.all<act::ReportWelcome>().size(), 2u);
  EXPECT_EQ(m.end(), "");
  // The new learner may not know these parents, so the worker reports no failure before it has assigned some.
  m.core.on_closed(m.parent, "reset", m.now);
  m.take();
  EXPECT_THAT(m.sent<EdgeFailed>(again), IsEmpty());
  m.deliver_control(again, Assign{1, {{WorkerId{5}, {"10.0.0.5", 1}, 1, false}}});
  m.core.on_closed(m.last<act::Dial>()->conn, "refused", m.now);
  m.take();
  EXPECT_THAT(m.sent<EdgeFailed>(again), SizeIs(1));
}

// An old edge may be refused for ever. Help from the same node uses an edge of its own.
TEST(Member, DoesNotMistakeAnEarlierParentForItsHelper) {
  Member m;
  m.core.on_closed(kControl, "reset", m.now);
  m.take();
  while (m.last<act::Dial>()->service != act::Service::kControl) m.pass_time(milliseconds(100), false);
  const ConnId again = m.last<act::Dial>()->conn;
  m.core.on_connected(again, m.now);
  m.take();
  m.welcome(again);
  ASSERT_FALSE(m.closed(m.parent));
  m.deliver_control(again, Help{{kParent, {"10.0.0.4", 1}, 1, false}, Version{3}, false});
  const ConnId helper = m.last<act::Dial>()->conn;
  m.core.on_connected(helper, m.now);
  m.take();
  EXPECT_EQ(m.sent<PeerHello>(helper).at(0).catch_up_to, Version{3});
  EXPECT_FALSE(m.closed(m.parent));
}

// The pauses between attempts grow, and differ between workers.
TEST(Member, TriesToComeBackForAsLongAsTheLearnerKeepsItsPlace) {
  std::vector<std::vector<Duration>> pauses;
  for (const char* name : {"worker 7", "another"}) {
    MemberConfig c = config();
    c.away_max.reset();
    c.key = made_key(name);
    Member m(c);
    m.core.on_closed(kControl, "reset", m.now);
    m.take();
    const TimePoint lost = m.now;
    pauses.emplace_back();
    for (TimePoint before = m.now; m.end().empty();) {
      const std::size_t dials = m.all<act::Dial>().size();
      m.now = m.core.next_deadline();
      m.core.on_timer(m.now);
      m.take();
      if (m.all<act::Dial>().size() == dials || m.last<act::Dial>()->service != act::Service::kControl) continue;
      pauses.back().push_back(m.now - std::exchange(before, m.now));
      m.core.on_closed(m.last<act::Dial>()->conn, "refused", m.now);
      m.take();
    }
    EXPECT_EQ(m.now - lost, seconds(90)) << "the value in the welcome";
    EXPECT_THAT(m.end(), HasSubstr("out of reach for 1.5 min"));
    EXPECT_FALSE(m.last<act::ReportEnd>()->in_order);
    EXPECT_LT(pauses.back().front(), milliseconds(200));
    EXPECT_GT(pauses.back().back(), seconds(7));
    for (const Duration pause : pauses.back()) EXPECT_LE(pause, seconds(13));
  }
  EXPECT_NE(pauses[0], pauses[1]);
}

TEST(Member, BlamesNoNodeForTheTimeInWhichItDidNotRun) {
  Member m;
  m.pass_time(seconds(5));
  m.now += seconds(60);
  m.core.on_timer(m.now);  // before anything is read
  m.take();
  EXPECT_THAT(m.sent<EdgeFailed>(kControl), IsEmpty());
  EXPECT_THAT(m.all<act::ReportLearnerAway>(), IsEmpty());
  EXPECT_FALSE(m.closed(m.parent));
  m.pass_time(seconds(30));
  EXPECT_EQ(m.end(), "");
}

TEST(Member, APauseDoesNotExtendALaterAbsence) {
  Member m;
  m.pass_time(seconds(5));
  m.now += std::chrono::hours(3);
  m.core.on_closed(kControl, "reset", m.now);  // before any timer: from now on the learner is out of reach
  m.core.on_timer(m.now);
  m.take();
  for (int i = 0; i < 32 && m.end().empty(); ++i) m.pass_time(seconds(1), false);
  EXPECT_THAT(m.end(), HasSubstr("out of reach for 30 s"));
}

TEST(Member, ReportsWhetherItEndsNormally) {
  Member ended;
  ended.deliver_control(kControl, Goodbye{"the run has ended", true});
  EXPECT_TRUE(ended.last<act::ReportEnd>()->in_order);
  Member expelled;
  expelled.deliver_control(kControl, Goodbye{"its rollouts were wrong", false});
  EXPECT_FALSE(expelled.last<act::ReportEnd>()->in_order);
  Member stopped;
  stopped.core.leave("it was stopped", stopped.now);
  stopped.take();
  EXPECT_TRUE(stopped.last<act::ReportEnd>()->in_order);
}

TEST(Member, EndsWhenTheLearnerIsAbsentOrWrong) {
  Member away;
  while (away.end().empty()) away.pass_time(seconds(1), false);
  EXPECT_THAT(away.end(), HasSubstr("out of reach for 30 s"));
  EXPECT_EQ(away.core.next_deadline(), kNever);

  Member absent(config(), kMadeUnix_s, false);
  EXPECT_EQ(absent.core.next_deadline(), absent.now + seconds(10));
  absent.now += seconds(10);
  absent.core.on_timer(absent.now);
  absent.take();
  EXPECT_THAT(absent.end(), HasSubstr("did not answer within 10 s"));

  Member confused;
  confused.deliver_control(kControl, Installed{});
  EXPECT_THAT(confused.end(), HasSubstr("not for a worker"));
  Member chunked;
  chunked.deliver_frame(kControl, make(full(0), 10).chunk(0));
  EXPECT_THAT(chunked.end(), HasSubstr("chunk on the control connection"));
  Member expelled;
  expelled.deliver_control(kControl, Goodbye{"its rollouts were wrong"});
  EXPECT_EQ(expelled.end(), "its rollouts were wrong");
  Member other(config(), kMadeUnix_s, false);
  other.core.on_connected(kControl, other.now);
  other.deliver_control(kControl, Welcome{WorkerId{8}, kBeat, seconds(9), 0, ""});
  EXPECT_THAT(other.end(), HasSubstr("takes this worker for worker 8"));
}

}  // namespace
}  // namespace echoline::overlay
