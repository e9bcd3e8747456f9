// Runs soak seeds for `echoline sim soak` and the tests.
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
constexpr Duration kLeaveTimeMax = std::chrono::seconds(50);
constexpr Duration kCheckInterval = std::chrono::milliseconds(100);  // of checks whether all workers have caught up
constexpr Duration kWakeSpread = std::chrono::seconds(20);           // spread of the wake-up times after a sleep

// The time limit of a publication in peace, after all workers have caught up and the topology has been stable for a
// while. A publication must then reach every honest worker within kPlannedTimeFactor times the prediction of
// chains::broadcast_time() for the current topology and links, plus kAllowance, kHeartbeatsAllowed heartbeats and the
// disks' longest delays. Bad forwarders are detected only by late data, so one of several attempts must meet the limit.
// With workers that forward nothing or withhold chunks, the limit is not checked: the learner tries them again every
// minute, and the missing chunks then come from a helper, a node outside the topology that serves late workers.
constexpr double kPlannedTimeFactor = 2;
constexpr Duration kAllowance = std::chrono::seconds(1);
constexpr int kHeartbeatsAllowed = 4;
// Longer than any WorkerOptions::install_time of make_soak_scenario(). Waited for after the limit, because the limit
// does not include the installation.
constexpr Duration kInstallTimeMax = std::chrono::seconds(1);
constexpr int kAttemptsMax = 3, kAttemptsMaxWithMalice = 6;
// How long the topology must have been unchanged before the first and before a further attempt, and the longest wait
// for that.
constexpr Duration kStableTime = std::chrono::seconds(3), kStableTimeOfRetry = std::chrono::seconds(15),
                   kStableWaitMax = std::chrono::seconds(120);

double thread_cpu_seconds() {
  timespec cpu_time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu_time);
  return static_cast<double>(cpu_time.tv_sec) + 1e-9 * static_cast<double>(cpu_time.tv_nsec);
}

constexpr std::size_t kUnlimitedConnections = std::numeric_limits<std::size_t>::max();
constexpr double kDiskErrorShare = 0.2, kLearnerDiskErrorShare = 0.5;  // of the operations, during disk errors

// Runs one scenario: faults, then a phase without faults ("peace") in which every worker must catch up.
class SoakRun {
 public:
  explicit SoakRun(const SoakScenario& scenario)
      : scenario_(scenario), world_(scenario.world), fleet_(world_, scenario.fleet), invariants_(world_, fleet_) {
    world_.set_observer(&invariants_);
    fleet_.set_observer(&invariants_);
  }
  World& world() { return world_; }

  void run() {
    world_.disk(fleet_.learner_host()).configure(DiskOptions{});  // the usual delays, and no errors yet
    fleet_.start_learner();
    for (const WorkerOptions& worker : scenario_.workers) fleet_.add_worker(worker);
    for (const auto& [from, to] : scenario_.blocked_dials)
      world_.block_dials(fleet_.worker(from).host, fleet_.worker(to).host);
    for (std::size_t i = 0; i < scenario_.workers_at_start; ++i) fleet_.start_worker(i);
    if (scenario_.intruder) fleet_.add_intruder(*scenario_.intruder);
    for (std::size_t i = 0; i < scenario_.workers.size(); ++i)
      if (scenario_.workers[i].malice.reconnect) reset_connections_repeatedly(i);
    for (const ScenarioEvent& event : scenario_.events)
      world_.run_at(world_.now() + event.at, [this, &event] { apply(event); });
    if (advance(scenario_.fault_time)) return;
    if (scenario_.sleep_time > Duration{} && sleep_machines()) return;
    end_faults();
    if (scenario_.stream_time > Duration{} && publish_stream()) return;
    const Duration check_interval = std::max(kCheckInterval, scenario_.fleet.learner.heartbeat / 4);
    for (Duration waited{}; waited < scenario_.catch_up_time_max; waited += check_interval) {
      if (advance(check_interval)) return;
      if (!final_is_published_) publish_final();
      if (final_is_published_ && !fleet_.is_publishing() && all_caught_up()) break;
    }
    invariants_.check_learner_statistics();
    invariants_.check_liveness();
    if (!advance(Duration{}) && !check_publication_time()) end_run();
  }

