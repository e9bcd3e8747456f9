// A plan as JSON: writing and reading.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "chains/fleet_graph.hpp"
#include "provisioner/plan_fields.hpp"
#include "provisioner/plan_words.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;

constexpr int kSchemaVersion = 4;
constexpr std::uint64_t kPlanBytesMax = 64 << 20;
constexpr double kNumberMax = 1e12;  // of amounts and rates

// ---- both directions: F is PlanWriter or PlanReader; the other parameter is const for PlanWriter ----

template <class F, class Request>
void request_fields(F&& f, Request& q) {
  f.number("rollouts_per_step", q.pace.rollouts_per_step, 1e-9, kNumberMax);
  f.number("publish_every", q.pace.publish_every, 1, 1e9);
  f.duration("step_seconds", q.pace.step_time);
  f.number("staleness_budget", q.staleness_budget, 0, 1e9);
  f.number("lookahead", q.lookahead, 0, 1e9);
  f.number("group_size", q.group_size, 1e-9, 1e9);
  f.number("headroom", q.fleet.headroom, 0, 1e6);
  f.duration("run_seconds", q.run_time);
  f.optional("learner_usd_per_hour", q.learner_usd_per_hour);
  f.bytes("delta_bytes", q.delta_bytes);
  f.bytes("full_bytes", q.full_bytes);
  f.rate("learner_up_mbit_per_s", q.learner_up);
  f.rate("worker_cap_mbit_per_s", q.paths.worker_rate);
  f.number_or_null("chunk_bytes", q.chunk.count, 0, 1e15);
  f.duration("delay_seconds", q.paths.delay_expected);
  f.duration("install_seconds", q.fleet.install_time_expected);
  f.duration("boot_seconds_max", q.fleet.join_timeout);
  f.number("active_fraction", q.quorum, 0, 1);
  using enum chains::TopologyPolicy;
  f.choice("topology", q.topology, {kEcho2, kBestChains, kStar, kStripes, kTrees, kAuto});
  f.number("workers_max", q.fleet.workers_max, 1, 1e6);
  f.optional("budget_usd_per_hour", q.fleet.usd_per_hour_max);
  f.optional("budget_usd", q.fleet.usd_max);
  f.choice("pricing", q.fleet.pricing, {Pricing::kOnDemand, Pricing::kBid});
  f.number("bid_over_min", q.fleet.bid_over_min, 0, 1e6);
  f.optional("per_host_max", q.fleet.per_host_max, 1, 1e6);
  f.bytes("gpu_bytes_min", q.gpu_memory_min);
  f.texts("places", q.fleet.places);
  f.optional("reliability_min", q.fleet.reliability_min, 0, 1);
  f.days("duration_days_min", q.fleet.duration_min);
  f.rate("up_mbit_per_s_min", q.fleet.up_min);
  f.texts("keep", q.keep);  // offers that stay rented at any price
  auto&& a = f.section("assume");
  auto& assume = q.fleet.assume;
  a.optional("storage_usd_per_hour", assume.storage_usd_per_hour);
  a.optional("upload_usd_per_gb", assume.upload_usd_per_gb);
  a.optional("download_usd_per_gb", assume.download_usd_per_gb);
  a.rate("up_mbit_per_s", assume.up);
  a.rate("down_mbit_per_s", assume.down);
  a.optional("vram_gb", assume.vram_gb);
  a.optional("reliability", assume.reliability, 0, 1);
  a.days("duration_days", assume.duration);
}

template <class F, class Row>
void row_fields(F&& f, Row& row) {
  auto& o = row.offer;
  f.number_or_null("rank", row.rank, 1, 1e9);
  f.boolean("chosen", row.chosen);
  f.text("reason", row.reason);
  f.texts("assumed", row.assumed);
  f.worker("worker", row.worker);
  f.text("offer", o.id);
  f.text("provider", o.provider);
  f.text("host", o.host);
  f.text("owner", o.owner);
  f.text("gpu", o.gpu);
  f.number("gpu_count", o.gpu_count, 1, 1024);
  f.gpus("gpu_ids", o.gpu_ids);
  f.optional("vram_gb", o.vram_gb);
  f.text("place", o.place);
  f.rate("up_mbit_per_s", o.up);
  f.rate("down_mbit_per_s", o.down);
  f.optional("reliability", o.reliability, 0, 1);
  f.days("duration_days_max", o.duration_max);
  f.boolean("rentable", o.rentable);
  f.number_or_null("rollouts_per_s", o.rollouts_per_s, 1e-12, kNumberMax);
  f.choice("rollouts_source", o.rollouts_source,
           {RateSource::kUnknown, RateSource::kMeasured, RateSource::kProfile, RateSource::kDlperf});
  f.optional("rollouts_uncertainty", o.rollouts_uncertainty, 0, 0.95);
  f.text("rollouts_from", o.rollouts_from);
  f.optional("losses_per_hour", row.losses_per_hour);
  f.optional("dlperf", o.dlperf);
  f.optional("on_demand_usd_per_hour", o.gpu_usd_per_hour);  // listed by the provider; row.cost.gpu may be a bid
  f.optional("bid_usd_per_hour", o.bid_usd_per_hour);
  f.optional("bid_usd_per_hour_min", o.bid_usd_per_hour_min);
  f.optional("disk_usd_per_hour", o.storage_usd_per_hour);
  f.optional("upload_usd_per_gb", o.upload_usd_per_gb);
  f.optional("download_usd_per_gb", o.download_usd_per_gb);
  f.optional("gpu_usd_per_hour", row.cost.gpu);
  f.optional("storage_usd_per_hour", row.cost.storage);
  f.optional("bandwidth_usd_per_hour", row.cost.bandwidth);
}

