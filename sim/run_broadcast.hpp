// Delivery times of a simulated run's publications, by the planner and the broadcast-time model of chains/, without the
// protocol. Private to sim/.
#pragma once
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "chains/broadcast_model.hpp"
#include "chains/planner.hpp"
#include "sim/run_scenario.hpp"

namespace echoline::sim {

// A worker that receives publications, with its links.
struct Receiver {
  WorkerId id;
  BitRate up, down;
  std::uint32_t region = 0;  // index in the plan request's regions
  double reliability = 1;    // share of the time that it is up
};

class RunBroadcast {
 public:
  explicit RunBroadcast(const RunScenario& scenario) : scenario_(scenario) {}

  void add(const Receiver& receiver);
  void remove(WorkerId id);
  // Changes a receiver's links. Recomputes the times of the last prepare() at once. The next prepare() does not yet
  // count the change as a reason to plan the topology again; the later ones do.
  Status change_links(const Receiver& receiver);
  std::size_t size() const { return members_.size(); }

  // Computes times for a payload to the current receivers. Plans the topology again if more than a twentieth of its
  // workers have joined, left or changed. Until then, workers that left are ignored, and new ones get the median time.
  Status prepare(Bytes payload);
  // Time from the publication until this worker holds the payload of the last prepare().
  Duration time_of(WorkerId id) const;
  // Time until the first worker holds it. The learner's links are busy that long, so the next publication waits.
  Duration first_completion() const { return times_.first; }
  Duration quorum_time() const { return times_.quorum; }
  // Lower bound of quorum_time() over all topologies and schedules. For the payload without wire overhead, as in the
  // learner's report.
  Duration lower_bound() const;
  // Numbers of whole payloads sent, by one node or from one region to another. A stripe is one of n parts of the
  // payload, so an edge of one stripe counts 1/n.
  double copies_sent_by(WorkerId id) const;
  double copies_sent_by_learner() const { return copies_sent_by(kLearnerId); }
  double copies_between_regions() const { return copies_between_regions_; }
  // Time for a newcomer to get the payload from a neighbour.
  Duration neighbour_transfer_time(Bytes payload, const Receiver& receiver) const;

  const chains::Topology& topology() const { return topology_; }
  std::size_t depth() const { return depth_; }
  std::uint64_t topologies_planned() const { return topologies_planned_; }

 private:
  // When the workers hold a payload.
  struct Times {
    Bytes payload;  // 0: the times must be computed again
    chains::BroadcastTimes broadcast;
    Duration first{}, median{}, quorum{};
  };
  Status plan();
  Status compute_times(Bytes payload);
  Bytes chunk_size(Bytes sent_size) const;
  double wire_bytes(Bytes payload) const;  // including headers and encryption

  const RunScenario& scenario_;
  std::map<WorkerId, Receiver> members_;
  std::size_t members_changed_ = 0;                      // receivers that joined, left or changed since the last plan
  std::size_t links_changed_ = 0;                        // links changed since the last publication
  std::optional<chains::TopologyPolicy> chosen_policy_;  // kAuto's choice when the fleet had chosen_for_size_ receivers
  std::size_t chosen_for_size_ = 0;
  chains::Topology topology_;
  std::vector<chains::WorkerLink> links_;
  std::unordered_map<WorkerId, double> copies_sent_;  // by sender; the learner is one
  double copies_between_regions_ = 0;
  std::size_t depth_ = 0;
  std::uint64_t topologies_planned_ = 0;
  Times times_;
  BitRate median_up_;
};

}  // namespace echoline::sim
