// Estimates how often rented machines are lost and what that costs; docs/plan.md gives the formula.
#pragma once
#include <optional>
#include <span>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {

inline constexpr double kPriorHours = 24;  // a stated reliability weighs as much as this many hours of ledger history
inline constexpr double kOutageHours = 1;  // assumed length of an outage: a machine with 99 % uptime fails every 99 h
inline constexpr double kOutbidPerHour = 1.0 / 24;  // assumed losses of a bid to higher ones, until ledgers have data

// Expected losses of a machine, from the offer's stated or assumed reliability and from ledgers. Absent if there is
// neither.
std::optional<double> losses_per_hour(const PlanRequest& request, const Offer& offer);

// The cost of the snapshot that a worker receives when it joins.
double usd_to_join(const PlanRequest& request, const Offer& offer);

// The expected cost of losing and replacing the chosen rows' machines; unknown losses count as none.
ReplacementCost expected_replacement_cost(const PlanRequest& request, std::span<const PlanRow> rows);

struct PastRental {
  std::string provider, host;
  double hours = 0;  // rented
  bool lost = false;
};
// Sets seen_hours and seen_losses of every offer: those of its host or, if the host was never rented, of its provider.
// Rentals of a local provider are not counted, because its instances end with the process that rented them.
void set_loss_history(std::span<Offer> offers, std::span<const PastRental> seen);

}  // namespace echoline::provisioner
