// A plan as JSON, written and read back.
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "chains/fleet_graph.hpp"
#include "provisioner/plan_words.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;

constexpr int kSchemaVersion = 4;
constexpr std::uint64_t kPlanBytesMax = 64 << 20;
constexpr std::size_t kTextBytesMax = 4096;
constexpr std::size_t kListMax = 100'000;

template <class T>
json or_null(const std::optional<T>& value) {
  return value ? json(*value) : json(nullptr);
}
// To so many digits that it reads back to what is written again.
double tidy(double x) { return std::stod(fmt::format("{:.12g}", x)); }
json or_null(const std::optional<BitRate>& rate) { return rate ? json(tidy(rate->mbit_per_s())) : json(nullptr); }
std::optional<double> days_of(const std::optional<Duration>& d) {
  return d ? std::optional(tidy(seconds(*d) / 86400)) : std::nullopt;
}
json or_null(const std::optional<Duration>& d) { return d ? json(seconds(*d)) : json(nullptr); }
json or_null(const std::optional<Bytes>& bytes) { return bytes ? json(bytes->count) : json(nullptr); }

json spend_json(const std::optional<Spend>& spend, const char* part) {
  if (!spend) return nullptr;
  return part == std::string_view("low")    ? spend->low
         : part == std::string_view("high") ? spend->high
                                            : spend->expected;
}

json row_json(const PlanRow& row) {
  const Offer& o = row.offer;
  return {{"rank", row.rank == 0 ? json(nullptr) : json(row.rank)},
          {"chosen", row.chosen},
          {"reason", row.reason},
          {"assumed", row.assumed},
          {"worker", row.worker ? json(row.worker->value) : json(nullptr)},
          {"offer", o.id},
          {"provider", o.provider},
          {"host", o.host},
          {"owner", o.owner},
          {"gpu", o.gpu},
          {"gpu_count", o.gpu_count},
          {"gpu_ids", o.gpu_ids},
          {"vram_gb", or_null(o.vram_gb)},
          {"place", o.place},
          {"up_mbit_per_s", or_null(o.up)},
          {"down_mbit_per_s", or_null(o.down)},
          {"reliability", or_null(o.reliability)},
          {"duration_days_max", or_null(days_of(o.duration_max))},
          {"rentable", o.rentable},
          {"rollouts_per_s", o.rollouts_per_s > 0 ? json(o.rollouts_per_s) : json(nullptr)},
          {"rollouts_source", to_string(o.rollouts_source)},
          {"rollouts_uncertainty", or_null(o.rollouts_uncertainty)},
          {"rollouts_from", o.rollouts_from},
          {"losses_per_hour", or_null(row.losses_per_hour)},
          {"dlperf", or_null(o.dlperf)},
          {"on_demand_usd_per_hour", or_null(o.gpu_usd_per_hour)},
          {"bid_usd_per_hour", or_null(o.bid_usd_per_hour)},
          {"bid_usd_per_hour_min", or_null(o.bid_usd_per_hour_min)},
          {"disk_usd_per_hour", or_null(o.storage_usd_per_hour)},
          {"upload_usd_per_gb", or_null(o.upload_usd_per_gb)},
          {"download_usd_per_gb", or_null(o.download_usd_per_gb)},
          {"gpu_usd_per_hour", or_null(row.cost.gpu)},
          {"storage_usd_per_hour", or_null(row.cost.storage)},
          {"bandwidth_usd_per_hour", or_null(row.cost.bandwidth)},
          {"usd_per_hour", or_null(row.cost.usd_per_hour())},
          {"usd_per_1k_rollouts", or_null(row.usd_per_1k_rollouts())},
          {"cumulative_rollouts_per_s", row.chosen ? json(row.cumulative_rollouts_per_s) : json(nullptr)}};
}

json chains_json(const chains::Chains& chains) {
  json out = json::array();
  for (const auto& chain : chains) {
    json ids = json::array();
    for (const WorkerId id : chain) ids.push_back(id.value);
    out.push_back(std::move(ids));
  }
  return out;
}

