// The overlay on real sockets and threads.
#include "overlay/uv/node.hpp"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <thread>

#include "base/log.hpp"
#include "base/random.hpp"
#include "overlay/frame.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

SharedBytes random_bytes(std::uint64_t seed, std::size_t count) {
  Random random(seed);
  auto bytes = std::make_shared<std::vector<std::byte>>(count);
  for (std::byte& b : *bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}
Digest digest_of(std::uint64_t v) {
  Digest d{};
  d[0] = static_cast<std::byte>(v);
  d[15] = static_cast<std::byte>(v * 7);
  return d;
}
Publication full(std::uint64_t v, std::size_t bytes) { return {Version{v}, {}, digest_of(v), random_bytes(v, bytes)}; }
Publication delta(std::uint64_t v, std::size_t bytes) {
  return {Version{v}, Version{v - 1}, digest_of(v), random_bytes(v, bytes)};
}

// What callbacks saw, to be waited for.
class Board {
 public:
  template <class F>
  void write(F&& f) {
    const std::lock_guard lock(mutex_);
    f();
    changed_.notify_all();
  }
  template <class F>
  bool wait(F&& holds, Duration limit = seconds(20)) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, holds);
  }
  template <class F>
  auto read(F&& f) {
    const std::lock_guard lock(mutex_);
    return f();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
};

struct TestLearner {
  Board board;
  std::map<WorkerId, MemberInfo> joined;
  std::map<WorkerId, std::string> lost;
  std::map<WorkerId, Version> acked;
  std::vector<std::pair<WorkerId, std::string>> messages;
  std::vector<BroadcastReport> reports;
  std::vector<Version> snapshot_requests;
  ChainIds chains;
  bool wrong_digest = false;
  std::unique_ptr<LearnerNode> node;
  std::function<void(Version)> on_need_snapshot;

  void start(LearnerOptions options) {
    LearnerEvents e;
    e.welcome = [](const MemberInfo& m) { return "hello " + m.name; };
    e.joined = [this](const MemberInfo& m) { board.write([&] { joined[m.id] = m; }); };
    e.lost = [this](WorkerId id, const std::string& why) { board.write([&] { lost[id] = why; }); };
    e.acked = [this](WorkerId id, Version v, const Digest& d) {
      board.write([&] {
        acked[id] = v;
        wrong_digest |= d != digest_of(v.value);
      });
    };
    e.message = [this](WorkerId id, std::string bytes) {
      board.write([&] { messages.emplace_back(id, std::move(bytes)); });
    };
    e.broadcast_done = [this](const BroadcastReport& r) { board.write([&] { reports.push_back(r); }); };
    e.topology_changed = [this](const ChainIds& c) { board.write([&] { chains = c; }); };
    e.need_snapshot = [this](Version v) {
      board.write([&] { snapshot_requests.push_back(v); });
      if (on_need_snapshot) on_need_snapshot(v);
    };
    auto started = LearnerNode::start(std::move(options), std::move(e));
    ASSERT_TRUE(started.has_value()) << started.error().message();
    node = std::move(*started);
  }
  bool all_acked(std::size_t workers, std::uint64_t v, Duration limit = seconds(30)) {
    return board.wait(
        [&] {
          std::size_t have = 0;
          for (const auto& [id, version] : acked) have += version == Version{v} && !lost.contains(id);
          return have == workers;
        },
        limit);
  }
};

struct TestWorker {
  Board board;
  std::optional<WorkerId> id;
  std::string welcome, reason;
  bool gone = false, auto_install = true;
  std::vector<Publication> got;
  std::vector<std::string> messages;
  std::unique_ptr<WorkerNode> node;

  void start(WorkerOptions options) {
    WorkerEvents e;
    e.joined = [this](WorkerId w, const std::string& bytes) {
      board.write([&] {
        id = w;
        welcome = bytes;
      });
    };
    e.publication = [this](const Publication& p) {
      board.write([&] { got.push_back(p); });
      if (auto_install) node->installed(p.version, p.policy_digest);
    };
    e.message = [this](std::string bytes) { board.write([&] { messages.push_back(std::move(bytes)); }); };
    e.disconnected = [this](const std::string& why) {
      board.write([&] {
        gone = true;
        reason = why;
      });
    };
    // The callbacks use `node`, so it must be there before they come: they wait for the board.
    const auto hold = e.publication;
    e.publication = [this, hold](const Publication& p) {
      board.wait([&] { return node != nullptr; });
      hold(p);
    };
    auto started = WorkerNode::start(std::move(options), std::move(e));
    ASSERT_TRUE(started.has_value()) << started.error().message();
    board.write([&] { node = std::move(*started); });
  }
};

