// A plan as JSON and as text.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;

constexpr std::size_t kOthersShown = 40;  // of the offers that are not rented, in the table

template <class T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}

json row_json(const PlanRow& row) {
  const Offer& o = row.offer;
  std::optional<double> days;
  if (o.duration_max) days = seconds(*o.duration_max) / 86400;
  return {{"rank", row.rank == 0 ? json(nullptr) : json(row.rank)},
          {"chosen", row.chosen},
          {"reason", row.reason},
          {"worker", row.worker ? json(row.worker->value) : json(nullptr)},
          {"offer", o.id},
          {"provider", o.provider},
          {"host", o.host},
          {"gpu", o.gpu},
          {"gpu_count", o.gpu_count},
          {"vram_gb", or_null(o.vram_gb)},
          {"place", o.place},
          {"up_mbit_per_s", o.up.mbit_per_s()},
          {"down_mbit_per_s", o.down.mbit_per_s()},
          {"reliability", or_null(o.reliability)},
          {"duration_days_max", or_null(days)},
          {"rollouts_per_s", o.rollouts_per_s},
          {"rollouts_source", to_string(o.rollouts_source)},
          {"gpu_usd_per_hour", row.cost.gpu},
          {"storage_usd_per_hour", or_null(row.cost.storage)},
          {"bandwidth_usd_per_hour", or_null(row.cost.bandwidth)},
          {"usd_per_hour_low", row.cost.usd_per_hour_low},
          {"usd_per_hour_high", or_null(row.cost.usd_per_hour_high)},
          {"usd_per_1k_rollouts", row.cost.usd_per_hour_high ? json(row.cost.usd_per_1k_rollouts) : json(nullptr)},
          {"cumulative_rollouts_per_s", row.chosen ? json(row.cumulative_rollouts_per_s) : json(nullptr)}};
}

json topology_json(const chains::Topology& topology) {
  json chains = json::array();
  for (const auto& chain : topology.chains) {
    json ids = json::array();
    for (const WorkerId id : chain) ids.push_back(id.value);
    chains.push_back(std::move(ids));
  }
  return {{"policy", chains::to_string(topology.policy)},
          {"chains", chains},
          {"stripes", topology.stripes()},
          {"depth", topology.depth()}};
}

// At most `width` printable ASCII characters, the rest cut with '~'.
std::string cut(std::string_view text, std::size_t width) {
  std::string out;
  for (const char c : text) out += c >= ' ' && c <= '~' ? c : '?';
  if (out.size() > width) out = out.substr(0, width - 1) + '~';
  return out.empty() ? "-" : out;
}

std::string money(const std::optional<double>& usd) { return usd ? fmt::format("{:.4f}", *usd) : "?"; }

// Rollouts cost small fractions of a cent: significant digits, not decimals.
std::string per_1k(const OfferCost& cost) {
  return cost.usd_per_hour_high ? fmt::format("{:.3g}", cost.usd_per_1k_rollouts) : "?";
}

std::string gpu_text(const Offer& o) { return fmt::format("{} x{}", cut(o.gpu, 12), o.gpu_count); }

std::string links_text(const Offer& o) { return fmt::format("{:.0f}/{:.0f}", o.down.mbit_per_s(), o.up.mbit_per_s()); }

std::string number_text(const std::optional<double>& value, const char* spec) {
  return value ? fmt::format(fmt::runtime(spec), *value) : "?";
}

// "$0.5100", "$0.5100 to $0.5300" where unstated prices leave a range, "$0.5100 or more" where they leave no upper end.
std::string range(double low, const std::optional<double>& high) {
  if (!high) return fmt::format("${:.4f} or more", low);
  if (*high > 0 && *high < 5e-5) return "under $0.0001";
  return *high - low > 5e-5 ? fmt::format("${:.4f} to ${:.4f}", low, *high) : fmt::format("${:.4f}", *high);
}

