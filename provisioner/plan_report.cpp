// A plan as text (Plan::to_table).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "chains/fleet_graph.hpp"
#include "provisioner/plan_words.hpp"
#include "provisioner/text_table.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kOthersShown = 40;  // offers in the table that are not rented

// At most `width` printable ASCII characters; a cut text ends in '~'.
std::string cut(std::string_view text, std::size_t width) {
  std::string out;
  for (const char c : text) out += c >= ' ' && c <= '~' ? c : '?';
  if (out.size() > width) out = out.substr(0, width - 1) + '~';
  return out.empty() ? "-" : out;
}

std::string money(const std::optional<double>& usd) { return usd ? fmt::format("{:.4f}", *usd) : "?"; }

// Rollouts cost small fractions of a cent, so significant digits instead of decimals.
std::string per_1k(const PlanRow& row) {
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
std::string range(const Spend& spend, int decimals) {
  const auto usd = [&](double x) {
    const double smallest_amount = std::pow(10.0, -decimals);
    return x > 0 && x < smallest_amount / 2 ? fmt::format("under ${:.{}f}", smallest_amount, decimals)
                                            : fmt::format("${:.{}f}", x, decimals);
  };
  if (spend.high - spend.low < std::pow(10.0, -decimals) / 2) return usd(spend.expected);
  return fmt::format("{} ({} to {})", usd(spend.expected), usd(spend.low), usd(spend.high));
}

std::string age_text(double s) {
  if (s < 120) return fmt::format("{:.0f} s", std::max(0.0, s));
  if (s < 7200) return fmt::format("{:.0f} min", s / 60);
  return s < 172800 ? fmt::format("{:.0f} h", s / 3600) : fmt::format("{:.0f} days", s / 86400);
}

// The rented machines' properties.
std::string machines_table(const Plan& plan, std::size_t columns) {
  Table table({{"wkr", true},
               {"offer", false},
               {"from", false, 5},
               {"host", false, 4},
               {"GPU", false},
               {"GB", true, 2},
               {"place", false, 3},
               {"Mbit d/u", true, 1},
               {"up", true, 6},
               {"days", true, 7}});
  for (const PlanRow* row : plan.chosen()) {
    const Offer& o = row->offer;
    std::optional<double> days;
    if (o.duration_max) days = seconds(*o.duration_max) / 86400;
    table.add({fmt::format("{}", *row->worker), cut(o.id, 10), cut(o.provider, 5), cut(o.host, 8), gpu_text(o),
               number_text(o.vram_gb, "{:.0f}"), cut(o.place, 6), links_text(o), number_text(o.reliability, "{:.3f}"),
               number_text(days, "{:.3g}")});
  }
  return table.text(columns);
}

// The rented machines' throughput and prices.
std::string prices_table(const Plan& plan, std::size_t columns) {
  Table table({{"wkr", true},
               {"offer", false},
               {"rank", true, 4},
               {"roll/s", true},
               {"by", false, 1},
               {"+-", true, 2},
               {"gpu $/h", true},
               {"disk", true, 3},
               {"traffic", true, 1},
               {"$/1k", true, 2},
               {"sum/s", true, 5}});
  for (const PlanRow* row : plan.chosen()) {
    const Offer& o = row->offer;
    table.add({fmt::format("{}", *row->worker), cut(o.id, 10), fmt::format("{}", row->rank), rate_text(o),
               std::string(to_string(o.rollouts_source).substr(0, 4)), fmt::format("{:.0f}%", 100 * o.uncertainty()),
               money(row->cost.gpu), money(row->cost.storage), money(row->cost.bandwidth), per_1k(*row),
               fmt::format("{:.1f}", row->cumulative_rollouts_per_s)});
  }
  return table.text(columns);
}

std::string others_table(const Plan& plan, std::size_t columns) {
  Table table({{"rank", true}, {"offer"}, {"roll/s", true, 2}, {"$/h", true}, {"$/1k", true, 1}, {"why not"}});
  std::size_t shown = 0, hidden = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.chosen) continue;
    if (++shown > kOthersShown) {
      ++hidden;
      continue;
    }
    table.add({row.rank == 0 ? "-" : fmt::format("{}", row.rank), cut(row.offer.id, 10), rate_text(row.offer),
               money(row.cost.usd_per_hour()), per_1k(row), cut(row.reason, std::max<std::size_t>(20, columns - 38))});
  }
  return table.text(columns) + (hidden > 0 ? fmt::format("and {} more: --explain OFFER says more\n", hidden) : "");
}

}  // namespace

std::string Plan::to_table(std::optional<double> now_unix_s, std::optional<std::size_t> columns) const {
  const std::size_t width = std::clamp<std::size_t>(columns.value_or(80), 40, 80);
  const auto percent_above = [&](double base) { return base > 0 ? 100 * (chosen_usd_per_hour / base - 1) : 0; };
  std::string out;
  const auto line = [&](const std::string& text) { out += folded(text, columns) + '\n'; };
  line(fmt::format("R {:.6g} rollouts/step   kappa {}   S {}   T {}", request.pace.rollouts_per_step,
                   request.pace.publish_every, request.staleness_budget, echoline::to_text(request.pace.step_time)));
  line(fmt::format("T_b {} ({}lower bound {}, last worker {})", echoline::to_text(broadcast_time),
                   request.fleet.install_time_expected > Duration{}
                       ? fmt::format("{} of it to install; ", echoline::to_text(request.fleet.install_time_expected))
                       : "",
                   echoline::to_text(broadcast_lower_bound), echoline::to_text(broadcast_time_last)));
  line(fmt::format("rollouts/s: {:.4g} required, {:.4g} with {:.3g} % headroom", target.required_rollouts_per_s,
                   target.provisioned_rollouts_per_s, 100 * request.fleet.headroom));
  if (!market.source.empty())
    line(fmt::format("offers: {} ({}){}", cut(market.source, 50), market.format,
                     now_unix_s && market.recorded_unix_s
                         ? fmt::format(", {} old", age_text(*now_unix_s - *market.recorded_unix_s))
                         : ""));
  const Spend rate = rollouts_range();
  line(fmt::format("rented: {:.4g} rollouts/s ({:.4g} to {:.4g}) from {} of {} offers{}", rate.expected, rate.low,
                   rate.high, topology.size(), rows.size() + rows_left_out,
                   request.fleet.pricing == Pricing::kBid ? ", by bids" : ""));
  line(fmt::format("fleet: {} per hour", range(usd_per_hour, 4)));
  line(fmt::format("       {} once to join, ${:.3g} per 1k rollouts", range({usd_joining, usd_joining, usd_joining}, 4),
                   1000 * usd_per_hour.expected / (3600 * rollouts_per_s)));
  if (replacing.usd.high >= 0.005)
    line(fmt::format("       {:.2g} machines lost and replaced: {}", replacing.losses, range(replacing.usd, 4)));
  line(fmt::format("learner: {} per hour",
                   request.learner_usd_per_hour ? fmt::format("${:.4f}", *request.learner_usd_per_hour) : "$?"));
  if (const auto spend = usd_run())
    line(fmt::format("run: {}, {}{}", echoline::to_text(*request.run_time), range(*spend, 2),
                     request.learner_usd_per_hour ? "" : " and the learner"));
  line(fmt::format(
      "search: {}, {:.1f} % above the fractional bound{}", method, percent_above(lp_bound_usd_per_hour),
      exact_usd_per_hour ? fmt::format(", {:.1f} % above the optimum", percent_above(*exact_usd_per_hour)) : ""));
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
