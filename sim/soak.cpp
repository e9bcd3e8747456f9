#include "sim/soak.hpp"

#include <algorithm>
#include <atomic>
#include <ctime>
#include <mutex>
#include <thread>

#include "sim/soak_scenario.hpp"

namespace echoline::sim {
namespace {

// Within which everybody leaves once the run is over, beyond the time for which they look for the learner.
constexpr Duration kGoodbye = std::chrono::seconds(50);
constexpr Duration kLook = std::chrono::milliseconds(100);  // how often peace is asked whether it is over

double thread_cpu_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// One scenario under way.
class Soak {
 public:
  explicit Soak(const SoakScenario& s) : s_(s), world_(s.world), fleet_(world_, s.fleet), invariants_(world_, fleet_) {
    world_.set_observer(&invariants_);
    fleet_.set_observer(&invariants_);
  }
  World& world() { return world_; }

  void run() {
    world_.disk(fleet_.learner_host()).configure({});
    fleet_.start_learner();
    for (const WorkerOptions& worker : s_.workers) fleet_.add_worker(worker);
    for (const auto& [from, to] : s_.fences) world_.fence(fleet_.worker(from).host, fleet_.worker(to).host);
    for (std::size_t i = 0; i < s_.at_start; ++i) fleet_.start_worker(i);
    for (const Trouble& trouble : s_.troubles)
      world_.at(world_.now() + trouble.at, [this, &trouble] { happen(trouble); });
    if (advance(s_.length)) return;
    make_peace();
    for (Duration waited{}; waited < s_.peace; waited += kLook) {
      if (advance(kLook)) return;
      if (!peace_published_) publish_last();
      if (peace_published_ && !fleet_.publishing() && caught_up()) break;
    }
    invariants_.check_learner();
    invariants_.check_liveness();
    if (!advance(Duration{})) end_run();
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
    return r;
  }

 private:
  // Whether the run is over: something was violated.
  bool advance(Duration time) {
    return world_.run(world_.now() + time, [this] { return !invariants_.violations().empty(); });
  }

  void happen(const Trouble& t) {
    const HostId host = fleet_.worker(t.worker).host;
    switch (t.kind) {
      case Trouble::Kind::kPublish: {
        PublishSpec spec = t.publish;
        if (t.delta) spec.base = fleet_.newest();
        return fleet_.publish(spec);
      }
      case Trouble::Kind::kJoin:
        return start(t.worker);
      case Trouble::Kind::kKill:
        if (!world_.alive(host)) return;
        if (t.length == Duration{}) return fleet_.retire_worker(t.worker);
        fleet_.kill_worker(t.worker, t.death);
        return world_.at(world_.now() + t.length, [this, &t] { start(t.worker); });
      case Trouble::Kind::kDrain:
        return fleet_.drain_worker(t.worker);
      case Trouble::Kind::kExpel:
        return fleet_.expel(t.worker);
      case Trouble::Kind::kReset:
        world_.reset_one(host);
        return;
      case Trouble::Kind::kClog:
        return world_.clog(host, world_.now() + t.length);
      case Trouble::Kind::kPause:
        return world_.pause(host, world_.now() + t.length);
      case Trouble::Kind::kLearnerPause:
        return world_.pause(fleet_.learner_host(), world_.now() + t.length);
      case Trouble::Kind::kPartition:
        return partition(t);
      case Trouble::Kind::kDiskErrors:
        disk_errors(host, 0.2);
        return world_.at(world_.now() + t.length, [this, host] { disk_errors(host, 0); });
      case Trouble::Kind::kLearnerDiskErrors:
        disk_errors(fleet_.learner_host(), 0.5);
        return world_.at(world_.now() + t.length, [this] { disk_errors(fleet_.learner_host(), 0); });
      case Trouble::Kind::kLearnerCrash:
        world_.kill(fleet_.learner_host(), t.death);
        return world_.at(world_.now() + t.length, [this, &t] { fleet_.start_learner(t.versions_lost); });
    }
  }

  void start(std::size_t worker) {
    if (fleet_.worker(worker).wanted) fleet_.start_worker(worker);
  }

  void partition(const Trouble& t) {
    std::vector<HostId> sides[2];
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      const bool in_group = std::binary_search(t.group.begin(), t.group.end(), i);
      sides[in_group ? 0 : 1].push_back(fleet_.worker(i).host);
    }
    sides[t.with_learner ? 0 : 1].push_back(fleet_.learner_host());
    const std::uint64_t cut = world_.cut(sides[t.reverse ? 1 : 0], sides[t.reverse ? 0 : 1], t.one_way);
    cuts_.push_back(cut);
    world_.at(world_.now() + t.length, [this, cut] { world_.heal(cut); });
  }

  void disk_errors(HostId host, double share) {
    Disk& disk = world_.disk(host);
    DiskOptions options = disk.options();
    options.read_error_share = options.write_error_share = share;
    disk.configure(options);
  }

  // Faults stop: networks are whole, disks work, machines run. Malicious hosts stay what they are.
  void make_peace() {
    world_.note("peace");
    world_.set_stall_share(0);
    for (const std::uint64_t cut : cuts_) world_.heal(cut);
    fleet_.calm();
    invariants_.faults_are_over();
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      disk_errors(fleet_.worker(i).host, 0);
      start(i);
    }
    disk_errors(fleet_.learner_host(), 0);
    fleet_.start_learner();
  }

  // One more version, so that everybody has something to reach.
  void publish_last() {
    if (fleet_.publishing() || !fleet_.learner()) return;
    PublishSpec spec;
    spec.base = fleet_.newest();
    spec.bytes = s_.last_bytes;
    fleet_.publish(spec);
    peace_published_ = true;
  }

  // The learner says goodbye; everybody leaves.
  void end_run() {
    fleet_.end();
    advance(s_.fleet.learner.away_max + kGoodbye);
    for (std::size_t i = 0; i < fleet_.workers(); ++i)
      if (world_.alive(fleet_.worker(i).host))
        invariants_.violated(Invariants::kSound,
                             fmt::format("worker {} is still there long after the run has ended", i));
  }

  bool caught_up() const {
    for (std::size_t i = 0; i < fleet_.workers(); ++i) {
      const Fleet::Worker& w = fleet_.worker(i);
      if (w.wanted && !w.options.malice.flood && (!w.active || w.active->version != *fleet_.newest())) return false;
    }
    return invariants_.without_place().empty();
  }

  const SoakScenario& s_;
  World world_;
  Fleet fleet_;
  Invariants invariants_;
  std::vector<std::uint64_t> cuts_;
  bool peace_published_ = false;
};

}  // namespace

SoakResult soak(std::uint64_t seed, std::function<void(const std::string&)> trace) {
  const double begin = thread_cpu_seconds();
  const SoakScenario scenario = make_soak_scenario(seed);
  if (trace) trace(fmt::format("seed {}: {}", seed, to_text(scenario)));
  Soak run(scenario);
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
          result.violations.push_back({{}, "determinism", "a second run of the seed went another way"});
      }
      hashes[i] = result.trace_hash;
      const std::lock_guard lock(mutex);
      ++summary.seeds;
      summary.events += result.events;
      summary.chunks += result.counts.chunks;
      summary.activations += result.counts.activations;
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
