// Plans again with the kept offers of an earlier plan; `echoline apply` calls it.
#include "provisioner/renewal.hpp"

#include <algorithm>
#include <unordered_map>

#include "provisioner/eligibility.hpp"

namespace echoline::provisioner {

Result<RenewedPlan> renew_plan(const Plan& planned, std::span<const Offer> offers, double tolerance) {
  std::unordered_map<std::string_view, const Offer*> offers_today;
  for (const Offer& offer : offers) offers_today.emplace(offer.id, &offer);
  PlanRequest request = planned.request;
  request.keep.clear();
  RenewedPlan renewed;
  std::vector<Offer> pool(offers.begin(), offers.end());
  for (const PlanRow* row : planned.chosen()) {
    const auto it = offers_today.find(row->offer.id);
    const auto note_dropped = [&](const std::string& why) {
      renewed.changes.push_back(fmt::format("{} {}", row->offer.id, why));
    };
    if (it == offers_today.end() || it->second->provider != row->offer.provider) {
      note_dropped("is not offered any more");
      continue;
    }
    const Offer& offer = *it->second;
    if (const auto defect = ineligibility_reason(request, offer)) {
      note_dropped("cannot be rented any more: " + *defect);
      continue;
    }
    const double copies = planned.topology.copies_sent_by(*row->worker);
    const double planned_usd = *row->cost.usd_per_hour();  // the prices of chosen and of eligible offers are known
    const double usd_today = *cost_of(request, offer, copies).usd_per_hour();
    if (usd_today > planned_usd * (1 + tolerance)) {
      note_dropped(fmt::format("costs ${:.4f}/h, planned were ${:.4f}/h", usd_today, planned_usd));
      // The new plan must not choose the offer again, because it has become too dear.
      std::erase_if(pool, [&](const Offer& other) { return other.id == offer.id; });
      continue;
    }
    request.keep.push_back(offer.id);
  }
  Result<Plan> plan = make_plan(request, pool);
  if (!plan) return std::move(plan).error();
  const double planned_total_usd = planned.usd_per_hour.expected, total_usd_today = plan->usd_per_hour.expected;
  if (total_usd_today > planned_total_usd * (1 + tolerance)) {
    constexpr std::size_t kChangesShown = 5;
    const std::size_t change_count = renewed.changes.size();
    std::string changes;
    for (std::size_t i = 0; i < std::min(kChangesShown, change_count); ++i) changes += "; " + renewed.changes[i];
    if (change_count > kChangesShown) changes += fmt::format("; and {} more", change_count - kChangesShown);
    return fail(Code::kInfeasible, "renew plan",
                "planned were ${:.4f}/h and today the fleet costs ${:.4f}/h, {:.1f} % more{}: allow that "
                "(--price-tolerance), or make a new plan",
                planned_total_usd, total_usd_today, 100 * (total_usd_today / planned_total_usd - 1), changes);
  }
  renewed.plan = std::move(*plan);
  for (const PlanRow* row : renewed.plan.chosen())
    if (const PlanRow* planned_row = planned.row_of(row->offer.id); !planned_row || !planned_row->chosen)
      renewed.changes.push_back(fmt::format("{} is rented instead", row->offer.id));
  return renewed;
}

}  // namespace echoline::provisioner
