// The learner's judgement of the workers' reports about each other, and of their number.
#include "overlay/learner/conduct.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/desk.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;
using Ruling = Conduct::Ruling;

constexpr Duration kBeat = milliseconds(500);
constexpr std::uint64_t kThen = 1'700'000'000'000;
constexpr std::uint64_t kMinute = 60'000;

WorkerId id(std::uint64_t v) { return WorkerId{v}; }

// ---- bad chunks ----

TEST(Conduct, OneAccusationSeparates) {
  Conduct conduct(kBeat);
  // One bad chunk may be a memory error.
  EXPECT_EQ(conduct.on_bad_chunk(id(2), id(1), kThen), Ruling::kNothing);
  EXPECT_FALSE(conduct.are_separated(id(1), id(2), kThen));
  EXPECT_EQ(conduct.on_bad_chunk(id(2), id(1), kThen), Ruling::kSeparate);
  for (int i = 0; i < 100; ++i)
    EXPECT_EQ(conduct.on_bad_chunk(id(2), id(1), kThen), Ruling::kNothing) << "a repetition";
  EXPECT_FALSE(conduct.is_quarantined(id(1), kThen));
  EXPECT_TRUE(conduct.are_separated(id(1), id(2), kThen));
  EXPECT_TRUE(conduct.are_separated(id(2), id(1), kThen));
  EXPECT_FALSE(conduct.are_separated(id(1), id(3), kThen));
  EXPECT_THAT(conduct.separated_pairs(kThen), ElementsAre(std::pair(id(1), id(2))));
  EXPECT_TRUE(conduct.accuses(id(2), kThen));
  EXPECT_FALSE(conduct.accuses(id(1), kThen));
  EXPECT_TRUE(conduct.separated_pairs(kThen + Conduct::kAccusationMemoryMs).empty());
}

TEST(Conduct, SeveralIndependentAccusationsQuarantine) {
  Conduct conduct(kBeat);
  for (const std::uint64_t child : {2, 2, 3})
    EXPECT_NE(conduct.on_bad_chunk(id(child), id(1), kThen), Ruling::kParentAtFault);
  EXPECT_EQ(conduct.on_bad_chunk(id(3), id(1), kThen), Ruling::kParentAtFault);
  EXPECT_TRUE(conduct.is_quarantined(id(1), kThen));
  EXPECT_FALSE(conduct.accuses(id(2), kThen)) << "its accusation was confirmed";
  EXPECT_FALSE(conduct.is_quarantined(id(1), kThen + Conduct::kAccusationMemoryMs));
}

// Each further accusation of one worker weighs less, so that k liars cannot demote any number of workers.
TEST(Conduct, AWorkerThatAccusesManyWeighsLittle) {
  Conduct conduct(kBeat);
  const auto accuse = [&](std::uint64_t child, std::uint64_t parent) {
    conduct.on_bad_chunk(id(child), id(parent), kThen);
    return conduct.on_bad_chunk(id(child), id(parent), kThen);
  };
  std::size_t demoted = 0;
  for (std::uint64_t victim = 1; victim <= 20; ++victim)
    for (const std::uint64_t liar : {101, 102}) demoted += accuse(liar, victim) == Ruling::kParentAtFault;
  EXPECT_LE(demoted, 1u);
}

TEST(Conduct, AWorkerThatAloneAccusesManyLies) {
  Conduct conduct(kBeat);
  const auto accuse = [&](std::uint64_t child, std::uint64_t parent) {
    conduct.on_bad_chunk(id(child), id(parent), kThen);
    return conduct.on_bad_chunk(id(child), id(parent), kThen);
  };
  EXPECT_EQ(accuse(9, 1), Ruling::kSeparate);
  EXPECT_EQ(accuse(9, 2), Ruling::kSeparate);
  EXPECT_EQ(accuse(9, 3), Ruling::kChildAtFault);
  EXPECT_TRUE(conduct.is_quarantined(id(9), kThen));
  for (const std::uint64_t victim : {1, 2, 3}) EXPECT_FALSE(conduct.is_quarantined(id(victim), kThen));
  EXPECT_TRUE(conduct.separated_pairs(kThen).empty()) << "its accusations no longer count";
  EXPECT_EQ(accuse(9, 4), Ruling::kNothing);
  EXPECT_EQ(accuse(8, 1), Ruling::kSeparate) << "nor do they support another worker's";
}

// Two machines return under new identities again and again, and one child accuses each of them truthfully.
TEST(Conduct, AccusationsOfGoneWorkersMakeNoLiar) {
  Conduct conduct(kBeat);
  const auto accuse = [&](std::uint64_t child, std::uint64_t parent, std::uint64_t gone) {
    const auto is_present = [&](WorkerId each) { return each.value > gone; };
    conduct.on_bad_chunk(id(child), id(parent), kThen, is_present);
    return conduct.on_bad_chunk(id(child), id(parent), kThen, is_present);
  };
  for (std::uint64_t parent = 1; parent <= 20; ++parent)
    EXPECT_EQ(accuse(90, parent, parent - std::min<std::uint64_t>(parent, 2)), Ruling::kSeparate) << parent;
  EXPECT_EQ(accuse(90, 21, 18), Ruling::kChildAtFault)
      << "three of the accused are present: another worker should have noticed";
}

TEST(Conduct, AQuarantinedWorkerIsStillSeparatedFromTheWorkersItAccuses) {
  Conduct conduct(kBeat);
  for (const std::uint64_t child : {2, 3})
    for (int i = 0; i < 2; ++i) conduct.on_bad_chunk(WorkerId{child}, WorkerId{1}, kThen);
  ASSERT_TRUE(conduct.is_quarantined(WorkerId{1}, kThen + 1));
  EXPECT_EQ(conduct.on_bad_chunk(WorkerId{1}, WorkerId{4}, kThen + 1), Ruling::kNothing);
  EXPECT_EQ(conduct.on_bad_chunk(WorkerId{1}, WorkerId{4}, kThen + 1), Ruling::kSeparate);
  EXPECT_TRUE(conduct.are_separated(WorkerId{1}, WorkerId{4}, kThen + 1));
  // The quarantined worker's accusation has no weight, so the next one counts as the first.
  conduct.on_bad_chunk(WorkerId{5}, WorkerId{4}, kThen + 2);
  EXPECT_EQ(conduct.on_bad_chunk(WorkerId{5}, WorkerId{4}, kThen + 2), Ruling::kSeparate);
  // This has a limit: a worker that alone accuses many is at fault itself.
  for (const std::uint64_t parent : {6, 7})
    for (int i = 0; i < 2; ++i) conduct.on_bad_chunk(WorkerId{1}, WorkerId{parent}, kThen + 3);
  conduct.on_bad_chunk(WorkerId{1}, WorkerId{8}, kThen + 4);
  EXPECT_EQ(conduct.on_bad_chunk(WorkerId{1}, WorkerId{8}, kThen + 4), Ruling::kChildAtFault);
  EXPECT_FALSE(conduct.are_separated(WorkerId{1}, WorkerId{6}, kThen + 4));
}