  SoakResult result() const {
    SoakResult soak_result;
    soak_result.seed = scenario_.seed;
    soak_result.scenario = to_text(scenario_);
    soak_result.violations = invariants_.violations();
    soak_result.trace_hash = world_.trace_hash();
    soak_result.events = world_.events();
    soak_result.virtual_time = world_.now().time_since_epoch();
    soak_result.counts = invariants_.counts();
    soak_result.timed = timed_publications_;
    return soak_result;
  }

 private:
  // Runs the world for a time. Here and below, the result is whether an invariant was violated.
  bool advance(Duration time) {
    return world_.run(world_.now() + time, [this] { return !invariants_.violations().empty(); });
  }

  void apply(const ScenarioEvent& event) {
    const HostId host = fleet_.worker(event.worker).host;
    switch (event.kind) {
      case ScenarioEvent::Kind::kPublish: {
        PublishSpec spec = event.publish;
        if (event.is_delta) spec.base = fleet_.newest();
        return publish(spec);
      }
      case ScenarioEvent::Kind::kJoin:
        return start_if_wanted(event.worker);
      case ScenarioEvent::Kind::kKill:
        if (!world_.is_alive(host)) return;
        if (event.length == Duration{}) return fleet_.retire_worker(event.worker);
        fleet_.kill_worker(event.worker, event.death);
        return world_.run_at(world_.now() + event.length, [this, &event] { start_if_wanted(event.worker); });
      case ScenarioEvent::Kind::kDrain:
        return fleet_.drain_worker(event.worker);
      case ScenarioEvent::Kind::kExpel:
        return fleet_.expel(event.worker);
      case ScenarioEvent::Kind::kResetConnection:
        world_.reset_random_connection(host);
        return;
      case ScenarioEvent::Kind::kStopLinks:
        return world_.stop_links(host, world_.now() + event.length);
      case ScenarioEvent::Kind::kPause:
        return world_.pause(host, world_.now() + event.length);
      case ScenarioEvent::Kind::kLearnerPause:
        return world_.pause(fleet_.learner_host(), world_.now() + event.length);
      case ScenarioEvent::Kind::kPartition:
        return partition(event);
      case ScenarioEvent::Kind::kDiskErrors:
        set_disk_error_share(host, kDiskErrorShare);
        return world_.run_at(world_.now() + event.length, [this, host] { set_disk_error_share(host, 0); });
      case ScenarioEvent::Kind::kLearnerDiskErrors:
        set_disk_error_share(fleet_.learner_host(), kLearnerDiskErrorShare);
        return world_.run_at(world_.now() + event.length, [this] { set_disk_error_share(fleet_.learner_host(), 0); });
      case ScenarioEvent::Kind::kLearnerCrash:
        world_.kill(fleet_.learner_host(), event.death);
        return world_.run_at(world_.now() + event.length,
                             [this, &event] { fleet_.start_learner(event.versions_lost); });
      case ScenarioEvent::Kind::kChangeAddress:
        if (!world_.is_paused(host)) world_.change_address(host);
        return;
      case ScenarioEvent::Kind::kNoFiles:
        world_.set_connections_max(host, 0);
        return world_.run_at(world_.now() + event.length, [this, &event] { restore_connection_limit(event.worker); });
      case ScenarioEvent::Kind::kLearnerNoFiles:
        world_.set_connections_max(fleet_.learner_host(), 0);
        return world_.run_at(world_.now() + event.length,
                             [this] { world_.set_connections_max(fleet_.learner_host(), kUnlimitedConnections); });
      case ScenarioEvent::Kind::kDiskCorruption:
        world_.disk(host).corrupt_pieces(event.corrupted_pieces);
        return;
      case ScenarioEvent::Kind::kClockStep:
        world_.step_clock(host, event.clock_step);
        if (!world_.is_alive(host)) return;
        fleet_.kill_worker(event.worker, event.death);
        return world_.run_at(world_.now() + event.length, [this, &event] { start_if_wanted(event.worker); });
      case ScenarioEvent::Kind::kLearnerClockStep:
        world_.step_clock(fleet_.learner_host(), event.clock_step);
        world_.kill(fleet_.learner_host(), event.death);
        return world_.run_at(world_.now() + event.length, [this] { fleet_.start_learner(); });
    }
  }

  void publish(PublishSpec spec) {
    if (!spec.base) spec.bytes = scenario_.fleet.learner.snapshot_bytes;  // without a base it is a full policy
    fleet_.publish(spec);
  }