// Rows of cells, each column as wide as its widest cell; numbers to the right.
class Table {
 public:
  explicit Table(std::vector<std::pair<std::string, bool>> columns) {  // title, to the right
    rows_.emplace_back();
    for (auto& [title, right] : columns) {
      rows_.front().push_back(std::move(title));
      right_.push_back(right);
    }
  }
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text() const {
    std::vector<std::size_t> width(right_.size(), 0);
    for (const auto& row : rows_)
      for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
    std::string out;
    for (const auto& row : rows_) {
      std::string line;
      for (std::size_t c = 0; c < row.size(); ++c) {
        if (c > 0) line += ' ';
        line += right_[c] ? fmt::format("{:>{}}", row[c], width[c]) : fmt::format("{:<{}}", row[c], width[c]);
      }
      while (!line.empty() && line.back() == ' ') line.pop_back();
      out += line + '\n';
    }
    return out;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<bool> right_;
};

// What the rented machines are.
std::string machines_table(const Plan& plan) {
  Table table({{"wkr", true},
               {"offer", false},
               {"from", false},
               {"host", false},
               {"GPU", false},
               {"GB", true},
               {"place", false},
               {"Mbit d/u", true},
               {"up", true},
               {"days", true}});
  for (const PlanRow* row : plan.chosen()) {
    const Offer& o = row->offer;
    std::optional<double> days;
    if (o.duration_max) days = seconds(*o.duration_max) / 86400;
    table.add({fmt::format("{}", *row->worker), cut(o.id, 10), cut(o.provider, 5), cut(o.host, 8), gpu_text(o),
               number_text(o.vram_gb, "{:.0f}"), cut(o.place, 6), links_text(o), number_text(o.reliability, "{:.3f}"),
               number_text(days, "{:.3g}")});
  }
  return table.text();
}

// What they give and cost.
std::string prices_table(const Plan& plan) {
  Table table({{"wkr", true},
               {"offer", false},
               {"rank", true},
               {"roll/s", true},
               {"by", false},
               {"gpu $/h", true},
               {"disk", true},
               {"traffic", true},
               {"$/1k", true},
               {"sum/s", true}});
  for (const PlanRow* row : plan.chosen()) {
    const Offer& o = row->offer;
    table.add({fmt::format("{}", *row->worker), cut(o.id, 10), fmt::format("{}", row->rank),
               fmt::format("{:.2f}", o.rollouts_per_s), std::string(to_string(o.rollouts_source).substr(0, 4)),
               money(row->cost.gpu), money(row->cost.storage), money(row->cost.bandwidth), per_1k(row->cost),
               fmt::format("{:.1f}", row->cumulative_rollouts_per_s)});
  }
  return table.text();
}

std::string others_table(const Plan& plan) {
  Table table({{"rank", true}, {"offer", false}, {"roll/s", true}, {"$/h", true}, {"$/1k", true}, {"why not", false}});
  std::size_t shown = 0, left = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.chosen) continue;
    if (++shown > kOthersShown) {
      ++left;
      continue;
    }
    table.add({row.rank == 0 ? "-" : fmt::format("{}", row.rank), cut(row.offer.id, 10),
               fmt::format("{:.2f}", row.offer.rollouts_per_s), money(row.cost.usd_per_hour_high), per_1k(row.cost),
               cut(row.reason, 42)});
  }
  return table.text() + (left > 0 ? fmt::format("and {} more: --json lists them all\n", left) : "");
}

}  // namespace

