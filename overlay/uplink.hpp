// Who may send next over a node's one uplink: chunks to every child and messages to the learner take turns by weight, a
// slice at a time, at the rate the link is limited to. Pure.
#pragma once
#include <map>
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

// Something that has frames to send over one or several parallel connections.
class Source {
 public:
  virtual ~Source() = default;
  // The next frame for this connection; nothing when there is none now. Once taken it is sent.
  virtual std::optional<OutFrame> next(ConnId conn) = 0;
  // Its part of the uplink while others have something to send as well, relative to theirs; positive.
  virtual double weight() const { return 1; }
};

class Uplink {
 public:
  // Bytes on one connection that the network has not taken yet, before the next piece waits.
  static constexpr std::size_t kWindowBytes = 256 * 1024;

  // Both must outlive the uplink.
  Uplink(Pacer& pacer, std::vector<Action>& actions) : pacer_(pacer), actions_(actions) {}

  // Opens a connection of `source`; a source with no connection left is forgotten.
  void open(ConnId conn, Source& source);
  // What was taken from the source and not sent is lost with the connection, but for a frame that send_now() waits for.
  void close(ConnId conn);
  // Sends at once what does not wait for its turn; behind the frame that is under way on this connection.
  void send_now(ConnId conn, Slice frame);
  // The source may have something now; pump() then asks it.
  void wake(const Source& source);
  void pump(TimePoint now);
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now);
  void on_timer(TimePoint now) { pump(now); }
  TimePoint next_deadline() const { return transmission_ ? transmission_->due : kNever; }

  // What was handed to the network and not taken yet.
  std::size_t in_flight(ConnId conn) const;
  // Since this source was opened: bytes sent, and for how long something was on its way.
  struct Usage {
    std::uint64_t bytes = 0;
    double busy_seconds = 0;
    bool busy = false;       // now
    bool own_limit = false;  // the pacer was what it waited for last
  };
  Usage usage(const Source& source, TimePoint now) const;
  std::uint64_t bytes_sent() const { return bytes_; }
  // Of everything, while there was something to send, over the last few seconds; nothing before it can be told.
  std::optional<BitRate> measured_rate() const;

 private:
  struct Line {  // one connection
    std::size_t member = 0;
    std::optional<OutFrame> frame;
    std::size_t done = 0, in_flight = 0;
    std::vector<Slice> urgent;  // leaves when the frame has
  };
  struct Member {  // one source
    Source* source = nullptr;
    std::vector<ConnId> lines;
    Usage usage;
    std::size_t in_flight = 0;
    TimePoint busy_since{};
    double turn = 0;  // bytes taken from it by weight: who has least is next
    bool ready = false;
  };
  struct Transmission {
    ConnId conn;
    std::size_t bytes;
    TimePoint due;
  };

  std::optional<ConnId> pick();
  void set_ready(std::size_t id, bool ready);
  void emit(ConnId conn, std::size_t bytes);
  void account(TimePoint now);

  Pacer& pacer_;
  std::vector<Action>& actions_;
  std::map<ConnId, Line> lines_;
  std::map<std::size_t, Member> members_;
  std::map<const Source*, std::size_t> ids_;        // for looking up, never walked
  std::set<std::pair<double, std::size_t>> ready_;  // turns of members that may have something to send
  std::size_t next_member_ = 0;
  double turn_ = 0;  // of whoever was served last
  std::optional<Transmission> transmission_;
  bool busy_ = false;
  std::uint64_t bytes_ = 0;
  std::size_t in_flight_ = 0;
  double recent_bytes_ = 0, recent_seconds_ = 0;  // while busy, halved now and then
  TimePoint accounted_{};
};

}  // namespace echoline::overlay
