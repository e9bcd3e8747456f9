// Runs soak seeds for `echoline sim` and the tests.
#include "sim/soak.hpp"

#include <algorithm>
#include <atomic>
#include <ctime>
#include <limits>
#include <mutex>
#include <thread>

#include "chains/broadcast_model.hpp"
#include "sim/soak_scenario.hpp"

namespace echoline::sim {
namespace {

// Time in which all processes must leave after the run's end, in addition to away_max.
constexpr Duration kLeaveMax = std::chrono::seconds(50);
constexpr Duration kCheckInterval = std::chrono::milliseconds(100);  // whether all workers have caught up
constexpr Duration kWakeSpread = std::chrono::seconds(20);           // spread of the wake-up times after a sleep

// The time limit of a publication in peace. All workers have caught up, and the topology has been stable for a while.
// Then a publication reaches every honest worker within kPlannedTimeFactor times the prediction of
// chains::broadcast_time() for the current topology and links, plus kAllowance, kHeartbeatsAllowed heartbeats and the
// disks' longest delays. Bad forwarders are detected only by late data, so one of several attempts must meet the limit.
// The limit is not checked with workers that forward nothing: they are retried every minute, and small publications,
// like withheld chunks, then arrive through help.
constexpr double kPlannedTimeFactor = 2;
constexpr Duration kAllowance = std::chrono::seconds(1);
constexpr int kHeartbeatsAllowed = 4;
constexpr int kAttempts = 3, kAttemptsWithMalice = 6;
constexpr Duration kStableTime = std::chrono::seconds(3), kStableTimeOfRetry = std::chrono::seconds(15),
                   kStableWaitMax = std::chrono::seconds(120);

double thread_cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

constexpr std::size_t kUnlimitedConnections = std::numeric_limits<std::size_t>::max();

// Runs one scenario: faults, then a phase without faults ("peace") in which every worker must catch up.
class SoakRun {
 public:
  explicit SoakRun(const SoakScenario& s)
      : s_(s), world_(s.world), fleet_(world_, s.fleet), invariants_(world_, fleet_) {
    world_.set_observer(&invariants_);
    fleet_.set_observer(&invariants_);
  }
  World& world() { return world_; }

  void run() {
    world_.disk(fleet_.learner_host()).configure({});
    fleet_.start_learner();
    for (const WorkerOptions& worker : s_.workers) fleet_.add_worker(worker);
    for (const auto& [from, to] : s_.blocked_dials)
      world_.block_dials(fleet_.worker(from).host, fleet_.worker(to).host);
    for (std::size_t i = 0; i < s_.workers_at_start; ++i) fleet_.start_worker(i);
    if (s_.intruder) fleet_.add_intruder(*s_.intruder);
    for (std::size_t i = 0; i < s_.workers.size(); ++i)
      if (s_.workers[i].malice.reconnect) reconnect(i);
    for (const ScenarioEvent& event : s_.events) world_.at(world_.now() + event.at, [this, &event] { apply(event); });
    if (advance(s_.fault_time)) return;
    if (s_.sleep_time > Duration{} && sleep()) return;
    end_faults();
    if (s_.stream_time > Duration{} && stream()) return;
    const Duration interval = std::max(kCheckInterval, s_.fleet.learner.heartbeat / 4);
    for (Duration waited{}; waited < s_.peace_time_max; waited += interval) {
      if (advance(interval)) return;
      if (!peace_published_) publish_last();
      if (peace_published_ && !fleet_.publishing() && caught_up()) break;
    }
    invariants_.check_learner();
    invariants_.check_liveness();
    if (!advance(Duration{}) && !check_publication_time()) end_run();
  }

  SoakResult result() const {
    SoakResult r;
    r.seed = s_.seed;
    r.scenario = to_text(s_);
    r.violations = invariants_.violations();
    r.trace_hash = world_.trace_hash();
    r.events = world_.events();
    r.virtual_time = world_.now().time_since_epoch();
    r.counts = invariants_.counts();
    r.timed = timed_publications_;
    return r;
  }

