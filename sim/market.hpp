// Simulates a market with faults, and a learner that can be killed at any moment, around the real
// provisioner/fleet_core. Checks the core's rentals and their cost at every step.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/units.hpp"

namespace echoline::sim {

struct MarketViolation {
  Duration at{};     // after the start of the run
  std::string rule;  // known, forgotten, budget, enough, restored, returned or order: see docs/provisioning.md
  std::string text;
};

// Kinds of the fleet core's actions except cancellations and notes, in the order of provisioner::FleetAction.
inline constexpr std::array<const char*, 7> kMarketActions{"book",         "start",   "stop", "look",
                                                           "book the end", "give up", "drain"};
// Restarts of the learner by kind of action: element 2k counts those just before an action of kind k, 2k + 1 after it.
using RestartsByAction = std::array<std::uint64_t, 2 * kMarketActions.size()>;

struct MarketResult {
  std::uint64_t seed = 0;
  std::string scenario;
  std::vector<MarketViolation> violations;
  std::uint64_t actions = 0, rentals = 0, losses = 0;  // actions of the fleet core; machines
  std::uint64_t restarts = 0, drained = 0;             // of the learner; workers
  RestartsByAction restarts_at{};
  bool closed = false;     // the budget was spent
  bool exhausted = false;  // at the end no rentable offer was left
  bool restored = false;   // capacity was restored in time after the trouble
  std::uint64_t trace_hash = 0;
};

// Runs one seed: a run with 25 minutes of faults, then 18 without new ones, then the end of the run. `trace`
// receives all events.
MarketResult simulate_market(std::uint64_t seed, const std::function<void(const std::string&)>& trace = {});

struct MarketSummary {
  std::uint64_t seeds = 0, failed = 0, actions = 0, rentals = 0, losses = 0, restarts = 0, drained = 0;
  std::uint64_t closed = 0, exhausted = 0, restored = 0;  // seeds, as in MarketResult
  RestartsByAction restarts_at{};
  std::vector<MarketResult> failures;  // the first kFailuresKept
  static constexpr std::size_t kFailuresKept = 10;
  std::uint64_t combined_hash = 0;
};
// Runs `seeds` seeds from `first`. Calls `done` after each.
MarketSummary simulate_markets(std::uint64_t first, std::uint64_t seeds,
                               const std::function<void(const MarketResult&)>& done = {});

}  // namespace echoline::sim
