// The publisher beside a trainer, over real sockets: its publications, their times and number, and the policies it
// holds.
#include "learner/publisher.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <future>

#include "base/random.hpp"
#include "delta/digest.hpp"
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
    auto weight = static_cast<std::uint16_t>(0x3c00 + random.below(0x0400));
    if (random.below(10) == 0) weight = static_cast<std::uint16_t>(weight ^ (version % 4));
    std::memcpy(bytes.data() + sizeof weight * i, &weight, sizeof weight);
  }
  state.seal();
  return state;
}

// A learner's node without workers, and the publisher's events.
struct Published {
  TestLearner learner;  // of which only the node is used
  Board board;
  std::vector<Version> begun;          // versions whose publication has begun
  std::vector<PublishReport> reports;  // of finished publications

  Published() { learner.node = LearnerNode::start(TestLearner::quick(), {}).value(); }
  ~Published() { learner.node->stop(); }
  PublisherEvents events() {
    return {.begins = [this](Version version) { board.write([&] { begun.push_back(version); }); },
            .published = [this](const PublishReport& report) { board.write([&] { reports.push_back(report); }); }};
  }
};

bool wait_until_published(Publisher& publisher) { return publisher.wait_until_published(kPatience).value(); }

TEST(Publisher, ANoteOnThePolicyGoesWithEveryKindOfPublication) {
  Published published;
  PublisherEvents events = published.events();
  events.note = [](const delta::StateView& policy) { return delta::digest_state(policy)->hex(); };
  Publisher publisher({}, std::move(events));
  publisher.attach(published.learner.node.get());
  for (const std::uint64_t version : {0, 1, 2}) {
    publisher.publish(Version{version}, delta::share(weights(version)));
    ASSERT_TRUE(wait_until_published(publisher));
  }
  EXPECT_EQ(published.learner.node->deltas_from(Version{0})->note, weights(2).digest().hex());
}

TEST(Publisher, AWorkerThatMissedManyVersionsGetsTheStoredDeltasInOne) {
  const TemporaryFolder folder;
  TestLearner learner;          // of which only the node is used
  std::atomic<int> passes = 0;  // over all weights
  delta::EncodeOptions encoding;
  encoding.progress = [&](std::uint64_t encoded_bytes, std::uint64_t total_bytes) {
    passes += encoded_bytes == total_bytes;
  };
  Board board;
  std::uint64_t delta_bytes = 0;
  PublisherEvents publisher_events;
  publisher_events.published = [&](const PublishReport& report) {
    board.write([&] { delta_bytes += report.snapshot ? 0 : report.stats.patch_bytes; });
  };
  Publisher publisher(encoding, std::move(publisher_events));
  LearnerEvents events;
  std::vector<std::optional<Version>> requested_from;
  std::map<WorkerId, Version> acknowledged;
  events.need_catch_up = [&](Version, std::optional<Version> from) {
    board.write([&] { requested_from.push_back(from); });
    publisher.request_catch_up(from);
  };
  events.installed = [&](WorkerId id, Version version, const Digest& digest) {
    EXPECT_EQ(digest, weights(version.value).digest().bytes);
    board.write([&] { acknowledged[id] = version; });
  };
  learner.node = LearnerNode::start(TestLearner::quick(), std::move(events)).value();
  publisher.attach(learner.node.get());
  const auto wait_until_worker_has = [&](std::uint64_t version) {
    return board.wait([&] { return acknowledged.size() == 1 && acknowledged.begin()->second == Version{version}; });
  };

  WorkerOptions options = TestWorker::of(learner, "one");
  options.folder = folder.path();
  std::optional<TestWorker> worker(std::in_place);
  worker->start(options);
  ASSERT_TRUE(worker->board.wait([&] { return worker->id.has_value(); }));
  publisher.publish(Version{0}, delta::share(weights(0)));
  ASSERT_TRUE(wait_until_published(publisher));
  ASSERT_TRUE(wait_until_worker_has(0));
  worker.reset();
  for (std::uint64_t version = 1; version <= 6; ++version) {
    publisher.publish(Version{version}, delta::share(weights(version)));
    ASSERT_TRUE(wait_until_published(publisher));
  }

  const std::uint64_t bytes_sent_before = learner.node->stats().chunk_bytes_sent.count;
  worker.emplace();
  options.token = trust::Secret();  // used up: its identity is in the folder
  worker->start(options);
  ASSERT_TRUE(wait_until_worker_has(6));
  EXPECT_EQ(board.read([&] { return requested_from; }), std::vector<std::optional<Version>>{Version{0}});
  EXPECT_EQ(worker->board.read([&] { return worker->got.back().base; }), Version{0});
  delta::OwnedState state = weights(0);
  ASSERT_TRUE(delta::apply_delta(worker->payload(worker->got.size() - 1), state).has_value());
  EXPECT_EQ(state.digest(), weights(6).digest());
  EXPECT_LE(learner.node->stats().chunk_bytes_sent.count - bytes_sent_before, board.read([&] { return delta_bytes; }));
  EXPECT_EQ(passes, 7);  // one for each policy, none for the worker
  worker.reset();
  publisher.stop();
  learner.node->stop();
}

