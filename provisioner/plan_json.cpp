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

constexpr int kSchemaVersion = 5;
constexpr std::uint64_t kPlanBytesMax = 64 << 20;
constexpr double kNumberMax = 1e12;  // greatest accepted amount or rate

// ---- both directions: F is PlanWriter, with a const Request, Row or PlanType, or PlanReader ----

// The two numbers after a value are the least and the greatest that PlanReader accepts.

template <class F, class Request>
void request_fields(F&& fields, Request& request) {
  fields.number("rollouts_per_step", request.pace.rollouts_per_step, 1e-9, kNumberMax);
  fields.number("publish_every", request.pace.publish_every, 1, 1e9);
  fields.duration("step_seconds", request.pace.step_time);
  fields.number("staleness_budget", request.staleness_budget, 0, 1e9);
  fields.number("lookahead", request.lookahead, 0, 1e9);
  fields.number("group_size", request.group_size, 1e-9, 1e9);
  fields.number("headroom", request.fleet.headroom, 0, 1e6);
  fields.duration("run_seconds", request.run_time);
  fields.optional("learner_usd_per_hour", request.learner_usd_per_hour);
  fields.bytes("delta_bytes", request.delta_bytes);
  fields.bytes("full_bytes", request.full_bytes);
  fields.rate("learner_up_mbit_per_s", request.learner_up);
  fields.rate("worker_cap_mbit_per_s", request.paths.worker_rate);
  fields.number_or_null("chunk_bytes", request.chunk.count, 0, 1e15);
  fields.duration("delay_seconds", request.paths.delay_expected);
  fields.duration("install_seconds", request.fleet.install_time_expected);
  fields.choice("capacity_rule", request.fleet.capacity_rule, {CapacityRule::kOverlap, CapacityRule::kEcho2});
  fields.duration("boot_seconds_max", request.fleet.join_timeout);
  fields.number("active_fraction", request.quorum, 0, 1);
  using enum chains::TopologyPolicy;
  fields.choice("topology", request.topology, {kEcho2, kBestChains, kStar, kStripes, kTrees, kAuto});
  fields.number("workers_max", request.fleet.workers_max, 1, 1e6);
  fields.optional("budget_usd_per_hour", request.fleet.usd_per_hour_max);
  fields.optional("budget_usd", request.fleet.usd_max);
  fields.choice("pricing", request.fleet.pricing, {Pricing::kOnDemand, Pricing::kBid});
  fields.number("bid_over_min", request.fleet.bid_over_min, 0, 1e6);
  fields.optional("per_host_max", request.fleet.per_host_max, 1, 1e6);
  fields.bytes("gpu_bytes_min", request.gpu_memory_min);
  fields.texts("places", request.fleet.places);
  fields.optional("reliability_min", request.fleet.reliability_min, 0, 1);
  fields.days("duration_days_min", request.fleet.duration_min);
  fields.rate("up_mbit_per_s_min", request.fleet.up_min);
  fields.texts("keep", request.keep);
  auto&& assume_fields = fields.section("assume");
  auto& assume = request.fleet.assume;
  assume_fields.optional("storage_usd_per_hour", assume.storage_usd_per_hour);
  assume_fields.optional("upload_usd_per_gb", assume.upload_usd_per_gb);
  assume_fields.optional("download_usd_per_gb", assume.download_usd_per_gb);
  assume_fields.rate("up_mbit_per_s", assume.up);
  assume_fields.rate("down_mbit_per_s", assume.down);
  assume_fields.optional("vram_gb", assume.vram_gb);
  assume_fields.optional("reliability", assume.reliability, 0, 1);
  assume_fields.days("duration_days", assume.duration);
  fields.bytes("host_bytes_min", request.host_memory_min);
  fields.optional("cuda_min", request.cuda_min, 1, 99);
  if (!fields.has("where")) return;  // in a plan of an earlier program
  auto&& where_fields = fields.section("where");
  auto& where = request.fleet.where;
  where_fields.bytes("disk_bytes", request.fleet.disk);
  where_fields.texts("gpus", where.gpus);
  where_fields.optional("gpu_count_min", where.gpu_count_min, 1, 1024);
  where_fields.optional("gpu_count_max", where.gpu_count_max, 1, 1024);
  where_fields.boolean("verified", where.verified);
  where_fields.boolean("datacenter", where.datacenter);
  where_fields.optional("open_ports_min", where.open_ports_min, 0, 65535);
  where_fields.optional("compute_capability_min", where.compute_capability_min, 1, 99);
  where_fields.bytes("memory_bytes_min", where.memory_min);
  where_fields.rate("down_mbit_per_s_min", where.down_min);
  where_fields.optional("upload_usd_per_gb_max", where.upload_usd_per_gb_max);
  where_fields.optional("download_usd_per_gb_max", where.download_usd_per_gb_max);
}

