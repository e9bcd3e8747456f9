// Learner and workers together, without sockets: publications reach every worker despite faults on the way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/hall.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;

// Long enough for heartbeats, redials and reassignments.
constexpr Duration kAWhile = std::chrono::seconds(5);

std::vector<std::byte> payload_of(const HallNode& node, const PublicationKey& key) {
  for (const HallNode::Delivered& d : node.delivered)
    if (d.key == key) return d.payload;
  return {};
}

TEST(Overlay, APublicationReachesEveryWorkerOnce) {
  Hall hall;
  const auto workers = hall.join_all(4);
  EXPECT_EQ(workers[0]->all<act::ReportWelcome>().at(0).welcome, "hello worker 1");
  EXPECT_EQ(hall.learner().all<act::ReportWorkerJoined>().size(), 4u);
  const Made first = make(full(0), 100'000);
  ASSERT_TRUE(hall.publish(first).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  hall.run_for(milliseconds(20));
  const auto chain = hall.chain();
  for (std::size_t i = 0; i < chain.size(); ++i) {
    EXPECT_EQ(payload_of(*chain[i], full(0)), first.payload);
    EXPECT_EQ(chain[i]->member().stats().chunk_bytes_in.count, 100'000u);
    EXPECT_EQ(chain[i]->member().stats().chunks_duplicate, 0u);
    EXPECT_EQ(hall.chunk_bytes(i == 0 ? hall.learner() : *chain[i - 1], *chain[i]), 100'000u);
  }
  EXPECT_EQ(hall.core().stats().chunk_bytes_sent.count, 100'000u);
  ASSERT_EQ(hall.learner().all<act::ReportBroadcast>().size(), 1u);
  const BroadcastReport report = hall.learner().all<act::ReportBroadcast>()[0].report;
  EXPECT_EQ(report.version, Version{0});
  EXPECT_EQ(report.workers, 4u);
  EXPECT_EQ(report.depth, 4u);
  EXPECT_EQ(report.payload.count, 100'000u);
  EXPECT_EQ(hall.learner().all<act::ReportInstalled>().size(), 4u);

  for (std::uint64_t v = 1; v <= 5; ++v) ASSERT_TRUE(hall.publish(make(delta(v, v - 1), 20'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(5); }));
  for (HallNode* worker : workers)
    EXPECT_THAT(worker->keys(), ElementsAre(full(0), delta(1, 0), delta(2, 1), delta(3, 2), delta(4, 3), delta(5, 4)));
}

TEST(Overlay, ChunksAreForwardedWhileThePublicationIsStillBeingMade) {
  Hall hall;
  hall.join_all(3);
  const Made made = make(full(0), 100 * 1024, {.write_bytes = 10 * 1024});
  ASSERT_TRUE(hall.begin(made).has_value());
  const auto last = [&] { return hall.chain().back(); };
  for (std::size_t i = 0; i < 100; i += 10) {
    ASSERT_TRUE(hall.add(made, i, 10).has_value());
    ASSERT_TRUE(hall.run_until([&] { return last()->member().stats().chunk_bytes_in.count == (i + 10) * 1024; }));
    EXPECT_TRUE(last()->delivered.empty());
  }
  ASSERT_TRUE(hall.finish(made).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(last()->delivered[0].payload, made.payload);
}

TEST(Overlay, DescendantsOfADeadWorkerContinueWithoutDuplicates) {
  Hall hall;
  hall.join_all(5);
  const Made made = make(full(0), 200 * 1024, {.write_bytes = 16 * 1024});
  ASSERT_TRUE(hall.begin(made).has_value());
  ASSERT_TRUE(hall.add(made, 0, 100).has_value());
  const auto chain = hall.chain();
  ASSERT_TRUE(hall.run_until([&] { return chain.back()->member().stats().chunk_bytes_in.count == 100 * 1024; }));
  hall.kill(*chain[1]);
  hall.kill(*chain[3]);
  ASSERT_TRUE(hall.run_until([&] { return hall.core().stats().workers.size() == 3; }));
  ASSERT_TRUE(hall.add(made, 100, 100).has_value());
  ASSERT_TRUE(hall.finish(made).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  for (const std::size_t i : {0, 2, 4}) {
    EXPECT_EQ(chain[i]->delivered.at(0).payload, made.payload);
    EXPECT_EQ(chain[i]->member().stats().chunk_bytes_in.count, 200u * 1024);
    EXPECT_EQ(chain[i]->member().stats().chunks_duplicate, 0u);
  }
  EXPECT_EQ(hall.core().stats().away.size(), 2u);
}

TEST(Overlay, ABrokenConnectionIsOpenedAgain) {
  Hall hall;
  hall.join_all(2);
  const Made made = make(full(0), 200 * 1024, {.write_bytes = 16 * 1024});
  ASSERT_TRUE(hall.begin(made).has_value());
  ASSERT_TRUE(hall.add(made, 0, 100).has_value());
  const auto chain = hall.chain();
  ASSERT_TRUE(hall.run_until([&] { return chain[1]->member().stats().chunk_bytes_in.count >= 50 * 1024; }));
  hall.cut(*chain[0], *chain[1]);
  hall.cut(hall.learner(), *chain[0]);  // its control connection too
  ASSERT_TRUE(hall.add(made, 100, 100).has_value());
  ASSERT_TRUE(hall.finish(made).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  ASSERT_TRUE(hall.run_until([&] { return chain[0]->all<act::ReportWelcome>().size() == 2; }));
  EXPECT_EQ(chain[0]->all<act::ReportLearnerAway>().size(), 1u);
  for (HallNode* node : chain) {
    EXPECT_EQ(node->delivered.at(0).payload, made.payload);
    EXPECT_EQ(node->keys().size(), 1u);
  }
}

// ---- bad chunks ----

TEST(Overlay, AWorkerThatTwoChildrenAccuseForwardsNoMore) {
  Hall hall;
  hall.join_all(5);
  const auto chain = hall.chain();
  std::map<HallNode*, int> bad;
  hall.tamper = [&](HallNode& from, HallNode& to, Frame& frame) {
    if (&from == chain[1] && frame.type == FrameType::kChunk && frame.chunk.index % 3 == 1) {
      frame = with_flipped_bit(frame, 7);
      ++bad[&to];
    }
    return true;
  };
  ASSERT_TRUE(hall.publish(make(full(0), 50 * 1024)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(hall.core().stats().quarantined, bad.size() > 1);
  EXPECT_GE(bad[chain[2]], 2);
  EXPECT_NE(&hall.parent_of(*chain[2]), chain[1]) << "one accusation separates the two";
  for (std::uint64_t version = 1; hall.core().stats().quarantined == 0; ++version) {
    ASSERT_LT(version, 5u);
    ASSERT_TRUE(hall.publish(make(delta(version, version - 1), 50 * 1024)).has_value());
    ASSERT_TRUE(hall.run_until([&] { return hall.all_have(version); }));
  }
  hall.run_for(kAWhile);
  for (const WorkerView& view : hall.core().stats().workers)
    EXPECT_EQ(view.quarantined, view.info.id == chain[1]->id) << view.info.name;
  EXPECT_THAT(hall.core().topology().children_of(chain[1]->id), testing::IsEmpty());
  EXPECT_LE(bad.size(), 2u) << "two accusations are enough";
  for (HallNode* node : chain)
    EXPECT_EQ(node->member().stats().chunks_corrupt > 0, bad.contains(node)) << "no worker forwarded a bad chunk";
}

TEST(Overlay, OneBadChunkIsAskedForAgain) {
  Hall hall;
  hall.join_all(2);
  const auto chain = hall.chain();
  bool once = true;
  hall.tamper = [&](HallNode&, HallNode& to, Frame& frame) {
    if (&to == chain[1] && frame.type == FrameType::kChunk && frame.chunk.index == 5 && std::exchange(once, false))
      frame = with_flipped_bit(frame, 7);
    return true;
  };
  const Made made = make(full(0), 20 * 1024);
  ASSERT_TRUE(hall.publish(made).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(chain[1]->delivered[0].payload, made.payload);
  EXPECT_EQ(chain[1]->member().stats().chunks_corrupt, 1u);
  EXPECT_EQ(hall.core().stats().quarantined, 0u);
  EXPECT_EQ(hall.chain(), chain);
}

// ---- state ----

TEST(Overlay, NothingIsActivatedBeforeTheFloorIsOnDisk) {
  Hall hall;
  HallNode& worker = *hall.join_all(1)[0];
  worker.disk_fails = true;
  ASSERT_TRUE(hall.publish(make(full(0), 5000)).has_value());
  hall.run_for(kAWhile);
  EXPECT_TRUE(worker.delivered.empty());
  EXPECT_TRUE(hall.learner().all<act::ReportInstalled>().empty());
  worker.disk_fails = false;
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(decode_worker_state(worker.state)->floor, (Installed{Version{0}, digest_of(0), 0}));
}

TEST(Overlay, NothingIsPublishedBeforeItsDigestIsOnDisk) {
  Hall hall;
  hall.join_all(1);
  hall.learner().disk_fails = true;
  ASSERT_TRUE(hall.publish(make(full(0), 5000)).has_value());
  hall.run_for(kAWhile);
  EXPECT_FALSE(hall.all_have(0));  // chunks may have arrived, but not the manifest
  hall.learner().disk_fails = false;
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
}

TEST(Overlay, ARestartedWorkerKeepsItsChunksAndItsFloor) {
  Hall hall;
  hall.join_all(2);
  const auto chain = hall.chain();
  HallNode& worker = *chain[1];
  const Made first = make(full(0), 200'000), second = make(delta(1, 0), 100 * 1024, {.write_bytes = 10 * 1024});
  ASSERT_TRUE(hall.publish(first).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  ASSERT_TRUE(hall.begin(second).has_value());
  ASSERT_TRUE(hall.add(second, 0, 50).has_value());
  ASSERT_TRUE(hall.run_until([&] { return worker.member().stats().chunk_bytes_in.count == 200'000 + 50 * 1024; }));
  hall.run_for(milliseconds(20));
  hall.restart(worker);
  worker.delivered.clear();
  ASSERT_TRUE(hall.add(second, 50, 50).has_value());
  ASSERT_TRUE(hall.finish(second).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  EXPECT_THAT(worker.keys(), ElementsAre(full(0), delta(1, 0)));  // from its disk: nothing is installed in it yet
  EXPECT_EQ(worker.delivered[0].payload, first.payload);
  EXPECT_EQ(worker.delivered[1].payload, second.payload);
  EXPECT_EQ(worker.member().stats().chunk_bytes_in.count, 50u * 1024);  // only the missing chunks
  EXPECT_EQ(decode_worker_state(worker.state)->floor->version, Version{1});
}

TEST(Overlay, AWorkerWithoutItsSpoolNeverActivatesAnOlderVersion) {
  Hall hall;
  HallNode& worker = *hall.join_all(1)[0];
  ASSERT_TRUE(hall.publish(make(full(0), 50'000)).has_value());
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 500)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  hall.kill(worker);
  worker.spools.clear();
  worker.delivered.clear();
  hall.tamper = [](HallNode&, HallNode&, Frame& frame) {  // drops the delta for a while
    return frame.type != FrameType::kChunk || frame.chunk.publication != make(delta(1, 0), 500).id;
  };
  hall.restart(worker);
  hall.run_for(kAWhile);
  EXPECT_TRUE(worker.delivered.empty());  // version 0 is older than the active one
  hall.tamper = nullptr;
  hall.cut(hall.learner(), worker);
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  EXPECT_THAT(worker.keys(), ElementsAre(full(0), delta(1, 0)));
  EXPECT_FALSE(worker.delivered[0].activate);
  EXPECT_TRUE(worker.delivered[1].activate);
}

TEST(Overlay, SpoolsLeaveMemoryAndAreReadBackForAChild) {
  Hall hall;
  HallNode& first = hall.join([](MemberConfig& c) { c.store.memory_max = {30'000}; });
  ASSERT_TRUE(hall.run_until([&] { return !first.member().stats().parents.empty(); }));
  const Made made = make(full(0), 200'000);
  ASSERT_TRUE(hall.publish(made).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(first.delivered[0].payload, made.payload);
  EXPECT_LE(first.member().stats().memory.count, 40'000u);
  HallNode& second = hall.join();
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(second.delivered[0].payload, made.payload);
  EXPECT_EQ(hall.chunk_bytes(first, second), 200'000u);
}

// ---- late workers ----

TEST(Overlay, ALateJoinerIsHelpedByAPeerAndNotByTheLearner) {
  Hall hall;
  hall.join_all(1);
  HallNode& forgetful = hall.join([](MemberConfig& c) {
    c.store = {Bytes{120'000}, {}, false};
    c.durable = false;
  });
  ASSERT_TRUE(hall.run_until([&] { return !forgetful.member().stats().parents.empty(); }));
  ASSERT_TRUE(hall.publish(make(full(0), 100'000)).has_value());
  for (std::uint64_t v = 1; v <= 3; ++v) {
    ASSERT_TRUE(hall.run_until([&] { return hall.all_have(v - 1); }));
    ASSERT_TRUE(hall.publish(make(delta(v, v - 1), 10'000)).has_value());
  }
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(3); }));
  hall.run_for(std::chrono::seconds(1));  // heartbeats report the holdings of every worker
  ASSERT_EQ(hall.chain()[1], &forgetful);
  const std::uint64_t sent = hall.core().stats().chunk_bytes_sent.count;
  HallNode& late = hall.join();
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(3); }));
  EXPECT_EQ(&hall.parent_of(late), &forgetful);
  EXPECT_GE(hall.chunk_bytes(*hall.chain()[0], late), 100'000u);
  EXPECT_EQ(hall.core().stats().chunk_bytes_sent.count, sent);
  EXPECT_TRUE(hall.learner().all<act::RequestCatchUp>().empty());
  ASSERT_TRUE(hall.publish(make(delta(4, 3), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(4); }));
  EXPECT_EQ(hall.chunk_bytes(forgetful, late), 10'000u);  // its parent serves it from then on
}

TEST(Overlay, IfNoPublicationHelpsTheLearnerProvidesASnapshot) {
  Hall hall([](LearnerConfig& c) { c.store_bytes_max = {60'000}; });
  const auto small = [](MemberConfig& c) {
    c.store = {Bytes{60'000}, {}, false};
    c.durable = false;
  };
  hall.join_all(2, small);
  ASSERT_TRUE(hall.publish(make(full(0), 40'000)).has_value());
  for (std::uint64_t v = 1; v <= 3; ++v) {
    ASSERT_TRUE(hall.run_until([&] { return hall.all_have(v - 1); }));
    ASSERT_TRUE(hall.publish(make(delta(v, v - 1), 15'000)).has_value());
  }
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(3); }));
  HallNode& late = hall.join(small);
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(3); }));
  EXPECT_EQ(late.delivered.back().key, full(3));
  EXPECT_EQ(hall.learner().all<act::RequestCatchUp>().size(), 1u);
}

// A publication expired while its digest could not be saved. The learner still publishes it once the disk works.
TEST(Overlay, AVersionThatExpiredBeforeItWasSavedIsPublishedAgain) {
  Hall hall;
  hall.join_all(2);
  MadeOptions soon_over;
  soon_over.lifetime_s = seconds(hall.now().time_since_epoch()) + 20;
  ASSERT_TRUE(hall.publish(make(full(0), 1'000, soon_over)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  hall.learner().disk_fails = true;
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 500, soon_over)).has_value());
  hall.run_for(std::chrono::seconds(25));
  ASSERT_TRUE(hall.learner().all<act::RequestCatchUp>().empty());
  hall.learner().disk_fails = false;
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  EXPECT_FALSE(hall.learner().all<act::RequestCatchUp>().empty());
}

// The learner makes one delta from the worker's version, and one for each of several workers at different versions.
TEST(Overlay, AWorkerThatMissedManyVersionsGetsOneDelta) {
  Hall hall([](LearnerConfig& c) {
    c.policy = chains::TopologyPolicy::kStar;
    c.folded_deltas_max = 64;
  });
  const auto workers = hall.join_all(2);
  std::vector<PublicationKey> asked;
  hall.on_need_catch_up = [&](const act::RequestCatchUp& need) {
    const PublicationKey key{need.current, need.from};
    asked.push_back(key);
    ASSERT_TRUE(hall.publish(make(key, 120'000), true).has_value());
  };
  ASSERT_TRUE(hall.publish(make(full(0), 500'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  hall.run_for(std::chrono::seconds(1));
  hall.kill(*workers[0]);
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 60'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  hall.run_for(std::chrono::seconds(1));
  hall.kill(*workers[1]);
  hall.run_for(std::chrono::seconds(1));
  for (std::uint64_t v = 2; v <= 8; ++v) ASSERT_TRUE(hall.publish(make(delta(v, v - 1), 60'000)).has_value());
  const std::uint64_t before = hall.core().stats().chunk_bytes_sent.count;
  hall.restart(*workers[0]);
  hall.restart(*workers[1]);
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(8); }));
  EXPECT_THAT(asked, testing::UnorderedElementsAre(delta(8, 0), delta(8, 1)));
  EXPECT_EQ(workers[0]->delivered.back().key, delta(8, 0));
  EXPECT_EQ(workers[1]->delivered.back().key, delta(8, 1));
  EXPECT_LT(hall.core().stats().chunk_bytes_sent.count - before, 15u * 60'000 / 2);
}

TEST(Overlay, AFailedInstallationIsRepairedByASnapshot) {
  Hall hall;
  HallNode& worker = *hall.join_all(1)[0];
  worker.installs = false;
  ASSERT_TRUE(hall.publish(make(full(0), 5000)).has_value());
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 5000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  worker.installs = true;
  worker.member().install_failed(Version{1}, "another result digest", hall.now());
  hall.settle(worker);
  ASSERT_TRUE(hall.run_until([&] { return worker.delivered.back().key == full(1); }));
  ASSERT_TRUE(hall.run_until([&] { return !hall.learner().all<act::ReportInstalled>().empty(); }));
  EXPECT_EQ(hall.learner().all<act::ReportInstalled>()[0].version, Version{1});
}

// ---- messages ----

std::string text_of(std::uint64_t seed, std::size_t bytes) {
  const auto random = random_bytes(seed, bytes);
  return {reinterpret_cast<const char*>(random.data()), random.size()};
}
Slice slice_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return Slice(std::vector<std::byte>(bytes.begin(), bytes.end()));
}

// On links so slow that a message takes many heartbeats, heartbeats pass between its parts.
TEST(Overlay, LargeMessagesAreSentInPartsWithHeartbeatsBetweenThem) {
  Hall hall([](LearnerConfig& c) { c.core.limits.up = BitRate::from_mbit_per_s(8); });
  HallNode& worker = *hall.join_all(1, [](MemberConfig& c) { c.core.limits.up = BitRate::from_mbit_per_s(8); })[0];
  const std::vector<std::string> texts{text_of(1, 6'000'000), "", text_of(2, MessageQueue::kPartBytes), "small"};
  for (const std::string& text : texts) {
    worker.member().send_message(slice_of(text), hall.now());
    hall.core().send_message(worker.id, slice_of(text), hall.now());
  }
  hall.settle(worker);
  hall.settle(hall.learner());
  ASSERT_TRUE(hall.run_until([&] {
    return worker.all<act::DeliverLearnerMessage>().size() == texts.size() &&
           hall.learner().all<act::DeliverWorkerMessage>().size() == texts.size();
  }));
  for (std::size_t i = 0; i < texts.size(); ++i) {
    EXPECT_EQ(worker.all<act::DeliverLearnerMessage>()[i].bytes, texts[i]) << i;
    EXPECT_EQ(hall.learner().all<act::DeliverWorkerMessage>()[i].bytes, texts[i]) << i;
  }
  EXPECT_TRUE(worker.all<act::ReportLearnerAway>().empty());
  EXPECT_TRUE(hall.learner().all<act::ReportWorkerLost>().empty());
}

TEST(Overlay, TheEndOfTheRunInterruptsAMessage) {
  Hall hall([](LearnerConfig& c) { c.core.limits.up = BitRate::from_mbit_per_s(8); });
  HallNode& worker = *hall.join_all(1)[0];
  hall.core().send_message(worker.id, slice_of(text_of(1, 1'000'000)), hall.now());
  hall.settle(hall.learner());
  hall.run_for(std::chrono::milliseconds(103));
  hall.core().leave(hall.now());
  hall.settle(hall.learner());
  ASSERT_TRUE(hall.run_until([&] { return !worker.end().empty(); }, std::chrono::seconds(2)));
  EXPECT_EQ(worker.end(), "the run has ended");
}

TEST(Overlay, AMessageBeyondTheLimitIsNotAssembled) {
  MessageAssembler assembler;
  Frame part;
  part.type = FrameType::kApplication;
  part.body = Slice(std::vector<std::byte>(1 << 20));
  part.more = true;
  for (std::size_t i = 0; i < kMessageBytesMax >> 20; ++i) ASSERT_TRUE(assembler.add(part).has_value()) << i;
  EXPECT_EQ(assembler.bytes(), kMessageBytesMax);
  const auto refused = assembler.add(part);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, Code::kExhausted);
}

}  // namespace
}  // namespace echoline::overlay