 private:
  // Runs the world for a time. True: an invariant was violated.
  bool advance(Duration time) {
    return world_.run(world_.now() + time, [this] { return !invariants_.violations().empty(); });
  }

  void apply(const ScenarioEvent& event) {
    const HostId host = fleet_.worker(event.worker).host;
    switch (event.kind) {
      case ScenarioEvent::Kind::kPublish: {
        PublishSpec spec = event.publish;
        if (event.delta) spec.base = fleet_.newest();
        return publish(spec);
      }
      case ScenarioEvent::Kind::kJoin:
        return start(event.worker);
      case ScenarioEvent::Kind::kKill:
        if (!world_.alive(host)) return;
        if (event.length == Duration{}) return fleet_.retire_worker(event.worker);
        fleet_.kill_worker(event.worker, event.death);
        return world_.at(world_.now() + event.length, [this, &event] { start(event.worker); });
      case ScenarioEvent::Kind::kDrain:
        return fleet_.drain_worker(event.worker);
      case ScenarioEvent::Kind::kExpel:
        return fleet_.expel(event.worker);
      case ScenarioEvent::Kind::kReset:
        world_.reset_one(host);
        return;
      case ScenarioEvent::Kind::kClog:
        return world_.stop_links(host, world_.now() + event.length);
      case ScenarioEvent::Kind::kPause:
        return world_.pause(host, world_.now() + event.length);
      case ScenarioEvent::Kind::kLearnerPause:
        return world_.pause(fleet_.learner_host(), world_.now() + event.length);
      case ScenarioEvent::Kind::kPartition:
        return partition(event);
      case ScenarioEvent::Kind::kDiskErrors:
        disk_errors(host, 0.2);
        return world_.at(world_.now() + event.length, [this, host] { disk_errors(host, 0); });
      case ScenarioEvent::Kind::kLearnerDiskErrors:
        disk_errors(fleet_.learner_host(), 0.5);
        return world_.at(world_.now() + event.length, [this] { disk_errors(fleet_.learner_host(), 0); });
      case ScenarioEvent::Kind::kLearnerCrash:
        world_.kill(fleet_.learner_host(), event.death);
        return world_.at(world_.now() + event.length, [this, &event] { fleet_.start_learner(event.versions_lost); });
      case ScenarioEvent::Kind::kMove:
        if (!world_.paused(host)) world_.move(host);
        return;
      case ScenarioEvent::Kind::kFiles:
        world_.set_connections_max(host, 0);
        return world_.at(world_.now() + event.length, [this, &event] { restore_connection_limit(event.worker); });
      case ScenarioEvent::Kind::kLearnerFiles:
        world_.set_connections_max(fleet_.learner_host(), 0);
        return world_.at(world_.now() + event.length,
                         [this] { world_.set_connections_max(fleet_.learner_host(), kUnlimitedConnections); });
      case ScenarioEvent::Kind::kRot:
        world_.disk(host).rot(event.pieces);
        return;
      case ScenarioEvent::Kind::kClockStep:
        world_.step_clock(host, event.step);
        if (!world_.alive(host)) return;
        fleet_.kill_worker(event.worker, event.death);
        return world_.at(world_.now() + event.length, [this, &event] { start(event.worker); });
      case ScenarioEvent::Kind::kLearnerClockStep:
        world_.step_clock(fleet_.learner_host(), event.step);
        world_.kill(fleet_.learner_host(), event.death);
        return world_.at(world_.now() + event.length, [this] { fleet_.start_learner(); });
    }
  }

  void publish(PublishSpec spec) {
    if (!spec.base) spec.bytes = s_.fleet.learner.snapshot_bytes;  // the first complete version
    fleet_.publish(spec);
  }

  void restore_connection_limit(std::size_t worker) {
    const auto& open_files_max = s_.workers[worker].open_files_max;
    world_.set_connections_max(fleet_.worker(worker).host, open_files_max
                                                               ? overlay::ConnectionLimits::of(*open_files_max).total
                                                               : kUnlimitedConnections);
  }

