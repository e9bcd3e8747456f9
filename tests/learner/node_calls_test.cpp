// Calls of a trainer's ranks between a node and the learner, over a connection that loses messages.
#include "learner/external/node_calls.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <future>

#include "base/random.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::learner {
namespace {

using ::testing::HasSubstr;

constexpr WorkerId kNode{7};
constexpr Bytes kBodyMax{8 << 20};

std::string body_of(std::size_t bytes) {
  Random random(bytes + 1);
  std::string body(bytes, '\0');
  for (char& c : body) c = static_cast<char>(random.next());
  return body;
}

// Both ends. Messages wait in queues until deliver() passes them on; break_connection() loses those that wait.
class Connection {
 public:
  Connection() {
    learner_.open(
        [this](TrainerCall call) {
          ++executed_;
          return TrainerAnswer{200,
                               call.path + ":" + std::to_string(std::hash<std::string_view>()(text_of(call.body)))};
        },
        kBodyMax);
    join();
  }
  ~Connection() {
    learner_.close();
    node_.end("the test is over");
  }

  void join() { node_.on_joined(); }
  void break_connection() {
    const std::lock_guard lock(mutex_);
    to_learner_.clear();
    to_node_.clear();
    node_.on_away();
  }
  // Passes up to `messages` messages on, until `done` or nothing waits for long.
  template <class Done>
  bool deliver(Done done, std::size_t messages = 1'000'000) {
    const SystemClock clock;
    const TimePoint give_up_at = clock.now() + std::chrono::seconds(20);
    while (!done() && clock.now() < give_up_at && messages > 0) {
      std::optional<std::string> up, down;
      {
        const std::lock_guard lock(mutex_);
        if (!to_learner_.empty()) up = std::move(to_learner_.front()), to_learner_.pop_front();
        if (!to_node_.empty()) down = std::move(to_node_.front()), to_node_.pop_front();
      }
      if (up) learner_.on_message(kNode, *up);
      if (down) node_.on_message(*down);
      messages -= up.has_value();
      if (!up && !down) std::this_thread::yield();
    }
    return done();
  }
  std::future<TrainerAnswer> call(std::string path, std::string body) {
    return std::async(std::launch::async, [this, path = std::move(path), body = std::move(body)]() mutable {
      return node_.execute({.method = "POST", .path = path, .request_id = "id", .body = slice_of(std::move(body))});
    });
  }

  NodeCalls& learner() { return learner_; }
  LearnerCalls& node() { return node_; }
  int executed() const { return executed_; }

 private:
  std::mutex mutex_;
  std::deque<std::string> to_learner_, to_node_;
  std::atomic<int> executed_ = 0;
  const SystemClock clock_;
  NodeCalls learner_{[this](WorkerId, std::string message) {
    const std::lock_guard lock(mutex_);
    to_node_.push_back(std::move(message));
  }};
  LearnerCalls node_{clock_,
                     [this](std::string message) {
                       const std::lock_guard lock(mutex_);
                       to_learner_.push_back(std::move(message));
                     },
                     std::chrono::seconds(20)};
};

bool is_ready(const std::future<TrainerAnswer>& future) {
  return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

TEST(ArrivingBody, ALargeOneIsInAFile) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("arriving_body_" + std::to_string(::getpid()));
  std::filesystem::create_directories(folder);
  const std::string piece = body_of(1'000'000);
  for (const std::size_t pieces : {0, 1, 66, 80}) {
    ArrivingBody body(80'000'000, folder);
    for (std::size_t i = 0; i < pieces; ++i) ASSERT_TRUE(body.append(piece));
    EXPECT_EQ(body.size(), pieces * piece.size());
    if (pieces == 80) {
      const Status beyond = body.append("x");
      ASSERT_FALSE(beyond);
      EXPECT_THAT(beyond.error().message(), HasSubstr("the limit is 80000000"));
    }
    const overlay::Slice bytes = body.finish();
    ASSERT_EQ(bytes.size(), pieces * piece.size());
    for (std::size_t i = 0; i < pieces; ++i) ASSERT_EQ(text_of(bytes.part(i * piece.size(), piece.size())), piece) << i;
    const bool is_large = bytes.size() >= kFileMemoryMin;
    std::ifstream maps("/proc/self/maps");
    const std::string text{std::istreambuf_iterator<char>(maps), {}};
    EXPECT_EQ(text.find(folder.string()) != std::string::npos, is_large) << pieces;
  }
  ArrivingBody without_disk(80'000'000, folder / "missing");
  for (int i = 0; i < 67; ++i) ASSERT_TRUE(without_disk.append(piece));
  EXPECT_FALSE(without_disk.append(piece));
  std::filesystem::remove_all(folder);
}

TEST(NodeCalls, ABodyArrivesWholeInParts) {
  Connection connection;
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kNodePartBytes, 7 * kNodePartBytes + 13}) {
    const std::string body = body_of(bytes);
    auto answer = connection.call("/a", body);
    ASSERT_TRUE(connection.deliver([&] { return is_ready(answer); })) << bytes;
    EXPECT_EQ(answer.get().body, "/a:" + std::to_string(std::hash<std::string>()(body)));
  }
  EXPECT_TRUE(connection.deliver([&] { return connection.learner().bytes_held() == 0; }));
}

