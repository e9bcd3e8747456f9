// echoline advise: the search. cli/advise.cpp reads its arguments and prints what it finds.
#include "study/advice.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <map>
#include <span>
#include <tuple>

#include "base/parallel.hpp"
#include "learner/report.hpp"
#include "sim/run_plan.hpp"
#include "study/sim_run_report.hpp"

namespace echoline::study {
namespace {

using nlohmann::json;

// The keys whose values are searched; kSearchedKeys is their number.
enum SearchedKey : std::size_t { kBudget, kPublishEvery, kLookahead, kTopology, kHeadroom, kPlaces, kSearchedKeys };
constexpr std::array<const char*, kSearchedKeys> kKeyNames{"staleness.budget",    "staleness.publish_every",
                                                           "staleness.lookahead", "network.topology",
                                                           "fleet.headroom",      "fleet.places"};
using SearchedValues = std::array<std::string, kSearchedKeys>;

// The values that are tried beside the run file's own.
constexpr std::array<double, 3> kBudgetShares{1, 0.75, 0.5};  // of the greatest staleness budget
constexpr std::array<std::uint32_t, 5> kPublicationPeriods{1, 2, 3, 4, 6};
constexpr std::array<int, 3> kLookaheadsFromPeriod{-1, 0, 1};  // and `auto`
constexpr std::array<const char*, 4> kTopologies{"auto", "trees", "stripes", "best_chains"};
constexpr std::array<const char*, 5> kHeadrooms{"0", "0.05", "0.1", "0.15", "0.25"};
constexpr std::size_t kPlacesMax = 8;  // with more regions, none is left out

// The best plans of each publication period are simulated, each with every headroom.
constexpr std::size_t kPlansPerPeriod = 2;
// A round simulates this share of the steps, and keeps the best.
struct HalvingRound {
  double steps_share = 0;
  std::size_t kept = 0;
};
constexpr std::array kRounds{HalvingRound{.steps_share = 0.125, .kept = 14},
                             HalvingRound{.steps_share = 0.25, .kept = 7}, HalvingRound{.steps_share = 0.5, .kept = 5}};
constexpr std::uint64_t kStepsMin = 16;  // of a simulation
// Topology and places decide prices and broadcast times for all combinations. So their values are tried one by one with
// the run file's other settings before the search, and again with the best others, as is the lookahead.
constexpr std::array kKeysTriedFirst{kTopology, kPlaces};
constexpr double kFirstTrialsStepsShare = 0.25;
constexpr double kClearlyBetter = 0.95;  // ratio of two figures; short simulations are not more exact than 5 %
constexpr std::array kKeysTriedAgain{kLookahead, kTopology, kPlaces};

struct AdviceCandidate {
  SearchedValues values;
  AdviceFigures figures;
};

AdviceFigures mean_of_seeds(std::span<const AdviceFigures> seeds) {
  AdviceFigures mean = seeds.front();
  const double count = static_cast<double>(seeds.size());
  mean.usd = mean.hours = mean.idle_fraction = mean.staleness_mean = 0;
  for (const AdviceFigures& figures : seeds) {
    mean.possible = mean.possible && figures.possible;
    mean.usd += figures.usd / count;
    mean.usd_min = std::min(mean.usd_min, figures.usd);
    mean.usd_max = std::max(mean.usd_max, figures.usd);
    mean.hours += figures.hours / count;
    mean.hours_min = std::min(mean.hours_min, figures.hours);
    mean.hours_max = std::max(mean.hours_max, figures.hours);
    mean.idle_fraction += figures.idle_fraction / count;
    mean.staleness_mean += figures.staleness_mean / count;
    mean.staleness_p95 = std::max(mean.staleness_p95, figures.staleness_p95);
    mean.workers = std::max(mean.workers, figures.workers);
  }
  mean.usd_per_hour = mean.hours > 0 ? mean.usd / mean.hours : 0;
  return mean;
}

void set_cost(AdviceFigures& figures, double usd, double hours) {
  figures.usd = figures.usd_min = figures.usd_max = usd;
  figures.hours = figures.hours_min = figures.hours_max = hours;
  figures.usd_per_hour = hours > 0 ? usd / hours : 0;
}

// Also true for combinations that differ only in keys without an effect, such as a lookahead beyond the budget's bound.
bool are_same_run(const AdviceFigures& a, const AdviceFigures& b) {
  return a.usd == b.usd && a.hours == b.hours && a.staleness_mean == b.staleness_mean;
}

class AdviceSearch {
 public:
  AdviceSearch(const AdviceArguments& arguments, std::function<void(std::uint64_t, std::uint64_t)> progress)
      : arguments_(arguments), threads_(thread_count(arguments.threads)), progress_(std::move(progress)) {}

