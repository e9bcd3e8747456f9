// The provider "ssh": existing hosts, reached by the system's ssh.
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <sstream>

#include "base/config.hpp"
#include "base/program_module.hpp"
#include "provisioner/providers/command.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "ssh";
constexpr std::string_view kIdPrefix = "ssh:";
constexpr int kTriesMax = 4;                               // of a command whose connection fails
constexpr Duration kPauseFirst = std::chrono::seconds(2);  // before the second try; doubles with each further one
constexpr int kSshFailed = 255;                            // the exit status of ssh if ssh itself fails

struct Host {
  std::string name, address;
  std::string identity;              // file of the key; "": ssh's default
  std::string folder = ".echoline";  // of the program, logs and records of running instances, on the host
  std::optional<std::uint32_t> port;
};

// Whether the text is safe as a path of a remote shell, without quotes.
bool is_plain_path(std::string_view text) {
  return !text.empty() && text.front() != '-' && text.front() != '.' && text.find("..") == std::string_view::npos &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return std::isalnum(c) || c == '.' || c == '_' || c == '-' || c == '/'; });
}

// The name of the file that records the instance with this label on its host; a '/' cannot be in it.
std::string file_of(std::string label) {
  std::replace(label.begin(), label.end(), '/', '+');
  return label;
}

// The inverse of file_of(). A label has no '+' (is_plain_path()).
std::string label_of(std::string file) {
  std::replace(file.begin(), file.end(), '+', '/');
  return file;
}

// Whether ssh itself failed, not the command on the host.
bool is_connection_failure(const CommandResult& result) { return result.status == kSshFailed; }

// Whether the user must mend keys before ssh can connect, so that retries are useless.
bool is_refused(const CommandResult& result) {
  return is_connection_failure(result) && (result.err.find("Permission denied") != std::string::npos ||
                                           result.err.find("Host key verification failed") != std::string::npos);
}

// Functions for every script. `ticks PID` prints the process's start time in clock ticks: field 22 of /proc/PID/stat,
// the 20th after the name. `alive PID TICKS` tells whether the process with this PID and start time still runs.
constexpr const char* kShellFunctions = R"sh(
ticks() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'; }
alive() { [ -n "$2" ] && [ "$(ticks "$1")" = "$2" ]; }
)sh";

// Reads the hosts from YAML (configs/providers/README.md); an offer's `host` names one. start() copies the program,
// argv[0], to the host if necessary and runs it in its own session, which outlives the connection. The command and its
// environment, with the join token, are passed by stdin. For each instance, a file on its host (run/LABEL) records pid
// and start time for list() and watch_hosts(). A listing is complete when every host has answered. An instance is
// reported as ended only when its host says so; an unreachable host reports nothing.
struct SshProvider final : Provider {
  struct Rented {
    std::string label;
    const Host* host = nullptr;
    bool ended = false;  // Exited was reported
  };
  std::vector<Host> hosts;  // fixed after make(), so callbacks keep references
  std::vector<std::string> ssh_options;
  CommandTimes times{.limit = std::chrono::minutes(10), .watch_every = std::chrono::seconds(15)};
  CommandRunner commands;
  std::map<std::string, Rented> rented;  // by HOST:PID:TICKS, the id without prefix
  std::vector<ProviderEvent> events;
  TimePoint now{}, next_watch_at{};
  std::size_t hosts_to_answer = 0;  // hosts that have not answered the present listings of watch_hosts()
  std::vector<std::pair<TimePoint, std::function<void()>>> delayed;  // functions to call, each with the earliest time

