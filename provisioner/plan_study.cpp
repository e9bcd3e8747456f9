// Explains plans and varies their settings; `echoline plan` calls it.
#include "provisioner/plan_study.hpp"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "base/suggest.hpp"
#include "base/text.hpp"
#include "provisioner/eligibility.hpp"
#include "provisioner/replacement.hpp"
#include "provisioner/text_table.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;

constexpr int kPriceSteps = 14;           // halvings of the interval in which a price limit lies
constexpr double kPriceMultipleMax = 16;  // an offer that is rented at this multiple of its price has no price limit
constexpr double kPriceMin = 0.01;        // $ per hour, so that a free offer also has a price to multiply

constexpr std::size_t kSuggestedIdsMax = 5000;  // ids that a misspelt id is compared with

// Characters in a line of a table, on a screen of this width or an unknown one.
std::size_t table_width(std::optional<std::size_t> columns) {
  constexpr std::size_t kWidthMin = 40, kWidthMax = 80;
  return std::clamp(columns.value_or(kWidthMax), kWidthMin, kWidthMax);
}

std::string usd(const std::optional<double>& value) { return value ? fmt::format("${:.4f}", *value) : "?"; }

// Whether the plan would rent the offer for this rent. Changes `offers`, and restores it before it returns.
bool is_rented_at(const PlanRequest& request, std::vector<Offer>& offers, std::size_t index, double usd_per_hour) {
  Offer& offer = offers[index];
  const auto on_demand_before = offer.gpu_usd_per_hour, bid_min_before = offer.bid_usd_per_hour_min;
  if (request.fleet.pricing == Pricing::kBid)
    offer.bid_usd_per_hour_min = usd_per_hour / (1 + request.fleet.bid_over_min);
  else
    offer.gpu_usd_per_hour = usd_per_hour;
  const auto plan = make_plan(request, offers);
  offer.gpu_usd_per_hour = on_demand_before;
  offer.bid_usd_per_hour_min = bid_min_before;
  if (!plan) return false;
  const PlanRow* row = plan->row_of(offer.id);
  return row && row->chosen;
}

// Returns the highest rent at which the plan rents the offer, by bisection; absent if it is rented at none.
std::optional<double> price_limit(const Plan& plan, std::span<const Offer> offers, std::size_t index) {
  const PlanRow& row = *plan.row_of(offers[index].id);
  if (row.rank == 0 || !row.cost.gpu) return std::nullopt;
  std::vector<Offer> pool(offers.begin(), offers.end());
  PlanRequest request = plan.request;
  request.predict_idle = nullptr;  // the choice does not depend on it
  // After the two checks below, the offer is rented at `low` and not at `high`.
  double low = row.chosen ? *row.cost.gpu : 0;
  double high = row.chosen ? std::max(kPriceMin, *row.cost.gpu) * kPriceMultipleMax : *row.cost.gpu;
  if (!row.chosen && !is_rented_at(request, pool, index, 0)) return std::nullopt;
  if (row.chosen && is_rented_at(request, pool, index, high)) return high;
  for (int i = 0; i < kPriceSteps; ++i) {
    const double middle = (low + high) / 2;
    if (is_rented_at(request, pool, index, middle))
      low = middle;
    else
      high = middle;
  }
  return low;
}

