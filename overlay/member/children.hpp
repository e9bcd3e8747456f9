// The nodes to which a worker sends: its children. Each shows a grant, the learner's signed proof that this worker must
// serve it. An edge is the connections over which this worker sends to one child. Also holds the connections whose peer
// has not sent its request yet. No I/O and no clock.
#pragma once
#include "overlay/edge_sender.hpp"
#include "overlay/member/child_budgets.hpp"
#include "overlay/member/parents.hpp"
#include "overlay/pending_peers.hpp"
#include "overlay/wire/grant.hpp"

namespace echoline::overlay {

class Children {
 public:
  // All references must outlive the children.
  Children(const MemberConfig& config, const Identity& identity, const LearnerLink& learner, Parents& parents,
           PublicationStore& store, Transport& transport, Uplink& uplink);

  // Each handles a message of the learner.
  void dial(const DialChild& child);  // the child cannot reach this worker, so this worker dials the child
  // The child has other parents now: ends its grant and closes its edge.
  void release(const Release& release, TimePoint now);
  // Ends grants that were issued too long before this beacon, the learner's signed heartbeat.
  void on_beacon(const Beacon& beacon);
  void revoke(const WorkerSet& revoked);  // closes the edges of these workers and refuses them from now on
  void close_all();

  void on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now);
  // Returns whether dial() has opened this connection.
  bool on_connected(ConnId conn, TimePoint now);
  void on_closed(ConnId conn);
  void on_frame(ConnId conn, const Frame& frame, TimePoint now);

  void on_store_changed(TimePoint now);
  void on_chunk_arrived(TimePoint now) { edges_.on_chunk_arrived(now); }
  void send_status(const EdgeStatus& status, TimePoint now) { edges_.send_to_all(status, now); }
  // Closes the edges of children whose grants have ended.
  void close_ungranted(TimePoint now);
  void on_timer(TimePoint now);
  TimePoint next_deadline() const { return pending_peers_.next_deadline(); }
  // This process was suspended for `pause`: all deadlines come later by as much.
  void postpone(Duration pause) { pending_peers_.postpone(pause); }

  const EdgeSender& edges() const { return edges_; }
  // Open connections other than those to parents: the one to the learner, and those of children.
  std::size_t non_parent_connections() const { return 1 + edges_.connections(); }
  void check() const;  // aborts if an invariant is broken

 private:
  void add_pending_peer(ConnId conn, PeerInfo peer, TimePoint now);
  void on_pending_peer(ConnId conn, PendingPeer pending, const Frame& frame, TimePoint now);
  void open_edge(ConnId conn, WorkerId child, PeerHello hello, TimePoint now);
  void on_child_frame(ConnId conn, WorkerId child, const Frame& frame, TimePoint now);
  void dial_more_streams(WorkerId child, std::size_t streams);
  bool within_budget(WorkerId child, MessageBudget::Kind kind, std::size_t bytes, TimePoint now);
  void refuse(ConnId conn, WorkerId worker, const std::string& why);
  void close(ConnId conn);

  const MemberConfig& config_;
  const Identity& identity_;
  const LearnerLink& learner_;
  Parents& parents_;
  Transport& transport_;
  EdgeSender edges_;
  PendingPeers pending_peers_;
  std::map<ConnId, DialChild> dialled_;  // connections that dial() has opened
  GrantBook grants_;                     // of the children
  ChildBudgets budgets_;
  WorkerSet revoked_;
};

}  // namespace echoline::overlay
