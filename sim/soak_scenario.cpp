// Generates a random soak test (fleet, network, publications and faults) from a seed, for sim/soak.cpp.
#include "sim/soak_scenario.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::sim {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr std::uint64_t kScenarioStream = 9;  // other parts of the simulation use other streams of the seed
constexpr std::uint64_t kCorruptedPiecesMax = 8;
constexpr double kSlowestWorkerBitsPerS = 4e6;  // the slowest uplink that make_worker() draws

// Random values from one stream, in a fixed order.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed, kScenarioStream) {}
  std::uint64_t below(std::uint64_t n) { return random_.below(n); }
  bool chance(double probability) { return random_.uniform() < probability; }
  double between(double low, double high) { return low + (high - low) * random_.uniform(); }
  // The logarithm is uniform, so small and large orders of magnitude are equally frequent.
  double log_uniform(double low, double high) { return low * std::pow(high / low, random_.uniform()); }
  Duration time(Duration low, Duration high) {
    return low + Duration(static_cast<std::int64_t>(random_.uniform() * static_cast<double>((high - low).count())));
  }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return *(choices.begin() + random_.below(choices.size()));
  }

 private:
  Random random_;
};

WorldOptions make_world(std::uint64_t seed, Dice& dice) {
  WorldOptions options;
  options.seed = seed;
  options.delay = dice.time(Duration{}, milliseconds(80));
  if (dice.chance(0.5)) options.jitter = dice.time(Duration{}, milliseconds(20));
  if (dice.chance(0.5)) options.stalled_transfer_share = dice.log_uniform(0.0005, 0.02);
  if (dice.chance(0.4)) options.split_transfer_share = dice.between(0, 0.3);
  return options;
}

void randomize_learner(LearnerOptions& learner, Dice& dice, std::uint64_t full_policy_bytes) {
  const BitRate up = BitRate::from_mbit_per_s(dice.log_uniform(16, 400));
  if (dice.chance(0.3))
    learner.limits.up = up;  // the program limits its rate; otherwise the link does
  else
    learner.link = {up, up};
  if (dice.chance(0.2)) learner.clock_skew = dice.time(-seconds(30), seconds(30));
  if (dice.chance(0.05)) learner.clock_skew = dice.time(-hours(12), hours(12));
  using enum chains::TopologyPolicy;
  // `policy` is that of the topology. kEcho2: as many chains as the learner's uplink feeds at chain_rate. Trees are the
  // most complex topology, so they are drawn most often.
  learner.policy = dice.pick({kTrees, kTrees, kTrees, kEcho2, kEcho2, kBestChains, kStar, kStripes});
  learner.chooses_policy = dice.chance(0.3);
  learner.chain_rate = BitRate::from_mbit_per_s(dice.log_uniform(4, 40));
  // The uplink that the learner plans with feeds a whole number of chains, one to eight.
  const double chain_count = std::clamp(up.bits_per_s / learner.chain_rate.bits_per_s, 1.0, 8.0);
  learner.uplink_min = BitRate{learner.chain_rate.bits_per_s * std::floor(chain_count)};
  learner.heartbeat = dice.time(milliseconds(100), milliseconds(500));
  learner.network.heartbeat_timeout = learner.heartbeat * static_cast<std::int64_t>(4 + dice.below(4));
  if (dice.chance(0.5)) learner.away_max = dice.time(seconds(10), seconds(60));
  learner.network.quorum = dice.between(0.5, 1.0);
  if (dice.chance(0.3)) learner.store = {3 * full_policy_bytes};
  if (dice.chance(0.1)) learner.publication_lifetime = dice.time(seconds(5), seconds(40));
  learner.snapshot_bytes = full_policy_bytes;
  learner.snapshot_encode_time = dice.time(Duration{}, milliseconds(500));
  if (dice.chance(0.6)) learner.folded_deltas_max = 1 + dice.below(20);  // deltas combined into one
}

MaliceOptions make_malice(Dice& dice) {
  MaliceOptions malice;
  switch (dice.below(7)) {
    case 0:
    case 1:
      malice.flip_share = dice.pick({0.01, 0.1, 1.0});
      break;
    case 2:
      malice.replay_share = dice.between(0.01, 0.3);
      break;
    case 3:
      malice.garbage_share = dice.between(0.001, 0.05);
      break;
    case 4:
      malice.forward_nothing = true;
      break;
    case 5:
      malice.repeat_requests = true;
      break;
    default:
      malice.misreport_progress = true;
      break;
  }
  if (dice.chance(0.1)) malice.slander = true;
  if (dice.chance(0.1)) malice.flood = true;
  if (dice.chance(0.1)) {
    using enum overlay::MessageBudget::Kind;
    malice.flood_kind = dice.pick({kHave, kRenew, kNeedHelp, kAck, kTrouble, kChunkRequest});
  }
  if (dice.chance(0.1)) malice.reconnect = true;
  if (dice.chance(0.2)) malice.misreport_progress = true;
  return malice;
}

