// Runs a BroadcastScenario for `echoline sim` and the tests.
#include "sim/broadcast_scenario.hpp"

#include <algorithm>
#include <cmath>

#include "chains/broadcast_model.hpp"
#include "chains/sources.hpp"
#include "sim/fleet.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

constexpr Duration kJoinInterval = std::chrono::microseconds(500);        // between the starts of two workers
constexpr Duration kJoinTimeMax = std::chrono::seconds(60);               // after the start of the last worker
constexpr Duration kReportCheckInterval = std::chrono::milliseconds(10);  // of checks for the learner's report
constexpr int kHeartbeatsPerTimeout = 6;  // a worker is away after this many missing heartbeats
constexpr BitRate kUnlimitedRate{1e12};   // stands for a link without a limit in predictions

// Simulates a fleet through one BroadcastScenario and collects the result.
class BroadcastSimulation final : public FleetObserver {
 public:
  explicit BroadcastSimulation(const BroadcastScenario& scenario)
      : scenario_(scenario), world_(world_options(scenario)), fleet_(world_, fleet_options(scenario)) {
    fleet_.set_observer(this);
  }
  Result<BroadcastResult> run();

  void on_delivered(std::size_t worker, const act::DeliverPublication& delivery) override;

 private:
  static WorldOptions world_options(const BroadcastScenario& scenario);
  FleetOptions fleet_options(const BroadcastScenario& scenario) const;
  bool is_node(std::size_t i) const { return i >= scenario_.workers && i < scenario_.workers + scenario_.nodes; }
  LinkLimits link_of(std::size_t i) const {
    if (is_node(i)) return {.up = scenario_.node_up, .down = {}};
    return i < scenario_.worker_links.size() ? scenario_.worker_links[i] : scenario_.worker_link;
  }
  std::uint32_t region_of(std::size_t i) const {
    return i < scenario_.worker_regions.size() ? scenario_.worker_regions[i] : 0;
  }
  void add_worker();
  void publish(std::size_t index);
  bool is_alive(std::size_t i) const { return world_.is_alive(fleet_.worker(i).host); }
  bool has_installed(std::size_t i, Version version) const {  // this version or a newer one
    const auto& installed = fleet_.worker(i).installed;
    return installed && installed->version >= version;
  }
  bool all_joined() const;
  bool live_workers_have(Version version) const;
  Status check_scenario() const;
  void choose_poisoners();
  void replace_forwarding_worker();
  void collect_results(TimePoint start);
  Status compute_predictions();

  BroadcastScenario scenario_;
  World world_;
  Fleet fleet_;
  chains::Topology first_topology_;  // at the first publication
  std::vector<TimePoint> published_at_;
  std::map<std::size_t, MaliciousRewriter*> poisoners_;  // by worker; owned by the world
  std::string error_;                                    // describes a wrong delivery; empty: there was none
  BroadcastResult result_;
};

WorldOptions BroadcastSimulation::world_options(const BroadcastScenario& scenario) {
  WorldOptions options;
  options.seed = scenario.seed;
  options.delay = scenario.delay;
  options.jitter = scenario.jitter;
  options.regions = scenario.regions;
  return options;
}

FleetOptions BroadcastSimulation::fleet_options(const BroadcastScenario& scenario) const {
  FleetOptions options;
  if (scenario.links_offered)
    options.links_of = [this](const MemberInfo& info) {
      for (std::size_t i = 0; i < fleet_.worker_count(); ++i)
        if (fleet_.worker(i).id() == info.id) return link_of(i);
      return LinkLimits{};
    };
  options.seed = scenario.seed;
  const LinkLimits limits{.up = scenario.learner_up, .down = {}};
  if (scenario.cores_limit_rate)
    options.learner.limits = limits;
  else
    options.learner.link = {.up = limits.up, .down = limits.down};
  options.learner.policy = scenario.topology;
  options.learner.chooses_policy = scenario.chooses_topology;
  options.learner.chain_rate = scenario.chain_rate;
  // The learner then always plans as many whole chains as its true uplink can feed, at least one.
  const double whole_chains = std::floor(scenario.learner_up.bits_per_s / scenario.chain_rate.bits_per_s);
  options.learner.uplink_min = BitRate{scenario.chain_rate.bits_per_s * std::max(1.0, whole_chains)};
  options.learner.heartbeat = scenario.heartbeat;
  options.learner.network.heartbeat_timeout = kHeartbeatsPerTimeout * scenario.heartbeat;
  options.learner.network.quorum = scenario.quorum;
  if (scenario.regions_known) options.learner.regions = scenario.regions;
  options.learner.store = scenario.learner_store;
  options.learner.chunk_bytes = static_cast<std::uint32_t>(scenario.chunk.count);
  options.learner.durable = false;  // it never restarts here
  options.learner.snapshot_bytes = scenario.payload.count;
  options.learner.snapshot_encode_time = {};  // only transfers are measured
  return options;
}

