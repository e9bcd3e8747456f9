// The way from an empty machine to a worker: the script of provisioner/host_script against a learner's port.
#include "provisioner/host_script.hpp"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <thread>

#include "base/files.hpp"
#include "overlay/relay/relay.hpp"
#include "overlay/uv/node.hpp"
#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

// A learner that serves a bundle whose program prints its arguments, and a machine with a few programs.
class HostScriptTest : public ::testing::Test {
 protected:
  static constexpr const char* kSecret = "in the environment";

  void SetUp() override {
    fs::create_directories(folder.path() / "echoline-worker/bin");
    const fs::path program = folder.path() / "echoline-worker/bin/echoline";
    std::ofstream(program) << "#!/bin/sh\necho \"ran in $0 with $*\"\n";
    fs::permissions(program, fs::perms::owner_all);
    std::ofstream(folder.path() / "echoline-worker/filler") << std::string(3'000'000, 'x');
    bundle = folder.path() / "bundle.tar";
    ASSERT_EQ(std::system(("tar cf " + bundle.string() + " -C " + folder.path().string() + " echoline-worker").c_str()),
              0);
    node = start_learner();
    fs::create_directories(tools());
    for (const char* tool : {"sh", "mkdir", "mktemp", "head", "sha256sum", "tar", "rm", "mv", "cat"}) install(tool);
    fs::create_symlink(*path_of_tool("true"), tools() / "sleep");
  }

  std::unique_ptr<overlay::LearnerNode> start_learner() {
    overlay::LearnerOptions options;
    options.run_id = "run";
    options.bundle = bundle;
    auto started = overlay::LearnerNode::start(std::move(options), {});
    EXPECT_TRUE(started) << started.error().message();
    return std::move(*started);
  }
  std::unique_ptr<overlay::LearnerNode> start_learner(const overlay::relay::Relay& relay,
                                                      const overlay::trust::Secret& key) {
    overlay::LearnerOptions options;
    options.run_id = "run";
    options.bundle = bundle;
    options.network.relay = overlay::to_text(relay.endpoint());
    options.relay_key = key;
    return *overlay::LearnerNode::start(std::move(options), {});
  }

  static std::optional<fs::path> path_of_tool(const std::string& tool) {
    for (const char* place : {"/usr/bin", "/bin"})
      if (fs::exists(fs::path(place) / tool)) return fs::path(place) / tool;
    return std::nullopt;
  }
  fs::path tools() const { return folder.path() / "tools"; }
  bool install(const std::string& tool) {
    const auto found = path_of_tool(tool);
    if (found) fs::create_symlink(*found, tools() / tool);
    return found.has_value();
  }

  std::string token() { return std::string(node->issue_token("o1")->reveal()); }
  provisioner::HostScript script() const {
    const overlay::BundleTerms& terms = *node->bundle();
    return {overlay::to_text(node->endpoint()), terms.sha256, terms.key_pin, terms.authority};
  }

  Outcome run(const provisioner::HostScript& script, const std::string& token, const std::string& more_env = "X=1") {
    const std::vector<std::string> command = provisioner::host_command(script, "", {"worker", "--name", "it's"});
    const fs::path out = folder.path() / "out", err = folder.path() / "err", home = folder.path() / "home";
    fs::create_directories(home);
    const pid_t pid = ::fork();
    if (pid == 0) {
      if (!std::freopen(out.c_str(), "w", stdout) || !std::freopen(err.c_str(), "w", stderr)) ::_exit(126);
      std::vector<char*> argv;
      for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
      argv.push_back(nullptr);
      const std::string env[] = {"PATH=" + tools().string(), "HOME=" + home.string(), "ECHOLINE_TOKEN=" + token,
                                 more_env};
      const char* const environment[] = {env[0].c_str(), env[1].c_str(), env[2].c_str(), env[3].c_str(), nullptr};
      ::execve((tools() / "sh").c_str(), argv.data(), const_cast<char* const*>(environment));
      ::_exit(127);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, *read_file(out), *read_file(err)};
  }

