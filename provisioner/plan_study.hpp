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

// The learner's idle share against the fleet's price: the plans for more and for less capacity. Ascending by price.
struct IdlePoint {
  double share = 1;  // of the capacity that the plan rents; 1: the plan
  std::size_t workers = 0;
  double rollouts_per_s = 0, usd_per_hour = 0;
  std::optional<double> idle_fraction, usd_run;  // usd_run: with the learner, for the time with the waiting
};
// Empty if there is no plan.
std::vector<IdlePoint> idle_curve(const PlanRequest& request, std::span<const Offer> offers);
nlohmann::json idle_curve_json(const std::vector<IdlePoint>& curve);
std::string idle_curve_table(const std::vector<IdlePoint>& curve, std::optional<std::size_t> columns = {});

// The plan as requested first, then with other S, kappa, prices, uplink and headroom, one change at a time.
std::vector<Variation> vary_plan(const PlanRequest& request, std::span<const Offer> offers);
nlohmann::json variations_json(const std::vector<Variation>& variations);
std::string variations_table(const std::vector<Variation>& variations, std::optional<std::size_t> columns = {});

}  // namespace echoline::provisioner
