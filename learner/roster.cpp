// The state of every worker. The overlay, the RolloutDesk, the fleet and the status page use it.
#include "learner/roster.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.hpp"
#include "chains/fleet_graph.hpp"
#include "learner/planning.hpp"
#include "provisioner/offer_links.hpp"

namespace echoline::learner {

Roster::Roster(const RunConfig& config, const provisioner::Plan& plan) : config_(config) {
  for (const provisioner::PlanRow& row : plan.rows) planned_.emplace(row.offer.id, &row.offer);
}

void Roster::add_rented_offer(const provisioner::Offer& offer) {
  const std::lock_guard lock(mutex_);
  rented_[offer.id] = offer;
}

// The offer from which a worker was rented; null for a worker that joined by hand. The caller holds mutex_. Found by
// maps, because a market has many thousand offers.
const provisioner::Offer* Roster::offer_named(const std::string& name) const {
  if (const auto rented = rented_.find(name); rented != rented_.end()) return &rented->second;
  const auto planned = planned_.find(name);
  return planned == planned_.end() ? nullptr : planned->second;
}

std::uint32_t Roster::region_of(const std::string& name, const std::string& place) const {
  if (!place.empty()) return config_.paths.regions.of(place);
  const std::lock_guard lock(mutex_);
  const provisioner::Offer* offer = offer_named(name);
  return config_.paths.regions.of(offer ? offer->place : std::string());
}

overlay::LinkLimits Roster::expected_links(const std::string& name) const {
  const std::lock_guard lock(mutex_);
  const provisioner::Offer* offer = offer_named(name);
  if (!offer) return {};
  const auto [up, down] = provisioner::links_of(*offer, config_.fleet, config_.paths);
  const provisioner::Assumptions& assume = config_.fleet.assume;
  overlay::LinkLimits expected;
  // Otherwise links_of() returns a default, and the worker is not held to that.
  if (offer->up || assume.up || config_.paths.worker_rate) expected.up = up;
  if (offer->down || assume.down || config_.paths.worker_rate) expected.down = down;
  return expected;
}

void Roster::on_presence_change(const PresenceChange& change, TimePoint now) {
  const std::lock_guard lock(mutex_);
  WorkerEntry& entry = workers_[change.worker];
  if (change.kind == PresenceChange::Kind::kAway) entry.presence = Presence::kAway;
  if (change.kind == PresenceChange::Kind::kLost) entry.presence = Presence::kLost;
  if (!change.has_joined()) return;
  if (change.kind == PresenceChange::Kind::kBack) meters_[change.worker].record_return(now);
  entry.presence = Presence::kPresent;
  entry.id = change.worker;
  entry.offer = change.offer;
  entry.region = change.region;
  if (const auto& regions = config_.paths.regions.regions; !regions.empty())
    entry.region_name = regions[entry.region].name;
  if (const provisioner::Offer* offer = offer_named(entry.offer)) entry.price_usd_per_hour = offer->usd_per_hour();
  drawn_topology_.reset();  // the next drawing shows the worker's name
}

void Roster::on_node_joined(const overlay::MemberInfo& node) {
  const std::lock_guard lock(mutex_);
  NodeEntry& entry = nodes_[node.id];
  entry.name = printable(node.name);
  entry.at = overlay::to_text(node.data);
  entry.presence = Presence::kPresent;
  // A node that states no uplink is planned with the learner's.
  entry.up = node.up.value_or(learner_upload_rate(config_));
  drawn_topology_.reset();
}

bool Roster::on_node_gone(WorkerId id, Presence presence) {
  const std::lock_guard lock(mutex_);
  const auto node = nodes_.find(id);
  if (node == nodes_.end()) return false;
  node->second.presence = presence;
  return true;
}

bool Roster::is_node(WorkerId id) const {
  const std::lock_guard lock(mutex_);
  return nodes_.contains(id);
}

BitRate Roster::nodes_up() const {
  const std::lock_guard lock(mutex_);
  BitRate total{0};
  for (const auto& [id, node] : nodes_)
    if (node.presence == Presence::kPresent) total.bits_per_s += node.up.bits_per_s;
  return total;
}

nlohmann::json Roster::nodes() const {
  const std::lock_guard lock(mutex_);
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [id, node] : nodes_)
    rows.push_back({{"node", id.value},
                    {"name", node.name},
                    {"at", node.at},
                    {"present", node.presence == Presence::kPresent},
                    {"version", node.version.value},
                    {"bytes_in", node.bytes_in},
                    {"bytes_forwarded", node.bytes_forwarded}});
  return rows;
}

void Roster::count_trouble(WorkerId id) {
  const std::lock_guard lock(mutex_);
  if (nodes_.contains(id)) return;
  ++workers_[id].trouble_events;
}

void Roster::record_acknowledgement(WorkerId id, Version version, const overlay::Digest& digest) {
  const std::lock_guard lock(mutex_);
  if (const auto node = nodes_.find(id); node != nodes_.end()) {
    node->second.version = version;
    return;
  }
  workers_[id].version = version;
  workers_[id].digest = digest;
}

