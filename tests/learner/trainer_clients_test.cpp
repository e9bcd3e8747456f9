// Real clients of the trainer API: processes of the Python client, with connections that break and beside clients that
// stall.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/random.hpp"
#include "delta/safetensors.hpp"
#include "learner/external/api.hpp"
#include "learner/external/batch_file.hpp"
#include "learner/external/source.hpp"
#include "learner/external/trainer_link.hpp"

extern char** environ;

namespace echoline::learner {
namespace {

using nlohmann::json;
using std::chrono::seconds;
namespace fs = std::filesystem;

constexpr const char* kPython = "/usr/bin/python3";

Descriptor unix_socket() { return Descriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

sockaddr_un address_of(const fs::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  return address;
}

bool connect_to(const Descriptor& socket, const fs::path& path) {
  const sockaddr_un address = address_of(path);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
}

// Forwards connections of a unix socket to another one, and cuts each after a random number of bytes in either
// direction.
class CuttingProxy {
 public:
  CuttingProxy(fs::path listen, fs::path target, std::uint64_t seed, std::uint64_t connection_bytes_max)
      : target_(std::move(target)),
        random_(seed),
        connection_bytes_max_(connection_bytes_max),
        listener_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const sockaddr_un address = address_of(listen);
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    EXPECT_EQ(::listen(listener_.get(), 16), 0);
    accepting_ = std::thread([this] { accept_all(); });
  }
  ~CuttingProxy() {
    ending_ = true;
    ::shutdown(listener_.get(), SHUT_RDWR);
    accepting_.join();
    for (std::thread& thread : threads_) thread.join();
  }
  std::uint64_t cuts() const { return cuts_; }

 private:
  void accept_all() {
    for (;;) {
      const int accepted = ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (accepted < 0) return;
      threads_.emplace_back([this, accepted, bytes_left = random_.below(connection_bytes_max_)] {
        forward(Descriptor(accepted), bytes_left);
      });
    }
  }
  void forward(const Descriptor& client, std::uint64_t bytes_left) {
    const Descriptor server = unix_socket();
    if (!connect_to(server, target_)) return;
    pollfd sockets[] = {{client.get(), POLLIN, 0}, {server.get(), POLLIN, 0}};
    std::vector<char> buffer(4096);
    while (!ending_) {
      if (::poll(sockets, 2, 50) <= 0) continue;
      for (int i = 0; i < 2; ++i) {
        if (sockets[i].revents == 0) continue;
        const ssize_t received_bytes = ::recv(sockets[i].fd, buffer.data(), buffer.size(), 0);
        if (received_bytes <= 0) return;
        const std::uint64_t forwarded_bytes = std::min(bytes_left, static_cast<std::uint64_t>(received_bytes));
        if (forwarded_bytes > 0 && ::send(sockets[1 - i].fd, buffer.data(), forwarded_bytes, MSG_NOSIGNAL) <= 0) return;
        bytes_left -= forwarded_bytes;
        if (bytes_left == 0) {
          ++cuts_;
          return;
        }
      }
    }
  }

  const fs::path target_;
  Random random_;
  const std::uint64_t connection_bytes_max_;
  const Descriptor listener_;
  std::atomic<bool> ending_ = false;
  std::atomic<std::uint64_t> cuts_ = 0;
  std::thread accepting_;
  std::vector<std::thread> threads_;
};

// A process of the Python client: `script` has `client`, a Client of `run`, and `arguments`.
class PythonClient {
 public:
  PythonClient(const fs::path& run, const std::string& script, std::vector<std::string> arguments = {}) {
    const std::string program =
        "import struct, sys, time\nsys.path.insert(0, 'clients/python')\nimport echoline\n"
        "client = echoline.Client(sys.argv[1], patience=60)\narguments = sys.argv[2:]\n" +
        script;
    arguments.insert(arguments.begin(), {kPython, "-c", program, run.string()});
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    if (::posix_spawn(&pid_, kPython, nullptr, nullptr, argv.data(), environ) != 0) pid_ = -1;
  }
  PythonClient(PythonClient&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  ~PythonClient() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
};

// A fake trainer: scores, consumes with the batch's step as a figure, and publishes 500 weights that encode the
// version.
constexpr const char* kTrainer = R"(
step_s = float(arguments[0])
def policy(version):
    return {"w": echoline.Tensor("BF16", (500,), memoryview(struct.pack("<H", version) * 500))}
while True:
    status = client.status()
    if status.version_wanted == status.steps:
        client.publish(status.steps, policy(status.steps))
    if status.steps >= status.steps_total:
        break
    batch = client.take(wait=1)
    if batch is None:
        continue
    time.sleep(step_s)
    client.renew(batch)
    client.score(batch, [-0.5] * len(batch["response_tokens"]))
    client.consume(batch, {"step": batch.step})
)";

class TrainerClients : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::access(kPython, X_OK) != 0) GTEST_SKIP() << kPython << " is not installed";
    std::string name = (fs::temp_directory_path() / "echoline-clients-XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  void TearDown() override {
    api_.reset();
    if (!folder_.empty()) fs::remove_all(folder_);
  }