template <class F, class Row>
void row_fields(F&& fields, Row& row) {
  auto& offer = row.offer;
  fields.number_or_null("rank", row.rank, 1, 1e9);
  fields.boolean("chosen", row.chosen);
  fields.text("reason", row.reason);
  fields.texts("assumed", row.assumed);
  fields.worker("worker", row.worker);
  fields.text("offer", offer.id);
  fields.text("provider", offer.provider);
  fields.text("host", offer.host);
  fields.text("owner", offer.owner);
  fields.text("gpu", offer.gpu);
  fields.number("gpu_count", offer.gpu_count, 1, 1024);
  fields.gpus("gpu_ids", offer.gpu_ids);
  fields.optional("vram_gb", offer.vram_gb);
  fields.text("place", offer.place);
  fields.text_or_empty("cloud", offer.cloud);
  fields.text_or_empty("region", offer.region);
  fields.text_or_empty("zone", offer.zone);
  fields.text_or_empty("machine_type", offer.machine_type);
  fields.rate("up_mbit_per_s", offer.up);
  fields.rate("down_mbit_per_s", offer.down);
  fields.optional("memory_gb", offer.memory_gb);
  fields.optional("disk_gb", offer.disk_gb);
  fields.optional("cuda_max", offer.cuda_max);
  fields.optional("compute_capability", offer.compute_capability);
  fields.optional("open_ports", offer.open_ports);
  fields.flag("verified", offer.verified);
  fields.flag("datacenter", offer.datacenter);
  fields.optional("reliability", offer.reliability, 0, 1);
  fields.days("duration_days_max", offer.duration_max);
  fields.boolean("rentable", offer.rentable);
  fields.number_or_null("rollouts_per_s", offer.rollouts_per_s, 1e-12, kNumberMax);
  fields.choice("rollouts_source", offer.rollouts_source,
                {RateSource::kUnknown, RateSource::kMeasured, RateSource::kProfile, RateSource::kDlperf});
  fields.optional("rollouts_uncertainty", offer.rollouts_uncertainty, 0, 0.95);
  fields.text("rollouts_from", offer.rollouts_from);
  fields.optional("losses_per_hour", row.losses_per_hour);
  fields.optional("dlperf", offer.dlperf);
  fields.optional("on_demand_usd_per_hour",
                  offer.gpu_usd_per_hour);  // the listed price; row.cost.gpu may be a bid
  fields.optional("bid_usd_per_hour", offer.bid_usd_per_hour);
  fields.optional("bid_usd_per_hour_min", offer.bid_usd_per_hour_min);
  fields.optional("disk_usd_per_hour", offer.storage_usd_per_hour);
  fields.optional("upload_usd_per_gb", offer.upload_usd_per_gb);
  fields.optional("download_usd_per_gb", offer.download_usd_per_gb);
  fields.optional("gpu_usd_per_hour", row.cost.gpu);
  fields.optional("storage_usd_per_hour", row.cost.storage);
  fields.optional("bandwidth_usd_per_hour", row.cost.bandwidth);
}

