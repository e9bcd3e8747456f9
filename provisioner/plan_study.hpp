// What a plan depends on: why one offer is or is not in it and at what price that would change, and what other settings
// would come to.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {

struct Explanation {
  PlanRow row;
  std::vector<std::string> lines;  // for people
  // Rent of its GPUs up to which it is, or would be, rented; absent where it is not eligible, or at no price.
  std::optional<double> rented_up_to_usd_per_hour;

  nlohmann::json to_json() const;
  std::string to_text(std::optional<std::size_t> columns = {}) const;
};

// kNotFound for an offer that is not there, with the nearest id. `plan`: made of `offers` by its request.
Result<Explanation> explain_offer(const Plan& plan, std::span<const Offer> offers, std::string_view id);

// One other setting and what the plan would be.
struct Variation {
  std::string change;        // "kappa 2 and S 7"
  std::optional<Plan> plan;  // absent where there is none
  std::string why_not;       // then
};

// The plan as asked for first, then with other S, kappa, prices, uplink and headroom, one change at a time.
std::vector<Variation> vary_plan(const PlanRequest& request, std::span<const Offer> offers);
nlohmann::json variations_json(const std::vector<Variation>& variations);
std::string variations_table(const std::vector<Variation>& variations, std::optional<std::size_t> columns = {});

}  // namespace echoline::provisioner
