// FleetCore's decisions: estimates the fleet's throughput and cost, computes the target, and rents or stops machines.
#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>

#include "base/result.hpp"
#include "provisioner/allocation.hpp"
#include "provisioner/fleet_core.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kPoolMax = 512;                       // offers considered for a choice, the cheapest per rollout
constexpr Duration kSearchPause = std::chrono::seconds(1);  // between searches if no offer could be rented

// A worker without results counts as stalled only if its share of the fleet's output would be this number of groups.
constexpr double kGroupsBeforeStalled = 8;
constexpr double kStalledShare = 0.1;  // the host of a stalled worker then counts with this share of its promised rate

constexpr double kRounding = 1e-9;     // relative tolerance of sums of prices
constexpr int kStepsInIdleWindow = 3;  // the idle window has this many learner steps, and at least rules::kIdleWindow
// If the learner waits for a larger share of its time, this share counts, so that the capacity at most doubles at once.
constexpr double kIdleShareMax = 0.5;
constexpr double kAnyPrice = std::numeric_limits<double>::infinity();

// The rented offers by id, host and owner, to find the offers that they exclude. Keeps views of the added offers'
// strings, so the offers must outlive this object.
class RentedOffers {
 public:
  explicit RentedOffers(std::optional<std::size_t> per_host_max) : per_host_max_(per_host_max) {}

  void add(const FleetOffer& offer) {
    ids_.insert(offer.id);
    if (!offer.host.empty()) hosts_[{offer.provider, offer.host}].push_back(offer.gpus);
    if (!offer.owner.empty()) ++owners_[{offer.provider, offer.owner}];
  }

  // False if the offer or one of its GPUs is rented, or if its owner has the maximum of rented offers. An offer without
  // a stated owner counts for its host instead.
  bool can_be_added(const FleetOffer& offer) const {
    if (ids_.contains(offer.id)) return false;
    std::size_t rented_count = 0;  // of the owner or host
    if (const auto it = hosts_.find({offer.provider, offer.host}); it != hosts_.end()) {
      const auto& gpu_sets = it->second;
      if (std::any_of(gpu_sets.begin(), gpu_sets.end(), [&](auto gpus) { return (gpus & offer.gpus) != 0; }))
        return false;
      rented_count = gpu_sets.size();
    }
    if (!offer.owner.empty()) {
      const auto it = owners_.find({offer.provider, offer.owner});
      rented_count = it == owners_.end() ? 0 : it->second;
    }
    return !per_host_max_ || rented_count < *per_host_max_;
  }

 private:
  using Name = std::pair<std::string_view, std::string_view>;  // of a provider, and of a host or owner there
  const std::optional<std::size_t> per_host_max_;
  std::unordered_set<std::string_view> ids_;
  std::map<Name, std::vector<std::uint64_t>> hosts_;  // by host: the GPUs of each rented offer, as bits
  std::map<Name, std::size_t> owners_;                // by owner: number of rented offers
};

}  // namespace

// ---- estimates and target ----

Duration FleetCore::step_time() const { return pace_.step_times.median_or(rules_.pace.step_time); }

Duration FleetCore::broadcast_time() const { return pace_.broadcast_times.median_or(rules_.times.broadcast); }

// At most the broadcast time, which includes the installation.
Duration FleetCore::install_time() const {
  return std::min(broadcast_time(), pace_.install_times.median_or(rules_.times.install));
}

Bytes FleetCore::payload() const { return pace_.payloads.median_or(rules_.payload); }

// Larger publications and shorter steps cost more traffic than planned.
double FleetCore::traffic_scale() const {
  if (rules_.payload == Bytes{}) return 1;
  const double size_ratio = static_cast<double>(payload().count) / static_cast<double>(rules_.payload.count);
  return size_ratio * seconds(rules_.pace.step_time) / seconds(step_time());
}

double FleetCore::price_of(const FleetOffer& offer) const {
  return offer.usd_per_hour + offer.traffic_usd_per_hour * traffic_scale();
}

double FleetCore::spent_usd() const {
  return spending_.usd + totals().usd_per_hour * seconds(time_.now - spending_.measured_at) / kSecondsPerHour;
}