// All fields but offers, standby and topology.
template <class F, class PlanType>
void plan_fields(F&& fields, PlanType& plan) {
  auto&& market = fields.section("market");
  market.text("source", plan.market.source);
  market.text("format", plan.market.format);
  market.optional("recorded_unix_s", plan.market.recorded_unix_s);
  auto&& header = fields.section("header");
  request_fields(header, plan.request);
  header.duration("t_b_seconds", plan.broadcast_time);
  header.duration("t_b_last_seconds", plan.broadcast_time_last);
  header.duration("lower_bound_seconds", plan.broadcast_lower_bound);
  header.number_or_null("t_b_chunk_bytes", plan.chunk.count, 0, 1e15);
  header.number("required_rollouts_per_s", plan.target.required_rollouts_per_s, 0, kNumberMax);
  header.number("target_rollouts_per_s", plan.target.provisioned_rollouts_per_s, 0, kNumberMax);
  header.boolean("settled", plan.converged);
  auto&& totals = fields.section("totals");
  totals.number("rollouts_per_s", plan.rollouts_per_s, 1e-12, kNumberMax);
  totals.number("usd_per_hour_low", plan.usd_per_hour.low, 0, kNumberMax);
  totals.number("usd_per_hour", plan.usd_per_hour.expected, 0, kNumberMax);
  totals.number("usd_per_hour_high", plan.usd_per_hour.high, 0, kNumberMax);
  totals.number("usd_joining", plan.usd_joining, 0, kNumberMax);
  totals.number("losses", plan.replacing.losses, 0, kNumberMax);
  totals.number("usd_replacing_low", plan.replacing.usd.low, 0, kNumberMax);
  totals.number("usd_replacing", plan.replacing.usd.expected, 0, kNumberMax);
  totals.number("usd_replacing_high", plan.replacing.usd.high, 0, kNumberMax);
  auto&& search = fields.section("search");
  search.text("method", plan.method);
  search.number("set_usd_per_hour", plan.chosen_usd_per_hour, 0, kNumberMax);
  search.number("greedy_usd_per_hour", plan.greedy_usd_per_hour, 0, kNumberMax);
  search.number("lp_bound_usd_per_hour", plan.lp_bound_usd_per_hour, 0, kNumberMax);
  search.optional("exact_usd_per_hour", plan.exact_usd_per_hour);
  auto&& staleness = fields.section("staleness");
  staleness.number("worst", plan.staleness_worst, 0, 2e9);
  staleness.number("needed", plan.staleness_needed, 0, 2e9);
  auto&& learner = fields.section("learner");
  learner.optional("idle_fraction", plan.idle_fraction, 0, 1);
  fields.texts("notes", plan.notes);
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

void write_estimate(json& out, const std::string& name, const std::optional<Estimate>& estimate) {
  out[name + "_low"] = estimate ? json(estimate->low) : json();
  out[name] = estimate ? json(estimate->expected) : json();
  out[name + "_high"] = estimate ? json(estimate->high) : json();
}

// ---- reading ----

void read_row(const PlanReader& reader, PlanRow& row) {
  row_fields(reader, row);
  if (row.chosen) reader.number("cumulative_rollouts_per_s", row.cumulative_rollouts_per_s, 0, kNumberMax);
}

// Returns the first contradiction between the parts of a plan; "" if there is none.
std::string contradiction(const Plan& plan) {
  std::size_t chosen_count = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.chosen != row.worker.has_value())
      return fmt::format("offer '{}': a rented offer has a worker, others have none", row.offer.id);
    if (!row.chosen) continue;
    ++chosen_count;  // chosen rows have the workers 1 to n in order
    if (row.worker->value != chosen_count)
      return fmt::format("offer '{}': expected worker {}", row.offer.id, chosen_count);
    if (!(row.offer.rollouts_per_s > 0) || !row.cost.usd_per_hour())
      return fmt::format("offer '{}': it is rented, but its throughput or price is unknown", row.offer.id);
  }
  if (chosen_count == 0) return "no offer is rented";
  std::vector<WorkerId> workers;
  for (std::size_t id = 1; id <= chosen_count; ++id) workers.push_back(WorkerId{id});
  if (const Status valid = chains::validate(plan.topology, workers); !valid) return "topology: " + valid.error().detail;
  return "";
}

}  // namespace

nlohmann::json Plan::to_json() const {
  json out;
  plan_fields(PlanWriter(out), *this);
  out["schema_version"] = kSchemaVersion;
  out["feasible"] = true;

  json& header = out["header"];
  header["provider"] = request.fleet.joined_by_hand() ? "" : request.fleet.provider;  // "" stands for "none"
  const auto& gpu_bytes = request.gpu_memory_min;
  header["gpu_gb_min"] = gpu_bytes ? json(static_cast<double>(gpu_bytes->count) / 1e9) : json();
  write_regions(header, request.paths.regions);

  json& totals = out["totals"];
  totals["workers"] = topology.size();
  const Estimate rate = rollouts_per_s_estimate();
  totals["rollouts_per_s_low"] = rate.low;
  totals["rollouts_per_s_high"] = rate.high;
  totals["usd_per_1k_rollouts"] = 1000 * usd_per_hour.expected / (3600 * rollouts_per_s);
  write_estimate(totals, "fleet_usd", usd_fleet());
  write_estimate(totals, "run_usd", usd_run());
  out["staleness"]["bound_by"] = staleness_bound_by(*this);
  out["staleness"]["budget"] = request.staleness_budget;

  // The topology has the rented offers' workers, so rows_written >= topology.size().
  const std::size_t rows_written = std::min(rows.size(), std::max(kRowsWritten, topology.size()));
  json& offers = out["offers"] = json::array();
  json& standby_ids = out["standby"] = json::array();
  for (std::size_t i = 0; i < rows_written; ++i) offers.push_back(row_json(rows[i]));
  // The standby offers' rows follow those of the rented offers, in the order of `standby`. Writes only standby offers
  // whose rows are written.
  const std::size_t standby_max = rows_written - topology.size();
  for (std::size_t i = 0; i < standby.size() && i < standby_max; ++i) standby_ids.push_back(standby[i]);
  out["offers_left_out"] = rows_left_out + rows.size() - rows_written;
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
  if (const json* offers = root.find_list("offers"))
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
  json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) return fail(Code::kInvalid, "read plan", "{}: it is not JSON", path.string());
  auto plan = Plan::from_json(parsed);
  if (!plan) return fail(plan.error().code, "read plan", "{}: {}", path.string(), plan.error().detail);
  if (document) *document = std::move(parsed);
  return plan;
}

}  // namespace echoline::provisioner
