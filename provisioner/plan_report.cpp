// A plan as JSON and as text.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "provisioner/plan.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;

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
          {"usd_per_hour_high", row.cost.usd_per_hour_high},
          {"usd_per_1k_rollouts", row.cost.usd_per_1k_rollouts},
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
std::string per_1k(double usd) { return fmt::format("{:.3g}", usd); }

std::string gpu_text(const Offer& o) { return fmt::format("{} x{}", cut(o.gpu, 12), o.gpu_count); }

std::string links_text(const Offer& o) { return fmt::format("{:.0f}/{:.0f}", o.down.mbit_per_s(), o.up.mbit_per_s()); }

std::string reliability_text(const Offer& o) { return o.reliability ? fmt::format("{:.3f}", *o.reliability) : "?"; }

// "$0.5100", or "$0.5100 to $0.5300" where unstated prices leave a range.
std::string range(double low, double high) {
  if (high > 0 && high < 5e-5) return "under $0.0001";
  return high - low > 5e-5 ? fmt::format("${:.4f} to ${:.4f}", low, high) : fmt::format("${:.4f}", high);
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

std::string rented_table(const Plan& plan) {
  Table table({{"wkr", true},
               {"rank", true},
               {"provider", false},
               {"offer", false},
               {"host", false},
               {"GPU", false},
               {"GB", true},
               {"place", false},
               {"Mbit d/u", true},
               {"reliab", true},
               {"days", true},
               {"roll/s", true},
               {"by", false},
               {"gpu $/h", true},
               {"disk", true},
               {"bandw", true},
               {"$/1k", true},
               {"sum/s", true}});
  for (const PlanRow* row : plan.chosen()) {
    const Offer& o = row->offer;
    table.add({fmt::format("{}", *row->worker), fmt::format("{}", row->rank), cut(o.provider, 8), cut(o.id, 12),
               cut(o.host, 10), gpu_text(o), o.vram_gb ? fmt::format("{:.0f}", *o.vram_gb) : "?", cut(o.place, 6),
               links_text(o), reliability_text(o),
               o.duration_max ? fmt::format("{:.1f}", seconds(*o.duration_max) / 86400) : "?",
               fmt::format("{:.2f}", o.rollouts_per_s), std::string(to_string(o.rollouts_source).substr(0, 4)),
               money(row->cost.gpu), money(row->cost.storage), money(row->cost.bandwidth),
               per_1k(row->cost.usd_per_1k_rollouts), fmt::format("{:.1f}", row->cumulative_rollouts_per_s)});
  }
  return table.text();
}

std::string others_table(const Plan& plan) {
  Table table({{"rank", true},
               {"provider", false},
               {"offer", false},
               {"GPU", false},
               {"Mbit d/u", true},
               {"reliab", true},
               {"roll/s", true},
               {"$/h", true},
               {"$/1k", true},
               {"why not", false}});
  for (const PlanRow& row : plan.rows) {
    if (row.chosen) continue;
    table.add({row.rank == 0 ? "-" : fmt::format("{}", row.rank), cut(row.offer.provider, 8), cut(row.offer.id, 12),
               gpu_text(row.offer), links_text(row.offer), reliability_text(row.offer),
               fmt::format("{:.2f}", row.offer.rollouts_per_s), money(row.cost.usd_per_hour_high),
               per_1k(row.cost.usd_per_1k_rollouts), cut(row.reason, 50)});
  }
  return table.text();
}

}  // namespace

nlohmann::json Plan::to_json() const {
  json offers = json::array();
  for (const PlanRow& row : rows) offers.push_back(row_json(row));
  const std::size_t workers = topology.size();
  return {{"schema_version", 1},
          {"header",
           {{"rollouts_per_step", request.pace.rollouts_per_step},
            {"publish_every", request.pace.publish_every},
            {"staleness_budget", request.staleness_budget},
            {"step_seconds", seconds(request.pace.step_time)},
            {"headroom", request.headroom},
            {"active_fraction", request.active_fraction},
            {"delta_bytes", request.delta_bytes.count},
            {"full_bytes", request.full_bytes.count},
            {"chunk_bytes", request.chunk.count},
            {"learner_up_mbit_per_s", request.learner_up.mbit_per_s()},
            {"worker_cap_mbit_per_s", request.worker_cap ? json(request.worker_cap->mbit_per_s()) : json(nullptr)},
            {"install_seconds", seconds(request.install_time)},
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
            {"usd_per_hour_high", usd_per_hour_high},
            {"usd_per_1k_rollouts", 1000 * usd_per_hour_high / (3600 * rollouts_per_s)},
            {"usd_joining_low", usd_joining_low},
            {"usd_joining_high", usd_joining_high},
            {"budget_usd_per_hour", or_null(request.budget_usd_per_hour)}}},
          {"search",
           {{"method", method},
            {"set_usd_per_hour", set_usd_per_hour},
            {"greedy_usd_per_hour", greedy_usd_per_hour},
            {"lp_bound_usd_per_hour", lp_bound_usd_per_hour},
            {"exact_usd_per_hour", or_null(exact_usd_per_hour)}}},
          {"staleness", {{"worst", staleness_worst}, {"bound", staleness_bound}, {"budget", request.staleness_budget}}},
          {"offers", offers},
          {"standby", standby},
          {"topology", topology_json(topology)},
          {"notes", notes}};
}

std::string Plan::to_table() const {
  const auto above = [&](double base) { return base > 0 ? 100 * (set_usd_per_hour / base - 1) : 0; };
  std::string out;
  const auto line = [&](const std::string& text) { out += text + '\n'; };
  line(fmt::format("R {:.6g} rollouts/step   kappa {}   S {}   T {}   T_b {} ({}lower bound {}, last worker {})",
                   request.pace.rollouts_per_step, request.pace.publish_every, request.staleness_budget,
                   echoline::to_text(request.pace.step_time), echoline::to_text(broadcast_time),
                   request.install_time > Duration{}
                       ? fmt::format("{} of it to install; ", echoline::to_text(request.install_time))
                       : "",
                   echoline::to_text(broadcast_lower_bound), echoline::to_text(broadcast_time_last)));
  line(fmt::format("rollouts/s: {:.4g} required, {:.4g} with {:.3g} % headroom, {:.4g} rented from {} of {} offers",
                   target.required_rollouts_per_s, target.provisioned_rollouts_per_s, 100 * request.headroom,
                   rollouts_per_s, topology.size(), rows.size()));
  line(fmt::format("cost: {} per hour, ${:.3g} per 1k rollouts, {} once for joining",
                   range(usd_per_hour_low, usd_per_hour_high), 1000 * usd_per_hour_high / (3600 * rollouts_per_s),
                   range(usd_joining_low, usd_joining_high)));
  line(fmt::format("search: {}, {:.1f} % above the fractional bound{}", method, above(lp_bound_usd_per_hour),
                   exact_usd_per_hour ? fmt::format(", {:.1f} % above the optimum", above(*exact_usd_per_hour)) : ""));
  line(fmt::format("staleness: at worst {} steps, {} with any fleet that meets the requirement, budget {}",
                   staleness_worst, staleness_bound, request.staleness_budget));
  line(fmt::format("topology ({}): {}", chains::to_string(topology.policy), topology.to_short_text()));
  for (const std::string& note : notes) line("note: " + note);
  line("");
  out += rented_table(*this);
  if (rows.size() > topology.size()) {
    line("");
    line("not rented");
    out += others_table(*this);
  }
  return out;
}

}  // namespace echoline::provisioner