std::optional<Duration> Roster::install_time() const {
  if (config_.rollout.on_new_policy == schema::ON_NEW_POLICY_FINISH) return std::nullopt;
  const std::lock_guard lock(mutex_);
  std::vector<double> means_s;
  for (const auto& [id, entry] : workers_)
    if (entry.presence == Presence::kPresent && entry.install_seconds_mean)
      means_s.push_back(*entry.install_seconds_mean);
  const auto median_s = replay_buffer::median(std::move(means_s));
  return median_s ? std::optional(from_seconds(*median_s)) : std::nullopt;
}

WorkerMeter::Progress Roster::take_heartbeat(WorkerId id, const schema::Vitals& vitals, TimePoint now) {
  const std::lock_guard lock(mutex_);
  WorkerEntry& entry = workers_[id];
  entry.memory_bytes = vitals.resident_bytes();
  entry.heap_bytes = vitals.heap_bytes();
  if (vitals.policies() > 0) entry.install_seconds_mean = vitals.install_s() / static_cast<double>(vitals.policies());
  return meters_[id].take_heartbeat(vitals, now);
}

void Roster::record_accepted(WorkerId id, std::uint64_t rollouts, double lease_seconds) {
  const std::lock_guard lock(mutex_);
  workers_[id].rollouts += rollouts;
  meters_[id].record_accepted(rollouts, lease_seconds);
}

void Roster::record_turned_away(WorkerId id) {
  const std::lock_guard lock(mutex_);
  workers_.try_emplace(id);
  meters_[id].record_turned_away();
}

void Roster::record_without_work(WorkerId id, double seconds) {
  const std::lock_guard lock(mutex_);
  workers_.try_emplace(id);
  meters_[id].record_without_work(seconds);
}

std::optional<std::string> Roster::refresh(const overlay::LearnerStats& stats) {
  const std::lock_guard lock(mutex_);
  floods_ = stats.floods;
  for (const overlay::WorkerView& view : stats.workers) {
    if (const auto node = nodes_.find(view.info.id); node != nodes_.end()) {
      node->second.bytes_in = view.bytes_in.count;
      node->second.bytes_forwarded = view.bytes_forwarded.count;
      continue;
    }
    WorkerEntry& entry = workers_[view.info.id];
    entry.bytes_in = view.bytes_in.count;
    entry.bytes_forwarded = view.bytes_forwarded.count;
    entry.quarantined = view.quarantined;
    entry.delay = view.delay.value_or(Duration{});
  }
  topology_summary_ = stats.topology.to_short_text();
  const auto seeds = stats.topology.children_of(kLearnerId);
  seeds_ = {seeds.begin(), seeds.end()};
  if (drawn_topology_ == stats.topology) return std::nullopt;  // drawing a large fleet takes time
  drawn_topology_ = stats.topology;
  return chains::to_dot(stats.topology, [&](WorkerId id) {
    if (const auto node = nodes_.find(id); node != nodes_.end()) return node->second.name;
    return id == kLearnerId ? std::string() : workers_[id].offer;
  });
}

bool Roster::all_present_have(Version version) const {
  const std::lock_guard lock(mutex_);
  return std::all_of(workers_.begin(), workers_.end(), [&](const auto& worker) {
    return worker.second.presence != Presence::kPresent || worker.second.version == version;
  });
}

std::vector<chains::WorkerLink> Roster::links_of(std::span<const WorkerId> workers) const {
  const std::lock_guard lock(mutex_);
  std::vector<chains::WorkerLink> links;
  for (const WorkerId id : workers) {
    const auto found = workers_.find(id);
    const WorkerEntry& entry = found == workers_.end() ? WorkerEntry{} : found->second;
    const provisioner::Offer* offer = offer_named(entry.offer);
    const auto [up, down] = provisioner::links_of(offer ? *offer : provisioner::Offer{}, config_.fleet, config_.paths);
    links.push_back({.id = id, .up = up, .down = down, .delay = entry.delay, .region = entry.region});
  }
  return links;
}

std::vector<WorkerEntry> Roster::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<WorkerEntry> copies;
  for (const auto& [id, entry] : workers_) copies.push_back(entry);
  return copies;
}

nlohmann::json Roster::status() const {
  const std::lock_guard lock(mutex_);
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& [id, entry] : workers_) {
    const auto meter = meters_.find(id);
    const WorkerMeter::Progress total = meter == meters_.end() ? WorkerMeter::Progress{} : meter->second.total();
    const provisioner::Offer* offer = offer_named(entry.offer);
    rows.push_back(worker_status(entry, total.busy_s > 0 ? std::optional(total.rollouts / total.busy_s) : std::nullopt,
                                 offer ? std::optional(offer->rollouts_per_s) : std::nullopt, seeds_.contains(id)));
  }
  return rows;
}

std::string Roster::topology_summary() const {
  const std::lock_guard lock(mutex_);
  return topology_summary_;
}

std::uint64_t Roster::floods() const {
  const std::lock_guard lock(mutex_);
  return floods_;
}

void Roster::check() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [id, entry] : workers_)  // an entry has its id and offer once the worker has joined
    ECHO_CHECK(entry.id == id || entry.offer.empty(), "worker {} is entered as {}", id, entry.id);
  for (const auto& [id, meter] : meters_)
    ECHO_CHECK(workers_.contains(id), "worker {} is measured and not entered", id);
}

}  // namespace echoline::learner