  void restore_connection_limit(std::size_t worker) {
    const auto& open_files_max = scenario_.workers[worker].open_files_max;
    world_.set_connections_max(fleet_.worker(worker).host, open_files_max
                                                               ? overlay::ConnectionLimits::of(*open_files_max).total
                                                               : kUnlimitedConnections);
  }

  void reset_connections_repeatedly(std::size_t worker) {
    if (run_is_ending_) return;
    // 0.4 to 1.6 s, by the worker's number, so that not all workers reconnect at once.
    const auto interval = std::chrono::milliseconds(400 + 300 * (worker % 5));
    world_.run_at(world_.now() + interval, [this, worker] { reset_connections_repeatedly(worker); });
    world_.reset_all_connections(fleet_.worker(worker).host);
  }

  // Lets the workers' machines sleep for hours, and the learner's unless it stays awake. A quarter of the workers loses
  // power instead.
  bool sleep_machines() {
    world_.note("everybody sleeps");
    for (Duration waited{}; fleet_.is_publishing() && waited < scenario_.fault_time; waited += kCheckInterval)
      if (advance(kCheckInterval)) return true;
    const auto wake_time = [&] {
      return world_.now() + scenario_.sleep_time +
             Duration(world_.random().below(static_cast<std::uint64_t>(kWakeSpread.count())));
    };
    fleet_.start_learner();  // if it is down, because from now on no process starts
    fleet_.block_starts(true);
    for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
      if (world_.random().below(4) == 0)
        fleet_.kill_worker(i, Death::kPowerLoss);
      else
        world_.pause(fleet_.worker(i).host, wake_time());
    }
    if (!scenario_.learner_stays_awake) world_.pause(fleet_.learner_host(), wake_time());
    if (fleet_.intruder()) world_.pause(fleet_.intruder_host(), wake_time());
    const bool violated = advance(scenario_.sleep_time + kWakeSpread);
    fleet_.block_starts(false);
    return violated;
  }

  // Publishes small versions one after another. A worker that lacks a piece of a version must get that piece although
  // further versions follow.
  bool publish_stream() {
    const TimePoint end = world_.now() + scenario_.stream_time;
    std::optional<Version> overdue;  // the newest version that all workers should have
    for (TimePoint publish_at = world_.now(); world_.now() < end;) {
      if (advance(kCheckInterval)) return true;
      if (world_.now() < publish_at || fleet_.is_publishing() || !fleet_.learner()) continue;
      publish_at = world_.now() + scenario_.stream_interval;
      PublishSpec spec;
      spec.base = fleet_.newest();
      spec.bytes = scenario_.stream_bytes;
      publish(spec);
      if (world_.now() < end - scenario_.delivery_time_max) overdue = fleet_.newest();
    }
    for (std::size_t i = 0; overdue && i < fleet_.worker_count(); ++i) {
      const Fleet::Worker& worker = fleet_.worker(i);
      if (worker.options.malice.any() || !worker.should_run) continue;
      if (worker.active && worker.active->version >= *overdue) continue;
      invariants_.report_violation(
          Invariants::kLiveness,
          fmt::format("worker {} has {} although version {} was published {} ago, and more since", i,
                      worker.active ? fmt::format("version {}", worker.active->version) : "nothing", *overdue,
                      echoline::to_text(scenario_.delivery_time_max)));
      return true;
    }
    return false;
  }

  // ---- the duration of a publication in peace ----

  bool is_timed(std::size_t i) const {
    const Fleet::Worker& worker = fleet_.worker(i);
    return worker.should_run && worker.joined && worker.active && world_.is_alive(worker.host) &&
           !worker.options.malice.any();
  }

  // The time limit for the next publication. Absent if the topology's time cannot be predicted.
  std::optional<Duration> time_limit() {
    const chains::Topology topology = fleet_.learner()->topology();
    const LearnerOptions& learner = scenario_.fleet.learner;
    const BitRate unlimited{1e12};
    std::vector<chains::WorkerLink> links;
    Duration disk_delay_per_chunk{};
    for (const WorkerId id : topology.workers()) {
      const auto i = fleet_.worker_with_id(id);
      if (!i) return std::nullopt;
      const WorkerOptions& worker = fleet_.worker(*i).options;
      const auto rate = [&](const std::optional<BitRate>& core_limit, const std::optional<BitRate>& link) {
        return core_limit ? *core_limit : link ? *link : unlimited;
      };
      links.push_back({.id = id,
                       .up = rate(worker.limits.up, worker.link.up),
                       .down = rate(worker.limits.down, worker.link.down),
                       .delay = scenario_.world.delay + scenario_.world.jitter,
                       .region = 0});
      // A delay is up to twice its option, and each operation may wait for another.
      if (worker.disk)
        disk_delay_per_chunk =
            std::max(disk_delay_per_chunk, 4 * (worker.disk_options.write_delay + worker.disk_options.read_delay));
    }
    const Bytes chunk{learner.chunk_bytes};
    const auto times = chains::broadcast_time(topology, Bytes{scenario_.timed_bytes}, chunk,
                                              *(learner.limits.up ? learner.limits.up : learner.link.up), links);
    if (!times) return std::nullopt;
    return from_seconds(kPlannedTimeFactor * seconds(times->last())) + kAllowance +
           kHeartbeatsAllowed * learner.heartbeat +
           disk_delay_per_chunk * static_cast<std::int64_t>(chains::chunk_count(Bytes{scenario_.timed_bytes}, chunk));
  }

  // Number of changes of the topology or its edges so far.
  std::uint64_t disturbances() const { return invariants_.counts().topologies + invariants_.counts().edge_failures; }

  // Checks how long a publication takes in peace (see kPlannedTimeFactor), if the scenario permits that. Returns
  // whether an invariant was violated, here or while the world ran.
  bool check_publication_time() {
    fleet_.stop_messages();
    bool some_are_malicious = false;
    for (const WorkerOptions& worker : scenario_.workers) {
      if (worker.malice.forward_nothing || worker.malice.withhold_share > 0) return false;
      some_are_malicious = some_are_malicious || worker.malice.any();
    }
    for (int attempt = 1;; ++attempt) {
      // Waits for a stable topology: without a disturbance for the stable time, if that comes before the deadline.
      const TimePoint stable_deadline = world_.now() + kStableWaitMax;
      constexpr std::uint64_t kUnknown = ~std::uint64_t{0};
      for (std::uint64_t before = kUnknown; before != disturbances() && world_.now() < stable_deadline;) {
        before = disturbances();
        if (advance(attempt == 1 ? kStableTime : kStableTimeOfRetry)) return true;
      }
      if (!fleet_.learner() || fleet_.is_publishing()) return false;
      // A worker that cannot dial most other workers changes its parents again and again.
      if (world_.now() >= stable_deadline && !scenario_.blocked_dials.empty()) return false;
      const auto limit = time_limit();
      if (!limit) return false;
      std::vector<std::size_t> timed_workers;
      for (std::size_t i = 0; i < fleet_.worker_count(); ++i)
        if (is_timed(i)) timed_workers.push_back(i);
      const TimePoint begin = world_.now();
      PublishSpec spec;
      spec.base = fleet_.newest();
      spec.bytes = scenario_.timed_bytes;
      fleet_.publish(spec);
      const Version version = *fleet_.newest();
      std::string late_workers;
      // Whether all timed workers have installed the version within `time_max`. Sets late_workers to those that have
      // not.
      const auto all_have_installed = [&](Duration time_max) {
        late_workers.clear();
        for (const std::size_t i : timed_workers) {
          const auto entry = fleet_.worker(i).installed_at.find(version);
          const bool installed = entry != fleet_.worker(i).installed_at.end();
          if (!installed || entry->second - begin > time_max + fleet_.worker(i).options.install_time)
            late_workers +=
                fmt::format(" worker {} {};", i,
                            installed ? "took " + echoline::to_text(entry->second - begin) : "does not have it");
        }
        return late_workers.empty();
      };
      while (!all_have_installed(*limit) && world_.now() < begin + *limit + kInstallTimeMax)
        if (advance(kCheckInterval)) return true;
      ++timed_publications_;
      if (all_have_installed(*limit)) return false;
      if (attempt < (some_are_malicious ? kAttemptsMaxWithMalice : kAttemptsMax)) {
        // The next attempt begins when the late workers have this version too.
        for (Duration waited{};
             waited < scenario_.catch_up_time_max && !all_have_installed(scenario_.catch_up_time_max);
             waited += kCheckInterval)
          if (advance(kCheckInterval)) return true;
        continue;
      }
      invariants_.report_violation(
          Invariants::kTimely, fmt::format("a publication of {} bytes in peace may take {}:{}", scenario_.timed_bytes,
                                           echoline::to_text(*limit), late_workers));
      return true;
    }
  }

  void start_if_wanted(std::size_t worker) {
    if (fleet_.worker(worker).should_run) fleet_.start_worker(worker);
  }

  void partition(const ScenarioEvent& event) {
    std::vector<HostId> sides[2];  // hosts in event.group; other hosts
    for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
      const bool in_group = std::binary_search(event.group.begin(), event.group.end(), i);
      sides[in_group ? 0 : 1].push_back(fleet_.worker(i).host);
    }
    sides[event.with_learner ? 0 : 1].push_back(fleet_.learner_host());
    // A one-way partition loses only data from the first argument's hosts to those of the second.
    const std::size_t from = event.loses_incoming ? 1 : 0;
    const std::uint64_t partition_number = world_.start_partition(sides[from], sides[1 - from], event.is_one_way);
    partitions_.push_back(partition_number);
    world_.run_at(world_.now() + event.length, [this, partition_number] { world_.end_partition(partition_number); });
  }

  void set_disk_error_share(HostId host, double share) {
    Disk& disk = world_.disk(host);
    DiskOptions options = disk.options();
    options.read_error_share = options.write_error_share = share;
    disk.configure(options);
  }

  // Ends the faults: networks, disks and machines work. Malicious hosts stay malicious.
  void end_faults() {
    world_.note("peace");
    world_.set_stalled_transfer_share(0);
    for (const std::uint64_t partition_number : partitions_) world_.end_partition(partition_number);
    fleet_.stop_random_faults();
    invariants_.set_faults_over();
    for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
      set_disk_error_share(fleet_.worker(i).host, 0);
      restore_connection_limit(i);
      start_if_wanted(i);
    }
    set_disk_error_share(fleet_.learner_host(), 0);
    world_.set_connections_max(fleet_.learner_host(), kUnlimitedConnections);
    fleet_.start_learner();
  }

  // Publishes one more version for all workers to reach.
  void publish_final() {
    if (fleet_.is_publishing() || !fleet_.learner()) return;
    PublishSpec spec;
    spec.base = fleet_.newest();
    spec.bytes = scenario_.final_bytes;
    publish(spec);
    final_is_published_ = true;
  }

  // The learner ends the run, and all processes must leave.
  void end_run() {
    run_is_ending_ = true;
    fleet_.end_run();
    advance(scenario_.fleet.learner.away_max + kLeaveTimeMax);
    for (std::size_t i = 0; i < fleet_.worker_count(); ++i)
      if (world_.is_alive(fleet_.worker(i).host))
        invariants_.report_violation(Invariants::kSound,
                                     fmt::format("worker {} still runs long after the end of the run", i));
  }

  bool all_caught_up() const {
    for (std::size_t i = 0; i < fleet_.worker_count(); ++i) {
      const Fleet::Worker& worker = fleet_.worker(i);
      if (worker.should_run && !worker.options.malice.starves_itself() &&
          (!worker.active || worker.active->version != *fleet_.newest()))
        return false;
    }
    return invariants_.worker_missing_from_topology().empty();
  }

  const SoakScenario& scenario_;
  World world_;
  Fleet fleet_;
  Invariants invariants_;
  std::vector<std::uint64_t> partitions_;
  std::uint64_t timed_publications_ = 0;
  bool final_is_published_ = false, run_is_ending_ = false;
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
  std::mutex mutex;  // guards `summary` and calls of `progress`
  std::atomic<std::uint64_t> next_index = 0;
  std::atomic<bool> stop = false;
  std::vector<std::uint64_t> hashes(options.seeds);
  const auto run_seeds = [&] {
    while (!stop) {
      const std::uint64_t i = next_index++;
      if (i >= options.seeds) return;
      SoakResult result = soak(options.first + i);
      if (i < options.twice) {
        const SoakResult repeated = soak(options.first + i);
        if (repeated.trace_hash != result.trace_hash)
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
  for (std::size_t i = 1; i < options.threads; ++i) threads.emplace_back(run_seeds);
  run_seeds();
  for (std::thread& thread : threads) thread.join();
  for (const std::uint64_t hash : hashes) summary.combined_hash = mix64(summary.combined_hash ^ hash);
  std::sort(summary.failures.begin(), summary.failures.end(),
            [](const SoakResult& a, const SoakResult& b) { return a.seed < b.seed; });
  return summary;
}

}  // namespace echoline::sim