  Result<Advice> run() {
    ECHO_TRY(read_given());
    ECHO_ASSIGN(const SearchedValues first_settings, choose_first_settings());
    std::vector<AdviceCandidate> candidates = candidates_of_pacing(first_settings);
    estimate_work(candidates.size());
    plan_all(candidates);
    keep_best_plans(candidates);
    if (candidates.empty()) return no_plan_error();
    candidates = with_headrooms(candidates);
    for (const HalvingRound& round : kRounds) {
      if (&round == &kRounds.back()) add_changes(candidates, candidates.front().values, kKeysTriedAgain);
      ECHO_TRY(simulate_all(candidates, steps_of(round.steps_share)));
      keep_best(candidates, round.kept);
    }
    Advice advice;
    advice.aim = arguments_.aim;
    advice.seed = seed_;
    // The last candidates are simulated as whole runs, and the run file's own settings as well, so that the advice is
    // never worse than what the user has.
    candidates.push_back({given_, {}});
    ECHO_TRY(simulate_all(candidates, steps_total_, kAdviceSeeds));
    advice.given = advised_run(candidates.back());
    if (given_budget_ > budget_max_) candidates.pop_back();  // the user does not accept the run file's own budget
    keep_best(candidates, kAdvisedMax);
    for (const AdviceCandidate& candidate : candidates) advice.best.push_back(advised_run(candidate));
    advice.within_limits = candidates.front().figures.possible && ratio_to_limits(candidates.front().figures) <= 1;
    ECHO_TRY(add_effects(candidates.front(), advice));
    advice.plans = plans_;
    advice.simulations = simulations_;
    return advice;
  }

 private:
  // Loads the run file with the searched keys at `values`, and with `more_overrides`.
  Result<SimRun> load(const SearchedValues& values, KeyValues more_overrides = {}) const {
    KeyValues overrides = arguments_.overrides;
    for (std::size_t key = 0; key < kSearchedKeys; ++key)
      if (values[key] != given_[key]) overrides.emplace_back(kKeyNames[key], values[key]);
    overrides.insert(overrides.end(), more_overrides.begin(), more_overrides.end());
    return load_sim_run(ConfigFile::load(arguments_.scenario), overrides);
  }

  Status read_given() {
    ECHO_ASSIGN(const SimRun run, load(given_));  // given_ is still empty, so this overrides no searched key
    const auto& staleness = run.config.staleness;
    steps_total_ = run.config.run.steps;
    seed_ = run.scenario.seed;
    given_budget_ = staleness.budget;
    budget_max_ = arguments_.staleness_budget_max.value_or(given_budget_);
    given_[kBudget] = std::to_string(staleness.budget);
    given_[kPublishEvery] = std::to_string(staleness.publish_every);
    given_[kLookahead] = staleness.lookahead ? std::to_string(*staleness.lookahead) : "auto";
    given_[kTopology] = to_string(run.config.network.topology);
    given_[kHeadroom] = fmt::format("{}", run.config.fleet.headroom);
    given_[kPlaces] = json(run.config.fleet.places).dump();
    const std::vector<std::string>& regions = run.scenario.regions;
    if (run.config.fleet.places.empty() && regions.size() > 1 && regions.size() <= kPlacesMax &&
        std::ranges::none_of(regions, &std::string::empty))
      regions_ = regions;
    return ok();
  }