// Appends the lines about the parts of the offer's price, and their sum.
void add_price_lines(const Plan& plan, const PlanRow& row, std::vector<std::string>& lines) {
  const PlanRequest& request = plan.request;
  const Offer& o = row.offer;
  constexpr double kSecondsPerHour = 3600, kBytesPerGb = 1e9;
  const double publications_per_hour = kSecondsPerHour / (request.pace.publish_every * seconds(request.pace.step_time));
  const double gb_per_hour = static_cast<double>(request.delta_bytes.count) / kBytesPerGb * publications_per_hour;
  const double copies = row.worker ? plan.topology.copies_sent_by(*row.worker) : 1;  // of each publication
  const auto price = [&](const std::optional<double>& stated, const std::optional<double>& assumed) {
    return stated    ? fmt::format("${:.4g}/GB", *stated)
           : assumed ? fmt::format("${:.4g}/GB (assumed)", *assumed)
                     : "$?/GB";
  };
  lines.push_back(
      fmt::format("rent     {}/h{}", usd(row.cost.gpu),
                  o.bid_usd_per_hour ? fmt::format(", a bid; {}/h on demand", usd(o.gpu_usd_per_hour)) : ""));
  lines.push_back(fmt::format("disk     {}/h{}", usd(row.cost.storage),
                              o.storage_usd_per_hour || !row.cost.storage ? "" : " (assumed)"));
  lines.push_back(
      fmt::format("traffic  {}/h: {:.4g} GB/h in at {}, {:.4g} GB/h out ({:.3g} copies) at {}", usd(row.cost.bandwidth),
                  gb_per_hour, price(o.download_usd_per_gb, request.fleet.assume.download_usd_per_gb),
                  gb_per_hour * copies, copies, price(o.upload_usd_per_gb, request.fleet.assume.upload_usd_per_gb)));
  const auto per_1k = row.usd_per_1k_rollouts();
  lines.push_back(fmt::format("in all   {}/h, {} per 1k rollouts", usd(row.cost.usd_per_hour()),
                              per_1k ? fmt::format("${:.3g}", *per_1k) : "$?"));
}

}  // namespace

json Explanation::to_json() const {
  return {{"schema_version", 1},
          {"offer", row.offer.id},
          {"chosen", row.chosen},
          {"rank", row.rank == 0 ? json(nullptr) : json(row.rank)},
          {"reason", row.reason},
          {"rented_up_to_usd_per_hour", rented_up_to_usd_per_hour ? json(*rented_up_to_usd_per_hour) : json(nullptr)},
          {"lines", lines}};
}

std::string Explanation::to_text(std::optional<std::size_t> columns) const {
  std::string text;
  for (const std::string& line : lines) text += folded(line, columns) + '\n';
  return text;
}

Result<Explanation> explain_offer(const Plan& plan, std::span<const Offer> offers, std::string_view id) {
  const auto it = std::find_if(offers.begin(), offers.end(), [&](const Offer& o) { return o.id == id; });
  const PlanRow* row = plan.row_of(id);
  if (it == offers.end() || !row) {
    std::vector<std::string> ids;
    for (const Offer& o : offers.first(std::min(offers.size(), kSuggestedIdsMax))) ids.push_back(o.id);
    return fail(Code::kNotFound, "explain", "there is no offer '{}'{}", printable(id, 60), did_you_mean(id, ids));
  }
  Explanation explanation;
  explanation.row = *row;
  const Offer& o = row->offer;
  const auto or_unknown = [](const auto& value, const std::string& text) { return value ? text : std::string("?"); };
  auto& lines = explanation.lines;
  lines.push_back(fmt::format("{} of {}: {} x{}, {} GB each, {}", o.id, o.provider, printable(o.gpu, 60), o.gpu_count,
                              or_unknown(o.vram_gb, fmt::format("{:.4g}", o.vram_gb.value_or(0))),
                              o.place.empty() ? "place not stated" : printable(o.place, 60)));
  lines.push_back(
      fmt::format("host {}, owner {}, up {}, down {}, reliability {}, for {} days", o.host.empty() ? "?" : o.host,
                  o.owner.empty() ? "?" : o.owner, o.up ? to_text(*o.up) : "?", o.down ? to_text(*o.down) : "?",
                  or_unknown(o.reliability, fmt::format("{:.4f}", o.reliability.value_or(0))),
                  or_unknown(o.duration_max,
                             fmt::format("{:.3g}", seconds(o.duration_max.value_or(Duration{})) / kSecondsPerDay))));
  lines.push_back(o.rollouts_per_s > 0
                      ? fmt::format("{:.4g} rollouts/s by {}, perhaps {:.0f} % more or less", o.rollouts_per_s,
                                    to_string(o.rollouts_source), 100 * o.uncertainty())
                      : std::string("rollouts/s not known"));
  if (!o.rollouts_from.empty()) lines.push_back("  from " + o.rollouts_from);
  add_price_lines(plan, *row, lines);
  if (const auto losses = losses_per_hour(plan.request, o))
    lines.push_back(fmt::format("lost {:.3g} times a day{}", 24 * *losses,
                                o.seen_hours > 0
                                    ? fmt::format("; ledgers have seen {:.0f} in {:.3g} h", o.seen_losses, o.seen_hours)
                                    : std::string(", by its reliability")));
  for (const std::string& key : row->assumed)
    lines.push_back(fmt::format("it states no value for fleet.assume.{}", key));
  lines.push_back(row->chosen ? fmt::format("{} (worker {}, rank {})", row->reason, *row->worker, row->rank)
                              : fmt::format("not rented: {}{}", row->reason,
                                            row->rank > 0 ? fmt::format(" (rank {})", row->rank) : std::string()));
  const std::optional<double> limit = price_limit(plan, offers, static_cast<std::size_t>(it - offers.begin()));
  explanation.rented_up_to_usd_per_hour = limit;
  if (row->chosen)
    lines.push_back(fmt::format("it is rented up to a rent of {}/h", usd(limit)));
  else if (limit)
    lines.push_back(fmt::format("it would be rented at {}/h or less", usd(limit)));
  else if (row->rank > 0)
    lines.push_back("it would not be rented at any price");
  return explanation;
}

