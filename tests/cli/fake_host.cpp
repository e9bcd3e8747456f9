// Starts, watches and kills the processes of the test's containers.
#include "tests/cli/fake_host.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/cli/program.hpp"

namespace echoline::testing {

using nlohmann::json;

namespace {

constexpr auto kBootTime = std::chrono::milliseconds(500);

// Stands for the image's program. Containers on one machine share its ports and folders, so each gets its own port
// instead of 7070, as the service maps ports, and its own folder.
constexpr const char* kImageProgram = R"sh(#!/bin/sh
n=$#
while [ $n -gt 0 ]; do
  word=$1; shift; n=$((n - 1))
  case $word in
    7070) word=$HOST_PORT ;;
    /var/tmp/echoline-*) word=$PWD/worker ;;
  esac
  set -- "$@" "$word"
done
exec @PROGRAM@ "$@" --rollouts-per-s @RATE@
)sh";

}  // namespace

std::vector<ProcessState> read_processes() {
  std::vector<ProcessState> found;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream stat(entry.path() / "stat");
    std::string line;
    if (!std::getline(stat, line) || line.rfind(") ") == std::string::npos) continue;
    std::istringstream fields(line.substr(line.rfind(") ") + 2));
    ProcessState process;
    pid_t group = 0;
    process.pid = std::stoi(name);
    fields >> process.state >> process.parent >> group >> process.session;
    if (process.state != 'Z' && process.state != 'X') found.push_back(process);
  }
  return found;
}

void signal_session(pid_t session, int signal) {
  // Again, because a process may have forked meanwhile.
  for (int round = 0; round < 3; ++round)
    for (const ProcessState& process : read_processes())
      if (process.session == session) ::kill(process.pid, signal);
}

FakeHost::FakeHost(provisioner::VastServer& server, std::filesystem::path folder, std::string program,
                   double rollouts_per_s, Log log)
    : server_(server), folder_(std::move(folder)), log_(std::move(log)) {
  std::filesystem::create_directories(folder_ / "bin");
  std::string text = kImageProgram;
  text.replace(text.find("@PROGRAM@"), 9, program);
  text.replace(text.find("@RATE@"), 6, fmt::format("{}", rollouts_per_s));
  std::ofstream(folder_ / "bin" / "echoline") << text;
  std::filesystem::permissions(folder_ / "bin" / "echoline", std::filesystem::perms(0755));
  server_.on_rental(
      [this](const provisioner::VastInstance& instance, const std::string& body) {
        const std::lock_guard lock(mutex_);
        Container container;
        container.id = instance.id;
        container.label = instance.label;
        container.request = body;
        container.created_at = std::chrono::steady_clock::now();
        created_.push_back(std::move(container));
      },
      [this](std::int64_t id) {
        const std::lock_guard lock(mutex_);
        destroyed_.push_back(id);
      });
}

FakeHost::~FakeHost() {
  server_.on_rental({}, {});
  for (auto& [id, container] : containers_) {
    if (container.session <= 0) continue;
    signal_session(container.session, SIGKILL);
    if (!container.has_exited) ::waitpid(container.session, nullptr, 0);
  }
}

std::filesystem::path FakeHost::folder_of(const Container& container) const {
  return folder_ / std::to_string(container.id);
}

void FakeHost::start(Container& container) {
  const std::filesystem::path home = folder_of(container);
  std::filesystem::create_directories(home);
  const json body = json::parse(container.request);
  const std::string port = std::to_string(free_port()), program = body.at("onstart");
  std::vector<std::string> words{program};
  for (const json& word : body.at("args")) words.push_back(word);
  std::vector<std::string> variables{"PATH=" + (folder_ / "bin").string() + ":/usr/bin:/bin",
                                     "HOME=" + home.string(),
                                     "HOST_PORT=" + port,
                                     "PUBLIC_IPADDR=127.0.0.1",
                                     fmt::format("VAST_TCP_PORT_{}={}", port, port),
                                     fmt::format("CONTAINER_ID={}", container.id),
                                     "CONTAINER_API_KEY=" + provisioner::VastServer::key_of(container.id)};
  for (const auto& [name, value] : body.at("env").items())
    if (!name.starts_with("-p ")) variables.push_back(name + "=" + value.get<std::string>());
  std::vector<char*> argv, environment;
  for (std::string& word : words) argv.push_back(word.data());
  for (std::string& variable : variables) environment.push_back(variable.data());
  argv.push_back(nullptr);
  environment.push_back(nullptr);
  const std::string log = home / "log";
  container.session = ::fork();
  if (container.session == 0) {
    ::setsid();
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::chdir(home.c_str()) != 0) ::_exit(127);
    ::dup2(::open("/dev/null", O_RDONLY), STDIN_FILENO);
    ::dup2(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644), STDOUT_FILENO);
    ::dup2(STDOUT_FILENO, STDERR_FILENO);
    ::execve(argv[0], argv.data(), environment.data());
    ::_exit(127);
  }
  server_.change(container.id, [](provisioner::VastInstance& i) { i.actual_status = "running"; });
  log_(fmt::format("container {} ({}) runs as session {}", container.id, container.label, container.session));
}

void FakeHost::note_join(Container& container) const {
  if (container.had_joined) return;
  std::ifstream in(folder_of(container) / "log");
  std::stringstream text;
  text << in.rdbuf();
  container.had_joined = text.str().find("joined as worker") != std::string::npos;
  if (container.had_joined) log_(fmt::format("the worker of {} has joined", container.id));
}

void FakeHost::update(const std::vector<ProcessState>& processes) {
  std::vector<std::int64_t> destroyed;
  {
    const std::lock_guard lock(mutex_);
    for (Container& container : created_) containers_[container.id] = container;
    created_.clear();
    destroyed.swap(destroyed_);
  }
  for (const std::int64_t id : destroyed) {
    Container& container = containers_[id];
    container.is_destroyed = true;
    if (container.session > 0 && !container.has_exited) {
      signal_session(container.session, SIGKILL);
      ::waitpid(container.session, nullptr, 0);
      container.has_exited = true;
    }
    log_(fmt::format("{} is destroyed", id));
  }
  for (auto& [id, container] : containers_) {
    if (container.is_destroyed || container.has_exited) continue;
    if (container.session < 0) {
      if (std::chrono::steady_clock::now() - container.created_at >= kBootTime) start(container);
      continue;
    }
    int status = 0;
    if (::waitpid(container.session, &status, WNOHANG) == container.session) {
      signal_session(container.session, SIGKILL);
      container.has_exited = true;
      container.supervisor.reset(), container.worker.reset(), container.engine.reset();
      server_.change(id, [](provisioner::VastInstance& i) { i.actual_status = "exited"; });
      log_(fmt::format("container {} has exited ({})", id,
                       WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status))
                                           : fmt::format("status {}", WEXITSTATUS(status))));
      continue;
    }
    container.supervisor.reset(), container.worker.reset(), container.engine.reset();
    for (const ProcessState& process : processes) {
      if (process.session != container.session) continue;
      if (process.pid == container.session) container.supervisor = process;
      if (process.parent == container.session) container.worker = process;
    }
    if (container.worker)
      for (const ProcessState& process : processes)
        if (process.parent == container.worker->pid) container.engine = process;
    container.had_worker = container.had_worker || container.worker.has_value();
    note_join(container);
  }
}

}  // namespace echoline::testing
