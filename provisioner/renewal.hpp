// Updates an earlier plan with today's offers: keeps available machines and plans the rest again.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "provisioner/plan.hpp"

namespace echoline::provisioner {

struct RenewedPlan {
  Plan plan;
  std::vector<std::string> changes;  // "a17 is not offered any more"; empty: the plan is unchanged
};

// Keeps every rented offer that is still available and costs at most (1 + tolerance) times its planned price today.
// Plans the rest again with the plan's request. kInfeasible if no fleet with the kept offers meets the target, or if
// the total exceeds (1 + tolerance) times the planned cost.
Result<RenewedPlan> renew_plan(const Plan& planned, std::span<const Offer> offers, double tolerance);

}  // namespace echoline::provisioner
