// Shares a node's one uplink between sources by weight: the chunks for every child, and the messages to the learner. It
// sends a slice at a time, at the limited rate. No I/O and no clock.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "overlay/action.hpp"
#include "overlay/pacer.hpp"

namespace echoline::overlay {

struct OutFrame {
  Slice head, tail;  // the tail of a chunk frame is its data
  std::size_t size() const { return head.size() + tail.size(); }
};

// A producer of frames for one or several parallel connections.
class Source {
 public:
  virtual ~Source() = default;
  // Takes the next frame for this connection; absent if there is none now. The uplink sends every frame it takes.
  virtual std::optional<OutFrame> next(ConnId conn) = 0;
  // Its share of the uplink, relative to the weights of the other sources with frames; positive.
  virtual double weight() const { return 1; }
  // Whether its bytes stay in the local network, outside the limited uplink. Constant.
  virtual bool is_local() const { return false; }
};

class Uplink {
 public:
  // Limit on the bytes of one connection that the network has not taken yet. At the limit, the next slice waits.
  static constexpr std::size_t kWindowBytes = 256 * 1024;

  // Both must outlive the uplink.
  Uplink(Pacer& pacer, std::vector<Action>& actions);
  ~Uplink();

  // Opens a connection of `source`, which must exist until its last connection is closed.
  void open(ConnId conn, Source& source);
  // Closes a connection. A frame taken and not sent is lost, unless a frame of send_now() waits behind it: then both
  // leave first.
  void close(ConnId conn);
  // Sends a frame without waiting for a turn, right after the frame in progress on this connection.
  void send_now(ConnId conn, Slice frame);
  // The source may have frames now; pump() then asks it.
  void wake(const Source& source);
  // Sends as many slices as the rate and the windows allow now.
  void pump(TimePoint now);
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now);
  void on_timer(TimePoint now) { pump(now); }
  TimePoint next_deadline() const { return transmission_ ? transmission_->due : kNever; }

  // Bytes handed to the network that it has not taken yet.
  std::size_t in_flight(ConnId conn) const;
  // Since the source's first connection opened: bytes sent, and the time with bytes in flight.
  struct Usage {
    std::uint64_t bytes = 0;
    double busy_seconds = 0;
    bool busy = false;       // has bytes in flight now
    bool own_limit = false;  // the bottleneck is this node's rate limit, not the path
  };
  Usage usage(const Source& source, TimePoint now) const;
  std::uint64_t bytes_sent() const;
  // The total rate of the last few seconds, counting only time with something to send; absent until it is known.
  // Local sources do not count.
  std::optional<BitRate> measured_rate() const;

 private:
  struct Connection {
    std::size_t source_id = 0;
    std::optional<OutFrame> frame;
    std::size_t frame_bytes_sent = 0;  // of `frame`
    std::size_t in_flight = 0;         // bytes that the network has not taken yet
    std::vector<Slice> urgent;         // sent after the frame in progress
  };
  struct SourceState {
    Source* source = nullptr;
    std::vector<ConnId> conns;
    Usage usage;
    std::size_t in_flight = 0;
    TimePoint busy_since{};
    // Bytes sent so far, divided by the weight (virtual time in fair queueing). The source with the least sends next.
    double virtual_time = 0;
    bool is_ready = false;  // listed in ready_
  };
  struct Transmission {  // a slice that occupies the link
    ConnId conn;
    std::size_t bytes;
    TimePoint due;  // when its last byte has left
  };

  struct Local;  // an uplink without a limit, for local sources

  // The local uplink if it has this connection or source; otherwise null.
  Uplink* local_with(ConnId conn) const;
  Uplink* local_with(const Source& source) const;
  std::optional<ConnId> pick_connection();
  void set_ready(std::size_t id, bool ready);
  void emit_slice(ConnId conn, std::size_t bytes);
  void account_busy_time(TimePoint now);

  Pacer& pacer_;
  std::vector<Action>& actions_;
  std::map<ConnId, Connection> connections_;
  std::map<std::size_t, SourceState> sources_;
  std::map<const Source*, std::size_t> source_ids_;  // for lookups only, never iterated
  // Virtual time and id of the sources that may have something to send.
  std::set<std::pair<double, std::size_t>> ready_;
  std::size_t next_source_id_ = 0;
  double last_virtual_time_ = 0;  // of the source served last
  std::optional<Transmission> transmission_;
  bool is_backlogged_ = false;  // there was something to send ever since the link became free
  std::uint64_t bytes_sent_ = 0;
  std::size_t in_flight_ = 0;                     // bytes of all connections that the network has not taken yet
  double recent_bytes_ = 0, recent_seconds_ = 0;  // while busy; halved at kRecentSecondsMax
  TimePoint accounted_until_{};
  bool is_local_ = false;         // this is the local uplink
  std::unique_ptr<Local> local_;  // null until a local source opens a connection
};

}  // namespace echoline::overlay
