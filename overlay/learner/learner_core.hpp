// The learner's protocol: enrols and admits workers, is the source of every publication, and sends each worker its
// parents. The components below decide; this class carries the decisions out. No I/O and no clock.
//
// A publication is one version of the policy as it travels; a delta changes the version before it (its base). Data
// connections are edges from a parent, a worker or the learner, to its child.
//
// A worker that is not heard becomes silent, after a time learned from its heartbeats: other workers take its place in
// the topology. After heartbeat_timeout, or when its connection breaks, it is away: its connections and leases end. It
// keeps its identity and record, and is a full member again when it comes back. After away_max it is lost.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <set>

#include "chains/separation.hpp"
#include "overlay/edge_sender.hpp"
#include "overlay/learner/catch_ups.hpp"
#include "overlay/learner/conduct.hpp"
#include "overlay/learner/helpers.hpp"
#include "overlay/learner/identities.hpp"
#include "overlay/learner/learner_file.hpp"
#include "overlay/learner/publications.hpp"
#include "overlay/learner/reachability.hpp"
#include "overlay/learner/roster.hpp"
#include "overlay/learner/slow_hops.hpp"
#include "overlay/learner/topology_plan.hpp"
#include "overlay/pending_peers.hpp"
#include "overlay/settings.hpp"
#include "overlay/wire/grant.hpp"
#include "overlay/wire/sealer.hpp"

namespace echoline::overlay {

struct LearnerConfig : LearnerRules {
  CoreOptions core;
  Endpoint self;  // where this learner listens
  std::shared_ptr<const trust::Authority> authority;
  std::shared_ptr<const SignatureChecker> checker;  // of the same authority
  std::optional<LearnerState> state;                // of an earlier process of this run
  // The application's version after a restart. Later versions become void, and a new epoch begins.
  std::optional<Version> resumed_at;
  bool durable = false;  // the driver has a disk and performs act::SaveState
  // The region of a worker, without side effects; empty: all are in the learner's region.
  std::function<std::uint32_t(const MemberInfo&)> region_of;
  // The links that a worker has by its offer, without side effects, for a worker that states none; empty: not known.
  std::function<LinkLimits(const MemberInfo&)> links_of;
  Bytes store_bytes_max{1ull << 30};
  Bytes policy_bytes{};                              // size of the policy; zero: not known
  std::size_t message_bytes_max = kMessageBytesMax;  // longer messages of workers are dropped
  // Limit on the bytes of all messages that have arrived only in part. Beyond it, the worker with most of them is
  // disconnected.
  std::size_t assembling_bytes_max = 16 * kMessageBytesMax;
  // Whether the application's bytes on a heartbeat are valid. May be empty; has no side effects.
  std::function<Status(std::string_view)> check_heartbeat;
  bool reports_heartbeats = false;  // act::ReportHeartbeat follows each heartbeat
  bool catch_ups_on_demand = true;  // the application answers act::RequestCatchUp
  // Stored deltas that act::RequestCatchUp may ask to fold into one, if they have at most 1/kFoldShare of policy_bytes.
  std::size_t folded_deltas_max = 64;
  // Makes the application's part of a welcome, at most kWelcomeBytesMax, without side effects. May be empty.
  std::function<std::string(const MemberInfo&)> welcome;
};

class LearnerCore final : public Core {
 public:
  static constexpr std::size_t kWelcomeBytesMax = 192 * 1024;
  // A worker with more unsent application bytes is disconnected.
  static constexpr std::size_t kUnsentBytesMax = 4 * kMessageBytesMax;
  static constexpr Duration kBeaconLifetime = std::chrono::minutes(2);
  // A worker closes its connection to a silent learner after this many heartbeat timeouts. The learner's process may be
  // suspended for a while, but a worker whose address has changed should reconnect soon.
  static constexpr int kLearnerPatience = 5;
  static constexpr int kTroublesMax = 64;  // reported to the application for one worker

  explicit LearnerCore(LearnerConfig config);
  void start(TimePoint now);