// Two accusers do not quarantine a parent that serves many others. They are only separated from it.
TEST(Conduct, AWorkerThatServesMoreThanAccuseItIsNotQuarantined) {
  Conduct conduct(kBeat);
  const auto accuse = [&](std::uint64_t child, std::uint64_t parent, std::uint64_t at) {
    conduct.on_bad_chunk(id(child), id(parent), at);
    return conduct.on_bad_chunk(id(child), id(parent), at);
  };
  for (std::uint64_t child = 2; child <= 7; ++child) conduct.on_delivery(id(1), id(child), kThen);
  EXPECT_EQ(accuse(2, 1, kThen), Ruling::kSeparate);
  EXPECT_EQ(accuse(3, 1, kThen), Ruling::kSeparate) << "four other children do not accuse it";
  EXPECT_FALSE(conduct.is_quarantined(id(1), kThen));
  EXPECT_TRUE(conduct.are_separated(id(1), id(2), kThen) && conduct.are_separated(id(1), id(3), kThen));
  EXPECT_EQ(accuse(4, 1, kThen), Ruling::kParentAtFault) << "three of six accuse it, so the accusers are not at fault";
  // Old deliveries do not count.
  const std::uint64_t later = kThen + 2 * Conduct::kEdgeMemoryMs;
  for (std::uint64_t child = 12; child <= 17; ++child) conduct.on_delivery(id(11), id(child), kThen);
  EXPECT_EQ(accuse(12, 11, later), Ruling::kSeparate);
  EXPECT_EQ(accuse(13, 11, later), Ruling::kParentAtFault);
}

TEST(Conduct, AFewMalformedMessagesAreNoAttack) {
  Conduct conduct(kBeat);
  for (int i = 1; i < Conduct::kMalformedMax; ++i) EXPECT_FALSE(conduct.count_malformed(id(1), kThen));
  EXPECT_FALSE(conduct.count_malformed(id(2), kThen)) << "each worker has its own count";
  EXPECT_TRUE(Conduct(kBeat, conduct.stored_records()).count_malformed(id(1), kThen + kMinute))
      << "the count survives a new learner";
  EXPECT_FALSE(conduct.count_malformed(id(1), kThen + Conduct::kAccusationMemoryMs))
      << "the count restarts after a day";
}

// ---- edges ----

TEST(Conduct, AnEdgeThatFailsRepeatedlySeparatesItsEnds) {
  Conduct conduct(kBeat);
  TimePoint now{};
  std::uint64_t ms = kThen;
  const auto fails = [&](std::uint64_t child, std::uint64_t parent) {
    now += seconds(1), ms += 1000;
    return conduct.on_edge_failed(id(child), id(parent), now, ms);
  };
  EXPECT_EQ(fails(2, 1), Ruling::kNothing);
  for (int i = 0; i < 100; ++i)
    EXPECT_EQ(conduct.on_edge_failed(id(2), id(1), now, ms + 10), Ruling::kNothing) << "the same failure";
  EXPECT_EQ(fails(2, 1), Ruling::kNothing);
  conduct.on_delivery(id(1), id(2), ms);  // a delivery restarts the count
  EXPECT_EQ(fails(2, 1), Ruling::kNothing);
  EXPECT_EQ(fails(2, 1), Ruling::kNothing);
  EXPECT_EQ(fails(2, 1), Ruling::kSeparate);
  EXPECT_TRUE(conduct.are_separated(id(1), id(2), ms));
  EXPECT_EQ(conduct.find(id(1))->ladder.role(), chains::Role::kSeed) << "a single accuser demotes no worker";
  EXPECT_EQ(fails(3, 1), Ruling::kNothing);
  EXPECT_EQ(fails(3, 1), Ruling::kNothing);
  EXPECT_EQ(fails(3, 1), Ruling::kParentAtFault) << "two children accuse it";
  EXPECT_EQ(conduct.find(id(1))->ladder.role(), chains::Role::kTail);
  EXPECT_TRUE(conduct.separated_pairs(ms + Conduct::kEdgeMemoryMs).empty());
}

TEST(Conduct, AWorkerWhoseEdgesAllFailIsTheCause) {
  Conduct conduct(kBeat);
  TimePoint now{};
  std::uint64_t ms = kThen;
  std::vector<Ruling> rulings;
  for (std::uint64_t parent = 1; parent <= 3; ++parent)
    for (int i = 0; i < 3; ++i) {
      now += seconds(1), ms += 1000;
      rulings.push_back(conduct.on_edge_failed(id(9), id(parent), now, ms));
    }
  EXPECT_EQ(rulings.back(), Ruling::kChildAtFault);
  EXPECT_EQ(conduct.find(id(9))->ladder.role(), chains::Role::kTail);
  for (std::uint64_t parent = 1; parent <= 3; ++parent)
    EXPECT_EQ(conduct.find(id(parent))->ladder.role(), chains::Role::kSeed);
}

TEST(Conduct, AFloodOfFailuresMovesFewWorkers) {
  Conduct conduct(kBeat);
  TimePoint now{};
  std::uint64_t ms = kThen;
  std::size_t moves = 0;
  for (int i = 0; i < 2000; ++i) {  // 20 s, of 50 parents
    now += milliseconds(10), ms += 10;
    moves += conduct.on_edge_failed(id(99), id(1 + static_cast<std::uint64_t>(i) % 50), now, ms) != Ruling::kNothing;
  }
  EXPECT_LE(moves, 6u);
}