// All fields but offers, standby and topology.
template <class F, class P>
void plan_fields(F&& f, P& plan) {
  auto&& market = f.section("market");
  market.text("source", plan.market.source);
  market.text("format", plan.market.format);
  market.optional("recorded_unix_s", plan.market.recorded_unix_s);
  auto&& header = f.section("header");
  request_fields(header, plan.request);
  header.duration("t_b_seconds", plan.broadcast_time);
  header.duration("t_b_last_seconds", plan.broadcast_time_last);
  header.duration("lower_bound_seconds", plan.broadcast_lower_bound);
  header.number_or_null("t_b_chunk_bytes", plan.chunk.count, 0, 1e15);
  header.number("required_rollouts_per_s", plan.target.required_rollouts_per_s, 0, kNumberMax);
  header.number("target_rollouts_per_s", plan.target.provisioned_rollouts_per_s, 0, kNumberMax);
  header.boolean("settled", plan.converged);
  auto&& totals = f.section("totals");
  totals.number("rollouts_per_s", plan.rollouts_per_s, 1e-12, kNumberMax);
  totals.number("usd_per_hour_low", plan.usd_per_hour.low, 0, kNumberMax);
  totals.number("usd_per_hour", plan.usd_per_hour.expected, 0, kNumberMax);
  totals.number("usd_per_hour_high", plan.usd_per_hour.high, 0, kNumberMax);
  totals.number("usd_joining", plan.usd_joining, 0, kNumberMax);
  totals.number("losses", plan.replacing.losses, 0, kNumberMax);
  totals.number("usd_replacing_low", plan.replacing.usd.low, 0, kNumberMax);
  totals.number("usd_replacing", plan.replacing.usd.expected, 0, kNumberMax);
  totals.number("usd_replacing_high", plan.replacing.usd.high, 0, kNumberMax);
  auto&& search = f.section("search");
  search.text("method", plan.method);
  search.number("set_usd_per_hour", plan.chosen_usd_per_hour, 0, kNumberMax);
  search.number("greedy_usd_per_hour", plan.greedy_usd_per_hour, 0, kNumberMax);
  search.number("lp_bound_usd_per_hour", plan.lp_bound_usd_per_hour, 0, kNumberMax);
  search.optional("exact_usd_per_hour", plan.exact_usd_per_hour);
  auto&& staleness = f.section("staleness");
  staleness.number("worst", plan.staleness_worst, 0, 2e9);
  staleness.number("needed", plan.staleness_needed, 0, 2e9);
  f.texts("notes", plan.notes);
}

// ---- writing ----

json row_json(const PlanRow& row) {
  json out;
  row_fields(PlanWriter(out), row);
  out["usd_per_hour"] = or_null(row.cost.usd_per_hour());
  out["usd_per_1k_rollouts"] = or_null(row.usd_per_1k_rollouts());
  out["cumulative_rollouts_per_s"] = row.chosen ? json(row.cumulative_rollouts_per_s) : json();
  return out;
}

void write_spend(json& out, const std::string& name, const std::optional<Spend>& spend) {
  out[name + "_low"] = spend ? json(spend->low) : json();
  out[name] = spend ? json(spend->expected) : json();
  out[name + "_high"] = spend ? json(spend->high) : json();
}

// ---- reading ----

void read_row(const PlanReader& r, PlanRow& row) {
  row_fields(r, row);
  if (row.chosen) r.number("cumulative_rollouts_per_s", row.cumulative_rollouts_per_s, 0, kNumberMax);
}