  // The values to try for `key` while the other keys have `values`. The run file's own value comes first.
  std::vector<std::string> choices(std::size_t key, const SearchedValues& values) const {
    std::vector<std::string> all;
    const auto add = [&](std::string value) {
      if (std::ranges::find(all, value) == all.end()) all.push_back(std::move(value));
    };
    if (key != kBudget || given_budget_ <= budget_max_) add(given_[key]);
    switch (key) {
      case kBudget:
        for (const double share : kBudgetShares) add(std::to_string(std::lround(share * budget_max_)));
        break;
      case kPublishEvery:
        for (const std::uint32_t period : kPublicationPeriods) add(std::to_string(period));
        break;
      case kLookahead:
        add("auto");
        for (const int offset : kLookaheadsFromPeriod) add(std::to_string(std::stoll(values[kPublishEvery]) + offset));
        break;
      case kTopology:
        for (const char* topology : kTopologies) add(topology);
        break;
      case kHeadroom:
        for (const char* headroom : kHeadrooms) add(headroom);
        break;
      case kPlaces:
        for (const std::string& left_out : regions_) {
          std::vector<std::string> places = regions_;
          std::erase(places, left_out);
          add(json(places).dump());
        }
    }
    return all;
  }

  // Every combination of the keys that pace the run, with the other keys as in `first_settings`, and without headroom:
  // a combination that has no plan without headroom has none with it.
  std::vector<AdviceCandidate> candidates_of_pacing(const SearchedValues& first_settings) const {
    std::vector<AdviceCandidate> all;
    SearchedValues values = first_settings;
    values[kHeadroom] = kHeadrooms.front();  // "0"
    for (const std::string& budget : choices(kBudget, values)) {
      values[kBudget] = budget;
      for (const std::string& period : choices(kPublishEvery, values)) {
        values[kPublishEvery] = period;
        for (const std::string& lookahead : choices(kLookahead, values)) {
          values[kLookahead] = lookahead;
          all.push_back({values, {}});
        }
      }
    }
    return all;
  }

  std::vector<AdviceCandidate> with_headrooms(const std::vector<AdviceCandidate>& candidates) const {
    std::vector<AdviceCandidate> all;
    for (const AdviceCandidate& candidate : candidates)
      for (const std::string& headroom : choices(kHeadroom, candidate.values)) {
        all.push_back(candidate);
        all.back().values[kHeadroom] = headroom;
      }
    return all;
  }

  // Estimates dollars and hours of the whole run in closed form, from the plan's price and the predicted idle time. Not
  // `possible` if the run file's checks or the planner refuse the combination.
  AdviceFigures plan(const SearchedValues& values) const {
    AdviceFigures figures;
    const auto run = load(values);
    if (!run) return figures;
    const auto start = sim::plan_simulated_run(run->scenario);
    if (!start || !start->plan_error.empty()) return figures;
    const provisioner::PlanRequest& request = run->scenario.request;
    constexpr double kIdleMax = 0.99;  // the hours below are divided by 1 - idle_fraction
    figures.idle_fraction = std::min(start->idle_predicted.value_or(0), kIdleMax);
    const double hours =
        seconds(request.pace.step_time) / (1 - figures.idle_fraction) * static_cast<double>(steps_total_) / 3600;
    set_cost(figures, hours * (start->plan.usd_per_hour.expected + request.learner_usd_per_hour.value_or(0)), hours);
    figures.possible = true;
    return figures;
  }

  // Plans every candidate and removes the impossible ones.
  void plan_all(std::vector<AdviceCandidate>& candidates) {
    for_each_parallel(candidates.size(), threads_, [&](unsigned, std::size_t i) {
      candidates[i].figures = plan(candidates[i].values);
      report_progress();
    });
    plans_ += candidates.size();
    std::erase_if(candidates, [](const AdviceCandidate& candidate) { return !candidate.figures.possible; });
  }

  Error no_plan_error() const {
    std::string why;
    if (const auto run = load(given_))
      if (const auto start = sim::plan_simulated_run(run->scenario); start && !start->plan_error.empty())
        why = "; that of the run file fails with: " + start->plan_error;
    return fail(Code::kInfeasible, "", "none of the {} combinations has a plan{}", plans_, why);
  }

  // plan() knows neither losses nor the tails of long responses. So it chooses among the budgets and lookaheads of one
  // publication period only.
  void keep_best_plans(std::vector<AdviceCandidate>& candidates) const {
    sort_best_first(candidates);
    std::map<std::string, std::size_t> kept_by_period;
    std::erase_if(candidates, [&](const AdviceCandidate& candidate) {
      return ++kept_by_period[candidate.values[kPublishEvery]] > kPlansPerPeriod;
    });
  }