// `common_mbit`: the rate of all workers' links; 0: every worker draws its own. `enrols`: the worker gets its
// certificate from the learner, instead of starting with one.
WorkerOptions make_worker(Dice& dice, const LearnerOptions& learner, std::uint64_t full_policy_bytes,
                          double common_mbit, bool enrols, double disk_share) {
  WorkerOptions worker;
  const BitRate up = BitRate::from_mbit_per_s(common_mbit > 0 ? common_mbit : dice.log_uniform(4, 100));
  const BitRate down = BitRate::from_mbit_per_s(common_mbit > 0 ? common_mbit : dice.log_uniform(8, 200));
  if (dice.chance(0.3))
    worker.limits = {up, down};
  else
    worker.link = {up, down};
  if (dice.chance(0.2)) worker.clock_skew = dice.time(-seconds(60), seconds(60));
  if (dice.chance(0.03)) worker.clock_skew = dice.time(-hours(12), hours(12));
  if (dice.chance(0.05)) worker.open_files_max = 96 + dice.below(96);
  worker.behind_nat = dice.chance(0.1);
  worker.enrols = enrols;
  worker.disk = dice.chance(disk_share);
  worker.store.memory_max = {4 * full_policy_bytes};
  if (worker.disk) {
    worker.disk_options.write_delay = dice.time(Duration{}, milliseconds(10));
    worker.disk_options.read_delay = dice.time(Duration{}, milliseconds(10));
    worker.disk_options.save_delay = dice.time(Duration{}, milliseconds(50));
    worker.store.disk_max = {4 * full_policy_bytes};
    // Some disks become full, or so little memory is allowed that the disk must be used. With both, no policy would
    // fit.
    constexpr std::uint64_t kChunksInMemoryMin = 64;
    if (dice.chance(0.3))
      worker.disk_options.capacity_bytes = full_policy_bytes / 2 + dice.below(2 * full_policy_bytes);
    else if (dice.chance(0.5))
      worker.store.memory_max = {
          std::max<std::uint64_t>(full_policy_bytes / 4, kChunksInMemoryMin * learner.chunk_bytes)};
  }
  worker.install_time = dice.time(Duration{}, milliseconds(200));
  if (dice.chance(0.1)) worker.install_failure_share = dice.chance(0.2) ? 0.6 : 0.05;
  worker.restart_delay = dice.time(milliseconds(100), seconds(2));
  return worker;
}

// Adds events to a scenario: publications at a fixed interval, and faults at random times.
class Script {
 public:
  Script(SoakScenario& scenario, Dice& dice) : scenario_(scenario), dice_(dice) {}

  void add_publications(std::size_t count, Duration every, std::uint64_t full_policy_bytes) {
    for (std::size_t i = 0; i < count; ++i) {
      ScenarioEvent event = event_at(every * static_cast<std::int64_t>(i) + seconds(1));
      event.kind = ScenarioEvent::Kind::kPublish;
      event.is_delta = i > 0 && !dice_.chance(0.05);
      event.publish.bytes = event.is_delta ? 1 + dice_.below(full_policy_bytes / 2) : full_policy_bytes;
      event.publish.pieces = 1 + dice_.below(6);
      if (dice_.chance(0.05)) event.publish.abandon_after_pieces = dice_.below(event.publish.pieces);
      if (event.publish.pieces > 1) event.publish.encode_time = dice_.time(Duration{}, every);
      add(std::move(event));
    }
  }

  // Calls `add_fault` zero to 2 × mean times.
  void repeat_about(double mean, const std::function<void()>& add_fault) {
    const std::uint64_t times = dice_.below(static_cast<std::uint64_t>(2 * mean) + 1);
    for (std::uint64_t i = 0; i < times; ++i) add_fault();
  }

