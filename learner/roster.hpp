// The workers of a run as the learner knows them: where each stands, what it has installed and handed in, what it was
// rented as. Private to learner/.
#pragma once
#include <map>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chains/broadcast_model.hpp"
#include "learner/report.hpp"
#include "learner/run_config.hpp"
#include "learner/worker_meter.hpp"
#include "overlay/types.hpp"
#include "provisioner/plan.hpp"

namespace echoline::learner {

// Thread-safe; the overlay's, the desk's, the fleet's and the main thread call it.
class Roster {
 public:
  // Both outlive it.
  Roster(const RunConfig& config, const provisioner::Plan& plan);

  // A machine of this offer was asked for, at the price of now.
  void rented(const provisioner::Offer& offer);
  // Where a worker of this name stands: by the place that it states, or else that its offer states.
  std::uint32_t region_of(const std::string& name, const std::string& place) const;
  // True when it is back after it was away or lost.
  bool joined(WorkerId id, const std::string& name, std::uint32_t region, TimePoint now);
  // Both return false, and change nothing, once the end of the run makes workers leave.
  bool away(WorkerId id);
  bool lost(WorkerId id);
  void had_trouble(WorkerId id);
  void acknowledged(WorkerId id, Version version, const overlay::Digest& digest);
  WorkerMeter::Progress heard(WorkerId id, const schema::Vitals& vitals, TimePoint now);
  void accepted(WorkerId id, std::uint64_t rollouts, double held_s);
  void turned_away(WorkerId id);
  // Takes over what the overlay knows of its workers. Returns the drawing of the topology, as a .dot, where it has
  // changed.
  std::optional<std::string> refresh(const overlay::LearnerStats& stats);
  // From now on workers leave because the run ends: their last state stays.
  void freeze();

  std::size_t alive() const;  // not lost: there or away
  std::vector<std::pair<WorkerId, std::string>> present()
      const;  // neither lost nor away, with the offers they were rented as
  bool all_present_have(Version version) const;
  std::vector<chains::WorkerLink> links_of(std::span<const WorkerId> workers) const;  // as planned
  std::vector<WorkerEntry> entries() const;
  nlohmann::json status() const;  // a row each, as status.json has it under `workers`
  std::string topology() const;   // in a few words
  std::uint64_t floods() const;

  // Aborts where its parts disagree.
  void check() const;

 private:
  const provisioner::Offer* offer_named(const std::string& name) const;

  const RunConfig& config_;
  mutable std::mutex mutex_;  // guards all that follows
  std::map<WorkerId, WorkerEntry> workers_;
  std::map<WorkerId, WorkerMeter> meters_;
  std::map<std::string_view, const provisioner::Offer*> planned_;  // of the plan, by id
  std::map<std::string, provisioner::Offer> rented_;               // by id
  std::optional<chains::Topology> drawn_;  // as last returned by refresh(), and with those names
  std::set<WorkerId> seeds_;               // that the learner itself sends to
  std::string topology_;
  std::uint64_t floods_ = 0;
  bool frozen_ = false;
};

}  // namespace echoline::learner