Duration FleetCore::idle_window() const {
  const Duration step = pace_.step_times.early_median_or(rules_.pace.step_time);
  return std::max<Duration>(kStepsInIdleWindow * step, rules::kIdleWindow);
}

double FleetCore::idle_fraction() const {
  return pace_.learner_idle.idle_fraction(idle_window(), /*history_min=*/rules::kShortfallMin, time_.now);
}

Duration FleetCore::use_window() const {
  return std::max<Duration>(rules::kStepsInUseWindow * step_time(), rules::kUseWindow);
}

// At least one step.
std::optional<Duration> FleetCore::time_left() const {
  if (!pace_.steps_left) return std::nullopt;
  return static_cast<Duration::rep>(std::max<std::uint64_t>(*pace_.steps_left, 1)) * step_time();
}

// Without a known stock at least M* counts as needed: while an unseen stock is used up, workers lack work that they
// will need again.
std::optional<double> FleetCore::needed_rollouts_per_s() const {
  const auto used = pace_.used_capacity.rollouts_per_s(use_window(), time_.now);
  if (!used) return std::nullopt;
  const auto stock_growth = pace_.stock.growth_per_s(use_window());
  return stock_growth ? std::max(0.0, *used - *stock_growth) : std::max(*used, target_.required_rollouts_per_s);
}

// The next batch is kept: the learner waits once less is left.
double FleetCore::stock_rollouts_per_s(Duration time) const {
  const double stock = pace_.stock.least(use_window()).value_or(0);
  const Duration used_within = std::min<Duration>(time, time_left().value_or(time));
  return std::max(0.0, stock - rules_.pace.rollouts_per_step) / seconds(used_within);
}

std::optional<double> FleetCore::sufficient_rollouts_per_s() const {
  const auto needed = needed_rollouts_per_s();
  const double idle = pace_.learner_idle.idle_fraction(use_window(), /*history_min=*/rules::kShortfallMin, time_.now);
  if (!needed || idle > rules::kIdleShareForRelease) return std::nullopt;
  return std::max(0.0, (1 + rules::kSpareShare) * *needed - stock_rollouts_per_s(rules::kStockTime));
}

// The capacity that generates what the stock lacks for the rest of the run. M* if that is not known.
double FleetCore::rollouts_per_s_for_last_steps() const {
  const auto left = time_left();
  const auto stock = pace_.stock.newest();
  if (!left || !stock) return target_.required_rollouts_per_s;
  const double rollouts_left = static_cast<double>(*pace_.steps_left) * rules_.pace.rollouts_per_step;
  return std::max(0.0, rollouts_left - *stock) / seconds(*left);
}

std::string FleetCore::numbers_text() const {
  const FleetStatus n = numbers();
  return fmt::format(
      "{:.4g} rollouts/s are rented or on their way, {:.4g} are wanted (M* {:.4g}; T {}, T_b {}, install {}); the "
      "learner waits {:.1f} % of the time; ${:.4g} an hour, ${:.4g} spent",
      n.expected_rollouts_per_s, n.target_rollouts_per_s, n.required_rollouts_per_s, to_text(n.step_time),
      to_text(n.broadcast_time), to_text(n.install_time), 100 * n.idle_fraction, n.usd_per_hour, n.usd);
}

FleetStatus FleetCore::numbers() const {
  FleetStatus n;
  n.required_rollouts_per_s = target_.required_rollouts_per_s;
  n.target_rollouts_per_s = target_.provisioned_rollouts_per_s;
  static_cast<FleetTotals&>(n) = totals();
  static_cast<MachineCounts&>(n) = counts_;
  n.usd = spent_usd();
  n.idle_fraction = idle_fraction();
  n.step_time = step_time();
  n.broadcast_time = broadcast_time();
  n.install_time = install_time();
  n.payload = payload();
  n.money_spent = phase_ == Phase::kMoneySpent;
  n.exhausted = shortfall_.exhausted;
  for (const std::uint64_t key : machines_.not_working()) {
    const Machine& machine = machines_.all().at(key);
    if (!machine.counts_as_capacity()) continue;
    if (machine.state == MachineState::kUnbooked || machine.state == MachineState::kStarting) ++n.queued;
    if (machine.state == MachineState::kBooting && machine.boot_phase == BootPhase::kPulling) ++n.pulling;
  }
  return n;
}

