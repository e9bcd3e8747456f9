// The parts of a worker's core, each without the core: its file, its certificate, its link to the learner, the nodes
// from which it receives and those to which it sends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/member.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr TimePoint kStart{seconds(1)};
constexpr std::uint64_t kUnix_ms = static_cast<std::uint64_t>(kMadeUnix_s) * 1000;

Frame frame_of(const ControlMessage& message) {
  const Slice frame(encode_control(message));
  return {FrameType::kControl, frame.part(kFrameHeaderBytes, frame.size() - kFrameHeaderBytes), {}, {}};
}

trust::PeerIdentity worker(std::uint64_t id) { return {trust::PeerIdentity::Kind::kWorker, WorkerId{id}}; }

// All parts of a worker, as the core connects them.
struct Desk {
  MemberConfig c;
  std::vector<Action> actions;
  Pacer pacer;
  Uplink uplink{pacer, actions};
  Transport transport{pacer, uplink, actions};
  InstallState install_state{0};
  WorkerFile file{c.state, c.durable, install_state, actions};
  Identity identity{c, file, actions};
  LearnerLink learner{c, identity, transport, uplink, actions};
  PublicationStore store{c.store, *c.checker, actions};
  StallWatch stall;
  Parents parents{c, install_state, store, stall, learner, transport};
  Children children{c, identity, learner, parents, store, transport, uplink};
  TimePoint now = kStart;

  explicit Desk(MemberConfig with = config()) : c(std::move(with)) {}
  void check() const {
    file.check();
    learner.check();
    parents.check();
    children.check();
  }
  LearnerLink::Event from_learner(const ControlMessage& message) {
    auto event = learner.on_frame(frame_of(message), now);
    check();
    return event;
  }
  void join() {
    learner.start(now);
    learner.on_connected(now);
    from_learner(Welcome{kSelf, kBeat, seconds(9), kUnix_ms, "welcome", seconds(90), {}});
    actions.clear();
  }
  // Returns the connection to the one parent.
  ConnId assign(const Parent& parent) {
    const Assign message{1, {parent}};
    from_learner(message);
    parents.assign(message, now);
    if (parent.dials) return {};
    const ConnId conn = all<act::Dial>().back().conn;
    parents.on_connected(*parents.find(conn), conn, now);
    check();
    return conn;
  }
  void put(const Made& made, std::size_t chunks) {
    ASSERT_TRUE(store.begin(made.announcement, made.opening));
    for (std::size_t i = 0; i < chunks; ++i) ASSERT_TRUE(store.put(made.chunk(i), Version{}));
    if (chunks < made.chunks.size()) return;
    ASSERT_TRUE(store.close(made.manifest, made.closing));
  }
  template <class T>
  std::vector<T> all() const {
    return all_of<T>(actions);
  }
  template <class T>
  std::vector<T> sent(ConnId conn) const {
    return sent_over<T>(actions, conn);
  }
  bool closed(ConnId conn) const {
    const auto closes = all<act::Close>();
    return std::any_of(closes.begin(), closes.end(), [&](const act::Close& c) { return c.conn == conn; });
  }
};

const Parent kDialled{kParent, {"10.0.0.4", 1}, 1, false}, kDialling{kParent, {"10.0.0.4", 1}, 1, true};

// ---- LearnerPulse ----

TEST(LearnerPulse, BeatsOnceInEveryInterval) {
  LearnerPulse pulse;
  EXPECT_FALSE(pulse.take_beat(kStart));
  pulse.begin(kBeat, seconds(9), kStart);
  EXPECT_FALSE(pulse.take_beat(kStart + kBeat - Duration{1}));
  EXPECT_TRUE(pulse.take_beat(kStart + kBeat));
  EXPECT_FALSE(pulse.take_beat(kStart + kBeat));
  EXPECT_EQ(pulse.next_beat_at(), kStart + 2 * kBeat);
  pulse.check();
}

