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

namespace echoline::sim {

using HostId = Id<struct HostTag>;
using overlay::ConnId;

// A host's access link. Uplink: connections with data take turns. Downlink: first come, first served. Absent:
// unlimited.
struct AccessLink {
  std::optional<BitRate> up, down;
};

struct WorldOptions {
  std::uint64_t seed = 1;
  // One way between hosts whose regions do not state it; up to `jitter` is added, without reordering a connection.
  Duration delay{}, jitter{};
  chains::Regions regions;  // traffic between two regions shares the link's rate, first come, first served
  // TCP hides loss: with this probability a transfer and its successors on the connection are late by one or a few
  // retransmission timeouts.
  double stall_share = 0;
  double split_transfer_share = 0;  // of transfers that are read in two pieces
  Duration dial_timeout = std::chrono::seconds(5);
  double unix_origin_s = 1.7e9;  // wall clock of a host without skew at TimePoint zero
};

// The authority whose certificates are accepted.
struct RunAuthority {
  std::string run_id;
  overlay::trust::PublicKey key;
};

// The program on a host. It owns its core; the world calls the core and performs its actions.
class Process {
 public:
  virtual ~Process() = default;
  virtual overlay::Core& core() = 0;
  // Performs an action that concerns neither network nor disk. Must not call the core; may use World::post().
  virtual void on_action(overlay::Action&& action, TimePoint now) = 0;
};

// Receives events; must not change anything.
class Observer {
 public:
  virtual ~Observer() = default;
  // Called before the core of `to` receives the frame. `as`: the worker in the certificate with which the connection
  // was opened, which `from` may no longer be. Absent if `to` opened the connection, or without a certificate.
  virtual void on_frame(HostId /*from*/, HostId /*to*/, std::optional<WorkerId> /*as*/, const overlay::Frame&) {}
  // A core was called and its actions were performed.
  virtual void on_step(HostId) {}
};

// Changes the outgoing messages of a malicious host's honest core.
class Malice {
 public:
  virtual ~Malice() = default;
  // `send` is whole frames if the core has no rate limit. Returns the messages to send instead, in order.
  virtual std::vector<overlay::act::Send> outgoing(overlay::act::Send&& send, TimePoint now) = 0;
};

enum class Death {
  kCrash,     // the process dies: its peers see closed connections; unfinished disk writes are lost
  kPowerLoss  // the machine vanishes: peers are not told, and the disk loses unsynced data
};

class World {
 public:
  explicit World(const WorldOptions& options);
  ~World();

  // Makes hosts show and check certificates from now on. Without an authority all connections are anonymous.
  void set_authority(RunAuthority authority) { authority_ = std::move(authority); }

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
  bool alive(HostId host) const;
  Process* process(HostId host) const;

  // Calls `work`, which may call the host's core, then performs the core's actions. Does nothing on a dead host.
  template <class Work>
  void call(HostId host, Work&& work) {
    if (!alive(host)) return;
    work(now_);
    perform_actions(host.value);
  }
  // Runs `work` at a time of the script, or as soon as possible.
  void at(TimePoint time, std::function<void()> work);
  void post(std::function<void()> work) { at(now_, std::move(work)); }

  // ---- network faults ----

  void set_nat(HostId host, bool on);  // dials to it time out
  // `from` can never open a connection to `to`, as with a firewall.
  void block_dials(HostId from, HostId to) { blocked_dials_.insert({from.value, to.value}); }
  void set_malice(HostId host, std::unique_ptr<Malice> malice);
  void set_stall_share(double share) { options_.stall_share = share; }
  // No data passes the host's links until then.
  void stop_links(HostId host, TimePoint until);
  // Stops the host's process until then, as by SIGSTOP: incoming data waits, and timers fire late.
  void pause(HostId host, TimePoint until);
  bool paused(HostId host) const;
  // Blocks traffic from one group to the other (and back, unless one_way) until heal(). Returns the partition's number.
  std::uint64_t cut(const std::vector<HostId>& from, const std::vector<HostId>& to, bool one_way);
  void heal(std::uint64_t cut);
  // Breaks one of the host's connections for both ends; false if it has none.
  bool reset_one(HostId host);
  void reset_all(HostId host);
  // Gives the host another address; its connections are dead. The host notices, its peers receive nothing any more.
  void move(HostId host);
  // Sets its wall clock; a running process continues with its old clock.
  void step_clock(HostId host, Duration by);
  // Limits its connections, both opened and accepted.
  void set_connections_max(HostId host, std::size_t connections_max);
  // Flips one byte of the next transfer of at least `bytes_min` that leaves `host`.
  void corrupt_next(HostId host, std::size_t bytes_min);

  TimePoint now() const { return now_; }
  // Runs events until `done` holds after one, none is left, or `until`. Returns whether `done` held.
  bool run(TimePoint until, const std::function<bool()>& done);
  bool run(TimePoint until);

