// When a publication reaches whom: chains' planner and broadcast-time model, in place of the protocol. Private to sim/.
#pragma once
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "chains/broadcast_model.hpp"
#include "chains/planner.hpp"
#include "sim/run_scenario.hpp"

namespace echoline::sim {

struct Receiver {
  WorkerId id;
  BitRate up, down;
  std::uint32_t region = 0;  // of PlanRequest::regions
  double reliability = 1;
};

class RunBroadcast {
 public:
  explicit RunBroadcast(const RunScenario& scenario) : scenario_(scenario) {}

  void add(const Receiver& receiver);
  void remove(WorkerId id);
  // Its links carry something else from now on. Times follow at once, the topology once a publication has shown it.
  Status relink(const Receiver& receiver);
  std::size_t size() const { return members_.size(); }

  // Times for a payload of this size to whoever is there. The topology is planned anew where more than a twentieth of
  // its workers have come or gone since; until then who has gone is left out, and who has come is as late as half of
  // the others.
  Status prepare(Bytes payload);
  // Of prepare(): from the start until this worker holds all of it.
  Duration time_of(WorkerId id) const;
  // Until the first worker holds it: for so long the learner's links are taken, and the next one waits.
  Duration first() const { return first_; }
  Duration quorum() const { return quorum_; }
  Duration lower_bound() const;
  // How many whole payloads they send.
  double copies_of(WorkerId id) const;
  double learner_copies() const { return copies_of(kLearnerId); }
  // And how many go from one region to another.
  double crossing_copies() const { return crossing_; }
  // How long a newcomer waits for a payload that a neighbour has.
  Duration from_a_neighbour(Bytes payload, const Receiver& receiver) const;

  const chains::Topology& topology() const { return topology_; }
  std::size_t depth() const { return depth_; }
  std::uint64_t planned() const { return planned_; }

 private:
  Status plan();
  Status reckon(Bytes payload);
  Bytes chunk_of(Bytes sent) const;
  double on_the_wire(Bytes payload) const;  // bytes, with what headers and encryption add

  const RunScenario& scenario_;
  std::map<WorkerId, Receiver> members_;
  std::size_t changed_ = 0, unseen_ = 0;          // since it was planned; links that no publication has gone over yet
  std::optional<chains::TopologyPolicy> chosen_;  // what auto stands for, in a fleet of that size
  std::size_t chosen_for_ = 0;
  chains::Topology topology_;
  std::vector<chains::WorkerLink> links_;
  std::unordered_map<WorkerId, double> copies_;  // of the learner, too
  double crossing_ = 0;
  std::size_t depth_ = 0;
  std::uint64_t planned_ = 0;
  Bytes payload_;
  chains::BroadcastTimes times_;
  Duration first_{}, half_{}, quorum_{};
  BitRate usual_up_;
};

}  // namespace echoline::sim