LearnerOptions quick_learner(std::optional<double> up_mbit = {}) {
  LearnerOptions o;
  o.run_id = "test";
  if (up_mbit) o.limits.up = BitRate::from_mbit_per_s(*up_mbit);
  o.heartbeat = milliseconds(100);
  o.heartbeat_timeout = seconds(3);
  return o;
}
WorkerOptions worker_of(const TestLearner& learner, std::string name, std::optional<double> mbit = {}) {
  WorkerOptions o;
  o.learner = learner.node->endpoint();
  o.run_id = "test";
  o.name = std::move(name);
  if (mbit) o.limits = {BitRate::from_mbit_per_s(*mbit), BitRate::from_mbit_per_s(*mbit)};
  return o;
}

class NodeTest : public testing::Test {
 protected:
  void SetUp() override { log::configure(log::Level::kWarn, "test"); }
  // Declared before the workers, so that it outlives them.
  TestLearner learner;
  std::vector<std::unique_ptr<TestWorker>> workers;
  void start_workers(std::size_t n, std::optional<double> mbit = {}) {
    for (std::size_t i = 0; i < n; ++i) {
      workers.push_back(std::make_unique<TestWorker>());
      workers.back()->start(worker_of(learner, "offer-" + std::to_string(workers.size()), mbit));
    }
    ASSERT_TRUE(learner.board.wait([&] { return learner.joined.size() - learner.lost.size() == workers.size(); }));
  }
  void TearDown() override {
    for (auto& w : workers)
      if (w->node) w->node->stop();
    if (learner.node) learner.node->stop();
  }
};

