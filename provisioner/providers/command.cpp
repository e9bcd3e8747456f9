// Starts the programs of the providers "exec" and "ssh" and collects their output.
#include "provisioner/providers/command.hpp"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "provisioner/providers/registry.hpp"

extern char** environ;

namespace echoline::provisioner {
namespace {

constexpr std::size_t kOutputMax = 4u << 20;  // bytes of each output that are kept
constexpr std::size_t kLineMax = 300;         // bytes of a program's last line in a message
constexpr int kSignalStatus = 128;            // added to a signal's number, as shells do
constexpr std::size_t kRunNameMax = 40;       // characters of a run's name in an instance's name

// Returns a descriptor of a file in memory. Unlike a pipe, it can be filled before a program reads it.
int memory_file() { return ::memfd_create("echoline", MFD_CLOEXEC); }

// Returns the first kOutputMax bytes of the file; the rest is dropped.
std::string read_output(int fd) {
  std::string text;
  char block[65536];
  ::lseek(fd, 0, SEEK_SET);
  while (text.size() < kOutputMax) {
    const ssize_t n = ::read(fd, block, sizeof block);
    if (n <= 0) break;
    text.append(block, static_cast<std::size_t>(n));
  }
  return text;
}

// This process's environment without provider_secrets(), except for `kept`. With `without_credentials`, it has no
// credential at all.
std::vector<std::string> environment_for_commands(const std::vector<std::string>& kept, bool without_credentials) {
  std::vector<std::string> entries;
  const std::vector<std::string> secrets = provider_secrets();
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    const std::string name(text.substr(0, text.find('=')));
    const auto is_in = [&](const std::vector<std::string>& names) {
      return std::find(names.begin(), names.end(), name) != names.end();
    };
    const bool is_removed = without_credentials ? is_credential(name) : is_in(secrets) && !is_in(kept);
    if (!is_removed) entries.emplace_back(text);
  }
  return entries;
}

bool write_and_rewind(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
  return ::lseek(fd, 0, SEEK_SET) == 0;
}

}  // namespace

std::string CommandResult::summary() const {
  const std::string& output = err.empty() ? out : err;
  const std::size_t end = output.find_last_not_of(" \r\n\t");
  std::string line;
  if (end != std::string::npos) {
    const std::size_t newline = output.find_last_of('\n', end);
    const std::size_t begin = newline == std::string::npos ? 0 : newline + 1;
    line = output.substr(begin, std::min(end + 1 - begin, kLineMax));
  }
  return fmt::format("status {}{}{}", status, line.empty() ? "" : ": ", line);
}

CommandRunner::~CommandRunner() {
  for (const Running& running : running_) {
    ::close(running.out_fd);
    ::close(running.err_fd);
  }
}

void CommandRunner::run(const std::vector<std::string>& argv, std::string_view input, Duration limit, Done done) {
  const Descriptor in(memory_file());
  if (in.get() < 0 || !write_and_rewind(in.get(), input)) {
    failed_.emplace_back(CommandResult{.status = -1, .out = "", .err = std::strerror(errno)}, std::move(done));
    return;
  }
  spawn(argv, in.get(), limit, std::move(done));
}

void CommandRunner::run_file(const std::vector<std::string>& argv, const std::string& input_file, Duration limit,
                             Done done) {
  const Descriptor in(::open(input_file.c_str(), O_RDONLY | O_CLOEXEC));
  if (in.get() < 0) {
    const std::string reason = input_file + ": " + std::strerror(errno);
    failed_.emplace_back(CommandResult{.status = -1, .out = "", .err = reason}, std::move(done));
    return;
  }
  spawn(argv, in.get(), limit, std::move(done));
}

