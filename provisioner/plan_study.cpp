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

constexpr int kPriceSteps = 14;        // of a bisection
constexpr double kPriceTimesMax = 16;  // an offer still rented at this multiple of its price is rented at any price
constexpr std::size_t kSuggestMax = 5000;

std::string usd(const std::optional<double>& x) { return x ? fmt::format("${:.4f}", *x) : std::string("?"); }

// Whether the plan rents the offer at another rent.
bool rented_at(const PlanRequest& request, std::vector<Offer>& offers, std::size_t index, double usd_per_hour) {
  Offer& o = offers[index];
  const auto on_demand = o.gpu_usd_per_hour, bid = o.bid_usd_per_hour_min;
  if (request.fleet.pricing == Pricing::kBid)
    o.bid_usd_per_hour_min = usd_per_hour / (1 + request.fleet.bid_over_min);
  else
    o.gpu_usd_per_hour = usd_per_hour;
  const auto plan = make_plan(request, offers);
  o.gpu_usd_per_hour = on_demand;
  o.bid_usd_per_hour_min = bid;
  if (!plan) return false;
  const PlanRow* row = plan->row_of(o.id);
  return row && row->chosen;
}

std::optional<double> price_limit(const Plan& plan, std::span<const Offer> offers, std::size_t index) {
  const PlanRow& row = *plan.row_of(offers[index].id);
  if (row.rank == 0 || !row.cost.gpu) return std::nullopt;
  std::vector<Offer> pool(offers.begin(), offers.end());
  double low = row.chosen ? *row.cost.gpu : 0;
  double high = row.chosen ? std::max(0.01, *row.cost.gpu) * kPriceTimesMax : *row.cost.gpu;
  if (!row.chosen && !rented_at(plan.request, pool, index, 0)) return std::nullopt;
  if (row.chosen && rented_at(plan.request, pool, index, high)) return high;
  for (int i = 0; i < kPriceSteps; ++i) {
    const double middle = (low + high) / 2;
    (rented_at(plan.request, pool, index, middle) ? low : high) = middle;
  }
  return low;
}

void price_lines(const Plan& plan, const PlanRow& row, std::vector<std::string>& lines) {
  const PlanRequest& q = plan.request;
  const Offer& o = row.offer;
  const double per_hour = 3600 / (q.pace.publish_every * seconds(q.pace.step_time));
  const double gb = static_cast<double>(q.delta_bytes.count) / 1e9 * per_hour;
  const double copies = row.worker ? plan.topology.copies_sent_by(*row.worker) : 1;
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
  lines.push_back(fmt::format("traffic  {}/h: {:.4g} GB/h in at {}, {:.4g} GB/h out ({:.3g} copies) at {}",
                              usd(row.cost.bandwidth), gb,
                              price(o.download_usd_per_gb, q.fleet.assume.download_usd_per_gb), gb * copies, copies,
                              price(o.upload_usd_per_gb, q.fleet.assume.upload_usd_per_gb)));
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
    for (const Offer& o : offers.first(std::min(offers.size(), kSuggestMax))) ids.push_back(o.id);
    return fail(Code::kNotFound, "explain", "there is no offer '{}'{}", printable(id, 60), did_you_mean(id, ids));
  }
  Explanation e;
  e.row = *row;
  const Offer& o = row->offer;
  const auto or_unknown = [](const auto& value, const std::string& text) { return value ? text : std::string("?"); };
  auto& lines = e.lines;
  lines.push_back(fmt::format("{} of {}: {} x{}, {} GB each, {}", o.id, o.provider, printable(o.gpu, 60), o.gpu_count,
                              or_unknown(o.vram_gb, fmt::format("{:.4g}", o.vram_gb.value_or(0))),
                              o.place.empty() ? "place not stated" : printable(o.place, 60)));
  lines.push_back(fmt::format(
      "host {}, owner {}, up {}, down {}, reliability {}, for {} days", o.host.empty() ? "?" : o.host,
      o.owner.empty() ? "?" : o.owner, o.up ? to_text(*o.up) : "?", o.down ? to_text(*o.down) : "?",
      or_unknown(o.reliability, fmt::format("{:.4f}", o.reliability.value_or(0))),
      or_unknown(o.duration_max, fmt::format("{:.3g}", seconds(o.duration_max.value_or(Duration{})) / 86400))));
  lines.push_back(o.rollouts_per_s > 0
                      ? fmt::format("{:.4g} rollouts/s by {}, perhaps {:.0f} % more or less", o.rollouts_per_s,
                                    to_string(o.rollouts_source), 100 * o.uncertainty())
                      : std::string("rollouts/s not known"));
  if (!o.rollouts_from.empty()) lines.push_back("  from " + o.rollouts_from);
  price_lines(plan, *row, lines);
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
  e.rented_up_to_usd_per_hour = price_limit(plan, offers, static_cast<std::size_t>(it - offers.begin()));
  if (row->chosen)
    lines.push_back(fmt::format("it is rented up to a rent of {}/h", usd(e.rented_up_to_usd_per_hour)));
  else if (e.rented_up_to_usd_per_hour)
    lines.push_back(fmt::format("it would be rented at {}/h or less", usd(e.rented_up_to_usd_per_hour)));
  else if (row->rank > 0)
    lines.push_back("it would not be rented at any price");
  return e;
}