void BroadcastSimulation::add_worker() {
  WorkerOptions options;
  const LinkLimits limits = link_of(fleet_.worker_count());
  if (scenario_.cores_limit_rate)
    options.limits = limits;
  else
    options.link = {.up = limits.up, .down = limits.down};
  options.region = region_of(fleet_.worker_count());
  options.is_node = is_node(fleet_.worker_count());
  options.enrols = options.is_node;  // only a join token makes a node
  options.store.memory_max = scenario_.worker_store;
  options.install_time = {};
  fleet_.start_worker(fleet_.add_worker(options));
}

void BroadcastSimulation::publish(std::size_t index) {
  published_at_.push_back(world_.now());
  result_.publications.push_back({.version = Version{index}, .t_b = {}, .completions = {}});
  if (index == 0 && fleet_.learner()) first_topology_ = fleet_.learner()->topology();
  PublishSpec spec;
  const bool is_snapshot = index == 0 || scenario_.delta.count == 0;
  if (!is_snapshot) spec.base = Version{index - 1};
  spec.bytes = is_snapshot ? scenario_.payload.count : scenario_.delta.count;
  fleet_.publish(spec);
}

void BroadcastSimulation::on_delivered(std::size_t worker, const act::DeliverPublication& delivery) {
  const Publication& publication = delivery.publication;
  result_.chunks_delivered += publication.payload.pieces().size();
  if (!fleet_.published_content().matches({publication.version, publication.base}, publication.policy_digest,
                                          publication.payload.pieces()))
    error_ = fmt::format("worker {} received wrong bytes for version {}", worker, publication.version);
}

bool BroadcastSimulation::all_joined() const {
  for (std::size_t i = 0; i < fleet_.worker_count(); ++i)
    if (!fleet_.worker(i).joined) return false;
  return true;
}

bool BroadcastSimulation::live_workers_have(Version version) const {
  // Workers that joined last usually install last, so a search from the end finds a missing one early.
  for (std::size_t i = fleet_.worker_count(); i-- > 0;)
    if (is_alive(i) && !has_installed(i, version)) return false;
  return true;
}

// Replaces a random forwarding worker, and schedules the next replacement.
void BroadcastSimulation::replace_forwarding_worker() {
  if (published_at_.size() >= scenario_.publications) return;
  world_.run_at(world_.now() + *scenario_.replace_every, [this] { replace_forwarding_worker(); });
  if (!fleet_.learner()) return;
  const chains::Topology topology = fleet_.learner()->topology();
  std::vector<std::size_t> forwarders;
  for (const WorkerId id : topology.workers())
    if (!topology.children_of(id).empty() && is_alive(*fleet_.worker_with_id(id)))
      forwarders.push_back(*fleet_.worker_with_id(id));
  if (forwarders.empty()) return;
  fleet_.kill_worker(forwarders[world_.random().below(forwarders.size())], scenario_.replacement_death);
  ++result_.workers_replaced;
  add_worker();
}

// Makes `poisoners` workers malicious: first the head of each chain, then the second worker of each, and so on. The
// last worker of a chain forwards nothing, so it is left out.
void BroadcastSimulation::choose_poisoners() {
  const chains::Topology topology = fleet_.learner()->topology();
  for (std::size_t position = 0; poisoners_.size() < scenario_.poisoners && position + 1 < topology.size(); ++position)
    for (const auto& chain : topology.chains) {
      if (poisoners_.size() == scenario_.poisoners || position + 1 >= chain.size()) continue;
      const std::size_t worker = *fleet_.worker_with_id(chain[position]);
      MaliceOptions options;
      options.flip_share = scenario_.poisoned_share;
      auto rewriter = std::make_unique<MaliciousRewriter>(options, scenario_.seed, worker);
      poisoners_[worker] = rewriter.get();
      world_.set_rewriter(fleet_.worker(worker).host, std::move(rewriter));
    }
}

