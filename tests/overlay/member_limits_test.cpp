// A worker's limits, and its behaviour if data is missing or does not fit.
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

TEST(Member, GivesUpAfterThreeFailedInstallations) {
  Member m;
  m.deliver_publication(make(full(1), 100));
  for (int i = 0; i < InstallState::kInstallFailuresMax; ++i) m.core.install_failed(Version{1}, "digest", m.now);
  m.take();
  EXPECT_EQ(m.delivered().size(), 3u);  // the verified snapshot again, twice
  EXPECT_THAT(m.end(), HasSubstr("could not be installed after 3 attempts: digest"));
}

TEST(Member, AFailedInstallationIsRepairedByASnapshotOfThatVersion) {
  Member m;
  m.newest = Version{2};
  m.deliver_publication(make(full(1), 100));
  m.core.installed(Version{1}, digest_of(1), m.now);
  m.deliver_publication(make(delta(2, 1), 100));
  ASSERT_THAT(m.delivered(), ElementsAre(full(1), delta(2, 1)));
  m.core.install_failed(Version{2}, "digest", m.now);
  m.take();
  EXPECT_THAT(m.delivered(), ElementsAre(full(1), delta(2, 1))) << "the failed publication is not delivered again";
  const auto asked = m.sent<NeedHelp>(kControl);
  ASSERT_EQ(asked.size(), 1u);
  EXPECT_EQ(asked[0].target, Version{2});
  EXPECT_TRUE(asked[0].full_only);
}

// A chunk of version 1 is lost for good, and all later versions keep coming.
TEST(Member, LaterVersionsDoNotHideALostChunk) {
  Member m;
  m.deliver_publication(make(full(0), 100));
  m.deliver_control(m.parent, make(delta(1, 0), 3000).opening);
  for (std::uint64_t v = 2; v <= 120 && m.sent<NeedHelp>(kControl).empty(); ++v) {
    m.newest = Version{v};
    m.deliver_publication(make(delta(v, v - 1), 100));
    m.pass_time(kBeat);
  }
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
  EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
}

// The worker has no base to install them on, because a chunk of its first snapshot is lost.
TEST(Member, LaterVersionsDoNotHideAMissingBase) {
  Member m;
  m.deliver_control(m.parent, make(full(0), 3000).opening);
  for (std::uint64_t v = 1; v <= 120 && m.sent<NeedHelp>(kControl).empty(); ++v) {
    m.newest = Version{v};
    m.deliver_publication(make(delta(v, v - 1), 100));
    m.pass_time(kBeat);
  }
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
}

// The worker has the snapshot below a version that it could not install, and waits for another snapshot.
TEST(Member, LaterVersionsDoNotHideAMissingRepair) {
  Member m;
  m.deliver_publication(make(full(0), 100));
  m.core.installed(Version{0}, digest_of(0), m.now);
  m.deliver_publication(make(delta(1, 0), 100));
  m.core.install_failed(Version{1}, "digest", m.now);
  m.take();
  ASSERT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));  // the learner does not answer
  for (std::uint64_t v = 2; v <= 120 && m.sent<NeedHelp>(kControl).size() < 2; ++v) {
    m.newest = Version{v};
    m.deliver_publication(make(delta(v, v - 1), 100));
    m.pass_time(kBeat);
  }
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(2));
}

TEST(Member, ParentsThatComeAndGoDoNotKeepItFromAskingForHelp) {
  Member m;
  m.newest = Version{3};
  for (std::uint64_t i = 0; i < 120 && m.sent<NeedHelp>(kControl).empty(); ++i) {
    m.assign({{WorkerId{100 + i % 2}, {"10.0.0.4", 1}, 1, false}});
    m.pass_time(kBeat);
  }
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
}

TEST(Member, AGrantThatIsRenewedDoesNotHideThatSomethingIsMissing) {
  Member m;
  m.newest = Version{3};
  for (int i = 0; i < 120 && m.sent<NeedHelp>(kControl).empty(); ++i) {
    m.assign({{kParent, {"10.0.0.4", 1}, 1, false}});
    m.pass_time(kBeat);
  }
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
}

