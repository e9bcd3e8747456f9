// A plan as text (Plan::to_table).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "chains/fleet_graph.hpp"
#include "provisioner/plan_words.hpp"
#include "provisioner/text_table.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kOthersShown = 40;               // offers in the table that are not rented
constexpr std::size_t kWidthMin = 40, kWidthMax = 80;  // of tables, in characters

// Returns at most `width` printable ASCII characters of the text. A shortened text ends in '~'. "-" for an empty text.
std::string cut(std::string_view text, std::size_t width) {
  std::string out;
  for (const char c : text) out += c >= ' ' && c <= '~' ? c : '?';
  if (out.size() > width) out = out.substr(0, width - 1) + '~';
  return out.empty() ? "-" : out;
}

std::string usd_text(const std::optional<double>& usd) { return usd ? fmt::format("{:.4f}", *usd) : "?"; }

// With significant digits instead of decimals, because rollouts cost small fractions of a cent.
std::string per_1k_text(const PlanRow& row) {
  const auto usd = row.usd_per_1k_rollouts();
  return usd ? fmt::format("{:.3g}", *usd) : "?";
}

std::string rate_text(const Offer& o) { return o.rollouts_per_s > 0 ? fmt::format("{:.2f}", o.rollouts_per_s) : "?"; }

std::string gpu_text(const Offer& o) { return fmt::format("{} x{}", cut(o.gpu, 12), o.gpu_count); }

std::string links_text(const Offer& o) {
  const auto text = [](const std::optional<BitRate>& rate) {
    return rate ? fmt::format("{:.0f}", rate->mbit_per_s()) : "?";
  };
  return fmt::format("{}/{}", text(o.down), text(o.up));
}

std::string number_text(const std::optional<double>& value, const char* spec) {
  return value ? fmt::format(fmt::runtime(spec), *value) : "?";
}

// "$0.5100 ($0.4080 to $0.6800)"
std::string usd_range_text(const Estimate& estimate, int decimals) {
  const double smallest_amount = std::pow(10.0, -decimals);
  const auto text = [&](double amount) {
    const bool rounds_to_zero = amount > 0 && amount < smallest_amount / 2;
    return rounds_to_zero ? fmt::format("under ${:.{}f}", smallest_amount, decimals)
                          : fmt::format("${:.{}f}", amount, decimals);
  };
  if (estimate.high - estimate.low < smallest_amount / 2) return text(estimate.expected);
  return fmt::format("{} ({} to {})", text(estimate.expected), text(estimate.low), text(estimate.high));
}

// The age in the largest unit that gives a number of at least 2.
std::string age_text(double age_s) {
  constexpr double kMinute = 60, kHour = 3600;
  if (age_s < 2 * kMinute) return fmt::format("{:.0f} s", std::max(0.0, age_s));
  if (age_s < 2 * kHour) return fmt::format("{:.0f} min", age_s / kMinute);
  return age_s < 2 * kSecondsPerDay ? fmt::format("{:.0f} h", age_s / kHour)
                                    : fmt::format("{:.0f} days", age_s / kSecondsPerDay);
}

// The rented machines' properties.
std::string machines_table(const Plan& plan, std::size_t columns) {
  Table table({{.title = "wkr", .right_aligned = true},
               {.title = "offer"},
               {.title = "from", .drop_rank = 5},
               {.title = "host", .drop_rank = 4},
               {.title = "GPU"},
               {.title = "GB", .right_aligned = true, .drop_rank = 2},
               {.title = "place", .drop_rank = 3},
               {.title = "Mbit d/u", .right_aligned = true, .drop_rank = 1},
               {.title = "up", .right_aligned = true, .drop_rank = 6},
               {.title = "days", .right_aligned = true, .drop_rank = 7}});
  for (const PlanRow* row : plan.chosen()) {
    const Offer& o = row->offer;
    std::optional<double> days;
    if (o.duration_max) days = seconds(*o.duration_max) / kSecondsPerDay;
    table.add_row({fmt::format("{}", *row->worker), cut(o.id, 10), cut(o.provider, 5), cut(o.host, 8), gpu_text(o),
                   number_text(o.vram_gb, "{:.0f}"), cut(o.place, 6), links_text(o),
                   number_text(o.reliability, "{:.3f}"), number_text(days, "{:.3g}")});
  }
  return table.to_text(columns);
}