// Training goes on while a policy is encoded, which happens once and on another thread.
TEST(Publisher, TheTrainerDoesNotWaitForTheEncoder) {
  Published published;
  std::promise<void> may_encode;
  std::shared_future<void> may_encode_future = may_encode.get_future().share();
  std::set<std::thread::id> encoding_threads;
  std::map<std::uint64_t, int> passes;  // by the state's size
  delta::EncodeOptions encoding;
  encoding.progress = [&](std::uint64_t encoded_bytes, std::uint64_t total_bytes) {
    may_encode_future.wait();
    published.board.write([&] {
      encoding_threads.insert(std::this_thread::get_id());
      passes[total_bytes] += encoded_bytes == total_bytes;
    });
  };
  Publisher publisher(encoding, published.events());
  publisher.attach(published.learner.node.get());
  publisher.publish(Version{3}, delta::share(weights(3)));  // returns
  ASSERT_TRUE(published.board.wait([&] { return published.begun.size() == 1; }));
  EXPECT_FALSE(publisher.wait_until_published(Duration{}).value());
  EXPECT_TRUE(published.board.read([&] { return published.reports.empty(); }));
  may_encode.set_value();
  ASSERT_TRUE(wait_until_published(publisher));
  for (const std::uint64_t version : {4, 7}) {
    publisher.publish(Version{version}, delta::share(weights(version)));
    ASSERT_TRUE(wait_until_published(publisher));
  }
  publisher.stop();
  EXPECT_EQ(published.begun, (std::vector<Version>{Version{3}, Version{4}, Version{7}}));
  ASSERT_EQ(published.reports.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(published.reports[i].version, published.begun[i]);
    EXPECT_EQ(published.reports[i].snapshot, i == 0);
    EXPECT_EQ(published.reports[i].digest, weights(published.begun[i].value).digest().bytes);
  }
  EXPECT_EQ(encoding_threads.size(), 1u);
  EXPECT_FALSE(encoding_threads.contains(std::this_thread::get_id()));
  EXPECT_EQ(passes, (std::map<std::uint64_t, int>{{2 * kElements, 3}}));
}

// The publisher holds the newest published policy and the next one, and releases older ones.
TEST(Publisher, HoldsTwoPoliciesAtMost) {
  Published published;
  Publisher publisher({}, published.events());
  publisher.attach(published.learner.node.get());
  std::weak_ptr<const delta::OwnedState> newest;
  for (std::uint64_t version = 0; version < 4; ++version) {
    delta::SharedState policy = delta::share(weights(version));
    const std::weak_ptr<const delta::OwnedState> previous = std::exchange(newest, policy);
    publisher.publish(Version{version}, std::move(policy));
    ASSERT_TRUE(wait_until_published(publisher));
    EXPECT_TRUE(previous.expired()) << version;
    EXPECT_FALSE(newest.expired()) << version;  // the next one is compared with it
  }
}

TEST(Publisher, APolicyOfOtherTensorsIsASnapshot) {
  Published published;
  Publisher publisher({}, published.events());
  publisher.attach(published.learner.node.get());
  const std::vector<std::byte> values(8, std::byte{1});
  const delta::StateView other{{"another", delta::DType::kBF16, {4}, values}};
  const std::vector<delta::OwnedState> policies = [&] {
    std::vector<delta::OwnedState> all;
    all.push_back(weights(0));
    all.push_back(*delta::copy_of(other));
    all.push_back(*delta::copy_of(other));
    return all;
  }();
  for (std::uint64_t version = 0; version < 3; ++version) {
    publisher.publish(Version{version}, delta::share(*delta::copy_of(policies[version].view())));
    ASSERT_TRUE(wait_until_published(publisher));
  }
  const auto snapshots = published.board.read([&] {
    std::vector<bool> all;
    for (const auto& report : published.reports) all.push_back(report.snapshot);
    return all;
  });
  EXPECT_EQ(snapshots, (std::vector<bool>{true, true, false}));
}

TEST(Publisher, ReportsAPolicyThatCouldNotBePublished) {
  Published published;
  Publisher publisher({}, published.events());
  publisher.attach(published.learner.node.get());
  publisher.publish(Version{0}, delta::share(weights(0)));
  ASSERT_TRUE(wait_until_published(publisher));
  published.learner.node->stop();
  publisher.publish(Version{1}, delta::share(weights(1)));
  EXPECT_FALSE(publisher.wait_until_published(kPatience).has_value());
  EXPECT_EQ(published.board.read([&] { return published.reports.size(); }), 1u);
}

// The end of a run does not wait for the encoding of a large policy.
TEST(Publisher, StopsInTheMiddleOfAPolicy) {
  Published published;
  std::promise<void> stopped;
  std::shared_future<void> has_stopped = stopped.get_future().share();
  delta::EncodeOptions encoding;
  encoding.progress = [&](std::uint64_t, std::uint64_t) { has_stopped.wait(); };
  Publisher publisher(encoding, published.events());
  publisher.attach(published.learner.node.get());
  publisher.publish(Version{0}, delta::share(weights(0)));
  std::thread stopping([&] { publisher.stop(); });
  EXPECT_FALSE(publisher.wait_until_published(kPatience).value());  // it has been asked to stop by now
  stopped.set_value();
  stopping.join();
  EXPECT_TRUE(published.reports.empty());
}

}  // namespace
}  // namespace echoline::learner