  Result<AdviceFigures> simulate(const SearchedValues& values, std::uint64_t steps, std::uint64_t seed) const {
    auto run = load(values, {{"run.steps", std::to_string(steps)}, {"simulation.seed", std::to_string(seed)}});
    if (!run && run.error().code == Code::kInvalid) return AdviceFigures{};  // the file's checks exclude it
    if (!run) return std::move(run).error();
    run->scenario.request.predict_idle = nullptr;  // the prediction takes time and does not change the simulation
    ECHO_ASSIGN(const sim::RunResult result, sim::simulate_run(run->scenario));
    return advice_figures(result, steps_total_);
  }

  // Sets the candidates' figures to the means over this number of seeds.
  Status simulate_all(std::span<AdviceCandidate> candidates, std::uint64_t steps, std::size_t seeds = 1) {
    const std::size_t count = candidates.size() * seeds;
    std::vector<AdviceFigures> figures(count);
    std::vector<Status> statuses(count);
    for_each_parallel(count, threads_, [&](unsigned, std::size_t i) {
      auto simulated = simulate(candidates[i / seeds].values, steps, seed_ + i % seeds);
      if (simulated)
        figures[i] = *simulated;
      else
        statuses[i] = std::move(simulated).error();
      report_progress();
    });
    for (const Status& status : statuses) ECHO_TRY(status);
    for (std::size_t i = 0; i < candidates.size(); ++i)
      candidates[i].figures = mean_of_seeds(std::span(figures).subspan(i * seeds, seeds));
    simulations_ += count;
    return ok();
  }

  // Adds the combinations that differ from `values` in one of the keys.
  void add_changes(std::vector<AdviceCandidate>& candidates, const SearchedValues& values,
                   std::span<const SearchedKey> keys) const {
    for (const SearchedKey key : keys)
      for (const std::string& value : choices(key, values)) {
        AdviceCandidate changed{values, {}};
        changed.values[key] = value;
        const auto is_same = [&](const AdviceCandidate& other) { return other.values == changed.values; };
        if (std::ranges::none_of(candidates, is_same)) candidates.push_back(std::move(changed));
      }
  }

  // Returns the run file's settings, with another topology or other places if these are clearly better.
  Result<SearchedValues> choose_first_settings() {
    std::vector<AdviceCandidate> candidates{{given_, {}}};
    add_changes(candidates, given_, kKeysTriedFirst);
    ECHO_TRY(simulate_all(candidates, steps_of(kFirstTrialsStepsShare)));
    const AdviceFigures given = candidates.front().figures;
    sort_best_first(candidates);
    const AdviceFigures& best = candidates.front().figures;
    // If the run file's settings exceed the limits, compares the excess, otherwise the minimised figure. 1e-9 prevents
    // a division by 0.
    const double ratio = ratio_to_limits(given) > 1 ? ratio_to_limits(best) / ratio_to_limits(given)
                                                    : minimised_figure(best) / std::max(minimised_figure(given), 1e-9);
    return !given.possible || ratio < kClearlyBetter ? candidates.front().values : given_;
  }

  Status add_effects(const AdviceCandidate& advised, Advice& advice) {
    std::vector<AdviceCandidate> candidates;
    for (std::size_t key = 0; key < kSearchedKeys; ++key) {
      if (advised.values[key] == given_[key]) continue;
      advice.effects.push_back(
          {.key = kKeyNames[key], .advised = advised.values[key], .given = given_[key], .with_given = {}});
      candidates.push_back(advised);
      candidates.back().values[key] = given_[key];
    }
    ECHO_TRY(simulate_all(candidates, steps_total_, kAdviceSeeds));
    for (std::size_t i = 0; i < candidates.size(); ++i) {
      advice.effects[i].with_given = candidates[i].figures;
      advice.effects[i].within_limits = ratio_to_limits(candidates[i].figures) <= 1;
    }
    std::ranges::stable_sort(advice.effects, [&](const AdviceEffect& a, const AdviceEffect& b) {
      return is_better(b.with_given, a.with_given);
    });
    return ok();
  }