  void add_kill() {
    ScenarioEvent event = random_event(ScenarioEvent::Kind::kKill);
    event.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    if (dice_.chance(0.7)) event.length = dice_.time(milliseconds(50), seconds(6));  // otherwise it does not restart
    add(std::move(event));
  }
  void add_simple(ScenarioEvent::Kind kind) { add(random_event(kind)); }
  void add_lasting(ScenarioEvent::Kind kind, Duration length_max) {
    ScenarioEvent event = random_event(kind);
    event.length = dice_.time(milliseconds(50), length_max);
    add(std::move(event));
  }
  // The machine dies, and restarts after `length` with its clock moved by `clock_step`.
  void add_clock_step(ScenarioEvent::Kind kind) {
    ScenarioEvent event = random_event(kind);
    event.length = dice_.time(milliseconds(50), seconds(4));
    event.clock_step = dice_.time(-hours(6), hours(6));
    event.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    add(std::move(event));
  }
  void add_disk_corruption() {
    ScenarioEvent event = random_event(ScenarioEvent::Kind::kDiskCorruption);
    event.corrupted_pieces = 1 + dice_.below(kCorruptedPiecesMax);
    add(std::move(event));
  }
  // The learner is down for up to 5 s, rarely for up to 45 s. That can exceed away_max, after which workers leave.
  void add_learner_crash() {
    ScenarioEvent event = random_event(ScenarioEvent::Kind::kLearnerCrash);
    event.length = dice_.time(milliseconds(50), dice_.chance(0.05) ? seconds(45) : seconds(5));
    event.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    if (dice_.chance(0.4)) event.versions_lost = 1 + dice_.below(3);
    add(std::move(event));
  }
  // A partition lasts up to 8 s, rarely up to 45 s: also longer than away_max.
  void add_partition() {
    ScenarioEvent event = random_event(ScenarioEvent::Kind::kPartition);
    event.length = dice_.time(milliseconds(100), dice_.chance(0.03) ? seconds(45) : seconds(8));
    const double share = dice_.between(0.05, 0.6);
    for (std::size_t i = 0; i < scenario_.workers.size(); ++i)
      if (dice_.chance(share)) event.group.push_back(i);
    event.with_learner = dice_.chance(0.3);
    event.is_one_way = dice_.chance(0.3);
    event.loses_incoming = dice_.chance(0.5);
    add(std::move(event));
  }
  void add_join(std::size_t worker) {
    ScenarioEvent event = random_event(ScenarioEvent::Kind::kJoin);
    event.worker = worker;
    add(std::move(event));
  }
  void sort() {
    std::stable_sort(scenario_.events.begin(), scenario_.events.end(),
                     [](const ScenarioEvent& a, const ScenarioEvent& b) { return a.at < b.at; });
  }

 private:
  static ScenarioEvent event_at(Duration time) {
    ScenarioEvent event;
    event.at = time;
    return event;
  }
  // An event for a random worker at a random time.
  ScenarioEvent random_event(ScenarioEvent::Kind kind) {
    ScenarioEvent event = event_at(dice_.time(Duration{}, scenario_.fault_time));
    event.kind = kind;
    event.worker = dice_.below(scenario_.workers.size());
    return event;
  }
  void add(ScenarioEvent event) { scenario_.events.push_back(std::move(event)); }

  SoakScenario& scenario_;
  Dice& dice_;
};

}  // namespace