  // The learner's side of `steps` learner steps, on this thread. Checks the received values.
  void serve(std::uint64_t steps, std::uint64_t tokens = 100) {
    for (std::uint64_t step = 1; step <= steps; ++step) {
      schema::Trajectory trajectory;
      trajectory.set_problem_id("p");
      trajectory.add_prompt_tokens(1);
      for (std::uint64_t i = 0; i < tokens; ++i)
        trajectory.add_response_tokens(static_cast<std::uint32_t>(i)), trajectory.add_logprobs(-0.5f);
      trajectory.add_spans()->set_end(static_cast<std::uint32_t>(tokens));
      trainer_link_->offer(step, std::make_shared<const std::string>(*pack_batch({trajectory})), tokens);
      const auto consumed = trainer_link_->wait_consumed(kPatience);
      ASSERT_TRUE(consumed) << "step " << step;
      EXPECT_EQ(consumed->figures, (json{{"step", static_cast<double>(step)}}));
      ASSERT_TRUE(consumed->scores);
      EXPECT_EQ(consumed->scores->logprobs.size(), tokens);
      const auto policy = trainer_link_->wait_policy(Version{step}, kPatience);
      ASSERT_TRUE(policy) << "version " << step;
      EXPECT_EQ(policy->bytes(0).size(), 1000u);
      std::uint16_t value = 0;
      std::memcpy(&value, policy->bytes(0).data(), sizeof value);
      EXPECT_EQ(value, step) << "each policy once";
    }
  }

  void start(std::uint64_t steps, Duration idle_max = std::chrono::minutes(10)) {
    trainer_link_.emplace(TrainerLinkOptions{.publish_every = 1, .steps_total = steps, .evaluate_every = 0}, clock_, 0);
    TrainerServerOptions options;
    options.folder = folder_;
    options.body_max = {1 << 20};
    options.idle_max = idle_max;
    options.run_facts = {{"steps_total", steps}};
    options.parse_policy = [](Version, const overlay::Slice& body) -> Result<delta::OwnedState> {
      ECHO_ASSIGN(const auto content, delta::parse_safetensors(body.bytes(), "policy"));
      return delta::copy_of(content.tensors);
    };
    std::ofstream(folder_ / "metrics.jsonl") << "{\"a\":1}\n";
    auto api = TrainerServer::start(std::move(options), *trainer_link_);
    ASSERT_TRUE(api.has_value()) << api.error().message();
    api_ = *std::move(api);
    std::ofstream(folder_ / kTrainerAddressFile) << api_->address();
  }
  fs::path socket_path() const { return api_->address()["socket"].get<std::string>(); }

  static constexpr Duration kPatience = seconds(120);
  const SystemClock clock_{};
  fs::path folder_;
  std::optional<TrainerLink> trainer_link_;
  std::unique_ptr<TrainerServer> api_;
};

