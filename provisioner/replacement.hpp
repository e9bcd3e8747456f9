// Estimates how often rented machines are lost and what that costs; docs/plan.md gives the formula.
#pragma once
#include <optional>
#include <span>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {

inline constexpr double kPriorHours = 24;  // weight of a stated reliability, in hours of ledger history
inline constexpr double kOutageHours = 1;  // length of an outage: a machine with 99 % uptime fails once in 99 of these
inline constexpr double kOutbidPerHour = 1.0 / 24;  // until ledgers have data

// From the offer's stated or assumed reliability, and from ledgers. Absent if there is neither.
std::optional<double> losses_per_hour(const PlanRequest& request, const Offer& offer);

// The cost of the snapshot that a worker receives when it joins.
double usd_to_join(const PlanRequest& request, const Offer& offer);

// For the chosen rows; unknown losses count as none.
Replacing expected_replacing(const PlanRequest& request, std::span<const PlanRow> rows);

struct SeenMachine {
  std::string provider, host;
  double hours = 0;  // rented
  bool lost = false;
};
// Sets the history of every offer's host or, if the host was never rented, of its provider. Local processes are not
// used.
void note_seen(std::span<Offer> offers, std::span<const SeenMachine> seen);

}  // namespace echoline::provisioner