// Checks the consistency between the parts.
std::string contradiction(const Plan& plan) {
  std::size_t chosen = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.chosen != row.worker.has_value())
      return fmt::format("offer '{}': a rented offer has a worker, others have none", row.offer.id);
    if (!row.chosen) continue;
    if (row.worker->value != ++chosen) return fmt::format("offer '{}': expected worker {}", row.offer.id, chosen);
    if (!(row.offer.rollouts_per_s > 0) || !row.cost.usd_per_hour())
      return fmt::format("offer '{}': it is rented, but its throughput or price is unknown", row.offer.id);
  }
  if (chosen == 0) return "no offer is rented";
  std::vector<WorkerId> workers;
  for (std::size_t w = 1; w <= chosen; ++w) workers.push_back(WorkerId{w});
  if (const Status valid = chains::validate(plan.topology, workers); !valid) return "topology: " + valid.error().detail;
  return "";
}

}  // namespace

nlohmann::json Plan::to_json() const {
  json out;
  plan_fields(PlanWriter(out), *this);
  out["schema_version"] = kSchemaVersion;
  out["feasible"] = true;

  const PlanRequest& q = request;
  json& header = out["header"];
  header["provider"] = q.fleet.joined_by_hand() ? "" : q.fleet.provider;  // "" stands for "none"
  header["gpu_gb_min"] = q.gpu_memory_min ? json(static_cast<double>(q.gpu_memory_min->count) / 1e9) : json();
  write_regions(header, q.paths.regions);

  json& totals = out["totals"];
  totals["workers"] = topology.size();
  totals["rollouts_per_s_low"] = rollouts_range().low;
  totals["rollouts_per_s_high"] = rollouts_range().high;
  totals["usd_per_1k_rollouts"] = 1000 * usd_per_hour.expected / (3600 * rollouts_per_s);
  write_spend(totals, "fleet_usd", usd_fleet());
  write_spend(totals, "run_usd", usd_run());
  out["staleness"]["bound_by"] = staleness_bound_by(*this);
  out["staleness"]["budget"] = q.staleness_budget;

  const std::size_t written = std::min(rows.size(), std::max(kRowsWritten, topology.size()));
  json& offers = out["offers"] = json::array();
  json& next = out["standby"] = json::array();
  for (std::size_t i = 0; i < written; ++i) offers.push_back(row_json(rows[i]));
  // After the rented offers, `rows` and `standby` have the same order. Writes only standby offers whose rows are
  // written.
  for (std::size_t i = 0; i < standby.size() && i < written - topology.size(); ++i) next.push_back(standby[i]);
  out["offers_left_out"] = rows_left_out + rows.size() - written;
  out["topology"] = topology_json(topology);
  return out;
}

Result<Plan> Plan::from_json(const nlohmann::json& j) {
  std::string problem;
  const auto invalid = [&] { return fail(Code::kInvalid, "read plan", "{}", problem); };
  const PlanReader root(j, "", problem);
  int version = 0;
  root.number("schema_version", version, 0, 1e6);
  if (problem.empty() && version != kSchemaVersion)
    problem = fmt::format("schema_version: expected {}, found {}; make the plan again", kSchemaVersion, version);
  bool feasible = false;
  root.boolean("feasible", feasible);
  if (problem.empty() && !feasible) problem = "feasible: the file says that there is no plan";
  if (!problem.empty()) return invalid();

  Plan plan;
  plan_fields(root, plan);
  const PlanReader header = root.section("header");
  header.text("provider", plan.request.fleet.provider);
  if (plan.request.fleet.provider.empty()) plan.request.fleet.provider = "none";
  read_regions(header, plan.request.paths.regions);
  if (const json* offers = root.list("offers"))
    for (std::size_t i = 0; i < offers->size() && problem.empty(); ++i)
      read_row(PlanReader((*offers)[i], fmt::format("offers[{}]", i), problem), plan.rows.emplace_back());
  root.number("offers_left_out", plan.rows_left_out, 0, 1e9);
  root.texts("standby", plan.standby);
  read_topology(root.section("topology"), plan.rows.size(), plan.topology);
  if (problem.empty()) problem = contradiction(plan);
  if (!problem.empty()) return invalid();
  return plan;
}

Result<Plan> load_plan(const std::filesystem::path& path, nlohmann::json* document) {
  ECHO_ASSIGN(const std::string text, read_file(path, kPlanBytesMax));
  json parsed = json::parse(text, nullptr, false);
  if (parsed.is_discarded()) return fail(Code::kInvalid, "read plan", "{}: it is not JSON", path.string());
  auto plan = Plan::from_json(parsed);
  if (!plan) return fail(plan.error().code, "read plan", "{}: {}", path.string(), plan.error().detail);
  if (document) *document = std::move(parsed);
  return plan;
}

}  // namespace echoline::provisioner