  void reconnect(std::size_t worker) {
    if (ending_) return;
    world_.at(world_.now() + std::chrono::milliseconds(400 + 300 * (worker % 5)),
              [this, worker] { reconnect(worker); });
    world_.reset_all(fleet_.worker(worker).host);
  }

  // Suspends some machines for hours and switches others off, perhaps the learner too. True: an invariant was violated.
  bool sleep() {
    world_.note("everybody sleeps");
    for (Duration waited{}; fleet_.publishing() && waited < s_.fault_time; waited += kCheckInterval)
      if (advance(kCheckInterval)) return true;
    const auto wake_time = [&] {
      return world_.now() + s_.sleep_time +
             Duration(world_.random().below(static_cast<std::uint64_t>(kWakeSpread.count())));
    };
    fleet_.start_learner();
    fleet_.block_starts(true);
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      if (world_.random().below(4) == 0)
        fleet_.kill_worker(i, Death::kPowerLoss);
      else
        world_.pause(fleet_.worker(i).host, wake_time());
    }
    if (!s_.learner_stays_awake) world_.pause(fleet_.learner_host(), wake_time());
    if (fleet_.intruder()) world_.pause(fleet_.intruder_host(), wake_time());
    const bool violated = advance(s_.sleep_time + kWakeSpread);
    fleet_.block_starts(false);
    return violated;
  }

  // Small publications in peace: a worker that lacks a piece of one gets it although others follow. True: an invariant
  // was violated.
  bool stream() {
    const TimePoint end = world_.now() + s_.stream_time;
    std::optional<Version> overdue;  // all workers should have it
    for (TimePoint next = world_.now(); world_.now() < end;) {
      if (advance(kCheckInterval)) return true;
      if (world_.now() < next || fleet_.publishing() || !fleet_.learner()) continue;
      next = world_.now() + s_.stream_interval;
      PublishSpec spec;
      spec.base = fleet_.newest();
      spec.bytes = s_.stream_bytes;
      publish(spec);
      if (world_.now() < end - s_.lag_max) overdue = fleet_.newest();
    }
    for (std::size_t i = 0; overdue && i < fleet_.workers(); ++i) {
      const Fleet::Worker& w = fleet_.worker(i);
      if (w.options.malice.any() || !w.wanted) continue;
      if (w.active && w.active->version >= *overdue) continue;
      invariants_.violated(Invariants::kLiveness,
                           fmt::format("worker {} has {} although version {} was published {} ago, and more since", i,
                                       w.active ? fmt::format("version {}", w.active->version) : "nothing", *overdue,
                                       echoline::to_text(s_.lag_max)));
      return true;
    }
    return false;
  }

  // ---- the duration of a publication in peace ----

  bool is_timed(std::size_t i) const {
    const Fleet::Worker& w = fleet_.worker(i);
    return w.wanted && w.joined && w.active && world_.alive(w.host) && !w.options.malice.any();
  }

  // The limit for the next publication; nothing if the topology's time cannot be predicted.
  std::optional<Duration> time_limit() {
    const chains::Topology plan = fleet_.learner()->topology();
    const LearnerOptions& learner = s_.fleet.learner;
    const BitRate unlimited{1e12};
    std::vector<chains::WorkerLink> links;
    Duration disk{};
    for (const WorkerId id : plan.workers()) {
      const auto i = fleet_.worker_of(id);
      if (!i) return std::nullopt;
      const WorkerOptions& w = fleet_.worker(*i).options;
      const auto rate = [&](const std::optional<BitRate>& a, const std::optional<BitRate>& b) {
        return a ? *a : b ? *b : unlimited;
      };
      links.push_back(
          {id, rate(w.limits.up, w.link.up), rate(w.limits.down, w.link.down), s_.world.delay + s_.world.jitter});
      if (w.disk) disk = std::max(disk, 4 * (w.disk_options.write_delay + w.disk_options.read_delay));
    }
    const Bytes chunk{learner.chunk_bytes};
    const auto times = chains::broadcast_time(plan, Bytes{s_.timed_bytes}, chunk,
                                              *(learner.limits.up ? learner.limits.up : learner.link.up), links);
    if (!times) return std::nullopt;
    return from_seconds(kPlannedTimeFactor * seconds(times->last())) + kAllowance +
           kHeartbeatsAllowed * learner.heartbeat +
           disk * static_cast<std::int64_t>(chains::chunk_count(Bytes{s_.timed_bytes}, chunk));
  }

