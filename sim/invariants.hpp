// What must hold in a simulated fleet at every step, whatever goes wrong around it.
#pragma once
#include <set>
#include <string>
#include <vector>

#include "sim/fleet.hpp"

namespace echoline::sim {

struct Violation {
  TimePoint at;
  std::string rule;  // one of the names below
  std::string text;
};

// Register it with both the world and the fleet; both must outlive it.
class Invariants final : public Observer, public FleetObserver {
 public:
  static constexpr const char* kBytes = "bytes";            // nobody honest forwards or installs a foreign byte
  static constexpr const char* kNoWayBack = "no way back";  // the active version of a worker never decreases
  static constexpr const char* kBudget = "budget";          // memory and disk stay within their limits
  static constexpr const char* kTree = "tree";              // one parent per worker and stripe, no cycle
  static constexpr const char* kFrugal = "frugal";          // the learner sends no chunk that its child has
  static constexpr const char* kBlame = "blame";        // nobody honest is quarantined or expelled; bad chunks part two
  static constexpr const char* kSound = "sound";        // what cores and applications tell each other makes sense
  static constexpr const char* kPresence = "presence";  // who is silent is away in time, and not gone before that
  static constexpr const char* kLiveness = "liveness";  // at last everybody has the newest version
  static constexpr const char* kGranted = "granted";    // nobody honest serves who was not sent there
  static constexpr const char* kFlood = "flood";        // who says too much is out, however often it connects
  static constexpr const char* kTimely = "timely";      // in peace a publication takes about as long as planned

  Invariants(World& world, Fleet& fleet);

  void on_frame(HostId from, HostId to, std::optional<WorkerId> as, const overlay::Frame& frame) override;
  void on_step(HostId host) override;
  void on_delivered(std::size_t worker, const overlay::act::Deliver& delivery) override;
  void on_activated(std::size_t worker, const overlay::Installed& active) override;
  void on_identity(std::size_t worker, WorkerId id) override;
  void on_topology(const chains::Topology& topology) override;
  void on_joined(WorkerId id) override;
  void on_away(WorkerId id, const std::string& reason) override;
  void on_lost(WorkerId id, const std::string& reason) override;

  // Every worker and its parents, one for each stripe: all hang on the learner, nobody but it has two children.
  void check_parents(const std::map<WorkerId, std::vector<WorkerId>>& parents, std::size_t children_max);
  // `disk_failed`: a write has failed, so that some of what belongs on disk is in memory.
  void check_budget(std::size_t worker, const overlay::StoreLimits& limits, std::uint64_t memory, std::uint64_t disk,
                    bool disk_failed);
  // Looked at now and then, and once at the end.
  void check_learner();
  // Somebody who takes itself for a member and has no place with the learner, and why; empty: nobody.
  std::string without_place() const;
  // Faults are over: every worker that runs and can reach the learner has reached the newest version.
  void check_liveness();
  // From now on nothing hinders honest words from reaching the learner.
  void faults_are_over() { peace_ = true; }

  void violated(const char* rule, std::string text);
  const std::vector<Violation>& violations() const { return violations_; }

  struct Counts {
    std::uint64_t chunks = 0, deliveries = 0, activations = 0, topologies = 0, quarantined = 0;
    std::uint64_t away = 0, back = 0, gone = 0;
    std::uint64_t learner_chunk_bytes = 0, learner_wasted_bytes = 0;
    std::uint64_t edge_failures = 0, intrusions = 0, floods = 0, flood_messages = 0;
  };
  const Counts& counts() const { return counts_; }

 private:
  bool honest_are_outnumbered() const;

  // What one child of the learner has, as far as the learner can know.
  struct Child {
    std::uint64_t process = 0;
    std::optional<Version> position, helped_to;
    std::map<overlay::PublicationId, overlay::ChunkSet> has;
  };
  bool honest(HostId host) const;
  void on_bad_chunk(HostId from, HostId to, const overlay::Frame& frame);
  void judge_bad_chunk(std::size_t child, const overlay::WorkerStats& stats);
  void on_chunk_of_learner(std::size_t worker, const overlay::Frame& frame);
  void on_message_to_learner(std::size_t worker, WorkerId as, const overlay::ControlMessage& message);
  // A worker as the application of the present learner process sees it.
  struct Presence {
    bool there = false;
    TimePoint away_since{}, heard{};
  };
  Presence& presence(WorkerId id);
  void on_flood(WorkerId from, const overlay::ControlMessage& message);
  void take_have(std::size_t worker, const overlay::Have& have, bool anew);

  World& world_;
  Fleet& fleet_;
  std::vector<Violation> violations_;
  Counts counts_;
  std::map<WorkerId, std::optional<std::pair<std::uint64_t, Version>>> active_;  // highest (epoch, version)
  std::map<std::size_t, Child> children_;
  // By sender and honest receiver, since faults are over.
  std::map<std::pair<WorkerId, WorkerId>, std::uint64_t> bad_chunks_;
  struct Suspicion {  // a bad chunk that is being given to its receiver
    std::size_t child;
    WorkerId parent;
    std::uint64_t corrupt_before;
  };
  std::optional<Suspicion> suspected_;
  // What the learner has heard from one that floods, over whatever connections: by the rules that it has itself.
  struct Flood {
    overlay::MessageBudget budget;
    std::uint64_t too_many = 0;
  };
  std::map<WorkerId, Flood> floods_;
  std::size_t slanderers_ = 0;       // identities: two that agree are believed
  std::uint64_t flood_process_ = 0;  // of the learner
  std::map<WorkerId, Presence> presence_;
  std::uint64_t learner_process_ = 0;  // that presence_ is about
  bool peace_ = false;
  std::uint64_t allowed_waste_ = 0;  // what was on its way when an edge changed
  std::uint64_t steps_ = 0;
};

}  // namespace echoline::sim
