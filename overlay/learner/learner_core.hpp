// The learner's protocol: enrols and admits workers, plans who forwards to whom, is the source of every publication,
// mends the topology when somebody dies, is slow or lies, and measures the broadcast time T_b. Pure.
//
// A worker that is not heard is first silent: it loses its place in the topology at once, by how regularly it was heard
// so far. After heartbeat_timeout, or when its connection breaks, it is away: its connections end, what it was doing is
// void. It keeps its identity and record, and is a full member again when it comes back. After away_max it is gone.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <set>

#include "chains/apart.hpp"
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
#include "overlay/settings.hpp"
#include "overlay/strangers.hpp"
#include "overlay/wire/grant.hpp"
#include "overlay/wire/sealer.hpp"

namespace echoline::overlay {

struct LearnerConfig : LearnerRules {
  CoreOptions core;
  Endpoint self;  // where this learner listens
  std::shared_ptr<const trust::Authority> authority;
  std::shared_ptr<const Checker> checker;  // of the same authority
  std::optional<LearnerState> state;       // of an earlier process of this run
  // The application stands here after a restart: what was published beyond is disowned, and a new epoch begins.
  std::optional<Version> resumed_at;
  bool durable = false;                                       // act::SaveState is carried out
  std::function<std::uint32_t(const MemberInfo&)> region_of;  // may be empty: all with the learner; pure
  Bytes store_bytes_max{1ull << 30};
  Bytes policy_bytes{};                              // size of the policy, for workers; zero: not known
  std::size_t message_bytes_max = kMessageBytesMax;  // of a worker; what is longer is not kept
  // Parts of messages that are not whole yet, of all workers together: whoever holds most of them has to come anew.
  std::size_t assembling_bytes_max = 16 * kMessageBytesMax;
  // What the application says of the bytes that ride on a heartbeat. May be empty; pure.
  std::function<Status(std::string_view)> check_heartbeat;
  bool tells_heartbeats = false;    // act::HeardFrom comes with every one
  bool catch_ups_on_demand = true;  // somebody answers act::NeedCatchUp
  // Most stored deltas that act::NeedCatchUp may ask to fold into one; fewer where they have more than 1/kFoldShare of
  // policy_bytes together.
  std::size_t folded_max = 64;
  std::function<std::string(const MemberInfo&)> welcome;  // may be empty; pure; at most kWelcomeBytesMax
};

class LearnerCore final : public Core {
 public:
  static constexpr std::size_t kWelcomeBytesMax = 192 * 1024;
  // Application bytes a worker has not taken yet, before its connection is given up.
  static constexpr std::size_t kUnsentBytesMax = 4 * kMessageBytesMax;
  static constexpr Duration kBeaconLifetime = std::chrono::minutes(2);
  // Of heartbeat_timeout, that a worker does not hear the learner before it looks for it anew: a learner that stood
  // still for a while is not left, and who comes from another address now is back soon.
  static constexpr int kLearnerPatience = 5;
  static constexpr int kTroublesMax = 64;  // told by one worker

  explicit LearnerCore(LearnerConfig config);
  void start(TimePoint now);

  // A publication opens, grows and closes. kInvalid: its version is not newer than the last, or its base was never
  // published. With `catch_up` it is one that helps late workers to a version already published.
  Status begin(const Announcement& announcement, const SignedAnnouncement& as_signed, bool catch_up, TimePoint now);
  Status add(const PublicationId& id, std::vector<SealedChunk> chunks, TimePoint now);
  // It counts as published once its digest is on disk. kInvalid: published before with another digest. `sealing`: the
  // time that hashing and signing took since begin(), for BroadcastParts.
  Status finish(const Manifest& manifest, const SignedManifest& as_signed, TimePoint now, Duration sealing = {});
  // Takes back a publication that was not closed.
  void abandon(const PublicationId& id, TimePoint now);
  // The stored deltas that lead from version `from` to the newest. kNotFound: some are no longer stored, or they are
  // more than may be folded.
  Result<StoredDeltas> deltas_from(Version from) const;
  const Checker& checker() const { return *config_.checker; }

