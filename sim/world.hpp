// A simulated world that runs protocol cores under virtual time: hosts with access links, disks and clocks, ordered
// connections, and their faults. Deterministic: equal calls with an equal seed give an equal trace hash.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/random.hpp"
#include "chains/regions.hpp"
#include "overlay/core.hpp"
#include "sim/disk.hpp"
#include "sim/event_queue.hpp"
#include "sim/fifo.hpp"
#include "sim/world_state.hpp"

namespace echoline::sim {

using overlay::ConnId;

// A host's access link. Connections with data take turns on the uplink. The downlink passes data in order of arrival.
// An absent rate is unlimited.
struct AccessLink {
  std::optional<BitRate> up, down;
};

struct WorldOptions {
  std::uint64_t seed = 1;
  // One-way delay between hosts whose regions do not define one. Up to `jitter` is added at random. Data on one
  // connection stays in order.
  Duration delay{}, jitter{};
  chains::Regions regions;  // all traffic between two regions shares one link, in order of arrival
  // Probability that a transfer, and its successors on the connection, are late by one or a few retransmission
  // timeouts: TCP shows the loss of a packet only as a delay.
  double stalled_transfer_share = 0;
  double split_transfer_share = 0;  // probability that a read takes only a part of what has arrived
  Duration dial_timeout = std::chrono::seconds(5);
  double unix_origin_s = 1.7e9;  // wall clock of a host without skew at TimePoint zero
};

// The program on a host. It owns its core; the world calls the core and performs its actions.
class Process {
 public:
  virtual ~Process() = default;
  virtual overlay::Core& core() = 0;
  // Performs an action that the world does not perform itself (network, disk). Must not call the core; may use
  // World::run_soon().
  virtual void on_action(overlay::Action&& action, TimePoint now) = 0;
};

// Receives events; must not change anything.
class Observer {
 public:
  virtual ~Observer() = default;
  // Called before the core of `to` receives the frame. `certified_id`: the worker in the certificate with which the
  // connection was opened; `from` may have another id by now. Absent if `to` opened the connection, or without a
  // certificate.
  virtual void on_frame(HostId /*from*/, HostId /*to*/, std::optional<WorkerId> /*certified_id*/,
                        const overlay::Frame&) {}
  // Called after a core was called and its actions were performed.
  virtual void on_step(HostId) {}
};

// Changes the outgoing messages of a malicious host's honest core.
class MessageRewriter {
 public:
  virtual ~MessageRewriter() = default;
  // `send` contains whole frames if the core has no rate limit. Returns the messages to send instead, in order.
  virtual std::vector<overlay::act::Send> rewrite(overlay::act::Send&& send, TimePoint now) = 0;
};

enum class Death {
  kCrash,     // the process dies: its peers see closed connections; unfinished disk writes are lost
  kPowerLoss  // the machine vanishes: peers get no notice, and the disk loses unsynced data
};

class World {
 public:
  explicit World(const WorldOptions& options);
  ~World();

  // Makes hosts show and check certificates from now on. Without an authority all connections are anonymous.
  void set_authority(RunAuthority authority) { certificates_.authority = std::move(authority); }

  HostId add_host(const AccessLink& link, Duration clock_skew = {}, std::uint32_t region = 0);
  overlay::Endpoint endpoint_of(HostId host) const;
  double unix_origin_s(HostId host) const;
  Disk& disk(HostId host);
  Random& random() { return random_; }

  // Runs `process` on a host without one.
  void start(HostId host, std::unique_ptr<Process> process);
  // Ends the process normally: its connections close after its sent data has left.
  void stop(HostId host);
  void kill(HostId host, Death death);
  bool is_alive(HostId host) const;
  Process* process(HostId host) const;

  // Calls `work`, which may call the host's core, then performs the core's actions. Does nothing on a dead host.
  template <class Work>
  void call(HostId host, Work&& work) {
    if (!is_alive(host)) return;
    work(now_);
    perform_actions(host.value);
  }
  // Runs `work` at a virtual time, or as soon as possible: after the current event.
  void run_at(TimePoint time, std::function<void()> work);
  void run_soon(std::function<void()> work) { run_at(now_, std::move(work)); }

  // ---- network faults ----

  void set_nat(HostId host, bool behind_nat);  // behind NAT: dials to the host time out
  // `from` can never open a connection to `to`, as with a firewall.
  void block_dials(HostId from, HostId to) { blocked_dials_.insert({from.value, to.value}); }
  void set_rewriter(HostId host, std::unique_ptr<MessageRewriter> rewriter);
  void set_stalled_transfer_share(double share) { options_.stalled_transfer_share = share; }
  // Until `until`, no data passes the host's links.
  void stop_links(HostId host, TimePoint until);
  // Stops the host's process until `until`, as by SIGSTOP: incoming data waits, and timers fire late.
  void pause(HostId host, TimePoint until);
  bool is_paused(HostId host) const;
  // Blocks traffic from one group to the other (and back, unless one_way) until end_partition(). Returns the
  // partition's number.
  std::uint64_t start_partition(const std::vector<HostId>& from, const std::vector<HostId>& to, bool one_way);
  void end_partition(std::uint64_t number);
  // Breaks one of the host's connections for both ends; false if it has none.
  bool reset_random_connection(HostId host);
  void reset_all_connections(HostId host);
  // Gives the host another address, which ends its connections. The host's core is notified at once. Its peers get no
  // notice: they only receive no more data.
  void change_address(HostId host);
  // Moves the host's wall clock by `shift`; a running process continues with its old clock.
  void step_clock(HostId host, Duration shift);
  // Limits the host's connections, both opened and accepted.
  void set_connections_max(HostId host, std::size_t connections_max);
  // Flips one bit of the next message from `host` whose body (act::Send::tail) has at least `bytes_min` bytes.
  void corrupt_next(HostId host, std::size_t bytes_min);

