// Words shared by a plan's JSON and its text. Private to provisioner/.
#pragma once
#include <string_view>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {

// Which of the staleness budget S and the lookahead determines Plan::staleness_worst.
inline std::string_view staleness_bound_by(const Plan& plan) {
  return plan.staleness_worst < plan.request.staleness_budget ? "lookahead" : "budget";
}

}  // namespace echoline::provisioner