SoakScenario make_soak_scenario(std::uint64_t seed) {
  Dice dice(seed);
  SoakScenario scenario;
  scenario.seed = seed;
  scenario.world = make_world(seed, dice);
  scenario.fleet.seed = seed;
  scenario.fleet.fault_points = dice.chance(0.5);
  if (dice.chance(0.2)) scenario.fleet.certificate_lifetime = dice.time(seconds(8), seconds(60));
  if (dice.chance(0.3)) scenario.fleet.message_interval = dice.time(milliseconds(200), seconds(1));
  LearnerOptions& learner = scenario.fleet.learner;
  learner.chunk_bytes = 4096u << dice.below(5);                                         // 4 to 64 KiB
  scenario.workers_at_start = 2 + dice.below(std::uint64_t{1} << (1 + dice.below(6)));  // 2 to 65, more often few
  const std::size_t late_workers = dice.chance(0.5) ? dice.below(1 + scenario.workers_at_start / 3) : 0;
  // A policy has tens of kB to some MB. The number of chunks times workers is limited, because a seed should take only
  // a fraction of a second of CPU.
  const double full_bytes_max =
      std::min(4e6, 3000.0 * learner.chunk_bytes / static_cast<double>(scenario.workers_at_start + late_workers));
  const auto full_policy_bytes =
      static_cast<std::uint64_t>(dice.log_uniform(20'000, std::max(40'000.0, full_bytes_max)));
  randomize_learner(learner, dice, full_policy_bytes);
  const BitRate learner_up = *(learner.limits.up ? learner.limits.up : learner.link.up);
  const double bits_for_all =  // full policies, one for each worker
      8.0 * static_cast<double>(full_policy_bytes) * static_cast<double>(scenario.workers_at_start + late_workers);
  // A publication must not expire before the slowest topology has delivered it.
  if (learner.publication_lifetime < std::chrono::hours(1))
    learner.publication_lifetime +=
        from_seconds(2 * (bits_for_all / learner_up.bits_per_s + full_policy_bytes * 8 / kSlowestWorkerBitsPerS));
  const bool enrols = dice.chance(0.3);
  const double common_mbit = dice.chance(0.4) ? dice.log_uniform(8, 100) : 0, disk_share = dice.pick({0.0, 0.5, 1.0});
  for (std::size_t i = 0; i < scenario.workers_at_start + late_workers; ++i)
    scenario.workers.push_back(make_worker(dice, learner, full_policy_bytes, common_mbit, enrols, disk_share));
  if (scenario.workers_at_start >= 4 && dice.chance(0.5))
    for (std::uint64_t count = 1 + dice.below(3); count > 0; --count) {
      WorkerOptions& worker = scenario.workers[dice.below(scenario.workers.size())];
      worker.malice = make_malice(dice);
      worker.limits = {};  // without a rate limit the core sends whole frames, which malice can change
    }

  if (dice.chance(0.2))
    for (std::uint64_t count = 1 + dice.below(scenario.workers.size()); count > 0; --count)
      scenario.blocked_dials.emplace_back(dice.below(scenario.workers.size()), dice.below(scenario.workers.size()));

  const std::size_t publications = 1 + dice.below(8);
  const Duration every = dice.time(milliseconds(100), milliseconds(1500));
  scenario.fault_time = every * static_cast<std::int64_t>(publications) + seconds(2);
  Script script(scenario, dice);
  script.add_publications(publications, every, full_policy_bytes);
  for (std::size_t i = scenario.workers_at_start; i < scenario.workers.size(); ++i) script.add_join(i);
  const double fault_factor = dice.chance(0.15) ? 0 : 1;  // factor of all means; some fleets have no faults
  script.repeat_about(fault_factor * 2, [&] { script.add_kill(); });
  script.repeat_about(fault_factor * 1, [&] { script.add_simple(ScenarioEvent::Kind::kResetConnection); });
  script.repeat_about(fault_factor * 1, [&] { script.add_lasting(ScenarioEvent::Kind::kStopLinks, seconds(4)); });
  script.repeat_about(fault_factor * 1, [&] { script.add_lasting(ScenarioEvent::Kind::kPause, seconds(8)); });
  if (fault_factor > 0 && dice.chance(0.2)) script.add_lasting(ScenarioEvent::Kind::kLearnerPause, seconds(8));
  script.repeat_about(fault_factor * 1, [&] { script.add_partition(); });
  script.repeat_about(fault_factor * 1, [&] { script.add_lasting(ScenarioEvent::Kind::kDiskErrors, seconds(3)); });
  if (fault_factor > 0 && dice.chance(0.15)) script.add_lasting(ScenarioEvent::Kind::kLearnerDiskErrors, seconds(3));
  if (fault_factor > 0 && dice.chance(0.25)) script.add_simple(ScenarioEvent::Kind::kDrain);
  if (fault_factor > 0 && dice.chance(0.1)) script.add_simple(ScenarioEvent::Kind::kExpel);
  if (fault_factor > 0 && dice.chance(0.25)) script.add_learner_crash();
  script.repeat_about(fault_factor * 0.5, [&] { script.add_simple(ScenarioEvent::Kind::kChangeAddress); });
  script.repeat_about(fault_factor * 0.5, [&] { script.add_lasting(ScenarioEvent::Kind::kNoFiles, seconds(4)); });
  if (fault_factor > 0 && dice.chance(0.1)) script.add_lasting(ScenarioEvent::Kind::kLearnerNoFiles, seconds(3));
  if (disk_share > 0) script.repeat_about(fault_factor * 1, [&] { script.add_disk_corruption(); });
  if (fault_factor > 0 && dice.chance(0.1)) script.add_clock_step(ScenarioEvent::Kind::kClockStep);
  if (fault_factor > 0 && dice.chance(0.05)) script.add_clock_step(ScenarioEvent::Kind::kLearnerClockStep);
  script.sort();
  if (dice.chance(0.1)) {
    scenario.intruder = dice.time(milliseconds(100), milliseconds(500));
    if (dice.chance(0.7)) {
      WorkerOptions& worker = scenario.workers[dice.below(scenario.workers.size())];
      worker.malice.leak = true;
      worker.limits = {};
    }
  }
  scenario.final_bytes = 1 + dice.below(full_policy_bytes / 2);
  scenario.timed_bytes = std::max<std::uint64_t>(1, full_policy_bytes / 2);
  scenario.catch_up_time_max = seconds(180);
  if (dice.chance(0.06)) {
    scenario.sleep_time = dice.time(hours(1), hours(5));
    scenario.fleet.message_interval.reset();
    scenario.learner_stays_awake = dice.chance(0.4);
    if (scenario.learner_stays_awake) {  // sleep lasts hours, so heartbeats are less frequent
      learner.heartbeat = seconds(10);
      learner.network.heartbeat_timeout = seconds(60);
      learner.away_max = dice.chance(0.5) ? hours(8) : dice.time(seconds(60), hours(1));
      scenario.intruder.reset();
      scenario.catch_up_time_max = hours(1);
      for (WorkerOptions& worker : scenario.workers) {  // endless attacks in hours would be too many events
        worker.malice.flood = worker.malice.reconnect = worker.malice.slander = worker.malice.repeat_requests = false;
        worker.malice.flood_kind.reset();
      }
    }
  }
  if (scenario.sleep_time == Duration{} && dice.chance(0.12)) {
    scenario.delivery_time_max = seconds(45);
    // A star may first have to send a full policy to every worker.
    if (learner.policy == chains::TopologyPolicy::kStar)
      scenario.delivery_time_max += from_seconds(2 * bits_for_all / learner_up.bits_per_s);
    scenario.stream_time = scenario.delivery_time_max + seconds(30);
    scenario.stream_interval = dice.time(milliseconds(300), seconds(3));
    // At most the bytes that a star, or a chain of the slowest workers, carries in a quarter of the interval.
    const double bits_per_s =
        std::min(learner_up.bits_per_s / static_cast<double>(scenario.workers.size()), kSlowestWorkerBitsPerS);
    const auto carried_bytes =
        static_cast<std::uint64_t>(echoline::seconds(scenario.stream_interval) * bits_per_s / 8 / 4);
    scenario.stream_bytes =
        1 + std::min({std::uint64_t{2} * learner.chunk_bytes, full_policy_bytes / 4, carried_bytes});
  }
  for (WorkerOptions& worker : scenario.workers)
    if (worker.malice.any() && dice.chance(0.3)) {
      if (dice.chance(0.5))
        worker.malice.forge_share = dice.pick({0.05, 0.5});
      else
        worker.malice.withhold_share = dice.pick({0.02, 0.2});
    }
  return scenario;
}