json regions_json(const RegionMap& map) {
  json all = json::array();
  for (const Region& r : map.regions) all.push_back({{"name", r.name}, {"places", r.places}});
  return all;
}

// One for each pair of which anything is known.
json ways_json(const RegionMap& map) {
  json all = json::array();
  for (std::size_t a = 0; a < map.ways.ways.size(); ++a)
    for (std::size_t b = 0; b < map.ways.ways.size(); ++b) {
      const chains::RegionWay& way = map.ways.ways[a][b];
      const bool limited = std::isfinite(way.rate.bits_per_s);
      if (!limited && !way.delay) continue;
      all.push_back({{"from", map.regions[a].name},
                     {"to", map.regions[b].name},
                     {"mbit_per_s", limited ? json(tidy(way.rate.mbit_per_s())) : json()},
                     {"delay_seconds", way.delay ? json(seconds(*way.delay)) : json()}});
    }
  return all;
}

json topology_json(const chains::Topology& t) {
  json further = json::array(), grafts = json::array(), leaves = json::array();
  for (const chains::Chains& stripe : t.further) further.push_back(chains_json(stripe));
  for (const auto& stripe : t.grafts) {
    json pairs = json::array();
    for (const auto& [first, root] : stripe) pairs.push_back({first.value, root.value});
    grafts.push_back(std::move(pairs));
  }
  for (const WorkerId id : t.leaves_only) leaves.push_back(id.value);
  return {{"policy", chains::to_string(t.policy)},
          {"chains_wanted", t.chains_wanted},
          {"chains", chains_json(t.chains)},
          {"further", further},
          {"grafts", grafts},
          {"leaves_only", leaves},
          {"stripes", t.stripes()},
          {"depth", t.depth()}};
}

json assume_json(const Assumptions& a) {
  return {{"storage_usd_per_hour", or_null(a.storage_usd_per_hour)},
          {"upload_usd_per_gb", or_null(a.upload_usd_per_gb)},
          {"download_usd_per_gb", or_null(a.download_usd_per_gb)},
          {"up_mbit_per_s", or_null(a.up)},
          {"down_mbit_per_s", or_null(a.down)},
          {"vram_gb", or_null(a.vram_gb)},
          {"reliability", or_null(a.reliability)},
          {"duration_days", or_null(days_of(a.duration))}};
}

// Reads fields of an object and keeps the first thing that is wrong.
class Reader {
 public:
  Reader(const json& object, std::string path, std::string& problem)
      : object_(object), path_(std::move(path)), problem_(problem) {
    if (!object_.is_object()) wrong("", "an object", object_);
  }

