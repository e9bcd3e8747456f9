// Real processes: start, exit, stop, kill, groups, and nothing left behind.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "base/files.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

pid_t pid_of(const InstanceId& id) { return std::stoi(id.text.substr(id.text.find(':') + 1)); }

// Whether the process is alive and no zombie.
bool is_running(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string stat;
  std::getline(file, stat);
  const auto name_end = stat.rfind(')');
  return name_end != std::string::npos && stat[name_end + 2] != 'Z';
}

// Waits for real processes, bounded.
bool eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (std::chrono::steady_clock::now() < deadline) {
    if (condition()) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return condition();
}

std::unique_ptr<Provider> local(const std::filesystem::path& log_folder) {
  return std::move(*make_provider("local", {.log_folder = log_folder}));
}

class LocalProviderTest : public testing::Test {
 protected:
  void SetUp() override {
    folder = std::filesystem::temp_directory_path() / fmt::format("echoline-provider-{}", getpid());
    std::filesystem::remove_all(folder);
  }
  void TearDown() override { std::filesystem::remove_all(folder); }

  static LaunchSpec shell(const std::string& script, const std::string& label = "run/1") {
    LaunchSpec r;
    r.label = label;
    r.argv = {"/bin/sh", "-c", script};
    return r;
  }
  template <class Event>
  Event only(Provider& provider) {
    const auto events = provider.poll(clock.now());
    EXPECT_EQ(events.size(), 1u);
    EXPECT_TRUE(!events.empty() && std::holds_alternative<Event>(events.front()));
    return events.empty() ? Event{} : std::get<Event>(events.front());
  }
  InstanceId started(Provider& provider, const LaunchSpec& spec) {
    provider.start(++ticket, spec);
    std::optional<InstanceId> id;
    for (const ProviderEvent& event : provider.poll(clock.now())) {
      const auto* s = std::get_if<Started>(&event);
      if (s && s->ticket == ticket)
        id = s->instance;
      else
        other_events.push_back(event);
    }
    EXPECT_TRUE(id) << "not started";
    return id.value_or(InstanceId{});
  }
  Error refused(Provider& provider, const LaunchSpec& spec) {
    provider.start(++ticket, spec);
    const auto failed = only<StartFailed>(provider);
    EXPECT_EQ(failed.ticket, ticket);
    EXPECT_FALSE(failed.perhaps_rented);
    return failed.error;
  }
  Error not_stopped(Provider& provider, const std::string& id) {
    provider.stop(++ticket, {id}, {});
    return only<StopFailed>(provider).error;
  }
  std::vector<InstanceInfo> listed(Provider& provider, const std::string& prefix = "run/") {
    provider.list(++ticket, prefix);
    std::optional<Listed> answer;
    for (const ProviderEvent& event : provider.poll(clock.now())) {
      if (const auto* l = std::get_if<Listed>(&event))
        answer = *l;
      else
        other_events.push_back(event);
    }
    EXPECT_TRUE(answer && answer->complete);
    return answer ? answer->instances : std::vector<InstanceInfo>{};
  }
  template <class Event>
  std::vector<Event> all(Provider& provider, std::size_t count = 1) {
    std::vector<Event> all;
    eventually([&] {
      for (auto& e : std::exchange(other_events, {}))
        if (auto* event = std::get_if<Event>(&e)) all.push_back(*event);
      for (auto& e : provider.poll(clock.now()))
        if (auto* event = std::get_if<Event>(&e)) all.push_back(*event);
      return all.size() >= count;
    });
    return all;
  }
  std::vector<Exited> exits(Provider& provider, std::size_t count = 1) { return all<Exited>(provider, count); }
  std::vector<Stopped> stops(Provider& provider) { return all<Stopped>(provider); }
  std::string log(const std::string& name = "run.1.log") { return read_file(folder / name).value(); }
  pid_t number_in_log() {
    pid_t pid = 0;
    eventually([&] {
      const auto text = read_file(folder / "run.1.log");
      return text && text->ends_with('\n') && (std::istringstream(*text) >> pid);
    });
    return pid;
  }

  std::filesystem::path folder;
  ManualClock clock;
  Ticket ticket = 0;
  std::vector<ProviderEvent> other_events;  // of other kinds than those waited for
};

TEST_F(LocalProviderTest, ReportsTheExitStatusOnceAndKeepsTheOutput) {
  const auto provider_made = local(folder);
  Provider& provider = *provider_made;
  const auto id = started(provider, shell("echo out; echo err >&2; echo \"$MODE $HOME\"; exit 3"));
  EXPECT_THAT(id.text, testing::MatchesRegex("local:[0-9]+:[0-9]+"));
  const auto gone = exits(provider);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].instance, id);
  EXPECT_EQ(gone[0].label, "run/1");
  EXPECT_EQ(gone[0].why, "exited with status 3");
  EXPECT_FALSE(gone[0].outbid || gone[0].still_rented);
  EXPECT_TRUE(provider.poll(clock.now()).empty());
  EXPECT_THAT(log(), HasSubstr("out\nerr\n"));
}