std::vector<IdlePoint> idle_curve(const PlanRequest& base, std::span<const Offer> offers) {
  std::vector<IdlePoint> curve;
  for (const double share : {0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.6, 2.0}) {
    PlanRequest request = base;
    request.capacity_share = share;
    request.staleness_worst = nullptr;  // the curve does not show it
    // A larger fleet may cost more than the run's budgets allow.
    if (share != 1) request.fleet.usd_per_hour_max = request.fleet.usd_max = std::nullopt;
    const auto plan = make_plan(request, offers);
    if (!plan) continue;
    IdlePoint point{.share = share,
                    .workers = plan->topology.size(),
                    .rollouts_per_s = plan->rollouts_per_s,
                    .usd_per_hour = plan->usd_per_hour.expected,
                    .idle_fraction = plan->idle_fraction,
                    .usd_run = plan->usd_run_with_waiting()};
    // Several shares can lead to the same fleet. One point of it is kept: the plan's own (share 1), or else the first.
    const bool repeats = !curve.empty() && curve.back().rollouts_per_s == point.rollouts_per_s;
    const bool is_own_plan = share == 1;
    if (repeats && !is_own_plan) continue;
    if (repeats) curve.pop_back();
    curve.push_back(point);
  }
  std::stable_sort(curve.begin(), curve.end(),
                   [](const IdlePoint& a, const IdlePoint& b) { return a.usd_per_hour < b.usd_per_hour; });
  return curve;
}

json idle_curve_json(const std::vector<IdlePoint>& curve) {
  const auto or_null = [](const std::optional<double>& value) { return value ? json(*value) : json(nullptr); };
  json points = json::array();
  for (const IdlePoint& point : curve)
    points.push_back({{"capacity_share", point.share},
                      {"workers", point.workers},
                      {"rollouts_per_s", point.rollouts_per_s},
                      {"usd_per_hour", point.usd_per_hour},
                      {"idle_fraction", or_null(point.idle_fraction)},
                      {"run_usd", or_null(point.usd_run)}});
  return points;
}

