// Runs a BroadcastScenario for `echoline sim` and the tests.
#include "sim/broadcast_scenario.hpp"

#include <algorithm>
#include <cmath>

#include "chains/broadcast_model.hpp"
#include "sim/fleet.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

constexpr Duration kJoinEvery = std::chrono::microseconds(500);
constexpr Duration kJoinMax = std::chrono::seconds(60);
constexpr Duration kDoneCheckInterval = std::chrono::milliseconds(10);

// Simulates a fleet through one BroadcastScenario and collects the result.
class BroadcastSimulation final : public FleetObserver {
 public:
  explicit BroadcastSimulation(const BroadcastScenario& s)
      : s_(s), world_({s.seed, s.delay, s.jitter, s.regions}), fleet_(world_, fleet_options(s)) {
    fleet_.set_observer(this);
  }
  Result<BroadcastResult> run();

  void on_delivered(std::size_t worker, const act::Deliver& delivery) override;

 private:
  static FleetOptions fleet_options(const BroadcastScenario& s);
  LinkLimits link_of(std::size_t i) const { return i < s_.worker_links.size() ? s_.worker_links[i] : s_.worker_link; }
  std::uint32_t region_of(std::size_t i) const { return i < s_.worker_regions.size() ? s_.worker_regions[i] : 0; }
  void add_worker();
  void publish(std::size_t index);
  bool live(std::size_t i) const { return world_.alive(fleet_.worker(i).host); }
  bool has(std::size_t i, Version v) const {
    const auto& installed = fleet_.worker(i).installed;
    return installed && installed->version >= v;
  }
  bool all_joined() const;
  bool live_workers_have(Version v) const;
  Status check() const;
  void choose_poisoners();
  void replace_one();
  void collect(TimePoint start);
  Status predict();

  BroadcastScenario s_;
  World world_;
  Fleet fleet_;
  chains::Topology planned_;  // at the first publication
  std::vector<TimePoint> published_at_;
  std::map<std::size_t, Malicious*> poisoners_;  // by worker; owned by the world
  std::string error_;                            // a wrong delivery; empty: none
  BroadcastResult result_;
};

FleetOptions BroadcastSimulation::fleet_options(const BroadcastScenario& s) {
  FleetOptions o;
  o.seed = s.seed;
  const LinkLimits limits{s.learner_up, {}};
  if (s.cores_limit_rate)
    o.learner.limits = limits;
  else
    o.learner.link = {limits.up, limits.down};
  o.learner.policy = s.topology;
  o.learner.chooses_policy = s.chooses_topology;
  o.learner.chain_rate = s.chain_rate;
  // Lower bound of the measured uplink: what the whole chains that it can feed need.
  o.learner.up_least =
      BitRate{s.chain_rate.bits_per_s * std::max(1.0, std::floor(s.learner_up.bits_per_s / s.chain_rate.bits_per_s))};
  o.learner.heartbeat = s.heartbeat;
  o.learner.network.heartbeat_timeout = 6 * s.heartbeat;
  o.learner.network.quorum = s.quorum;
  if (s.regions_known) o.learner.regions = s.regions;
  o.learner.store = s.learner_store;
  o.learner.chunk_bytes = static_cast<std::uint32_t>(s.chunk.count);
  o.learner.durable = false;
  o.learner.snapshot_bytes = s.payload.count;
  o.learner.snapshot_encode_time = {};
  return o;
}

void BroadcastSimulation::add_worker() {
  WorkerOptions o;
  const LinkLimits limits = link_of(fleet_.workers());
  if (s_.cores_limit_rate)
    o.limits = limits;
  else
    o.link = {limits.up, limits.down};
  o.region = region_of(fleet_.workers());
  o.enrol = false;
  o.store.memory_max = s_.worker_store;
  o.install_time = {};
  fleet_.start_worker(fleet_.add_worker(o));
}

void BroadcastSimulation::publish(std::size_t index) {
  published_at_.push_back(world_.now());
  result_.publications.push_back({Version{index}, {}, {}});
  if (index == 0 && fleet_.learner()) planned_ = fleet_.learner()->topology();
  PublishSpec spec;
  const bool full = index == 0 || s_.delta.count == 0;
  if (!full) spec.base = Version{index - 1};
  spec.bytes = full ? s_.payload.count : s_.delta.count;
  fleet_.publish(spec);
}

void BroadcastSimulation::on_delivered(std::size_t worker, const act::Deliver& delivery) {
  const Publication& p = delivery.publication;
  result_.chunks_delivered += p.payload.pieces().size();
  if (!fleet_.published_content().matches({p.version, p.base}, p.policy_digest, p.payload.pieces()))
    error_ = fmt::format("worker {} received wrong bytes for version {}", worker, p.version);
}

bool BroadcastSimulation::all_joined() const {
  for (std::size_t i = 0; i < fleet_.workers(); ++i)
    if (!fleet_.worker(i).joined) return false;
  return true;
}