  std::uint64_t disturbances() const { return invariants_.counts().topologies + invariants_.counts().edge_failures; }

  // True: an invariant was violated.
  bool check_publication_time() {
    fleet_.stop_messages();
    bool malice = false;
    for (const WorkerOptions& w : s_.workers) {
      if (w.malice.forward_nothing || w.malice.withhold_share > 0) return false;
      malice = malice || w.malice.any();
    }
    for (int attempt = 1;; ++attempt) {
      const TimePoint stable_deadline = world_.now() + kStableWaitMax;
      for (std::uint64_t seen = ~std::uint64_t{0}; seen != disturbances() && world_.now() < stable_deadline;) {
        seen = disturbances();
        if (advance(attempt == 1 ? kStableTime : kStableTimeOfRetry)) return true;
      }
      if (!fleet_.learner() || fleet_.publishing()) return false;
      if (world_.now() >= stable_deadline && !s_.blocked_dials.empty())
        // A worker that cannot reach most others never settles.
        return false;
      const auto limit = time_limit();
      if (!limit) return false;
      std::vector<std::size_t> counted;
      for (std::size_t i = 0; i < fleet_.workers(); ++i)
        if (is_timed(i)) counted.push_back(i);
      const TimePoint begin = world_.now();
      PublishSpec spec;
      spec.base = fleet_.newest();
      spec.bytes = s_.timed_bytes;
      fleet_.publish(spec);
      const Version version = *fleet_.newest();
      std::string late;
      const auto all_have = [&](Duration within) {
        late.clear();
        for (const std::size_t i : counted) {
          const auto at = fleet_.worker(i).installed_at.find(version);
          const bool installed = at != fleet_.worker(i).installed_at.end();
          if (!installed || at->second - begin > within + fleet_.worker(i).options.install_time)
            late += fmt::format(" worker {} {};", i,
                                installed ? "took " + echoline::to_text(at->second - begin) : "does not have it");
        }
        return late.empty();
      };
      while (!all_have(*limit) && world_.now() < begin + *limit + std::chrono::seconds(1))
        if (advance(kCheckInterval)) return true;
      ++timed_publications_;
      if (all_have(*limit)) return false;
      if (attempt < (malice ? kAttemptsWithMalice : kAttempts)) {
        for (Duration waited{}; waited < s_.peace_time_max && !all_have(s_.peace_time_max); waited += kCheckInterval)
          if (advance(kCheckInterval)) return true;
        continue;
      }
      invariants_.violated(Invariants::kTimely, fmt::format("a publication of {} bytes in peace may take {}:{}",
                                                            s_.timed_bytes, echoline::to_text(*limit), late));
      return true;
    }
  }

  void start(std::size_t worker) {
    if (fleet_.worker(worker).wanted) fleet_.start_worker(worker);
  }

  void partition(const ScenarioEvent& event) {
    std::vector<HostId> sides[2];
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      const bool in_group = std::binary_search(event.group.begin(), event.group.end(), i);
      sides[in_group ? 0 : 1].push_back(fleet_.worker(i).host);
    }
    sides[event.with_learner ? 0 : 1].push_back(fleet_.learner_host());
    const std::uint64_t cut =
        world_.cut(sides[event.lose_incoming ? 1 : 0], sides[event.lose_incoming ? 0 : 1], event.one_way);
    cuts_.push_back(cut);
    world_.at(world_.now() + event.length, [this, cut] { world_.heal(cut); });
  }

  void disk_errors(HostId host, double share) {
    Disk& disk = world_.disk(host);
    DiskOptions options = disk.options();
    options.read_error_share = options.write_error_share = share;
    disk.configure(options);
  }