// ---- stored records ----

TEST(Conduct, OutlivesTheProcessAndIsForgottenLater) {
  LearnerState state;
  {
    Conduct conduct(kBeat);
    for (const std::uint64_t child : {2, 2, 3, 3}) conduct.on_bad_chunk(id(child), id(1), kThen);
    for (int i = 0; i < 2; ++i) conduct.on_bad_chunk(id(2), id(8), kThen);
    for (const std::uint64_t parent : {4, 4, 5, 5, 6, 6}) conduct.on_bad_chunk(id(9), id(parent), kThen);
    conduct.count_malformed(id(3), kThen);
    conduct.record_of(id(7), kThen);  // nothing to remember
    state.conduct = conduct.stored_records();
  }
  EXPECT_FALSE(state.conduct.contains(id(7)));
  const auto read = decode_learner_state(encode(state));
  ASSERT_TRUE(read.has_value()) << read.error().message();
  EXPECT_EQ(read->conduct, state.conduct);
  Conduct conduct(kBeat, read->conduct);
  EXPECT_TRUE(conduct.is_quarantined(id(1), kThen + kMinute));
  EXPECT_TRUE(conduct.is_quarantined(id(9), kThen + kMinute));
  EXPECT_TRUE(conduct.are_separated(id(2), id(8), kThen + kMinute));
  EXPECT_EQ(conduct.on_bad_chunk(id(9), id(3), kThen + kMinute), Ruling::kNothing)
      << "a quarantined worker is still no witness";
  conduct.prune({}, kThen + kMinute);
  EXPECT_TRUE(conduct.is_quarantined(id(1), kThen + kMinute));
  conduct.prune({}, kThen + Conduct::kRecordMemoryMs + kMinute);
  EXPECT_EQ(conduct.size(), 0u);
}

TEST(Conduct, RemembersALimitedNumberOfWorkers) {
  Conduct conduct(kBeat);
  for (std::uint64_t i = 0; i < Conduct::kRecordsMax + 500; ++i) {
    conduct.record_of(id(10 + i), kThen + i);
    if (i % 2) conduct.on_bad_chunk(id(10 + i), id(1), kThen + i), conduct.on_bad_chunk(id(10 + i), id(1), kThen + i);
  }
  for (std::uint64_t parent = 1; parent < 500; ++parent)
    conduct.on_bad_chunk(id(5), id(10'000 + parent), kThen + parent);
  EXPECT_LE(conduct.find(id(5))->stored.bad_chunks_of.size(), Conduct::kAccusationsMax);
  conduct.prune({id(10)}, kThen + 5000);
  EXPECT_LE(conduct.size(), Conduct::kRecordsMax);
  EXPECT_TRUE(conduct.is_quarantined(id(1), kThen + 5000)) << "workers without accusations are forgotten first";
  EXPECT_NE(conduct.find(id(10)), nullptr) << "a present worker is kept";
}

// ---- the learner ----

void report_bad_chunks(Desk& desk, std::uint64_t child, std::uint64_t parent) {
  for (int i = 0; i < Conduct::kBadChunksMax; ++i) desk.deliver_control(child, Poisoned{id(parent), {}, 5});
}
std::vector<std::uint64_t> quarantined(const Desk& desk) {
  std::vector<std::uint64_t> ids;
  for (const WorkerView& view : desk.core.stats().workers)
    if (view.quarantined) ids.push_back(view.info.id.value);
  return ids;
}

TEST(LearnerConduct, BadChunksSeparateAnEdgeAndSeveralAccusersEndForwarding) {
  Desk desk(8);
  desk.join_all(4);
  desk.deliver_control(2, Poisoned{id(1), {}, 5});
  EXPECT_THAT(desk.chain(), ElementsAre(1, 2, 3, 4));
  desk.deliver_control(2, Poisoned{id(1), {}, 6});
  EXPECT_THAT(desk.chain(), ElementsAre(1, 3, 2, 4)) << "the accuser stands no nearer than before";
  EXPECT_THAT(quarantined(desk), IsEmpty());
  report_bad_chunks(desk, 2, 1);  // repeated, for an edge that this worker had a moment ago
  EXPECT_THAT(quarantined(desk), IsEmpty());
  report_bad_chunks(desk, 3, 1);
  EXPECT_THAT(quarantined(desk), ElementsAre(1));
  EXPECT_THAT(desk.chain(), ElementsAre(3, 2, 4, 1));
  report_bad_chunks(desk, 2, 4);   // not an edge of this worker
  report_bad_chunks(desk, 2, 99);  // no worker of the run
  EXPECT_THAT(desk.chain(), ElementsAre(3, 2, 4, 1));
}

TEST(LearnerConduct, AnAccusationOfAGoneWorkerIsNoLie) {
  Desk desk(8);
  desk.join_all(4);
  report_bad_chunks(desk, 2, 1);
  desk.core.expel(id(1), "it floods", desk.now);
  ASSERT_THAT(desk.chain(), ElementsAre(3, 2, 4));
  report_bad_chunks(desk, 2, 3);
  ASSERT_THAT(desk.chain(), ElementsAre(3, 4, 2));
  report_bad_chunks(desk, 2, 4);
  EXPECT_THAT(quarantined(desk), IsEmpty()) << "only two accused workers are present";
}

// Eight messages and three reconnections once quarantined four honest workers.
TEST(LearnerConduct, ComingBackWipesNothing) {
  Desk desk(8);
  desk.join_all(6);
  for (int round = 0; round < 4; ++round) {
    const WorkerId parent = desk.core.topology().parents().at(id(4)).at(0);
    if (parent != kLearnerId) report_bad_chunks(desk, 4, parent.value);
    desk.deliver_control(4, Goodbye{"see you"});
    desk.join(4);
    desk.pass_time(milliseconds(100));
  }
  for (const std::uint64_t victim : quarantined(desk)) EXPECT_EQ(victim, 4u);
  EXPECT_NE(desk.chain().at(0), 4u) << "the accuser did not become the seed";
}

TEST(LearnerConduct, SurvivesTheLearner) {
  LearnerConfig config = Desk::config(8);
  config.durable = true;
  Desk desk(config);
  desk.core.on_saved(ok(), desk.now);
  desk.join_all(4);
  report_bad_chunks(desk, 2, 1);
  desk.core.on_saved(ok(), desk.now);
  report_bad_chunks(desk, 3, 1);
  for (int i = 0; i < 4; ++i) desk.core.on_saved(ok(), desk.now), desk.take();
  config.state = *decode_learner_state(desk.all<act::SaveState>().back().bytes);
  Desk restarted(config);
  restarted.core.on_saved(ok(), restarted.now);
  restarted.join_all(4);
  EXPECT_THAT(quarantined(restarted), ElementsAre(1));
  EXPECT_EQ(restarted.chain().back(), 1u);
}

TEST(LearnerConduct, ManyFailuresInTwoSecondsChangeLittle) {
  Desk desk(8);
  desk.join_all(6);
  ASSERT_THAT(desk.chain(), ElementsAre(1, 2, 3, 4, 5, 6));
  const auto before = desk.all<act::ReportTopology>().size();
  const auto depth = [&](std::uint64_t worker) {
    const auto chain = desk.chain();
    return std::find(chain.begin(), chain.end(), worker) - chain.begin();
  };
  auto nearest = depth(4);
  for (int i = 0; i < 27; ++i) {
    const WorkerId parent = desk.core.topology().parents().at(id(4)).at(0);
    desk.deliver_control(4, EdgeFailed{parent, EdgeTroubleKind::kLost, "says who"});
    nearest = std::min(nearest, depth(4));
    desk.pass_time(milliseconds(75));
  }
  EXPECT_EQ(nearest, 3) << "an accuser gains no better place";
  EXPECT_LE(desk.all<act::ReportTopology>().size() - before, 3u);
  EXPECT_EQ(desk.chain().at(0), 1u);
}

TEST(LearnerConduct, AccusersDoNotBecomeSeeds) {
  Desk desk(8);
  desk.join_all(2);  // no other worker can feed it
  for (int i = 0; i < 3; ++i, desk.pass_time(milliseconds(500)))
    desk.deliver_control(2, EdgeFailed{id(1), EdgeTroubleKind::kLost, "reset"});
  EXPECT_THAT(desk.chains(), ElementsAre(ElementsAre(id(1)), ElementsAre(id(2)))) << "it is served and has no children";
  for (std::uint64_t i = 3; i <= 5; ++i) desk.join(i);
  desk.pass_time(seconds(1));
  EXPECT_THAT(desk.core.topology().children_of(id(1)), testing::Not(testing::Contains(id(2))));
}

// The child may reach its parent again, while the parent may never reach the child.
TEST(LearnerConduct, BothEndsOfAnEdgeTryInTurns) {
  Desk desk(8);
  desk.join_all(2);
  const auto fails = [&] {
    desk.pass_time(seconds(5));
    desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kUnreachable, "no route"});
    const Parent parent = desk.sent<Assign>(std::uint64_t{2}).back().parents.at(0);
    EXPECT_EQ(parent.worker, WorkerId{1});
    return parent.dials;
  };
  EXPECT_TRUE(fails());
  EXPECT_FALSE(fails());
  EXPECT_TRUE(fails());
  EXPECT_THAT(desk.sent<DialChild>(std::uint64_t{1}), SizeIs(2));
}

