// Durable trajectories of 24 kB a second, with 1, 8 and 64 workers that wait for each acknowledgement: the rollout desk
// with all its checks, beside Redis Streams with `appendfsync always` in the same run. Redis is optional: without
// redis-server in PATH, only the desk is measured. ECHOLINE_BENCH_TRAJECTORIES sets the trajectories of a round.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <latch>
#include <map>
#include <semaphore>
#include <thread>

#include "tests/learner/desk.hpp"

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;
using BenchClock = std::chrono::steady_clock;

constexpr std::size_t kResponseTokens = 3985;  // 24 kB with their log-probabilities and text
constexpr int kRounds = 3;                     // of each store, in turns, so that other work on the machine harms both
constexpr std::size_t kGrantMax = 256;         // leases of one grant

double seconds_since(BenchClock::time_point begin) {
  return std::chrono::duration<double>(BenchClock::now() - begin).count();
}

std::size_t trajectories_of_a_round(std::size_t clients) {
  const char* wanted = std::getenv("ECHOLINE_BENCH_TRAJECTORIES");
  const std::size_t total = wanted != nullptr ? std::strtoul(wanted, nullptr, 10) : 64 * clients / (clients / 8 + 1);
  return std::max<std::size_t>(1, total / clients) * clients;
}

struct Measured {
  double per_second = 0;
  std::vector<double> latencies_s;
};

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values.at(std::min(values.size() - 1, static_cast<std::size_t>(share * static_cast<double>(values.size()))));
}