void FleetCore::check() const {
  machines_.check();
  ECHO_CHECK(phase_ != Phase::kClosed || wanted_.empty());
  ECHO_CHECK(outbox_.actions.empty(), "{} actions were not handed over", outbox_.actions.size());
  for (const auto& [key, machine] : machines_.all()) {
    if (machine.state != MachineState::kWorking) continue;
    // No working machine can count as stalled before the next check. Both times are of the clock `productive_time`.
    const Duration stalled_from = machine.productive_time_at_progress + rules_.fleet.away_max;
    ECHO_CHECK(stalled_from >= output_.next_stall_check, "{} may count as stalled too late", machine.offer.id);
  }
}

// The target of the plan. If the run file has changed since and no capacity suffices, the greatest useful target: with
// more machines, publications would take over half of the time that they may take.
CapacityTarget FleetCore::planned_target() const {
  const CapacityTerms terms = rules_.capacity_terms();
  if (const auto planned = capacity_target(rules_.pace, rules_.times, terms)) return *planned;
  const auto greatest = capacity_target(rules_.pace, half_of_longest_publication_times(rules_.pace, terms), terms);
  ECHO_CHECK(greatest.has_value(), "{}", greatest.error().message());
  return *greatest;
}

// Computes the required rollouts/s (M* in capacity.hpp) from measurements. Without a limit per hour set by the user,
// they do not exceed those of the plan. They are at most twice the rollouts that the learner trains on per second:
// beyond that, publications take over half of the time that they may take, and more machines hardly help.
void FleetCore::update_target() {
  LearnerPace pace = rules_.pace;
  pace.step_time = step_time();
  const CapacityTerms terms = rules_.capacity_terms();
  const auto target_max = capacity_target(pace, half_of_longest_publication_times(pace, terms), terms);
  if (!target_max) return;
  // Absent if publications take longer than any capacity allows.
  const auto measured = capacity_target(pace, {.broadcast = broadcast_time(), .install = install_time()}, terms);
  double required_max = planned_target().required_rollouts_per_s;
  if (rules_.fleet.usd_per_hour_max) required_max = std::max(required_max, target_max->required_rollouts_per_s);
  const bool is_above_limit = !measured || measured->required_rollouts_per_s > required_max * (1 + rules::kDeadband);
  if (is_above_limit)
    note_once("faster", "",
              fmt::format("steps of {} with broadcasts of {} could use more than {:.4g} rollouts/s; {}",
                          to_text(pace.step_time), to_text(broadcast_time()), required_max,
                          rules_.fleet.usd_per_hour_max ? "but the broadcast is the bottleneck"
                                                        : "set fleet.usd_per_hour_max to allow more"));
  target_.required_rollouts_per_s = measured ? std::min(required_max, measured->required_rollouts_per_s) : required_max;
  target_.provisioned_rollouts_per_s = (1 + rules_.fleet.headroom) * target_.required_rollouts_per_s;
}

// ---- decisions ----

Duration FleetCore::boot_phase_limit(BootPhase phase) const {
  const FleetSettings& fleet = rules_.fleet;
  const Duration limit = phase == BootPhase::kPulling         ? fleet.pull_limit()
                         : phase == BootPhase::kContainerRuns ? fleet.boot_limit()
                                                              : fleet.join_timeout;
  // A single tick may count as kTickGapMax, so a shorter limit could pass before the machine is looked at once.
  return std::max<Duration>(limit, rules::kTickGapMax);
}

std::string FleetCore::lateness_text(BootPhase phase) const {
  const std::string limit = to_text(boot_phase_limit(phase));
  if (phase == BootPhase::kPulling) return "its container did not run within " + limit;
  if (phase == BootPhase::kContainerRuns)
    return fmt::format("its container ran for {}, and its worker did not join", limit);
  return "its worker did not join within " + limit;
}

