// A plan made earlier against the offers of today: what is left of it stays, what has gone or become dearer is planned
// again.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "provisioner/plan.hpp"

namespace echoline::provisioner {

struct RenewedPlan {
  Plan plan;
  std::vector<std::string> changes;  // "a17 is not offered any more"; empty: the plan stands as it was
};

// Keeps every rented offer that is still to be had for at most (1 + tolerance) times its planned price, at its price of
// today, and plans the rest anew with the request of the plan. kInfeasible where no fleet with them meets the target,
// or the whole costs more than (1 + tolerance) times what was planned.
Result<RenewedPlan> renew_plan(const Plan& planned, std::span<const Offer> offers, double tolerance);

}  // namespace echoline::provisioner