TEST(NodeCalls, ABrokenConnectionLosesNothing) {
  for (std::size_t messages = 1; messages < 14; ++messages) {
    Connection connection;
    const std::string body = body_of(6 * kNodePartBytes);
    auto answer = connection.call("/a", body);
    (void)connection.deliver([&] { return is_ready(answer); }, messages);
    connection.break_connection();
    connection.join();
    ASSERT_TRUE(connection.deliver([&] { return is_ready(answer); })) << messages;
    EXPECT_EQ(answer.get().body, "/a:" + std::to_string(std::hash<std::string>()(body))) << messages;
    EXPECT_EQ(connection.executed(), 1) << messages;
  }
}

TEST(NodeCalls, LimitsAreNamed) {
  Connection connection;
  auto answer = connection.call("/a", body_of(kBodyMax.count + 1));
  ASSERT_TRUE(connection.deliver([&] { return is_ready(answer); }));
  const TrainerAnswer too_large = answer.get();
  EXPECT_EQ(too_large.status, 413);
  EXPECT_THAT(too_large.body, HasSubstr("the limit is"));
  EXPECT_EQ(connection.executed(), 0);
  EXPECT_EQ(connection.learner().bytes_held(), 0u);
}

TEST(NodeCalls, ALostNodeHoldsNoMemory) {
  Connection connection;
  auto answer = connection.call("/a", body_of(6 * kNodePartBytes));
  ASSERT_TRUE(connection.deliver([&] { return connection.learner().bytes_held() > 0; }));
  connection.learner().on_lost(kNode);
  EXPECT_EQ(connection.learner().bytes_held(), 0u);
  connection.node().end("the run has ended");
  EXPECT_EQ(answer.get().status, 503);
}

TEST(NodeCalls, ARefusedNodeLearnsWhy) {
  const SystemClock clock;
  std::deque<std::string> messages;
  LearnerCalls node(
      clock, [](std::string) {}, std::chrono::seconds(1));
  NodeCalls learner([&](WorkerId, std::string message) { messages.push_back(std::move(message)); });
  std::string hello;
  LearnerCalls greeting(
      clock, [&](std::string message) { hello = std::move(message); }, std::chrono::seconds(1));
  greeting.on_joined();
  learner.on_message(kNode, hello);
  EXPECT_TRUE(messages.empty());  // the learner does not know yet
  learner.refuse("no ranks");
  ASSERT_EQ(messages.size(), 1u);
  node.on_message(messages.front());
  EXPECT_EQ(node.refusal(), "no ranks");
}

TEST(NodeCalls, SpoiledMessagesAreSurvived) {
  const SystemClock clock;
  std::string valid;  // a whole call: hello, begin and part
  const auto append = [&](const std::string& message) {
    valid += static_cast<char>(message.size() / 256);
    valid += static_cast<char>(message.size() % 256);
    valid += message;
  };
  LearnerCalls node(clock, append, std::chrono::milliseconds(0));
  node.on_joined();
  NodeCalls terms([&](WorkerId, const std::string& message) { node.on_message(message); });
  terms.open([](const TrainerCall&) { return TrainerAnswer{}; }, kBodyMax);
  terms.on_message(kNode, std::string_view(valid).substr(2));
  auto answer = std::async(std::launch::async, [&] {
    return node.execute(
        {.method = "POST", .path = "/v1/policy/1/shards", .request_id = "id", .body = slice_of(body_of(300))});
  });
  while (terms.bytes_held() > 0 || valid.size() < 40) {
    std::this_thread::yield();
    if (valid.size() >= 40) break;
  }
  node.end("enough");
  (void)answer.get();
  test::fuzz_input(valid);
  Random random(1);
  for (int i = 0; i < 500; ++i) {
    std::string spoiled = valid;
    for (int flips = 0; flips < 3; ++flips) spoiled[random.below(spoiled.size())] = static_cast<char>(random.next());
    if (i % 3 == 0) spoiled.resize(random.below(spoiled.size()));
    test::fuzz_input(spoiled);
  }
}

}  // namespace
}  // namespace echoline::learner