void FleetCore::enforce_time_limits() {
  // A copy, because changes of state change the set.
  const std::vector<std::uint64_t> keys(machines_.not_working().begin(), machines_.not_working().end());
  for (const std::uint64_t key : keys) {
    Machine& machine = machines_.at(key);
    const Duration since_request = time_.now - machine.requested_at;
    // A provider may be slow to answer. An unwanted machine is doubted earlier, because it costs money meanwhile.
    const Duration answer_limit = machine.unwanted
                                      ? rules::kAnswerTimeout
                                      : std::max<Duration>(rules_.fleet.queue_timeout, rules::kAnswerTimeout);
    switch (machine.state) {
      case MachineState::kBooting:
        if (time_.now - machine.boot_phase_since < boot_phase_limit(machine.boot_phase)) break;
        count_as_lost(machine, lateness_text(machine.boot_phase));
        if (machine.boot_phase != BootPhase::kPulling && !machine.has_joined) ++counts_.not_joined;
        record_offer_failure(machine, kAvailableAfterPause);
        stop(machine, lateness_text(machine.boot_phase));
        break;
      case MachineState::kStarting:
        if (since_request < answer_limit) break;
        if (!machine.unwanted) {
          count_as_lost(machine, fmt::format("the provider has not answered within {}", to_text(since_request)));
          record_offer_failure(machine, kAvailableAfterPause);
          machine.why = "the provider did not answer";
        }
        mark_doubtful(machine);
        break;
      case MachineState::kDraining:
        if (time_.now >= machine.next_request_at) stop(machine, machine.why);
        break;
      case MachineState::kStopping:
        if (time_.now >= machine.next_request_at) request_stop(machine);
        break;
      case MachineState::kDoubtful:
        if (time_.now >= machine.next_request_at) request_listing(machine);
        break;
      case MachineState::kUnbooked:
      case MachineState::kWorking:
        break;
    }
  }
}

// A worker is stalled if the other workers have submitted results for away_max, and this worker has made no progress.
// Its share of their output must be so large that the silence cannot be chance.
void FleetCore::stop_stalled() {
  if (output_.productive_time < output_.next_stall_check) return;
  output_.next_stall_check = Duration::max();  // schedule_stall_check() lowers it
  const double working_rate = totals().working_rollouts_per_s;
  for (auto& [key, machine] : machines_.all()) {
    if (machine.state != MachineState::kWorking) continue;
    output_.schedule_stall_check(machine.productive_time_at_progress + rules_.fleet.away_max);
    const Duration silent_time = output_.productive_time - machine.productive_time_at_progress;
    if (silent_time < rules_.fleet.away_max) continue;
    const double rate = machine.rollouts_per_s(), rate_of_others = working_rate - rate;
    if (rate_of_others <= 0) continue;
    // The machine's share of what the others have submitted since its last progress.
    const double expected_rollouts = (output_.rollouts - machine.fleet_rollouts_at_progress) * rate / rate_of_others;
    if (expected_rollouts < kGroupsBeforeStalled * rules_.group_size) continue;
    const std::string why = fmt::format(
        "other workers have submitted results for {}, in which its share would be {:.4g} rollouts, and it has "
        "submitted none",
        to_text(silent_time), expected_rollouts);
    count_as_lost(machine, why);
    demote_host(machine, kStalledShare);
    record_offer_failure(machine, kAvailableAfterPause);
    stop(machine, why);
  }
}

void FleetCore::enforce_budgets() {
  const Duration reserve = reserve_time(machines_.size());
  const double reserve_usd = totals().usd_per_hour * seconds(reserve) / kSecondsPerHour;
  if (rules_.fleet.usd_max && spent_usd() + reserve_usd >= *rules_.fleet.usd_max) {
    phase_ = Phase::kMoneySpent;
    note(
        "budget", "",
        fmt::format("${:.4g} of ${:.4g} are spent, and returning the fleet may take {} more: the fleet is returned now",
                    spent_usd(), *rules_.fleet.usd_max, to_text(reserve)));
    for (auto& [key, machine] : machines_.all()) stop(machine, "the run's budget is spent");
    return;
  }
  while (rules_.fleet.usd_per_hour_max) {
    const double fleet_usd_per_hour = totals().counted_usd_per_hour;
    if (fleet_usd_per_hour <= *rules_.fleet.usd_per_hour_max * (1 + kRounding)) break;
    Machine* const dearest =
        machines_.find_most_expensive(traffic_scale(), [](const Machine& m) { return m.counts_as_capacity(); });
    if (dearest == nullptr) break;
    note("released", dearest->offer.id,
         fmt::format("${:.4g} an hour are more than the ${:.4g} allowed; {}", fleet_usd_per_hour,
                     *rules_.fleet.usd_per_hour_max, numbers_text()),
         dearest->ticket);
    stop(*dearest, "the fleet costs more per hour than it may");
  }
}

