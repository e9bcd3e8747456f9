// Estimates losses and their costs, for plans.
#include "provisioner/replacement.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "provisioner/eligibility.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {

std::optional<double> losses_per_hour(const PlanRequest& request, const Offer& offer) {
  std::optional<double> prior;
  if (const auto up = reliability_of(request, offer)) prior = (1 - *up) / (std::max(*up, 1e-3) * kOutageHours);
  if (request.fleet.pricing == Pricing::kBid) prior = prior.value_or(0) + kOutbidPerHour;
  if (!prior && offer.seen_hours < kPriorHours) return std::nullopt;
  if (!prior) return offer.seen_losses / offer.seen_hours;
  return (*prior * kPriorHours + offer.seen_losses) / (kPriorHours + offer.seen_hours);
}

double usd_to_join(const PlanRequest& request, const Offer& offer) {
  const auto stated = offer.download_usd_per_gb;
  return static_cast<double>(request.full_bytes.count) / 1e9 *
         (stated ? *stated : request.fleet.assume.download_usd_per_gb.value_or(0));
}

ReplacementCost expected_replacement_cost(const PlanRequest& request, std::span<const PlanRow> rows) {
  ReplacementCost out;
  if (!request.run_time) return out;
  const double hours = seconds(*request.run_time) / 3600, boot_hours = seconds(request.fleet.join_timeout) / 3600;
  double joining = 0, booting = 0;  // over all losses; booting with boot_max each
  for (const PlanRow& row : rows) {
    if (!row.chosen || !row.losses_per_hour) continue;
    const double losses = *row.losses_per_hour * hours;
    out.losses += losses;
    joining += losses * usd_to_join(request, row.offer);
    booting += losses * boot_hours * *row.cost.usd_per_hour();
  }
  if (out.losses <= 0) return out;
  // The number of rare independent events, two standard deviations either way.
  const double spread = 2 * std::sqrt(out.losses);
  const auto times = [&](double losses, double boot) { return losses / out.losses * (joining + boot * booting); };
  out.usd = {times(std::max(0.0, out.losses - spread), 0), times(out.losses, 0.5), times(out.losses + spread, 1)};
  return out;
}

void set_loss_history(std::span<Offer> offers, std::span<const PastRental> seen) {
  struct Record {
    double hours = 0, losses = 0;
  };
  std::map<std::pair<std::string_view, std::string_view>, Record> of;  // host "": the provider
  for (const PastRental& machine : seen) {
    if (is_local_provider(machine.provider)) continue;
    for (const std::string_view host : {std::string_view(machine.host), std::string_view()}) {
      Record& record = of[{machine.provider, host}];
      record.hours += machine.hours;
      record.losses += machine.lost ? 1 : 0;
      if (host.empty()) break;
    }
  }
  for (Offer& offer : offers) {
    auto it = of.find({offer.provider, offer.host});
    if (it == of.end()) it = of.find({offer.provider, ""});
    if (it == of.end()) continue;
    offer.seen_hours = it->second.hours;
    offer.seen_losses = it->second.losses;
  }
}

}  // namespace echoline::provisioner
