// The learner's list of workers: their state, installed versions, accepted rollouts, and the providers' offers from
// which they were rented. Private to learner/.
#pragma once
#include <map>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "chains/broadcast_model.hpp"
#include "learner/report.hpp"
#include "learner/run_config.hpp"
#include "learner/worker_meter.hpp"
#include "overlay/types.hpp"
#include "provisioner/plan.hpp"

namespace echoline::learner {

// Thread-safe: called by the overlay, the RolloutDesk, the fleet and the main thread.
class Roster {
 public:
  // The configuration and the plan must outlive it.
  Roster(const RunConfig& config, const provisioner::Plan& plan);

  // Records the offer of a requested machine, with its current price.
  void add_rented_offer(const provisioner::Offer& offer);
  // Returns the region of `place`. If that is empty, uses the place of the offer with the worker's name: a rented
  // worker is named after its offer.
  std::uint32_t region_of(const std::string& name, const std::string& place) const;
  // The links of the offer with the worker's name; absent if neither the offer nor the run file states them.
  overlay::LinkLimits expected_links(const std::string& name) const;
  void on_presence_change(const PresenceChange& change, TimePoint now);
  // The trainer's nodes are members of the overlay, but no workers. The next two return false for other members.
  void on_node_joined(const overlay::MemberInfo& node);
  bool on_node_gone(WorkerId id, Presence presence);  // away or lost
  bool is_node(WorkerId id) const;                    // also of a node that is gone
  BitRate nodes_up() const;                           // of the present ones: their uplinks as they state them
  nlohmann::json nodes() const;                       // one row per node, as under `nodes` in status.json
  void count_trouble(WorkerId id);                    // the overlay reported an error of the worker
  void record_acknowledgement(WorkerId id, Version version, const overlay::Digest& digest);
  // Returns the worker's progress since its last heartbeat.
  WorkerMeter::Progress take_heartbeat(WorkerId id, const schema::Vitals& vitals, TimePoint now);
  void record_accepted(WorkerId id, std::uint64_t rollouts, double lease_seconds);
  void record_turned_away(WorkerId id);  // its request got no lease, because no worker could have got one
  void record_without_work(WorkerId id, double seconds);  // it waited for work for so long
  // Copies the overlay's data on its workers. Returns the topology as Graphviz text if it has changed.
  std::optional<std::string> refresh(const overlay::LearnerStats& stats);

  bool all_present_have(Version version) const;
  std::vector<chains::WorkerLink> links_of(std::span<const WorkerId> workers) const;  // the planned links
  // The median pause of the present workers to install a policy. Absent until a worker has reported one. Also absent if
  // the run file makes workers finish their groups before they install (on_new_policy: finish), because the reported
  // pauses then include that time.
  std::optional<Duration> install_time() const;
  std::vector<WorkerEntry> entries() const;
  nlohmann::json status() const;  // one row per worker, as under `workers` in status.json
  std::string topology_summary() const;
  std::uint64_t floods() const;  // workers expelled for exceeding their message budgets

  // Aborts if its parts disagree.
  void check() const;

 private:
  struct NodeEntry {
    std::string name, at;  // at: where workers fetch from it
    Presence presence = Presence::kPresent;
    BitRate up{0};
    Version version;
    std::uint64_t bytes_in = 0, bytes_forwarded = 0;  // of publications
  };
  const provisioner::Offer* offer_named(const std::string& name) const;

  const RunConfig& config_;
  mutable std::mutex mutex_;  // guards all members below
  std::map<WorkerId, WorkerEntry> workers_;
  std::map<WorkerId, WorkerMeter> meters_;
  std::map<WorkerId, NodeEntry> nodes_;
  std::map<std::string_view, const provisioner::Offer*> planned_;  // the plan's offers, by id
  std::map<std::string, provisioner::Offer> rented_;               // by id
  // The topology in refresh()'s last text. Reset by a join, so that the next text has the worker's name.
  std::optional<chains::Topology> drawn_topology_;
  std::set<WorkerId> seeds_;  // workers to which the learner sends
  std::string topology_summary_;
  std::uint64_t floods_ = 0;
};

}  // namespace echoline::learner
