#include "provisioner/providers/ssh.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <sstream>

#include "base/config.hpp"
#include "provisioner/providers/command.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "ssh";
constexpr std::string_view kIdPrefix = "ssh:";

struct Host {
  std::string name, address, identity, folder = ".echoline";
  std::optional<std::uint32_t> port;
};

bool plain(std::string_view text) {
  return !text.empty() && text.front() != '-' && text.front() != '.' && text.find("..") == std::string_view::npos &&
         std::all_of(text.begin(), text.end(),
                     [](unsigned char c) { return std::isalnum(c) || c == '.' || c == '_' || c == '-' || c == '/'; });
}

// A label as the name of a file.
std::string file_of(std::string label) {
  std::replace(label.begin(), label.end(), '/', '+');
  return label;
}

std::string label_of(std::string file) {
  std::replace(file.begin(), file.end(), '+', '/');
  return file;
}

// Functions of every script: `alive PID TICKS` says whether the process that was started then is still there.
constexpr const char* kTools = R"sh(
ticks() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | awk '$1 != "Z" { print $20 }'; }
alive() { [ -n "$2" ] && [ "$(ticks "$1")" = "$2" ]; }
)sh";

}  // namespace

struct SshProvider::Impl {
  struct Rented {
    std::string label;
    const Host* host = nullptr;
    bool ended = false;
  };
  std::vector<Host> hosts;
  std::vector<std::string> options;
  Duration limit = std::chrono::minutes(10), watch_every = std::chrono::seconds(15);
  Commands commands;
  std::map<std::string, Rented> rented;  // by id, without its prefix
  std::vector<ProviderEvent> events;
  TimePoint watch_due{};
  std::size_t watching = 0;