  const Host* host_of(std::string_view name) const {
    const auto it = std::find_if(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == name; });
    return it == hosts.end() ? nullptr : &*it;
  }

  // The ssh command that runs `command` on the host.
  std::vector<std::string> ssh_argv(const Host& host, const std::string& command) const {
    std::vector<std::string> argv{
        "ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ConnectTimeout=15"};
    for (const std::string& option : ssh_options) argv.insert(argv.end(), {"-o", option});
    if (host.port) argv.insert(argv.end(), {"-p", std::to_string(*host.port)});
    if (!host.identity.empty()) argv.insert(argv.end(), {"-i", host.identity});
    argv.insert(argv.end(), {"--", host.address, command});
    return argv;
  }

  // Repeats a command whose connection failed. The command may have run before, so it must be idempotent.
  void run_with_retries(const std::function<void(CommandRunner::Done)>& run, const CommandRunner::Done& done,
                        int tries = 1) {
    run([=, this](const CommandResult& result) {
      if (!is_connection_failure(result) || is_refused(result) || tries == kTriesMax) return done(result);
      retry_later(tries, [=, this] { run_with_retries(run, done, tries + 1); });
    });
  }

  void retry_later(int tries, std::function<void()> work) {
    delayed.emplace_back(now + kPauseFirst * (1 << (tries - 1)), std::move(work));
  }

  // Passes the script by stdin, so that process lists do not show it.
  void run_on_host(const Host& host, const std::string& script, CommandRunner::Done done) {
    commands.run(ssh_argv(host, "sh -s"),
                 fmt::format("{}\nmkdir -p {}/run && cd {} || exit 1\n{}", kShellFunctions, shell_quoted(host.folder),
                             shell_quoted(host.folder), script),
                 times.limit, std::move(done));
  }

  Error error_of(const Host& host, const std::string& what, const CommandResult& result) const {
    if (is_refused(result))
      return fail(Code::kInvalid, kOperation, "{}: {}: {}; `ssh {}{}{} true` must work without a prompt first",
                  host.name, what, result.summary(), host.port ? fmt::format("-p {} ", *host.port) : "",
                  host.identity.empty() ? "" : fmt::format("-i {} ", host.identity), host.address);
    return fail(Code::kUnavailable, kOperation, "{}: {}: {}", host.name, what, result.summary());
  }

  void push_start_failed(Ticket ticket, Error error, bool retryable, bool perhaps_rented) {
    events.push_back(StartFailed{
        .ticket = ticket, .error = std::move(error), .retryable = retryable, .perhaps_rented = perhaps_rented});
  }

  void start(Ticket ticket, const LaunchSpec& spec) override {
    const auto refuse = [&](Error error) {
      push_start_failed(ticket, std::move(error), /*retryable=*/false, /*perhaps_rented=*/false);
    };
    const Host* const host = host_of(spec.offer.host);
    if (!host)
      return refuse(fail(Code::kInvalid, kOperation, "offer '{}' is of host '{}', which is not in the file of hosts",
                         spec.offer.id, spec.offer.host));
    if (!is_plain_path(spec.label))
      return refuse(fail(Code::kInvalid, kOperation, "'{}' cannot be a label", spec.label));
    if (spec.program_on_instance) return run_program(ticket, *host, spec, spec.argv.at(0));
    std::string source = spec.argv.empty() ? "" : spec.argv[0];
    const bool is_bare_name = !spec.argv.empty() && source.find('/') == std::string::npos;
    if (is_bare_name) source = "/proc/self/exe";  // a bare name means this program itself
    struct stat info {};
    if (source.empty() || ::stat(source.c_str(), &info) != 0 || !S_ISREG(info.st_mode))
      return refuse(
          fail(Code::kInvalid, kOperation, "the program '{}' is not a file", spec.argv.empty() ? "" : spec.argv[0]));
    // Size and time identify a build.
    const std::string program =
        fmt::format("program-{}-{}.{}", info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
    const auto look_for_program = [=, this](CommandRunner::Done done) {
      run_on_host(*host, fmt::format("[ -x {0} ] && echo have || echo need\n", program), std::move(done));
    };
    run_with_retries(look_for_program, [=, this](const CommandResult& result) {
      if (!result.good()) {
        push_start_failed(ticket, error_of(*host, "look for the program", result), /*retryable=*/!is_refused(result),
                          /*perhaps_rented=*/false);
      } else if (result.out.find("have") != std::string::npos) {
        run_program(ticket, *host, spec, program);
      } else {
        // Copies the program after its module, so that a host that has the program also has the module.
        std::vector<std::pair<std::string, std::string>> files;
        std::error_code ec;
        const std::filesystem::path own_path = std::filesystem::read_symlink(source, ec);
        if (const auto module = find_module(ec ? std::filesystem::path(source) : own_path, kTorchModule))
          files.emplace_back(module->string(), module_paths(program, kTorchModule).front().string());
        files.emplace_back(source, program);
        copy_and_run(ticket, *host, spec, program, std::move(files));
      }
    });
  }

  // Copies `files` (pairs of local path and name on the host) one after the other, then runs the program. A partly
  // copied file has another name.
  void copy_and_run(Ticket ticket, const Host& host, const LaunchSpec& spec, const std::string& program,
                    std::vector<std::pair<std::string, std::string>> files) {
    if (files.empty()) return run_program(ticket, host, spec, program);
    const std::string source = files.front().first,
                      remote_path = shell_quoted(host.folder + "/" + files.front().second);
    files.erase(files.begin());
    const auto copy = [=, this, &host](CommandRunner::Done done) {
      commands.run_file(ssh_argv(host, fmt::format("cat > {0}.$$ && chmod 700 {0}.$$ && mv {0}.$$ {0}", remote_path)),
                        source, times.limit, std::move(done));
    };
    run_with_retries(copy, [=, this, &host](const CommandResult& copied) {
      if (copied.good()) return copy_and_run(ticket, host, spec, program, files);
      push_start_failed(ticket, error_of(host, "bring the program", copied), /*retryable=*/true,
                        /*perhaps_rented=*/false);
    });
  }

  // The script records the instance before it becomes the program, so there is no gap between the two. The command
  // waits up to 2 s for the record, and prints it.
  void run_program(Ticket ticket, const Host& host, const LaunchSpec& spec, const std::string& program, int tries = 1) {
    std::vector<std::string> argv = spec.argv;
    argv[0] = spec.program_on_instance ? program : "./" + program;
    const std::string file = file_of(spec.label);
    std::string launch_script = fmt::format(
        "{0}\necho \"$$ $(ticks $$)\" > noted-{1} && mv noted-{1} run/{1} || exit 1\n", kShellFunctions, file);
    launch_script += shell_script(argv, spec.env);
    std::string script_end = "echoline-end";  // a line that the script does not have
    while (launch_script.find("\n" + script_end + "\n") != std::string::npos) script_end += '-';
    run_on_host(host,
                fmt::format("umask 077\ncat > start-{0} <<'{2}'\n{1}{2}\n"
                            "setsid sh start-{0} < /dev/null > {0}.log 2>&1 &\n"
                            "i=0; while [ ! -s run/{0} ] && [ $i -lt 100 ]; do sleep 0.02; i=$((i+1)); done\n"
                            "rm -f start-{0}\ncat run/{0}\n",
                            file, launch_script, script_end),
                [=, this, &host](const CommandResult& result) {
                  std::istringstream words(result.out);
                  std::uint64_t pid = 0, ticks = 0;
                  if (result.good() && words >> pid >> ticks)
                    return on_started(ticket, host, spec.label, fmt::format("{}:{}:{}", host.name, pid, ticks));
                  const bool may_retry = is_connection_failure(result) && !is_refused(result) && tries < kTriesMax;
                  const auto retry_if_none = [=, this, &host] {
                    if (may_retry)
                      retry_later(tries, [=, this, &host] { run_program(ticket, host, spec, program, tries + 1); });
                    return may_retry;
                  };
                  search_started(ticket, host, spec.label, error_of(host, "start", result),
                                 /*retryable=*/!is_refused(result), retry_if_none);
                });
  }

  static InstanceId instance_of(const std::string& id) { return {std::string(kIdPrefix) + id}; }

  void on_started(Ticket ticket, const Host& host, const std::string& label, const std::string& id) {
    rented[id] = {.label = label, .host = &host, .ended = false};
    events.push_back(Started{.ticket = ticket, .instance = instance_of(id), .usd_per_hour = std::nullopt});
  }

  // Looks for an instance that may run although its start failed. If it certainly does not run, calls `retry_if_none`,
  // which may start it again and returns whether it does.
  void search_started(Ticket ticket, const Host& host, const std::string& label, const Error& error, bool retryable,
                      std::function<bool()> retry_if_none) {
    list_host(host, kWithRetries, [=, this, &host](const LabelsById& seen, const std::optional<Error>& list_error) {
      for (const auto& [id, seen_label] : seen)
        if (seen_label == label) return on_started(ticket, host, label, id);
      if (list_error || !retry_if_none()) push_start_failed(ticket, error, retryable, list_error.has_value());
    });
  }

  // Lists the instances on a host. `done` receives their labels by id, or an error.
  using LabelsById = std::map<std::string, std::string>;
  static constexpr bool kWithRetries = true, kOnce = false;
  void list_host(const Host& host, bool with_retries,
                 const std::function<void(const LabelsById&, const std::optional<Error>&)>& done) {
    const auto list = [this, &host](CommandRunner::Done command_done) {
      run_on_host(
          host,
          "for f in run/*; do [ -f \"$f\" ] || continue; read -r pid ticks < \"$f\"\n"
          "if alive \"$pid\" \"$ticks\"; then echo \"${f#run/} $pid $ticks\"; else rm -f \"$f\"; fi; done; echo "
          "complete\n",
          std::move(command_done));
    };
    const auto read = [this, &host, done](const CommandResult& result) {
      if (!result.good() || result.out.find("complete") == std::string::npos)
        return done({}, error_of(host, "list", result));
      LabelsById seen;
      std::istringstream lines(result.out);
      for (std::string file, pid, ticks; lines >> file >> pid >> ticks;)
        seen[host.name + ":" + pid + ":" + ticks] = label_of(file);
      done(seen, std::nullopt);
    };
    with_retries ? run_with_retries(list, read) : list(read);
  }

  void stop(Ticket ticket, const InstanceId& instance, Duration grace) override {
    const std::string id = id_after_prefix(kIdPrefix, instance);  // HOST:PID:TICKS
    const std::size_t last_colon = id.rfind(':');
    const bool has_pid = last_colon != std::string::npos && last_colon > 0;
    const std::size_t first_colon = has_pid ? id.rfind(':', last_colon - 1) : std::string::npos;
    const bool is_complete = first_colon != std::string::npos;
    const Host* const host = is_complete ? host_of(id.substr(0, first_colon)) : nullptr;
    const std::string pid = is_complete ? id.substr(first_colon + 1, last_colon - first_colon - 1) : "";
    const std::string ticks = is_complete ? id.substr(last_colon + 1) : "";
    const auto is_number = [](const std::string& text) {
      constexpr std::size_t kDigitsMax = 19;  // fits 64 bits
      return !text.empty() && text.size() <= kDigitsMax && text.find_first_not_of("0123456789") == std::string::npos;
    };
    if (!host || !is_number(pid) || !is_number(ticks)) {
      events.push_back(StopFailed{
          .ticket = ticket,
          .instance = instance,
          .error =
              fail(Code::kInvalid, kOperation,
                   "expected an instance id like ssh:host:12:345 of a host in the file, found '{}'", instance.text)});
      return;
    }
    rented.erase(id);
    constexpr std::chrono::milliseconds kSleep{50};  // `sleep 0.05` in the script
    const auto grace_sleeps = std::chrono::duration_cast<std::chrono::milliseconds>(grace) / kSleep;
    // SIGTERM, SIGKILL after the grace, then up to 5 s for the end.
    run_on_host(*host,
                fmt::format("p={} t={}\nif alive $p $t; then kill -TERM -$p; i=0\n"
                            "while alive $p $t && [ $i -lt {} ]; do sleep 0.05; i=$((i+1)); done\n"
                            "alive $p $t && kill -KILL -$p; i=0\n"
                            "while alive $p $t && [ $i -lt 50 ]; do sleep 0.1; i=$((i+1)); done; fi\n"
                            "if alive $p $t; then exit 1; fi; echo stopped\n",
                            pid, ticks, grace_sleeps),
                [this, ticket, instance, host](const CommandResult& result) {
                  if (result.good() && result.out.find("stopped") != std::string::npos)
                    events.push_back(Stopped{.ticket = ticket, .instance = instance, .how = "stopped"});
                  else
                    events.push_back(
                        StopFailed{.ticket = ticket, .instance = instance, .error = error_of(*host, "stop", result)});
                });
  }

  void list(Ticket ticket, const std::string& prefix) override {
    auto listed = std::make_shared<Listed>();
    listed->ticket = ticket;
    listed->complete = true;
    auto unanswered_hosts = std::make_shared<std::size_t>(hosts.size());
    for (const Host& host : hosts)
      list_host(host, kOnce, [=, this](const LabelsById& seen, const std::optional<Error>& list_error) {
        if (list_error) {
          listed->complete = false;
          listed->error = list_error;
        }
        for (const auto& [id, label] : seen)
          if (label.starts_with(prefix))
            listed->instances.push_back({.instance = instance_of(id), .label = label, .usd_per_hour = std::nullopt});
        --*unanswered_hosts;
        if (*unanswered_hosts == 0) events.push_back(*listed);
      });
  }

  // Lists the used hosts at intervals and reports the instances that have ended.
  void watch_hosts() {
    if (hosts_to_answer > 0 || rented.empty() || now < next_watch_at) return;
    next_watch_at = now + times.watch_every;
    std::set<const Host*> used_hosts;
    for (const auto& [id, known] : rented) used_hosts.insert(known.host);
    hosts_to_answer = used_hosts.size();
    std::set<std::string> expected_ids;  // an instance that starts later may be missing in the answer
    for (const auto& [id, known] : rented) expected_ids.insert(id);
    for (const Host* host : used_hosts)
      list_host(*host, kOnce,
                [this, host, expected_ids](const LabelsById& seen, const std::optional<Error>& list_error) {
                  --hosts_to_answer;
                  if (list_error) return;
                  for (auto& [id, known] : rented) {
                    if (known.host != host || known.ended || !expected_ids.contains(id) || seen.contains(id)) continue;
                    known.ended = true;
                    events.push_back(
                        Exited{.instance = instance_of(id), .label = known.label, .why = "its process has ended"});
                  }
                });
  }

  std::vector<ProviderEvent> poll(TimePoint time) override {
    now = time;
    commands.poll(now);
    for (std::size_t i = 0; i < delayed.size();) {
      if (delayed[i].first > now) {
        ++i;
        continue;
      }
      const auto work = std::move(delayed[i].second);
      delayed.erase(delayed.begin() + static_cast<std::ptrdiff_t>(i));
      work();
    }
    watch_hosts();
    return std::exchange(events, {});
  }
};