  template <class T>
  void number(const char* key, T& value, double least, double most) const {
    const json* j = find(key);
    if (!j) return;
    if (!j->is_number()) return wrong(key, "a number", *j);
    const double x = j->get<double>();
    const bool whole = !std::is_integral_v<T> || x == std::floor(x);
    if (!(x >= least && x <= most) || !whole)
      return wrong(key, fmt::format("a {}number of {} to {}", whole ? "" : "whole ", least, most).c_str(), *j);
    if constexpr (std::is_integral_v<T>)
      value = j->get<T>();
    else
      value = x;
  }
  void optional(const char* key, std::optional<double>& value, double least = 0, double most = 1e12) const {
    if (absent(key)) return;
    double x = 0;
    number(key, x, least, most);
    value = x;
  }
  void rate(const char* key, std::optional<BitRate>& value) const {
    std::optional<double> mbit;
    optional(key, mbit, 1e-6, 1e9);
    if (mbit) value = BitRate::from_mbit_per_s(*mbit);
  }
  void duration(const char* key, Duration& value, double unit_s = 1) const {
    double x = 0;
    number(key, x, 0, 1e10);
    value = from_seconds(x * unit_s);
  }
  void duration(const char* key, std::optional<Duration>& value, double unit_s = 1) const {
    if (absent(key)) return;
    Duration d{};
    duration(key, d, unit_s);
    value = d;
  }
  void bytes(const char* key, Bytes& value) const { number(key, value.count, 0, 1e15); }
  void text(const char* key, std::string& value) const {
    const json* j = find(key);
    if (!j) return;
    if (!j->is_string() || j->get_ref<const std::string&>().size() > kTextBytesMax)
      return wrong(key, fmt::format("a text of at most {} bytes", kTextBytesMax).c_str(), *j);
    value = j->get<std::string>();
  }
  void boolean(const char* key, bool& value) const {
    const json* j = find(key);
    if (!j) return;
    if (!j->is_boolean()) return wrong(key, "true or false", *j);
    value = j->get<bool>();
  }
  void texts(const char* key, std::vector<std::string>& value) const {
    const json* j = list(key);
    if (!j) return;
    for (const json& item : *j) {
      if (!item.is_string() || item.get_ref<const std::string&>().size() > kTextBytesMax)
        return wrong(key, "texts", item);
      value.push_back(item.get<std::string>());
    }
  }
  // An element of a fixed set, by its name.
  template <class E>
  void choice(const char* key, E& value, std::initializer_list<E> all) const {
    std::string name;
    text(key, name);
    for (const E each : all)
      if (to_string(each) == name) {
        value = each;
        return;
      }
    wrong(key, "one of its names", json(name));
  }
  Reader section(const char* key) const {
    static const json kEmpty = json::object();
    const json* j = find(key);
    return Reader(j ? *j : kEmpty, place(key), problem_);
  }
  const json* list(const char* key) const {
    const json* j = find(key);
    if (!j) return nullptr;
    if (j->is_array() && j->size() <= kListMax) return j;
    wrong(key, fmt::format("a list of at most {} values", kListMax).c_str(), *j);
    return nullptr;
  }
  bool absent(const char* key) const {
    return !object_.is_object() || !object_.contains(key) || object_.at(key).is_null();
  }
  std::string place(std::string_view key) const {
    if (key.empty()) return path_.empty() ? "the file" : path_;
    return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
  }
  void wrong(const char* key, const char* expected, const json& found) const {
    if (!problem_.empty()) return;
    std::string shown =
        found.is_structured() ? found.type_name() : found.dump(-1, ' ', true, json::error_handler_t::replace);
    if (shown.size() > 60) shown = shown.substr(0, 60) + "...";
    problem_ = fmt::format("{}: expected {}, found {}", place(key), expected, shown);
  }
  const std::string& problem() const { return problem_; }

 private:
  const json* find(const char* key) const {
    if (!object_.is_object()) return nullptr;
    const auto it = object_.find(key);
    if (it != object_.end()) return &*it;
    if (problem_.empty()) problem_ = fmt::format("{}: it is missing", place(key));
    return nullptr;
  }

  const json& object_;
  std::string path_;
  std::string& problem_;
};

bool read_worker(const json& j, std::size_t workers, WorkerId& id) {
  if (!j.is_number_unsigned() || j.get<std::uint64_t>() < 1 || j.get<std::uint64_t>() > workers) return false;
  id = WorkerId{j.get<std::uint64_t>()};
  return true;
}

bool read_chains(const json& j, std::size_t workers, chains::Chains& out) {
  if (!j.is_array() || j.size() > workers) return false;
  for (const json& chain : j) {
    if (!chain.is_array() || chain.empty() || chain.size() > workers) return false;
    auto& ids = out.emplace_back();
    for (const json& id : chain)
      if (!read_worker(id, workers, ids.emplace_back())) return false;
  }
  return true;
}

