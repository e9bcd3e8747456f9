// Learner and workers together: membership, the opening of edges, and restarts of the learner.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/overlay/hall.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

Frame control_frame(const ControlMessage& message) {
  Frame frame;
  const Slice bytes(encode_control(message));
  frame.body = bytes.part(kFrameHeaderBytes, bytes.size() - kFrameHeaderBytes);
  return frame;
}
template <class T>
std::optional<T> as(const Frame& frame) {
  if (frame.type != FrameType::kControl) return std::nullopt;
  const auto message = decode_control(frame.body.bytes());
  if (!message || !std::holds_alternative<T>(*message)) return std::nullopt;
  return std::get<T>(*message);
}

void in_memory(MemberConfig& c) {
  c.store.disk = false;
  c.durable = false;
}

// ---- enrolment and membership ----

TEST(Membership, AMachineEnrolsWithItsTokenOnce) {
  Hall hall;
  const trust::Secret token = *trust::issue_token(hall.authority(), "vast-7", trust::Nonce{}, kMadeUnix_s);
  const trust::SigningKey key = made_key("seven");
  const auto enrol = [&](const trust::SigningKey& k) -> Result<WorkerState> {
    HallNode& node = hall.enrol(token, "vast-7", k);
    EXPECT_TRUE(hall.run_until([&] { return !node.end().empty(); }));
    return static_cast<EnrolCore&>(*node.core).result();
  };
  const auto state = enrol(key);
  ASSERT_TRUE(state.has_value()) << state.error().message();
  EXPECT_EQ(state->run_id, "run");
  EXPECT_EQ(state->worker, WorkerId{1});
  EXPECT_EQ(state->authority, hall.authority().certificate());
  EXPECT_TRUE(decode_learner_state(hall.learner().state)->used_tokens.contains(trust::Nonce{})) << "on disk";
  EXPECT_EQ(enrol(key)->certificate, state->certificate);
  const auto thief = enrol(made_key("thief"));
  ASSERT_FALSE(thief.has_value());
  EXPECT_EQ(thief.error().code, Code::kInvalid);
  EXPECT_THAT(thief.error().detail, HasSubstr("used before"));
  hall.restart_learner();
  EXPECT_THAT(enrol(made_key("thief")).error().detail, HasSubstr("used before")) << "also after a restart";
}

TEST(Membership, EnrolmentWaitsForTheTokensMarkOnDisk) {
  Hall hall;
  hall.learner().disk_fails = true;
  const trust::Secret token = *trust::issue_token(hall.authority(), "vast-7", trust::Nonce{}, kMadeUnix_s);
  HallNode& node = hall.enrol(token, "vast-7", made_key("seven"));
  hall.run_for(seconds(3));
  EXPECT_EQ(node.end(), "");
  hall.learner().disk_fails = false;
  ASSERT_TRUE(hall.run_until([&] { return !node.end().empty(); }));
  EXPECT_TRUE(static_cast<EnrolCore&>(*node.core).result().has_value());
}

TEST(Membership, EnrolmentWaitsForALearnerAndGivesUpInTime) {
  Hall hall;
  const trust::Secret token = *trust::issue_token(hall.authority(), "vast-7", trust::Nonce{}, kMadeUnix_s);
  bool there = false;
  hall.may_dial = [&](HallNode&, HallNode&) { return there; };
  HallNode& patient = hall.enrol(token, "vast-7", made_key("seven"));
  hall.run_for(seconds(5));
  EXPECT_EQ(patient.end(), "");
  there = true;
  ASSERT_TRUE(hall.run_until([&] { return !patient.end().empty(); }));
  EXPECT_TRUE(static_cast<EnrolCore&>(*patient.core).result().has_value());
  there = false;
  HallNode& hopeless = hall.enrol(token, "vast-8", made_key("eight"));
  ASSERT_TRUE(hall.run_until([&] { return !hopeless.end().empty(); }, seconds(11)));
  EXPECT_EQ(static_cast<EnrolCore&>(*hopeless.core).result().error().code, Code::kUnavailable);
}

TEST(Membership, OnlyTheTokensAuthorityIsTrusted) {
  Hall hall;
  const trust::Secret token = *trust::issue_token(hall.authority(), "vast-7", trust::Nonce{}, kMadeUnix_s);
  const trust::Authority other = made_authority("run", "mallory");
  hall.tamper = [&](HallNode&, HallNode&, Frame& frame) {
    if (auto enrolled = as<Enrolled>(frame)) {
      enrolled->authority = other.certificate();
      frame = control_frame(*enrolled);
    }
    return true;
  };
  HallNode& node = hall.enrol(token, "vast-7", made_key("seven"));
  ASSERT_TRUE(hall.run_until([&] { return !node.end().empty(); }));
  EXPECT_THAT(node.end(), HasSubstr("another authority than the token names"));
}

