// The parent's side of its edges: brings every child to the newest publication, or to the one it asked for, by the
// cheapest way over what is stored here. Used by the learner for its seeds and by workers for those behind them. Pure.
#pragma once
#include <set>

#include "overlay/core.hpp"
#include "overlay/publication_store.hpp"

namespace echoline::overlay {

// A child this node's store cannot bring up to date (behind: it can, but a full snapshot would be far cheaper).
struct EdgeTrouble {
  WorkerId child;
  std::optional<Version> position;
  CannotServe what;
  bool delta = false;  // one delta from `position` would do, and can be folded
};

class EdgeSender {
 public:
  // A full snapshot is asked for when catching up by what is stored costs more than this many times its bytes
  // (formula 4.10: 1 + phi).
  static constexpr double kSnapshotFactor = 1.25;
  // A worker's own bytes are cheaper than the learner's: it hands a child over only from here on.
  static constexpr double kHandOverFactor = 2.0;
  // More than this many deltas are folded into one, if they have more than this part of a full snapshot's bytes: the
  // child then checks and installs them in one pass.
  static constexpr std::size_t kDeltasMax = 3;
  static constexpr double kDeltasShare = 0.05;
  static constexpr std::size_t kStreamsMax = 16;  // connections of one edge
  // Of a child that is only helped, beside 1 for one that gets all chunks: those who forward come first.
  static constexpr double kHelpedWeight = 1.0 / 8;

  // References must outlive the sender. `snapshots_come`: troubles are answered by a publication in the same store
  // (the learner); otherwise the child is told to ask for help.
  EdgeSender(PublicationStore& store, Uplink& uplink, bool snapshots_come)
      : store_(store), uplink_(uplink), snapshots_come_(snapshots_come) {}

  // A connection of the edge to `child`, its first or a further stream. False: it has too many.
  bool open(ConnId conn, WorkerId child, PeerHello hello, TimePoint now);
  void close(ConnId conn);
  bool contains(ConnId conn) const { return lines_.contains(conn); }
  std::optional<WorkerId> child_of(ConnId conn) const;
  bool helps(ConnId conn) const;  // it is of an edge that only helps
  std::size_t connections() const { return lines_.size(); }
  std::vector<ConnId> all_connections() const;
  std::vector<ConnId> connections_of(WorkerId child) const;  // also while it is helped
  std::vector<ConnId> connections_of(WorkerId child, bool helped) const;
  std::vector<WorkerId> children() const;  // without those that are only helped

  // The child says anew what it holds and wants.
  void update(ConnId conn, Have have, TimePoint now);
  void send_again(ConnId conn, const ChunkRequest& request, TimePoint now);
  // On the first connection of every edge, ahead of chunks.
  void tell_all(const ControlMessage& status, TimePoint now);

  void on_store_changed(TimePoint now);  // publications announced, closed or dropped
  // Children are to be brought to `version` at least, though it may have left the store.
  void reach(Version version) { reach_ = std::max(reach_.value_or(version), version); }
  void on_chunk_arrived(TimePoint now) { send_all(now); }
  // Stored deltas can be folded into one from this version on (absent: they cannot); with `snapshots_come` only.
  void restorable_from(std::optional<Version> oldest);
  // That was asked for and is not made: who stands there gets what there is.
  void no_delta_from(Version version, TimePoint now);
  // Troubles found since the last call, each reported once.
  std::vector<EdgeTrouble> take_troubles() { return std::exchange(troubles_, {}); }
  // One report for every child, from what the uplink saw.
  std::vector<EdgeReport> reports(TimePoint now) const;

  std::uint64_t chunk_bytes_sent() const { return chunk_bytes_; }    // chunk bytes without headers
  std::uint64_t helped_bytes_sent() const { return helped_bytes_; }  // of these to children that are only helped
  // Remembered for the child for which most are: those that are in the store and those that it has listed last.
  std::size_t known_publications() const;

 private:
  struct Known {
    Version version;
    ChunkSet chunks;
  };
  struct Edge final : Source {
    EdgeSender* owner = nullptr;
    WorkerId child;
    std::vector<ConnId> conns;  // in the order of streams
    std::optional<Version> catch_up_to;
    bool full_only = false;
    StripeMask wanted;
    std::optional<Version> position;         // where the child is once it has what was sent
    std::map<PublicationId, Known> known;    // chunks it has or was sent
    std::set<PublicationKey> whole;          // what it says it has whole
    std::set<PublicationId> closed;          // whose manifests it has or was sent
    std::vector<PublicationKey> path;        // what still has to be sent, in order
    std::optional<Slice> status, complaint;  // before the next chunk; only the newest of each waits
    bool said_behind = false;
    bool lossy = false;  // a connection broke: what was sent on it may be lost
    std::optional<OutFrame> next(ConnId conn) override { return owner->next_frame(*this, conn); }
    double weight() const override { return catch_up_to ? kHelpedWeight : wanted.share(); }
  };
  struct Line {
    Edge* edge = nullptr;
    std::set<PublicationId> announced;
  };

  void send(const Edge& edge, TimePoint now);
  void send_all(TimePoint now);
  void take(Edge& edge, Have have);
  void plan(Edge& edge);
  bool can_start_at(const Edge& edge) const;
  bool goes_by_many_deltas(const Edge& edge, const std::vector<PublicationKey>& way, std::uint64_t bytes) const;
  void complain(Edge& edge, CannotServe what, bool delta);
  bool has_all(const Edge& edge, const StoredPublication& stored) const;
  std::optional<OutFrame> next_frame(Edge& edge, ConnId conn);
  void forget(Edge& edge);

  PublicationStore& store_;
  Uplink& uplink_;
  bool snapshots_come_;
  std::map<std::pair<WorkerId, bool>, Edge> edges_;  // by child, and whether it is helped
  std::map<ConnId, Line> lines_;
  std::vector<EdgeTrouble> troubles_;
  std::uint64_t chunk_bytes_ = 0, helped_bytes_ = 0;
  std::optional<Version> reach_, restorable_;
  std::set<Version> not_made_;  // deltas from there
};

}  // namespace echoline::overlay