bool FleetCore::is_affordable(double fleet_usd_per_hour) const {
  const std::optional<double>& per_hour_max = rules_.fleet.usd_per_hour_max;
  if (per_hour_max && fleet_usd_per_hour > *per_hour_max * (1 + kRounding)) return false;
  if (!rules_.fleet.usd_max) return true;
  // The budget must keep a new machine for twice the time that its worker may take to join.
  const Duration paid_time_min = reserve_time(machines_.size() + 1) + 2 * rules_.fleet.join_timeout;
  return spent_usd() + fleet_usd_per_hour * seconds(paid_time_min) / kSecondsPerHour < *rules_.fleet.usd_max;
}

std::size_t FleetCore::rentals_allowed() {
  const std::size_t per_minute_max = std::max<std::size_t>(rules::kRentalsPerMinute, rules_.fleet.workers_max / 4);
  const std::size_t in_last_minute = shortfall_.rentals_in_last_minute(time_.now);
  return in_last_minute < per_minute_max ? per_minute_max - in_last_minute : 0;
}

void FleetCore::rent(const std::string& offer, const std::string& what, const std::string& why, bool replaces) {
  const FleetOffer& rented = offer_book_.find(offer)->offer;
  Machine& machine =
      machines_.add(rented, offer_book_.rate_share_of(rented), MachineState::kUnbooked, time_.now, replaces);
  machine.is_queued = true;
  counts_.replaced += replaces ? 1 : 0;
  note(what, offer, why);
}

// Asks for the rows of queued machines, oldest first, as long as their providers take more requests. Erases queued
// machines that are not wanted or not offered any more.
void FleetCore::start_queued() {
  std::map<std::string_view, std::size_t> starting;  // by provider
  std::vector<std::uint64_t> queued;
  for (const std::uint64_t key : machines_.not_working()) {
    const Machine& machine = machines_.at(key);
    if (machine.is_queued)
      queued.push_back(key);
    else if (machine.state == MachineState::kUnbooked || machine.state == MachineState::kStarting)
      ++starting[machine.offer.provider];
  }
  for (const std::uint64_t key : queued) {
    Machine& machine = machines_.at(key);
    if (machine.unwanted) {
      machines_.erase(machine);
      continue;
    }
    if (const OfferBook::Entry* entry = offer_book_.find(machine.offer.id); entry == nullptr || entry->needs_refresh) {
      note("failed", machine.offer.id, "it was queued but is not offered any more");
      shortfall_.lost_rollouts_per_s += machine.expected_rollouts_per_s();
      machines_.erase(machine);
      continue;
    }
    const auto limit = rules_.starts_at_once.find(machine.offer.provider);
    std::size_t& count = starting[machine.offer.provider];
    if (limit != rules_.starts_at_once.end() && count >= limit->second) continue;
    ++count;
    machine.is_queued = false;
    machine.requested_at = time_.now;
    emit(fleet::Book{.offer = machine.offer.id});
  }
}