  void remove_home() { fs::remove_all(folder.path() / "home"); }
  std::size_t cached_entries() const {
    std::error_code none;
    std::size_t count = 0;
    for (const auto& entry : fs::directory_iterator(folder.path() / "home/.cache/echoline", none))
      count += entry.exists();
    return count;
  }

  TemporaryFolder folder;
  fs::path bundle;
  std::unique_ptr<overlay::LearnerNode> node;
};

TEST_F(HostScriptTest, TheBundleIsFetchedOnceWithEachToolAndRun) {
  std::size_t tried = 0;
  for (const char* tool : {"curl", "wget", "python3"}) {
    if (!install(tool)) continue;
    ++tried;
    remove_home();
    const Outcome first = run(script(), token());
    EXPECT_EQ(first.status, 0) << tool << first.err;
    EXPECT_THAT(first.out, HasSubstr("with worker --name it's")) << tool;
    fs::remove(tools() / tool);
    EXPECT_EQ(cached_entries(), 1u) << tool;  // nothing is left of the archive
    const Outcome again = run(script(), "");
    EXPECT_EQ(again.out, first.out) << tool << again.err;
  }
  EXPECT_GE(tried, 1u);
}

TEST_F(HostScriptTest, TheBundleOfALearnerBehindARelayIsFetchedThere) {
  overlay::relay::RelayOptions options;
  options.bind = {"127.0.0.1", 0};
  options.key = overlay::trust::Secret(std::string(40, 'k'));
  const auto relay = *overlay::relay::Relay::start(options);
  // A second run, so that the relay needs the name of the first.
  const std::unique_ptr<overlay::LearnerNode> other = start_learner(*relay, options.key);
  node = start_learner(*relay, options.key);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (relay->stats().runs < 2 && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  provisioner::HostScript through_relay = script();
  through_relay.learner = overlay::to_text(relay->endpoint());
  through_relay.name = node->relay_name();
  for (const char* tool : {"wget", "python3"})  // cannot say the name
    if (install(tool)) {
      EXPECT_THAT(run(through_relay, token()).err, HasSubstr("curl cannot be installed")) << tool;
    }
  if (!install("curl")) GTEST_SKIP() << "curl is not installed";
  const Outcome fetched = run(through_relay, token());
  EXPECT_EQ(fetched.status, 0) << fetched.err;
  EXPECT_THAT(fetched.out, HasSubstr("with worker --name it's"));
  provisioner::HostScript unknown = through_relay;
  unknown.name.replace(0, 4, "0000");
  remove_home();
  EXPECT_EQ(run(unknown, token()).status, 1);
}

TEST_F(HostScriptTest, NothingIsRunThatIsNotTheBundle) {
  for (const char* tool : {"curl", "wget", "python3"}) {
    if (!install(tool)) continue;
    provisioner::HostScript other = script();
    other.sha256.replace(0, 8, "00000000");
    const Outcome changed = run(other, token());
    EXPECT_EQ(changed.status, 1) << tool;
    EXPECT_EQ(changed.out, "") << tool;
    EXPECT_THAT(changed.err, HasSubstr("has digest " + node->bundle()->sha256 + ", expected 00000000")) << tool;
    for (const std::string& bad : {std::string("nonsense"), std::string("echo1.AAAA"), std::string()}) {
      const Outcome refused = run(script(), bad);
      EXPECT_EQ(refused.status, 1) << tool;
      EXPECT_EQ(refused.out, "") << tool;
      EXPECT_THAT(refused.err, HasSubstr("refused: ")) << tool;
    }
    // Another learner's port: its key differs, and it would see the token.
    const auto stranger = start_learner();
    provisioner::HostScript astray = script();
    astray.learner = overlay::to_text(stranger->endpoint());
    const Outcome elsewhere = run(astray, token());
    EXPECT_EQ(elsewhere.status, 1) << tool;
    EXPECT_EQ(elsewhere.out, "") << tool;
    EXPECT_THAT(elsewhere.err, Not(HasSubstr("refused"))) << tool;
    EXPECT_THAT(elsewhere.err, HasSubstr("the bundle could not be fetched")) << tool;
    EXPECT_THAT(elsewhere.err, AnyOf(HasSubstr("pinned"), HasSubstr("CERTIFICATE_VERIFY_FAILED"))) << tool;
    EXPECT_EQ(cached_entries(), 0u) << tool;
    fs::remove(tools() / tool);
  }
}

TEST_F(HostScriptTest, ATokenFetchesAFewTimes) {
  if (!install("curl")) GTEST_SKIP() << "curl is not installed";
  const std::string one = token();
  for (int i = 0; i < 3; ++i) {
    remove_home();
    EXPECT_EQ(run(script(), one).status, 0);
  }
  remove_home();
  EXPECT_THAT(run(script(), one).err, HasSubstr("has fetched the bundle 3 times"));
}

// A proxy to the learner that breaks its first `times` connections after `bytes_max` bytes each.
class BreakingProxy {
 public:
  BreakingProxy(std::uint16_t learner_port, std::size_t bytes_max, int times)
      : listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in a = address(0);
    EXPECT_EQ(::bind(listener_.get(), reinterpret_cast<sockaddr*>(&a), sizeof a), 0);
    EXPECT_EQ(::listen(listener_.get(), 8), 0);
    socklen_t length = sizeof a;
    EXPECT_EQ(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&a), &length), 0);
    port = ntohs(a.sin_port);
    thread_ = std::thread([this, learner_port, bytes_max, times] {
      for (int i = 0;; ++i) {
        const Descriptor in(::accept(listener_.get(), nullptr, nullptr));
        if (in.get() < 0) return;
        const Descriptor out(::socket(AF_INET, SOCK_STREAM, 0));
        sockaddr_in learner = address(learner_port);
        if (::connect(out.get(), reinterpret_cast<sockaddr*>(&learner), sizeof learner) != 0) continue;
        std::thread up([&] { pass(in.get(), out.get(), SIZE_MAX); });
        pass(out.get(), in.get(), i < times ? bytes_max : SIZE_MAX);
        ::shutdown(in.get(), SHUT_RDWR);
        ::shutdown(out.get(), SHUT_RDWR);
        up.join();
      }
    });
  }
  ~BreakingProxy() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    thread_.join();
  }
  std::uint16_t port = 0;

 private:
  static sockaddr_in address(std::uint16_t port) {
    sockaddr_in a{};
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons(port);
    return a;
  }
  static void pass(int from, int to, std::size_t bytes_max) {
    char block[65536];
    for (std::size_t passed = 0; passed < bytes_max;) {
      const ssize_t n = ::recv(from, block, std::min(sizeof block, bytes_max - passed), 0);
      if (n <= 0 || ::send(to, block, static_cast<std::size_t>(n), MSG_NOSIGNAL) != n) return;
      passed += static_cast<std::size_t>(n);
    }
  }
  Descriptor listener_;
  std::thread thread_;
};

