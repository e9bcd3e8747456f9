// What every protocol core shares: the events it takes, the actions it returns, and its link.
//
// A core is pure: it never touches a socket, a clock, a thread or randomness. Its driver (uv/ on real machines, sim/
// under virtual time) calls an event function with the time, then performs take_actions() in order, and calls
// on_timer() when next_deadline() has come.
#pragma once
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.hpp"
#include "overlay/control.hpp"
#include "overlay/pacer.hpp"
#include "overlay/publication_store.hpp"

namespace echoline::overlay {

// A connection of one node. The core numbers the ones it dials (odd), the driver those it accepts (even).
using ConnId = Id<struct ConnTag>;

namespace act {
struct Dial {
  ConnId conn;
  Endpoint to;
};
// `head`, then `tail`, in order after everything sent before on this connection; on_sent() reports progress.
struct Send {
  ConnId conn;
  std::vector<std::byte> head;
  Slice tail;
};
// After what was sent has left (the driver bounds the wait). No further event comes for this connection.
struct Close {
  ConnId conn;
};
// The peer has introduced itself: its decoder may take every type of frame.
struct Admit {
  ConnId conn;
};
// Stop or resume reading on all connections: the emulated downlink.
struct SetReading {
  bool on;
};

// To the application of the learner.
struct Joined {
  MemberInfo member;
};
struct Lost {
  WorkerId worker;
  std::string reason;
};
struct Acked {
  WorkerId worker;
  Version version;
  Digest policy_digest;
};
struct MessageFrom {
  WorkerId worker;
  std::string bytes;
};
struct BroadcastDone {
  BroadcastReport report;
};
struct TopologyChanged {
  ChainIds chains;
};
struct NeedSnapshot {
  Version current;
};

// To the application of a worker.
struct Welcomed {
  WorkerId self;
  std::string welcome;
};
struct Deliver {
  Publication publication;
};
struct Message {
  std::string bytes;
};
struct Disconnected {
  std::string reason;
};  // the last action of a core
}  // namespace act

using Action = std::variant<act::Dial, act::Send, act::Close, act::Admit, act::SetReading, act::Joined, act::Lost,
                            act::Acked, act::MessageFrom, act::BroadcastDone, act::TopologyChanged, act::NeedSnapshot,
                            act::Welcomed, act::Deliver, act::Message, act::Disconnected>;

class Core {
 public:
  explicit Core(const LinkLimits& limits) : up_(limits.up), down_(limits.down) {}
  virtual ~Core() = default;

  // `peer_host`: the address the connection comes from.
  virtual void on_accepted(ConnId conn, const std::string& peer_host, TimePoint now) = 0;
  virtual void on_connected(ConnId conn, TimePoint now) = 0;
  // The peer closed, the connection or the dial failed, or the stream was corrupt.
  virtual void on_closed(ConnId conn, const std::string& reason, TimePoint now) = 0;
  virtual void on_frame(ConnId conn, const FrameView& frame, TimePoint now) = 0;
  // `bytes` more of what was sent on `conn` were taken by the network.
  virtual void on_sent(ConnId conn, std::size_t bytes, TimePoint now) = 0;
  virtual void on_timer(TimePoint now) = 0;
  virtual TimePoint next_deadline() const = 0;

  // Bytes were read from `conn`, before they are decoded: holds the download limit.
  void on_received(std::size_t bytes, TimePoint now);
  // The most the driver should read at a time, so that the download limit is even.
  std::size_t read_bytes_max(std::size_t whole) const { return down_.slice_bytes(whole); }

  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }
  Bytes bytes_received() const { return {bytes_received_}; }
  Bytes bytes_sent() const { return {bytes_sent_}; }

 protected:
  // Control and application frames leave at once; the uplink is occupied by them all the same, so chunks wait.
  void send_frame(ConnId conn, std::vector<std::byte> frame, TimePoint now);
  void send_control(ConnId conn, const ControlMessage& message, TimePoint now) {
    send_frame(conn, encode_control(message), now);
  }
  void close(ConnId conn) { actions_.push_back(act::Close{conn}); }
  void resume_reading(TimePoint now);  // call on timer
  TimePoint reading_deadline() const { return reading_ ? kNever : down_.free_at(); }
  ConnId dial(const Endpoint& to);

  Pacer up_;
  std::vector<Action> actions_;
  std::uint64_t bytes_sent_ = 0, bytes_received_ = 0;

 private:
  Pacer down_;
  bool reading_ = true, was_paused_ = false;
  std::uint64_t next_conn_ = 1;
};

}  // namespace echoline::overlay