// Plans of before there were regions have none.
void read_regions(const Reader& r, RegionMap& map) {
  if (r.absent("regions") || r.absent("ways")) return;
  const json *regions = r.list("regions"), *ways = r.list("ways");
  if (!regions || !ways || regions->empty()) return;
  if (regions->size() > chains::kRegionsMax) return r.wrong("regions", "fewer regions", *regions);
  const auto text = [](const json& j, const char* key) {
    return j.is_object() && j.contains(key) && j.at(key).is_string() ? j.at(key).get<std::string>() : std::string();
  };
  const auto number = [&](const std::string& name) {
    return static_cast<std::size_t>(std::find_if(map.regions.begin(), map.regions.end(),
                                                 [&](const Region& region) { return region.name == name; }) -
                                    map.regions.begin());
  };
  for (const json& j : *regions) {
    Region& region = map.regions.emplace_back(Region{text(j, "name"), {}});
    if (region.name.empty() || !j.contains("places") || !j.at("places").is_array())
      return r.wrong("regions", "a name and places", j);
    for (const json& place : j.at("places"))
      if (place.is_string()) region.places.push_back(place.get<std::string>());
  }
  std::string learner;
  r.text("region", learner);
  const std::size_t n = map.regions.size();
  if (number(learner) == n) return r.wrong("region", "one of the regions", json(learner));
  map.ways.learner = static_cast<std::uint32_t>(number(learner));
  map.ways.ways.assign(n, std::vector<chains::RegionWay>(n));
  for (const json& j : *ways) {
    const std::size_t from = number(text(j, "from")), to = number(text(j, "to"));
    if (from == n || to == n) return r.wrong("ways", "from and to of the regions", j);
    chains::RegionWay& way = map.ways.ways[from][to];
    if (const auto rate = j.find("mbit_per_s"); rate != j.end() && !rate->is_null()) {
      if (!rate->is_number() || !(rate->get<double>() > 0)) return r.wrong("ways", "a rate above 0", *rate);
      way.rate = BitRate::from_mbit_per_s(rate->get<double>());
    }
    if (const auto delay = j.find("delay_seconds"); delay != j.end() && !delay->is_null()) {
      if (!delay->is_number() || !(delay->get<double>() >= 0) || delay->get<double>() > 3600)
        return r.wrong("ways", "a delay of up to an hour", *delay);
      way.delay = from_seconds(delay->get<double>());
    }
  }
}

void read_topology(const Reader& r, std::size_t workers, chains::Topology& t) {
  using chains::TopologyPolicy;
  std::string policy;
  r.text("policy", policy);
  if (auto parsed = chains::parse_topology_policy(policy); parsed && *parsed != chains::TopologyPolicy::kAuto)
    t.policy = *parsed;
  else
    r.wrong("policy", "a topology", json(policy));
  r.number("chains_wanted", t.chains_wanted, 1, 1e6);
  const json none = json::array();
  const auto list = [&](const char* key) -> const json& {
    const json* j = r.list(key);
    return j ? *j : none;
  };
  const auto bad = [&](const char* key) { r.wrong(key, "the numbers of its workers", json(key)); };
  if (!read_chains(list("chains"), workers, t.chains)) bad("chains");
  for (const json& stripe : list("further"))
    if (!read_chains(stripe, workers, t.further.emplace_back())) return bad("further");
  for (const json& stripe : list("grafts")) {
    auto& roots = t.grafts.emplace_back();
    if (!stripe.is_array()) return bad("grafts");
    for (const json& pair : stripe) {
      WorkerId first, root;
      if (!pair.is_array() || pair.size() != 2 || !read_worker(pair[0], workers, first) ||
          !read_worker(pair[1], workers, root))
        return bad("grafts");
      roots.emplace(first, root);
    }
  }
  for (const json& id : list("leaves_only"))
    if (!read_worker(id, workers, t.leaves_only.emplace_back())) return bad("leaves_only");
}

