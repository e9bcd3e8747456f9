// Simulates a faulty market and a learner that is killed at any moment around the real provisioner/fleet_core. Checks
// its rentals and their cost at every step.
#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/units.hpp"

namespace echoline::sim {

struct MarketViolation {
  Duration at{};
  std::string rule;  // docs/provisioning.md: known, forgotten, budget, enough, restored, returned, order
  std::string text;
};

struct MarketResult {
  std::uint64_t seed = 0;
  std::string scenario;
  std::vector<MarketViolation> violations;
  std::uint64_t actions = 0, rentals = 0, losses = 0, restarts = 0, drained = 0;
  // Restarts of the learner before and after an action, by kind of action (kMarketActions).
  std::array<std::uint64_t, 14> restarts_at{};
  bool closed = false;     // the budget was spent
  bool exhausted = false;  // at the end no rentable offer was left
  bool restored = false;   // capacity was restored in time after the trouble
  std::uint64_t trace_hash = 0;
};

inline constexpr std::array<const char*, 7> kMarketActions{"book",         "start",   "stop", "look",
                                                           "book the end", "give up", "drain"};

// Runs one seed: offers, a run, half an hour of trouble, peace, and the end of the run. `trace` receives all events.
MarketResult simulate_market(std::uint64_t seed, const std::function<void(const std::string&)>& trace = {});

struct MarketSummary {
  std::uint64_t seeds = 0, failed = 0, actions = 0, rentals = 0, losses = 0, restarts = 0, drained = 0;
  std::uint64_t closed = 0, exhausted = 0, restored = 0;
  std::array<std::uint64_t, 14> restarts_at{};
  std::vector<MarketResult> failures;  // the first ten
  std::uint64_t combined_hash = 0;
};
MarketSummary simulate_markets(std::uint64_t first, std::uint64_t seeds,
                               const std::function<void(const MarketResult&)>& done = {});

}  // namespace echoline::sim