TEST(Membership, CertificatesAreRenewedWithoutAnInterruption) {
  Hall hall;
  HallNode& worker = *hall.join_all(1)[0];
  hall.run_for(minutes(100));
  ASSERT_GE(worker.certificates.size(), 3u);
  EXPECT_LE(worker.certificates.size(), 5u);
  const auto identity = trust::check_certificate(worker.certificates.back(), hall.authority().public_key(), "run",
                                                 kMadeUnix_s + 100 * 60);
  EXPECT_TRUE(identity.has_value()) << identity.error().message();
  EXPECT_THAT(worker.all<act::ReportLearnerAway>(), IsEmpty());
}

TEST(Membership, NoNodeServesARevokedWorker) {
  Hall hall;
  hall.join_all(3);
  const auto chain = hall.chain();
  ASSERT_TRUE(hall.publish(make(full(0), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  HallNode& bad = *chain[2];
  hall.tamper = [&](HallNode& from, HallNode& to, Frame& frame) {  // hides from it that it is revoked
    return !(&to == &bad && &from == &hall.learner()) && !(&to == &bad && as<EdgeStatus>(frame));
  };
  hall.core().expel(bad.id, "it lies", hall.now());
  hall.settle(hall.learner());
  hall.run_for(seconds(2));
  const std::uint64_t before = hall.chunk_bytes(*chain[1], bad);
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return chain[1]->keys().size() == 2; }));
  hall.run_for(seconds(20));
  EXPECT_EQ(hall.chunk_bytes(*chain[1], bad), before);
  EXPECT_THAT(bad.keys(), ElementsAre(full(0)));
  EXPECT_TRUE(decode_learner_state(hall.learner().state)->revoked.contains(bad.id));
  hall.tamper = nullptr;
  ASSERT_TRUE(hall.run_until([&] { return !bad.end().empty(); })) << "the retries end";
}