  // Ends the faults: networks, disks and machines work. Malicious hosts stay malicious.
  void end_faults() {
    world_.note("peace");
    world_.set_stall_share(0);
    for (const std::uint64_t cut : cuts_) world_.heal(cut);
    fleet_.stop_random_faults();
    invariants_.set_faults_over();
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      disk_errors(fleet_.worker(i).host, 0);
      restore_connection_limit(i);
      start(i);
    }
    disk_errors(fleet_.learner_host(), 0);
    world_.set_connections_max(fleet_.learner_host(), kUnlimitedConnections);
    fleet_.start_learner();
  }

  // Publishes one more version for all workers to reach.
  void publish_last() {
    if (fleet_.publishing() || !fleet_.learner()) return;
    PublishSpec spec;
    spec.base = fleet_.newest();
    spec.bytes = s_.final_bytes;
    publish(spec);
    peace_published_ = true;
  }

  // The learner says goodbye, and all processes must leave.
  void end_run() {
    ending_ = true;
    fleet_.end_run();
    advance(s_.fleet.learner.away_max + kLeaveMax);
    for (std::size_t i = 0; i < fleet_.workers(); ++i)
      if (world_.alive(fleet_.worker(i).host))
        invariants_.violated(Invariants::kSound, fmt::format("worker {} still runs long after the end of the run", i));
  }

  bool caught_up() const {
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      const Fleet::Worker& w = fleet_.worker(i);
      if (w.wanted && !w.options.malice.starves_itself() && (!w.active || w.active->version != *fleet_.newest()))
        return false;
    }
    return invariants_.worker_missing_from_topology().empty();
  }

  const SoakScenario& s_;
  World world_;
  Fleet fleet_;
  Invariants invariants_;
  std::vector<std::uint64_t> cuts_;
  std::uint64_t timed_publications_ = 0;
  bool peace_published_ = false, ending_ = false;
};

}  // namespace

SoakResult soak(std::uint64_t seed, std::function<void(const std::string&)> trace) {
  const double begin = thread_cpu_seconds();
  const SoakScenario scenario = make_soak_scenario(seed);
  if (trace) trace(fmt::format("seed {}: {}", seed, to_text(scenario)));
  SoakRun run(scenario);
  if (trace) run.world().set_trace(std::move(trace));
  run.run();
  SoakResult result = run.result();
  result.cpu_seconds = thread_cpu_seconds() - begin;
  return result;
}

SoakSummary run_soak(const SoakOptions& options,
                     const std::function<bool(std::uint64_t, const SoakResult&)>& progress) {
  SoakSummary summary;
  std::mutex mutex;
  std::atomic<std::uint64_t> next = 0;
  std::atomic<bool> stop = false;
  std::vector<std::uint64_t> hashes(options.seeds);
  const auto work = [&] {
    while (!stop) {
      const std::uint64_t i = next++;
      if (i >= options.seeds) return;
      SoakResult result = soak(options.first + i);
      if (i < options.twice) {
        const SoakResult again = soak(options.first + i);
        if (again.trace_hash != result.trace_hash)
          result.violations.push_back({{}, "determinism", "a second run of the seed had another trace"});
      }
      hashes[i] = result.trace_hash;
      const std::lock_guard lock(mutex);
      ++summary.seeds;
      summary.events += result.events;
      summary.chunks += result.counts.chunks;
      summary.activations += result.counts.activations;
      summary.intrusions += result.counts.intrusions;
      summary.floods += result.counts.floods;
      summary.timed += result.timed;
      summary.virtual_time += result.virtual_time;
      summary.cpu_seconds += result.cpu_seconds;
      if (result.cpu_seconds > summary.cpu_seconds_max) {
        summary.cpu_seconds_max = result.cpu_seconds;
        summary.slowest_seed = result.seed;
      }
      if (progress && !progress(summary.seeds, result)) stop = true;
      if (!result.violations.empty()) summary.failures.push_back(std::move(result));
    }
  };
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < options.threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  for (const std::uint64_t hash : hashes) summary.combined_hash = mix64(summary.combined_hash ^ hash);
  std::sort(summary.failures.begin(), summary.failures.end(),
            [](const SoakResult& a, const SoakResult& b) { return a.seed < b.seed; });
  return summary;
}

}  // namespace echoline::sim