TEST(Member, AsksForHelpAgainWhenItMay) {
  Member m;
  m.deliver_publication(make(full(0), 100));
  m.newest = Version{9};
  m.pass_time(kBeat);
  m.deliver_control(m.parent, CannotServe{Version{5}});
  m.pass_time(kBeat);
  m.deliver_control(m.parent, CannotServe{Version{9}});  // too soon after the first
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
  m.pass_time(4 * kBeat);
  EXPECT_THAT(m.sent<NeedHelp>(kControl), SizeIs(2));
  EXPECT_EQ(m.sent<NeedHelp>(kControl).back().target, Version{9});
}

TEST(Member, ReportsAPublicationWithoutRoomAndStays) {
  MemberConfig c = config();
  c.store.memory_max = {5000};
  Member m(c);
  m.deliver_publication(make(full(0), 6000));
  EXPECT_EQ(m.end(), "");
  ASSERT_THAT(m.sent<Trouble>(kControl), SizeIs(1));
  EXPECT_THAT(m.sent<Trouble>(kControl)[0].text, HasSubstr("raise the memory budget"));
  m.deliver_publication(make(full(1), 4000));  // the worker still accepts publications that fit
  EXPECT_THAT(m.delivered(), ElementsAre(full(1)));
}

// One snapshot after another begins, and none is completed.
TEST(Member, AsksForHelpThoughNewPublicationsKeepBeginning) {
  Member m;
  m.deliver_publication(make(full(0), 100));
  std::uint64_t version = 1;
  for (; version < 3 * StallWatch::kBegunMax && m.sent<NeedHelp>(kControl).empty(); ++version) {
    m.newest = Version{version};
    const Made made = make(full(version), 6000);
    m.deliver_control(m.parent, made.opening);
    m.deliver_frame(m.parent, made.chunk(0));
    m.pass_time(kBeat * (StallWatch::kStallHeartbeats - 1));
  }
  ASSERT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
  EXPECT_TRUE(m.sent<NeedHelp>(kControl)[0].stalled);
  EXPECT_LE(version, StallWatch::kBegunMax + 3);
}

// The parents count dropped chunks as sent. A parent with a new connection goes on to bring a few chunks, and the
// others do not.
TEST(Member, AsksForWhatItLostThoughAParentGoesOnBringingALittle) {
  MemberConfig c = config();
  c.store.memory_max = {5000};
  Member m(c);
  m.newest = Version{0};
  const Made made = make(full(0), 6000);
  m.deliver_control(m.parent, made.opening);
  for (std::size_t i = 0; i < made.chunks.size(); ++i) m.deliver_frame(m.parent, made.chunk(i));
  EXPECT_EQ(m.core.stats().memory.count, 0u) << "the publication was dropped";
  for (std::size_t i = 0; i < 4 && m.sent<NeedHelp>(kControl).empty(); ++i) {
    m.pass_time(kBeat * (StallWatch::kStallHeartbeats - 1));
    m.deliver_control(m.parent, made.opening);
    m.deliver_frame(m.parent, made.chunk(i));
  }
  ASSERT_THAT(m.sent<NeedHelp>(kControl), SizeIs(1));
  EXPECT_FALSE(m.sent<NeedHelp>(kControl)[0].stalled) << "its parents are not to blame";
  m.deliver_control(kControl, Help{{WorkerId{6}, {"10.0.0.6", 1}, 1, false}, Version{0}, false});
  const ConnId helper = m.last<act::Dial>()->conn;
  m.core.on_connected(helper, m.now);
  m.deliver_control(helper, made.opening);
  for (const std::size_t i : {3, 4}) {  // a slow one gets its time
    for (int beat = 0; beat < StallWatch::kStallHeartbeats; ++beat) {
      m.pass_time(kBeat);
      m.deliver_control(helper, EdgeStatus{});
    }
    m.deliver_frame(helper, made.chunk(i));
  }
  EXPECT_FALSE(m.closed(helper));
}