bool BroadcastSimulation::live_workers_have(Version v) const {
  // Newest workers first: they finish last, so the search ends early.
  for (std::size_t i = fleet_.workers(); i-- > 0;)
    if (live(i) && !has(i, v)) return false;
  return true;
}

// Replaces a random forwarding worker.
void BroadcastSimulation::replace_one() {
  if (published_at_.size() >= s_.publications) return;
  world_.at(world_.now() + *s_.replace_every, [this] { replace_one(); });
  if (!fleet_.learner()) return;
  const chains::Topology topology = fleet_.learner()->topology();
  std::vector<std::size_t> forwarders;
  for (const WorkerId id : topology.workers())
    if (!topology.children_of(id).empty() && live(*fleet_.worker_of(id))) forwarders.push_back(*fleet_.worker_of(id));
  if (forwarders.empty()) return;
  fleet_.kill_worker(forwarders[world_.random().below(forwarders.size())], s_.replacement_death);
  ++result_.workers_replaced;
  add_worker();
}

// Makes `poisoners` workers malicious: first the head of each chain, then the second worker of each, and so on. The
// last worker of a chain forwards nothing, so it is left out.
void BroadcastSimulation::choose_poisoners() {
  const chains::Topology topology = fleet_.learner()->topology();
  for (std::size_t place = 0; poisoners_.size() < s_.poisoners && place + 1 < topology.size(); ++place)
    for (const auto& chain : topology.chains) {
      if (poisoners_.size() == s_.poisoners || place + 1 >= chain.size()) continue;
      const std::size_t worker = *fleet_.worker_of(chain[place]);
      MaliceOptions options;
      options.flip_share = s_.poisoned_share;
      auto malice = std::make_unique<Malicious>(options, s_.seed, worker);
      poisoners_[worker] = malice.get();
      world_.set_malice(fleet_.worker(worker).host, std::move(malice));
    }
}

Status BroadcastSimulation::check() const {
  constexpr std::string_view op = "simulate broadcast";
  if (s_.workers < 1) return fail(Code::kInvalid, op, "at least one worker is needed");
  if (s_.publications < 1) return fail(Code::kInvalid, op, "at least one publication is needed");
  if (!(s_.learner_up.bits_per_s > 0) || !(s_.chain_rate.bits_per_s > 0))
    return fail(Code::kInvalid, op, "rates must be positive");
  if (s_.chunk.count < kChunkBytesMin || s_.chunk.count > kChunkBytesMax)
    return fail(Code::kInvalid, op, "expected chunks of {} to {} bytes, found {}", kChunkBytesMin, kChunkBytesMax,
                s_.chunk.count);
  for (const WorkerKill& kill : s_.kills)
    if (kill.worker >= s_.workers + s_.late_joins.size())
      return fail(Code::kInvalid, op, "worker {} should be killed, but there are only {}", kill.worker,
                  s_.workers + s_.late_joins.size());
  return ok();
}