TEST(LearnerConduct, AnUnreachableWorkerDialsItself) {
  Desk desk(8);
  desk.join(1);
  desk.join(2, false);
  desk.pass_time(2 * TopologyPlan::kDelay);
  for (int i = 0; i < 2; ++i, desk.pass_time(seconds(5)))
    desk.deliver_control(2, EdgeFailed{WorkerId{1}, EdgeTroubleKind::kUnreachable, "no route"});
  EXPECT_THAT(desk.sent<DialChild>(std::uint64_t{1}), SizeIs(0));
  EXPECT_FALSE(desk.sent<Assign>(std::uint64_t{2}).back().parents.at(0).dials);
}

// A parent sends no chunk of small publications, too little for a hop's rate to show. Its child gets help each time.
TEST(LearnerConduct, AParentThatWithholdsChunksIsPartedFromItsChild) {
  for (const bool holds : {true, false}) {
    Desk desk(8);
    desk.join_all(3);
    ASSERT_THAT(desk.chain(), ElementsAre(1, 2, 3));
    for (std::uint64_t version = 0; version < 4; ++version) {
      EXPECT_THAT(desk.chain(), holds && version == 2 ? ElementsAre(1, 3, 2) : ElementsAre(1, 2, 3)) << version;
      if (holds && version == 2) break;
      const Made made = make(full(version), 3000);
      ASSERT_TRUE(desk.publish(made).has_value());
      Heartbeat lacks, has;
      lacks.progress = {{made.id, {0}}};
      has.progress = {{made.id, {3}}};
      desk.deliver_control(1, holds ? has : lacks);
      desk.deliver_control(2, lacks);
      desk.deliver_control(2, NeedHelp{Version{version}, false, {}, true});
      desk.deliver_control(2, Installed{Version{version}, digest_of(version), 0});  // the learner has helped it
      desk.pass_time(seconds(1));
    }
  }
}

// A parent announces nothing, or sends so many other messages that no announcement gets through.
TEST(LearnerConduct, AParentThatWithholdsAnnouncementsIsPartedToo) {
  for (const bool holds : {true, false}) {
    Desk desk(8);
    desk.join_all(3);
    ASSERT_TRUE(desk.publish(make(full(0), 3000)).has_value());
    for (std::uint64_t worker = 1; worker <= 3; ++worker)
      desk.deliver_control(worker, Installed{Version{0}, digest_of(0), 0});
    for (std::uint64_t version = 1; version < 4; ++version) {
      EXPECT_THAT(desk.chain(), holds && version == 3 ? ElementsAre(1, 3, 2) : ElementsAre(1, 2, 3)) << version;
      if (holds && version == 3) break;
      ASSERT_TRUE(desk.publish(make(delta(version, version - 1), 3000)).has_value());
      Heartbeat has;
      has.holdings = {{delta(version, version - 1), 3000}};
      desk.deliver_control(1, holds ? has : Heartbeat{});
      desk.deliver_control(3, has);  // helps
      desk.deliver_control(2, Heartbeat{});
      desk.deliver_control(2, NeedHelp{Version{version}, false, Version{version - 1}, true});
      desk.deliver_control(2, Installed{Version{version}, digest_of(version), 0});
      desk.pass_time(seconds(1));
    }
  }
}

