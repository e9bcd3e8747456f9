// The parent's side of its data connections: brings every child to the newest publication through one shared uplink.
// Used by the learner for its seeds and by members for the worker behind them. Pure.
#pragma once
#include <deque>
#include <set>

#include "overlay/core.hpp"

namespace echoline::overlay {

// A child this node's store cannot bring up to date (behind: it can, but a full snapshot would be far cheaper).
struct EdgeTrouble {
  ConnId conn;
  WorkerId child;
  CannotServe what;
};

class EdgeSender {
 public:
  // A full snapshot is asked for when catching up by what is stored costs more than this many times its bytes
  // (formula 4.10: 1 + phi).
  static constexpr double kSnapshotFactor = 1.25;
  // A member's own bytes are cheaper than the learner's: it hands a child over only from here on.
  static constexpr double kHandOverFactor = 2.0;
  // Bytes on one edge that the network has not taken yet, before the next piece waits.
  static constexpr std::size_t kWindowBytes = 512 * 1024;

  // All references must outlive the sender; `actions` receives what is to be sent. `snapshots_come`: troubles are
  // answered by a full snapshot in the same store (the learner); otherwise the child is told to ask the learner.
  EdgeSender(const PublicationStore& store, Pacer& up, std::vector<Action>& actions, bool snapshots_come)
      : store_(store), up_(up), actions_(actions), snapshots_come_(snapshots_come) {}

  void open(ConnId conn, PeerHello hello, TimePoint now);
  void close(ConnId conn);
  bool contains(ConnId conn) const { return edges_.contains(conn); }
  std::optional<ConnId> edge_of(WorkerId child) const;
  std::size_t size() const { return edges_.size(); }
  std::vector<ConnId> connections() const;
  std::vector<ConnId> connections_of(WorkerId child) const;  // also while it catches up
  // The child says anew what it holds, after it was helped by somebody else.
  void update(ConnId conn, Have have, TimePoint now);
  void send_again(ConnId conn, const ChunkRequest& request, TimePoint now);

  void on_store_changed(TimePoint now);  // publications announced or dropped
  void on_chunk_arrived(TimePoint now) { pump(now); }
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now);
  void on_timer(TimePoint now) { pump(now); }
  TimePoint next_deadline() const { return transmission_ ? transmission_->due : kNever; }
  // Troubles found since the last call, each reported once.
  std::vector<EdgeTrouble> take_troubles() { return std::exchange(troubles_, {}); }

  std::uint64_t chunk_bytes_sent() const { return chunk_bytes_; }  // chunk bytes without headers
  std::uint64_t wire_bytes_sent() const { return wire_bytes_; }    // everything on the edges
  // Rate while there was something to send; nothing before it was busy for long enough to tell.
  std::optional<BitRate> measured_rate() const;

 private:
  struct Frame {
    std::vector<std::byte> head;
    Slice tail;
    std::size_t done = 0;
    std::size_t size() const { return head.size() + tail.length; }
  };
  struct Edge {
    WorkerId child;
    std::optional<Version> catch_up_to;
    bool full_only = false;
    std::optional<Version> position;           // where the child is once it has what was sent
    std::map<PublicationKey, ChunkSet> known;  // chunks it has or was sent
    std::set<PublicationKey> announced;
    std::vector<PublicationKey> path;  // what still has to be sent, in order
    std::deque<Frame> control;         // manifests and complaints, before the next chunk
    std::optional<Frame> frame;        // under way
    std::size_t in_flight = 0;
    bool said_behind = false;
  };
  struct Transmission {
    ConnId conn;
    std::size_t bytes;
    TimePoint due;
  };

  void plan(ConnId conn, Edge& edge);
  void complain(ConnId conn, Edge& edge, CannotServe what);
  bool next_frame(Edge& edge);
  std::optional<ConnId> pick();
  void emit(ConnId conn, std::size_t bytes);
  void pump(TimePoint now);
  void account(TimePoint now);

  const PublicationStore& store_;
  Pacer& up_;
  std::vector<Action>& actions_;
  bool snapshots_come_;
  std::map<ConnId, Edge> edges_;
  std::optional<Transmission> transmission_;
  std::optional<ConnId> last_;  // round robin
  bool busy_ = false;
  std::vector<EdgeTrouble> troubles_;
  std::uint64_t chunk_bytes_ = 0, wire_bytes_ = 0;
  std::size_t in_flight_ = 0;
  // Rate measurement: bytes and seconds while busy, halved now and then so that it follows the present.
  double busy_bytes_ = 0, busy_seconds_ = 0;
  TimePoint accounted_{};
};

}  // namespace echoline::overlay