TEST_F(TrainerClients, NothingIsLostOrDoneTwiceWhereConnectionsAreCut) {
  constexpr std::uint64_t kSteps = 40;
  start(kSteps);
  const fs::path run = folder_ / "cut";
  fs::create_directories(run);
  std::uint64_t seed = 20260726;
  if (const char* seed_text = std::getenv("ECHOLINE_TEST_SEED")) seed = std::stoull(seed_text);
  const CuttingProxy proxy(run / "api.sock", socket_path(), seed, 10'000);
  std::ofstream(run / kTrainerAddressFile) << json{{"socket", (run / "api.sock").string()}};
  PythonClient trainer(run, kTrainer, {"0"});
  serve(kSteps);
  EXPECT_EQ(trainer.wait(), 0) << "seed " << seed;
  EXPECT_GT(proxy.cuts(), kSteps / 2) << "seed " << seed;
}

// The server closes a connection that is idle for a moment, and steps take longer.
TEST_F(TrainerClients, AStepMayTakeLongerThanAConnectionLasts) {
  start(3, std::chrono::milliseconds(50));
  PythonClient trainer(folder_, kTrainer, {"0.2"});
  serve(3);
  EXPECT_EQ(trainer.wait(), 0);
}

// With the real timeouts: half a minute of silence, while four of eight clients have stopped in the middle of a body.
TEST_F(TrainerClients, StepsOfHalfAMinuteBesideClientsThatStall) {
  start(1);
  std::vector<std::unique_ptr<Descriptor>> stalled;
  for (int i = 0; i < 4; ++i) {
    stalled.push_back(std::make_unique<Descriptor>(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)));
    ASSERT_TRUE(connect_to(*stalled.back(), socket_path()));
    const std::string half_request =
        "POST /v1/policy/1 HTTP/1.1\r\nContent-Length: 4000\r\n\r\n" + std::string(2000, 'x');
    ASSERT_EQ(::send(stalled.back()->get(), half_request.data(), half_request.size(), MSG_NOSIGNAL),
              std::ssize(half_request));
  }
  std::vector<PythonClient> watching;
  for (int i = 0; i < 3; ++i)
    watching.emplace_back(folder_,
                          "for _ in range(300):\n    client.status()\n    assert client.metrics() == [{'a': 1}]\n");
  PythonClient trainer(folder_, kTrainer, {"30"});
  const TimePoint began_at = clock_.now();
  for (PythonClient& client : watching) EXPECT_EQ(client.wait(), 0);
  EXPECT_LT(clock_.now() - began_at, seconds(25)) << "calls do not wait for a stalled client";
  serve(1);
  EXPECT_EQ(trainer.wait(), 0);
  EXPECT_GT(clock_.now() - began_at, seconds(30));
}

TEST_F(TrainerClients, ReadAnyNumberOfRowsPageByPage) {
  start(1);
  {
    std::ofstream rows(folder_ / "metrics.jsonl");
    for (int i = 0; i < 25'000; ++i) rows << json{{"i", i}, {"x", std::string(60, 'x')}}.dump() << "\n";
  }
  PythonClient reading(folder_, R"(
rows = client.metrics()
assert [row["i"] for row in rows] == list(range(25000)), len(rows)
assert [row["i"] for row in client.metrics(after=24990)] == list(range(24990, 25000))
assert [row["i"] for row in client.metrics(last=3)] == [24997, 24998, 24999]
)");
  EXPECT_EQ(reading.wait(), 0);
}

TEST_F(TrainerClients, WaitForALearnerAndSayWhereThereIsNone) {
  PythonClient impatient(folder_, R"(
try:
    echoline.Client(sys.argv[1] + "/nowhere", patience=0.1)
except echoline.Error as error:
    assert error.code == "unavailable" and "learner.trainer: external" in str(error), error
    sys.exit(7)
)");
  start(1);
  EXPECT_EQ(impatient.wait(), 7);
}

}  // namespace
}  // namespace echoline::learner