  void set_observer(Observer* observer) { observer_ = observer; }
  // Receives one line per event; slow, but changes nothing.
  void set_trace(std::function<void(const std::string&)> sink) { trace_sink_ = std::move(sink); }
  void note(const std::string& text);  // adds a line of the scenario, also to the hash

  std::uint64_t trace_hash() const { return trace_hash_; }
  std::uint64_t events() const { return events_; }
  std::uint64_t bytes_sent(HostId host) const;
  std::uint64_t bytes_crossed() const { return bytes_crossed_; }  // between regions

 private:
  struct Transfer;
  struct End;
  struct Connection;
  struct Host;
  struct Cut {
    std::uint64_t number;
    std::vector<bool> from, to;
    bool one_way;
  };
  enum Kind : std::uint32_t {
    kScript,
    kTimer,
    kUplink,     // the host's uplink is free
    kSent,       // a transfer has left the uplink
    kFirst,      // a transfer's first byte reaches the downlink
    kArrive,     // a transfer has arrived
    kWake,       // there may be room for more data
    kSyn,        // a dial reaches the host
    kConnected,  // the dialling end is open
    kAccept,     // the dialled end opens
    kFailed,     // the dial fails
    kRead,       // arrived data may be read
    kDisk        // an operation of the disk is complete
  };
  // The end of a connection that an event is about.
  struct Side {
    Connection* connection = nullptr;
    std::size_t side = 0;
    explicit operator bool() const { return connection != nullptr; }
  };

  void push(TimePoint at, Kind kind, std::uint64_t host, std::uint64_t a = 0, std::uint64_t b = 0);
  void push(TimePoint at, Kind kind, const Side& side);
  void handle(const Event& event);
  Side side_of(const Event& event);
  Side find(std::size_t host, ConnId conn);
  End& end(const Side& side);
  static Side other(const Side& side) { return {side.connection, 1 - side.side}; }

  void perform_actions(std::size_t host);
  void perform(std::size_t host, overlay::Action&& action);
  void arm_timer(std::size_t host);
  void on_timer(const Event& event);

  void dial(std::size_t host, const overlay::act::Dial& dial);
  void on_syn(const Side& dialler);
  void on_connected(const Side& dialler);
  void on_accept(const Side& dialler);
  void fail_dial(const Side& dialler, std::string reason, TimePoint at);
  Result<overlay::trust::PeerIdentity> verify_certificate(const std::string& certificate, std::size_t checker,
                                                          bool ageless);

  void send(std::size_t host, overlay::act::Send&& send);
  void queue_transfer(const Side& from, Transfer&& transfer);
  void start_transfer(const Side& from, Transfer&& transfer);
  void serve_uplink(std::size_t host);
  void on_sent(const Side& side);
  void on_first(const Side& to);
  void on_arrive(const Side& to);
  void read(Side to);
  bool decode_part(const Side& to, const overlay::Slice& slice, std::size_t begin, std::size_t end);
  void close(std::size_t host, ConnId conn);
  void break_connection(const Side& side, std::string reason);
  void set_reading(std::size_t host, const overlay::act::SetReading& reading);
  void free_connection(Connection& connection);
  bool is_cut(std::size_t from, std::size_t to) const;
  void on_disk(std::size_t host);

  Duration delay(std::size_t from, std::size_t to) const;
  Duration delay_and_jitter(std::size_t from, std::size_t to);
  TimePoint region_link_passed_at(std::size_t from, std::size_t to, std::size_t bytes, TimePoint through);
  void hash_event(std::uint64_t kind, std::uint64_t host, std::uint64_t detail);
  template <class... Args>
  void trace_line(fmt::format_string<Args...> format, Args&&... args) {
    if (trace_sink_)
      trace_sink_(
          fmt::format("{:.6f} {}", seconds(now_.time_since_epoch()), fmt::format(format, std::forward<Args>(args)...)));
  }

  WorldOptions options_;
  std::optional<RunAuthority> authority_;
  struct Proof {
    Result<overlay::trust::PeerIdentity> identity;
    double valid_from_unix_s;  // earliest time at which it was valid
  };
  std::map<std::string, Proof> proofs_;  // by certificate
  Random random_;
  TimePoint now_{};
  std::uint64_t trace_hash_ = 0, events_ = 0, next_cut_ = 0, next_script_ = 0;
  EventQueue queue_;
  std::unordered_map<std::uint64_t, std::function<void()>> scripts_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::unordered_map<std::string, std::size_t> addresses_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, TimePoint> region_link_free_at_;  // between regions
  std::uint64_t bytes_crossed_ = 0;
  std::vector<std::unique_ptr<Connection>> connections_;  // by slot
  std::vector<std::size_t> free_slots_;
  std::uint64_t moves_ = 0;
  std::vector<Cut> cuts_;
  std::set<std::pair<std::uint64_t, std::uint64_t>> blocked_dials_;
  Observer* observer_ = nullptr;
  std::function<void(const std::string&)> trace_sink_;
};

}  // namespace echoline::sim