void CommandRunner::spawn(const std::vector<std::string>& argv, int input_fd, Duration limit, Done done) {
  Running running;
  running.out_fd = memory_file();
  running.err_fd = memory_file();
  running.limit = limit;
  std::vector<std::string> words = argv;
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  std::vector<std::string> environment = environment_for_commands(kept_secrets_, without_credentials_);
  std::vector<char*> environment_pointers;
  for (std::string& entry : environment) environment_pointers.push_back(entry.data());
  environment_pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input_fd, 0);
  posix_spawn_file_actions_adddup2(&actions, running.out_fd, 1);
  posix_spawn_file_actions_adddup2(&actions, running.err_fd, 2);
  posix_spawn_file_actions_addclosefrom_np(&actions, 3);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  // The program gets its own process group, so that the signal at the time limit also reaches its children. It gets the
  // default signal handling, because this process blocks or ignores some signals.
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  sigset_t none, defaults;
  sigemptyset(&none);
  sigemptyset(&defaults);
  for (const int signal_number : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGCHLD}) sigaddset(&defaults, signal_number);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &defaults);
  pid_t pid = -1;
  const int error = words.empty() ? EINVAL
                                  : ::posix_spawnp(&pid, words[0].c_str(), &actions, &attributes, pointers.data(),
                                                   environment_pointers.data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    ::close(running.out_fd);
    ::close(running.err_fd);
    const std::string reason = (words.empty() ? "" : words[0]) + ": " + std::strerror(error);
    failed_.emplace_back(CommandResult{.status = -1, .out = "", .err = reason}, std::move(done));
    return;
  }
  running.pid = pid;
  running.done = std::move(done);
  running_.push_back(std::move(running));
}

void CommandRunner::poll(TimePoint now) {
  auto ended = std::exchange(failed_, {});  // results with the callbacks to call
  for (std::size_t i = 0; i < running_.size();) {
    Running& running = running_[i];
    int status = 0;
    const pid_t ended_pid = ::waitpid(running.pid, &status, WNOHANG);
    if (ended_pid == 0 || (ended_pid < 0 && errno == EINTR)) {
      // run() has no clock, so the limit is counted from the first poll().
      if (!running.kill_at) running.kill_at = now + running.limit;
      if (now >= *running.kill_at) ::kill(-running.pid, SIGKILL);  // the whole process group
      ++i;
      continue;
    }
    CommandResult result;
    if (ended_pid < 0)
      result.status = -1;  // how it ended is unknown
    else
      result.status = WIFEXITED(status) ? WEXITSTATUS(status) : kSignalStatus + WTERMSIG(status);
    result.out = read_output(running.out_fd);
    result.err = read_output(running.err_fd);
    if (running.kill_at && now >= *running.kill_at)
      result.err += fmt::format("\nthe command exceeded its time limit of {} and was killed", to_text(running.limit));
    ::close(running.out_fd);
    ::close(running.err_fd);
    ended.emplace_back(std::move(result), std::move(running.done));
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  // Calls `done` last, because it may start another program.
  for (const auto& [result, done] : ended) done(result);
}

void read_times(ConfigSection& section, CommandTimes& times) {
  section.read("limit", times.limit, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)}, "of one command");
  section.read("watch_every", times.watch_every, {.min = std::chrono::milliseconds(100), .max = std::chrono::hours(1)},
               "interval between listings of the instances");
}

Result<std::unique_ptr<Provider>> make_from_file(
    std::string_view provider, const std::filesystem::path& file,
    Result<std::unique_ptr<Provider>> (*make)(const std::filesystem::path& file)) {
  if (file.empty())
    return fail(Code::kInvalid, "make provider", "'{}' needs a file: set fleet.provider_file", provider);
  return make(file);
}

// A label is "<run>.<mark>/<row>" (Ledger::label_prefix() and the id of the ledger's row). The mark and the row
// identify the instance, so only the run's name is shortened.
std::string instance_name_of_label(std::string_view label) {
  const std::size_t dot = label.rfind('.');
  std::string out(label.substr(0, std::min(dot, kRunNameMax)));
  if (dot != std::string_view::npos) out += label.substr(dot);
  for (char& c : out) {
    const auto byte = static_cast<unsigned char>(c);
    c = std::isalnum(byte) ? static_cast<char>(std::tolower(byte)) : '-';
  }
  // Overwrites a first character that is no letter, so that the name does not grow.
  if (!out.empty() && !std::isalpha(static_cast<unsigned char>(out.front()))) out.front() = 'x';
  return out;
}

std::string id_after_prefix(std::string_view prefix, const InstanceId& instance) {
  return instance.text.starts_with(prefix) ? instance.text.substr(prefix.size()) : "";
}

std::string shell_quoted(std::string_view word) {
  std::string out = "'";
  for (const char c : word) {
    if (c == '\'')
      out += "'\\''";
    else
      out += c;
  }
  return out + "'";
}

std::string shell_script(const std::vector<std::string>& argv,
                         const std::vector<std::pair<std::string, std::string>>& env) {
  std::string script = "#!/bin/sh\n";
  for (const auto& [name, value] : env) script += fmt::format("export {}={}\n", name, shell_quoted(value));
  script += "exec";
  for (const std::string& word : argv) script += " " + shell_quoted(word);
  return script + "\n";
}

}  // namespace echoline::provisioner