void read_request(const Reader& r, PlanRequest& q) {
  r.number("rollouts_per_step", q.pace.rollouts_per_step, 1e-9, 1e12);
  r.number("publish_every", q.pace.publish_every, 1, 1e9);
  r.duration("step_seconds", q.pace.step_time);
  r.number("staleness_budget", q.staleness_budget, 0, 1e9);
  r.number("lookahead", q.lookahead, 0, 1e9);
  r.number("group_size", q.group_size, 1e-9, 1e9);
  r.number("headroom", q.fleet.headroom, 0, 1e6);
  r.duration("run_seconds", q.run_time);
  r.optional("learner_usd_per_hour", q.learner_usd_per_hour);
  r.bytes("delta_bytes", q.delta_bytes);
  r.bytes("full_bytes", q.full_bytes);
  std::optional<BitRate> up;
  r.rate("learner_up_mbit_per_s", up);
  q.learner_up = up.value_or(BitRate{});
  r.rate("worker_cap_mbit_per_s", q.worker_cap);
  if (!r.absent("chunk_bytes")) r.bytes("chunk_bytes", q.chunk);
  r.duration("delay_seconds", q.delay);
  r.duration("install_seconds", q.fleet.install_time_expected);
  r.duration("boot_seconds_max", q.fleet.join_timeout);
  r.number("active_fraction", q.quorum, 0, 1);
  std::string policy;
  r.text("topology", policy);
  if (auto parsed = chains::parse_topology_policy(policy))
    q.topology = *parsed;
  else
    r.wrong("topology", "a topology", json(policy));
  r.number("workers_max", q.fleet.workers_max, 1, 1e6);
  r.optional("budget_usd_per_hour", q.fleet.usd_per_hour_max);
  r.optional("budget_usd", q.fleet.usd_max);
  r.choice("pricing", q.fleet.pricing, {Pricing::kOnDemand, Pricing::kBid});
  r.number("bid_over_min", q.fleet.bid_over_min, 0, 1e6);
  if (!r.absent("per_host_max")) r.number("per_host_max", q.fleet.per_host_max.emplace(), 1, 1e6);
  r.text("provider", q.fleet.provider);
  if (q.fleet.provider.empty()) q.fleet.provider = "none";
  if (!r.absent("gpu_bytes_min")) r.bytes("gpu_bytes_min", q.gpu_memory_min.emplace());
  r.texts("places", q.fleet.places);
  read_regions(r, q.regions);
  r.optional("reliability_min", q.fleet.reliability_min, 0, 1);
  r.duration("duration_days_min", q.fleet.duration_min, 86400);
  r.rate("up_mbit_per_s_min", q.fleet.up_min);
  r.texts("keep", q.keep);
  const Reader a = r.section("assume");
  a.optional("storage_usd_per_hour", q.fleet.assume.storage_usd_per_hour);
  a.optional("upload_usd_per_gb", q.fleet.assume.upload_usd_per_gb);
  a.optional("download_usd_per_gb", q.fleet.assume.download_usd_per_gb);
  a.rate("up_mbit_per_s", q.fleet.assume.up);
  a.rate("down_mbit_per_s", q.fleet.assume.down);
  a.optional("vram_gb", q.fleet.assume.vram_gb);
  a.optional("reliability", q.fleet.assume.reliability, 0, 1);
  a.duration("duration_days", q.fleet.assume.duration, 86400);
}

