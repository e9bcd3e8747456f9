// A simulated network that runs real protocol cores under virtual time: hosts with access links, connections that keep
// order, crashes. Deterministic: the same calls with the same seed give the same trace hash.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <vector>

#include "base/random.hpp"
#include "overlay/core.hpp"

namespace echoline::sim {

using HostId = Id<struct HostTag>;
using overlay::ConnId;

// A host's access link, shared by all its connections first come, first served. Absent: no cap.
struct AccessLink {
  std::optional<BitRate> up, down;
};

class Network {
 public:
  // `delay` is the one-way delay between any two hosts; up to `jitter` more is added to each transfer, without ever
  // reordering a connection.
  Network(Duration delay, Duration jitter, std::uint64_t seed);
  ~Network();

  HostId add_host(AccessLink link);
  overlay::Endpoint endpoint_of(HostId host) const;
  // Gives the host its core; `to_application` gets every action that is not about connections. Both must outlive run().
  void attach(HostId host, overlay::Core& core, std::function<void(const overlay::Action&)> to_application);
  // Calls into the host's core from outside; its actions are then performed. Nothing happens on a dead host.
  void call(HostId host, const std::function<void(TimePoint)>& work);
  // Runs `work` at a time of the script.
  void at(TimePoint time, std::function<void()> work);

  enum class Death {
    kCrash,   // the process dies: its peers see their connections close
    kSilent,  // the machine vanishes: nobody is told
  };
  void kill(HostId host, Death death);
  bool alive(HostId host) const;
  // Flips one byte of the next transfer of at least `bytes_min` that leaves `host`.
  void corrupt_next(HostId host, std::size_t bytes_min);

  TimePoint now() const { return now_; }
  // Runs events until `done` holds after one, none is left, or `until` is reached; returns whether `done` held.
  bool run(TimePoint until, const std::function<bool()>& done);

  std::uint64_t trace_hash() const { return trace_; }
  std::uint64_t events() const { return sequence_; }
  std::uint64_t bytes_sent(HostId host) const;

 private:
  struct Connection;
  struct Transfer;
  struct Host;
  struct Event {
    TimePoint at;
    std::uint64_t sequence;
    std::function<void()> run;
    bool operator<(const Event& other) const { return std::tie(at, sequence) > std::tie(other.at, other.sequence); }
  };

  void drain(std::size_t host);
  void perform(std::size_t host, overlay::Action&& action);
  void dial(std::size_t host, const overlay::act::Dial& dial);
  void send(std::size_t host, Transfer&& transfer);
  void tell_sent(std::size_t host, ConnId conn);
  void arrive(std::size_t host, const std::shared_ptr<Transfer>& transfer);
  void read(std::size_t host, Transfer& transfer);
  void close(std::size_t host, ConnId conn);
  void arm_timer(std::size_t host);
  void trace(std::uint64_t a, std::uint64_t b, std::uint64_t c);

  Duration delay_, jitter_;
  Random random_;
  TimePoint now_{};
  std::uint64_t sequence_ = 0, trace_ = 0;
  std::priority_queue<Event> queue_;
  std::vector<std::unique_ptr<Host>> hosts_;
};

}  // namespace echoline::sim
