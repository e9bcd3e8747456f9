// Explains a plan: why an offer is or is not rented and at what price that would change, and the plans of other
// settings.
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
  std::vector<std::string> lines;  // for users
  // The highest GPU rent at which it is rented; absent if it is not eligible, or never rented.
  std::optional<double> rented_up_to_usd_per_hour;

  nlohmann::json to_json() const;
  std::string to_text(std::optional<std::size_t> columns = {}) const;
};

// kNotFound for an unknown offer, with the nearest id. `plan` must be made of `offers`.
Result<Explanation> explain_offer(const Plan& plan, std::span<const Offer> offers, std::string_view id);

// Another setting and its plan.
struct Variation {
  std::string change;        // "kappa 2 and S 7"
  std::optional<Plan> plan;  // absent if there is none
  std::string why_not;       // if there is no plan
};

// The plan as requested first, then with other S, kappa, prices, uplink and headroom, one change at a time.
std::vector<Variation> vary_plan(const PlanRequest& request, std::span<const Offer> offers);
nlohmann::json variations_json(const std::vector<Variation>& variations);
std::string variations_table(const std::vector<Variation>& variations, std::optional<std::size_t> columns = {});

}  // namespace echoline::provisioner