TEST(LearnerConduct, AHelperThatBringsNothingIsNotSentAgain) {
  Desk desk(8);
  desk.join_all(3);
  std::vector<WorkerId> helpers;
  for (std::uint64_t version = 0; version < 4; ++version) {
    ASSERT_TRUE(desk.publish(make(full(version), 3000)).has_value());
    Heartbeat beat;
    beat.holdings = {{full(version), 3000}};
    desk.deliver_control(3, beat);
    desk.deliver_control(2, NeedHelp{Version{version}, false, {}});
    helpers.push_back(desk.sent<Help>(std::uint64_t{2}).back().from.worker);
    desk.pass_time(seconds(1));
    desk.deliver_control(2, NeedHelp{Version{version}, false, {}, true});
    desk.deliver_control(2, Installed{Version{version}, digest_of(version), 0});
    desk.pass_time(seconds(1));
  }
  EXPECT_THAT(helpers, ElementsAre(id(3), id(3), kLearnerId, kLearnerId));
}

// A worker that failed at forwarding helps only if no other worker can.
TEST(LearnerConduct, AWorkerThatFailedHelpsAfterTheOthers) {
  LearnerConfig config = Desk::config(8);
  config.policy = chains::TopologyPolicy::kTrees;
  Desk desk(config);
  desk.join_all(8);
  const WorkerId failed = desk.core.topology().parents().at(id(8)).at(0);
  ASSERT_NE(failed, kLearnerId);
  const auto& leaves = desk.core.topology().leaves_only;
  for (int round = 0; round < 8 && std::find(leaves.begin(), leaves.end(), failed) == leaves.end(); ++round)
    for (const WorkerId child : desk.core.topology().children_of(failed))
      for (int i = 0; i < 3; ++i, desk.pass_time(milliseconds(300)))
        desk.deliver_control(child.value, EdgeFailed{failed, EdgeTroubleKind::kLost, "reset"});
  ASSERT_NE(std::find(leaves.begin(), leaves.end(), failed), leaves.end());
  const auto other = [&](int n) {  // the n-th that has not failed
    for (std::uint64_t i = 1;; ++i)
      if (id(i) != failed && n-- == 0) return i;
  };
  ASSERT_TRUE(desk.publish(make(full(0), 10)).has_value());
  Heartbeat cheap, dear;
  cheap.holdings = {{full(0), 10}};
  dear.holdings = {{full(0), 15}};
  desk.deliver_control(failed.value, cheap);
  desk.deliver_control(other(1), dear);
  desk.deliver_control(other(0), NeedHelp{Version{0}, false, {}});
  EXPECT_EQ(desk.sent<Help>(other(0)).back().from.worker, id(other(1)));
}

TEST(LearnerConduct, AWorkerThatFailedClimbsByDeliveriesAndIsRetried) {
  LearnerConfig config = Desk::config(8);
  config.policy = chains::TopologyPolicy::kTrees;
  Desk desk(config);
  desk.join_all(8);
  const auto may_forward = [&](WorkerId worker) {
    const auto& leaves = desk.core.topology().leaves_only;
    return std::find(leaves.begin(), leaves.end(), worker) == leaves.end();
  };
  const WorkerId parent = desk.core.topology().parents().at(id(8)).at(0);
  ASSERT_NE(parent, kLearnerId);
  for (int round = 0; round < 8 && may_forward(parent); ++round)
    for (const WorkerId child : desk.core.topology().children_of(parent))
      for (int i = 0; i < 3; ++i, desk.pass_time(milliseconds(300)))
        desk.deliver_control(child.value, EdgeFailed{parent, EdgeTroubleKind::kLost, "reset"});
  ASSERT_FALSE(may_forward(parent));
  ASSERT_TRUE(desk.publish(make(full(0), 10)).has_value());
  for (std::uint64_t version = 1; version <= 30; ++version) {
    ASSERT_TRUE(desk.publish(make(delta(version, version - 1), 10)).has_value());
    desk.deliver_control(parent.value, Installed{Version{version}, digest_of(version), 0});
  }
  EXPECT_FALSE(may_forward(parent)) << "its own installations do not count";
  // A worker that it helped has installed the version.
  Heartbeat beat;
  beat.holdings = {{full(30), 10}};
  const std::uint64_t other = parent == id(1) ? 2 : 1;
  for (std::uint64_t version = 31; version < 31 + chains::RoleLadder::kDeliveriesToPromote; ++version) {
    ASSERT_TRUE(desk.publish(make(delta(version, version - 1), 10)).has_value());
    beat.holdings = {{full(version), 10}};
    desk.deliver_control(parent.value, beat);
    desk.deliver_control(other, NeedHelp{Version{version}, true, {}});
    ASSERT_EQ(desk.sent<Help>(other).back().from.worker, parent);
    EXPECT_FALSE(may_forward(parent));
    desk.deliver_control(other, Installed{Version{version}, digest_of(version), 0});
  }
  EXPECT_TRUE(may_forward(parent));
}

// Accusations of workers that never sent this worker anything need no second accuser.
TEST(LearnerConduct, AWorkerThatAccusesStrangersIsExpelled) {
  for (const bool poisoned : {true, false}) {
    Desk desk(8);
    desk.join_all(6);
    int said = 0;
    for (; said < 1000 && desk.has(id(2)); ++said) {
      const WorkerId victim = id(3 + static_cast<std::uint64_t>(said) % 4);
      if (poisoned)
        desk.deliver_control(2, Poisoned{victim, {}, 5});
      else
        desk.deliver_control(2, EdgeFailed{victim, EdgeTroubleKind::kSilent, "silent"});
    }
    EXPECT_LE(said, 12);
    EXPECT_THAT(desk.lost(2), HasSubstr("it accuses workers that never sent it anything"));
    EXPECT_THAT(quarantined(desk), IsEmpty());
  }
}