// A worker restarts below its floor, with all its stored publications. Those on the path to its floor displace the
// others.
TEST(Member, ThePathToItsFloorGetsTheRoomOfOtherPaths) {
  MemberConfig c = config();
  c.store.memory_max = {10'000};
  c.state.floor = Installed{Version{7}, digest_of(7), 0};
  Member m(c);
  m.newest = Version{8};
  m.deliver_publication(make(full(0), 3000));
  m.deliver_publication(make(full(1), 3000));
  m.deliver_publication(make(delta(2, 1), 1000));
  m.deliver_publication(make(delta(3, 2), 2000));
  EXPECT_THAT(m.delivered(), IsEmpty());
  m.deliver_publication(make(delta(8, 2), 5000));
  EXPECT_THAT(m.delivered(), ElementsAre(full(1), delta(2, 1), delta(8, 2)));
}

// Versions after a slow snapshot find no room in the meantime. The snapshot's parents are not to blame.
TEST(Member, WaitsForASlowSnapshotThoughLaterVersionsHaveNoRoom) {
  MemberConfig c = config();
  c.store.memory_max = {5000};
  Member m(c);
  m.newest = Version{2};
  const Made slow = make(full(0), 4000), later = make(delta(2, 1), 4000);
  m.deliver_control(m.parent, slow.opening);
  m.deliver_frame(m.parent, slow.chunk(0));
  m.deliver_frame(m.parent, slow.chunk(1));
  m.deliver_control(m.parent, later.opening);
  for (std::size_t i = 0; i < later.chunks.size(); ++i) m.deliver_frame(m.parent, later.chunk(i));
  EXPECT_EQ(m.core.stats().memory.count, 2048u) << "the publication was dropped";
  for (const std::size_t i : {2, 3}) {
    m.pass_time(kBeat * (StallWatch::kStallHeartbeats - 1));
    m.deliver_frame(m.parent, slow.chunk(i));
  }
  EXPECT_THAT(m.sent<NeedHelp>(kControl), IsEmpty());
  m.deliver_control(m.parent, slow.closing);
  EXPECT_THAT(m.delivered(), ElementsAre(full(0)));
}

TEST(Member, ItsStoreFollowsThePolicysSizeUnlessTheUserFixesIt) {
  const std::size_t large = 2'000'000;  // does not fit the initial store
  MemberConfig c = config();
  c.store.memory_max = {5000};
  Member grows(c, kMadeUnix_s, true, Bytes{large});
  grows.deliver_publication(make(full(0), large, {.chunk_bytes = 65536}));
  EXPECT_THAT(grows.delivered(), ElementsAre(full(0)));
  c.store.memory_is_fixed = true;
  Member fixed(c, kMadeUnix_s, true, Bytes{large});
  ASSERT_THAT(fixed.sent<Trouble>(kControl), SizeIs(1)) << "at the join, not when the policy arrives";
  EXPECT_THAT(fixed.sent<Trouble>(kControl)[0].text, HasSubstr("--memory-max"));
  EXPECT_EQ(fixed.end(), "");
}

TEST(Member, DoesNotReadFasterThanItsDiskWrites) {
  MemberConfig c = config();
  c.store = {Bytes{5000}, Bytes{1 << 20}, true};
  Member m(c);
  const Made made = make(full(0), 20'000);
  m.deliver_control(m.parent, made.opening);
  std::size_t i = 0;
  while (m.all<act::SetReading>().empty()) m.deliver_frame(m.parent, made.chunk(i++));
  EXPECT_LE(i, 6u);
  EXPECT_FALSE(m.last<act::SetReading>()->on);
  EXPECT_EQ(m.last<act::SetReading>()->conn, m.parent);
  for (const auto& s : m.all<act::Spool>())
    if (s.chunk) m.core.on_spooled(s.publication, *s.chunk, ok(), m.now);
  m.take();
  EXPECT_TRUE(m.last<act::SetReading>()->on);
}

// The floor was saved, but the publications that lead to it are lost from the disk. The parents send them again.
TEST(Member, ReturnsToItsFloorThoughItsDiskLostThePath) {
  MemberConfig c = config();
  c.store = {Bytes{5000}, Bytes{1 << 20}, true};
  c.durable = true;
  Member m(c);
  const Made first = make(delta(2, 1), 10'000), second = make(delta(3, 2), 500);
  const auto written = [&] {
    for (const auto& s : m.all<act::Spool>())
      if (s.chunk) m.core.on_spooled(s.publication, *s.chunk, ok(), m.now);
    m.take();
  };
  m.core.on_saved(ok(), m.now);
  m.deliver_publication(make(full(1), 500));
  ASSERT_THAT(m.delivered(), ElementsAre(full(1)));
  m.saves = false;
  m.deliver_control(m.parent, second.opening);
  m.deliver_frame(m.parent, second.chunk(0));
  m.deliver_control(m.parent, second.closing);
  m.deliver_control(m.parent, first.opening);
  for (std::size_t i = 0; i < first.chunks.size(); ++i) {
    written();
    m.deliver_frame(m.parent, first.chunk(i));
  }
  written();
  m.deliver_control(m.parent, first.closing);
  ASSERT_TRUE(std::holds_alternative<act::SaveState>(m.actions.back())) << "versions 2 and 3 are staged";
  m.core.on_chunk_read(first.id, 0, Slice(std::vector<std::byte>(3)), m.now);
  m.core.on_saved(ok(), m.now);
  m.saves = true;
  m.take();
  EXPECT_THAT(m.delivered(), ElementsAre(full(1)));
  m.deliver_publication(first);
  EXPECT_THAT(m.delivered(), ElementsAre(full(1), delta(2, 1), delta(3, 2)));
}

// The disk loses the staged chunks while the floor is being saved. All other chunks are here, so no more will arrive.
TEST(Member, InstallsLaterVersionsThoughTheDiskLostStagedChunks) {
  MemberConfig c = config();
  c.store = {Bytes{5000}, Bytes{1 << 20}, true};
  c.durable = true;
  Member m(c);
  const Made first = make(full(1), 10'000);
  m.core.on_saved(ok(), m.now);
  m.saves = false;
  m.deliver_control(m.parent, first.opening);
  for (std::size_t i = 0; i < first.chunks.size(); ++i) {
    m.deliver_frame(m.parent, first.chunk(i));
    for (const auto& s : m.all<act::Spool>())
      if (s.chunk) m.core.on_spooled(s.publication, *s.chunk, ok(), m.now);
    m.take();
  }
  m.deliver_control(m.parent, first.closing);
  ASSERT_TRUE(std::holds_alternative<act::SaveState>(m.actions.back())) << "version 1 is staged";
  m.core.on_chunk_read(first.id, 0, Slice(std::vector<std::byte>(3)), m.now);
  m.deliver_publication(make(full(4), 500));
  EXPECT_THAT(m.delivered(), IsEmpty());
  m.saves = true;
  m.core.on_saved(ok(), m.now);
  m.take();
  EXPECT_THAT(m.delivered(), ElementsAre(full(4)));
}

TEST(Member, DialsAgainWhenItsMessagesAreNotTaken) {
  Member m;
  const Slice message{std::vector<std::byte>(kMessageBytesMax / 4)};
  for (int i = 0; i < 15; ++i) m.core.send_message(message, m.now);
  m.take();
  EXPECT_EQ(m.end(), "");
  for (int i = 0; i < 5; ++i) m.core.send_message(message, m.now);
  m.take();
  EXPECT_EQ(m.end(), "");
  ASSERT_THAT(m.all<act::ReportLearnerAway>(), SizeIs(1));
  EXPECT_THAT(m.all<act::ReportLearnerAway>()[0].reason, HasSubstr("does not take its messages"));
}

TEST(Member, HoldsItsDownloadLimit) {
  for (const double late_ms : {0.0, 3.0}) {
    MemberConfig c = config();
    c.core.limits.down = BitRate::from_mbit_per_s(8);
    MemberCore core(c);
    Random random(3);
    TimePoint now(seconds(1));
    std::uint64_t total = 0;
    while (now < TimePoint(seconds(11))) {  // a connection always has more to read
      const std::size_t n = core.read_bytes_max(1 << 20);
      EXPECT_LE(n, 16 * 1024u);
      core.on_received(n, now);
      total += n;
      const auto paused = core.take_actions();
      ASSERT_EQ(paused.size(), 1u);
      EXPECT_FALSE(std::get<act::SetReading>(paused[0]).on);
      now = core.next_deadline() + from_seconds(random.uniform() * late_ms / 1000);
      core.on_timer(now);
      const auto resumed = core.take_actions();
      ASSERT_EQ(resumed.size(), 1u);
      EXPECT_TRUE(std::get<act::SetReading>(resumed[0]).on);
    }
    EXPECT_NEAR(static_cast<double>(total), 10e6, 0.03 * 10e6) << late_ms;
  }
}

// A pause that ends late costs no throughput, whatever is read first. Time without data to read is lost.
TEST(Member, DataThatWaitedDuringAPauseIsReadAtTheRateOfTheLink) {
  MemberConfig c = config();
  c.core.limits.down = BitRate::from_mbit_per_s(8);
  MemberCore core(c);
  TimePoint now(seconds(1));
  const TimePoint begun = now;
  std::uint64_t total = 0;
  const auto read = [&](std::size_t bytes) {
    core.on_received(bytes, now);
    total += bytes;
    return core.take_actions().size();
  };
  const auto resume = [&](Duration late) {
    now = core.next_deadline() + late;
    core.on_timer(now);
    EXPECT_EQ(core.take_actions().size(), 1u);
  };
  const auto carried = [&] { return from_seconds(static_cast<double>(total) / 1e6); };
  ASSERT_EQ(read(8000), 1u);
  for (int i = 0; i < 100; ++i) {
    resume(std::chrono::milliseconds(3));
    EXPECT_EQ(read(60), 0u) << "that message had left long ago";
    now += std::chrono::microseconds(300);
    EXPECT_EQ(read(8000), 1u);
    EXPECT_NEAR(echoline::seconds(core.next_deadline() - begun), echoline::seconds(carried()), 1e-6);
  }
  resume(Duration{});
  now += std::chrono::milliseconds(20);
  EXPECT_EQ(read(8000), 1u);
  EXPECT_NEAR(echoline::seconds(core.next_deadline() - now), 0.008, 1e-6);
}

// Only a learner of an older epoch that still runs could send it, with any sequence number.
TEST(Member, ABeaconOfAnOlderEpochIsNotBelieved) {
  Member m;
  const auto beacon = [&](std::uint64_t epoch, std::uint64_t sequence, WorkerSet revoked) {
    Beacon b = m.beacon(sequence);
    b.epoch = epoch;
    b.revoked = std::move(revoked);
    m.deliver_control(kControl, sign(b, made_key("authority")));
  };
  beacon(2, 10, {});
  beacon(1, 11, {kSelf});
  EXPECT_THAT(m.all<act::ReportEnd>(), IsEmpty()) << "a beacon of an older epoch is ignored";
  beacon(2, 12, {kSelf});
  EXPECT_THAT(m.all<act::ReportEnd>(), SizeIs(1));
}

TEST(Member, AChildThatAsksForTooMuchIsNoChildForAWhile) {
  Member m;
  const ConnId child{100}, other{102};
  const auto accept = [&](ConnId conn, WorkerId worker) {
    m.core.on_accepted(conn, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, worker}}, m.now);
    m.take();
  };
  accept(child, WorkerId{9});
  accept(other, WorkerId{8});
  m.deliver_control(child, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
  m.deliver_control(other, PeerHello{"run", 0, {}, false, {}, made_grant(8, 7)});
  for (int i = 0; i < 20'000 && !m.closed(child); ++i) m.deliver_control(child, Have{});
  EXPECT_TRUE(m.closed(child));
  EXPECT_FALSE(m.closed(other));
  m.core.on_accepted(ConnId{104}, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, m.now);
  m.take();
  EXPECT_TRUE(m.closed(ConnId{104})) << "before its first message";
  m.pass_time(ChildBudgets::kBarredTime);
  accept(ConnId{106}, WorkerId{9});
  m.deliver_control(ConnId{106}, PeerHello{"run", 0, {}, false, {}, made_grant(9, 7)});
  EXPECT_FALSE(m.closed(ConnId{106}));
}

// A few of the longest lists would fill a downlink, as first or later messages.
TEST(Member, LongListsCountByTheirLength) {
  Have longest;
  for (std::uint64_t version = 1; version <= 250; ++version) {
    ChunkSet chunks;
    for (std::uint32_t chunk = 0; chunk < 4096; chunk += 2) chunks.insert(chunk);
    PublicationId id{};
    id[0] = static_cast<std::byte>(version);
    longest.items[full(version)] = {id, chunks, false};
  }
  const auto heard = [&](bool reconnects) {
    Member m;
    ConnId conn{100};
    int lists = 0;
    for (; lists < 1000; ++lists, m.pass_time(milliseconds(100))) {
      if (lists == 0 || reconnects) {
        conn = ConnId{conn.value + 2};
        m.core.on_accepted(conn, {"10.0.0.9", {trust::PeerIdentity::Kind::kWorker, WorkerId{9}}}, m.now);
        m.take();
        if (m.closed(conn)) break;
        PeerHello hello{"run", 0, {}, false, {}, made_grant(9, 7)};
        hello.have_follows = true;
        m.deliver_control(conn, hello);
      }
      m.deliver_control(conn, longest);
      if (!reconnects && m.closed(conn)) break;
    }
    return lists;
  };
  EXPECT_LE(heard(false), 10);
  EXPECT_LE(heard(true), 10);
}

// A machine without file descriptors loses all its parents again and again. It reports fewer failures than the
// learner's budget allows.
TEST(Member, ReportsNoMoreFailedEdgesThanTheLearnerAccepts) {
  Member m;
  std::vector<Parent> parents;
  for (std::uint64_t i = 0; i < 64; ++i)
    parents.push_back({WorkerId{100 + i}, {"10.0.0.5", 1}, std::uint64_t{1} << i, false});
  m.actions.clear();
  m.assign(parents, 64);
  MessageBudget learners(kBeat);
  std::size_t failed = 0, told = 0;
  for (const TimePoint end = m.now + seconds(20); m.now < end; m.pass_time(milliseconds(50))) {
    const auto dials = m.all<act::Dial>();
    m.actions.clear();
    for (const act::Dial& dial : dials) {
      m.core.on_closed(dial.conn, "too many open files", m.now);
      ++failed;
    }
    m.take();
    for (std::size_t n = m.sent<EdgeFailed>(kControl).size(); n > 0; --n, ++told)
      EXPECT_EQ(learners.count(MessageBudget::Kind::kEdgeFailed, m.now), MessageBudget::Verdict::kAccept);
  }
  EXPECT_GT(failed, 600u);
  EXPECT_GT(told, 100u);
}

TEST(Member, RenewsItsCertificateAtHalfOfItsLife) {
  Member m;
  m.pass_time(std::chrono::minutes(29));
  EXPECT_THAT(m.sent<Renew>(kControl), IsEmpty());
  m.pass_time(std::chrono::minutes(2));
  ASSERT_FALSE(m.sent<Renew>(kControl).empty());
  EXPECT_EQ(m.sent<Renew>(kControl)[0].key, made_key("worker 7").public_key());
  const trust::Authority authority = made_authority();
  const auto issue = [&](const trust::SigningKey& key, WorkerId worker) {
    return *authority.issue({key.public_key(), trust::PeerIdentity::Kind::kWorker, worker, 2, kMadeUnix_s + 1860,
                             trust::kWorkerLifetimeMax});
  };
  m.deliver_control(kControl, Renewed{issue(made_key("worker 8"), kSelf)});
  m.deliver_control(kControl, Renewed{issue(made_key("worker 7"), WorkerId{8})});
  m.deliver_control(kControl, Renewed{random_bytes(1, 100)});
  EXPECT_EQ(m.all<act::UseCertificate>().size(), 1u);  // none of these certificates is for this worker
  m.deliver_control(kControl, Renewed{issue(made_key("worker 7"), kSelf)});
  ASSERT_EQ(m.all<act::UseCertificate>().size(), 2u);
  EXPECT_EQ(m.last<act::UseCertificate>()->certificate, issue(made_key("worker 7"), kSelf));
  const std::size_t asked = m.sent<Renew>(kControl).size();
  m.pass_time(std::chrono::minutes(20));
  EXPECT_EQ(m.sent<Renew>(kControl).size(), asked) << "it has a new certificate";
}

}  // namespace
}  // namespace echoline::overlay