// Rents the plan's choice. If machines of an earlier process are in use, rents only up to the target. An offer whose
// earlier machine is still looked for stays wanted.
void FleetCore::rent_wanted() {
  if (wanted_.empty()) return;
  const bool has_adopted =
      std::any_of(machines_.all().begin(), machines_.all().end(), [](const auto& m) { return m.second.adopt; });
  std::vector<std::string> still_wanted;
  for (const std::string& id : std::exchange(wanted_, {})) {
    const Machine* machine = machines_.find(id);
    // on(Found) sets `unwanted` if the earlier process's machine does not exist.
    const bool search_failed = machine != nullptr && machine->adopt && machine->unwanted;
    if (machine != nullptr && machine->state == MachineState::kDoubtful && !search_failed) {
      still_wanted.push_back(id);
      continue;
    }
    if (machine != nullptr) continue;
    const OfferBook::Entry* const entry = offer_book_.find(id);
    if (entry == nullptr) {
      note("failed", id, "it was planned but is not offered any more");
      shortfall_.lost_rollouts_per_s = kAnyCapacity;
      continue;
    }
    if (offer_book_.blocked().contains(entry->offer.provider)) {
      shortfall_.lost_rollouts_per_s += entry->offer.rollouts_per_s;
      continue;
    }
    if (has_adopted && totals().expected_rollouts_per_s >= target_.provisioned_rollouts_per_s * (1 - rules::kDeadband))
      continue;
    const double price = price_of(entry->offer);
    if (machines_.size() >= rules_.fleet.workers_max || !is_affordable(totals().usd_per_hour + price)) {
      note_once("budget", id,
                fmt::format("it was planned, but ${:.4g} an hour more are not allowed; {}", price, numbers_text()));
      continue;
    }
    rent(id, "planned",
         fmt::format("the plan chose it: {:.4g} rollouts/s for ${:.4g} an hour", entry->offer.rollouts_per_s, price),
         /*replaces=*/false);
  }
  wanted_ = std::move(still_wanted);
}

// Returns the cheapest available offers that together have the missing rate and keep the fleet within
// `usd_per_hour_max`. If no set of offers has that rate, returns the cheapest ones.
std::vector<std::string> FleetCore::choose_offers(double missing_rollouts_per_s, double usd_per_hour_max) {
  RentedOffers rented(rules_.fleet.per_host_max);
  for (const auto& [key, machine] : machines_.all()) rented.add(machine.offer);
  const double fleet_usd_per_hour = totals().usd_per_hour;
  struct Choice {
    const FleetOffer* offer;
    Candidate candidate;  // the offer, for allocate()
  };
  std::vector<Choice> choices;
  std::map<std::string, std::uint32_t> host_numbers;
  for (const auto& [id, entry] : offer_book_.all()) {
    const FleetOffer& offer = entry.offer;
    if (offer_book_.blocked().contains(offer.provider)) continue;
    if (!entry.is_available(time_.now) || !is_affordable(fleet_usd_per_hour + price_of(offer)) ||
        !rented.can_be_added(offer))
      continue;
    Candidate candidate;
    candidate.rollouts_per_s = offer.rollouts_per_s * offer_book_.rate_share_of(offer);
    // Each failure doubles the assumed price, so that offers that have not failed come first.
    constexpr int kDoublingsMax = 6;
    candidate.usd_per_hour = price_of(offer) * (1 << std::min(entry.failures, kDoublingsMax));
    if (!offer.host.empty()) {
      const auto next_number = static_cast<std::uint32_t>(host_numbers.size()) + 1;
      candidate.machine = host_numbers.try_emplace(OfferBook::host_of(offer), next_number).first->second;
    }
    candidate.gpus = offer.gpus;
    choices.push_back({.offer = &offer, .candidate = candidate});
  }
  std::stable_sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) {
    const double unit_cost_a = a.candidate.usd_per_hour / a.candidate.rollouts_per_s;
    const double unit_cost_b = b.candidate.usd_per_hour / b.candidate.rollouts_per_s;
    return unit_cost_a != unit_cost_b ? unit_cost_a < unit_cost_b
                                      : a.candidate.rollouts_per_s > b.candidate.rollouts_per_s;
  });
  if (choices.size() > kPoolMax) choices.resize(kPoolMax);
  std::vector<Candidate> pool;
  for (const Choice& choice : choices) pool.push_back(choice.candidate);
  AllocationLimits limits;  // can_be_added() checks per_host_max, below
  const std::size_t fleet_max = rules_.fleet.workers_max;
  limits.workers_max = machines_.size() < fleet_max ? fleet_max - machines_.size() : 0;
  std::vector<std::size_t> order;  // indices into `choices`
  std::optional<Allocation> best;
  if (!pool.empty() && limits.workers_max > 0) best = allocate(pool, missing_rollouts_per_s, limits).best;
  if (best) {
    order = best->chosen;
  } else {
    for (std::size_t i = 0; i < pool.size(); ++i) order.push_back(i);  // all offers, cheapest first
  }
  const std::size_t count_max = std::min(limits.workers_max, rentals_allowed());
  std::vector<std::string> chosen;
  double added_usd_per_hour = 0;
  for (const std::size_t i : order) {
    const FleetOffer& offer = *choices[i].offer;
    if (chosen.size() == count_max) break;
    const double added_with_offer = added_usd_per_hour + price_of(offer);
    const double usd_per_hour = fleet_usd_per_hour + added_with_offer;
    if (usd_per_hour > usd_per_hour_max || !is_affordable(usd_per_hour)) continue;
    if (!rented.can_be_added(offer)) continue;  // an offer chosen before it excludes it
    added_usd_per_hour = added_with_offer;
    rented.add(offer);
    chosen.push_back(offer.id);
  }
  return chosen;
}