class BenchFolder {
 public:
  BenchFolder() {
    std::string name = (fs::temp_directory_path() / "echoline-durable-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~BenchFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  BenchFolder(const BenchFolder&) = delete;
  BenchFolder& operator=(const BenchFolder&) = delete;
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

// Calls store(client, i) for i below `each` on one thread per client, and measures every call.
Measured measure(std::size_t clients, std::size_t each, const std::function<void(std::size_t, std::size_t)>& store) {
  std::vector<std::vector<double>> latencies(clients);
  std::latch ready(static_cast<std::ptrdiff_t>(clients) + 1);
  std::vector<std::thread> threads;
  for (std::size_t client = 0; client < clients; ++client)
    threads.emplace_back([&, client] {
      ready.arrive_and_wait();
      for (std::size_t i = 0; i < each; ++i) {
        const auto begin = BenchClock::now();
        store(client, i);
        latencies[client].push_back(seconds_since(begin));
      }
    });
  ready.arrive_and_wait();
  const auto begin = BenchClock::now();
  for (std::thread& thread : threads) thread.join();
  Measured measured{.per_second = static_cast<double>(clients * each) / seconds_since(begin), .latencies_s = {}};
  for (const auto& of_client : latencies)
    measured.latencies_s.insert(measured.latencies_s.end(), of_client.begin(), of_client.end());
  return measured;
}

// A rollout desk whose workers are threads of this process. Worker w has the id w + 1.
class Desk {
 public:
  Desk(const fs::path& folder, std::size_t workers) : inboxes_(workers) {
    options_.file = folder / "replay.sqlite";
    options_.pacing = {.staleness = {.budget = 2, .publish_every = 1, .lookahead = 1},
                       .trajectories_per_step = 1u << 20,
                       .group_size = 1};
    options_.lease.initial_groups = 1u << 16;
    shape_.vocab_size = tokenizer_.size();
    shape_.positions_max = 8192;
    SubmissionCheckerOptions checker;
    checker.vocab_size = shape_.vocab_size;
    checker.positions_max = shape_.positions_max;
    checker.response_tokens_max = 4096;
    checker.trainable = [this](const schema::Trajectory& t) { return check_trainable(t, shape_); };
    DeskEvents events;
    events.send = [this](WorkerId worker, std::string bytes) {
      Inbox& inbox = inboxes_[worker.value - 1];
      inbox.message = *data_plane::parse_learner_message(bytes);
      inbox.arrived_at = BenchClock::now();
      inbox.arrived.release();
    };
    events.accepted = [](WorkerId, std::uint64_t, double) {};
    events.misbehaved = [](WorkerId worker, const std::string& reason) {
      fmt::print(stderr, "worker {} is expelled: {}\n", worker, reason);
      std::abort();
    };
    events.leaving = [](WorkerId) { return true; };
    auto desk = RolloutDesk::open(options_, SubmissionChecker(checker, *adapter_, phrasing_), /*resume_step=*/0,
                                  std::move(events));
    if (!desk) throw std::runtime_error(desk.error().message());
    desk_ = std::move(*desk);
    digest_[0] = std::byte{7};
    desk_->finish_publishing(Version{0}, digest_);
  }

  const schema::LearnerMessage& exchange(std::size_t worker, std::string bytes) {
    send(worker, std::move(bytes));
    return wait(worker);
  }
  // A worker sends one message at a time: wait() must follow before its next send().
  void send(std::size_t worker, std::string bytes) { desk_->receive(WorkerId{worker + 1}, std::move(bytes)); }
  const schema::LearnerMessage& wait(std::size_t worker) {
    inboxes_[worker].arrived.acquire();
    return inboxes_[worker].message;
  }
  // Arrival of the message that wait() has returned.
  BenchClock::time_point arrived_at(std::size_t worker) const { return inboxes_[worker].arrived_at; }

  // Leases `count` groups and returns the worker's submissions for them.
  std::vector<std::string> submissions(std::size_t worker, std::size_t count) {
    std::vector<std::string> serialised;
    while (serialised.size() < count) {
      schema::WorkerMessage request;
      request.mutable_request()->set_policy_digest(
          std::string(reinterpret_cast<const char*>(digest_.data()), digest_.size()));
      request.mutable_request()->set_groups_max(
          static_cast<std::uint32_t>(std::min(count - serialised.size(), kGrantMax)));
      const schema::WorkGrant grant = exchange(worker, request.SerializeAsString()).grant();
      if (grant.leases().empty()) throw std::runtime_error("the desk grants no lease");
      for (const schema::Lease& lease : grant.leases()) serialised.push_back(submission(lease, worker));
    }
    return serialised;
  }

  void submit(std::size_t worker, std::string submission) {
    const schema::SubmissionAck& ack = exchange(worker, std::move(submission)).ack();
    if (!ack.accepted()) throw std::runtime_error("not stored: " + ack.reason());
  }

  std::uint64_t stored() { return desk_->counts()->buffer.stored; }

 private:
  struct Inbox {
    schema::LearnerMessage message;
    BenchClock::time_point arrived_at;
    std::binary_semaphore arrived{0};
  };

  std::string submission(const schema::Lease& lease, std::size_t worker) {
    schema::WorkerMessage message;
    message.mutable_submission()->set_lease(lease.id());
    const std::string text(kResponseTokens - 1, 'x');
    *message.mutable_submission()->add_trajectories() =
        honest_trajectory(lease, 0, text, WorkerId{worker + 1}, tokenizer_, *adapter_);
    return message.SerializeAsString();
  }

  const model::Tokenizer tokenizer_ = *model::Tokenizer::characters(model::kCharacterAlphabet);
  const model::Phrasing phrasing_ =
      *model::Phrasing::from_parts(tokenizer_, {*tokenizer_.end_of_text()}, R"({"text": "{prompt}"})");
  const std::unique_ptr<data_plane::Adapter> adapter_ = *data_plane::make_adapter("arithmetic", "{}", 1);
  model::ModelConfig shape_;
  DeskOptions options_;
  overlay::Digest digest_{};
  std::vector<Inbox> inboxes_;
  std::unique_ptr<RolloutDesk> desk_;
};

Measured measure_desk(std::size_t clients) {
  const BenchFolder folder;
  Desk desk(folder.path(), clients);
  const std::size_t each = trajectories_of_a_round(clients) / clients;
  std::vector<std::vector<std::string>> submissions;
  for (std::size_t client = 0; client < clients; ++client) submissions.push_back(desk.submissions(client, each));
  Measured measured = measure(clients, each, [&](std::size_t client, std::size_t i) {
    desk.submit(client, std::move(submissions[client][i]));
  });
  EXPECT_EQ(desk.stored(), clients * each);
  return measured;
}

// redis-server on a socket of its folder, with a synced append-only file.
class Redis {
 public:
  explicit Redis(const fs::path& folder) : socket_path_((folder / "redis.sock").string()) {
    process_ = ::fork();
    if (process_ == 0) {
      const int log = ::open((folder / "log").c_str(), O_WRONLY | O_CREAT, 0600);
      ::dup2(log, 1);
      ::dup2(log, 2);
      ::execlp("redis-server", "redis-server", "--port", "0", "--unixsocket", socket_path_.c_str(), "--dir",
               folder.c_str(), "--appendonly", "yes", "--appendfsync", "always", "--save", "",
               "--auto-aof-rewrite-percentage", "0", nullptr);
      ::_exit(127);
    }
  }
  ~Redis() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  Redis(const Redis&) = delete;
  Redis& operator=(const Redis&) = delete;

  // A connected socket; tries until the server listens. Throws if the server ends.
  int connect() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socket_path_.copy(address.sun_path, sizeof address.sun_path - 1);
    for (;;) {
      const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
      ::close(fd);
      if (::waitpid(process_, nullptr, WNOHANG) != 0) throw std::runtime_error("redis-server does not start");
      std::this_thread::yield();
    }
  }

 private:
  const std::string socket_path_;
  pid_t process_ = -1;
};

// Sends one command and reads its answer, which must begin with `expected`.
void call_redis(int fd, std::string_view command, char expected) {
  while (!command.empty()) {
    const ssize_t sent = ::send(fd, command.data(), command.size(), MSG_NOSIGNAL);
    if (sent <= 0) throw std::runtime_error("redis-server has closed the connection");
    command.remove_prefix(static_cast<std::size_t>(sent));
  }
  std::string answer;
  const auto is_complete = [&] {  // a bulk string has two lines
    const auto first = answer.find("\r\n");
    return first != std::string::npos && (answer[0] != '$' || answer.find("\r\n", first + 2) != std::string::npos);
  };
  while (!is_complete()) {
    char bytes[256];
    const ssize_t read = ::read(fd, bytes, sizeof bytes);
    if (read <= 0) throw std::runtime_error("redis-server has closed the connection");
    answer.append(bytes, static_cast<std::size_t>(read));
  }
  if (answer[0] != expected) throw std::runtime_error("redis-server answers " + answer);
}

Measured measure_redis(std::size_t clients, std::size_t bytes) {
  const BenchFolder folder;
  Redis redis(folder.path());
  std::vector<int> sockets;
  for (std::size_t client = 0; client < clients; ++client) sockets.push_back(redis.connect());
  const std::string command = fmt::format("*5\r\n$4\r\nXADD\r\n$6\r\nstream\r\n$1\r\n*\r\n$4\r\nbody\r\n${}\r\n{}\r\n",
                                          bytes, std::string(bytes, 'x'));
  Measured measured = measure(clients, trajectories_of_a_round(clients) / clients,
                              [&](std::size_t client, std::size_t) { call_redis(sockets[client], command, '$'); });
  for (const int fd : sockets) ::close(fd);
  return measured;
}

bool has_redis() { return std::system("command -v redis-server >/dev/null 2>&1") == 0; }

TEST(DurableBench, TheDeskBesideRedisStreams) {
  const BenchFolder folder;
  const std::size_t bytes = Desk(folder.path(), 1).submissions(0, 1).at(0).size();
  fmt::print("{} bytes a trajectory\n", bytes);
  for (const std::size_t clients : {1, 8, 64}) {
    std::vector<double> desk_rates, redis_rates, desk_latencies, redis_latencies;
    const auto add = [](Measured measured, std::vector<double>& rates, std::vector<double>& latencies) {
      rates.push_back(measured.per_second);
      latencies.insert(latencies.end(), measured.latencies_s.begin(), measured.latencies_s.end());
    };
    for (int round = 0; round < kRounds; ++round) {
      add(measure_desk(clients), desk_rates, desk_latencies);
      if (has_redis()) add(measure_redis(clients, bytes), redis_rates, redis_latencies);
    }
    const double desk_rate = quantile(desk_rates, 0.5);
    fmt::print("{:>2} clients: desk {:>6.0f}/s, p50 {:.1f} ms, p99 {:.1f} ms", clients, desk_rate,
               1e3 * quantile(desk_latencies, 0.5), 1e3 * quantile(desk_latencies, 0.99));
    if (!redis_rates.empty()) {
      const double redis_rate = quantile(redis_rates, 0.5);
      fmt::print("; Redis {:>6.0f}/s, p50 {:.1f} ms, p99 {:.1f} ms; ratio {:.2f}", redis_rate,
                 1e3 * quantile(redis_latencies, 0.5), 1e3 * quantile(redis_latencies, 0.99), desk_rate / redis_rate);
      EXPECT_GT(desk_rate / redis_rate, 0.02);
    }
    fmt::print("\n");
    EXPECT_GT(desk_rate, 0);
  }
}

// Every worker sends a trajectory a second, one worker after another, however long the answers take.
TEST(DurableBench, AThousandWorkersWithATrajectoryASecondEach) {
  constexpr std::size_t kWorkers = 1000, kSenders = 4;
  const std::size_t each = std::getenv("ECHOLINE_BENCH_TRAJECTORIES") != nullptr ? 10 : 1;
  const BenchFolder folder;
  Desk desk(folder.path(), kWorkers);
  std::vector<std::vector<std::string>> submissions;
  for (std::size_t worker = 0; worker < kWorkers; ++worker) submissions.push_back(desk.submissions(worker, each));
  std::vector<std::vector<double>> latencies_s(kSenders);
  const auto begin = BenchClock::now() + std::chrono::milliseconds(50);
  const auto due_at = [&](std::size_t worker, std::size_t i) {
    return begin + std::chrono::seconds(i) + std::chrono::milliseconds(worker);
  };
  std::vector<std::thread> senders;
  for (std::size_t sender = 0; sender < kSenders; ++sender)
    senders.emplace_back([&, sender] {
      const auto receive = [&](std::size_t worker, std::size_t i) {
        if (!desk.wait(worker).ack().accepted()) throw std::runtime_error("a submission is refused");
        latencies_s[sender].push_back(
            std::chrono::duration<double>(desk.arrived_at(worker) - due_at(worker, i)).count());
      };
      for (std::size_t i = 0; i < each; ++i)
        for (std::size_t worker = sender; worker < kWorkers; worker += kSenders) {
          std::this_thread::sleep_until(due_at(worker, i));
          if (i > 0) receive(worker, i - 1);
          desk.send(worker, std::move(submissions[worker][i]));
        }
      for (std::size_t worker = sender; worker < kWorkers; worker += kSenders) receive(worker, each - 1);
    });
  for (std::thread& sender : senders) sender.join();
  std::vector<double> all;
  for (const auto& of_sender : latencies_s) all.insert(all.end(), of_sender.begin(), of_sender.end());
  EXPECT_EQ(desk.stored(), kWorkers * each);
  fmt::print("1,000 workers, 1,000 trajectories/s: p50 {:.1f} ms, p99 {:.1f} ms, longest {:.1f} ms\n",
             1e3 * quantile(all, 0.5), 1e3 * quantile(all, 0.99), 1e3 * quantile(all, 1));
}

}  // namespace
}  // namespace echoline::learner