void read_row(const Reader& r, PlanRow& row) {
  Offer& o = row.offer;
  if (!r.absent("rank")) r.number("rank", row.rank, 1, 1e9);
  r.boolean("chosen", row.chosen);
  r.text("reason", row.reason);
  r.texts("assumed", row.assumed);
  if (!r.absent("worker")) r.number("worker", row.worker.emplace().value, 1, 1e6);
  r.text("offer", o.id);
  r.text("provider", o.provider);
  r.text("host", o.host);
  r.text("owner", o.owner);
  r.text("gpu", o.gpu);
  r.number("gpu_count", o.gpu_count, 1, 1024);
  if (const json* ids = r.list("gpu_ids"))
    for (const json& id : *ids) {
      if (!id.is_number_integer() || id.get<std::int64_t>() < 0 || id.get<std::int64_t>() > 1024)
        return r.wrong("gpu_ids", "numbers of GPUs", id);
      o.gpu_ids.push_back(id.get<int>());
    }
  r.optional("vram_gb", o.vram_gb);
  r.text("place", o.place);
  r.rate("up_mbit_per_s", o.up);
  r.rate("down_mbit_per_s", o.down);
  r.optional("reliability", o.reliability, 0, 1);
  r.duration("duration_days_max", o.duration_max, 86400);
  r.boolean("rentable", o.rentable);
  std::optional<double> rate;
  r.optional("rollouts_per_s", rate, 1e-12);
  o.rollouts_per_s = rate.value_or(0);
  r.choice("rollouts_source", o.rollouts_source,
           {RateSource::kUnknown, RateSource::kMeasured, RateSource::kProfile, RateSource::kDlperf});
  r.optional("rollouts_uncertainty", o.rollouts_uncertainty, 0, 0.95);
  r.text("rollouts_from", o.rollouts_from);
  r.optional("losses_per_hour", row.losses_per_hour);
  r.optional("dlperf", o.dlperf);
  r.optional("on_demand_usd_per_hour", o.gpu_usd_per_hour);
  r.optional("bid_usd_per_hour", o.bid_usd_per_hour);
  r.optional("bid_usd_per_hour_min", o.bid_usd_per_hour_min);
  r.optional("disk_usd_per_hour", o.storage_usd_per_hour);
  r.optional("upload_usd_per_gb", o.upload_usd_per_gb);
  r.optional("download_usd_per_gb", o.download_usd_per_gb);
  r.optional("gpu_usd_per_hour", row.cost.gpu);
  r.optional("storage_usd_per_hour", row.cost.storage);
  r.optional("bandwidth_usd_per_hour", row.cost.bandwidth);
  if (row.chosen) r.number("cumulative_rollouts_per_s", row.cumulative_rollouts_per_s, 0, 1e12);
}

// What must hold between the parts.
std::string contradiction(const Plan& plan) {
  std::size_t chosen = 0;
  for (const PlanRow& row : plan.rows) {
    if (row.chosen != row.worker.has_value())
      return fmt::format("offer '{}': a rented offer has a worker, others have none", row.offer.id);
    if (!row.chosen) continue;
    if (row.worker->value != ++chosen) return fmt::format("offer '{}': expected worker {}", row.offer.id, chosen);
    if (!(row.offer.rollouts_per_s > 0) || !row.cost.usd_per_hour())
      return fmt::format("offer '{}': it is rented without a known throughput and price", row.offer.id);
  }
  if (chosen == 0) return "no offer is rented";
  std::vector<WorkerId> workers;
  for (std::size_t w = 1; w <= chosen; ++w) workers.push_back(WorkerId{w});
  if (const Status valid = chains::validate(plan.topology, workers); !valid) return "topology: " + valid.error().detail;
  return "";
}

}  // namespace