// Only the run file may allow a fleet that is dearer than planned. A lost machine is replaced at any price.
double FleetCore::usd_per_hour_max_without_loss() const {
  return rules_.fleet.usd_per_hour_max ? kAnyPrice  // is_affordable() checks it
                                       : usd_per_hour_max_of_plan_;
}

// A machine that would join after the run's last step is useless. But a fleet that has lost most of its machines may
// need it to reach that step at all.
bool FleetCore::is_too_late_to_rent() const {
  const auto left = time_left();
  return left && *left < pace_.start_times.median_or(Duration{}) &&
         totals().working_rollouts_per_s >= rollouts_per_s_for_last_steps() / 2;
}

// Replaces the lost rate, as far as the remaining machines do not suffice. Rents more only if the learner waits or the
// stock is nearly used up, because otherwise the fleet is fast enough, whatever rates were measured.
void FleetCore::fill_shortfall() {
  const double gap = target_.provisioned_rollouts_per_s - totals().expected_rollouts_per_s;
  if (gap <= target_.provisioned_rollouts_per_s * rules::kDeadband) {
    shortfall_.since.reset();
    shortfall_.lost_rollouts_per_s = 0;
    shortfall_.exhausted = false;
    allow_note_again("short");
    return;
  }
  if (!wanted_.empty()) return;  // machines of an earlier process are still looked for, and may fill the gap
  double& lost_rate = shortfall_.lost_rollouts_per_s;
  lost_rate = std::min(lost_rate, gap);
  if (const auto sufficient_rate = sufficient_rollouts_per_s())
    lost_rate = std::clamp(*sufficient_rate - totals().expected_rollouts_per_s, 0.0, lost_rate);
  const double missing_rate = std::min(gap, missing_rollouts_per_s());
  if (lost_rate <= 0 && missing_rate <= 0) return shortfall_.since.reset();
  if (!shortfall_.since) shortfall_.since = time_.now;
  if (rentals_allowed() == 0 || time_.now < shortfall_.next_search_at || is_too_late_to_rent()) return;
  const bool has_lasted = time_.now - *shortfall_.since >= rules::kShortfallMin;
  if (lost_rate > 0 && (has_lasted || rules_.fleet.replace_lost))
    lost_rate -= std::min(lost_rate, rent_cheapest(lost_rate, kAnyPrice, /*replaces=*/true));
  else if (missing_rate > 0 && has_lasted)
    rent_cheapest(missing_rate, usd_per_hour_max_without_loss(), /*replaces=*/false);
}

// A machine that is rented when the stock is used up has its first results too late. 0 if the fleet suffices for the
// rest of the run, or the stock lasts long enough, or is not known.
double FleetCore::missing_before_stock_is_used_up() const {
  const auto needed = needed_rollouts_per_s();
  const double expected_rate = totals().expected_rollouts_per_s;
  if (!needed || !pace_.stock.growth_per_s(use_window()) || expected_rate >= rollouts_per_s_for_last_steps()) return 0;
  const Duration start_time = rules::kStartTimesOfStock * pace_.start_times.median_or(rules_.fleet.join_timeout);
  if (expected_rate + stock_rollouts_per_s(start_time) > (1 - rules::kSpareShare) * *needed) return 0;
  return std::max(0.0, (1 + rules::kSpareShare) * *needed - stock_rollouts_per_s(rules::kStockTime) - expected_rate);
}