nlohmann::json Plan::to_json() const {
  json offers = json::array();
  for (const PlanRow& row : rows) offers.push_back(row_json(row));
  const std::size_t workers = topology.size();
  std::optional<double> run_hours, gpu_gb_min;
  if (request.run_time) run_hours = seconds(*request.run_time) / 3600;
  if (request.gpu_memory_min) gpu_gb_min = static_cast<double>(request.gpu_memory_min->count) / 1e9;
  std::optional<double> per_1k_rollouts;
  if (usd_per_hour_high) per_1k_rollouts = 1000 * *usd_per_hour_high / (3600 * rollouts_per_s);
  return {{"schema_version", 2},
          {"feasible", true},
          {"header",
           {{"rollouts_per_step", request.pace.rollouts_per_step},
            {"publish_every", request.pace.publish_every},
            {"staleness_budget", request.staleness_budget},
            {"lookahead", request.lookahead},
            {"step_seconds", seconds(request.pace.step_time)},
            {"headroom", request.headroom},
            {"active_fraction", request.active_fraction},
            {"delta_bytes", request.delta_bytes.count},
            {"full_bytes", request.full_bytes.count},
            {"chunk_bytes", request.chunk.count},
            {"learner_up_mbit_per_s", request.learner_up.mbit_per_s()},
            {"worker_cap_mbit_per_s", request.worker_cap ? json(request.worker_cap->mbit_per_s()) : json(nullptr)},
            {"install_seconds", seconds(request.install_time)},
            {"gpu_gb_min", or_null(gpu_gb_min)},
            {"t_b_seconds", seconds(broadcast_time)},
            {"t_b_last_seconds", seconds(broadcast_time_last)},
            {"lower_bound_seconds", seconds(broadcast_lower_bound)},
            {"required_rollouts_per_s", target.required_rollouts_per_s},
            {"target_rollouts_per_s", target.provisioned_rollouts_per_s},
            {"settled", settled}}},
          {"totals",
           {{"workers", workers},
            {"rollouts_per_s", rollouts_per_s},
            {"usd_per_hour_low", usd_per_hour_low},
            {"usd_per_hour_high", or_null(usd_per_hour_high)},
            {"usd_per_1k_rollouts", or_null(per_1k_rollouts)},
            {"usd_joining_low", usd_joining_low},
            {"usd_joining_high", or_null(usd_joining_high)},
            {"learner_usd_per_hour", or_null(request.learner_usd_per_hour)},
            {"run_hours", or_null(run_hours)},
            {"run_usd_low", or_null(usd_run_low())},
            {"run_usd_high", or_null(usd_run_high())},
            {"budget_usd_per_hour", or_null(request.budget_usd_per_hour)}}},
          {"search",
           {{"method", method},
            {"set_usd_per_hour", set_usd_per_hour},
            {"greedy_usd_per_hour", greedy_usd_per_hour},
            {"lp_bound_usd_per_hour", lp_bound_usd_per_hour},
            {"exact_usd_per_hour", or_null(exact_usd_per_hour)}}},
          {"staleness", {{"worst", staleness_worst}, {"needed", staleness_needed}, {"budget", request.staleness_budget}}},
          {"offers", offers},
          {"standby", standby},
          {"topology", topology_json(topology)},
          {"notes", notes}};
}

std::string Plan::to_table() const {
  const auto above = [&](double base) { return base > 0 ? 100 * (set_usd_per_hour / base - 1) : 0; };
  std::string out;
  const auto line = [&](const std::string& text) { out += text + '\n'; };
  line(fmt::format("R {:.6g} rollouts/step   kappa {}   S {}   T {}", request.pace.rollouts_per_step,
                   request.pace.publish_every, request.staleness_budget, echoline::to_text(request.pace.step_time)));
  line(fmt::format(
      "T_b {} ({}lower bound {}, last worker {})", echoline::to_text(broadcast_time),
      request.install_time > Duration{} ? fmt::format("{} of it to install; ", echoline::to_text(request.install_time))
                                        : "",
      echoline::to_text(broadcast_lower_bound), echoline::to_text(broadcast_time_last)));
  line(fmt::format("rollouts/s: {:.4g} required, {:.4g} with {:.3g} % headroom", target.required_rollouts_per_s,
                   target.provisioned_rollouts_per_s, 100 * request.headroom));
  line(fmt::format("rented: {:.4g} rollouts/s from {} of {} offers", rollouts_per_s, topology.size(), rows.size()));
  line(fmt::format("fleet: {} per hour, {} once to join, ${} per 1k rollouts",
                   range(usd_per_hour_low, usd_per_hour_high), range(usd_joining_low, usd_joining_high),
                   usd_per_hour_high ? fmt::format("{:.3g}", 1000 * *usd_per_hour_high / (3600 * rollouts_per_s)) : "?"));
  line(fmt::format("learner: {} per hour", request.learner_usd_per_hour
                                               ? fmt::format("${:.4f}", *request.learner_usd_per_hour)
                                               : "$?"));
  if (request.run_time)
    line(fmt::format("run: {}, {}", echoline::to_text(*request.run_time),
                     usd_run_low() ? range(*usd_run_low(), usd_run_high()) : "$?"));
  line(fmt::format("search: {}, {:.1f} % above the fractional bound{}", method, above(lp_bound_usd_per_hour),
                   exact_usd_per_hour ? fmt::format(", {:.1f} % above the optimum", above(*exact_usd_per_hour)) : ""));
  line(fmt::format("staleness: at worst {} steps (lookahead {}), budget {}", staleness_worst, request.lookahead,
                   request.staleness_budget));
  line(fmt::format("topology ({}): {}", chains::to_string(topology.policy), topology.to_short_text()));
  for (const std::string& note : notes) line("note: " + note);
  line("");
  out += machines_table(*this);
  line("");
  out += prices_table(*this);
  if (rows.size() > topology.size()) {
    line("");
    line("not rented");
    out += others_table(*this);
  }
  return out;
}

}  // namespace echoline::provisioner
