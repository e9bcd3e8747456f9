// The topology and the regions of a plan's JSON.
#include <algorithm>
#include <map>

#include "chains/fleet_graph.hpp"
#include "provisioner/plan_fields.hpp"

namespace echoline::provisioner {
namespace {

using nlohmann::json;

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

// The links between regions (network.ways): one object for each pair with known properties.
json ways_json(const RegionMap& map) {
  json all = json::array();
  for (std::size_t from = 0; from < map.graph.links.size(); ++from)
    for (std::size_t to = 0; to < map.graph.links.size(); ++to) {
      const chains::RegionLink& region_link = map.graph.links[from][to];
      const bool limited = std::isfinite(region_link.rate.bits_per_s);
      if (!limited && !region_link.delay) continue;
      all.push_back({{"from", map.regions[from].name},
                     {"to", map.regions[to].name},
                     {"mbit_per_s", limited ? json(rounded(region_link.rate.mbit_per_s())) : json()},
                     {"delay_seconds", region_link.delay ? json(seconds(*region_link.delay)) : json()}});
    }
  return all;
}

// Reads a worker's number, 1 to worker_count. Returns false if it is wrong.
bool read_worker(const json& j, std::size_t worker_count, WorkerId& id) {
  if (!j.is_number_unsigned() || j.get<std::uint64_t>() < 1 || j.get<std::uint64_t>() > worker_count) return false;
  id = WorkerId{j.get<std::uint64_t>()};
  return true;
}

bool read_chains(const json& j, std::size_t worker_count, chains::Chains& out) {
  if (!j.is_array() || j.size() > worker_count) return false;
  for (const json& chain : j) {
    if (!chain.is_array() || chain.empty() || chain.size() > worker_count) return false;
    auto& ids = out.emplace_back();
    for (const json& id : chain)
      if (!read_worker(id, worker_count, ids.emplace_back())) return false;
  }
  return true;
}

}  // namespace

// A stripe is a part of each publication with its own chains of workers. `grafts`, by stripe: pairs of the first worker
// of a chain and its parent in another chain.
json topology_json(const chains::Topology& topology) {
  json further = json::array(), grafts = json::array(), leaves = json::array();
  for (const chains::Chains& stripe : topology.further_stripes) further.push_back(chains_json(stripe));
  for (const auto& stripe : topology.grafts) {
    json pairs = json::array();
    const std::map<WorkerId, WorkerId> sorted(stripe.begin(), stripe.end());  // so that equal plans give equal texts
    for (const auto& [first, parent] : sorted) pairs.push_back({first.value, parent.value});
    grafts.push_back(std::move(pairs));
  }
  for (const WorkerId id : topology.leaves_only) leaves.push_back(id.value);
  return {{"policy", chains::to_string(topology.policy)},
          {"chains_wanted", topology.chains_wanted},
          {"chains", chains_json(topology.chains)},
          {"further", further},
          {"grafts", grafts},
          {"leaves_only", leaves},
          {"stripes", topology.stripes()},
          {"depth", topology.depth()}};
}

void write_regions(json& header, const RegionMap& map) {
  // "region" is the learner's.
  header["region"] = map.regions.empty() ? json() : json(map.regions[map.graph.learner_region].name);
  header["regions"] = regions_json(map);
  header["ways"] = ways_json(map);
}

// Plans made before regions existed have none.
void read_regions(const PlanReader& reader, RegionMap& map) {
  if (reader.is_absent("regions") || reader.is_absent("ways")) return;
  const json *regions = reader.find_list("regions"), *ways = reader.find_list("ways");
  if (!regions || !ways || regions->empty()) return;
  if (regions->size() > chains::kRegionsMax) return reader.record_problem("regions", "fewer regions", *regions);
  const auto text = [](const json& j, const char* key) {
    return j.is_object() && j.contains(key) && j.at(key).is_string() ? j.at(key).get<std::string>() : std::string();
  };
  const auto region_index = [&](const std::string& name) {
    return static_cast<std::size_t>(std::find_if(map.regions.begin(), map.regions.end(),
                                                 [&](const Region& region) { return region.name == name; }) -
                                    map.regions.begin());
  };
  for (const json& j : *regions) {
    Region& region = map.regions.emplace_back(Region{text(j, "name"), {}});
    if (region.name.empty() || !j.contains("places") || !j.at("places").is_array())
      return reader.record_problem("regions", "a name and places", j);
    for (const json& place : j.at("places"))
      if (place.is_string()) region.places.push_back(place.get<std::string>());
  }
  std::string learner;
  reader.text("region", learner);
  const std::size_t region_count = map.regions.size();  // which region_index() returns for an unknown name
  if (region_index(learner) == region_count)
    return reader.record_problem("region", "one of the regions", json(learner));
  map.graph.learner_region = static_cast<std::uint32_t>(region_index(learner));
  map.graph.links.assign(region_count, std::vector<chains::RegionLink>(region_count));
  for (const json& j : *ways) {
    const std::size_t from = region_index(text(j, "from")), to = region_index(text(j, "to"));
    if (from == region_count || to == region_count)
      return reader.record_problem("ways", "from and to of the regions", j);
    chains::RegionLink& region_link = map.graph.links[from][to];
    if (const auto rate = j.find("mbit_per_s"); rate != j.end() && !rate->is_null()) {
      if (!rate->is_number() || !(rate->get<double>() > 0))
        return reader.record_problem("ways", "a rate above 0", *rate);
      region_link.rate = BitRate::from_mbit_per_s(rate->get<double>());
    }
    if (const auto delay = j.find("delay_seconds"); delay != j.end() && !delay->is_null()) {
      if (!delay->is_number() || !(delay->get<double>() >= 0) || delay->get<double>() > 3600)
        return reader.record_problem("ways", "a delay of up to an hour", *delay);
      region_link.delay = from_seconds(delay->get<double>());
    }
  }
}

void read_topology(const PlanReader& reader, std::size_t worker_count, chains::Topology& topology) {
  using chains::TopologyPolicy;
  std::string policy;
  reader.text("policy", policy);
  if (auto parsed = chains::parse_topology_policy(policy); parsed && *parsed != chains::TopologyPolicy::kAuto)
    topology.policy = *parsed;
  else
    reader.record_problem("policy", "a topology", json(policy));
  reader.number("chains_wanted", topology.chains_wanted, 1, 1e6);
  const json empty_list = json::array();
  const auto list = [&](const char* key) -> const json& {
    const json* values = reader.find_list(key);
    return values ? *values : empty_list;
  };
  const auto report_wrong_workers = [&](const char* key) {
    reader.record_problem(key, fmt::format("numbers of workers, 1 to {}", worker_count), json(key));
  };
  if (!read_chains(list("chains"), worker_count, topology.chains)) report_wrong_workers("chains");
  for (const json& stripe : list("further"))
    if (!read_chains(stripe, worker_count, topology.further_stripes.emplace_back()))
      return report_wrong_workers("further");
  for (const json& stripe : list("grafts")) {
    auto& parent_by_first = topology.grafts.emplace_back();
    if (!stripe.is_array()) return report_wrong_workers("grafts");
    for (const json& pair : stripe) {
      WorkerId first, parent;
      if (!pair.is_array() || pair.size() != 2 || !read_worker(pair[0], worker_count, first) ||
          !read_worker(pair[1], worker_count, parent))
        return report_wrong_workers("grafts");
      parent_by_first.emplace(first, parent);
    }
  }
  for (const json& id : list("leaves_only"))
    if (!read_worker(id, worker_count, topology.leaves_only.emplace_back())) return report_wrong_workers("leaves_only");
}

}  // namespace echoline::provisioner