  // Opens, extends and closes a publication. kInvalid: its version is not newer than the last, or its base was never
  // published. `catch_up`: it brings late workers to a version already published.
  Status begin(const Announcement& announcement, const SignedAnnouncement& as_signed, bool catch_up, TimePoint now);
  Status add(const PublicationId& id, std::vector<SealedChunk> chunks, TimePoint now);
  // The version counts as published once its digest is on disk. kInvalid: published before with another digest.
  // `sealing`: the time that hashing and signing took since begin(), for BroadcastParts.
  Status finish(const Manifest& manifest, const SignedManifest& as_signed, TimePoint now, Duration sealing = {});
  // Withdraws a publication that was not closed.
  void abandon(const PublicationId& id, TimePoint now);
  // Returns the stored deltas that lead from version `from` to the newest. kNotFound: some are no longer stored, or too
  // many.
  Result<StoredDeltas> deltas_from(Version from) const;
  const SignatureChecker& checker() const { return *config_.checker; }

  // At most kMessageBytesMax (checked). A message to a worker that is not connected is dropped.
  void send_message(WorkerId worker, Slice bytes, TimePoint now);
  // Ends the membership and revokes the certificate.
  void expel(WorkerId worker, const std::string& reason, TimePoint now);
  // The worker's machine has ended, so the worker is not expected back.
  void give_up(WorkerId worker, const std::string& reason, TimePoint now);
  void leave(TimePoint now);  // ends the run for all workers
  LearnerStats stats() const;
  void check() const;  // aborts if an invariant is broken
  const chains::Topology& topology() const { return plan_.topology(); }
  // Returns the chunk size with which a publication as large as the last of its kind arrives soonest over the present
  // topology (chains::best_chunk()). At least as large as a snapshot of the policy needs.
  Bytes chunk_size_for(const PublicationKey& key, TimePoint now) const;
  const LearnerState& state() const { return file_.state(); }
  std::uint64_t epoch() const { return state().epoch; }
  // Returns the next issue time: milliseconds since 1970, but strictly later than all issue times of this run, even if
  // the clock goes back between two of its processes. Issue times order the learner's signed messages.
  std::uint64_t issue_time(TimePoint now);