  // The greatest ratio of a figure to its limit, for the worst seed.
  double ratio_to_limits(const AdviceFigures& figures) const {
    return std::max(arguments_.hours_max ? figures.hours_max / *arguments_.hours_max : 0,
                    arguments_.usd_max ? figures.usd_max / *arguments_.usd_max : 0);
  }
  double minimised_figure(const AdviceFigures& figures) const {
    return arguments_.aim == AdviceAim::kUsd ? figures.usd : figures.hours;
  }
  bool is_better(const AdviceFigures& a, const AdviceFigures& b) const {
    if (a.possible != b.possible) return a.possible;
    const double ratio_a = std::max(1.0, ratio_to_limits(a)), ratio_b = std::max(1.0, ratio_to_limits(b));
    if (ratio_a != ratio_b) return ratio_a < ratio_b;
    return std::tuple(minimised_figure(a), a.usd, a.hours) < std::tuple(minimised_figure(b), b.usd, b.hours);
  }
  // Candidates with fewer changes of the run file come before equal ones with more.
  void sort_best_first(std::vector<AdviceCandidate>& candidates) const {
    const auto changes = [&](const AdviceCandidate& candidate) {
      std::size_t count = 0;
      for (std::size_t key = 0; key < kSearchedKeys; ++key) count += candidate.values[key] != given_[key] ? 1 : 0;
      return count;
    };
    std::ranges::stable_sort(candidates, [&](const AdviceCandidate& a, const AdviceCandidate& b) {
      if (is_better(a.figures, b.figures)) return true;
      return !is_better(b.figures, a.figures) && changes(a) < changes(b);
    });
  }
  void keep_best(std::vector<AdviceCandidate>& candidates, std::size_t count) const {
    sort_best_first(candidates);
    const auto repeated_from = std::unique(
        candidates.begin(), candidates.end(),
        [](const AdviceCandidate& a, const AdviceCandidate& b) { return are_same_run(a.figures, b.figures); });
    candidates.erase(repeated_from, candidates.end());
    candidates.resize(std::min(candidates.size(), count));
  }

  AdvisedRun advised_run(const AdviceCandidate& candidate) const {
    AdvisedRun run{.settings = {}, .figures = candidate.figures};
    for (std::size_t key = 0; key < kSearchedKeys; ++key)
      if (key != kPlaces || !regions_.empty()) run.settings.emplace_back(kKeyNames[key], candidate.values[key]);
    return run;
  }

  std::uint64_t steps_of(double share) const {
    const auto steps = static_cast<std::uint64_t>(std::ceil(share * static_cast<double>(steps_total_)));
    return std::min(std::max(steps, kStepsMin), steps_total_);
  }

  // The work is not known before it is done. The shown total is an estimate that does not grow.
  void estimate_work(std::size_t plans) {
    std::size_t simulations = kPublicationPeriods.size() * kPlansPerPeriod * kHeadrooms.size();
    for (const HalvingRound& round : kRounds) simulations += round.kept;
    constexpr std::size_t kChangesExpected = 20, kEffectsExpected = 4;  // of kKeysTriedAgain; of the best candidate
    const std::size_t whole_runs = kRounds.back().kept + 1 + kEffectsExpected;  // 1: the run file's own settings
    simulations += kChangesExpected + whole_runs * kAdviceSeeds;
    work_total_ = plans + simulations;
  }
  void report_progress() {
    const bool is_estimated = work_total_ > 0;  // the trials of choose_first_settings() precede the estimate
    if (progress_ && is_estimated) progress_(std::min(++work_done_, work_total_), work_total_);
  }

