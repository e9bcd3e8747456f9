// The parent's side of its edges. Brings every child to the newest publication, or to the one it asked for. It takes
// the cheapest path over the stored publications: a full snapshot, deltas, or both. The learner uses this class for its
// seeds (the workers that receive from it), workers for their children. A helped child is one that asks this node only
// for a version that its own parents cannot send. No I/O and no clock.
#pragma once
#include <set>

#include "overlay/core.hpp"
#include "overlay/publication_store.hpp"

namespace echoline::overlay {

// Reports a child that this node's store cannot bring up to date, or only at far more cost than a new full snapshot.
struct EdgeTrouble {
  WorkerId child;
  std::optional<Version> position;  // the child's version
  CannotServe what;
  bool can_fold = false;  // instead of a snapshot, the stored deltas from `position` on folded into one suffice
};

class EdgeSender {
 public:
  // The sender asks for a full snapshot if catching up from the store costs more than this many times the snapshot's
  // bytes.
  static constexpr double kSnapshotFactor = 1.25;
  // The same factor at a worker. A worker's uplink is cheaper than the learner's, so it hands a child over later.
  static constexpr double kHandOverFactor = 2.0;
  // More than kDeltasMax deltas are folded into one if together they exceed this fraction of a full snapshot's bytes.
  // The child then checks and installs them in one pass.
  static constexpr std::size_t kDeltasMax = 3;
  static constexpr double kDeltasBytesFraction = 0.05;
  static constexpr std::size_t kStreamsMax = 16;  // connections of one edge
  // The uplink weight of a helped child, relative to 1 for a child with all stripes. Low, because children that forward
  // come first.
  static constexpr double kHelpedWeight = 1.0 / 8;

  // References must outlive the sender. `catch_ups_on_demand`: true at the learner, which answers each trouble with a
  // new publication in this store. A worker tells the child to ask the learner for help.
  EdgeSender(PublicationStore& store, Uplink& uplink, bool catch_ups_on_demand)
      : store_(store), uplink_(uplink), catch_ups_on_demand_(catch_ups_on_demand) {}

  // Adds a connection of the edge to `child`, its first or a further stream. False: the edge has too many. `is_local`:
  // the child is in the local network, outside the limited uplink.
  bool open(ConnId conn, WorkerId child, PeerHello hello, TimePoint now, bool is_local = false);
  void close(ConnId conn);
  bool contains(ConnId conn) const { return connections_.contains(conn); }
  std::optional<WorkerId> child_of(ConnId conn) const;
  bool is_helped(ConnId conn) const;  // whether the connection is of a helped child
  std::size_t connections() const { return connections_.size(); }
  std::vector<ConnId> all_connections() const;
  std::vector<ConnId> connections_of(WorkerId child) const;  // also those as a helped child
  std::vector<ConnId> connections_of(WorkerId child, bool helped) const;
  std::vector<WorkerId> children() const;  // without helped children

  // The child reports again what it holds and wants.
  void update(ConnId conn, Have have, TimePoint now);
  void send_again(ConnId conn, const ChunkRequest& request, TimePoint now);
  // Sends on the first connection of every edge, ahead of chunks.
  void send_to_all(const ControlMessage& status, TimePoint now);

  void on_store_changed(TimePoint now);  // publications announced, closed or dropped
  // Children must get at least to `version`, even if it has left the store.
  void raise_target(Version version) { target_min_ = std::max(target_min_.value_or(version), version); }
  void on_chunk_arrived(TimePoint now) { wake_all_and_send(now); }
  // Stored deltas from this version on can be folded into one; absent: none can. With `catch_ups_on_demand` only.
  void set_foldable_from(std::optional<Version> oldest);
  // The requested delta from `version` will not be made, so children at `version` get the stored publications instead.
  void refuse_delta_from(Version version, TimePoint now);
  // Troubles found since the last call, each reported once.
  std::vector<EdgeTrouble> take_troubles() { return std::exchange(troubles_, {}); }
  // One report for every child, from the uplink's measurements.
  std::vector<EdgeReport> reports(TimePoint now) const;

  std::uint64_t chunk_bytes_sent() const { return chunk_bytes_sent_; }    // without headers
  std::uint64_t helped_bytes_sent() const { return helped_bytes_sent_; }  // the part that went to helped children
  // The largest number of publications remembered for one child: those in the store and those in its last list.
  std::size_t known_publications() const;

 private:
  struct KnownChunks {
    Version version;
    ChunkSet chunks;
  };
  struct EdgeKey {
    WorkerId child;
    bool helped = false;
    friend auto operator<=>(const EdgeKey&, const EdgeKey&) = default;
  };
  struct Edge final : Source {
    EdgeSender* owner = nullptr;
    WorkerId child;
    std::vector<ConnId> conns;                     // in the order of streams
    std::optional<Version> catch_up_to;            // of a helped child: the version it asked for
    bool full_only = false;                        // the child wants one full snapshot and no deltas
    StripeMask wanted;                             // the stripes, shares of all chunks, that the child receives here
    std::optional<Version> position;               // the child's version once it has all sent bytes
    std::map<PublicationId, KnownChunks> known;    // chunks it has or was sent
    std::set<PublicationKey> complete_at_child;    // publications that the child reports as complete
    std::set<PublicationId> manifests_known;       // publications whose manifest the child has or was sent
    std::vector<PublicationKey> path;              // publications still to send, in order
    std::optional<Slice> status, trouble_message;  // sent before the next chunk; only the newest of each waits
    bool was_reported_behind = false;              // a trouble was reported because the path is costly
    bool has_lost_connection = false;              // bytes sent on that connection may be lost
    bool is_in_local_network = false;
    std::optional<OutFrame> next(ConnId conn) override { return owner->next_frame(*this, conn); }
    bool is_local() const override { return is_in_local_network; }
    double weight() const override { return catch_up_to ? kHelpedWeight : wanted.share(); }
  };
  struct Connection {
    Edge* edge = nullptr;
    std::set<PublicationId> announced;  // publications whose announcement was sent on it
  };

  void wake_and_send(const Edge& edge, TimePoint now);
  void wake_all_and_send(TimePoint now);
  void store_have(Edge& edge, Have have);
  void plan_path(Edge& edge);
  bool can_fold_for(const Edge& edge) const;
  bool has_many_deltas(const Edge& edge, const std::vector<PublicationKey>& path, std::uint64_t bytes) const;
  void report_trouble(Edge& edge, CannotServe what, bool can_fold);
  bool child_has_all(const Edge& edge, const StoredPublication& stored) const;
  std::optional<OutFrame> next_frame(Edge& edge, ConnId conn);
  void forget_unneeded(Edge& edge);

  PublicationStore& store_;
  Uplink& uplink_;
  bool catch_ups_on_demand_;
  std::map<EdgeKey, Edge> edges_;
  std::map<ConnId, Connection> connections_;
  std::vector<EdgeTrouble> troubles_;
  std::uint64_t chunk_bytes_sent_ = 0, helped_bytes_sent_ = 0;
  std::optional<Version> target_min_, foldable_from_;
  std::set<Version> refused_deltas_;  // the versions from which no delta will be made
};

}  // namespace echoline::overlay