Status BroadcastSimulation::check_scenario() const {
  constexpr std::string_view kSimulateBroadcast = "simulate broadcast";
  if (scenario_.workers < 1) return fail(Code::kInvalid, kSimulateBroadcast, "at least one worker is needed");
  if (scenario_.nodes > 0 && !scenario_.cores_limit_rate)
    return fail(Code::kInvalid, kSimulateBroadcast, "nodes need cores that limit their own rate");
  if (scenario_.publications < 1) return fail(Code::kInvalid, kSimulateBroadcast, "at least one publication is needed");
  if (!(scenario_.learner_up.bits_per_s > 0) || !(scenario_.chain_rate.bits_per_s > 0))
    return fail(Code::kInvalid, kSimulateBroadcast, "rates must be positive");
  if (scenario_.chunk.count < kChunkBytesMin || scenario_.chunk.count > kChunkBytesMax)
    return fail(Code::kInvalid, kSimulateBroadcast, "expected chunks of {} to {} bytes, found {}", kChunkBytesMin,
                kChunkBytesMax, scenario_.chunk.count);
  const std::size_t members = scenario_.workers + scenario_.nodes + scenario_.late_joins.size();
  for (const WorkerKill& kill : scenario_.kills)
    if (kill.worker >= members)
      return fail(Code::kInvalid, kSimulateBroadcast, "worker {} should be killed, but there are only {}", kill.worker,
                  members);
  return ok();
}

Result<BroadcastResult> BroadcastSimulation::run() {
  ECHO_TRY(check_scenario());
  fleet_.start_learner();
  // The workers join at intervals and settle before the first publication.
  const std::size_t members = scenario_.workers + scenario_.nodes;
  for (std::size_t i = 0; i < members; ++i)
    world_.run_at(world_.now() + kJoinInterval * static_cast<std::int64_t>(i), [this] { add_worker(); });
  world_.run(world_.now() + kJoinInterval * static_cast<std::int64_t>(members));
  world_.run(world_.now() + kJoinTimeMax, [&] { return all_joined(); });
  // The topology is not final yet: its messages need some link delays, and the cores' timers up to one second.
  world_.run(world_.now() + std::chrono::seconds(1) + 20 * (scenario_.delay + scenario_.jitter));
  if (!all_joined())
    return fail(Code::kInternal, "simulate broadcast", "a worker could not join: {}", fleet_.application_error());
  choose_poisoners();
  if (poisoners_.size() < scenario_.poisoners)
    return fail(Code::kInvalid, "simulate broadcast", "expected at most {} poisoners (workers that forward), found {}",
                poisoners_.size(), scenario_.poisoners);
  const TimePoint start = world_.now();
  std::size_t events_left =
      scenario_.publications + scenario_.late_joins.size() + scenario_.kills.size() + scenario_.corruptions.size();
  // Schedules one of the events that must happen before the simulation may end.
  const auto schedule = [&](Duration after, std::function<void()> work) {
    world_.run_at(start + after, [&events_left, work = std::move(work)] {
      --events_left;
      work();
    });
  };
  // Waits until the learner has reported the quorum of version i - 1, then for `publish_every`. Publishes version i,
  // and the later versions in the same way.
  const std::function<void(std::size_t)> publish_after_previous_quorum = [&](std::size_t i) {
    const bool previous_reported =
        i == 0 || (!fleet_.reports().empty() && fleet_.reports().back().version.value + 1 >= i);
    if (!previous_reported)
      return world_.run_at(world_.now() + kReportCheckInterval, [&, i] { publish_after_previous_quorum(i); });
    world_.run_at(world_.now() + (i > 0 ? scenario_.publish_every : Duration{}), [&, i] {
      --events_left;
      publish(i);
      if (i + 1 < scenario_.publications) publish_after_previous_quorum(i + 1);
    });
  };
  if (scenario_.one_at_a_time)
    publish_after_previous_quorum(0);
  else
    for (std::size_t i = 0; i < scenario_.publications; ++i)
      schedule(scenario_.publish_every * static_cast<std::int64_t>(i), [this, i] { publish(i); });
  for (const Duration join : scenario_.late_joins) schedule(join, [this] { add_worker(); });
  for (const WorkerKill& kill : scenario_.kills)
    schedule(kill.at, [this, kill] { fleet_.kill_worker(kill.worker, kill.death); });
  for (const Duration when : scenario_.corruptions)
    schedule(when, [this] {
      world_.corrupt_next(fleet_.worker(0).host, kChunkBytesMin);  // only a chunk is so large
    });
  if (scenario_.replace_every) world_.run_at(start + *scenario_.replace_every, [this] { replace_forwarding_worker(); });
  const Version last_version{scenario_.publications - 1};
  std::optional<TimePoint> all_installed_at;
  const auto is_done = [&] {
    if (!error_.empty() || !fleet_.application_error().empty()) return true;
    if (events_left > 0 || !live_workers_have(last_version)) return false;
    if (!all_installed_at) all_installed_at = world_.now();
    // T_b, the time until the quorum has installed, is never reported if workers of the quorum have died. So the wait
    // for the report ends after a second.
    const bool reported = !fleet_.reports().empty() && fleet_.reports().back().version >= last_version;
    return reported || world_.now() > *all_installed_at + std::chrono::seconds(1);
  };
  result_.finished =
      world_.run(start + scenario_.time_max, is_done) && error_.empty() && fleet_.application_error().empty();
  if (!result_.finished) {
    result_.unfinished = error_ + fleet_.application_error();
    for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
      if (!is_alive(i) || has_installed(i, last_version)) continue;
      const auto& installed = fleet_.worker(i).installed;
      result_.unfinished +=
          fmt::format(" worker {} has {};", i, installed ? fmt::format("version {}", installed->version) : "nothing");
    }
  }
  collect_results(start);
  ECHO_TRY(compute_predictions());
  return std::move(result_);
}