  const AdviceArguments& arguments_;
  const unsigned threads_;
  std::function<void(std::uint64_t, std::uint64_t)> progress_;
  SearchedValues given_;              // the run file's
  std::vector<std::string> regions_;  // the search leaves out one at a time; empty: fleet.places is not searched
  std::uint32_t given_budget_ = 0, budget_max_ = 0;
  std::uint64_t steps_total_ = 0, seed_ = 0;
  std::size_t plans_ = 0, simulations_ = 0;
  std::uint64_t work_total_ = 0;
  std::atomic<std::uint64_t> work_done_ = 0;
};

json figures_json(const AdviceFigures& figures) {
  return {{"possible", figures.possible},
          {"usd", figures.usd},
          {"usd_min", figures.usd_min},
          {"usd_max", figures.usd_max},
          {"hours", figures.hours},
          {"hours_min", figures.hours_min},
          {"hours_max", figures.hours_max},
          {"usd_per_hour", figures.usd_per_hour},
          {"idle_fraction", figures.idle_fraction},
          {"staleness_mean", figures.staleness_mean},
          {"staleness_p95", figures.staleness_p95},
          {"workers", figures.workers}};
}

json run_json(const AdvisedRun& run) {
  json settings = json::object();
  for (const auto& [key, value] : run.settings) settings[key] = value;
  return {{"settings", std::move(settings)}, {"figures", figures_json(run.figures)}};
}

}  // namespace

AdviceFigures advice_figures(const sim::RunResult& result, std::uint64_t steps_total) {
  AdviceFigures figures;
  figures.possible = result.plan_error.empty() && result.ended == "completed";
  figures.workers = result.machines_planned;
  double usd = result.usd_fleet + result.usd_learner, seconds_total = result.wall_s;
  // Only in the beginning do machines boot, receive the first policy, and get released because there are too many. So
  // each step that was not simulated takes and costs as much as a mean step of the second half.
  const auto& steps = result.by_step;
  if (steps.size() < steps_total && steps.size() >= 2) {
    const sim::SimStep &middle = steps[steps.size() / 2 - 1], &last = steps.back();
    const double missing_over_half =
        static_cast<double>(steps_total - steps.size()) / static_cast<double>(last.step - middle.step);
    usd += missing_over_half * (last.usd - middle.usd);
    seconds_total += missing_over_half * (last.at_s - middle.at_s);
  }
  set_cost(figures, usd, seconds_total / 3600);
  figures.idle_fraction = idle_fraction_after_first_step(result).value_or(0);
  double age_sum = 0, rollout_sum = 0;
  std::map<std::uint64_t, std::uint64_t> rollouts_by_age;
  for (const sim::SimStep& step : steps)
    for (const auto& [age, rollouts] : step.staleness) {
      rollouts_by_age[age] += rollouts;
      age_sum += static_cast<double>(age * rollouts);
      rollout_sum += static_cast<double>(rollouts);
    }
  if (rollout_sum == 0) return figures;
  figures.staleness_mean = age_sum / rollout_sum;
  figures.staleness_p95 = learner::quantile(rollouts_by_age, 0.95).get<std::uint64_t>();
  return figures;
}

Result<Advice> advise(const AdviceArguments& arguments,
                      const std::function<void(std::uint64_t done, std::uint64_t total)>& progress) {
  return AdviceSearch(arguments, progress).run();
}

KeyValues advised_changes(const Advice& advice, const AdvisedRun& run) {
  KeyValues changes;
  for (std::size_t i = 0; i < run.settings.size(); ++i)
    if (run.settings[i] != advice.given.settings[i]) changes.push_back(run.settings[i]);
  return changes;
}

Result<std::string> advised_run_file(const AdviceArguments& arguments, const KeyValues& changes) {
  KeyValues overrides = arguments.overrides;
  overrides.insert(overrides.end(), changes.begin(), changes.end());
  ECHO_ASSIGN(SimRun run, load_sim_run(ConfigFile::load(arguments.scenario), overrides));
  return std::move(run.config.resolved_yaml);
}

json advice_json(const Advice& advice) {
  json best = json::array(), effects = json::array();
  for (const AdvisedRun& run : advice.best) best.push_back(run_json(run));
  for (const AdviceEffect& effect : advice.effects)
    effects.push_back({{"key", effect.key},
                       {"advised", effect.advised},
                       {"given", effect.given},
                       {"within_limits", effect.within_limits},
                       {"with_given", effect.with_given.possible ? figures_json(effect.with_given) : json(nullptr)}});
  return {{"schema_version", 1},
          {"minimise", advice.aim == AdviceAim::kUsd ? "usd" : "hours"},
          {"seeds", {advice.seed, advice.seed + kAdviceSeeds - 1}},
          {"given", run_json(advice.given)},
          {"best", std::move(best)},
          {"decides", std::move(effects)},
          {"within_limits", advice.within_limits},
          {"plans", advice.plans},
          {"simulations", advice.simulations}};
}

}  // namespace echoline::study
