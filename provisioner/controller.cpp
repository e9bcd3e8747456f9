#include "provisioner/controller.hpp"

#include <algorithm>
#include <utility>

#include "base/result.hpp"

namespace echoline::provisioner {
namespace {

// A window is kept as at most this many samples and a bit; completions close in time are added up.
constexpr int kSamplesPerWindow = 32;

double unit_cost(const FleetOffer& offer, double rollouts_per_s) { return offer.usd_per_hour / rollouts_per_s; }

}  // namespace

FleetController::FleetController(ControllerConfig config, std::vector<FleetOffer> standby)
    : config_(config), standby_(std::move(standby)) {
  ECHO_CHECK(config_.window > Duration{} && config_.release_margin >= 0 && config_.headroom >= 0);
}

void FleetController::started(WorkerId worker, const FleetOffer& offer) {
  const auto same = [&](const auto& entry) { return entry.offer == offer.offer; };
  std::erase_if(pending_, [&](const Pending& p) { return same(p.offer); });
  std::erase_if(standby_, same);
  workers_[worker] = Worker{offer, false, {}};
}

void FleetController::start_failed(const std::string& offer, TimePoint) {
  std::erase_if(pending_, [&](const Pending& p) { return p.offer.offer == offer; });
  loss_to_replace_ = true;
}

void FleetController::completed(WorkerId worker, double rollouts, Duration busy, TimePoint now) {
  const auto it = workers_.find(worker);
  if (it == workers_.end() || !(rollouts >= 0) || busy <= Duration{}) return;
  auto& samples = it->second.samples;
  if (samples.empty() || now - samples.back().at >= config_.window / kSamplesPerWindow) samples.push_back({now, 0, 0});
  samples.back().rollouts += rollouts;
  samples.back().busy_s += seconds(busy);
  while (now - samples.front().at > config_.window) samples.pop_front();
}

void FleetController::lost(WorkerId worker, TimePoint) {
  const auto it = workers_.find(worker);
  if (it == workers_.end()) return;
  if (it->second.releasing) {
    // Let go because it was too dear, not because it failed: it may be rented again.
    const auto dearer = std::find_if(standby_.begin(), standby_.end(), [&](const FleetOffer& o) {
      return unit_cost(o, o.rollouts_per_s) > unit_cost(it->second.offer, it->second.offer.rollouts_per_s);
    });
    standby_.insert(dearer, it->second.offer);
  } else {
    loss_to_replace_ = true;
  }
  workers_.erase(it);
}

bool FleetController::available(WorkerId worker) const {
  const auto it = workers_.find(worker);
  return it != workers_.end() && !it->second.releasing;
}

std::optional<double> FleetController::measured_rollouts_per_s(WorkerId worker) const {
  const auto it = workers_.find(worker);
  if (it == workers_.end()) return std::nullopt;
  double rollouts = 0;
  double busy_s = 0;
  for (const Sample& s : it->second.samples) {
    rollouts += s.rollouts;
    busy_s += s.busy_s;
  }
  if (busy_s <= 0) return std::nullopt;
  return rollouts / busy_s;
}

double FleetController::effective_rollouts_per_s() const {
  double total = 0;
  for (const auto& [id, worker] : workers_)
    if (available(id)) total += measured_rollouts_per_s(id).value_or(worker.offer.rollouts_per_s);
  return total;
}

double FleetController::pending_rollouts_per_s() const {
  double total = 0;
  for (const Pending& p : pending_) total += p.offer.rollouts_per_s;
  return total;
}

void FleetController::activate_until(double missing, const std::string& reason, bool replaces_lost, TimePoint now,
                                     std::vector<FleetAction>& actions) {
  while (missing > 0 && !standby_.empty()) {
    const FleetOffer next = standby_.front();
    standby_.erase(standby_.begin());
    pending_.push_back({next, now});
    actions.push_back(Activate{next.offer, reason, replaces_lost});
    missing -= next.rollouts_per_s;
  }
}

std::optional<WorkerId> FleetController::releasable() const {
  const double effective = effective_rollouts_per_s();
  std::optional<WorkerId> dearest;
  double dearest_cost = -1;
  for (const auto& [id, worker] : workers_) {
    if (!available(id)) continue;
    const double rate = measured_rollouts_per_s(id).value_or(worker.offer.rollouts_per_s);
    if (effective - rate < target() || rate <= 0) continue;
    const double cost = unit_cost(worker.offer, rate);
    if (cost > dearest_cost) {
      dearest = id;
      dearest_cost = cost;
    }
  }
  return dearest;
}

std::vector<FleetAction> FleetController::tick(TimePoint now) {
  std::vector<FleetAction> actions;
  std::erase_if(pending_, [&](const Pending& p) { return now - p.since > config_.start_timeout; });
  const double effective = effective_rollouts_per_s();
  const double expected = effective + pending_rollouts_per_s();

  if (expected >= target()) {
    below_since_.reset();
    loss_to_replace_ = false;
  } else if (const bool at_once = config_.replace_lost && loss_to_replace_; !at_once && expected >= refill_below()) {
    below_since_.reset();
  } else {
    if (!below_since_) below_since_ = now;
    if (at_once || now - *below_since_ >= config_.sustained) {
      const std::string reason =
          fmt::format("{}: {:.4g} of {:.4g} rollouts/s", at_once ? "worker lost" : "below target", expected, target());
      activate_until(target() - expected, reason, at_once, now, actions);
      below_since_.reset();
      loss_to_replace_ = false;
    }
  }

  if (effective < target() * (1 + config_.release_margin)) {
    above_since_.reset();
  } else {
    if (!above_since_) above_since_ = now;
    if (now - *above_since_ >= config_.sustained) {
      if (const auto worker = releasable()) {
        workers_[*worker].releasing = true;
        actions.push_back(Release{*worker, fmt::format("{:.4g} rollouts/s, {:.4g} are enough", effective, target())});
      }
      above_since_.reset();
    }
  }
  return actions;
}

}  // namespace echoline::provisioner