TEST(LearnerPulse, IsSilentAfterTheAgreedTimeAndAfterTheTimeLearnedFromBeacons) {
  LearnerPulse pulse;
  pulse.begin(kBeat, seconds(1), kStart);
  pulse.on_frame(kStart);
  EXPECT_EQ(pulse.deadline(), kStart + 4 * kBeat) << "beacons came as regularly as promised";
  pulse.on_frame(kStart + seconds(5));
  EXPECT_EQ(pulse.deadline(), kStart + seconds(6)) << "the agreed time";
  EXPECT_EQ(pulse.silent_for(kStart + seconds(7)), seconds(2));
}

TEST(LearnerPulse, DoesNotCountTheTimeInWhichThisNodeDidNotRun) {
  LearnerPulse pulse;
  pulse.begin(kBeat, seconds(1), kStart);
  pulse.on_frame(kStart);
  EXPECT_EQ(pulse.take_pause(kStart + 2 * kBeat), std::nullopt) << "late by at most a heartbeat";
  const TimePoint woken = kStart + seconds(60);
  EXPECT_EQ(pulse.take_pause(woken), seconds(60) - kBeat);
  EXPECT_EQ(pulse.take_pause(woken), std::nullopt);
  EXPECT_GT(pulse.deadline(), woken);
}

// ---- WorkerFile ----

TEST(WorkerFile, MakesTheStagedVersionItsFloorAndProtectsItOnceItIsOnDisk) {
  MemberConfig c = config();
  c.durable = true;
  Desk d(c);
  d.put(make(full(3), 500), 1);
  PublicationKey foreign;
  ASSERT_EQ(d.install_state.stage(d.store, {}, d.now, foreign), InstallState::Stage::kStaged);
  const Installed floor = d.install_state.staged()->last;
  EXPECT_FALSE(d.file.has_on_disk(floor));
  d.file.save();
  EXPECT_TRUE(d.file.is_saving(floor) && !d.file.has_on_disk(floor));
  ASSERT_THAT(d.all<act::SaveState>(), SizeIs(1));
  EXPECT_EQ(decode_worker_state(d.all<act::SaveState>()[0].bytes)->floor, floor);
  EXPECT_FALSE(d.file.on_succeeded());
  EXPECT_TRUE(d.file.has_on_disk(floor) && !d.file.is_saving(floor));
  d.file.check();
}

TEST(WorkerFile, SavesAgainAfterAChangeOrAFailure) {
  MemberConfig c = config();
  c.durable = true;
  Desk d(c);
  d.file.save();
  d.file.state().beacon_sequence = 7;
  d.file.save();  // after the write in flight
  EXPECT_THAT(d.all<act::SaveState>(), SizeIs(1));
  EXPECT_TRUE(d.file.on_succeeded());
  d.file.save();
  d.file.on_failed(d.now);
  d.file.retry_if_due(d.now);
  EXPECT_THAT(d.all<act::SaveState>(), SizeIs(2));
  d.file.retry_if_due(d.file.next_deadline());
  ASSERT_THAT(d.all<act::SaveState>(), SizeIs(3));
  EXPECT_EQ(decode_worker_state(d.all<act::SaveState>()[2].bytes)->beacon_sequence, 7u);
}

TEST(WorkerFile, WritesNothingWithoutADurableFolder) {
  Desk d;
  d.file.save();
  EXPECT_THAT(d.actions, IsEmpty());
  EXPECT_TRUE(d.file.has_on_disk({Version{9}, {}, 0}));
}

// ---- PartsFeed ----

TEST(PartsFeed, DeliversTheFirstBytesInOrderAndNoMoreThanAreRead) {
  Desk d;
  PartsFeed parts(Bytes{2048});
  const Made first = make(full(1), 5000), other = make(full(2), 5000);
  d.put(first, 4);
  d.put(other, 4);
  const auto come = [&] {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> all;
    for (const auto& p : d.all<act::DeliverPart>()) all.emplace_back(p.part.version.value, p.part.offset);
    return all;
  };
  parts.deliver(first.id, d.install_state, d.store, d.actions);
  parts.deliver(other.id, d.install_state, d.store, d.actions);
  EXPECT_THAT(come(), ElementsAre(std::pair(1, 0), std::pair(1, 1024)));
  EXPECT_TRUE(parts.feeds(first.id) && !parts.feeds(other.id));
  parts.on_consumed(1024, d.install_state, d.store, d.actions);
  EXPECT_THAT(come(), ElementsAre(std::pair(1, 0), std::pair(1, 1024), std::pair(1, 2048)));
}

