// Explains a plan: why it rents an offer or not, at what price that would change, and how the plans of other settings
// differ.
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
  // The highest GPU rent at which the offer is rented; absent if it is not eligible, or rented at no price.
  std::optional<double> rented_up_to_usd_per_hour;

  nlohmann::json to_json() const;
  std::string to_text(std::optional<std::size_t> columns = {}) const;
};

// kNotFound for an unknown offer, with the nearest id. `plan` must be made of `offers`.
Result<Explanation> explain_offer(const Plan& plan, std::span<const Offer> offers, std::string_view id);

// Another setting and its plan.
struct Variation {
  std::string change;        // "kappa 2 and S 7"
  std::optional<Plan> plan;  // absent if no plan is possible
  std::string why_not;       // the reason in that case
};

// The plan for more or less capacity than the run's plan: the learner's idle share against the fleet's price.
struct IdlePoint {
  double share = 1;  // PlanRequest::capacity_share; 1: the run's plan
  std::size_t workers = 0;
  double rollouts_per_s = 0, usd_per_hour = 0;
  std::optional<double> idle_fraction;
  std::optional<double> usd_run;  // Plan::usd_run_with_waiting()
};
// Ascending by price. Empty if no plan is possible.
std::vector<IdlePoint> idle_curve(const PlanRequest& request, std::span<const Offer> offers);
nlohmann::json idle_curve_json(const std::vector<IdlePoint>& curve);
std::string idle_curve_table(const std::vector<IdlePoint>& curve, std::optional<std::size_t> columns = {});

// The plan as requested first, then with other S, kappa, prices, uplink and headroom, one change at a time.
std::vector<Variation> vary_plan(const PlanRequest& request, std::span<const Offer> offers);
nlohmann::json variations_json(const std::vector<Variation>& variations);
std::string variations_table(const std::vector<Variation>& variations, std::optional<std::size_t> columns = {});

}  // namespace echoline::provisioner