TEST_F(HostScriptTest, AnInterruptedDownloadIsRepeated) {
  for (const char* tool : {"curl", "wget", "python3"}) {
    if (!install(tool)) continue;
    remove_home();
    provisioner::HostScript far = script();
    {
      const BreakingProxy proxy(node->endpoint().port, 500'000, 2);
      far.learner = fmt::format("127.0.0.1:{}", proxy.port);
      const Outcome late = run(far, token());
      EXPECT_EQ(late.status, 0) << tool << late.err;
      EXPECT_THAT(late.out, HasSubstr("with worker")) << tool;
    }
    remove_home();
    const BreakingProxy proxy(node->endpoint().port, 500'000, 99);
    far.learner = fmt::format("127.0.0.1:{}", proxy.port);
    const Outcome never = run(far, token());
    EXPECT_EQ(never.status, 1) << tool;
    EXPECT_EQ(never.out, "") << tool;
    EXPECT_THAT(never.err, HasSubstr("the bundle could not be fetched")) << tool;
    EXPECT_EQ(cached_entries(), 0u) << tool;
    fs::remove(tools() / tool);
  }
}

TEST_F(HostScriptTest, MissingToolsAreNamed) {
  const Outcome bare = run(script(), token());
  EXPECT_EQ(bare.status, 1);
  EXPECT_THAT(bare.err, HasSubstr("none of curl, wget and python3"));
  if (!install("curl") || !path_of_tool("zstd")) GTEST_SKIP() << "curl or zstd is not installed: the rest is not tried";
  ASSERT_EQ(std::system(("zstd -q -f " + bundle.string() + " -o " + bundle.string() + ".zst").c_str()), 0);
  bundle += ".zst";
  node = start_learner();
  const Outcome packed = run(script(), token());
  EXPECT_EQ(packed.status, 1);
  EXPECT_THAT(packed.err, HasSubstr("it must be a .tar.gz"));
}

// The whole way: a learner rents a machine through commands; the machine fetches the program, joins and works.
TEST(HostScript, AMachineThatARunRentsFetchesTheProgramAndWorks) {
  if (!kWithTorch) GTEST_SKIP() << "the program was built without libtorch";
  const TemporaryFolder folder;
  const fs::path in = folder.path();
  fs::create_directories(in / "echoline-worker/bin");
  std::ofstream(in / "echoline-worker/bin/echoline") << "#!/bin/sh\nexec '" ECHOLINE_PROGRAM "' \"$@\"\n";
  fs::permissions(in / "echoline-worker/bin/echoline", fs::perms::owner_all);
  ASSERT_EQ(std::system(fmt::format("tar czf {0}/bundle.tar.gz -C {0} echoline-worker", in.string()).c_str()), 0);
  std::ofstream(in / "offers.json") << R"({"schema_version": 1, "offers": [
    {"id": "host-script-test", "provider": "exec", "host": "h1", "gpu": "none", "gpu_count": 1, "vram_gb": 8,
     "up_mbit_per_s": 100, "down_mbit_per_s": 100, "reliability": 0.99, "duration_days_max": 9,
     "rollouts_per_s": 9000, "rollouts_source": "profile",
     "gpu_usd_per_hour": 0.1, "storage_usd_per_hour": 0, "upload_usd_per_gb": 0, "download_usd_per_gb": 0}]})";
  std::ofstream(in / "provider.yaml") << fmt::format(R"(
start: [sh, -c, 'cd {0} && cat > "$0.sh" && (HOME={0} setsid sh "$0.sh" > "$0.log" 2>&1 < /dev/null &
  echo "$! $0" > "$0.job"; echo "$!")', "{{name}}"]
stop: [sh, -c, 'kill -TERM "$0" 2>/dev/null; true', "{{instance}}"]
list: [sh, -c, 'cd {0} && for f in *.job; do
  read -r p n < "$f" && kill -0 "$p" 2>/dev/null && echo "$p $n up"; done; true']
)",
                                                     in.string());
  std::ofstream(in / "run.yaml") << R"(