// A worker accuses a parent that it had a moment ago, before it knows of its new one. This does not count as a lie.
TEST(LearnerConduct, ALateAccusationIsNoLie) {
  Desk desk(8);
  desk.join_all(3);
  desk.deliver_control(1, Draining{});  // 2 had everything from it
  for (int i = 0; i < 100; ++i, desk.pass_time(milliseconds(200)))
    desk.deliver_control(2, EdgeFailed{id(1), EdgeTroubleKind::kLost, "closed by the peer"});
  EXPECT_TRUE(desk.has(id(2)));
}

TEST(LearnerConduct, AnAccusationDelayedByALearnersPauseIsNoLie) {
  Desk desk(8);
  desk.join_all(3);
  desk.deliver_control(1, Draining{});
  desk.now += std::chrono::hours(4);
  desk.core.on_timer(desk.now);
  desk.take();
  for (int i = 0; i < 100; ++i)
    desk.deliver_control(2, EdgeFailed{id(1), EdgeTroubleKind::kLost, "closed by the peer"});
  EXPECT_TRUE(desk.has(id(2)));
}

// ---- malformed messages ----

void garbage(Desk& desk, std::uint64_t worker) {
  desk.core.on_frame(desk.control.at(id(worker)), {FrameType::kControl, Slice(random_bytes(1, 500)), {}, {}}, desk.now);
  desk.take();
}

// The learner need not trust an acknowledgement: only a holder of the policy knows its digest.
TEST(LearnerConduct, AnUnpublishedVersionCountsAsInstalledByNoWorker) {
  Desk desk;
  desk.join_all(2);
  ASSERT_TRUE(desk.publish(make(full(1), 10)).has_value());
  ASSERT_TRUE(desk.publish(make(delta(3, 1), 10)).has_value());
  const auto installed = [&] { return desk.core.stats().workers[0].installed; };
  desk.deliver_control(1, Installed{Version{3}, digest_of(1), 0});
  desk.deliver_control(1, Installed{Version{2}, digest_of(2), 0});
  EXPECT_EQ(installed(), std::nullopt);
  EXPECT_THAT(desk.all<act::ReportInstalled>(), IsEmpty());
  desk.deliver_control(1, Installed{Version{1}, digest_of(1), 0});
  EXPECT_EQ(installed(), Version{1});
  desk.join(1, true, kMegabytePerS, Installed{Version{3}, digest_of(7), 0});
  EXPECT_EQ(installed(), std::nullopt) << "a reconnection does not make the claim true";
  EXPECT_TRUE(desk.has(id(1)));
  for (int i = 0; i < 2; ++i) desk.deliver_control(1, Installed{Version{3}, digest_of(1), 0});
  EXPECT_FALSE(desk.has(id(1)));
  EXPECT_THAT(desk.lost(1), HasSubstr("which was never published, as often as never happens by chance"));
  EXPECT_TRUE(desk.has(id(2)));
}

TEST(LearnerConduct, MalformedMessagesAreCountedBeforeTheyExpel) {
  LearnerConfig config = Desk::config(8);
  config.check_heartbeat = [](std::string_view bytes) -> Status {
    return bytes == "bad" ? Status(fail(Code::kInvalid, "read vitals", "not two numbers")) : ok();
  };
  Desk desk(config);
  desk.join_all(2);
  const auto beat = [&](std::string application) {
    Heartbeat heartbeat;
    heartbeat.application = std::move(application);
    desk.deliver_control(1, heartbeat);
  };
  beat("good");
  beat("bad");
  EXPECT_EQ(desk.core.stats().workers.at(0).application_bytes, "good") << "the valid part stays";
  garbage(desk, 1);
  desk.core.on_frame(desk.control.at(id(1)), {FrameType::kChunk, {}, {}, {}}, desk.now);
  EXPECT_TRUE(desk.has(id(1)));
  desk.core.on_corrupt(desk.control.at(id(1)), "expected magic 0xec02", desk.now);
  desk.take();
  EXPECT_THAT(desk.away(1), HasSubstr("magic"));
  desk.join(1);
  EXPECT_TRUE(desk.has(id(1))) << "it may have a broken driver";
  desk.core.on_corrupt(desk.control.at(id(1)), "expected magic 0xec02", desk.now);
  desk.take();
  EXPECT_FALSE(desk.has(id(1)));
  EXPECT_TRUE(desk.core.state().revoked.contains(id(1)));
  EXPECT_THAT(desk.lost(1), HasSubstr("expected magic 0xec02, as often as never happens by chance"));
  EXPECT_TRUE(desk.has(id(2)));
}