std::vector<Variation> vary_plan(const PlanRequest& base, std::span<const Offer> offers) {
  std::vector<Variation> out;
  const auto add = [&](std::string change, const PlanRequest& request, std::span<const Offer> pool) {
    Variation v{std::move(change), {}, ""};
    PlanRequest varied = request;
    varied.staleness_worst = nullptr;  // it depends on the run's S and kappa
    if (auto plan = make_plan(varied, pool))
      v.plan = std::move(*plan);
    else
      v.why_not = plan.error().detail;
    out.push_back(std::move(v));
  };
  const auto vary = [&](std::string change, auto edit) {
    PlanRequest request = base;
    edit(request);
    add(std::move(change), request, offers);
  };
  const int s = base.staleness_budget, kappa = base.pace.publish_every;
  add("as it is", base, offers);
  if (s > kappa - 1) vary(fmt::format("S {}", s - 1), [&](auto& r) { r.staleness_budget = s - 1; });
  vary(fmt::format("S {}", s + 1), [&](auto& r) { r.staleness_budget = s + 1; });
  for (const int k : std::set<int>{kappa / 2, kappa + 1, 2 * kappa, 4 * kappa})
    if (k > 0 && k != kappa)
      vary(fmt::format("kappa {}, S {}", k, std::max(s, k + 1)), [&](auto& r) {
        r.pace.publish_every = k;
        r.staleness_budget = std::max(s, k + 1);
      });
  for (const double factor : {0.5, 2.0, 4.0})
    vary(fmt::format("uplink {}", to_text(BitRate{base.learner_up.bits_per_s * factor})),
         [&](auto& r) { r.learner_up.bits_per_s *= factor; });
  vary("headroom 0", [&](auto& r) { r.fleet.headroom = 0; });
  vary(fmt::format("workers_max {}", 2 * base.fleet.workers_max),
       [&](auto& r) { r.fleet.workers_max = std::min<std::size_t>(2 * base.fleet.workers_max, 4096); });
  if (base.fleet.pricing == Pricing::kOnDemand &&
      std::any_of(offers.begin(), offers.end(), [](const Offer& o) { return o.bid_usd_per_hour_min.has_value(); }))
    vary("bids", [&](auto& r) { r.fleet.pricing = Pricing::kBid; });
  if (base.fleet.usd_per_hour_max || base.fleet.usd_max)
    vary("no budget", [&](auto& r) {
      r.fleet.usd_per_hour_max.reset();
      r.fleet.usd_max.reset();
    });
  std::vector<Offer> changed_offers(offers.begin(), offers.end());
  for (Offer& o : changed_offers) {
    if (o.gpu_usd_per_hour) *o.gpu_usd_per_hour *= 0.75;
    if (o.bid_usd_per_hour_min) *o.bid_usd_per_hour_min *= 0.75;
  }
  add("rents 25 % lower", base, changed_offers);
  changed_offers.assign(offers.begin(), offers.end());
  for (Offer& o : changed_offers) o.upload_usd_per_gb = o.download_usd_per_gb = 0;
  add("traffic for nothing", base, changed_offers);
  return out;
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
         {"usd_per_hour", if_feasible([](const Plan& p) { return p.usd_per_hour.expected; })}});
  }
  return rows;
}

std::string variations_table(const std::vector<Variation>& variations, std::optional<std::size_t> columns) {
  Table table(
      {{"with"}, {"T_b", true, 2}, {"target/s", true, 3}, {"workers", true, 1}, {"$/h", true}, {"change", true}});
  const std::size_t width = std::clamp<std::size_t>(columns.value_or(80), 40, 80);
  std::string infeasible_lines;
  const std::optional<Plan>* base = variations.empty() ? nullptr : &variations.front().plan;
  for (const Variation& v : variations) {
    if (!v.plan) {
      const std::string prefix = v.change + ": no plan: ";
      infeasible_lines +=
          prefix + printable(v.why_not, std::max<std::size_t>(20, width - std::min(width, prefix.size() + 3))) + '\n';
      continue;
    }
    const double usd_now = v.plan->usd_per_hour.expected;
    const std::string change = base && *base && (*base)->usd_per_hour.expected > 0
                                   ? fmt::format("{:+.1f} %", 100 * (usd_now / (*base)->usd_per_hour.expected - 1))
                                   : "";
    table.add({v.change, to_text(v.plan->broadcast_time),
               fmt::format("{:.4g}", v.plan->target.provisioned_rollouts_per_s),
               fmt::format("{}", v.plan->topology.size()), fmt::format("{:.4f}", usd_now), change});
  }
  return table.text(width) + infeasible_lines;
}

}  // namespace echoline::provisioner