  void on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) override;
  void on_connected(ConnId conn, TimePoint now) override;
  void on_closed(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_corrupt(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_frame(ConnId conn, Frame frame, TimePoint now) override;
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now) override;
  void on_saved(const Status& status, TimePoint now) override;
  void on_large_packets_dropped(WorkerId peer, const std::string& what, TimePoint) override {
    actions_.push_back(act::ReportWorkerTrouble{peer, what});
  }
  void on_timer(TimePoint now) override;
  TimePoint next_deadline() const override;

 private:
  using Broadcast = BroadcastTimes::Broadcast;

  // Membership (learner_core.cpp).
  void on_pending_peer(ConnId conn, const PendingPeer& pending, const Frame& frame, TimePoint now);
  void renew_certificate(Worker& worker, const Renew& request, TimePoint now);
  void admit_worker(ConnId conn, const PendingPeer& pending, Hello hello, TimePoint now);
  void admit_edge(ConnId conn, WorkerId id, PeerHello hello, TimePoint now);
  void open_edge(ConnId conn, WorkerId id, PeerHello hello, TimePoint now);
  void on_message_part(WorkerId id, const Frame& frame, TimePoint now);
  void on_worker_message(Worker& worker, const ControlMessage& message, TimePoint now);
  void on_edge_frame(ConnId conn, const Frame& frame, TimePoint now);
  void close_edges(const std::vector<ConnId>& conns);
  void refuse(ConnId conn, const std::string& reason, TimePoint now);  // sends the reason, and closes
  void on_beat(TimePoint now);                                         // once in every heartbeat interval
  // A beacon is the learner's signed heartbeat: it lists the newest version and the revoked workers.
  void make_beacon(TimePoint now);
  std::optional<Version> base_of_newest() const;
  Status add_own(const PublicationId& id, const PublicationKey& key, const SealedChunk& chunk);
  void save(TimePoint now);
  void after_saved(TimePoint now);

  // Presence (learner_presence.cpp).
  void test_reachability(const Worker& worker, TimePoint now);
  void on_reachability_tested(const Reachability::Outcome& dial, const std::string& reason, TimePoint now);
  void mark_silent(WorkerId id, const std::string& reason, TimePoint now);
  void set_away(WorkerId id, const std::string& reason, TimePoint now);
  void remove_worker(WorkerId id, const std::string& reason, bool send_goodbye, TimePoint now);
  void forget_away(WorkerId id, const std::string& reason);
  void forget_records(WorkerId id);
  Roster::Workers::node_type disconnect(WorkerId id, const std::string* goodbye, TimePoint now);
  void lose_place(Worker& worker, TimePoint now);
  void postpone_after_pause(TimePoint now);
  void check_presence(TimePoint now);

  // Publications (learner_publications.cpp).
  static std::string never_published_text(const Installed& installed);
  std::vector<std::uint32_t> chunks_by_stripe(const StoredPublication& stored) const;
  void on_ack(Worker& worker, const Installed& ack, TimePoint now);
  double expected_lateness(const Broadcast& broadcast, TimePoint now) const;
  void report_finished_broadcasts(TimePoint now);
  void give_up_stragglers(TimePoint now);
  void report_broadcast(const BroadcastTimes::Done& done);
  void close_saved_publications(TimePoint now);
  std::vector<const StoredPublication*> deltas_back_to(Version from) const;
  void request_next_catch_up(TimePoint now);
  void on_need_help(Worker& worker, const NeedHelp& need, TimePoint now);
  std::vector<Helpers::Candidate> possible_helpers(const Worker& worker, const NeedHelp& need, Version target,
                                                   TimePoint now) const;
  bool reserve_uplink_for(const Worker& worker, const NeedHelp& need, Version target, TimePoint now);

  // Topology (learner_topology.cpp).
  void plan_soon(TimePoint now);
  void plan_now(TimePoint now);
  void choose_topology_kind(TimePoint now);
  void move_behind_others(WorkerId id, TimePoint now);
  void remove_from_topology(WorkerId id, TimePoint now);
  void set_topology(chains::Topology topology, TimePoint now);
  // A grant is the learner's signed proof for the parents that they must serve this child.
  void issue_grant(Worker& worker, Assign& assign, TimePoint now);
  SignedGrant sign_grant(WorkerId child, Grant unsigned_grant, TimePoint now);
  void renew_grants(TimePoint now);
  chains::ChainWorker chain_worker(const Worker& worker, TimePoint now) const;
  TopologyPlan::Fleet fleet(TimePoint now) const;
  // The nodes that are not silent (trainer_node.hpp). One that may not feed workers now has no uplink.
  std::vector<chains::SourceNode> source_nodes(TimePoint now) const;
  BitRate sources_up(TimePoint now) const;   // uplinks of the learner and its nodes
  bool is_late(const Worker& worker) const;  // lacks the base of the newest publication
  std::set<WorkerId> late_workers() const;
  BitRate learner_up() const;
  void count_delivered_bytes(const Worker& child, const PublicationId& id,
                             const std::vector<std::uint32_t>& chunks_before,
                             const std::vector<std::uint32_t>& chunks_now);
  void on_heartbeat(Worker& worker, const Heartbeat& beat, TimePoint now);
  void measure_hops(TimePoint now);
  std::optional<BitRate> planned_rate(const Parent& parent, const Worker& child, double copies) const;
  void on_slow_hop(const HopMonitor::Finding& finding, TimePoint now);

  // Conduct (learner_conduct.cpp).
  bool within_budget(WorkerId id, MessageBudget::Kind kind, TimePoint now, std::size_t bytes = 0);
  void on_malformed(WorkerId id, const std::string& what, TimePoint now);
  void on_unfounded_accusation(Worker& accuser, WorkerId accused, TimePoint now);
  void on_edge_failed(Worker& child, const EdgeFailed& failed, TimePoint now);
  bool pass_dial_turn(Worker& child, const Worker& parent, TimePoint now);
  void on_stalled(Worker& child, TimePoint now);
  bool is_ahead_of(const Parent& parent, const Worker& child) const;
  void apply_ruling(WorkerId child, WorkerId parent, Conduct::Ruling ruling, TimePoint now);
  void on_poisoned(Worker& child, const Poisoned& poisoned, TimePoint now);
  void separate(WorkerId child, WorkerId parent, TimePoint now);  // no common edge from now on
  void on_quarantined(WorkerId id, const std::string& why, TimePoint now);
  void check_conduct(TimePoint now);
  void credit_delivery(WorkerId sender, WorkerId receiver, TimePoint now);

  LearnerConfig config_;
  LearnerFile file_;
  Identities identities_;
  Conduct conduct_;
  PublicationStore store_;
  EdgeSender edges_;
  TopologyPlan plan_;
  SlowHops slow_hops_;
  PendingPeers pending_peers_;
  Roster workers_;
  Reachability reach_;
  Publications publications_;
  GrantBook grants_;  // of this learner's own children
  CatchUps catch_ups_;
  Helpers helpers_;
  std::optional<SignedBeacon> beacon_;
  TimePoint next_beat_at_ = kNever;
};

}  // namespace echoline::overlay