TEST(Membership, ADrainedWorkerLeavesWhenItsChildrenAreHandedOver) {
  Hall hall;
  hall.join_all(3);
  const auto chain = hall.chain();
  ASSERT_TRUE(hall.publish(make(full(0), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  chain[1]->member().drain(hall.now());
  hall.settle(*chain[1]);
  ASSERT_TRUE(hall.run_until([&] { return !chain[1]->end().empty(); }, seconds(5)));
  EXPECT_EQ(chain[1]->end(), "drained");
  chain[1]->alive = false;
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  EXPECT_THAT(hall.chain(), ElementsAre(chain[0], chain[2]));
  EXPECT_EQ(chain[2]->member().stats().chunks_duplicate, 0u);
}

// ---- edges ----

TEST(Edges, AnUnreachableWorkerIsALeaf) {
  Hall hall;
  hall.may_dial = [](HallNode&, HallNode& to) { return to.id != WorkerId{1}; };
  hall.join_all(3);
  hall.run_for(seconds(1));
  EXPECT_EQ(hall.chain().back()->id, WorkerId{1});
  ASSERT_TRUE(hall.publish(make(full(0), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
}

TEST(Edges, AParentDialsTheChildThatCannotReachIt) {
  Hall hall;
  hall.may_dial = [](HallNode& from, HallNode& to) { return !(from.id == WorkerId{2} && to.id == WorkerId{1}); };
  hall.join_all(2);
  ASSERT_TRUE(hall.publish(make(full(0), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_THAT(hall.chain(), ElementsAre(hall.node_of(WorkerId{1}), hall.node_of(WorkerId{2})));
  EXPECT_EQ(hall.chunk_bytes(*hall.node_of(WorkerId{1}), *hall.node_of(WorkerId{2})), 10'000u);
}

TEST(Edges, AParentDialsAgainWhenTheConnectionBreaks) {
  Hall hall;
  hall.may_dial = [](HallNode& from, HallNode& to) { return !(from.id == WorkerId{2} && to.id == WorkerId{1}); };
  const auto workers = hall.join_all(2);
  hall.run_for(seconds(1));
  for (std::uint64_t v = 0; v < 5; ++v) {
    hall.cut(*workers[0], *workers[1]);
    ASSERT_TRUE(hall.publish(make(v == 0 ? full(0) : delta(v, v - 1), v == 0 ? 50'000 : 5'000)).has_value());
    ASSERT_TRUE(hall.run_until([&] { return hall.all_have(v); }));
  }
  EXPECT_GE(hall.chunk_bytes(*workers[0], *workers[1]), 50'000u);
  EXPECT_EQ(&hall.parent_of(*workers[1]), workers[0]);
}

TEST(Edges, WorkersThatCannotReachEachOtherAreSeparated) {
  Hall hall;
  hall.may_dial = [](HallNode& from, HallNode& to) {
    return from.id == kLearnerId || to.id == kLearnerId || from.id == WorkerId{3} || to.id == WorkerId{3};
  };
  hall.join_all(3);  // 1 and 2 cannot reach each other, and both can reach 3
  ASSERT_TRUE(hall.publish(make(full(0), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }, minutes(2)));
}

// Two parents with half of the chunks each, as a learner with such a topology would assign them.
TEST(Edges, StripesComeFromTwoParentsAndFromOneWhenTheOtherDies) {
  Hall hall([](LearnerConfig& c) {
    c.core.limits.up = BitRate::from_mbit_per_s(240);
    c.chain_rate = BitRate::from_mbit_per_s(80);  // three chains, so three seeds
  });
  HallNode* a = nullptr;
  HallNode* b = nullptr;
  HallNode* child = nullptr;
  hall.tamper = [&](HallNode& from, HallNode& to, Frame& frame) {
    if (&from != &hall.learner() || &to != child || !as<Assign>(frame)) return true;
    Grant both{"run",      child->id, static_cast<std::uint64_t>(kMadeUnix_s * 1e3),
               1ull << 62, 2,         {{a->id, 0b01}, {b->id, 0b10}},
               {},         false};
    if (a->alive)
      frame = control_frame(Assign{2,
                                   {{a->id, a->endpoint, 0b01, false}, {b->id, b->endpoint, 0b10, false}},
                                   sign(both, made_key("authority"))});
    else
      frame = control_frame(Assign{1, {{b->id, b->endpoint, 1, false}}, made_grant(child->id.value, b->id.value)});
    return true;
  };
  const auto seeds = hall.join_all(2);
  a = seeds[0], b = seeds[1];
  child = &hall.join();
  ASSERT_TRUE(hall.run_until([&] { return child->member().stats().parents.size() == 2; }));
  const Made made = make(full(0), 100 * 1024, {.write_bytes = 10 * 1024});
  ASSERT_TRUE(hall.publish(made).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(child->delivered[0].payload, made.payload);
  EXPECT_EQ(hall.chunk_bytes(*a, *child), 50u * 1024);
  EXPECT_EQ(hall.chunk_bytes(*b, *child), 50u * 1024);
  EXPECT_EQ(hall.chunk_bytes(hall.learner(), *child), 0u);
  const Made second = make(delta(1, 0), 100 * 1024, {.write_bytes = 10 * 1024});
  ASSERT_TRUE(hall.begin(second).has_value());
  ASSERT_TRUE(hall.add(second, 0, 50).has_value());
  ASSERT_TRUE(hall.run_until([&] { return child->member().stats().chunk_bytes_in.count == 150 * 1024; }));
  hall.kill(*a);
  // The learner's assignment by another topology names `b` alone.
  ASSERT_TRUE(hall.add(second, 50, 50).has_value());
  ASSERT_TRUE(hall.finish(second).has_value());
  ASSERT_TRUE(hall.run_until([&] { return b->keys().size() == 2; }));
  hall.cut(hall.learner(), *child);  // it joins again and gets a new assignment
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  EXPECT_EQ(child->delivered[1].payload, second.payload);
  EXPECT_EQ(child->member().stats().chunk_bytes_in.count, 200u * 1024);
  EXPECT_EQ(child->member().stats().chunks_duplicate, 0u);
}

TEST(Edges, ChunksThatAreLostOnAnEdgeAreSentAgain) {
  Hall hall;
  hall.join_all(2);
  const auto chain = hall.chain();
  hall.tamper = [&, n = 0](HallNode& from, HallNode& to, Frame& frame) mutable {
    return !(&from == chain[0] && &to == chain[1] && frame.type == FrameType::kChunk && ++n <= 10);
  };
  ASSERT_TRUE(hall.publish(make(full(0), 50 * 1024)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }, minutes(5)));
}

TEST(Edges, AParentThatForwardsNothingIsFound) {
  Hall hall;
  hall.join_all(3);
  const auto chain = hall.chain();
  ASSERT_TRUE(hall.publish(make(full(0), 20'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  hall.tamper = [&](HallNode& from, HallNode& to, Frame& frame) {  // drops its chunks, but sends its heartbeats
    return !(&from == chain[0] && &to == chain[1] && frame.type == FrameType::kChunk);
  };
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 20'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }, minutes(5)));
}

// A child's list of chunks may be a bitmap of kilobytes. The parent must still accept its introduction.
TEST(Edges, APublicationOfVeryManyChunksContinuesOnANewConnection) {
  Hall hall([](LearnerConfig& c) { c.core.limits.up = BitRate::from_mbit_per_s(8000); });
  HallNode& worker = *hall.join_all(1, in_memory)[0];
  const Made made = make(full(0), 40'000 * 1024, {.write_bytes = 1 << 20});
  ASSERT_EQ(made.chunks.size(), 40'000u);
  ASSERT_TRUE(hall.begin(made).has_value());
  ASSERT_TRUE(hall.add(made, 0, 39'000).has_value());
  ASSERT_TRUE(hall.run_until([&] { return worker.member().stats().chunk_bytes_in.count == 39'000 * 1024; }));
  hall.cut(hall.learner(), worker);
  ASSERT_TRUE(hall.add(made, 39'000, 1'000).has_value());
  ASSERT_TRUE(hall.finish(made).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(worker.member().stats().chunk_bytes_in.count, 40'000u * 1024);
}

// A beacon that revokes thousands is larger than an unknown peer's message may be.
TEST(Edges, AParentCanIntroduceItselfWhenManyWereRevoked) {
  Hall hall([](LearnerConfig& c) {
    if (c.state) return;
    c.state.emplace();
    for (std::uint64_t id = 1'000'000; id < 1'002'000; ++id) c.state->revoked[WorkerId{2 * id}] = 1u << 31;
  });
  hall.may_dial = [](HallNode& from, HallNode& to) { return !(from.id == WorkerId{2} && to.id == WorkerId{1}); };
  const auto workers = hall.join_all(2);
  hall.run_for(seconds(1));
  ASSERT_TRUE(hall.publish(make(full(0), 10'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(hall.chunk_bytes(*workers[0], *workers[1]), 10'000u);
}

// A core whose fault points fire all the time still does its work.
TEST(Edges, ChildrenThatListNoChunksAreServed) {
  struct Always final : FaultPoints {
    bool fire(std::string_view) override { return true; }
  } always;
  Hall hall;
  const auto workers = hall.join_all(3, [&](MemberConfig& c) { c.core.faults = &always; });
  for (std::uint64_t v = 0; v < 5; ++v) {
    ASSERT_TRUE(hall.publish(make(v == 0 ? full(0) : delta(v, v - 1), v == 0 ? 50'000 : 5'000)).has_value());
    ASSERT_TRUE(hall.run_until([&] { return hall.all_have(v); }));
  }
}

// ---- disks ----

TEST(Disks, AWorkerStartsWithLessRoomThanBefore) {
  Hall hall;
  HallNode& worker = *hall.join_all(1)[0];
  ASSERT_TRUE(hall.publish(make(full(0), 50'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  worker.delivered.clear();
  hall.restart(worker, [](MemberConfig& c) { c.store.disk_max = {20'000}; });
  hall.run_for(seconds(1));
  EXPECT_THAT(worker.keys(), IsEmpty());
}

TEST(Disks, ADamagedSpoolIsReplaced) {
  Hall hall;
  HallNode& worker = *hall.join_all(1)[0];
  const Made made = make(full(0), 20 * 1024);
  ASSERT_TRUE(hall.publish(made).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  hall.kill(worker);
  for (auto& record : worker.spools.at(made.id).records)
    if (record.chunk && *record.chunk % 4 == 0) {
      std::vector<std::byte> bytes(record.data.bytes().begin(), record.data.bytes().end());
      bytes[9] ^= std::byte{1};
      record.data = Slice(std::move(bytes));
    }
  worker.delivered.clear();
  hall.restart(worker);
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  EXPECT_EQ(worker.delivered[0].payload, made.payload);
  EXPECT_EQ(worker.member().stats().chunk_bytes_in.count, 5u * 1024) << "only damaged chunks";
}

// ---- the learner's restarts ----

TEST(Restart, WorkersReturnAndContinueFromTheirPosition) {
  Hall hall;
  const auto workers = hall.join_all(3);
  ASSERT_TRUE(hall.publish(make(full(0), 50'000)).has_value());
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 5'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  hall.restart_learner(Version{1});
  EXPECT_EQ(hall.core().epoch(), 0u);
  ASSERT_TRUE(hall.run_until([&] { return hall.core().stats().workers.size() == 3; }));
  for (const WorkerView& view : hall.core().stats().workers) EXPECT_EQ(view.installed, Version{1});
  ASSERT_TRUE(hall.publish(make(delta(2, 1), 5'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(2); }));
  for (HallNode* worker : workers) EXPECT_THAT(worker->keys(), ElementsAre(full(0), delta(1, 0), delta(2, 1)));
}

TEST(Restart, WorkersFollowALearnerThatGoesBack) {
  Hall hall;
  const auto workers = hall.join_all(3);
  ASSERT_TRUE(hall.publish(make(full(0), 50'000)).has_value());
  ASSERT_TRUE(hall.publish(make(delta(1, 0), 5'000)).has_value());
  ASSERT_TRUE(hall.publish(make(delta(2, 1), 5'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(2); }));
  const Made again = make(full(1), 50'000, {.epoch = 1, .seed = 1}),
             second = make(delta(2, 1), 5'000, {.epoch = 1, .policy_digest = digest_of(22), .seed = 1});
  std::size_t asked = 0;  // every worker has to begin with the version that the learner went back to
  hall.on_need_catch_up = [&](const act::RequestCatchUp& need) {
    EXPECT_EQ(need.current, Version{1});
    ++asked;
    ASSERT_TRUE(hall.publish(again, true).has_value());
  };
  hall.restart_learner(Version{1});
  EXPECT_EQ(hall.core().epoch(), 1u);
  ASSERT_TRUE(hall.run_until([&] { return hall.core().stats().workers.size() == 3; }));
  hall.run_for(seconds(1));
  EXPECT_EQ(asked, 1u);
  ASSERT_TRUE(hall.publish(second).has_value());
  for (HallNode* worker : workers) {
    ASSERT_TRUE(hall.run_until([&] { return worker->keys().size() >= 5; }));
    EXPECT_EQ(worker->delivered.back().key, delta(2, 1));
    EXPECT_EQ(worker->delivered.back().payload, second.payload);
    EXPECT_EQ(decode_worker_state(worker->state)->floor, (Installed{Version{2}, digest_of(22), 1}));
  }
}

TEST(Restart, InTheMiddleOfAPublicationLosesNothing) {
  Hall hall;
  const auto workers = hall.join_all(3);
  ASSERT_TRUE(hall.publish(make(full(0), 50'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  const Made torn = make(delta(1, 0), 40 * 1024, {.write_bytes = 4096});
  ASSERT_TRUE(hall.begin(torn).has_value());
  ASSERT_TRUE(hall.add(torn, 0, 20).has_value());
  ASSERT_TRUE(hall.run_until([&] { return workers[2]->member().stats().chunk_bytes_in.count == 50'000 + 20 * 1024; }));
  hall.restart_learner(Version{0});
  ASSERT_TRUE(hall.run_until([&] { return hall.core().stats().workers.size() == 3; }));
  const double later = kMadeUnix_s + echoline::seconds(hall.now().time_since_epoch());
  const Made whole = make(delta(1, 0), 40 * 1024, {.issued_unix_s = later, .policy_digest = digest_of(11), .seed = 1});
  ASSERT_TRUE(hall.publish(whole).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(1); }));
  for (HallNode* worker : workers) EXPECT_EQ(worker->delivered.back().payload, whole.payload);
}

TEST(Restart, ALateWorkerIsHelpedThoughTheLearnerHasNoPublications) {
  Hall hall([](LearnerConfig& c) { c.policy = chains::TopologyPolicy::kStar; });
  hall.join_all(2);
  ASSERT_TRUE(hall.publish(make(full(0), 50'000)).has_value());
  ASSERT_TRUE(hall.run_until([&] { return hall.all_have(0); }));
  hall.restart_learner(Version{0});
  ASSERT_TRUE(hall.run_until([&] { return hall.core().stats().workers.size() == 2; }));
  HallNode& late = hall.join(in_memory);
  ASSERT_TRUE(hall.run_until([&] { return late.keys().size() == 1; }, minutes(2)));
}

}  // namespace
}  // namespace echoline::overlay