void BroadcastSimulation::collect_results(TimePoint start) {
  for (const BroadcastReport& report : fleet_.reports()) result_.publications[report.version.value].t_b = report.t_b;
  for (PublicationTimes& times : result_.publications)
    for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
      const Fleet::Worker& receiver = fleet_.worker(i);
      const auto installed = receiver.installed_at.lower_bound(times.version);
      if (installed != receiver.installed_at.end())
        times.completions.emplace_back(receiver.id(), installed->second - published_at_[times.version.value]);
    }
  if (LearnerCore* learner = fleet_.learner()) {
    result_.learner_bytes_sent = learner->stats().bytes_sent;
    result_.learner_chunk_bytes_sent = learner->stats().chunk_bytes_sent;
    for (const WorkerView& view : learner->stats().workers)
      if (view.quarantined)
        ++(poisoners_.contains(*fleet_.worker_with_id(view.info.id)) ? result_.poisoners_quarantined
                                                                     : result_.others_quarantined);
  }
  for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
    if (!fleet_.member(i)) continue;
    const WorkerStats stats = fleet_.member(i)->stats();
    result_.worker_chunk_bytes_in += stats.chunk_bytes_in;
    result_.chunks_duplicate += stats.chunks_duplicate;
    result_.chunks_corrupt += stats.chunks_corrupt;
  }
  for (const auto& [worker, rewriter] : poisoners_) result_.poisoned.push_back(rewriter->chunks_flipped());
  result_.snapshots_asked = fleet_.snapshots_requested();
  result_.virtual_time = world_.now() - start;
  result_.bytes_crossed = {world_.bytes_crossed()};
  result_.trace_hash = world_.trace_hash();
  result_.events = world_.events();
}

Status BroadcastSimulation::compute_predictions() {
  std::vector<chains::WorkerLink> links;
  for (std::size_t i = 0; i < scenario_.workers; ++i) {
    const LinkLimits limits = link_of(i);
    links.push_back({.id = fleet_.worker(i).id(),
                     .up = limits.up.value_or(kUnlimitedRate),
                     .down = limits.down.value_or(kUnlimitedRate),
                     .delay = scenario_.delay,
                     .region = region_of(i)});
  }
  std::sort(links.begin(), links.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  std::vector<WorkerId> nodes;
  for (std::size_t i = scenario_.workers; is_node(i); ++i) nodes.push_back(fleet_.worker(i).id());
  const BitRate sources_up{scenario_.learner_up.bits_per_s +
                           static_cast<double>(scenario_.nodes) * scenario_.node_up.bits_per_s};
  result_.lower_bound = chains::lower_bound(scenario_.payload, sources_up, links, /*q=*/1, scenario_.regions);
  result_.topology = first_topology_;
  ECHO_ASSIGN(const auto times, chains::broadcast_time(chains::remove_nodes(first_topology_, nodes), scenario_.payload,
                                                       scenario_.chunk, sources_up, links, scenario_.regions));
  result_.predicted = times.last();
  return ok();
}

}  // namespace

Duration PublicationTimes::last() const {
  Duration latest{};
  for (const auto& [worker, time] : completions) latest = std::max(latest, time);
  return latest;
}

Result<BroadcastResult> simulate_broadcast(const BroadcastScenario& scenario) {
  return BroadcastSimulation(scenario).run();
}

}  // namespace echoline::sim