Result<std::unique_ptr<Provider>> make(const std::filesystem::path& file) {
  ECHO_ASSIGN(ConfigFile config, ConfigFile::load(file));
  auto provider = std::make_unique<SshProvider>();
  provider->commands.remove_all_credentials();  // ssh's own configuration may send variables to hosts (SendEnv)
  ConfigSection root = config.root();
  std::set<std::string> names;
  for (ConfigSection host_section : root.sections("hosts", "the hosts")) {
    Host host;
    host_section.require("name", host.name, "the host's name in offers");
    host_section.require("address", host.address, "as ssh takes it");
    host_section.read("port", host.port, {.min = 1u, .max = 65535u}, "of sshd");
    host_section.read("identity", host.identity, "file of the key");
    host_section.read("folder", host.folder, "folder of the program, logs and records of running instances");
    if (host.identity.starts_with("~/"))
      if (const char* home = std::getenv("HOME")) host.identity = home + host.identity.substr(1);
    if (!host.identity.empty() && ::access(host.identity.c_str(), R_OK) != 0)
      host_section.error("identity", fmt::format("cannot read {}: {}", host.identity, std::strerror(errno)));
    if (host.address.starts_with('-')) host_section.error("address", "cannot begin with '-'");
    if (host.name.find(':') != std::string::npos || !names.insert(host.name).second)
      host_section.error("name", "expected a name without ':' that no other host has");
    provider->hosts.push_back(std::move(host));
  }
  root.read("options", provider->ssh_options, "more options of ssh, each passed after -o");
  read_times(root, provider->times);
  if (provider->hosts.empty()) root.error("hosts", "expected at least one host");
  ECHO_TRY(config.finish());
  return std::unique_ptr<Provider>(std::move(provider));
}

}  // namespace

const ProviderKind& ssh_kind() {
  static const ProviderKind kind{
      .name = "ssh",
      .meaning = "your own hosts",
      .make = [](const ProviderOptions& options) { return make_from_file("ssh", options.file, make); },
      .is_bare_host = true};
  return kind;
}

}  // namespace echoline::provisioner
