// The invariants of a simulated fleet, checked at every step under all faults. A step is one event of the world.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "sim/fleet.hpp"

namespace echoline::sim {

struct Violation {
  TimePoint at;
  std::string rule;  // a constant below
  std::string text;
};

// Register it with both the world and the fleet, which must outlive it.
class Invariants final : public Observer, public FleetObserver {
 public:
  static constexpr const char* kBytes = "bytes";                   // honest workers forward and install no wrong byte
  static constexpr const char* kMonotonicVersion = "no way back";  // a worker's active version never decreases
  static constexpr const char* kBudget = "budget";                 // memory and disk stay within their limits
  static constexpr const char* kTree = "tree";      // each worker has one parent per stripe, and there is no cycle
  static constexpr const char* kFrugal = "frugal";  // the learner sends hardly any chunk that the child already has
  // No honest worker is quarantined or expelled. After a few bad chunks the learner assigns the child to another
  // parent.
  static constexpr const char* kBlame = "blame";
  static constexpr const char* kSound = "sound";  // each core sends its application only valid events, in order
  // A worker is reported away only after enough silence, and lost only after it was away.
  static constexpr const char* kPresence = "presence";
  static constexpr const char* kLiveness = "liveness";  // in the end every worker has the newest version
  // No honest worker serves a peer that the learner did not assign to it as a child.
  static constexpr const char* kOnlyAssignedChildren = "granted";
  // A worker that sends too much is expelled, however often it reconnects.
  static constexpr const char* kFlood = "flood";
  static constexpr const char* kTimely = "timely";  // without faults, a publication takes about the planned time

  Invariants(World& world, Fleet& fleet);

  void on_frame(HostId from, HostId to, std::optional<WorkerId> certified_id, const overlay::Frame& frame) override;
  void on_step(HostId host) override;
  void on_delivered(std::size_t worker, const overlay::act::DeliverPublication& delivery) override;
  void on_activated(std::size_t worker, const overlay::Installed& active) override;
  void on_new_identity(std::size_t worker, WorkerId id) override;
  void on_topology(const chains::Topology& topology) override;
  void on_joined(WorkerId id) override;
  void on_away(WorkerId id, const std::string& reason) override;
  void on_lost(WorkerId id, const std::string& reason) override;

  // Checks the parents of each worker, one per stripe: all paths lead to the learner, and no worker exceeds
  // `children_max`.
  void check_parents(const std::map<WorkerId, std::vector<WorkerId>>& parents, std::size_t children_max);
  // `disk_failed`: a write has failed, so memory holds some of the disk's data.
  void check_budget(std::size_t worker, const overlay::StoreLimits& limits, std::uint64_t memory_bytes,
                    std::uint64_t disk_bytes, bool disk_failed);
  // Checks quarantines, wasted chunks and remembered publications by the learner's statistics. Called every
  // kStepsPerStatisticsCheck steps and once at the end.
  void check_learner_statistics();
  // Describes a worker that considers itself a member, but is silent or missing in the learner's view. Empty if there
  // is none.
  std::string worker_missing_from_topology() const;
  // Checks, at the end of a phase without faults, that every running worker has the newest version.
  void check_liveness();
  // From now on nothing prevents honest messages from reaching the learner.
  void set_faults_over() { faults_over_ = true; }

  void report_violation(const char* rule, std::string text);
  const std::vector<Violation>& violations() const { return violations_; }

  struct Counts {
    std::uint64_t chunks = 0;                       // chunk frames that arrived
    std::uint64_t deliveries = 0, activations = 0;  // of policies, on workers
    std::uint64_t topologies = 0;                   // published by the learner
    std::uint64_t quarantined = 0;                  // highest number of workers at a time
    std::uint64_t away = 0, back = 0, lost = 0;     // reports by the learner about workers
    std::uint64_t learner_chunk_bytes = 0;          // sent by the learner
    std::uint64_t learner_wasted_bytes = 0;         // the part for children that had the chunk
    std::uint64_t edge_failures = 0;                // edges that children reported as failed
    std::uint64_t intrusions = 0;                   // messages of the intruder
    std::uint64_t floods = 0, flood_messages = 0;   // workers that sent too much; all their messages
  };
  const Counts& counts() const { return counts_; }

 private:
  bool honest_may_be_outvoted() const;

  // The state of one of the learner's children, as far as the learner can know it.
  struct ChildView {
    std::optional<Version> position;         // newest version that the child has
    std::optional<Version> catch_up_target;  // version to which a helper brings the child
    std::map<overlay::PublicationId, overlay::ChunkSet> held_chunks;
  };
  bool is_honest(HostId host) const;
  void on_bad_chunk(HostId from, HostId to, const overlay::Frame& frame);
  void count_bad_chunk(std::size_t child, const overlay::WorkerStats& stats);
  void on_chunk_of_learner(std::size_t worker, const overlay::Frame& frame);
  void on_message_to_learner(std::size_t worker, WorkerId sender_id, const overlay::ControlMessage& message);
  // A worker as the current learner process's application sees it.
  struct Presence {
    bool connected = false;
    TimePoint away_since{}, last_heartbeat_at{};
  };
  // Messages of a flooding worker over all its connections, counted by the learner's own budget.
  struct Flood {
    overlay::MessageBudget budget;
    std::uint64_t messages_over_budget = 0;
  };
  // The workers and budgets that one process of the learner knows.
  struct LearnerView {
    std::uint64_t learner_start = 0;
    std::map<WorkerId, Presence> presence;
    std::map<WorkerId, Flood> floods;
  };
  LearnerView& learner_view();  // of the current process
  void on_flood(WorkerId from, const overlay::ControlMessage& message);
  void record_have(std::size_t worker, const overlay::Have& have, bool starts_connection);

  // Below, a std::size_t names a worker by its index in the Fleet. A new identity gives it another WorkerId.
  World& world_;
  Fleet& fleet_;
  std::vector<Violation> violations_;
  Counts counts_;
  // Highest (epoch, version) of each identity.
  std::map<WorkerId, std::optional<std::pair<std::uint64_t, Version>>> active_;
  std::map<std::size_t, ChildView> children_;
  // By sender and honest receiver, since the faults ended.
  std::map<std::pair<WorkerId, WorkerId>, std::uint64_t> bad_chunks_;
  struct BadChunk {
    std::size_t child;
    WorkerId parent;
    std::uint64_t corrupt_chunks_before;  // corrupt chunks that the child had counted
  };
  std::optional<BadChunk> chunk_in_delivery_;  // a bad chunk that its receiver is about to check
  LearnerView learner_view_;
  // Number of identities of workers that accuse falsely. A new identity of the same worker counts again.
  std::size_t slandering_identities_ = 0;
  bool faults_over_ = false;
  std::uint64_t waste_allowance_bytes_ = 0;  // grows with each change of an edge
  std::uint64_t steps_ = 0;
};

}  // namespace echoline::sim