TEST(PartsFeed, DeliversNothingIfNoPartsAreWanted) {
  Desk d;
  PartsFeed parts(Bytes{0});
  const Made made = make(full(1), 5000);
  d.put(made, 2);
  parts.deliver(made.id, d.install_state, d.store, d.actions);
  EXPECT_THAT(d.actions, IsEmpty());
}

// ---- Identity ----

TEST(Identity, AcceptsOnlyItsOwnCertificate) {
  Desk d;
  const auto issue = [](const trust::SigningKey& key, WorkerId id) {
    return *made_authority().issue(
        {key.public_key(), trust::PeerIdentity::Kind::kWorker, id, 2, kMadeUnix_s, trust::kWorkerLifetimeMax});
  };
  d.identity.accept(issue(made_key("worker 8"), kSelf), d.now);
  d.identity.accept(issue(made_key("worker 7"), WorkerId{8}), d.now);
  d.identity.accept(random_bytes(1, 100), d.now);
  EXPECT_THAT(d.actions, IsEmpty());
  d.identity.accept(issue(made_key("worker 7"), kSelf), d.now);
  EXPECT_THAT(d.all<act::UseCertificate>(), SizeIs(1));
  EXPECT_EQ(d.file.state().certificate, issue(made_key("worker 7"), kSelf));
}

TEST(Identity, RenewsAtHalfOfTheLifeByTheLearnersClock) {
  Desk d;
  EXPECT_FALSE(d.identity.take_renewal(kStart + std::chrono::hours(9))) << "not before it knows the clock";
  d.identity.set_clock(kUnix_ms, d.now);
  const TimePoint half = kStart + trust::kWorkerLifetimeMax / 2;
  EXPECT_EQ(d.identity.renew_at(), half);
  EXPECT_FALSE(d.identity.has_expired(half));
  EXPECT_TRUE(d.identity.take_renewal(half));
  EXPECT_FALSE(d.identity.take_renewal(half + seconds(1)));
  EXPECT_TRUE(d.identity.take_renewal(half + Identity::kRenewRetry));
  d.identity.set_clock(kUnix_ms + 24 * 3'600'000, d.now);
  EXPECT_TRUE(d.identity.has_expired(d.now));
}

TEST(Identity, KeepsTheLearnersClockIfItDiffersByMoreThanASecond) {
  MemberConfig c = config();
  c.durable = true;
  Desk d(c);
  d.identity.set_clock(kUnix_ms + 900, d.now);
  EXPECT_EQ(d.identity.learner_unix_ms(d.now + seconds(2)), kUnix_ms + 2900);
  d.identity.save_clock();
  EXPECT_THAT(d.all<act::SaveState>(), IsEmpty());
  d.identity.set_clock(kUnix_ms + 5000, d.now);
  d.identity.save_clock();
  ASSERT_THAT(d.all<act::SaveState>(), SizeIs(1));
  EXPECT_EQ(decode_worker_state(d.all<act::SaveState>()[0].bytes)->clock_offset_ms, 5000);
}

// ---- LearnerLink ----

TEST(LearnerLink, JoinsAndPassesMessagesToTheCore) {
  Desk d;
  d.learner.start(d.now);
  ASSERT_THAT(d.all<act::Dial>(), SizeIs(1));
  EXPECT_TRUE(d.learner.on_connected(d.now)) << "it sends Hello";
  const auto event = d.from_learner(Welcome{kSelf, kBeat, seconds(9), kUnix_ms, "w", seconds(90), {}});
  EXPECT_TRUE(std::holds_alternative<Welcome>(std::get<ControlMessage>(event)));
  EXPECT_EQ(d.all<act::ReportWelcome>().at(0).welcome, "w");
  EXPECT_FALSE(d.learner.membership().is_assigned());
  d.from_learner(Assign{1, {kDialled}});
  EXPECT_TRUE(d.learner.membership().is_assigned());
  EXPECT_EQ(d.from_learner(Notice{"the learner's disk is slow"}).index(), 0u) << "the core has nothing to do";
  const auto ended = d.from_learner(Welcome{kSelf, kBeat, seconds(9), kUnix_ms, "w", seconds(90), {}});
  EXPECT_THAT(std::get<LearnerLink::Ended>(ended).reason, HasSubstr("second welcome"));
}

