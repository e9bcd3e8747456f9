// How often rented machines are lost, and what that costs: docs/plan.md gives the formula.
#pragma once
#include <optional>
#include <span>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {

inline constexpr double kPriorHours = 24;           // what an offer states weighs as much as so many hours of a ledger
inline constexpr double kOutageHours = 1;           // a machine that is up 99 % of the time fails once in 99 of these
inline constexpr double kOutbidPerHour = 1.0 / 24;  // until ledgers know better

// By the reliability that the offer states or that is assumed for it, and by what ledgers have seen. Absent where
// neither says anything.
std::optional<double> losses_per_hour(const PlanRequest& request, const Offer& offer);

// What the snapshot costs that a worker receives when it joins.
double usd_to_join(const PlanRequest& request, const Offer& offer);

// Of the chosen rows; those whose losses are not known count as never lost.
Replacing expected_replacing(const PlanRequest& request, std::span<const PlanRow> rows);

// A machine as a ledger knows it.
struct SeenMachine {
  std::string provider, host;
  double hours = 0;  // rented
  bool lost = false;
};
// Sets what was seen of every offer's host, or, of a host that nobody has rented, of its provider. Local processes are
// not learned from.
void note_seen(std::span<Offer> offers, std::span<const SeenMachine> seen);

}  // namespace echoline::provisioner