TEST_F(NodeTest, SixLimitedWorkersGetEveryVersionAtTheEmulatedRate) {
  LearnerOptions options = quick_learner(24);
  options.chunk = {16 * 1024};
  learner.start(options);
  start_workers(6, 8);
  std::vector<Publication> sent{full(0, 1'000'000)};
  for (std::uint64_t v = 1; v <= 10; ++v) sent.push_back(delta(v, 200'000));
  for (const Publication& p : sent) learner.node->publish(p);
  ASSERT_TRUE(learner.all_acked(6, 10));
  for (const auto& w : workers) {
    ASSERT_EQ(w->board.read([&] { return w->got.size(); }), sent.size());
    w->board.read([&] {
      for (std::size_t i = 0; i < sent.size(); ++i) {
        EXPECT_EQ(w->got[i].version, sent[i].version);
        EXPECT_EQ(w->got[i].base, sent[i].base);
        EXPECT_EQ(*w->got[i].payload, *sent[i].payload);
      }
      return 0;
    });
    EXPECT_EQ(w->welcome.substr(0, 12), "hello offer-");
  }
  EXPECT_FALSE(learner.wrong_digest);
  ASSERT_TRUE(learner.board.wait([&] { return learner.reports.size() == 11; }));
  const LearnerStats stats = learner.node->stats();
  ASSERT_EQ(stats.topology.size(), 3u);  // floor(24 / 8)
  // Each chain carries the payloads once.
  EXPECT_EQ(stats.chunk_bytes_sent.count, 3u * 3'000'000u);
  learner.board.read([&] {
    const BroadcastReport& first = learner.reports.front();
    EXPECT_EQ(first.version, Version{0});
    EXPECT_EQ(first.workers, 6u);
    EXPECT_EQ(first.depth, 2u);
    // 1 MB down a chain at 1 MB/s: never faster than the links allow; slower by the machine's load at most.
    EXPECT_GT(echoline::seconds(first.t_b), 1.0);
    EXPECT_LT(echoline::seconds(first.t_b), 2.5);
    EXPECT_GT(echoline::seconds(learner.reports.back().t_b), 2.9);
    EXPECT_LT(echoline::seconds(learner.reports.back().t_b), 6.0);
    return 0;
  });
}

// A worker process of its own, to be killed as the operating system kills.
class WorkerProcess {
 public:
  // Forks before this process has threads; the worker waits for the learner's port.
  WorkerProcess() {
    if (::pipe(fds_) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ != 0) return;
    std::uint16_t port = 0;
    if (::read(fds_[0], &port, sizeof port) != sizeof port) ::_exit(1);
    WorkerOptions o;
    o.learner = {"127.0.0.1", port};
    o.run_id = "test";
    o.name = "victim";
    o.limits = {BitRate::from_mbit_per_s(8), BitRate::from_mbit_per_s(8)};
    const auto node = WorkerNode::start(o, {});
    for (;;) ::pause();
  }
  ~WorkerProcess() {
    kill();
    ::close(fds_[0]);
    ::close(fds_[1]);
  }
  void join(std::uint16_t port) { EXPECT_EQ(::write(fds_[1], &port, sizeof port), static_cast<ssize_t>(sizeof port)); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 private:
  int fds_[2];
  pid_t pid_ = -1;
};

TEST_F(NodeTest, TheOthersFinishWhenAnInteriorWorkerIsKilled) {
  WorkerProcess victim;
  LearnerOptions options = quick_learner(8);  // one chain
  options.chunk = {16 * 1024};
  learner.start(options);
  victim.join(learner.node->endpoint().port);
  ASSERT_TRUE(learner.board.wait([&] { return learner.joined.size() == 1; }));
  for (std::size_t i = 0; i < 4; ++i) {
    workers.push_back(std::make_unique<TestWorker>());
    workers.back()->start(worker_of(learner, "offer", 8));
  }
  // The first to join stands first in the only chain: everything the others get passes through it.
  ASSERT_TRUE(learner.board.wait([&] { return learner.chains.size() == 1 && learner.chains[0].size() == 5; }));
  ASSERT_EQ(learner.chains[0][0], WorkerId{1});
  const Publication first = full(0, 1'000'000);
  learner.node->publish(first);
  const auto last = learner.board.read([&] { return learner.chains[0][4]; });
  TestWorker* tail = nullptr;
  for (auto& w : workers)
    if (w->board.wait([&] { return w->id.has_value(); }) && w->id == last) tail = w.get();
  ASSERT_NE(tail, nullptr);
  while (tail->node->stats().chunk_bytes_in.count < 200'000) std::this_thread::sleep_for(milliseconds(5));
  victim.kill();
  ASSERT_TRUE(learner.all_acked(4, 0));
  learner.node->publish(delta(1, 50'000));
  ASSERT_TRUE(learner.all_acked(4, 1));
  EXPECT_TRUE(learner.board.read([&] { return learner.lost.contains(WorkerId{1}); }));
  for (const auto& w : workers) {
    EXPECT_EQ(*w->got.at(0).payload, *first.payload);
    // Nothing but what was lost on the way was sent again.
    EXPECT_LT(w->node->stats().chunk_bytes_in.count, 1'050'000u + 200'000u);
  }
}

TEST_F(NodeTest, MessagesArriveWholeOnceAndInOrderBothWays) {
  learner.start(quick_learner());
  start_workers(1);
  const WorkerId id = learner.board.read([&] { return learner.joined.begin()->first; });
  const std::string large(kApplicationBytesMax, 'x');
  for (int i = 0; i < 200; ++i) {
    workers[0]->node->send("up " + std::to_string(i));
    learner.node->send(id, "down " + std::to_string(i));
  }
  workers[0]->node->send(large);
  workers[0]->node->send(large + "x");  // too large: reported and dropped
  learner.node->send(id, large);
  ASSERT_TRUE(learner.board.wait([&] { return learner.messages.size() == 201; }));
  ASSERT_TRUE(workers[0]->board.wait([&] { return workers[0]->messages.size() == 201; }));
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(learner.messages[static_cast<std::size_t>(i)].second, "up " + std::to_string(i));
    EXPECT_EQ(workers[0]->messages[static_cast<std::size_t>(i)], "down " + std::to_string(i));
  }
  EXPECT_EQ(learner.messages.back().second, large);
  EXPECT_EQ(workers[0]->messages.back(), large);
}

TEST_F(NodeTest, ALateJoinerIsBroughtToTheCurrentVersion) {
  LearnerOptions options = quick_learner();
  options.store_bytes_max = {250'000};  // the first snapshot is soon forgotten
  learner.on_need_snapshot = [this](Version v) { learner.node->provide_snapshot(full(v.value, 100'000)); };
  learner.start(options);
  start_workers(2);
  learner.node->publish(full(0, 100'000));
  for (std::uint64_t v = 1; v <= 5; ++v) learner.node->publish(delta(v, 60'000));
  ASSERT_TRUE(learner.all_acked(2, 5));
  start_workers(1);
  ASSERT_TRUE(learner.all_acked(3, 5));
  learner.node->publish(delta(6, 60'000));
  ASSERT_TRUE(learner.all_acked(3, 6));
}

TEST_F(NodeTest, AFailedInstallationIsRepairedByASnapshot) {
  learner.on_need_snapshot = [this](Version v) { learner.node->provide_snapshot(full(v.value, 100'000)); };
  learner.start(quick_learner());
  auto worker = std::make_unique<TestWorker>();
  worker->auto_install = false;
  worker->start(worker_of(learner, "offer"));
  TestWorker& w = *worker;
  workers.push_back(std::move(worker));
  ASSERT_TRUE(learner.board.wait([&] { return learner.joined.size() == 1; }));
  learner.node->publish(full(0, 100'000));
  learner.node->publish(delta(1, 50'000));
  ASSERT_TRUE(w.board.wait([&] { return w.got.size() == 2; }));
  w.node->installed(Version{0}, digest_of(0));
  w.node->install_failed(Version{1}, "result digest differs");
  ASSERT_TRUE(w.board.wait([&] { return w.got.size() == 3; }));
  EXPECT_EQ(w.got[2].version, Version{1});
  EXPECT_FALSE(w.got[2].base.has_value());
  w.node->installed(Version{1}, digest_of(1));
  ASSERT_TRUE(learner.all_acked(1, 1));
  EXPECT_EQ(learner.snapshot_requests, std::vector<Version>{Version{1}});
}

TEST_F(NodeTest, StopSaysGoodbyeAndExpelSaysWhy) {
  learner.start(quick_learner());
  start_workers(2);
  ASSERT_TRUE(workers[0]->board.wait([&] { return workers[0]->id.has_value(); }));
  const WorkerId first = *workers[0]->id;
  learner.node->expel(first, "its rollouts were wrong");
  ASSERT_TRUE(workers[0]->board.wait([&] { return workers[0]->gone; }));
  EXPECT_EQ(workers[0]->reason, "its rollouts were wrong");
  ASSERT_TRUE(learner.board.wait([&] { return learner.lost.contains(first); }));
  learner.node->stop();
  learner.node->stop();
  ASSERT_TRUE(workers[1]->board.wait([&] { return workers[1]->gone; }));
  EXPECT_EQ(workers[1]->reason, "the run has ended");
  EXPECT_EQ(learner.node->stats().joined, 2u);  // still answers
}

TEST_F(NodeTest, RefusesAWorkerOfAnotherRunAndGarbage) {
  learner.start(quick_learner());
  auto options = worker_of(learner, "stranger");
  options.run_id = "other";
  workers.push_back(std::make_unique<TestWorker>());
  workers.back()->start(options);
  ASSERT_TRUE(workers.back()->board.wait([&] { return workers.back()->gone; }));
  EXPECT_THAT(workers.back()->reason, testing::HasSubstr("run 'test'"));
  // Somebody who speaks another protocol is cut off and harms nobody.
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(learner.node->endpoint().port);
  ::inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
  ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const std::string request = "GET / HTTP/1.1\r\n\r\n";
  ASSERT_EQ(::send(fd, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  char byte;
  EXPECT_LE(::recv(fd, &byte, 1, 0), 0);
  ::close(fd);
  workers.push_back(std::make_unique<TestWorker>());
  workers.back()->start(worker_of(learner, "good"));
  ASSERT_TRUE(learner.board.wait([&] { return learner.joined.size() == 1; }));
}

TEST_F(NodeTest, MistakesAreNamedAtTheStart) {
  learner.start(quick_learner());
  LearnerOptions taken = quick_learner();
  taken.port = learner.node->endpoint().port;
  const auto second = LearnerNode::start(taken, {});
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code, Code::kInvalid);
  EXPECT_THAT(second.error().detail, testing::HasSubstr(std::to_string(taken.port)));
  LearnerOptions named = quick_learner();
  named.bind_host = "localhost";
  EXPECT_EQ(LearnerNode::start(named, {}).error().code, Code::kInvalid);
  LearnerOptions slow = quick_learner(-1.0);
  EXPECT_EQ(LearnerNode::start(slow, {}).error().code, Code::kInvalid);
  // A learner that is not there: the worker is told, within its time.
  TestLearner absent;
  absent.start(quick_learner());
  WorkerOptions lonely = worker_of(absent, "lonely");
  absent.node->stop();
  lonely.learner.port = absent.node->endpoint().port;
  absent.node.reset();
  workers.push_back(std::make_unique<TestWorker>());
  workers.back()->start(lonely);
  ASSERT_TRUE(workers.back()->board.wait([&] { return workers.back()->gone; }));
  EXPECT_THAT(workers.back()->reason, testing::HasSubstr("cannot join"));
}

}  // namespace
}  // namespace echoline::overlay