TEST_F(LocalProviderTest, PassesTheEnvironmentWithTheRequestOverIt) {
  setenv("ECHOLINE_TEST_KEPT", "kept", 1);
  setenv("ECHOLINE_TEST_SET", "old", 1);
  setenv("VAST_API_KEY", "the key of the account", 1);
  const auto provider_made = local(folder);
  Provider& provider = *provider_made;
  auto request = shell("echo $ECHOLINE_TEST_KEPT $ECHOLINE_TEST_SET $VAST_API_KEY");
  request.env = {{"ECHOLINE_TEST_SET", "new value"}};
  started(provider, request);
  exits(provider);
  EXPECT_EQ(log(), "kept new value\n");  // and no key
  unsetenv("VAST_API_KEY");
}

TEST_F(LocalProviderTest, ReportsTheSignalOfACrash) {
  const auto provider_made = local(folder);
  Provider& provider = *provider_made;
  started(provider, shell("kill -SEGV $$"));
  const auto gone = exits(provider);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].why, "killed by signal 11");
}

TEST_F(LocalProviderTest, StopAsksFirst) {
  const auto provider_made = local(folder);
  Provider& provider = *provider_made;
  const auto id = started(provider, shell("trap 'echo bye; exit 0' TERM; echo $$; while :; do sleep 0.01; done"));
  ASSERT_GT(number_in_log(), 0);  // the trap is set
  provider.stop(77, id, std::chrono::seconds(5));
  const auto gone = stops(provider);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].ticket, 77);
  EXPECT_EQ(gone[0].how, "exited with status 0");
  EXPECT_THAT(log(), HasSubstr("bye"));
  provider.stop(78, id, std::chrono::seconds(5));
  EXPECT_EQ(only<Stopped>(provider).ticket, 78);  // already gone
}

TEST_F(LocalProviderTest, StopKillsAfterTheGraceAndNotBefore) {
  const auto provider_made = local(folder);
  Provider& provider = *provider_made;
  const auto id = started(provider, shell("trap '' TERM; echo $$; while :; do sleep 0.01; done"));
  ASSERT_EQ(number_in_log(), pid_of(id));
  provider.stop(7, id, std::chrono::seconds(5));
  EXPECT_TRUE(provider.poll(clock.now()).empty());
  clock.advance(milliseconds(4999));
  std::this_thread::sleep_for(milliseconds(50));
  EXPECT_TRUE(provider.poll(clock.now()).empty());
  EXPECT_TRUE(is_running(pid_of(id)));
  provider.stop(8, id, std::chrono::hours(1));  // a second stop does not prolong the grace
  clock.advance(milliseconds(1));
  const auto gone = all<Stopped>(provider, 2);  // and is answered
  ASSERT_EQ(gone.size(), 2u);
  EXPECT_EQ(gone[0].how, "killed by signal 9");
  EXPECT_EQ(gone[1].ticket, 8);
}

TEST_F(LocalProviderTest, RemainingProcessesOfTheGroupAreKilled) {
  const auto provider_made = local(folder);
  Provider& provider = *provider_made;
  started(provider, shell("trap '' TERM; (trap '' TERM; while :; do sleep 0.01; done) & echo $!; exit 0"));
  const pid_t grandchild = number_in_log();
  ASSERT_GT(grandchild, 0);
  ASSERT_EQ(exits(provider).size(), 1u);
  EXPECT_TRUE(eventually([&] { return !is_running(grandchild); }));
}

TEST_F(LocalProviderTest, TheDestructorLeavesNothingRunning) {
  std::vector<pid_t> pids;
  {
    const auto provider_made = local(folder);
    Provider& provider = *provider_made;
    for (int i = 0; i < 4; ++i)
      pids.push_back(pid_of(started(provider, shell("exec sleep 100", fmt::format("run/{}", i)))));
    for (const pid_t pid : pids) EXPECT_TRUE(is_running(pid));
  }
  for (const pid_t pid : pids) EXPECT_EQ(kill(pid, 0), -1);
}

TEST_F(LocalProviderTest, BadRequestsAreRefused) {
  const auto provider_made = local(folder);
  Provider& provider = *provider_made;
  LaunchSpec r = shell("true");
  r.argv = {};
  EXPECT_EQ(refused(provider, r).code, Code::kInvalid);
  r.argv = {"sh"};
  EXPECT_EQ(refused(provider, r).code, Code::kInvalid);
  for (const char* label : {"", "../x", "a b", "a\nb"}) {
    EXPECT_EQ(refused(provider, shell("true", label)).code, Code::kInvalid) << label;
  }
  r = shell("true");
  r.env = {{"A=B", "c"}};
  EXPECT_EQ(refused(provider, r).code, Code::kInvalid);
  r = shell("true");
  r.argv = {"/nonexistent/program"};
  const auto missing = refused(provider, r);
  EXPECT_EQ(missing.code, Code::kIo);
  EXPECT_THAT(missing.detail, HasSubstr("/nonexistent/program: No such file"));
  EXPECT_EQ(not_stopped(provider, "vast:12").code, Code::kInvalid);
  EXPECT_EQ(not_stopped(provider, "local:12").code, Code::kInvalid);
  EXPECT_EQ(not_stopped(provider, "local:-1:5").code, Code::kInvalid);
}