std::string to_text(const SoakScenario& scenario) {
  std::size_t nat = 0, disk = 0;
  std::string malicious;
  for (std::size_t i = 0; i < scenario.workers.size(); ++i) {
    const WorkerOptions& worker = scenario.workers[i];
    nat += worker.behind_nat;
    disk += worker.disk;
    if (worker.malice.any()) malicious += fmt::format(", {} {}", i, to_text(worker.malice));
  }
  std::size_t publications = 0;
  for (const ScenarioEvent& event : scenario.events) publications += event.kind == ScenarioEvent::Kind::kPublish;
  return fmt::format(
      "{} workers and {} later ({} with a disk, {} behind NAT{}), {}, chunks of {}, {} publications of up to {} bytes "
      "in {:.1f} s, {} troubles, {} fences, delay {}, stalls {:.4f}{}{}{}{}{}{}{}{}",
      scenario.workers_at_start, scenario.workers.size() - scenario.workers_at_start, disk, nat, malicious,
      to_string(scenario.fleet.learner.policy), scenario.fleet.learner.chunk_bytes, publications,
      scenario.fleet.learner.snapshot_bytes, echoline::seconds(scenario.fault_time),
      scenario.events.size() - publications, scenario.blocked_dials.size(), echoline::to_text(scenario.world.delay),
      scenario.world.stalled_transfer_share, scenario.workers.front().enrols ? ", enrolment" : "",
      scenario.fleet.fault_points ? ", fault points" : "", scenario.fleet.message_interval ? ", messages" : "",
      scenario.fleet.certificate_lifetime < std::chrono::hours(1) ? ", short certificates" : "",
      scenario.fleet.learner.publication_lifetime < std::chrono::hours(1) ? ", publications expire" : "",
      scenario.intruder ? ", an intruder" : "",
      scenario.stream_time > Duration{}
          ? fmt::format(", in peace one every {}", echoline::to_text(scenario.stream_interval))
          : "",
      scenario.sleep_time == Duration{}
          ? ""
          : fmt::format(", {} sleeps for {:.1f} h", scenario.learner_stays_awake ? "the fleet" : "everybody",
                        echoline::seconds(scenario.sleep_time) / 3600));
}

}  // namespace echoline::sim