// The rented machines' throughput and prices.
std::string prices_table(const Plan& plan, std::size_t columns) {
  Table table({{.title = "wkr", .right_aligned = true},
               {.title = "offer"},
               {.title = "rank", .right_aligned = true, .drop_rank = 4},
               {.title = "roll/s", .right_aligned = true},
               {.title = "by", .drop_rank = 1},
               {.title = "+-", .right_aligned = true, .drop_rank = 2},
               {.title = "gpu $/h", .right_aligned = true},
               {.title = "disk", .right_aligned = true, .drop_rank = 3},
               {.title = "traffic", .right_aligned = true, .drop_rank = 1},
               {.title = "$/1k", .right_aligned = true, .drop_rank = 2},
               {.title = "sum/s", .right_aligned = true, .drop_rank = 5}});
  for (const PlanRow* row : plan.chosen()) {
    const Offer& o = row->offer;
    table.add_row({fmt::format("{}", *row->worker), cut(o.id, 10), fmt::format("{}", row->rank), rate_text(o),
                   std::string(to_string(o.rollouts_source).substr(0, 4)),  // the name's first letters suffice
                   fmt::format("{:.0f}%", 100 * o.uncertainty()), usd_text(row->cost.gpu), usd_text(row->cost.storage),
                   usd_text(row->cost.bandwidth), per_1k_text(*row),
                   fmt::format("{:.1f}", row->cumulative_rollouts_per_s)});
  }
  return table.to_text(columns);
}

// The offers that are not chosen, with the reasons.
std::string others_table(const Plan& plan, std::size_t columns) {
  Table table({{.title = "rank", .right_aligned = true},
               {.title = "offer"},
               {.title = "roll/s", .right_aligned = true, .drop_rank = 2},
               {.title = "$/h", .right_aligned = true},
               {.title = "$/1k", .right_aligned = true, .drop_rank = 1},
               {.title = "why not"}});
  constexpr std::size_t kReasonMin = 20, kOtherColumnsMax = 38;  // characters
  const std::size_t reason_max = std::max(kReasonMin, columns - kOtherColumnsMax);
  std::size_t other_count = 0;  // offers that are not chosen, shown or not
  for (const PlanRow& row : plan.rows) {
    if (row.chosen || ++other_count > kOthersShown) continue;
    table.add_row({row.rank == 0 ? "-" : fmt::format("{}", row.rank), cut(row.offer.id, 10), rate_text(row.offer),
                   usd_text(row.cost.usd_per_hour()), per_1k_text(row), cut(row.reason, reason_max)});
  }
  if (other_count <= kOthersShown) return table.to_text(columns);
  return table.to_text(columns) + fmt::format("and {} more: --explain OFFER says more\n", other_count - kOthersShown);
}

}  // namespace