TEST(LearnerLink, EndsIfAMessageComesBeforeTheWelcome) {
  Desk d;
  d.learner.start(d.now);
  d.learner.on_connected(d.now);
  const auto ended = d.from_learner(Assign{1, {kDialled}});
  EXPECT_THAT(std::get<LearnerLink::Ended>(ended).reason, HasSubstr("before its welcome"));
}

TEST(LearnerLink, ComesBackAfterASilenceAndGivesUpInTheEnd) {
  Desk d;
  d.join();
  d.now = d.learner.next_deadline();
  while (d.all<act::ReportLearnerAway>().empty()) {
    d.learner.take_beat(d.now);
    d.learner.check_pulse(d.now);
    d.check();
    d.now = d.learner.next_deadline();
  }
  EXPECT_TRUE(d.learner.membership().is_away());
  EXPECT_THAT(d.all<act::Close>(), SizeIs(1));
  d.learner.send_application(Slice(std::vector<std::byte>(10)), d.now);
  d.check();
  EXPECT_EQ(d.learner.check_deadlines(d.learner.membership().redial_at()), std::nullopt);
  EXPECT_THAT(d.all<act::Dial>(), SizeIs(1));
  EXPECT_THAT(d.learner.check_deadlines(d.learner.membership().away_until()).value_or(""), HasSubstr("out of reach"));
}

TEST(LearnerLink, RepeatsATroubleOnlyAfterAWhile) {
  Desk d;
  d.join();
  const ConnId conn = d.learner.membership().conn();
  d.learner.report_trouble("the disk is full", d.now);
  d.learner.report_trouble("the disk is full", d.now + seconds(59));
  d.learner.report_trouble("the clock is wrong", d.now);
  EXPECT_THAT(d.sent<Trouble>(conn), SizeIs(2));
  d.learner.report_trouble("the disk is full", d.now + LearnerLink::kTroublePause);
  EXPECT_THAT(d.sent<Trouble>(conn), SizeIs(3));
  for (int i = 0; i < 100; ++i) d.learner.report_trouble(std::to_string(i), d.now);
  d.check();
}

// ---- Upstream ----

TEST(Upstream, OpensStreamsFailsAndOpensAgain) {
  Upstream up(EdgeTerms{kDialled, {}, {}, false});
  up.add_dialled(ConnId{1});
  up.check();
  EXPECT_FALSE(up.is_open());
  EXPECT_EQ(up.next_deadline(), kNever);
  EXPECT_EQ(up.open_stream(ConnId{1}, kBeat, kStart), 0u);
  EXPECT_TRUE(up.has_received_nothing());
  up.on_frame(kStart);
  EXPECT_FALSE(up.has_received_nothing());
  up.add_dialled(ConnId{3});
  EXPECT_EQ(up.open_stream(ConnId{3}, kBeat, kStart), 1u);
  up.check();
  EXPECT_TRUE(up.remove_stream(ConnId{1}));
  EXPECT_EQ(up.open_conn(), ConnId{3});
  EXPECT_FALSE(up.is_silent(kStart + 4 * kBeat - Duration{1}));
  EXPECT_TRUE(up.is_silent(kStart + 4 * kBeat));
  up.close();
  up.check();
  EXPECT_EQ(up.count_failure(true), 1);
  EXPECT_EQ(up.silences(), 1);
  up.pause(kStart + kBeat);
  up.check();
  EXPECT_FALSE(up.attempt_is_due(kStart));
  EXPECT_TRUE(up.attempt_is_due(up.next_deadline()));
  up.add_dialled(ConnId{5});
  EXPECT_EQ(up.open_stream(ConnId{5}, kBeat, kStart), 0u);
  EXPECT_EQ(up.next_deadline(), kStart + 8 * kBeat) << "after a silence, the timeout doubles";
}