std::string idle_curve_table(const std::vector<IdlePoint>& curve, std::optional<std::size_t> columns) {
  Table table({{.title = "capacity", .right_aligned = true},
               {.title = "workers", .right_aligned = true, .drop_rank = 2},
               {.title = "roll/s", .right_aligned = true, .drop_rank = 1},
               {.title = "$/h", .right_aligned = true},
               {.title = "idle", .right_aligned = true},
               {.title = "run, $", .right_aligned = true},
               {.title = ""}});
  for (const IdlePoint& point : curve)
    table.add_row({fmt::format("{:.0f} %", 100 * point.share), fmt::format("{}", point.workers),
                   fmt::format("{:.4g}", point.rollouts_per_s), fmt::format("{:.4f}", point.usd_per_hour),
                   point.idle_fraction ? fmt::format("{:.1f} %", 100 * *point.idle_fraction) : "?",
                   point.usd_run ? fmt::format("{:.2f}", *point.usd_run) : "?", point.share == 1 ? "the plan" : ""});
  return table.to_text(table_width(columns));
}

std::vector<Variation> vary_plan(const PlanRequest& base, std::span<const Offer> offers) {
  std::vector<Variation> variations;
  const auto add = [&](std::string change, const PlanRequest& request, std::span<const Offer> pool) {
    Variation variation{.change = std::move(change), .plan = {}, .why_not = ""};
    PlanRequest varied = request;
    varied.staleness_worst = nullptr;  // because the rule is that of the run's own S and kappa
    if (auto plan = make_plan(varied, pool))
      variation.plan = std::move(*plan);
    else
      variation.why_not = plan.error().detail;
    variations.push_back(std::move(variation));
  };
  const auto vary = [&](std::string change, auto edit) {
    PlanRequest request = base;
    edit(request);
    add(std::move(change), request, offers);
  };
  const int s = base.staleness_budget, kappa = base.pace.publish_every;
  add("as it is", base, offers);
  // A lookahead that equals S changes with S.
  const auto set_budget = [&](PlanRequest& r, int budget) {
    r.lookahead = r.lookahead == r.staleness_budget ? budget : std::min(r.lookahead, budget);
    r.staleness_budget = budget;
  };
  const int s_min = kappa - 1;  // check_staleness_budget()
  if (s > s_min) vary(fmt::format("S {}", s - 1), [&](auto& r) { set_budget(r, s - 1); });
  vary(fmt::format("S {}", s + 1), [&](auto& r) { set_budget(r, s + 1); });
  for (const int lookahead : std::set<int>{0, 1, 2, s})
    if (lookahead <= s && lookahead != base.lookahead)
      vary(fmt::format("lookahead {}", lookahead), [&](auto& r) { r.lookahead = lookahead; });
  for (const int other_kappa : std::set<int>{kappa / 2, kappa + 1, 2 * kappa, 4 * kappa}) {
    if (other_kappa <= 0 || other_kappa == kappa) continue;
    const int other_s = std::max(s, other_kappa + 1);  // leaves two steps to broadcast and generate
    vary(fmt::format("kappa {}, S {}", other_kappa, other_s), [&](auto& r) {
      r.pace.publish_every = other_kappa;
      set_budget(r, other_s);
    });
  }
  for (const double factor : {0.5, 2.0, 4.0})
    vary(fmt::format("uplink {}", to_text(BitRate{base.learner_up.bits_per_s * factor})),
         [&](auto& r) { r.learner_up.bits_per_s *= factor; });
  vary("headroom 0", [&](auto& r) { r.fleet.headroom = 0; });
  constexpr std::size_t kWorkersMax = 4096;  // the highest fleet.workers_max
  vary(fmt::format("workers_max {}", 2 * base.fleet.workers_max),
       [&](auto& r) { r.fleet.workers_max = std::min<std::size_t>(2 * base.fleet.workers_max, kWorkersMax); });
  if (base.fleet.pricing == Pricing::kOnDemand &&
      std::any_of(offers.begin(), offers.end(), [](const Offer& o) { return o.bid_usd_per_hour_min.has_value(); }))
    vary("bids", [&](auto& r) { r.fleet.pricing = Pricing::kBid; });
  if (base.fleet.usd_per_hour_max || base.fleet.usd_max)
    vary("no budget", [&](auto& r) {
      r.fleet.usd_per_hour_max.reset();
      r.fleet.usd_max.reset();
    });
  std::vector<Offer> changed_offers(offers.begin(), offers.end());
  constexpr double kLowerRents = 0.75;
  for (Offer& o : changed_offers) {
    if (o.gpu_usd_per_hour) *o.gpu_usd_per_hour *= kLowerRents;
    if (o.bid_usd_per_hour_min) *o.bid_usd_per_hour_min *= kLowerRents;
  }
  add("rents 25 % lower", base, changed_offers);
  changed_offers.assign(offers.begin(), offers.end());
  for (Offer& o : changed_offers) o.upload_usd_per_gb = o.download_usd_per_gb = 0;
  add("traffic for nothing", base, changed_offers);
  return variations;
}

