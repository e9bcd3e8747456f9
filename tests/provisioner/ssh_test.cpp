// The provider of hosts, against a real sshd on loopback.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "base/files.hpp"
#include "provider_driver.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

using testing::HasSubstr;

std::uint16_t free_port() {
  const Descriptor s(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof a;
  EXPECT_EQ(::bind(s.get(), reinterpret_cast<sockaddr*>(&a), length), 0);
  EXPECT_EQ(::getsockname(s.get(), reinterpret_cast<sockaddr*>(&a), &length), 0);
  return ntohs(a.sin_port);
}

bool connects(std::uint16_t port) {
  const Descriptor s(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  a.sin_port = htons(port);
  return ::connect(s.get(), reinterpret_cast<sockaddr*>(&a), sizeof a) == 0;
}

class SshTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = std::filesystem::temp_directory_path() / fmt::format("echoline-ssh-{}", getpid());
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    std::filesystem::permissions(folder, std::filesystem::perms::owner_all);
    const std::string in = "cd " + folder.string() + " && ";
    ASSERT_EQ(std::system((in + "ssh-keygen -q -t ed25519 -N '' -f host && ssh-keygen -q -t ed25519 -N '' -f key && "
                                "cp key.pub authorized && chmod 600 authorized")
                              .c_str()),
              0);
    if (geteuid() == 0) std::filesystem::create_directories("/run/sshd");  // where it separates privileges
    port = free_port();
    std::ofstream(folder / "sshd_config") << fmt::format(
        "Port {0}\nListenAddress 127.0.0.1\nHostKey {1}/host\nAuthorizedKeysFile {1}/authorized\nStrictModes "
        "no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\nPidFile none\n",
        port, folder.string());
    server = fork();
    if (server == 0) {
      execl("/usr/sbin/sshd", "/usr/sbin/sshd", "-D", "-E", (folder / "sshd.log").c_str(), "-f",
            (folder / "sshd_config").c_str(), nullptr);
      _exit(127);
    }
    for (int i = 0; i < 1000 && !connects(port); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ASSERT_TRUE(connects(port));
    program = folder / "worker";
    std::ofstream(program)
        << "#!/bin/sh\ntrap 'echo bye; exit 0' TERM\necho \"$TOKEN $1\"\nwhile :; do sleep 0.02; done\n";
    std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  }
  void TearDown() override {
    if (server > 0) {
      kill(server, SIGTERM);
      waitpid(server, nullptr, 0);
    }
    std::filesystem::remove_all(folder);
  }
  std::unique_ptr<Provider> make(const std::string& more_hosts = "") {
    std::ofstream(folder / "hosts.yaml") << fmt::format(
        "hosts:\n  - {{name: here, address: 127.0.0.1, port: {0}, identity: {1}/key, folder: {1}/remote}}\n{2}"
        "options: [StrictHostKeyChecking=no, UserKnownHostsFile={1}/known, LogLevel=ERROR, "
        "KexAlgorithms=curve25519-sha256]\nwatch_every: 200 ms\n",
        port, folder.string(), more_hosts);
    auto made = make_provider("ssh", {.file = folder / "hosts.yaml"});
    EXPECT_TRUE(made) << made.error().message();
    return std::move(*made);
  }
  LaunchSpec spec(const std::string& label = "run.1234abcd/1") const {
    LaunchSpec s;
    s.offer.id = "o";
    s.offer.host = "here";
    s.label = label;
    s.argv = {program.string(), "it's"};
    s.env = {{"TOKEN", "se'cret"}};
    return s;
  }
  std::string log(const std::string& name) {
    for (int i = 0; i < 500; ++i) {
      const auto text = read_file(folder / "remote" / name);
      if (text && !text->empty()) return *text;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return "";
  }

  std::filesystem::path remote_program() const {
    for (const auto& entry : std::filesystem::directory_iterator(folder / "remote"))
      if (entry.path().filename().string().starts_with("program-") && entry.path().extension() != ".so")
        return entry.path();
    return {};
  }

  std::filesystem::path folder, program;
  std::uint16_t port = 0;
  pid_t server = -1;
};

TEST_F(SshTest, BringsTheProgramStartsWatchesAndStopsIt) {
  InstanceId first;
  std::ofstream(folder / "worker_torch.so") << "its module";
  {
    const auto provider = make();
    ProviderDriver driver(*provider);
    provider->start(1, spec());
    const auto started = driver.next<Started>();
    ASSERT_TRUE(started);
    first = started->instance;
    EXPECT_THAT(first.text, testing::MatchesRegex("ssh:here:[0-9]+:[0-9]+"));
    EXPECT_EQ(log("run.1234abcd+1.log"), "se'cret it's\n");
    const auto brought = std::filesystem::last_write_time(remote_program());
    const auto module = read_file(remote_program().string() + "_torch.so");
    EXPECT_EQ(module ? *module : module.error().message(), "its module") << "where the program looks for it";
    provider->start(2, spec("run.1234abcd/2"));
    const auto second = driver.next<Started>();
    ASSERT_TRUE(second);
    EXPECT_EQ(std::filesystem::last_write_time(remote_program()), brought);  // once is enough
    // The end of an instance by itself is reported.
    kill(std::stoi(second->instance.text.substr(9)), SIGKILL);
    const auto exited = driver.next<Exited>();
    ASSERT_TRUE(exited);
    EXPECT_EQ(exited->instance, second->instance);
    EXPECT_EQ(exited->label, "run.1234abcd/2");
  }
  // A later program finds the running instance by its label.
  const auto provider = make();
  ProviderDriver driver(*provider);
  auto listed = driver.listed("run.1234abcd/");
  ASSERT_TRUE(listed && listed->complete);
  ASSERT_EQ(listed->instances.size(), 1u);
  EXPECT_EQ(listed->instances[0].instance, first);
  EXPECT_EQ(listed->instances[0].label, "run.1234abcd/1");
  for (int i = 0; i < 2; ++i) {  // twice does no harm
    provider->stop(3, first, std::chrono::seconds(5));
    ASSERT_TRUE(driver.next<Stopped>());
  }
  EXPECT_THAT(log("run.1234abcd+1.log"), HasSubstr("bye"));
  EXPECT_TRUE(driver.listed("")->instances.empty());
}

TEST_F(SshTest, AnInstalledProgramIsNotCopied) {
  const auto provider = make();
  ProviderDriver driver(*provider);
  LaunchSpec there = spec();
  there.argv = {"sh", "-c", "echo \"$TOKEN\" \"$@\"\nwhile :; do sleep 0.02; done\n", "echoline", "it's"};
  there.program_on_instance = true;
  provider->start(1, there);
  const auto started = driver.next<Started>();
  ASSERT_TRUE(started);
  EXPECT_EQ(log("run.1234abcd+1.log"), "se'cret it's\n");
  EXPECT_TRUE(remote_program().empty());
  provider->stop(2, started->instance, std::chrono::seconds(5));
  EXPECT_TRUE(driver.next<Stopped>());
}

TEST_F(SshTest, AHostWithoutAnAnswerIsNotListedAsEmpty) {
  const auto provider = make(fmt::format("  - {{name: away, address: 127.0.0.1, port: {}}}\n", free_port()));
  ProviderDriver driver(*provider, 50);
  provider->start(1, spec());
  ASSERT_TRUE(driver.next<Started>());
  const auto listed = driver.listed("run.1234abcd/");
  ASSERT_TRUE(listed);
  EXPECT_FALSE(listed->complete);
  EXPECT_THAT(listed->error->message(), HasSubstr("away"));
  EXPECT_EQ(listed->instances.size(), 1u);
  provider->stop(2, {"ssh:away:12:34"}, {});
  EXPECT_TRUE(driver.next<StopFailed>());
  LaunchSpec far = spec("run.1234abcd/2");
  far.offer.host = "away";
  provider->start(3, far);
  const auto failed = driver.next<StartFailed>();
  ASSERT_TRUE(failed);
  EXPECT_FALSE(failed->perhaps_rented);
  far.offer.host = "nowhere";
  provider->start(4, far);
  EXPECT_EQ(driver.next<StartFailed>()->error.code, Code::kInvalid);
  for (const char* id : {"ssh:here:1", "ssh:here:1;rm:3", "vast:1", "ssh::1:2"}) {
    provider->stop(5, {id}, {});
    EXPECT_EQ(driver.next<StopFailed>()->error.code, Code::kInvalid) << id;
  }
  provider->stop(6, listed->instances[0].instance, std::chrono::seconds(5));
  EXPECT_TRUE(driver.next<Stopped>());
}

// A connection that fails or breaks is retried before the host is blamed.
TEST_F(SshTest, ABrokenConnectionIsTriedAgain) {
  std::filesystem::create_directories(folder / "bin");
  const std::string path = std::getenv("PATH");
  const auto ssh_that = [&](const std::string& does) {
    std::ofstream(folder / "bin/ssh") << fmt::format(
        "#!/bin/sh\necho x >> {0}/calls; n=$(grep -c x {0}/calls)\n{1}\nexec /usr/bin/ssh \"$@\"\n", folder.string(),
        does);
    std::filesystem::permissions(folder / "bin/ssh", std::filesystem::perms::owner_all);
    std::filesystem::remove(folder / "calls");
  };
  setenv("PATH", (folder / "bin").string().append(":").append(path).c_str(), 1);
  const auto provider = make();
  ProviderDriver driver(*provider, 50);
  // The calls look for the program, copy it, start it, and look whether it has started.
  ssh_that("case $n in 1|2|4|6|7) echo 'Connection reset by peer' >&2; exit 255;; esac");
  provider->start(1, spec());
  const auto started = driver.next<Started>();
  ASSERT_TRUE(started);
  // The connection breaks after the instance has started: the provider finds it, and starts no second one.
  EXPECT_GE(read_file(folder / "calls")->size(), 2 * 9u);
  ssh_that(
      "in=$(cat)\ncase $in in *setsid*) echo \"$in\" | /usr/bin/ssh \"$@\" > /dev/null; exit 255;; esac\n"
      "echo \"$in\" | /usr/bin/ssh \"$@\"; exit $?");
  provider->start(2, spec("run.1234abcd/2"));
  const auto second = driver.next<Started>();
  ASSERT_TRUE(second);
  EXPECT_EQ(driver.listed("")->instances.size(), 2u);
  ssh_that("echo 'Connection refused' >&2; exit 255");
  provider->start(3, spec("run.1234abcd/3"));
  auto failed = driver.next<StartFailed>();
  ASSERT_TRUE(failed);
  EXPECT_TRUE(failed->retryable);
  EXPECT_GE(read_file(folder / "calls")->size(), 2 * 4u);
  setenv("PATH", path.c_str(), 1);
  for (const auto& s : {started, second}) {
    provider->stop(4, s->instance, std::chrono::seconds(5));
    EXPECT_TRUE(driver.next<Stopped>());
  }
}

// A person has to fix keys: nothing is retried, and the message names the command to use.
TEST_F(SshTest, WrongKeysAreReported) {
  const auto refused = [&](Provider& provider) {
    ProviderDriver driver(provider);
    provider.start(1, spec());
    const auto failed = driver.next<StartFailed>();
    EXPECT_TRUE(failed && !failed->retryable && !failed->perhaps_rented);
    return failed ? failed->error.message() : "";
  };
  const std::string in = "cd " + folder.string() + " && ";
  ASSERT_EQ(std::system((in + "ssh-keygen -q -t ed25519 -N '' -f other && mv key right && mv other key").c_str()), 0);
  const std::string key = refused(*make());
  EXPECT_THAT(key, HasSubstr("here: look for the program: status 255: "));
  EXPECT_THAT(key, HasSubstr("Permission denied (publickey"));
  EXPECT_THAT(key, HasSubstr(fmt::format("`ssh -p {} -i {}/key 127.0.0.1 true` must work", port, folder.string())));
  ASSERT_EQ(std::system((in + "mv right key").c_str()), 0);
  // The host has another key than it had.
  std::ofstream(folder / "known") << fmt::format("[127.0.0.1]:{} {}", port, *read_file(folder / "key.pub"));
  auto hosts = *read_file([&] { return (void)make(), folder / "hosts.yaml"; }());
  hosts.replace(hosts.find("StrictHostKeyChecking=no"), 24, "StrictHostKeyChecking=yes");
  std::ofstream(folder / "hosts.yaml") << hosts;
  EXPECT_THAT(refused(**make_provider("ssh", {.file = folder / "hosts.yaml"})),
              HasSubstr("Host key verification failed"));
  std::filesystem::remove(folder / "key");
  const auto missing = make_provider("ssh", {.file = folder / "hosts.yaml"});
  ASSERT_FALSE(missing);
  EXPECT_THAT(missing.error().message(), HasSubstr("hosts.yaml:2:"));
  EXPECT_THAT(missing.error().message(), HasSubstr("/key: No such file or directory"));
}

}  // namespace
}  // namespace echoline::provisioner
