// Measures the relay beside haproxy in TCP mode (Debian package haproxy), in turns. Bytes pass from a learner to its
// workers: their rate, the CPU time of the passing process, and the time until a new connection has its first byte.
// Everything is on this machine, and each of the two is one process with one thread.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/log.hpp"
#include "overlay/relay/relay.hpp"
#include "tests/bench/measure.hpp"
#include "tests/overlay/folder.hpp"
#include "tests/overlay/relay_peer.hpp"

namespace echoline::bench {
namespace {

namespace relay = overlay::relay;
using overlay::Endpoint;
using relay::Wire;
namespace trust = overlay::trust;

constexpr std::size_t kPieceBytes = 1024 * 1024;
constexpr const char* kAddress = "127.0.0.1";

struct Settings {
  std::string haproxy = "/usr/sbin/haproxy";
  std::size_t mib = 1024;
  std::size_t connections = 4;
  int repeats = 9;
  int dials = 200;
};

trust::SigningKey run_key() { return trust::SigningKey(trust::blake3(std::as_bytes(std::span("bench", 5)))); }
overlay::trust::Secret relay_key() { return overlay::trust::Secret(std::string(relay::kKeyBytesMin, 'k')); }

// A child process that passes bytes on.
class Passer {
 public:
  explicit Passer(const std::function<void()>& body) : pid_(::fork()) {
    ECHO_CHECK(pid_ >= 0);
    if (pid_ != 0) return;
    body();
    ::_exit(1);
  }
  ~Passer() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  Passer(const Passer&) = delete;
  Passer& operator=(const Passer&) = delete;
  double cpu_seconds() const {
    clockid_t clock{};
    timespec spent{};
    ECHO_CHECK(::clock_getcpuclockid(pid_, &clock) == 0 && ::clock_gettime(clock, &spent) == 0);
    return static_cast<double>(spent.tv_sec) + 1e-9 * static_cast<double>(spent.tv_nsec);
  }

 private:
  pid_t pid_;
};

std::uint16_t port_of(int fd) {
  sockaddr_in address{};
  socklen_t size = sizeof address;
  ECHO_CHECK(::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  return ntohs(address.sin_port);
}

int listen_on_free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  ECHO_CHECK(::inet_pton(AF_INET, kAddress, &address.sin_addr) == 1 &&
             ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 && ::listen(fd, 128) == 0);
  return fd;
}

void send_all(int fd, std::size_t bytes) {
  static const std::string piece(kPieceBytes, 'p');
  while (bytes > 0) {
    const ssize_t sent = ::send(fd, piece.data(), std::min(bytes, piece.size()), MSG_NOSIGNAL);
    ECHO_CHECK(sent > 0, "the passing process has closed a connection");
    bytes -= static_cast<std::size_t>(sent);
  }
}

// Takes bytes without copying them, so that the receiver costs little beside the passing process.
void discard(int fd, std::size_t bytes) {
  static char piece[kPieceBytes];
  while (bytes > 0) {
    const ssize_t taken = ::recv(fd, piece, std::min(bytes, kPieceBytes), MSG_TRUNC);
    ECHO_CHECK(taken > 0, "the passing process has closed a connection");
    bytes -= static_cast<std::size_t>(taken);
  }
}

// The learner's end: `next` waits for a worker's connection, behind the relay or behind haproxy.
struct Way {
  std::string name;
  Endpoint entrance;
  std::function<int()> next;
  const Passer* passer;
  std::vector<double> gb_per_s, cpu_s_per_gb, dial_ms;
};

void measure_bytes(Way& way, const Settings& settings, const std::string& hello, bool counts) {
  const std::size_t each = settings.mib * kPieceBytes / settings.connections;
  std::vector<Wire> workers;
  std::vector<int> learners;
  for (std::size_t i = 0; i < settings.connections; ++i) {
    workers.emplace_back(way.entrance);
    ECHO_CHECK(workers.back().send(hello));
    learners.push_back(way.next());
    discard(learners.back(), hello.size());
  }
  const double cpu_before = way.passer->cpu_seconds();
  const double wall = seconds_of([&] {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < settings.connections; ++i) {
      threads.emplace_back([&, i] { send_all(learners[i], each); });
      threads.emplace_back([&, i] { discard(workers[i].fd(), each); });
    }
    for (std::thread& thread : threads) thread.join();
  });
  const double gb = static_cast<double>(each * settings.connections) / 1e9;
  for (const int fd : learners) ::close(fd);
  if (!counts) return;
  way.gb_per_s.push_back(gb / wall);
  way.cpu_s_per_gb.push_back((way.passer->cpu_seconds() - cpu_before) / gb);
}

// From dialling to the first byte of the learner's answer.
void measure_dials(Way& way, const Settings& settings, const std::string& hello) {
  for (int i = 0; i < settings.dials; ++i)
    way.dial_ms.push_back(1e3 * seconds_of([&] {
                            Wire worker(way.entrance);
                            ECHO_CHECK(worker.send(hello));
                            const int learner = way.next();
                            discard(learner, hello.size());
                            send_all(learner, 1);
                            discard(worker.fd(), 1);
                            ::close(learner);
                          }));
}

struct HaproxyKind {
  const char* name;
  const char* global;  // lines of these sections
  const char* defaults;
};
constexpr HaproxyKind kHaproxyKinds[] = {
    {"haproxy", "", ""},
    {"haproxy, splice-auto", "", "  option splice-auto\n"},
    {"haproxy, 256 KiB", "  tune.bufsize 262144\n", ""},  // the relay's size of buffers
};

std::string haproxy_configuration(std::uint16_t port, std::uint16_t learner, const HaproxyKind& kind) {
  return fmt::format(
      "global\n  nbthread 1\n{}  maxconn 1000\ndefaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n"
      "  timeout server 60s\n{}frontend in\n  bind {}:{}\n  default_backend out\nbackend out\n  server learner {}:{}\n",
      kind.global, kind.defaults, kAddress, port, kAddress, learner);
}

void wait_until_it_listens(std::uint16_t port) {
  for (int attempt = 0; attempt < 500; ++attempt) {
    const Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    ECHO_CHECK(::inet_pton(AF_INET, kAddress, &address.sin_addr) == 1);
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ECHO_CHECK(false, "haproxy does not listen on port {}", port);
}

int measure(const Settings& settings) {
  const std::string hello = relay::client_hello(run_key());
  // Processes are started before this one has threads.
  int ports[2];
  ECHO_CHECK(::pipe2(ports, O_CLOEXEC) == 0);
  const Passer relay_process([&] {
    log::configure(log::Level::kError, "relay");
    relay::RelayOptions options;
    options.bind = {kAddress, 0};
    options.key = relay_key();
    const auto started = relay::Relay::start(std::move(options));
    ECHO_CHECK(started.has_value(), "{}", started.error().message());
    const std::uint16_t port = (*started)->endpoint().port;
    ECHO_CHECK(::write(ports[1], &port, sizeof port) == sizeof port);
    for (;;) ::pause();
  });
  std::uint16_t relay_port = 0;
  ECHO_CHECK(::read(ports[0], &relay_port, sizeof relay_port) == sizeof relay_port);

  relay::TestLink link({kAddress, relay_port}, relay_key(), run_key());
  ECHO_CHECK(link.is_accepted());
  std::vector<Way> ways;
  ways.push_back({.name = "echoline relay",
                  .entrance = {kAddress, relay_port},
                  .next =
                      [&] {
                        const auto ticket = link.next_ticket();
                        ECHO_CHECK(ticket.has_value());
                        return ::dup(link.meet(*ticket).fd());
                      },
                  .passer = &relay_process,
                  .gb_per_s = {},
                  .cpu_s_per_gb = {},
                  .dial_ms = {}});

  const overlay::TemporaryFolder folder;
  std::vector<std::unique_ptr<Passer>> proxies;
  if (std::filesystem::exists(settings.haproxy)) {
    for (const HaproxyKind& kind : kHaproxyKinds) {
      const int listener = listen_on_free_port(), probe = listen_on_free_port();
      const std::uint16_t port = port_of(probe);
      ::close(probe);  // haproxy takes this port
      const auto file = folder.path() / fmt::format("haproxy-{}.cfg", proxies.size());
      std::ofstream(file) << haproxy_configuration(port, port_of(listener), kind);
      proxies.push_back(std::make_unique<Passer>(
          [&] { ::execl(settings.haproxy.c_str(), "haproxy", "-db", "-q", "-f", file.c_str(), nullptr); }));
      wait_until_it_listens(port);
      ::close(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));  // of the wait
      ways.push_back({.name = kind.name,
                      .entrance = {kAddress, port},
                      .next = [listener] { return ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC); },
                      .passer = proxies.back().get(),
                      .gb_per_s = {},
                      .cpu_s_per_gb = {},
                      .dial_ms = {}});
    }
  } else {
    fmt::print("{} is not installed: only the relay is measured\n", settings.haproxy);
  }