TEST(LearnerConduct, AMessageWithoutEndIsNotKept) {
  LearnerConfig config = Desk::config(8);
  config.message_bytes_max = 100'000;
  config.assembling_bytes_max = 110'000;
  Desk desk(config);
  desk.join_all(2);
  const auto part = [&](std::size_t bytes, bool more) {
    Frame frame{FrameType::kApplication, Slice(random_bytes(1, bytes)), {}, {}};
    frame.more = more;
    desk.core.on_frame(desk.control.at(id(1)), std::move(frame), desk.now);
    desk.take();
  };
  for (int i = 0; i < 4; ++i) part(30'000, true);
  part(30'000, false);
  EXPECT_THAT(desk.all<act::DeliverWorkerMessage>(), IsEmpty());
  part(100'000, false);
  EXPECT_THAT(desk.all<act::DeliverWorkerMessage>(), SizeIs(1)) << "the next message is accepted";
  std::size_t sent = 0;
  for (; desk.has(id(1)) && sent < 10'000'000; sent += 30'000) part(30'000, true);
  EXPECT_LE(sent, 600'000u);
  EXPECT_THAT(desk.lost(1), HasSubstr("more than 100000 bytes"));
}

// ---- message budgets ----

TEST(Budget, IsFarAboveAWorkersNeedsAndEndsFloods) {
  MessageBudget budget(kBeat);
  TimePoint now{};
  for (int i = 0; i < 10'000; ++i, now += kBeat)
    EXPECT_EQ(budget.count(MessageBudget::Kind::kHeartbeat, now), MessageBudget::Verdict::kAccept);
  int taken = 0, dropped = 0;
  auto verdict = MessageBudget::Verdict::kAccept;
  for (int i = 0; i < 16'000 && verdict != MessageBudget::Verdict::kTooMuch;
       ++i, now += std::chrono::microseconds(62)) {
    verdict = budget.count(MessageBudget::Kind::kRenew, now);
    taken += verdict == MessageBudget::Verdict::kAccept;
    dropped += verdict == MessageBudget::Verdict::kDrop;
  }
  EXPECT_EQ(verdict, MessageBudget::Verdict::kTooMuch);
  EXPECT_LE(taken, 4);
  EXPECT_LE(dropped, 300);
  EXPECT_EQ(budget.describe(MessageBudget::Kind::kRenew), "renewals: at most 4 at once and 1 a minute");
}

TEST(Budget, LongMessagesCountByTheirLength) {
  const auto heard = [](std::size_t bytes) {  // within a minute, or until it has to go
    MessageBudget budget(kBeat);
    std::size_t sum = 0;
    for (TimePoint now{}; now < TimePoint(seconds(60)); now += milliseconds(5)) {
      const auto verdict = budget.count(MessageBudget::Kind::kHave, now, bytes);
      if (verdict == MessageBudget::Verdict::kTooMuch) return std::pair(sum, true);
      sum += verdict == MessageBudget::Verdict::kAccept ? bytes : 0;
    }
    return std::pair(sum, false);
  };
  EXPECT_TRUE(heard(132'000).second);
  EXPECT_LE(heard(132'000).first, 600'000u);
  EXPECT_LE(heard(2'000).first, 1'000'000u) << "short messages count as well";
}

TEST(LearnerConduct, AFloodEndsInAnExpulsionWithAReason) {
  const auto flood = [](const ControlMessage& message) {
    Desk desk(8);
    desk.join_all(3);
    for (int i = 0; i < 20'000 && desk.has(id(2)); ++i) desk.deliver_control(2, message);
    EXPECT_FALSE(desk.has(id(2)));
    EXPECT_EQ(desk.core.stats().floods, 1u);
    EXPECT_TRUE(desk.core.state().revoked.contains(id(2)));
    EXPECT_TRUE(desk.has(id(1)) && desk.has(id(3)));
    EXPECT_LE(desk.sent<Renewed>(std::uint64_t{2}).size(), 4u);
    return desk.lost(2);
  };
  const trust::PublicKey key = made_key("worker 2").public_key();
  EXPECT_THAT(flood(Renew{key}), HasSubstr("it says too much: of renewals: at most 4"));
  EXPECT_THAT(flood(Heartbeat{}), HasSubstr("of heartbeats"));
  EXPECT_THAT(flood(EdgeFailed{id(1), EdgeTroubleKind::kLost, "x"}), HasSubstr("of failed edges"));
  EXPECT_THAT(flood(Poisoned{id(1), {}, 1}), HasSubstr("of bad chunks"));
  EXPECT_THAT(flood(NeedHelp{Version{1}, false, {}}), HasSubstr("of calls for help"));
  EXPECT_THAT(flood(Trouble{"x"}), HasSubstr("of troubles"));
  EXPECT_THAT(flood(Draining{}), HasSubstr("of announcements"));
}

TEST(LearnerConduct, ApplicationMessagesHaveABudgetToo) {
  Desk desk(8);
  desk.join_all(1);
  for (int i = 0; i < 20'000 && desk.has(id(1)); ++i) {
    desk.core.on_frame(desk.control.at(id(1)), {FrameType::kApplication, Slice(random_bytes(1, 1)), {}, {}}, desk.now);
    desk.take();
  }
  EXPECT_THAT(desk.lost(1), HasSubstr("of messages: at most"));
  EXPECT_LE(desk.all<act::DeliverWorkerMessage>().size(), 4096u);
}

TEST(LearnerConduct, LargeMessagesAreNoFlood) {
  Desk desk(8);
  desk.join_all(1);
  const Slice part(random_bytes(1, 4096));
  for (int message = 0; message < 3; ++message)
    for (int i = 0; i < 4096; ++i) {
      Frame frame{FrameType::kApplication, part, {}, {}};
      frame.more = i < 4095;
      desk.core.on_frame(desk.control.at(id(1)), std::move(frame), desk.now);
      desk.take();
    }
  const auto messages = desk.all<act::DeliverWorkerMessage>();
  ASSERT_THAT(messages, SizeIs(3));
  EXPECT_EQ(messages.back().bytes.size(), 4096u * 4096u);
  EXPECT_TRUE(desk.has(id(1)));
}

TEST(LearnerConduct, AFloodOverADataConnectionCostsTheMembership) {
  Desk desk(8);
  desk.join_all(2);
  const ConnId edge = desk.accept_peer({trust::PeerIdentity::Kind::kWorker, id(1)});
  desk.deliver_control(edge, PeerHello{"run", 0, {}, false, {}, made_grant(1, 0)});
  ASSERT_FALSE(desk.closed(edge));
  for (int i = 0; i < 20'000 && desk.has(id(1)); ++i) desk.deliver_control(edge, ChunkRequest{{}, 1});
  EXPECT_THAT(desk.lost(1), HasSubstr("requests for a chunk"));
  EXPECT_TRUE(desk.closed(edge));
  EXPECT_TRUE(desk.has(id(2)));
}

// Workers share the room for partial messages. If it is full, the worker with most of it loses it, not the next one.
TEST(LearnerConduct, AWorkerThatHoardsPartialMessagesIsDisconnected) {
  LearnerConfig config = Desk::config(8);
  config.assembling_bytes_max = 100'000;
  Desk desk(config);
  desk.join_all(2);
  const auto part = [&](std::uint64_t worker, std::size_t bytes) {
    Frame frame{FrameType::kApplication, Slice(random_bytes(1, bytes)), {}, {}};
    frame.more = true;
    desk.core.on_frame(desk.control.at(id(worker)), std::move(frame), desk.now);
    desk.take();
  };
  for (int i = 0; i < 3; ++i) part(1, 30'000);
  part(2, 20'000);
  EXPECT_THAT(desk.away(1), HasSubstr("90000 bytes of its messages are not whole"));
  EXPECT_TRUE(desk.has(id(2)));
  part(2, 60'000);
  EXPECT_TRUE(desk.has(id(2)));
}

// The budget belongs to the identity: a new connection does not refill it. Connections have a budget of their own.
TEST(LearnerConduct, ComingBackFillsNoBudget) {
  Desk desk(8);
  desk.join_all(1);
  const trust::PublicKey key = made_key("worker 1").public_key();
  std::size_t renewed = 0;
  for (int i = 0; i < 10; ++i) {
    const ConnId conn = desk.control.at(id(1));
    for (int k = 0; k < 3; ++k) desk.deliver_control(conn, Renew{key});
    renewed += desk.sent<Renewed>(conn).size();
    desk.join(1);
  }
  EXPECT_LE(renewed, 4u);
  for (int i = 0; i < 100; ++i) desk.join(1);
  EXPECT_LE(desk.all<act::ReportWorkerJoined>().size(), 17u)
      << "it reconnects too often, and is dropped without a goodbye";
  EXPECT_EQ(desk.goodbye(desk.control.at(id(1))), "");
}

// ---- T_b of small fleets ----

TEST(LearnerConduct, AWorkerThatNeverAcknowledgesHidesNoBroadcastTime) {
  for (std::uint64_t n = 2; n <= 9; ++n) {
    Desk desk(8);
    desk.join_all(n);
    for (std::uint64_t version = 0; version < 3; ++version) {
      ASSERT_TRUE(desk.publish(make(version ? delta(version, version - 1) : full(0), 1000)).has_value());
      for (std::uint64_t worker = 1; worker < n; ++worker) {
        desk.now += milliseconds(10);
        desk.deliver_control(worker, Installed{Version{version}, digest_of(version), 0});
      }
      if (version == 0) {
        EXPECT_THAT(desk.all<act::ReportBroadcast>(), IsEmpty()) << n << " workers: the quorum is the whole fleet";
        desk.pass_time(BroadcastTimes::kStragglerPatience + seconds(1));
      }
      const auto done = desk.all<act::ReportBroadcast>();
      ASSERT_THAT(done, SizeIs(version + 1)) << n << " workers; from the second version on, the report does not wait";
      EXPECT_EQ(done.back().report.t_b, milliseconds(10) * (n - 1));
      EXPECT_EQ(done.back().report.workers, n);
      EXPECT_EQ(done.back().report.acknowledged, n - 1);
    }
    // The quorum waits for the worker again once it has installed a version.
    desk.deliver_control(n, Installed{Version{2}, digest_of(2), 0});
    ASSERT_TRUE(desk.publish(make(delta(3, 2), 1000)).has_value());
    for (std::uint64_t worker = 1; worker < n; ++worker)
      desk.deliver_control(worker, Installed{Version{3}, digest_of(3), 0});
    EXPECT_THAT(desk.all<act::ReportBroadcast>(), SizeIs(3));
    desk.deliver_control(n, Installed{Version{3}, digest_of(3), 0});
    ASSERT_THAT(desk.all<act::ReportBroadcast>(), SizeIs(4));
    EXPECT_EQ(desk.all<act::ReportBroadcast>().back().report.acknowledged, n);
  }
}

TEST(LearnerConduct, ASingleLateWorkerDoesNotCountForABroadcastsTime) {
  struct Case {
    const char* what;
    std::uint64_t workers;
    std::vector<std::uint64_t> late;
    BitRate down_of_last;
    double quorum;
    std::size_t acknowledged;
    Duration t_b;
  };
  const BitRate fast = BitRate::from_mbit_per_s(8);
  const auto ms = [](int n) { return milliseconds(n); };
  for (const Case& c : {Case{"one late", 5, {5}, fast, 0.9, 4, ms(40)},
                        {"one late of three", 3, {3}, fast, 0.9, 2, ms(20)},
                        {"a slow link explains it", 5, {5}, BitRate::from_mbit_per_s(0.1), 0.9, 5, ms(540)},
                        {"two late", 5, {4}, fast, 0.9, 5, ms(540)},
                        {"one late of two", 2, {2}, fast, 0.9, 2, ms(510)},
                        {"everybody is wanted", 5, {5}, fast, 1.0, 5, ms(540)},
                        {"nobody late", 5, {}, fast, 0.9, 5, ms(50)}}) {
    SCOPED_TRACE(c.what);
    auto config = Desk::config(8);
    config.network.quorum = c.quorum;
    Desk desk(std::move(config));
    for (std::uint64_t worker = 1; worker <= c.workers; ++worker)
      desk.join(worker, true, worker == c.workers ? c.down_of_last : fast);
    desk.pass_time(2 * TopologyPlan::kDelay);
    for (std::uint64_t version = 0; version < 3; ++version) {
      ASSERT_TRUE(desk.publish(make(version ? delta(version, version - 1) : full(0), 1000)).has_value());
      for (std::uint64_t worker = 1; worker <= c.workers; ++worker) {
        desk.now += std::ranges::count(c.late, worker) ? milliseconds(500) : milliseconds(10);
        desk.deliver_control(worker, Installed{Version{version}, digest_of(version), 0});
      }
      const auto done = desk.all<act::ReportBroadcast>();
      ASSERT_THAT(done, SizeIs(version + 1));
      EXPECT_EQ(done.back().report.t_b, c.t_b);
      EXPECT_EQ(done.back().report.workers, c.workers);
      EXPECT_EQ(done.back().report.acknowledged, c.acknowledged);
    }
  }
}

TEST(LearnerConduct, AWorkerThatLeavesABroadcastDoesNotCountForItsTime) {
  Desk desk(8);
  desk.join_all(4);
  ASSERT_TRUE(desk.publish(make(full(0), 1000)).has_value());
  for (const std::uint64_t worker : {1, 2, 3}) {
    desk.now += milliseconds(10);
    desk.deliver_control(worker, Installed{Version{0}, digest_of(0), 0});
  }
  desk.now += milliseconds(700);
  desk.deliver_control(4, Goodbye{"done"});
  const auto done = desk.all<act::ReportBroadcast>();
  ASSERT_THAT(done, SizeIs(1));
  EXPECT_EQ(done.back().report.t_b, milliseconds(30));
}

}  // namespace
}  // namespace echoline::overlay