nlohmann::json Plan::to_json() const {
  const std::size_t written = std::min(rows.size(), std::max(kRowsWritten, topology.size()));
  json offers = json::array(), next = json::array();
  for (std::size_t i = 0; i < written; ++i) offers.push_back(row_json(rows[i]));
  // Others stand behind the rented by rank, as those on standby do.
  for (std::size_t i = 0; i < standby.size() && i < written - topology.size(); ++i) next.push_back(standby[i]);
  const std::optional<Spend> fleet = usd_fleet(), run = usd_run();
  const PlanRequest& q = request;
  std::optional<double> gpu_gb;
  if (q.gpu_memory_min) gpu_gb = static_cast<double>(q.gpu_memory_min->count) / 1e9;
  return {
      {"schema_version", kSchemaVersion},
      {"feasible", true},
      {"market",
       {{"source", market.source}, {"format", market.format}, {"recorded_unix_s", or_null(market.recorded_unix_s)}}},
      {"header",
       {{"rollouts_per_step", q.pace.rollouts_per_step},
        {"publish_every", q.pace.publish_every},
        {"step_seconds", seconds(q.pace.step_time)},
        {"staleness_budget", q.staleness_budget},
        {"lookahead", q.lookahead},
        {"group_size", q.group_size},
        {"headroom", q.fleet.headroom},
        {"run_seconds", or_null(q.run_time)},
        {"learner_usd_per_hour", or_null(q.learner_usd_per_hour)},
        {"delta_bytes", q.delta_bytes.count},
        {"full_bytes", q.full_bytes.count},
        {"learner_up_mbit_per_s", tidy(q.learner_up.mbit_per_s())},
        {"worker_cap_mbit_per_s", or_null(q.worker_cap)},
        {"chunk_bytes", q.chunk.count > 0 ? json(q.chunk.count) : json()},
        {"t_b_chunk_bytes", chunk.count},
        {"delay_seconds", seconds(q.delay)},
        {"install_seconds", seconds(q.fleet.install_time_expected)},
        {"boot_seconds_max", seconds(q.fleet.join_timeout)},
        {"active_fraction", q.quorum},
        {"topology", chains::to_string(q.topology)},
        {"workers_max", q.fleet.workers_max},
        {"budget_usd_per_hour", or_null(q.fleet.usd_per_hour_max)},
        {"budget_usd", or_null(q.fleet.usd_max)},
        {"pricing", to_string(q.fleet.pricing)},
        {"bid_over_min", q.fleet.bid_over_min},
        {"per_host_max", or_null(q.fleet.per_host_max)},
        {"provider", q.fleet.joined_by_hand() ? "" : q.fleet.provider},
        {"gpu_bytes_min", or_null(q.gpu_memory_min)},
        {"gpu_gb_min", or_null(gpu_gb)},
        {"places", q.fleet.places},
        {"region", q.regions.regions.empty() ? json() : json(q.regions.regions[q.regions.ways.learner].name)},
        {"regions", regions_json(q.regions)},
        {"ways", ways_json(q.regions)},
        {"reliability_min", or_null(q.fleet.reliability_min)},
        {"duration_days_min", or_null(days_of(q.fleet.duration_min))},
        {"up_mbit_per_s_min", or_null(q.fleet.up_min)},
        {"assume", assume_json(q.fleet.assume)},
        {"keep", q.keep},
        {"t_b_seconds", seconds(broadcast_time)},
        {"t_b_last_seconds", seconds(broadcast_time_last)},
        {"lower_bound_seconds", seconds(broadcast_lower_bound)},
        {"required_rollouts_per_s", target.required_rollouts_per_s},
        {"target_rollouts_per_s", target.provisioned_rollouts_per_s},
        {"settled", settled}}},
      {"totals",
       {{"workers", topology.size()},
        {"rollouts_per_s", rollouts_per_s},
        {"rollouts_per_s_low", rollouts_range().low},
        {"rollouts_per_s_high", rollouts_range().high},
        {"usd_per_hour_low", usd_per_hour.low},
        {"usd_per_hour", usd_per_hour.expected},
        {"usd_per_hour_high", usd_per_hour.high},
        {"usd_per_1k_rollouts", 1000 * usd_per_hour.expected / (3600 * rollouts_per_s)},
        {"usd_joining", usd_joining},
        {"losses", replacing.losses},
        {"usd_replacing_low", replacing.usd.low},
        {"usd_replacing", replacing.usd.expected},
        {"usd_replacing_high", replacing.usd.high},
        {"fleet_usd_low", spend_json(fleet, "low")},
        {"fleet_usd", spend_json(fleet, "expected")},
        {"fleet_usd_high", spend_json(fleet, "high")},
        {"run_usd_low", spend_json(run, "low")},
        {"run_usd", spend_json(run, "expected")},
        {"run_usd_high", spend_json(run, "high")}}},
      {"search",
       {{"method", method},
        {"set_usd_per_hour", set_usd_per_hour},
        {"greedy_usd_per_hour", greedy_usd_per_hour},
        {"lp_bound_usd_per_hour", lp_bound_usd_per_hour},
        {"exact_usd_per_hour", or_null(exact_usd_per_hour)}}},
      {"staleness",
       {{"worst", staleness_worst},
        {"bound_by", staleness_bound_by(*this)},
        {"needed", staleness_needed},
        {"budget", q.staleness_budget}}},
      {"offers", offers},
      {"offers_left_out", rows_left_out + rows.size() - written},
      {"standby", next},
      {"topology", topology_json(topology)},
      {"notes", notes}};
}