json variations_json(const std::vector<Variation>& variations) {
  json rows = json::array();
  for (const Variation& v : variations) {
    const auto if_feasible = [&](auto get) { return v.plan ? json(get(*v.plan)) : json(nullptr); };
    rows.push_back(
        {{"change", v.change},
         {"feasible", v.plan.has_value()},
         {"why_not", v.plan ? json(nullptr) : json(v.why_not)},
         {"t_b_seconds", if_feasible([](const Plan& p) { return seconds(p.broadcast_time); })},
         {"target_rollouts_per_s", if_feasible([](const Plan& p) { return p.target.provisioned_rollouts_per_s; })},
         {"workers", if_feasible([](const Plan& p) { return p.topology.size(); })},
         {"usd_per_hour", if_feasible([](const Plan& p) { return p.usd_per_hour.expected; })},
         {"idle_fraction",
          if_feasible([](const Plan& p) { return p.idle_fraction ? json(*p.idle_fraction) : json(nullptr); })}});
  }
  return rows;
}

std::string variations_table(const std::vector<Variation>& variations, std::optional<std::size_t> columns) {
  Table table({{.title = "with"},
               {.title = "T_b", .right_aligned = true, .drop_rank = 2},
               {.title = "target/s", .right_aligned = true, .drop_rank = 3},
               {.title = "workers", .right_aligned = true, .drop_rank = 1},
               {.title = "$/h", .right_aligned = true},
               {.title = "change", .right_aligned = true},
               {.title = "idle", .right_aligned = true}});
  constexpr std::size_t kReasonMin = 20, kEllipsis = 3;  // characters; printable() ends a shortened text in "..."
  const std::size_t width = table_width(columns);
  std::string infeasible_lines;
  const bool has_base = !variations.empty() && variations.front().plan;  // the plan as requested
  const double base_usd = has_base ? variations.front().plan->usd_per_hour.expected : 0;
  for (const Variation& v : variations) {
    if (!v.plan) {
      const std::string prefix = v.change + ": no plan: ";
      const std::size_t taken = std::min(width, prefix.size() + kEllipsis);
      infeasible_lines += prefix + printable(v.why_not, std::max(kReasonMin, width - taken)) + '\n';
      continue;
    }
    const double varied_usd = v.plan->usd_per_hour.expected;
    const std::string change = base_usd > 0 ? fmt::format("{:+.1f} %", 100 * (varied_usd / base_usd - 1)) : "";
    table.add_row({v.change, to_text(v.plan->broadcast_time),
                   fmt::format("{:.4g}", v.plan->target.provisioned_rollouts_per_s),
                   fmt::format("{}", v.plan->topology.size()), fmt::format("{:.4f}", varied_usd), change,
                   v.plan->idle_fraction ? fmt::format("{:.1f} %", 100 * *v.plan->idle_fraction) : "?"});
  }
  return table.to_text(width) + infeasible_lines;
}

}  // namespace echoline::provisioner