run: {name: far, seed: 7, steps: 2, folder: runs}
model: {preset: tiny-64}
task: {adapter: arithmetic, options: {operations: ["+"], evaluation_problems: 200}}
rollout: {prompts_per_step: 8, group_size: 4, response_tokens_max: 4}
staleness: {budget: 6, publish_every: 1}
learner: {threads: 1}
network: {bind: '::'}
fleet: {offers: offers.json, provider: exec, provider_file: provider.yaml, bundle: bundle.tar.gz, headroom: 0,
        step_time_expected: 1 s, join_timeout: 2 min}
)";
  const Outcome done =
      run_program({"up", (in / "run.yaml").string(), "--json", "--set", "run.folder=" + (in / "runs").string()},
                  std::chrono::seconds(120));
  ASSERT_EQ(done.status, 0) << done.err;
  const auto report = nlohmann::json::parse(done.out);
  EXPECT_EQ(report.at("ended"), "completed");
  EXPECT_EQ(report.at("workers").at(0).at("offer"), "host-script-test");
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
  std::string started;  // the script, as a list of processes would show it
  for (const auto& entry : fs::directory_iterator(in))
    if (entry.path().extension() == ".sh") started = *read_file(entry.path());
  EXPECT_THAT(started.substr(started.find("exec ")), Not(HasSubstr("echo1.")));
  EXPECT_TRUE(fs::exists(in / ".cache/echoline"));
  fs::remove_all("/var/tmp/echoline-host-script-test");
}

}  // namespace
}  // namespace echoline::testing