TEST(Upstream, AbortsAtAnInvalidChangeOfState) {
  Upstream up(EdgeTerms{kDialled, {}, {}, false});
  up.add_dialled(ConnId{1});
  EXPECT_DEATH(up.await_parent(kStart), "an edge that is dialling cannot become awaited");
  up.open_stream(ConnId{1}, kBeat, kStart);
  EXPECT_DEATH(up.pause(kStart), "an edge that is open cannot become pausing");
}

TEST(Upstream, WaitsForAParentThatDials) {
  Upstream up(EdgeTerms{kDialling, {}, {}, false});
  EXPECT_FALSE(up.accepts_dial());
  up.await_parent(kStart + seconds(5));
  up.postpone(seconds(1), kStart);
  EXPECT_FALSE(up.parent_is_late(kStart + seconds(5)));
  EXPECT_TRUE(up.parent_is_late(kStart + seconds(6)));
  EXPECT_TRUE(up.accepts_dial());
  for (std::uint32_t i = 0; i < StreamProbe::kStreamsMax; ++i) {
    up.add_accepted(ConnId{2 * i});
    EXPECT_EQ(up.open_stream(ConnId{2 * i}, kBeat, kStart), i);
  }
  EXPECT_FALSE(up.accepts_dial());
  up.check();
}

// ---- Parents ----

TEST(Parents, KeepAConnectionUnderNewTerms) {
  Desk d;
  d.join();
  const ConnId conn = d.assign(kDialled);
  d.actions.clear();
  const SignedGrant grant = made_grant(7, 4);
  d.parents.assign(Assign{2, {{kParent, {"10.0.0.4", 1}, 0b10, false}}, grant}, d.now);
  EXPECT_THAT(d.sent<SignedGrant>(conn), ElementsAre(grant));
  ASSERT_THAT(d.sent<Have>(conn), SizeIs(1));
  EXPECT_EQ(d.sent<Have>(conn)[0].wanted, (StripeMask{2, 0b10}));
  d.parents.assign(Assign{2, {}}, d.now);
  EXPECT_TRUE(d.closed(conn));
  EXPECT_THAT(d.parents.ids(), IsEmpty());
  d.check();
}

TEST(Parents, GiveUpAHelperAfterThreeFailures) {
  Desk d;
  d.join();
  const ConnId parent = d.assign(kDialled);
  d.parents.on_help(Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{3}, false}, d.now);
  EXPECT_EQ(d.sent<Have>(parent).back().position, Version{3}) << "the parent need not send it";
  for (int i = 0; i < 3; ++i) {
    const ConnId helper = d.all<act::Dial>().back().conn;
    ASSERT_TRUE(d.parents.find(helper)) << i;
    d.parents.on_closed(*d.parents.find(helper), helper, "refused", d.now);
    d.check();
    d.now += seconds(1);
    d.parents.find(parent)->on_status({}, d.now);
    d.parents.on_timer(1, d.now);
  }
  EXPECT_EQ(d.sent<Have>(parent).back().position, std::nullopt) << "the parent has to send it again";
  EXPECT_THAT(d.sent<NeedHelp>(d.learner.membership().conn()), SizeIs(1));
  EXPECT_THAT(d.sent<EdgeFailed>(d.learner.membership().conn()), IsEmpty()) << "a helper is no parent";
}

// The edge broke, and the parent dials before this worker would wait for it again.
TEST(Parents, TakeAParentThatDialsEarly) {
  Desk d;
  d.join();
  d.assign(kDialling);
  ASSERT_TRUE(d.parents.on_dialled_by(kParent, ConnId{2}, d.now));
  d.parents.on_closed(*d.parents.find(ConnId{2}), ConnId{2}, "reset", d.now);
  ASSERT_TRUE(d.parents.on_dialled_by(kParent, ConnId{4}, d.now));
  const std::size_t failed = d.sent<EdgeFailed>(d.learner.membership().conn()).size();
  for (const TimePoint end = d.now + 2 * Core::kHandshakeTimeout; d.now < end; d.now += milliseconds(50)) {
    d.parents.find(ConnId{4})->on_status({}, d.now);
    d.parents.on_timer(1, d.now);
    d.check();
    ASSERT_TRUE(d.parents.find(ConnId{4})) << "the parent is not late";
  }
  EXPECT_THAT(d.sent<EdgeFailed>(d.learner.membership().conn()), SizeIs(failed));
  EXPECT_FALSE(d.parents.on_dialled_by(WorkerId{5}, ConnId{6}, d.now)) << "worker 5 is no parent";
}