Result<BroadcastResult> BroadcastSimulation::run() {
  ECHO_TRY(check());
  fleet_.start_learner();
  // The workers join at intervals and settle before the first publication.
  for (std::size_t i = 0; i < s_.workers; ++i)
    world_.at(world_.now() + kJoinEvery * static_cast<std::int64_t>(i), [this] { add_worker(); });
  world_.run(world_.now() + kJoinEvery * static_cast<std::int64_t>(s_.workers));
  world_.run(world_.now() + kJoinMax, [&] { return all_joined(); });
  // Time for topology messages in flight: many link delays, and one second for the timers of the cores.
  world_.run(world_.now() + std::chrono::seconds(1) + 20 * (s_.delay + s_.jitter));
  if (!all_joined())
    return fail(Code::kInternal, "simulate broadcast", "a worker could not join: {}", fleet_.application_error());
  choose_poisoners();
  if (poisoners_.size() < s_.poisoners)
    return fail(Code::kInvalid, "simulate broadcast", "expected at most {} poisoners (workers that forward), found {}",
                poisoners_.size(), s_.poisoners);
  const TimePoint start = world_.now();
  std::size_t events_left = s_.publications + s_.late_joins.size() + s_.kills.size() + s_.corruptions.size();
  // Schedules one of the events that must happen before the simulation may end.
  const auto script = [&](Duration after, std::function<void()> work) {
    world_.at(start + after, [&events_left, work = std::move(work)] {
      --events_left;
      work();
    });
  };
  // Publishes version i `publish_every` after the quorum of version i - 1 was reported, then the later versions.
  const std::function<void(std::size_t)> publish_after_previous = [&](std::size_t i) {
    const bool previous_reported =
        i == 0 || (!fleet_.reports().empty() && fleet_.reports().back().version.value + 1 >= i);
    if (!previous_reported) return world_.at(world_.now() + kDoneCheckInterval, [&, i] { publish_after_previous(i); });
    world_.at(world_.now() + (i > 0 ? s_.publish_every : Duration{}), [&, i] {
      --events_left;
      publish(i);
      if (i + 1 < s_.publications) publish_after_previous(i + 1);
    });
  };
  if (s_.one_at_a_time)
    publish_after_previous(0);
  else
    for (std::size_t i = 0; i < s_.publications; ++i)
      script(s_.publish_every * static_cast<std::int64_t>(i), [this, i] { publish(i); });
  for (const Duration join : s_.late_joins) script(join, [this] { add_worker(); });
  for (const WorkerKill& kill : s_.kills)
    script(kill.at, [this, kill] { fleet_.kill_worker(kill.worker, kill.death); });
  for (const Duration when : s_.corruptions)
    script(when, [this] {
      world_.corrupt_next(fleet_.worker(0).host, std::min<std::uint64_t>(kChunkBytesMin, s_.chunk.count));
    });
  if (s_.replace_every) world_.at(start + *s_.replace_every, [this] { replace_one(); });
  const Version last{s_.publications - 1};
  std::optional<TimePoint> all_installed_at;
  const auto done = [&] {
    if (!error_.empty() || !fleet_.application_error().empty()) return true;
    if (events_left > 0 || !live_workers_have(last)) return false;
    if (!all_installed_at) all_installed_at = world_.now();
    // T_b, the time until the quorum has installed, is never reported if workers of the quorum have died. So the wait
    // for it ends after a second.
    const bool reported = !fleet_.reports().empty() && fleet_.reports().back().version >= last;
    return reported || world_.now() > *all_installed_at + std::chrono::seconds(1);
  };
  result_.finished = world_.run(start + s_.time_max, done) && error_.empty() && fleet_.application_error().empty();
  if (!result_.finished) {
    result_.unfinished = error_ + fleet_.application_error();
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      if (!live(i) || has(i, last)) continue;
      const auto& installed = fleet_.worker(i).installed;
      result_.unfinished +=
          fmt::format(" worker {} has {};", i, installed ? fmt::format("version {}", installed->version) : "nothing");
    }
  }
  collect(start);
  ECHO_TRY(predict());
  return std::move(result_);
}

void BroadcastSimulation::collect(TimePoint start) {
  for (const BroadcastReport& report : fleet_.reports()) result_.publications[report.version.value].t_b = report.t_b;
  for (PublicationTimes& p : result_.publications)
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      const Fleet::Worker& w = fleet_.worker(i);
      const auto installed = w.installed_at.lower_bound(p.version);
      if (installed != w.installed_at.end())
        p.completions.emplace_back(w.id(), installed->second - published_at_[p.version.value]);
    }
  if (LearnerCore* learner = fleet_.learner()) {
    result_.learner_bytes_sent = learner->stats().bytes_sent;
    result_.learner_chunk_bytes_sent = learner->stats().chunk_bytes_sent;
    for (const WorkerView& view : learner->stats().workers)
      if (view.quarantined)
        ++(poisoners_.contains(*fleet_.worker_of(view.info.id)) ? result_.poisoners_quarantined
                                                                : result_.others_quarantined);
  }
  for (std::size_t i = 0; i < fleet_.workers(); ++i) {
    if (!fleet_.member(i)) continue;
    const WorkerStats stats = fleet_.member(i)->stats();
    result_.worker_chunk_bytes_in += stats.chunk_bytes_in;
    result_.chunks_duplicate += stats.chunks_duplicate;
    result_.chunks_corrupt += stats.chunks_corrupt;
  }
  for (const auto& [worker, malice] : poisoners_) result_.poisoned.push_back(malice->chunks_flipped());
  result_.snapshots_asked = fleet_.snapshots_asked();
  result_.virtual_time = world_.now() - start;
  result_.bytes_crossed = {world_.bytes_crossed()};
  result_.trace_hash = world_.trace_hash();
  result_.events = world_.events();
}

Status BroadcastSimulation::predict() {
  std::vector<chains::WorkerLink> links;
  const BitRate unlimited{1e12};
  for (std::size_t i = 0; i < s_.workers; ++i) {
    const LinkLimits limits = link_of(i);
    links.push_back({fleet_.worker(i).id(), limits.up.value_or(unlimited), limits.down.value_or(unlimited), s_.delay,
                     region_of(i)});
  }
  std::sort(links.begin(), links.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  result_.lower_bound = chains::lower_bound(s_.payload, s_.learner_up, links, 1, s_.regions);
  result_.topology = planned_;
  ECHO_ASSIGN(const auto times,
              chains::broadcast_time(planned_, s_.payload, s_.chunk, s_.learner_up, links, s_.regions));
  result_.predicted = times.last();
  return ok();
}

}  // namespace

Duration PublicationTimes::last() const {
  Duration last{};
  for (const auto& [worker, time] : completions) last = std::max(last, time);
  return last;
}

Result<BroadcastResult> simulate_broadcast(const BroadcastScenario& scenario) {
  return BroadcastSimulation(scenario).run();
}

}  // namespace echoline::sim
