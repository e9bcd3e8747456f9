// The nodes to which a worker sends: connections that have not said yet what they want, and the edges to its children,
// which show a grant of the learner. Pure.
#pragma once
#include "overlay/edge_sender.hpp"
#include "overlay/member/child_budgets.hpp"
#include "overlay/member/parents.hpp"
#include "overlay/strangers.hpp"
#include "overlay/wire/grant.hpp"

namespace echoline::overlay {

class Children {
 public:
  // All references must outlive the children.
  Children(const MemberConfig& config, const Identity& identity, const LearnerLink& learner, Parents& parents,
           PublicationStore& store, Transport& transport, Uplink& uplink);

  // From the learner. dial(): this child cannot reach this worker.
  void dial(const DialChild& child);
  void release(const Release& release, TimePoint now);
  void on_beacon(const Beacon& beacon);
  void revoke(const WorkerSet& revoked);
  void close_all();

  void on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now);
  // Returns whether dial() has dialled it.
  bool on_connected(ConnId conn, TimePoint now);
  void on_closed(ConnId conn);
  void on_frame(ConnId conn, const Frame& frame, TimePoint now);

  void on_store_changed(TimePoint now);
  void on_chunk_arrived(TimePoint now) { edges_.on_chunk_arrived(now); }
  void send_status(const EdgeStatus& status, TimePoint now) { edges_.tell_all(status, now); }
  // Closes the edges of children whose grants have ended.
  void close_ungranted(TimePoint now);
  void on_timer(TimePoint now);
  TimePoint next_deadline() const { return strangers_.next_deadline(); }
  // This node stood still for this time.
  void postpone(Duration late) { strangers_.excuse(late); }

  const EdgeSender& edges() const { return edges_; }
  // Connections of this worker to other nodes than its parents.
  std::size_t connections() const { return 1 + edges_.connections(); }
  void check() const;

 private:
  void add_stranger(ConnId conn, PeerInfo peer, TimePoint now);
  void on_stranger(ConnId conn, Stranger stranger, const Frame& frame, TimePoint now);
  void open(ConnId conn, WorkerId child, PeerHello hello, TimePoint now);
  void on_child(ConnId conn, WorkerId child, const Frame& frame, TimePoint now);
  void dial_more(WorkerId child, std::size_t streams);
  bool within_budget(WorkerId child, MessageBudget::Kind kind, std::size_t bytes, TimePoint now);
  void refuse(ConnId conn, WorkerId worker, const std::string& why);
  void close(ConnId conn);

  const MemberConfig& config_;
  const Identity& identity_;
  const LearnerLink& learner_;
  Parents& parents_;
  Transport& transport_;
  EdgeSender edges_;
  Strangers strangers_;
  std::map<ConnId, DialChild> dialled_;  // by this worker
  GrantBook grants_;                     // that children have shown
  ChildBudgets budgets_;
  WorkerSet revoked_;
};

}  // namespace echoline::overlay
