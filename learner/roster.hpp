// The learner's list of workers: their state, installed versions, accepted rollouts, and the offers they were rented
// as. Private to learner/.
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

// Thread-safe: called by the overlay, the desk, the fleet and the main thread.
class Roster {
 public:
  // Both outlive it.
  Roster(const RunConfig& config, const provisioner::Plan& plan);

  // A machine of this offer was requested, at the current price.
  void rented(const provisioner::Offer& offer);
  // The region of a worker of this name, by its own place or else its offer's.
  std::uint32_t region_of(const std::string& name, const std::string& place) const;
  void follow(const PresenceChange& change, TimePoint now);
  void had_trouble(WorkerId id);
  void acknowledged(WorkerId id, Version version, const overlay::Digest& digest);
  WorkerMeter::Progress heard(WorkerId id, const schema::Vitals& vitals, TimePoint now);
  void accepted(WorkerId id, std::uint64_t rollouts, double held_s);
  void turned_away(WorkerId id);
  // Copies the overlay's data on its workers. Returns a drawing of the topology, as a .dot, if it has changed.
  std::optional<std::string> refresh(const overlay::LearnerStats& stats);

  bool all_present_have(Version version) const;
  std::vector<chains::WorkerLink> links_of(std::span<const WorkerId> workers) const;  // as planned
  std::vector<WorkerEntry> entries() const;
  nlohmann::json status() const;  // one row per worker, as under `workers` in status.json
  std::string topology() const;   // a short description
  std::uint64_t floods() const;

  // Aborts if its parts disagree.
  void check() const;

 private:
  const provisioner::Offer* offer_named(const std::string& name) const;

  const RunConfig& config_;
  mutable std::mutex mutex_;  // guards all members below
  std::map<WorkerId, WorkerEntry> workers_;
  std::map<WorkerId, WorkerMeter> meters_;
  std::map<std::string_view, const provisioner::Offer*> planned_;  // the plan's offers, by id
  std::map<std::string, provisioner::Offer> rented_;               // by id
  std::optional<chains::Topology> drawn_;                          // last returned by refresh(), with the current names
  std::set<WorkerId> seeds_;                                       // workers to which the learner sends
  std::string topology_;
  std::uint64_t floods_ = 0;
};

}  // namespace echoline::learner