// The capacity with which the learner would not wait, less the expected capacity of the fleet. 0 if the learner does
// not wait. If it waits although the fleet has M* and no machine is joining, M* is too low. Joining replacements do not
// count, because a large fleet always has some.
double FleetCore::missing_rollouts_per_s() const {
  const double idle = idle_fraction(), expected_rate = totals().expected_rollouts_per_s;
  if (idle < rules::kIdleShareMin) return missing_before_stock_is_used_up();
  const auto used = pace_.used_capacity.rollouts_per_s(use_window(), time_.now);
  if (!used) return target_.provisioned_rollouts_per_s - expected_rate;
  double needed = target_.required_rollouts_per_s;
  // A fleet that is faster by the factor 1 / (1 - idle) generates as much in the time in which the learner trains.
  if (totals().joining_beyond_losses == 0) needed = std::max(needed, *used / (1 - std::min(idle, kIdleShareMax)));
  return std::max(0.0, (1 + rules::kSpareShare) * needed - expected_rate);
}

// Rents offers that together generate the missing rollouts, as far as the limits allow. Returns their rate.
double FleetCore::rent_cheapest(double missing_rollouts_per_s, double usd_per_hour_max, bool replaces) {
  const std::vector<std::string> chosen = choose_offers(missing_rollouts_per_s, usd_per_hour_max);
  shortfall_.exhausted = chosen.empty();
  if (shortfall_.exhausted) {
    shortfall_.next_search_at = time_.now + kSearchPause;
    std::string why = "no offer is left that may be rented";
    if (usd_per_hour_max < kAnyPrice && !choose_offers(missing_rollouts_per_s, kAnyPrice).empty())
      why = fmt::format(
          "every offer that is left would raise the fleet's price above ${:.4g} an hour, which is the "
          "plan's with its headroom or one more machine; fleet.usd_per_hour_max can allow more",
          usd_per_hour_max);
    for (const auto& [provider, trouble] : offer_book_.blocked()) why += fmt::format(" ({}: {})", provider, trouble);
    note_once("short", "", fmt::format("{}; {}", why, numbers_text()));
    return 0;
  }
  const std::string why =
      fmt::format("{}: {}",
                  replaces                                 ? "a machine was lost"
                  : idle_fraction() < rules::kIdleShareMin ? "the finished rollouts are nearly used up"
                                                           : "the learner waits",
                  numbers_text());
  double rate = 0;
  for (const std::string& id : chosen) {
    if (rate >= missing_rollouts_per_s) break;
    shortfall_.rental_times.push_back(time_.now);
    rent(id, replaces ? "replaced" : "added", why, replaces);
    rate += machines_.find(id)->rollouts_per_s();
  }
  shortfall_.since.reset();
  return rate;
}

// Releases the dearest machines per rollout, if there has been a surplus for kSurplusMin. Measured rates vary by
// chance, so the smallest surplus in that time is released.
void FleetCore::release_surplus() {
  const double working_rate = totals().working_rollouts_per_s;
  const std::optional<double> sufficient_rate = sufficient_rollouts_per_s();
  const double surplus = sufficient_rate ? working_rate - *sufficient_rate : 0;
  if (surplus < rules::kSpareShare * target_.required_rollouts_per_s) return surplus_.reset();
  if (!surplus_) surplus_ = {.since = time_.now, .rollouts_per_s_min = surplus};
  surplus_->rollouts_per_s_min = std::min(surplus_->rollouts_per_s_min, surplus);
  if (time_.now - surplus_->since < std::max<Duration>(rules::kSurplusMin, idle_window())) return;
  double unneeded_rate = std::exchange(surplus_, std::nullopt)->rollouts_per_s_min;
  while (totals().working > 1) {  // the last worker stays: a group may fail and be generated again
    Machine* const dearest = machines_.find_most_expensive(traffic_scale(), [&](const Machine& machine) {
      return machine.state == MachineState::kWorking && machine.rollouts_per_s() <= unneeded_rate;
    });
    if (dearest == nullptr) return;
    unneeded_rate -= dearest->rollouts_per_s();
    note("released", dearest->offer.id, "the workers lack work: " + numbers_text(), dearest->ticket);
    drain(*dearest, "the workers lack work");
  }
}

}  // namespace echoline::provisioner
