// Estimates losses and their costs, for plans.
#include "provisioner/replacement.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "provisioner/eligibility.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

constexpr double kReliabilityMin = 1e-3;  // floor, so that the expected number of losses stays finite

}  // namespace

std::optional<double> losses_per_hour(const PlanRequest& request, const Offer& offer) {
  std::optional<double> prior;  // losses per hour, as expected without history
  // A machine with reliability p is down for the share 1 - p of the time, in outages of kOutageHours each. So it has
  // (1 - p) / (p * kOutageHours) outages per hour of uptime.
  if (const auto reliability = reliability_of(request, offer))
    prior = (1 - *reliability) / (std::max(*reliability, kReliabilityMin) * kOutageHours);
  if (request.fleet.pricing == Pricing::kBid) prior = prior.value_or(0) + kOutbidPerHour;
  if (!prior && offer.seen_hours < kPriorHours) return std::nullopt;  // too little history by itself
  if (!prior) return offer.seen_losses / offer.seen_hours;
  // The prior weighs as much as kPriorHours hours of history.
  return (*prior * kPriorHours + offer.seen_losses) / (kPriorHours + offer.seen_hours);
}

double usd_to_join(const PlanRequest& request, const Offer& offer) {
  constexpr double kBytesPerGb = 1e9;
  const auto& stated = offer.download_usd_per_gb;
  const double usd_per_gb = stated ? *stated : request.fleet.assume.download_usd_per_gb.value_or(0);
  return static_cast<double>(request.full_bytes.count) / kBytesPerGb * usd_per_gb;
}

ReplacementCost expected_replacement_cost(const PlanRequest& request, std::span<const PlanRow> rows) {
  ReplacementCost total;
  if (!request.run_time) return total;
  const double hours = seconds(*request.run_time) / 3600, boot_hours = seconds(request.fleet.join_timeout) / 3600;
  double joining_usd = 0, booting_usd = 0;  // over all losses; as if each boot took the whole join_timeout
  for (const PlanRow& row : rows) {
    if (!row.chosen || !row.losses_per_hour) continue;
    const double losses = *row.losses_per_hour * hours;
    total.losses += losses;
    joining_usd += losses * usd_to_join(request, row.offer);
    booting_usd += losses * boot_hours * *row.cost.usd_per_hour();
  }
  if (total.losses <= 0) return total;
  // Losses are rare independent events (Poisson distribution). The bounds are two standard deviations from the mean.
  const double spread = 2 * std::sqrt(total.losses);
  // The cost of this number of losses. `boot_share`: the share of the join_timeout that each boot takes.
  const auto usd_for = [&](double losses, double boot_share) {
    return losses / total.losses * (joining_usd + boot_share * booting_usd);
  };
  total.usd = {.low = usd_for(std::max(0.0, total.losses - spread), /*boot_share=*/0),
               .expected = usd_for(total.losses, /*boot_share=*/0.5),
               .high = usd_for(total.losses + spread, /*boot_share=*/1)};
  return total;
}

void set_loss_history(std::span<Offer> offers, std::span<const PastRental> seen) {
  struct Record {
    double hours = 0, losses = 0;
  };
  std::map<std::pair<std::string_view, std::string_view>, Record> records;  // by provider and host; "": any host
  for (const PastRental& rental : seen) {
    if (is_local_provider(rental.provider)) continue;
    for (const std::string_view host : {std::string_view(rental.host), std::string_view()}) {
      Record& record = records[{rental.provider, host}];
      record.hours += rental.hours;
      record.losses += rental.lost ? 1 : 0;
      if (host.empty()) break;  // an unstated host: the record of any host is the only one
    }
  }
  for (Offer& offer : offers) {
    auto it = records.find({offer.provider, offer.host});
    if (it == records.end()) it = records.find({offer.provider, ""});
    if (it == records.end()) continue;
    offer.seen_hours = it->second.hours;
    offer.seen_losses = it->second.losses;
  }
}

}  // namespace echoline::provisioner