std::string Plan::to_table(std::optional<double> now_unix_s, std::optional<std::size_t> columns) const {
  // Tables use `width`; other text is folded at `columns`.
  const std::size_t width = std::clamp(columns.value_or(kWidthMax), kWidthMin, kWidthMax);
  const auto percent_above = [&](double bound) { return bound > 0 ? 100 * (chosen_usd_per_hour / bound - 1) : 0; };
  std::string out;
  const auto line = [&](const std::string& text) { out += folded(text, columns) + '\n'; };
  line(fmt::format("R {:.6g} rollouts/step   kappa {}   S {}   T {}", request.pace.rollouts_per_step,
                   request.pace.publish_every, request.staleness_budget, echoline::to_text(request.pace.step_time)));
  line(fmt::format("T_b {} ({}lower bound {}, last worker {})", echoline::to_text(broadcast_time),
                   request.fleet.install_time_expected > Duration{}
                       ? fmt::format("{} of it to install; ", echoline::to_text(request.fleet.install_time_expected))
                       : "",
                   echoline::to_text(broadcast_lower_bound), echoline::to_text(broadcast_time_last)));
  line(fmt::format("rollouts/s: {:.4g} required ({}), {:.4g} with {:.3g} % headroom", target.required_rollouts_per_s,
                   to_string(request.fleet.capacity_rule), target.provisioned_rollouts_per_s,
                   100 * request.fleet.headroom));
  if (!market.source.empty())
    line(fmt::format("offers: {} ({}){}", cut(market.source, 50), market.format,
                     now_unix_s && market.recorded_unix_s
                         ? fmt::format(", {} old", age_text(*now_unix_s - *market.recorded_unix_s))
                         : ""));
  const Estimate rate = rollouts_per_s_estimate();
  line(fmt::format("rented: {:.4g} rollouts/s ({:.4g} to {:.4g}) from {} of {} offers{}", rate.expected, rate.low,
                   rate.high, topology.size(), rows.size() + rows_left_out,
                   request.fleet.pricing == Pricing::kBid ? ", by bids" : ""));
  line(fmt::format("fleet: {} per hour", usd_range_text(usd_per_hour, /*decimals=*/4)));
  line(fmt::format("       {} once to join, ${:.3g} per 1k rollouts",
                   usd_range_text({.low = usd_joining, .expected = usd_joining, .high = usd_joining}, /*decimals=*/4),
                   1000 * usd_per_hour.expected / (3600 * rollouts_per_s)));
  constexpr double kHalfCent = 0.005;  // smaller costs are not worth a line
  if (replacing.usd.high >= kHalfCent)
    line(fmt::format("       {:.2g} machines lost and replaced: {}", replacing.losses,
                     usd_range_text(replacing.usd, /*decimals=*/4)));
  line(fmt::format("learner: {} per hour",
                   request.learner_usd_per_hour ? fmt::format("${:.4f}", *request.learner_usd_per_hour) : "$?"));
  if (idle_fraction) line(fmt::format("learner: waits {:.1f} % of its time for rollouts (idle)", 100 * *idle_fraction));
  if (const auto usd = usd_run())
    line(fmt::format("run: {}, {}{}", echoline::to_text(*request.run_time), usd_range_text(*usd, /*decimals=*/2),
                     request.learner_usd_per_hour ? "" : " and the learner"));
  line(fmt::format("search: {}", method == "exact"
                                     ? "no set of these offers is cheaper within the limits"
                                     : fmt::format("at most {:.2f} % above the cheapest set within the limits",
                                                   percent_above(lp_bound_usd_per_hour))));
  line(fmt::format("staleness: at worst {} steps; {} bounds it (S {}, lookahead {})", staleness_worst,
                   staleness_bound_by(*this) == "budget" ? "S" : "the lookahead", request.staleness_budget,
                   request.lookahead));
  line(fmt::format("topology ({}{}): {}", request.topology == chains::TopologyPolicy::kAuto ? "auto: " : "",
                   chains::to_string(topology.policy), topology.to_short_text()));
  for (const std::string& note : notes) line("note: " + note);
  line("");
  out += machines_table(*this, width);
  line("");
  out += prices_table(*this, width);
  if (rows.size() > topology.size()) {
    line("");
    line("not rented");
    out += others_table(*this, width);
  }
  return out;
}

std::string Plan::to_dot() const {
  std::map<WorkerId, std::string> offers;
  for (const PlanRow* row : chosen()) offers[*row->worker] = row->offer.id;
  return chains::to_dot(topology, [&](WorkerId id) { return offers[id]; });
}

}  // namespace echoline::provisioner