  const Host* host_of(std::string_view name) const {
    const auto it = std::find_if(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == name; });
    return it == hosts.end() ? nullptr : &*it;
  }

  std::vector<std::string> ssh(const Host& host, const std::string& command) const {
    std::vector<std::string> argv{
        "ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-o", "ConnectTimeout=15"};
    for (const std::string& option : options) argv.insert(argv.end(), {"-o", option});
    if (host.port) argv.insert(argv.end(), {"-p", std::to_string(*host.port)});
    if (!host.identity.empty()) argv.insert(argv.end(), {"-i", host.identity});
    argv.insert(argv.end(), {"--", host.address, command});
    return argv;
  }

  // The script goes in by stdin, so what is in it is in no list of processes.
  void on_host(const Host& host, const std::string& script, Commands::Done done) {
    commands.run(ssh(host, "sh -s"),
                 fmt::format("{}\nmkdir -p {}/run && cd {} || exit 1\n{}", kTools, shell_quoted(host.folder),
                             shell_quoted(host.folder), script),
                 limit, std::move(done));
  }

  Error error_of(const Host& host, const std::string& what, const CommandEnd& end) const {
    return fail(Code::kUnavailable, kOperation, "{}: {}: {}", host.name, what, end.words());
  }

  void launch(Ticket ticket, const LaunchSpec& spec) {
    const auto refuse = [&](Error error) { events.push_back(StartFailed{ticket, std::move(error), false, false}); };
    const Host* const host = host_of(spec.offer.host);
    if (!host)
      return refuse(fail(Code::kInvalid, kOperation, "offer '{}' is of host '{}', which is not in the file of hosts",
                         spec.offer.id, spec.offer.host));
    if (!plain(spec.label)) return refuse(fail(Code::kInvalid, kOperation, "'{}' cannot be a label", spec.label));
    // A bare name is this very program: what the host needs is what runs here.
    const std::string source = spec.argv.empty() || spec.argv[0].find('/') != std::string::npos
                                   ? (spec.argv.empty() ? "" : spec.argv[0])
                                   : "/proc/self/exe";
    struct stat info {};
    if (source.empty() || ::stat(source.c_str(), &info) != 0 || !S_ISREG(info.st_mode))
      return refuse(
          fail(Code::kInvalid, kOperation, "the program '{}' is not a file", spec.argv.empty() ? "" : spec.argv[0]));
    // A build has its size and time.
    const std::string program =
        fmt::format("program-{}-{}.{}", info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
    on_host(*host, fmt::format("[ -x {0} ] && echo have || echo need\n", program), [=, this](const CommandEnd& end) {
      if (!end.good()) {
        events.push_back(StartFailed{ticket, error_of(*host, "look for the program", end), true, false});
      } else if (end.out.find("have") != std::string::npos) {
        run(ticket, *host, spec, program);
      } else {
        const std::string in = shell_quoted(host->folder + "/" + program);
        commands.run_file(
            ssh(*host, fmt::format("cat > {0}.$$ && chmod 700 {0}.$$ && mv {0}.$$ {0}", in)), source, limit,
            [=, this](const CommandEnd& brought) {
              if (brought.good()) return run(ticket, *host, spec, program);
              events.push_back(StartFailed{ticket, error_of(*host, "bring the program", brought), true, false});
            });
      }
    });
  }

  // The instance notes itself before it becomes the program, so no moment is between both.
  void run(Ticket ticket, const Host& host, const LaunchSpec& spec, const std::string& program) {
    std::vector<std::string> argv = spec.argv;
    argv[0] = "./" + program;
    const std::string file = file_of(spec.label);
    std::string become =
        fmt::format("{0}\necho \"$$ $(ticks $$)\" > noted-{1} && mv noted-{1} run/{1} || exit 1\n", kTools, file);
    become += shell_script(argv, spec.env);
    on_host(host,
            fmt::format("umask 077\ncat > start-{0} <<'echoline-end'\n{1}echoline-end\n"
                        "setsid sh start-{0} < /dev/null > {0}.log 2>&1 &\n"
                        "i=0; while [ ! -s run/{0} ] && [ $i -lt 100 ]; do sleep 0.02; i=$((i+1)); done\n"
                        "rm -f start-{0}\ncat run/{0}\n",
                        file, become),
            [this, ticket, &host, label = spec.label](const CommandEnd& end) {
              std::istringstream words(end.out);
              std::uint64_t pid = 0, ticks = 0;
              if (end.good() && words >> pid >> ticks) return started(ticket, host, label, pid, ticks);
              settle(ticket, host, label, error_of(host, "start", end));
            });
  }

  void started(Ticket ticket, const Host& host, const std::string& label, std::uint64_t pid, std::uint64_t ticks) {
    const std::string id = fmt::format("{}:{}:{}", host.name, pid, ticks);
    rented[id] = {label, &host, false};
    events.push_back(Started{ticket, {std::string(kIdPrefix) + id}, std::nullopt});
  }

  // The connection may have gone after it had started.
  void settle(Ticket ticket, const Host& host, const std::string& label, const Error& error) {
    look(host, [this, ticket, &host, label, error](const std::map<std::string, std::string>& seen,
                                                   const std::optional<Error>& unknown) {
      for (const auto& [id, name] : seen) {
        if (name != label) continue;
        rented[id] = {label, &host, false};
        events.push_back(Started{ticket, {std::string(kIdPrefix) + id}, std::nullopt});
        return;
      }
      events.push_back(StartFailed{ticket, error, true, unknown.has_value()});
    });
  }

  // What runs on a host: labels by id.
  void look(const Host& host,
            std::function<void(const std::map<std::string, std::string>&, const std::optional<Error>&)> done) {
    on_host(host,
            "for f in run/*; do [ -f \"$f\" ] || continue; read -r pid ticks < \"$f\"\n"
            "if alive \"$pid\" \"$ticks\"; then echo \"${f#run/} $pid $ticks\"; else rm -f \"$f\"; fi; done; echo "
            "complete\n",
            [this, &host, done = std::move(done)](const CommandEnd& end) {
              if (!end.good() || end.out.find("complete") == std::string::npos)
                return done({}, error_of(host, "list", end));
              std::map<std::string, std::string> seen;
              std::istringstream lines(end.out);
              for (std::string file, pid, ticks; lines >> file >> pid >> ticks;)
                seen[host.name + ":" + pid + ":" + ticks] = label_of(file);
              done(seen, std::nullopt);
            });
  }

  void end(Ticket ticket, const InstanceId& instance, Duration grace) {
    const std::string id = instance.text.starts_with(kIdPrefix) ? instance.text.substr(kIdPrefix.size()) : "";
    const std::size_t second = id.rfind(':'), first = second == std::string::npos || second == 0
                                                          ? std::string::npos
                                                          : id.rfind(':', second - 1);
    const Host* const host = first == std::string::npos ? nullptr : host_of(id.substr(0, first));
    const auto digits = [](const std::string& s) {
      return !s.empty() && s.size() < 20 && s.find_first_not_of("0123456789") == std::string::npos;
    };
    if (!host || !digits(id.substr(first + 1, second - first - 1)) || !digits(id.substr(second + 1))) {
      events.push_back(StopFailed{
          ticket, instance,
          fail(Code::kInvalid, kOperation,
               "expected an instance id like ssh:host:12:345 of a host in the file, found '{}'", instance.text)});
      return;
    }
    rented.erase(id);
    const auto twentieths = std::chrono::duration_cast<std::chrono::milliseconds>(grace).count() / 50;
    on_host(*host,
            fmt::format("p={} t={}\nif alive $p $t; then kill -TERM -$p; i=0\n"
                        "while alive $p $t && [ $i -lt {} ]; do sleep 0.05; i=$((i+1)); done\n"
                        "alive $p $t && kill -KILL -$p; i=0\n"
                        "while alive $p $t && [ $i -lt 50 ]; do sleep 0.1; i=$((i+1)); done; fi\n"
                        "if alive $p $t; then exit 1; fi; echo stopped\n",
                        id.substr(first + 1, second - first - 1), id.substr(second + 1), twentieths),
            [this, ticket, instance, host](const CommandEnd& end) {
              if (end.good() && end.out.find("stopped") != std::string::npos)
                events.push_back(Stopped{ticket, instance, "stopped"});
              else
                events.push_back(StopFailed{ticket, instance, error_of(*host, "stop", end)});
            });
  }

  void show(Ticket ticket, const std::string& prefix) {
    auto listed = std::make_shared<Listed>();
    listed->ticket = ticket;
    listed->complete = true;
    auto left = std::make_shared<std::size_t>(hosts.size());
    for (const Host& host : hosts)
      look(host, [=, this](const std::map<std::string, std::string>& seen, const std::optional<Error>& unknown) {
        if (unknown) {
          listed->complete = false;
          listed->error = unknown;
        }
        for (const auto& [id, label] : seen)
          if (label.starts_with(prefix))
            listed->instances.push_back({{std::string(kIdPrefix) + id}, label, std::nullopt, "running"});
        if (--*left == 0) events.push_back(*listed);
      });
  }

  void watch(TimePoint now) {
    if (watching > 0 || rented.empty() || now < watch_due) return;
    watch_due = now + watch_every;
    std::set<const Host*> used;
    for (const auto& [id, known] : rented) used.insert(known.host);
    watching = used.size();
    std::set<std::string> before;  // what starts meanwhile is not in the answer
    for (const auto& [id, known] : rented) before.insert(id);
    for (const Host* host : used)
      look(*host, [this, host, before](const std::map<std::string, std::string>& seen,
                                       const std::optional<Error>& unknown) {
        --watching;
        if (unknown) return;
        for (auto& [id, known] : rented) {
          if (known.host != host || known.ended || before.count(id) == 0 || seen.count(id) > 0) continue;
          known.ended = true;
          events.push_back(Exited{{std::string(kIdPrefix) + id}, known.label, "its process has ended", false, false});
        }
      });
  }
};

