// Computes delivery times of publications by chains' planner and broadcast-time model, without the protocol. Private to
// sim/.
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
  // Changes a receiver's links. Times change at once, the topology after the next publication.
  Status relink(const Receiver& receiver);
  std::size_t size() const { return members_.size(); }

  // Computes times for a payload to the current receivers. Plans the topology again if more than a twentieth of its
  // workers have joined or left. Until then it leaves out workers that left, and gives new ones the median time.
  Status prepare(Bytes payload);
  // Time from the start until this worker holds the payload prepared last.
  Duration time_of(WorkerId id) const;
  // Until the first worker holds it. The learner's links are busy that long, so the next publication waits.
  Duration first() const { return first_; }
  Duration quorum() const { return quorum_; }
  Duration lower_bound() const;
  // Number of whole payloads that this node sends.
  double copies_of(WorkerId id) const;
  double learner_copies() const { return copies_of(kLearnerId); }
  // Number of payloads sent from one region to another.
  double crossing_copies() const { return crossing_; }
  // Time for a newcomer to get the payload from a neighbour.
  Duration from_a_neighbour(Bytes payload, const Receiver& receiver) const;

  const chains::Topology& topology() const { return topology_; }
  std::size_t depth() const { return depth_; }
  std::uint64_t planned() const { return planned_; }

 private:
  Status plan();
  Status reckon(Bytes payload);
  Bytes chunk_of(Bytes sent) const;
  double on_the_wire(Bytes payload) const;  // in bytes, including headers and encryption

  const RunScenario& scenario_;
  std::map<WorkerId, Receiver> members_;
  std::size_t changed_ = 0, unseen_ = 0;          // since the last plan; changed links that no publication has used yet
  std::optional<chains::TopologyPolicy> chosen_;  // the choice of kAuto for a fleet of this size
  std::size_t chosen_for_ = 0;
  chains::Topology topology_;
  std::vector<chains::WorkerLink> links_;
  std::unordered_map<WorkerId, double> copies_;  // including the learner
  double crossing_ = 0;
  std::size_t depth_ = 0;
  std::uint64_t planned_ = 0;
  Bytes payload_;
  chains::BroadcastTimes times_;
  Duration first_{}, half_{}, quorum_{};
  BitRate usual_up_;
};

}  // namespace echoline::sim
