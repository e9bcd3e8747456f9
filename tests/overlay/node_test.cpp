// The overlay on real sockets, threads and disks.
#include "overlay/uv/node.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "base/files.hpp"
#include "base/log.hpp"
#include "overlay/wire/frame.hpp"
#include "tests/overlay/board.hpp"

namespace echoline::overlay {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

// Polls a condition that no callback reports.
bool eventually(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return true;
}

class NodeTest : public testing::Test {
 protected:
  void SetUp() override { log::configure(log::Level::kError, "test"); }
  // Declared before the workers, so that they outlive them.
  TemporaryFolder folder;
  TestLearner learner;
  std::vector<std::unique_ptr<TestWorker>> workers;

  TestWorker& start_worker(WorkerOptions options) {
    workers.push_back(std::make_unique<TestWorker>());
    workers.back()->start(std::move(options));
    return *workers.back();
  }
  void start_workers(std::size_t n) {
    for (std::size_t i = 0; i < n; ++i)
      start_worker(TestWorker::of(learner, "offer-" + std::to_string(workers.size())));
    ASSERT_TRUE(chained(workers.size()));
  }
  bool chained(std::size_t n) {
    return learner.board.wait([&] { return learner.chains.size() == 1 && learner.chains[0].size() == n; });
  }
};

TEST_F(NodeTest, EveryVersionReachesEveryWorkerAndLeavesTheLearnerOnce) {
  learner.start();
  start_workers(3);
  ASSERT_TRUE(learner.publish(0, {}, 300'000).has_value());
  for (std::uint64_t v = 1; v <= 5; ++v) ASSERT_TRUE(learner.publish(v, v - 1, 50'000).has_value());
  ASSERT_TRUE(learner.all_acked(3, 5));
  for (const auto& w : workers) {
    ASSERT_EQ(w->board.read([&] { return w->got.size(); }), 6u);
    for (std::uint64_t v = 0; v <= 5; ++v) {
      EXPECT_EQ(w->got[v].version, Version{v});
      EXPECT_EQ(w->got[v].base.has_value(), v > 0);
      EXPECT_EQ(w->got[v].policy_digest, digest_of(v));
      EXPECT_EQ(w->payload(v), random_bytes(v, v == 0 ? 300'000 : 50'000));
    }
    EXPECT_EQ(w->welcome.substr(0, 12), "hello offer-");
    EXPECT_EQ(w->node->stats().chunk_bytes_in.count, 550'000u);
  }
  EXPECT_FALSE(learner.wrong_digest);
  ASSERT_TRUE(learner.board.wait([&] { return learner.reports.size() == 6; }));
  EXPECT_EQ(learner.node->stats().chunk_bytes_sent.count, 550'000u);
  learner.board.read([&] {
    EXPECT_EQ(learner.reports[0].workers, 3u);
    EXPECT_EQ(learner.reports[0].depth, 3u);
    return 0;
  });
}

// A separate process, joined by a pipe, which a test kills with SIGKILL. It must fork before this process has threads.
class Process {
 public:
  // The new process runs `body` with the pipe's two ends and then waits for the kill.
  explicit Process(const std::function<void(const int* fds)>& body) {
    ECHO_CHECK(::pipe(fds_) == 0);
    pid_ = ::fork();
    if (pid_ != 0) return;
    body(fds_);
    for (;;) ::pause();
  }
  ~Process() {
    kill();
    ::close(fds_[0]);
    ::close(fds_[1]);
  }
  void signal(int which) { ::kill(pid_, which); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, -1), nullptr, 0);
  }

 protected:
  int fds_[2];

 private:
  pid_t pid_ = -1;
};

// A worker that waits for the learner's port and its token.
class WorkerProcess : public Process {
 public:
  WorkerProcess() : Process(run) {}
  void join(std::uint16_t port, std::string_view token) {
    EXPECT_EQ(::write(fds_[1], &port, sizeof port), static_cast<ssize_t>(sizeof port));
    EXPECT_EQ(::write(fds_[1], token.data(), token.size()), static_cast<ssize_t>(token.size()));
  }

 private:
  static void run(const int* fds) {
    std::uint16_t port = 0;
    char token[1024] = "";
    if (::read(fds[0], &port, sizeof port) != sizeof port || ::read(fds[0], token, sizeof token) <= 0) ::_exit(1);
    WorkerOptions o;
    o.learner = {"127.0.0.1", port};
    o.name = "victim";
    o.token = trust::Secret(std::string(token));
    o.join_timeout = kPatience;
    static const auto node = WorkerNode::start(o, {});
    if (!node) ::_exit(2);
  }
};

TEST_F(NodeTest, TheOthersFinishWhenTheirParentIsKilled) {
  WorkerProcess victim;
  learner.start();
  victim.join(learner.node->endpoint().port, learner.node->issue_token("victim")->reveal());
  ASSERT_TRUE(chained(1));
  ASSERT_TRUE(learner.publish(0, {}, 100'000).has_value());  // from now on, new workers stand behind the others
  for (int i = 0; i < 2; ++i) start_worker(TestWorker::of(learner, "offer"));
  ASSERT_TRUE(chained(3));
  ASSERT_TRUE(eventually([&] { return learner.board.read([&] { return learner.acked.size() == 2; }); }));
  const std::vector<std::byte> payload = random_bytes(1, 1'000'000);
  const auto writer = *learner.node->begin({Version{1}, Version{0}, digest_of(0)});
  ASSERT_TRUE(writer->write(std::span(payload).first(500'000)).has_value());
  const auto received = [&](const auto& w) { return w->node->stats().chunk_bytes_in.count; };
  constexpr std::size_t kChunk = 16'384, kSent = 100'000 + 500'000 / kChunk * kChunk;  // the rest fills no chunk yet
  for (const auto& w : workers) ASSERT_TRUE(eventually([&] { return received(w) == kSent; }));
  victim.kill();
  ASSERT_TRUE(writer->write(std::span(payload).subspan(500'000)).has_value());
  ASSERT_TRUE(writer->finish(digest_of(1)).has_value());
  ASSERT_TRUE(learner.all_acked(2, 1));
  for (const auto& w : workers) {
    EXPECT_EQ(w->payload(1), payload);
    // On a busy machine, an edge may count as silent and be replaced: its chunks in flight then come again.
    EXPECT_GE(received(w), 1'100'000u);
    EXPECT_LE(received(w), 1'100'000u + 4 * kChunk) << "nothing else is sent twice";
  }
}

TEST_F(NodeTest, TheLearnerMayBeDialledByItsName) {
  learner.start();
  TestWorker worker;
  WorkerOptions options = TestWorker::of(learner, "named");
  options.learner.host = "localhost";
  worker.start(std::move(options));
  ASSERT_TRUE(learner.publish(1, {}, 100'000));
  ASSERT_TRUE(learner.all_acked(1, 1));
  WorkerOptions nowhere = TestWorker::of(learner, "lost");
  nowhere.learner.host = "no host has a space";
  nowhere.join_timeout = std::chrono::milliseconds(200);
  const auto refused = WorkerNode::start(std::move(nowhere), {});
  ASSERT_FALSE(refused.has_value());
  EXPECT_NE(refused.error().message().find("no host has a space"), std::string::npos) << refused.error().message();
}

TEST_F(NodeTest, MessagesArriveWholeOnceAndInOrderBothWays) {
  learner.start();
  start_workers(1);
  const WorkerId id = learner.board.read([&] { return learner.joined.begin()->first; });
  const std::string large(kMessageBytesMax, 'x');
  ASSERT_TRUE(workers[0]->board.wait([&] { return workers[0]->id.has_value(); }));
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(workers[0]->node->send("up " + std::to_string(i)));
    ASSERT_TRUE(learner.node->send(id, "down " + std::to_string(i)));
  }
  ASSERT_TRUE(workers[0]->node->send(large));
  ASSERT_TRUE(learner.node->send(id, large));
  for (const Status& sent : {workers[0]->node->send(large + 'x'), learner.node->send(id, large + 'x')}) {
    ASSERT_FALSE(sent) << "the sender gets an error";
    EXPECT_EQ(sent.error().code, Code::kExhausted);
  }
  ASSERT_TRUE(learner.board.wait([&] { return learner.messages.size() == 101; }));
  ASSERT_TRUE(workers[0]->board.wait([&] { return workers[0]->messages.size() == 101; }));
  for (std::size_t i = 0; i < 100; ++i) {
    EXPECT_EQ(learner.messages[i].second, "up " + std::to_string(i));
    EXPECT_EQ(workers[0]->messages[i], "down " + std::to_string(i));
  }
  EXPECT_EQ(learner.messages.back().second, large);
  EXPECT_EQ(workers[0]->messages.back(), large);
}

TEST_F(NodeTest, WorksOverIpv6) {
  LearnerOptions options = TestLearner::quick();
  options.network.bind = "::1";
  if (!LearnerNode::start(options, {})) GTEST_SKIP() << "no IPv6 on this machine";
  learner.start(options);
  for (const char* name : {"a", "b"}) {
    WorkerOptions o = TestWorker::of(learner, name);
    o.bind_host = "::1";
    start_worker(o);
  }
  ASSERT_TRUE(chained(2));
  ASSERT_TRUE(learner.publish(0, {}, 100'000).has_value());
  ASSERT_TRUE(learner.all_acked(2, 0));
  EXPECT_EQ(learner.node->stats().chunk_bytes_sent.count, 100'000u);  // the second worker receives it from the first
}

// ---- restarts ----

TEST_F(NodeTest, ARestartedWorkerKeepsItsIdentityAndItsChunks) {
  learner.start();
  WorkerOptions options = TestWorker::of(learner, "kept");
  options.folder = folder / "worker";
  TestWorker& before = start_worker(options);
  ASSERT_TRUE(chained(1));
  ASSERT_TRUE(learner.publish(0, {}, 100'000).has_value());
  ASSERT_TRUE(learner.all_acked(1, 0));
  const std::vector<std::byte> payload = random_bytes(1, 512 * 1024);
  const auto writer = *learner.node->begin({Version{1}, Version{0}, digest_of(0)});
  ASSERT_TRUE(writer->write(std::span(payload).first(256 * 1024)).has_value());
  ASSERT_TRUE(eventually([&] { return before.node->stats().chunk_bytes_in.count == 100'000 + 256 * 1024; }));
  const WorkerId id = *before.id;
  before.node->stop();
  before.node.reset();
  options.token = trust::Secret();  // not needed again, because its identity is in the folder
  options.learner = learner.node->endpoint();
  TestWorker& after = start_worker(options);
  ASSERT_TRUE(after.board.wait([&] { return after.id.has_value(); }));
  EXPECT_EQ(after.id, id);
  ASSERT_TRUE(writer->write(std::span(payload).subspan(256 * 1024)).has_value());
  ASSERT_TRUE(writer->finish(digest_of(1)).has_value());
  ASSERT_TRUE(after.board.wait([&] { return after.got.size() == 2; }));
  EXPECT_EQ(after.payload(0), random_bytes(0, 100'000));  // from its disk
  EXPECT_EQ(after.payload(1), payload);
  EXPECT_EQ(after.node->stats().chunk_bytes_in.count, 256u * 1024);
}

// A host that serves many runs keeps its folder. Its state in one run does not matter in the next.
TEST_F(NodeTest, AMachineJoinsTheRunOfItsTokenWithOlderState) {
  learner.start();
  WorkerOptions options = TestWorker::of(learner, "host");
  options.folder = folder / "worker";
  TestWorker& before = start_worker(options);
  ASSERT_TRUE(chained(1));
  ASSERT_TRUE(learner.publish(5, {}, 100'000).has_value());
  ASSERT_TRUE(learner.all_acked(1, 5));
  before.node->stop();
  TestLearner next;
  next.start();
  options.token = TestWorker::of(next, "host").token;
  options.learner = next.node->endpoint();
  TestWorker& after = start_worker(options);
  ASSERT_TRUE(after.board.wait([&] { return after.id.has_value(); }));
  ASSERT_TRUE(next.publish(1, {}, 50'000).has_value());  // older than the version it had
  ASSERT_TRUE(after.board.wait([&] { return after.got.size() == 1; }));
  EXPECT_EQ(after.payload(0), random_bytes(1, 50'000));
  after.node->stop();  // before its learner ends
}

TEST_F(NodeTest, APublicationLargerThanMemoryIsSpooled) {
  learner.start();
  WorkerOptions options = TestWorker::of(learner, "small");
  options.folder = folder / "worker";
  options.memory_max = Bytes{256 * 1024};
  TestWorker& worker = start_worker(options);
  ASSERT_TRUE(chained(1));
  ASSERT_TRUE(learner.publish(0, {}, 4'000'000).has_value());
  ASSERT_TRUE(learner.all_acked(1, 0));
  EXPECT_EQ(worker.payload(0), random_bytes(0, 4'000'000));
  EXPECT_LT(worker.node->stats().memory_peak.count, 3'000'000u);
}

// A learner that publishes version 0.
class LearnerProcess : public Process {
 public:
  explicit LearnerProcess(const std::filesystem::path& folder) : Process([&](const int* fds) { run(fds, folder); }) {}
  WorkerOptions worker() {
    WorkerOptions o;
    char token[1024] = "";
    EXPECT_EQ(::read(fds_[0], &o.learner.port, sizeof o.learner.port), 2);
    EXPECT_GT(::read(fds_[0], token, sizeof token), 0);
    o.learner.host = "127.0.0.1";
    o.name = "kept";
    o.token = trust::Secret(std::string(token));
    o.join_timeout = kPatience;
    o.away_max = kPatience;
    return o;
  }

 private:
  static void run(const int* fds, const std::filesystem::path& folder) {
    static TestLearner learner;
    LearnerOptions options = TestLearner::quick();
    options.folder = folder;
    learner.start(options);
    if (!learner.publish(0, {}, 100'000)) ::_exit(1);
    const std::uint16_t port = learner.node->endpoint().port;
    const trust::Secret token = *learner.node->issue_token("kept");
    if (::write(fds[1], &port, sizeof port) != sizeof port ||
        ::write(fds[1], token.reveal().data(), token.reveal().size()) <= 0)
      ::_exit(2);
  }
};

TEST_F(NodeTest, WorkersFindALearnerThatWasKilledAndRestarted) {
  LearnerProcess before(folder / "learner");
  TestWorker& worker = start_worker(before.worker());
  ASSERT_TRUE(worker.board.wait([&] { return worker.got.size() == 1; }));
  EXPECT_EQ(worker.payload(0), random_bytes(0, 100'000));
  before.kill();
  ASSERT_TRUE(worker.board.wait([&] { return worker.aways == 1; }));
  LearnerOptions options = TestLearner::quick();
  options.folder = folder / "learner";
  options.resumed_at = Version{0};
  learner.start(options);
  ASSERT_TRUE(worker.board.wait([&] { return worker.welcomes == 2; }));
  EXPECT_EQ(learner.board.read([&] { return learner.joined.begin()->first; }), worker.id);
  ASSERT_TRUE(learner.publish(1, 0, 50'000).has_value());
  ASSERT_TRUE(learner.all_acked(1, 1));
  EXPECT_EQ(worker.payload(1), random_bytes(1, 50'000));
  EXPECT_FALSE(worker.gone);
}

// A learner that publishes on request, and reports whether all workers have the version and none was lost.
class PausedLearnerProcess : public Process {
 public:
  static constexpr std::size_t kWorkers = 3;
  PausedLearnerProcess() : Process([](const int* fds) { run(fds); }) {
    EXPECT_EQ(::read(fds_[0], &endpoint.port, sizeof endpoint.port), 2);
    for (std::string& token : tokens) {
      char text[1024] = "";
      EXPECT_EQ(::read(fds_[0], text, sizeof text), static_cast<ssize_t>(sizeof text));
      token = text;
    }
  }
  bool publish() {
    char all = 0;
    EXPECT_EQ(::write(asked_[1], "x", 1), 1);
    EXPECT_EQ(::read(fds_[0], &all, 1), 1);
    return all == 1;
  }
  Endpoint endpoint{"127.0.0.1", 0};
  std::string tokens[kWorkers];

 private:
  static void run(const int* fds) {
    static TestLearner learner;
    LearnerOptions options = TestLearner::quick();
    options.heartbeat = milliseconds(100);
    options.network.heartbeat_timeout = milliseconds(500);
    learner.start(options);
    const std::uint16_t port = learner.node->endpoint().port;
    if (::write(fds[1], &port, sizeof port) != sizeof port) ::_exit(1);
    for (std::size_t i = 0; i < kWorkers; ++i) {
      char text[1024] = "";
      const trust::Secret token = *learner.node->issue_token("worker-" + std::to_string(i));
      token.reveal().copy(text, sizeof text - 1);
      if (::write(fds[1], text, sizeof text) != static_cast<ssize_t>(sizeof text)) ::_exit(2);
    }
    char go;
    for (std::uint64_t version = 0; ::read(asked_[0], &go, 1) == 1; ++version) {
      const auto base = version > 0 ? std::optional(version - 1) : std::nullopt;
      const char all = learner.publish(version, base, 50'000) && learner.all_acked(kWorkers, version) &&
                       learner.board.read([&] { return learner.lost.empty(); });
      if (::write(fds[1], &all, 1) != 1) ::_exit(3);
    }
  }
  inline static int asked_[2];
  static const bool piped_;
};
const bool PausedLearnerProcess::piped_ = ::pipe(PausedLearnerProcess::asked_) == 0;

// The learner is stopped for four times a worker's patience. All workers keep their identities, on both sides.
TEST_F(NodeTest, AStoppedLearnerLosesNoWorker) {
  PausedLearnerProcess paused;
  for (std::size_t i = 0; i < PausedLearnerProcess::kWorkers; ++i) {
    WorkerOptions options;
    options.learner = paused.endpoint;
    options.name = "worker-" + std::to_string(i);
    options.token = trust::Secret(std::string(paused.tokens[i]));
    options.join_timeout = options.away_max.emplace(kPatience);
    start_worker(options);
  }
  for (const auto& w : workers) ASSERT_TRUE(w->board.wait([&] { return w->welcomes == 1; }));
  ASSERT_TRUE(paused.publish());
  paused.signal(SIGSTOP);
  for (const auto& w : workers)
    EXPECT_TRUE(w->board.wait([&] { return w->aways == 1; })) << "the workers dial the learner";
  std::this_thread::sleep_for(milliseconds(500));  // and they dial it without success
  paused.signal(SIGCONT);
  EXPECT_TRUE(paused.publish());
  for (const auto& w : workers) {
    EXPECT_FALSE(w->gone) << w->reason;
    EXPECT_GE(w->welcomes, 2);
  }
}

// ---- unknown peers ----

TEST_F(NodeTest, RefusalsNameTheReasonAndNoTokenIsLogged) {
  LearnerOptions durable = TestLearner::quick();
  durable.folder = folder / "learner";
  learner.start(durable);
  TestLearner other;
  other.start();
  log::configure(log::Level::kDebug, "test");
  testing::internal::CaptureStderr();
  std::vector<std::string> tokens;
  const auto refusal = [&](WorkerOptions options, const std::string& token) {
    options.token = trust::Secret(std::string(token));
    tokens.push_back(token);
    const auto started = WorkerNode::start(options, {});
    if (started) return std::string("started");
    EXPECT_EQ(started.error().code, Code::kInvalid) << started.error().message();
    return started.error().message();
  };
  const auto issue = [&](std::string_view instance) {
    return std::string(learner.node->issue_token(instance)->reveal());
  };
  const WorkerOptions options = TestWorker::of(learner, "a");
  EXPECT_THAT(refusal(options, issue("b")), HasSubstr("issued for another instance"));
  EXPECT_THAT(refusal(options, ""), HasSubstr("a join token is needed"));
  const std::string used = issue("a");
  EXPECT_EQ(refusal(options, used), "started");
  EXPECT_THAT(refusal(options, used), HasSubstr("used before: issue another one"));
  std::string forged = issue("a");
  forged[forged.size() - 5] = forged[forged.size() - 5] == 'x' ? 'y' : 'x';
  EXPECT_NE(refusal(options, forged), "started");
  // With a token of another run, the worker rejects the learner and shows it nothing.
  WorkerOptions elsewhere = options;
  elsewhere.learner = other.node->endpoint();
  elsewhere.join_timeout = seconds(1);
  elsewhere.token = trust::Secret(issue("a"));
  tokens.emplace_back(elsewhere.token.reveal());
  EXPECT_FALSE(WorkerNode::start(elsewhere, {}).has_value());
  const auto authority = trust::Authority::open(folder / "learner", "run");
  ASSERT_TRUE(authority.has_value());
  const double an_hour_ago = SystemClock().unix_seconds() - 3600;
  EXPECT_THAT(refusal(options, std::string(trust::issue_token(*authority, "a", {}, an_hour_ago)->reveal())),
              HasSubstr("expired"));
  learner.node->stop();
  other.node->stop();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_THAT(log, HasSubstr("used before"));  // the worker is told the reason
  for (const std::string& token : tokens)
    for (std::size_t at = 6; at + 20 <= token.size(); at += 10)
      EXPECT_EQ(log.find(token.substr(at, 20)), std::string::npos);
}

// A plain TCP connection to a node, by a peer that may not know the protocol.
std::unique_ptr<Descriptor> connect_to(const Endpoint& to) {
  auto fd = std::make_unique<Descriptor>(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(to.port);
  ::inet_pton(AF_INET, to.host.c_str(), &address.sin_addr);
  ECHO_CHECK(::connect(fd->get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  return fd;
}

TEST_F(NodeTest, APeerOfAnotherProtocolIsCutOff) {
  learner.start();
  const auto connection = connect_to(learner.node->endpoint());
  const int stranger = connection->get();
  const std::string request = "GET / HTTP/1.1\r\n\r\n";
  ASSERT_EQ(::send(stranger, request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  char bytes[256];
  ssize_t n = 0, answered = 0;
  while ((n = ::recv(stranger, bytes, sizeof bytes, 0)) > 0) answered += n;
  EXPECT_LE(answered, 16);  // an alert of TLS at most
  start_workers(1);
}

// Connections that say nothing, and some that begin a handshake and never finish it.
TEST_F(NodeTest, AThousandIdleConnectionsBlockNoWorker) {
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit before = files;
  files.rlim_cur = std::min<rlim_t>(files.rlim_max, 8192);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_cur < 3000) GTEST_SKIP() << "at most " << files.rlim_cur << " files may be open";
  learner.start();
  std::vector<std::unique_ptr<Descriptor>> idle;
  for (int i = 0; i < 1000; ++i) idle.push_back(connect_to(learner.node->endpoint()));
  std::atomic<bool> stop = false;
  // Sends a handshake byte by byte, and begins again when the node closes the connection.
  std::jthread slow_handshakes([&] {
    const char record[] = {0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, static_cast<char>(0xfc), 0x03, 0x03};
    while (!stop) {
      const auto slow = connect_to(learner.node->endpoint());
      for (const char byte : record) {
        if (stop || ::send(slow->get(), &byte, 1, MSG_NOSIGNAL) != 1) break;
        std::this_thread::sleep_for(milliseconds(20));
      }
    }
  });
  start_workers(2);
  ASSERT_TRUE(learner.publish(0, {}, 200'000).has_value());
  ASSERT_TRUE(learner.all_acked(2, 0));
  // The silent connections are closed in time.
  char byte;
  EXPECT_LE(::recv(idle[0]->get(), &byte, 1, 0), 0);
  stop = true;
  slow_handshakes.join();
  ASSERT_TRUE(learner.publish(1, 0, 50'000).has_value());
  ASSERT_TRUE(learner.all_acked(2, 1));
  idle.clear();
  ::setrlimit(RLIMIT_NOFILE, &before);
}

// A learner that may have 1,024 files open. On request, it opens some of its own, publishes, and reports their number.
class SmallLearnerProcess : public Process {
 public:
  static constexpr int kOwnFiles = 200;
  explicit SmallLearnerProcess(const std::filesystem::path& folder)
      : Process([&](const int* fds) { run(fds, folder); }) {
    EXPECT_EQ(::read(fds_[0], &endpoint.port, sizeof endpoint.port), 2);
    char text[1024] = "";
    EXPECT_GT(::read(fds_[0], text, sizeof text), 0);
    token = text;
  }
  int work() {
    int opened = -1;
    EXPECT_EQ(::write(to_child_[1], "x", 1), 1);
    EXPECT_EQ(::read(fds_[0], &opened, sizeof opened), static_cast<ssize_t>(sizeof opened));
    return opened;
  }
  Endpoint endpoint{"127.0.0.1", 0};
  std::string token;

 private:
  void run(const int* fds, const std::filesystem::path& folder) {
    const rlimit usual{1024, 1024};
    if (::setrlimit(RLIMIT_NOFILE, &usual) != 0) ::_exit(1);
    static TestLearner learner;
    LearnerOptions options = TestLearner::quick();
    options.folder = folder;
    learner.start(options);
    const std::uint16_t port = learner.node->endpoint().port;
    const trust::Secret secret = *learner.node->issue_token("kept");
    if (::write(fds[1], &port, sizeof port) != sizeof port ||
        ::write(fds[1], secret.reveal().data(), secret.reveal().size()) <= 0)
      ::_exit(2);
    char go;
    for (std::uint64_t version = 0; ::read(to_child_[0], &go, 1) == 1; ++version) {
      std::vector<std::unique_ptr<Descriptor>> own;
      while (own.size() < kOwnFiles) {
        auto file = std::make_unique<Descriptor>(::open("/dev/null", O_RDWR | O_CLOEXEC));
        if (file->get() < 0) break;
        own.push_back(std::move(file));
      }
      const int opened = learner.publish(version, {}, 100'000) ? static_cast<int>(own.size()) : -1;
      if (::write(fds[1], &opened, sizeof opened) != static_cast<ssize_t>(sizeof opened)) ::_exit(3);
    }
  }
  // Before the process exists: the base class forks.
  inline static int to_child_[2];
  static const bool piped_;
};
const bool SmallLearnerProcess::piped_ = ::pipe(SmallLearnerProcess::to_child_) == 0;

TEST_F(NodeTest, ALearnerWithTheUsualNumberOfFilesOutlivesMoreConnections) {
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  if (files.rlim_max < 2000) GTEST_SKIP() << "at most " << files.rlim_max << " files may be open";
  SmallLearnerProcess small(folder / "learner");
  const rlimit before = files;
  files.rlim_cur = files.rlim_max;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  std::vector<std::unique_ptr<Descriptor>> idle;
  for (int i = 0; i < 1300; ++i) idle.push_back(connect_to(small.endpoint));
  EXPECT_EQ(small.work(), SmallLearnerProcess::kOwnFiles) << "its own files and its publication";
  WorkerOptions options;
  options.learner = small.endpoint;
  options.name = "kept";
  options.token = trust::Secret(std::string(small.token));
  options.join_timeout = options.away_max.emplace(kPatience);
  TestWorker& worker = start_worker(options);
  EXPECT_EQ(small.work(), SmallLearnerProcess::kOwnFiles);
  EXPECT_TRUE(worker.board.wait([&] { return !worker.got.empty(); }));
  idle.clear();
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST_F(NodeTest, StopSendsAGoodbyeAndExpelAReason) {
  learner.start();
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
  EXPECT_EQ(learner.node->stats().joined, 2u);  // it still answers
}

TEST_F(NodeTest, ADrainedWorkerHandsItsChildrenOver) {
  learner.start();
  start_workers(3);
  ASSERT_TRUE(learner.publish(0, {}, 100'000).has_value());
  ASSERT_TRUE(learner.all_acked(3, 0));
  const WorkerId seed = learner.board.read([&] { return learner.chains[0][0]; });
  for (const auto& w : workers) {
    if (w->id != seed) continue;
    w->node->drain();
    ASSERT_TRUE(w->board.wait([&] { return w->gone; }));
    EXPECT_EQ(w->reason, "drained");
  }
  ASSERT_TRUE(learner.publish(1, 0, 100'000).has_value());
  ASSERT_TRUE(learner.all_acked(2, 1));
}

TEST_F(NodeTest, InvalidOptionsAreRefusedAtTheStart) {
  learner.start();
  const auto refusal = [](LearnerOptions o) {
    const auto started = LearnerNode::start(std::move(o), {});
    EXPECT_FALSE(started.has_value());
    if (!started) {
      EXPECT_EQ(started.error().code, Code::kInvalid);
    }
    return started ? std::string() : started.error().detail;
  };
  LearnerOptions o = TestLearner::quick();
  o.network.port = learner.node->endpoint().port;
  EXPECT_THAT(refusal(o), HasSubstr(std::to_string(o.network.port)));
  o = TestLearner::quick();
  o.network.bind = "no host has a space";
  EXPECT_THAT(refusal(o), HasSubstr("'no host has a space'"));
  o = TestLearner::quick();
  o.network.uplink = BitRate{-1};
  EXPECT_THAT(refusal(o), HasSubstr("up limit must be positive"));
  o = TestLearner::quick();
  o.network.chunk = {1000};
  EXPECT_THAT(refusal(o), HasSubstr("found 1000"));
  o = TestLearner::quick();
  o.network.quorum = 0;
  EXPECT_THAT(refusal(o), HasSubstr("quorum"));
  o = TestLearner::quick();
  o.network.heartbeat_timeout = milliseconds(1);
  EXPECT_THAT(refusal(o), HasSubstr("heartbeat_timeout"));
  o = TestLearner::quick();
  o.run_id.clear();
  refusal(o);
  EXPECT_FALSE(learner.publish(3, 3, 10).has_value());
  EXPECT_FALSE(learner.publish(3, 2, 10).has_value());  // its base was never published
  EXPECT_TRUE(learner.publish(3, {}, 10).has_value());
  EXPECT_FALSE(learner.publish(2, {}, 10).has_value());
}

}  // namespace
}  // namespace echoline::overlay