  // At most kMessageBytesMax (checked); nothing happens when the worker is not there.
  void send_message(WorkerId worker, Slice bytes, TimePoint now);
  // Ends the membership and revokes the certificate.
  void expel(WorkerId worker, const std::string& reason, TimePoint now);
  // Its machine has ended: it is not waited for.
  void give_up(WorkerId worker, const std::string& reason, TimePoint now);
  void leave(TimePoint now);  // goodbye to everybody
  LearnerStats stats() const;
  void check() const;  // what holds between two events
  const chains::Topology& topology() const { return plan_.topology(); }
  // The chunk with which a publication of this kind should be there soonest (chains::best_chunk()): one as large as the
  // last of its kind was, down the present topology. Never so small that a snapshot of the policy would have too many.
  Bytes chunk_for(const PublicationKey& key, TimePoint now) const;
  const LearnerState& state() const { return file_.state(); }
  std::uint64_t epoch() const { return state().epoch; }
  // Of what is issued now: milliseconds since 1970, but strictly later than all that this run has issued so far,
  // wherever the clock has gone between two processes of it.
  std::uint64_t issue_time(TimePoint now);

  void on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) override;
  void on_connected(ConnId conn, TimePoint now) override;
  void on_closed(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_corrupt(ConnId conn, const std::string& reason, TimePoint now) override;
  void on_frame(ConnId conn, Frame frame, TimePoint now) override;
  void on_sent(ConnId conn, std::size_t bytes, TimePoint now) override;
  void on_saved(const Status& status, TimePoint now) override;
  void on_narrow_path(WorkerId peer, const std::string& what, TimePoint) override {
    actions_.push_back(act::TroubleOf{peer, what});
  }
  void on_timer(TimePoint now) override;
  TimePoint next_deadline() const override;

 private:
  using Broadcast = BroadcastTimes::Broadcast;

  // Membership (learner_core.cpp).
  void on_stranger(ConnId conn, const Stranger& stranger, const Frame& frame, TimePoint now);
  void renew(Worker& worker, const Renew& renew, TimePoint now);
  void admit_worker(ConnId conn, const Stranger& stranger, Hello hello, TimePoint now);
  void admit_edge(ConnId conn, WorkerId id, PeerHello hello, TimePoint now);
  void open_edge(ConnId conn, WorkerId id, PeerHello hello, TimePoint now);
  void on_part(WorkerId id, const Frame& frame, TimePoint now);
  void on_worker(Worker& worker, const ControlMessage& message, TimePoint now);
  void on_edge(ConnId conn, const Frame& frame, TimePoint now);
  void refuse(ConnId conn, const std::string& reason, TimePoint now);
  void beat(TimePoint now);
  void make_beacon(TimePoint now);
  std::optional<Version> base_of_newest() const;
  Status add_own(const PublicationId& id, const PublicationKey& key, const SealedChunk& chunk);
  void save(TimePoint now);
  void after_saved(TimePoint now);

  // Presence (learner_presence.cpp).
  void dial_back(const Worker& worker, TimePoint now);
  void on_dialled_back(const Reachability::Outcome& dial, const std::string& reason, TimePoint now);
  void silence(WorkerId id, const std::string& reason, TimePoint now);
  void part(WorkerId id, const std::string& reason, TimePoint now);
  void lose(WorkerId id, const std::string& reason, bool say_goodbye, TimePoint now);
  void gone(WorkerId id, const std::string& reason);
  void forget(WorkerId id);
  Roster::Workers::node_type disconnect(WorkerId id, const std::string* goodbye, TimePoint now);
  void lose_place(Worker& worker, TimePoint now);
  void excuse_pause(TimePoint now);
  void watch_presence(TimePoint now);

  // Publications (learner_publications.cpp).
  static std::string never_published(const Installed& what);
  void on_ack(Worker& worker, const Installed& ack, TimePoint now);
  double expected_lateness(const Broadcast& broadcast, TimePoint now) const;
  void check_broadcasts(TimePoint now);
  void give_up_waiting(TimePoint now);
  void report(const BroadcastTimes::Done& done);
  void close_finished(TimePoint now);
  std::vector<const StoredPublication*> deltas_back_to(Version from) const;
  void ask_for_catch_up(TimePoint now);
  void on_need_help(Worker& worker, const NeedHelp& need, TimePoint now);
  std::vector<Helpers::Candidate> possible_helpers(const Worker& worker, const NeedHelp& need, Version target,
                                                   TimePoint now) const;
  bool may_help(const Worker& worker, const NeedHelp& need, Version target, TimePoint now);

  // Topology (learner_topology.cpp).
  void plan_soon(TimePoint now);
  void plan_anew(TimePoint now);
  void choose_policy(TimePoint now);
  void move_back(WorkerId id, TimePoint now);
  void take_out(WorkerId id, TimePoint now);
  void set_topology(chains::Topology topology, TimePoint now);
  void grant(Worker& worker, Assign& assign, TimePoint now);
  SignedGrant sign_grant(WorkerId child, Grant what, TimePoint now);
  void grant_anew(TimePoint now);
  chains::ChainWorker chain_worker(const Worker& worker, TimePoint now) const;
  TopologyPlan::Fleet fleet(TimePoint now) const;
  bool catching_up(const Worker& worker) const;
  std::set<WorkerId> those_behind() const;
  BitRate learner_up() const;
  void count_delivered(const Worker& child, const PublicationId& id, const std::vector<std::uint32_t>& before,
                       const std::vector<std::uint32_t>& now_there);
  void on_heartbeat(Worker& worker, const Heartbeat& beat, TimePoint now);
  void watch_hops(TimePoint now);
  std::optional<BitRate> planned_rate(const Parent& parent, const Worker& child, double copies) const;
  void on_slow_hop(const HopMonitor::Finding& finding, TimePoint now);

  // Conduct (learner_conduct.cpp).
  bool within_budget(WorkerId id, MessageBudget::Kind kind, TimePoint now, std::size_t bytes = 0);
  void on_broken(WorkerId id, const std::string& what, TimePoint now);
  void on_unfounded(Worker& accuser, WorkerId of, TimePoint now);
  void on_edge_failed(Worker& child, const EdgeFailed& failed, TimePoint now);
  bool other_end_dials(Worker& child, const Worker& parent, TimePoint now);
  void on_stalled(Worker& child, TimePoint now);
  bool holds_back(const Parent& parent, const Worker& child) const;
  void on_failed_edge(WorkerId child, WorkerId parent, Conduct::Ruling ruling, TimePoint now);
  void on_poisoned(Worker& child, const Poisoned& poisoned, TimePoint now);
  void put_apart(WorkerId child, WorkerId parent, TimePoint now);
  void on_quarantined(WorkerId id, const std::string& why, TimePoint now);
  void watch_conduct(TimePoint now);
  void credit(WorkerId sender, WorkerId receiver, TimePoint now);

  LearnerConfig config_;
  LearnerFile file_;
  Identities identities_;
  Conduct conduct_;
  PublicationStore store_;
  EdgeSender edges_;
  TopologyPlan plan_;
  SlowHops slow_hops_;
  Strangers strangers_;
  Roster workers_;
  Reachability reach_;
  Publications publications_;
  GrantBook grants_;  // of this learner's own children
  CatchUps catch_ups_;
  Helpers helpers_;
  std::optional<SignedBeacon> beacon_;
  TimePoint beat_at_ = kNever;
};

}  // namespace echoline::overlay