TEST_F(LocalProviderTest, ARecycledPidIsNeverSignalled) {
  // This process's id with another start time: the process must survive.
  const auto provider_made = local(folder);
  Provider& provider = *provider_made;
  provider.stop(1, {fmt::format("local:{}:1", getpid())}, {});
  EXPECT_EQ(only<Stopped>(provider).how, "gone");
}

TEST_F(LocalProviderTest, AListingFindsProcessesByTheirLabelOnly) {
  const std::string run = fmt::format("listed-{}/", getpid());
  const auto first_made = local(folder);
  Provider& first = *first_made;
  const auto id = started(first, shell("exec sleep 100", run + "1"));
  started(first, shell("exec sleep 100", fmt::format("other-{}/1", getpid())));
  started(first, shell("true", run + "2"));
  ASSERT_EQ(exits(first).size(), 1u);
  const auto second_made = local(folder);
  Provider& second = *second_made;
  const auto found = listed(second, run);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].instance, id);
  EXPECT_EQ(found[0].label, run + "1");
  second.stop(5, found[0].instance, std::chrono::seconds(5));
  ASSERT_EQ(exits(first).size(), 1u);
  EXPECT_EQ(stops(second).size(), 1u);
  EXPECT_TRUE(listed(second, run).empty());
}

TEST_F(LocalProviderTest, AnInstanceOfAnEarlierRunCanBeStopped) {
  const auto first_made = local(folder);
  Provider& first = *first_made;
  const auto id = started(first, shell("trap '' TERM; echo $$; while :; do sleep 0.01; done"));
  ASSERT_GT(number_in_log(), 0);
  const auto second_made = local(folder);
  Provider& second = *second_made;
  second.stop(9, id, std::chrono::seconds(1));
  EXPECT_TRUE(second.poll(clock.now()).empty());
  clock.advance(std::chrono::seconds(1));
  second.poll(clock.now());
  const auto gone = exits(first);
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].why, "killed by signal 9");
  const auto seen = stops(second);
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0].how, "gone");
}

// Starts a worker in a child process that is then killed; `how` starts it there.
void expect_worker_dies_with_its_program(const std::filesystem::path& folder,
                                         const std::function<void(Provider&)>& how) {
  const pid_t program = fork();
  if (program == 0) {
    const auto provider_made = local(folder);
    Provider& provider = *provider_made;
    how(provider);
    while (true) pause();
  }
  pid_t worker = 0;
  ASSERT_TRUE(eventually([&] {
    const auto text = read_file(folder / "run.1.log");
    return text && text->ends_with('\n') && (std::istringstream(*text) >> worker);
  }));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_TRUE(is_running(worker));  // also when the thread that called start() has ended
  kill(program, SIGKILL);
  waitpid(program, nullptr, 0);
  EXPECT_TRUE(eventually([&] { return !is_running(worker); }));
}

TEST_F(LocalProviderTest, AWorkerDiesWithAProgramThatIsKilled) {
  expect_worker_dies_with_its_program(folder, [](Provider& provider) {
    provider.start(1, shell("trap '' TERM HUP; echo $$; while :; do sleep 0.01; done"));
  });
}

TEST_F(LocalProviderTest, AWorkerOutlivesTheThreadThatStartedItButNotTheProgram) {
  expect_worker_dies_with_its_program(folder, [](Provider& provider) {
    std::thread([&] { provider.start(1, shell("echo $$; while :; do sleep 0.01; done")); }).join();
  });
}

TEST_F(LocalProviderTest, NoDescriptorsLeakEitherWay) {
  const auto open_files = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto before = open_files();
  int inheritable[2];
  ASSERT_EQ(pipe(inheritable), 0);  // without CLOEXEC
  {
    const auto provider_made = local(folder);
    Provider& provider = *provider_made;
    started(provider, shell("ls /proc/self/fd | wc -l"));
    ASSERT_EQ(exits(provider).size(), 1u);
    for (int i = 0; i < 20; ++i) started(provider, shell("true", fmt::format("run/x{}", i)));
    EXPECT_EQ(exits(provider, 20).size(), 20u);
  }
  close(inheritable[0]);
  close(inheritable[1]);
  EXPECT_EQ(open_files(), before);
  EXPECT_EQ(std::stoi(log()), 4);  // stdin, stdout, stderr, and the folder that ls reads
}

}  // namespace
}  // namespace echoline::provisioner