Result<Plan> Plan::from_json(const nlohmann::json& j) {
  std::string problem;
  const auto invalid = [&] { return fail(Code::kInvalid, "read plan", "{}", problem); };
  const Reader root(j, "", problem);
  int version = 0;
  root.number("schema_version", version, 0, 1e6);
  if (problem.empty() && version != kSchemaVersion)
    problem = fmt::format("schema_version: expected {}, found {}; make the plan again", kSchemaVersion, version);
  bool feasible = false;
  root.boolean("feasible", feasible);
  if (problem.empty() && !feasible) problem = "feasible: it says that there is no plan";
  if (!problem.empty()) return invalid();

  Plan plan;
  const Reader market = root.section("market");
  market.text("source", plan.market.source);
  market.text("format", plan.market.format);
  market.optional("recorded_unix_s", plan.market.recorded_unix_s);
  const Reader header = root.section("header");
  read_request(header, plan.request);
  header.duration("t_b_seconds", plan.broadcast_time);
  header.duration("t_b_last_seconds", plan.broadcast_time_last);
  header.duration("lower_bound_seconds", plan.broadcast_lower_bound);
  if (!header.absent("t_b_chunk_bytes")) header.bytes("t_b_chunk_bytes", plan.chunk);
  header.number("required_rollouts_per_s", plan.target.required_rollouts_per_s, 0, 1e12);
  header.number("target_rollouts_per_s", plan.target.provisioned_rollouts_per_s, 0, 1e12);
  header.boolean("settled", plan.settled);
  const Reader totals = root.section("totals");
  totals.number("rollouts_per_s", plan.rollouts_per_s, 1e-12, 1e12);
  totals.number("usd_per_hour_low", plan.usd_per_hour.low, 0, 1e12);
  totals.number("usd_per_hour", plan.usd_per_hour.expected, 0, 1e12);
  totals.number("usd_per_hour_high", plan.usd_per_hour.high, 0, 1e12);
  totals.number("usd_joining", plan.usd_joining, 0, 1e12);
  totals.number("losses", plan.replacing.losses, 0, 1e12);
  totals.number("usd_replacing_low", plan.replacing.usd.low, 0, 1e12);
  totals.number("usd_replacing", plan.replacing.usd.expected, 0, 1e12);
  totals.number("usd_replacing_high", plan.replacing.usd.high, 0, 1e12);
  const Reader search = root.section("search");
  search.text("method", plan.method);
  search.number("set_usd_per_hour", plan.set_usd_per_hour, 0, 1e12);
  search.number("greedy_usd_per_hour", plan.greedy_usd_per_hour, 0, 1e12);
  search.number("lp_bound_usd_per_hour", plan.lp_bound_usd_per_hour, 0, 1e12);
  search.optional("exact_usd_per_hour", plan.exact_usd_per_hour);
  const Reader staleness = root.section("staleness");
  staleness.number("worst", plan.staleness_worst, 0, 2e9);
  staleness.number("needed", plan.staleness_needed, 0, 2e9);
  if (const json* offers = root.list("offers"))
    for (std::size_t i = 0; i < offers->size() && problem.empty(); ++i)
      read_row(Reader((*offers)[i], fmt::format("offers[{}]", i), problem), plan.rows.emplace_back());
  root.number("offers_left_out", plan.rows_left_out, 0, 1e9);
  root.texts("standby", plan.standby);
  root.texts("notes", plan.notes);
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