// This includes a revoked parent whose edge has failed: the learner assigns another.
TEST(Parents, DoNotDialARevokedParent) {
  Desk d;
  d.join();
  const ConnId conn = d.assign(kDialled);
  d.parents.on_closed(*d.parents.find(conn), conn, "reset", d.now);
  EXPECT_NE(d.parents.next_deadline(), kNever);
  d.parents.revoke({kParent});
  EXPECT_EQ(d.parents.next_deadline(), kNever);
  d.check();
  Desk dials;
  dials.join();
  dials.assign(kDialling);
  dials.parents.revoke({kParent});
  EXPECT_FALSE(dials.parents.on_dialled_by(kParent, ConnId{2}, dials.now));
}

// ---- Children ----

TEST(Children, AreServedForTheirGrantUntilItEnds) {
  Desk d;
  d.join();
  d.children.on_accepted(ConnId{2}, {"10.0.0.9", worker(9)}, d.now);
  d.children.on_frame(ConnId{2}, frame_of(PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)}), d.now);
  EXPECT_EQ(d.children.edges().connections(), 1u);
  d.check();
  d.children.close_ungranted(d.now + seconds(599));
  EXPECT_FALSE(d.closed(ConnId{2}));
  d.children.close_ungranted(d.now + seconds(601));
  EXPECT_TRUE(d.closed(ConnId{2}));
  EXPECT_EQ(d.children.edges().connections(), 0u);
}

// The list of its chunks is on its way when the learner revokes its certificate.
TEST(Children, AreNotRevokedWorkersThatHadBeenGrantedBefore) {
  Desk d;
  d.join();
  d.children.on_accepted(ConnId{2}, {"10.0.0.9", worker(9)}, d.now);
  PeerHello hello{"run", 0, {}, false, {}, made_grant(9, 7)};
  hello.have_follows = true;
  d.children.on_frame(ConnId{2}, frame_of(hello), d.now);
  d.children.revoke({WorkerId{9}});
  d.children.on_frame(ConnId{2}, frame_of(Have{}), d.now);
  EXPECT_TRUE(d.closed(ConnId{2}));
  d.check();
}

// The child that this worker dialled goes to another parent, and comes back by itself.
TEST(Children, AreDialledOnlyWhileAConnectionThatWasDialledIsOpen) {
  Desk d;
  d.join();
  d.children.dial({WorkerId{9}, {"10.0.0.9", 1}});
  const ConnId dialled = d.all<act::Dial>().at(0).conn;
  EXPECT_TRUE(d.children.on_connected(dialled, d.now));
  EXPECT_THAT(d.sent<EdgeStatus>(dialled), SizeIs(1));
  d.children.on_frame(dialled, frame_of(PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)}), d.now);
  d.children.on_frame(dialled, frame_of(MoreStreams{2}), d.now);
  EXPECT_THAT(d.all<act::Dial>(), SizeIs(2));
  d.children.on_closed(d.all<act::Dial>().at(1).conn);
  d.children.release(Release{WorkerId{9}, kUnix_ms + 1}, d.now);
  EXPECT_TRUE(d.closed(dialled));
  d.children.on_accepted(ConnId{2}, {"10.0.0.9", worker(9)}, d.now);
  const auto again = made_grant(9, 7, {.issued_unix_s = kMadeUnix_s + 1});
  d.children.on_frame(ConnId{2}, frame_of(PeerHello{"run", 0, {}, false, {}, again}), d.now);
  d.children.on_frame(ConnId{2}, frame_of(MoreStreams{2}), d.now);
  EXPECT_THAT(d.all<act::Dial>(), SizeIs(2)) << "this child can dial";
  d.check();
}

}  // namespace
}  // namespace echoline::overlay