  for (int repeat = -1; repeat < settings.repeats; ++repeat)  // the first only warms up
    for (std::size_t i = 0; i < ways.size(); ++i)
      measure_bytes(ways[repeat % 2 == 0 ? i : ways.size() - 1 - i], settings, hello, /*counts=*/repeat >= 0);
  for (Way& way : ways) measure_dials(way, settings, hello);

  fmt::print("{} MiB over {} connections, medians of {}; {} dials\n", settings.mib, settings.connections,
             settings.repeats, settings.dials);
  fmt::print("  {:<22} {:>9} {:>11} {:>12} {:>16} {:>10}\n", "", "GB/s", "of haproxy", "CPU s per GB", "CPU of haproxy",
             "dial, ms");
  const Way& base = ways[ways.size() > 1 ? 1 : 0];
  for (const Way& way : ways)
    fmt::print("  {:<22} {:>9.2f} {:>11.2f} {:>12.3f} {:>16.2f} {:>10.2f}\n", way.name, median(way.gb_per_s),
               median(way.gb_per_s) / median(base.gb_per_s), median(way.cpu_s_per_gb),
               median(way.cpu_s_per_gb) / median(base.cpu_s_per_gb), median(way.dial_ms));
  return 0;
}

int run(int argc, char** argv) {
  Settings settings;
  bool smoke = false;
  CLI::App app{"Benchmark of `echoline relay` beside haproxy"};
  app.add_option("--haproxy", settings.haproxy, "haproxy's program")->capture_default_str();
  app.add_option("--mib", settings.mib, "bytes of a measurement")->check(CLI::Range(1, 65536));
  app.add_option("--connections", settings.connections, "of one run, at the same time")->check(CLI::Range(1, 256));
  app.add_option("--repeats", settings.repeats, "measurements of which the median is taken")
      ->check(CLI::Range(1, 1000));
  app.add_option("--dials", settings.dials, "new connections, one after another")->check(CLI::Range(1, 10000));
  app.add_flag("--smoke", smoke, "few bytes, once: does it work at all?");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  if (smoke) {
    settings.mib = 8;
    settings.repeats = 1;
    settings.dials = 3;
  }
  return measure(settings);
}

}  // namespace
}  // namespace echoline::bench

int main(int argc, char** argv) { return echoline::bench::run(argc, argv); }
