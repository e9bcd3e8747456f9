// What the publisher makes for workers that missed some versions, over real sockets.
#include "learner/publisher.hpp"

#include <gtest/gtest.h>

#include <cstring>

#include "base/random.hpp"
#include "tests/overlay/board.hpp"

namespace echoline::learner {
namespace {

using namespace overlay;

constexpr std::size_t kElements = 100'000;

// Weights of which one in ten flips a low bit in every step, the same ones every time.
delta::OwnedState weights(std::uint64_t version) {
  Random random(3, 0);
  const delta::StateView layout{{"w", delta::DType::kBF16, {static_cast<std::int64_t>(kElements)}, {}}};
  auto state = delta::OwnedState::empty_like(layout).value();
  const auto bytes = state.mutable_bytes(0);
  for (std::size_t i = 0; i < kElements; ++i) {
    auto w = static_cast<std::uint16_t>(0x3c00 + random.below(0x0400));
    if (random.below(10) == 0) w = static_cast<std::uint16_t>(w ^ (version % 4));
    std::memcpy(bytes.data() + 2 * i, &w, 2);
  }
  state.seal();
  return state;
}

TEST(Publisher, AWorkerThatMissedManyVersionsGetsOneDelta) {
  const TemporaryFolder folder;
  TestLearner learner;  // of which only the node is used
  Publisher publisher({});
  LearnerEvents events;
  Board board;
  std::vector<std::optional<Version>> asked;
  std::map<WorkerId, Version> acked;
  events.need_catch_up = [&](Version, std::optional<Version> from) {
    board.write([&] { asked.push_back(from); });
    publisher.request_catch_up(from);
  };
  events.acked = [&](WorkerId id, Version version, const Digest& digest) {
    EXPECT_EQ(digest, weights(version.value).digest().bytes);
    board.write([&] { acked[id] = version; });
  };
  learner.node = LearnerNode::start(TestLearner::quick(), std::move(events)).value();
  publisher.attach(learner.node.get());
  const auto all_have = [&](std::uint64_t version) {
    return board.wait([&] {
      return acked.size() == 1 && acked.begin()->second == Version{version};
    });
  };

  WorkerOptions options = TestWorker::of(learner, "one");
  options.folder = folder.path();
  std::optional<TestWorker> worker(std::in_place);
  worker->start(options);
  ASSERT_TRUE(worker->board.wait([&] { return worker->id.has_value(); }));
  ASSERT_TRUE(publisher.publish(Version{0}, delta::share(weights(0))).has_value());
  ASSERT_TRUE(all_have(0));
  worker.reset();
  std::uint64_t missed = 0;
  for (std::uint64_t v = 1; v <= 6; ++v) missed += publisher.publish(Version{v}, delta::share(weights(v)))->stats.patch_bytes;

  const std::uint64_t before = learner.node->stats().chunk_bytes_sent.count;
  worker.emplace();
  options.token = trust::Secret();  // used up: its identity is in the folder
  worker->start(options);
  ASSERT_TRUE(all_have(6));
  EXPECT_EQ(board.read([&] { return asked; }), std::vector<std::optional<Version>>{Version{0}});
  EXPECT_EQ(worker->board.read([&] { return worker->got.back().base; }), Version{0});
  delta::OwnedState state = weights(0);
  ASSERT_TRUE(delta::apply_delta(worker->payload(worker->got.size() - 1), state).has_value());
  EXPECT_EQ(state.digest(), weights(6).digest());
  EXPECT_LT(learner.node->stats().chunk_bytes_sent.count - before, missed / 4);
  worker.reset();
  publisher.stop();
  learner.node->stop();
}

}  // namespace
}  // namespace echoline::learner
