// Plans again with the kept offers of an earlier plan; `echoline apply` calls it.
#include "provisioner/renewal.hpp"

#include <algorithm>
#include <unordered_map>

#include "provisioner/eligibility.hpp"

namespace echoline::provisioner {

Result<RenewedPlan> renew_plan(const Plan& planned, std::span<const Offer> offers, double tolerance) {
  std::unordered_map<std::string_view, const Offer*> today;
  for (const Offer& o : offers) today.emplace(o.id, &o);
  PlanRequest request = planned.request;
  request.keep.clear();
  RenewedPlan renewed;
  std::vector<Offer> pool(offers.begin(), offers.end());
  for (const PlanRow* row : planned.chosen()) {
    const auto it = today.find(row->offer.id);
    const auto gone = [&](const std::string& why) {
      renewed.changes.push_back(fmt::format("{} {}", row->offer.id, why));
    };
    if (it == today.end() || it->second->provider != row->offer.provider) {
      gone("is not offered any more");
      continue;
    }
    const Offer& now = *it->second;
    if (const auto defect = ineligibility_reason(request, now)) {
      gone("cannot be rented any more: " + *defect);
      continue;
    }
    const double copies = planned.topology.copies_sent_by(*row->worker);
    const double before = *row->cost.usd_per_hour(), after = *cost_of(request, now, copies).usd_per_hour();
    if (after > before * (1 + tolerance)) {
      gone(fmt::format("costs ${:.4f}/h, planned were ${:.4f}/h", after, before));
      // An offer that became too dear must not return as the cheapest of the rest.
      std::erase_if(pool, [&](const Offer& o) { return o.id == now.id; });
      continue;
    }
    request.keep.push_back(now.id);
  }
  auto plan = make_plan(request, pool);
  if (!plan) return std::move(plan).error();
  const double before = planned.usd_per_hour.expected, after = plan->usd_per_hour.expected;
  if (after > before * (1 + tolerance)) {
    constexpr std::size_t kNamed = 5;
    std::string what;
    for (std::size_t i = 0; i < std::min(kNamed, renewed.changes.size()); ++i) what += "; " + renewed.changes[i];
    if (renewed.changes.size() > kNamed) what += fmt::format("; and {} more", renewed.changes.size() - kNamed);
    return fail(Code::kInfeasible, "renew plan",
                "planned were ${:.4f}/h and today the fleet costs ${:.4f}/h, {:.1f} % more{}: allow that "
                "(--price-tolerance), or make a new plan",
                before, after, 100 * (after / before - 1), what);
  }
  renewed.plan = std::move(*plan);
  for (const PlanRow* row : renewed.plan.chosen())
    if (const PlanRow* old = planned.row_of(row->offer.id); !old || !old->chosen)
      renewed.changes.push_back(fmt::format("{} is rented instead", row->offer.id));
  return renewed;
}

}  // namespace echoline::provisioner
