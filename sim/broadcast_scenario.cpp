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
constexpr Duration kLook = std::chrono::milliseconds(10);  // how often the scenario checks whether a broadcast is done

// Runs one scenario.
class Stage final : public FleetObserver {
 public:
  explicit Stage(const BroadcastScenario& s)
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
  bool settled() const;
  bool everybody_has(Version v) const;
  Status check() const;
  void poison();
  void replace_one();
  void collect(TimePoint start);
  Status predict();

  BroadcastScenario s_;
  World world_;
  Fleet fleet_;
  chains::Topology planned_;  // at the first publication
  std::vector<TimePoint> published_at_;
  std::map<std::size_t, Malicious*> poisoners_;  // by worker; owned by the world
  std::string wrong_;
  BroadcastResult result_;
};

FleetOptions Stage::fleet_options(const BroadcastScenario& s) {
  FleetOptions o;
  o.seed = s.seed;
  const LinkLimits limits{s.learner_up, {}};
  if (s.limits_in_cores)
    o.learner.limits = limits;
  else
    o.learner.link = {limits.up, limits.down};
  o.learner.policy = s.topology;
  o.learner.chooses_policy = s.chooses_topology;
  o.learner.chain_rate = s.chain_rate;
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

void Stage::add_worker() {
  WorkerOptions o;
  const LinkLimits limits = link_of(fleet_.workers());
  if (s_.limits_in_cores)
    o.limits = limits;
  else
    o.link = {limits.up, limits.down};
  o.region = region_of(fleet_.workers());
  o.enrol = false;
  o.store.memory_max = s_.worker_store;
  o.install_time = {};
  fleet_.start_worker(fleet_.add_worker(o));
}

void Stage::publish(std::size_t index) {
  published_at_.push_back(world_.now());
  result_.publications.push_back({Version{index}, {}, {}});
  if (index == 0 && fleet_.learner()) planned_ = fleet_.learner()->topology();
  PublishSpec spec;
  const bool full = index == 0 || s_.delta.count == 0;
  if (!full) spec.base = Version{index - 1};
  spec.bytes = full ? s_.payload.count : s_.delta.count;
  fleet_.publish(spec);
}

void Stage::on_delivered(std::size_t worker, const act::Deliver& delivery) {
  const Publication& p = delivery.publication;
  result_.chunks_delivered += p.payload.pieces().size();
  if (!fleet_.truth().holds({p.version, p.base}, p.policy_digest, p.payload.pieces()))
    wrong_ = fmt::format("worker {} received other bytes for version {}", worker, p.version);
}

bool Stage::settled() const {
  for (std::size_t i = 0; i < fleet_.workers(); ++i)
    if (!fleet_.worker(i).joined) return false;
  return true;
}

bool Stage::everybody_has(Version v) const {
  for (std::size_t i = fleet_.workers(); i-- > 0;)
    if (live(i) && !has(i, v)) return false;
  return true;
}

// Replaces a random forwarding worker.
void Stage::replace_one() {
  if (published_at_.size() >= s_.publications) return;
  world_.at(world_.now() + *s_.replace_every, [this] { replace_one(); });
  if (!fleet_.learner()) return;
  const chains::Topology topology = fleet_.learner()->topology();
  std::vector<std::size_t> forwarders;
  for (const WorkerId id : topology.workers())
    if (!topology.children_of(id).empty() && live(*fleet_.worker_of(id))) forwarders.push_back(*fleet_.worker_of(id));
  if (forwarders.empty()) return;
  fleet_.kill_worker(forwarders[world_.random().below(forwarders.size())], s_.replaced_by);
  ++result_.replaced;
  add_worker();
}

// Chooses the workers with the most descendants, one chain after the other.
void Stage::poison() {
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

Status Stage::check() const {
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

Result<BroadcastResult> Stage::run() {
  ECHO_TRY(check());
  fleet_.start_learner();
  // The workers join at intervals and settle before the first publication.
  for (std::size_t i = 0; i < s_.workers; ++i)
    world_.at(world_.now() + kJoinEvery * static_cast<std::int64_t>(i), [this] { add_worker(); });
  world_.run(world_.now() + kJoinEvery * static_cast<std::int64_t>(s_.workers));
  world_.run(world_.now() + kJoinMax, [&] { return settled(); });
  world_.run(world_.now() + std::chrono::seconds(1) + 20 * (s_.delay + s_.jitter));
  if (!settled()) return fail(Code::kInternal, "simulate broadcast", "a worker could not join: {}", fleet_.wrong());
  poison();
  if (poisoners_.size() < s_.poisoners)
    return fail(Code::kInvalid, "simulate broadcast", "expected at most {} poisoners (workers that forward), found {}",
                poisoners_.size(), s_.poisoners);
  const TimePoint start = world_.now();
  std::size_t scripted = s_.publications + s_.late_joins.size() + s_.kills.size() + s_.corruptions.size();
  const auto script = [&](Duration after, std::function<void()> work) {
    world_.at(start + after, [&scripted, work = std::move(work)] {
      --scripted;
      work();
    });
  };
  const std::function<void(std::size_t)> publish_when_done = [&](std::size_t i) {
    if (i > 0 && (fleet_.reports().empty() || fleet_.reports().back().version.value + 1 < i))
      return world_.at(world_.now() + kLook, [&, i] { publish_when_done(i); });
    world_.at(world_.now() + (i > 0 ? s_.publish_every : Duration{}), [&, i] {
      --scripted;
      publish(i);
      if (i + 1 < s_.publications) publish_when_done(i + 1);
    });
  };
  if (s_.one_at_a_time)
    publish_when_done(0);
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
  std::optional<TimePoint> all_at;
  const auto done = [&] {
    if (!wrong_.empty() || !fleet_.wrong().empty()) return true;
    if (scripted > 0 || !everybody_has(last)) return false;
    if (!all_at) all_at = world_.now();
    // There is no T_b if the workers that should report it have died.
    const bool reported = !fleet_.reports().empty() && fleet_.reports().back().version >= last;
    return reported || world_.now() > *all_at + std::chrono::seconds(1);
  };
  result_.finished = world_.run(start + s_.time_max, done) && wrong_.empty() && fleet_.wrong().empty();
  if (!result_.finished) {
    result_.unfinished = wrong_ + fleet_.wrong();
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

void Stage::collect(TimePoint start) {
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
  result_.crossed = {world_.bytes_crossed()};
  result_.trace_hash = world_.trace_hash();
  result_.events = world_.events();
}

Status Stage::predict() {
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

Result<BroadcastResult> simulate_broadcast(const BroadcastScenario& scenario) { return Stage(scenario).run(); }

}  // namespace echoline::sim