  TimePoint now() const { return now_; }
  // Runs events until `done()` is true after an event, no event is left, or the next event is later than `until`.
  // Returns whether `done()` was true.
  bool run(TimePoint until, const std::function<bool()>& done);
  bool run(TimePoint until);

  void set_observer(Observer* observer) { observer_ = observer; }
  // Receives one line per event; slow, but changes nothing.
  void set_trace(std::function<void(const std::string&)> sink) { trace_.sink = std::move(sink); }
  void note(const std::string& text);  // adds a line of the scenario to the trace and to its hash

  std::uint64_t trace_hash() const { return trace_.hash; }
  std::uint64_t events() const { return events_; }
  std::uint64_t bytes_sent(HostId host) const;
  std::uint64_t bytes_crossed() const { return region_links_.bytes_crossed; }  // between regions
  void check() const;                                                          // aborts if an invariant is broken

 private:
  struct Transfer;
  struct End;
  struct Connection;
  struct Host;
  // Connections by slot, and the slots that can be used again.
  struct ConnectionSlots {
    std::vector<std::unique_ptr<Connection>> all;
    std::vector<std::size_t> free;
    Connection& take();
    void check() const;  // aborts if a slot is both free and in use, or neither
  };
  enum EventKind : std::uint32_t {
    kScript,     // a function given to run_at()
    kTimer,      // the core's deadline
    kUplink,     // the host's uplink is free
    kSent,       // a transfer has left the uplink
    kFirstByte,  // a transfer's first byte reaches the downlink
    kArrives,    // a transfer has arrived
    kWake,       // there may be room in the sockets' buffers for more data
    kSyn,        // a dial's first packet reaches the host
    kConnected,  // the dialling end is open
    kAccepts,    // the dialled end opens
    kDialFails,  // the dial fails
    kRead,       // arrived data may be read
    kDisk        // an operation of the disk is complete
  };
  // One end of a connection.
  struct Side {
    Connection* connection = nullptr;
    std::size_t end_index = 0;  // in Connection::ends
    explicit operator bool() const { return connection != nullptr; }
  };

  void push(TimePoint at, EventKind kind, std::uint64_t host, std::uint64_t detail = 0, std::uint64_t generation = 0);
  void push(TimePoint at, EventKind kind, const Side& side);
  void handle(const Event& event);
  Side side_of(const Event& event);
  Side find_side(std::size_t host, ConnId conn);  // empty if the host has no such connection
  End& end(const Side& side);
  static Side peer_side(const Side& side) { return {side.connection, 1 - side.end_index}; }

  void perform_actions(std::size_t host);
  void perform(std::size_t host, overlay::Action&& action);
  void arm_timer(std::size_t host);
  void on_timer(const Event& event);

  void dial(std::size_t host, const overlay::act::Dial& dial);
  void on_syn(const Side& dialler);
  void on_connected(const Side& dialler);
  void on_accept(const Side& dialler);
  void fail_dial(const Side& dialler, std::string reason, TimePoint at);
  Result<overlay::trust::PeerIdentity> verify_certificate(const std::string& certificate, std::size_t verifier,
                                                          CertificateDates dates);

  void send(std::size_t host, overlay::act::Send&& message);
  void queue_transfer(const Side& from, Transfer&& transfer);
  void start_transfer(const Side& from, Transfer&& transfer);
  void serve_uplink(std::size_t host);
  void report_sent_bytes(const Side& side);
  void on_first_byte(const Side& to);
  void on_arrive(const Side& to);
  void read_arrived(Side to);
  bool decode_part(const Side& to, const overlay::Slice& slice, std::size_t begin, std::size_t end_byte);
  void close(std::size_t host, ConnId conn);
  void break_connection(const Side& side, std::string reason);
  void set_reading(std::size_t host, const overlay::act::SetReading& reading);
  void free_connection(Connection& connection);
  void on_disk(std::size_t host);

  Duration delay(std::size_t from, std::size_t to) const;
  Duration delay_and_jitter(std::size_t from, std::size_t to);
  void hash_event(std::uint64_t kind, std::uint64_t host, std::uint64_t detail);
  template <class... Args>
  void trace_line(fmt::format_string<Args...> format, Args&&... args) {
    if (trace_.sink)
      trace_.sink(
          fmt::format("{:.6f} {}", seconds(now_.time_since_epoch()), fmt::format(format, std::forward<Args>(args)...)));
  }

  WorldOptions options_;
  Certificates certificates_;
  Random random_;
  TimePoint now_{};
  Trace trace_;
  std::uint64_t events_ = 0;
  EventQueue queue_;
  Scripts scripts_;
  std::vector<std::unique_ptr<Host>> hosts_;
  Addresses addresses_;
  RegionLinks region_links_;
  ConnectionSlots connections_;
  Partitions partitions_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> blocked_dials_;  // hosts (from, to)
  Observer* observer_ = nullptr;
};

}  // namespace echoline::sim