Result<std::unique_ptr<Provider>> SshProvider::make(const std::filesystem::path& file) {
  ECHO_ASSIGN(ConfigFile config, ConfigFile::load(file));
  auto impl = std::make_unique<Impl>();
  ConfigSection root = config.root();
  std::set<std::string> names;
  for (ConfigSection s : root.sections("hosts", "the hosts")) {
    Host host;
    s.require("name", host.name, "what offers name as their host");
    s.require("address", host.address, "as ssh takes it");
    s.read("port", host.port, {.min = 1u, .max = 65535u}, "of sshd");
    s.read("identity", host.identity, "file of the key");
    s.read("folder", host.folder, "where the program, logs and the list of what runs are kept");
    if (host.identity.starts_with("~/"))
      if (const char* home = std::getenv("HOME")) host.identity = home + host.identity.substr(1);
    if (host.address.starts_with('-')) s.error("address", "cannot begin with '-'");
    if (host.name.find(':') != std::string::npos || !names.insert(host.name).second)
      s.error("name", "expected a name without ':' that no other host has");
    impl->hosts.push_back(std::move(host));
  }
  root.read("options", impl->options, "more options of ssh, each as after -o");
  root.read("limit", impl->limit, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)}, "of one call");
  root.read("watch_every", impl->watch_every, {.min = std::chrono::milliseconds(100), .max = std::chrono::hours(1)},
            "how often hosts are looked at");
  if (impl->hosts.empty()) root.error("hosts", "expected at least one host");
  ECHO_TRY(config.finish());
  return std::unique_ptr<Provider>(new SshProvider(std::move(impl)));
}

SshProvider::SshProvider(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SshProvider::~SshProvider() = default;

void SshProvider::start(Ticket ticket, const LaunchSpec& spec) { impl_->launch(ticket, spec); }
void SshProvider::stop(Ticket ticket, const InstanceId& instance, Duration grace) {
  impl_->end(ticket, instance, grace);
}
void SshProvider::list(Ticket ticket, const std::string& label_prefix) { impl_->show(ticket, label_prefix); }

std::vector<ProviderEvent> SshProvider::poll(TimePoint now) {
  impl_->commands.poll(now);
  impl_->watch(now);
  return std::exchange(impl_->events, {});
}

}  // namespace echoline::provisioner
