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

// Random values from one stream, in a fixed order.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed, kScenarioStream) {}
  std::uint64_t below(std::uint64_t n) { return random_.below(n); }
  bool chance(double p) { return random_.uniform() < p; }
  double between(double low, double high) { return low + (high - low) * random_.uniform(); }
  // The logarithm is uniform.
  double log_uniform(double low, double high) { return low * std::pow(high / low, random_.uniform()); }
  Duration time(Duration low, Duration high) {
    return low + Duration(static_cast<std::int64_t>(random_.uniform() * static_cast<double>((high - low).count())));
  }
  template <class T>
  T pick(std::initializer_list<T> of) {
    return *(of.begin() + random_.below(of.size()));
  }

 private:
  Random random_;
};

WorldOptions make_world(std::uint64_t seed, Dice& dice) {
  WorldOptions o;
  o.seed = seed;
  o.delay = dice.time(Duration{}, milliseconds(80));
  if (dice.chance(0.5)) o.jitter = dice.time(Duration{}, milliseconds(20));
  if (dice.chance(0.5)) o.stall_share = dice.log_uniform(0.0005, 0.02);
  if (dice.chance(0.4)) o.split_transfer_share = dice.between(0, 0.3);
  return o;
}

void randomize_learner(LearnerOptions& o, Dice& dice, std::uint64_t full_bytes) {
  const BitRate up = BitRate::from_mbit_per_s(dice.log_uniform(16, 400));
  if (dice.chance(0.3))
    o.limits.up = up;  // the program limits its rate; otherwise the link does
  else
    o.link = {up, up};
  if (dice.chance(0.2)) o.clock_skew = dice.time(-seconds(30), seconds(30));
  if (dice.chance(0.05)) o.clock_skew = dice.time(-hours(12), hours(12));
  using enum chains::TopologyPolicy;
  o.policy = dice.pick({kTrees, kTrees, kTrees, kEcho2, kEcho2, kBestChains, kStar, kStripes});
  o.chooses_policy = dice.chance(0.3);
  o.chain_rate = BitRate::from_mbit_per_s(dice.log_uniform(4, 40));
  // The multiple of the chain rate that the uplink carries: one to eight chains.
  o.up_least =
      BitRate{o.chain_rate.bits_per_s * std::floor(std::clamp(up.bits_per_s / o.chain_rate.bits_per_s, 1.0, 8.0))};
  o.heartbeat = dice.time(milliseconds(100), milliseconds(500));
  o.network.heartbeat_timeout = o.heartbeat * static_cast<std::int64_t>(4 + dice.below(4));
  if (dice.chance(0.5)) o.away_max = dice.time(seconds(10), seconds(60));
  o.network.quorum = dice.between(0.5, 1.0);
  if (dice.chance(0.3)) o.store = {3 * full_bytes};
  if (dice.chance(0.1)) o.publication_lifetime = dice.time(seconds(5), seconds(40));
  o.snapshot_bytes = full_bytes;
  o.snapshot_encode_time = dice.time(Duration{}, milliseconds(500));
  if (dice.chance(0.6)) o.folded_max = 1 + dice.below(20);
}

MaliceOptions make_malice(Dice& dice) {
  MaliceOptions m;
  switch (dice.below(7)) {
    case 0:
    case 1:
      m.flip_share = dice.pick({0.01, 0.1, 1.0});
      break;
    case 2:
      m.replay_share = dice.between(0.01, 0.3);
      break;
    case 3:
      m.garbage_share = dice.between(0.001, 0.05);
      break;
    case 4:
      m.forward_nothing = true;
      break;
    case 5:
      m.repeat_requests = true;
      break;
    default:
      m.misreport_progress = true;
      break;
  }
  if (dice.chance(0.1)) m.slander = true;
  if (dice.chance(0.1)) m.flood = true;
  if (dice.chance(0.1)) {
    using enum overlay::MessageBudget::Kind;
    m.flood_kind = dice.pick({kHave, kRenew, kNeedHelp, kAck, kTrouble, kChunkRequest});
  }
  if (dice.chance(0.1)) m.reconnect = true;
  if (dice.chance(0.2)) m.misreport_progress = true;
  return m;
}

// `common_mbit`: the rate of all workers' links; 0: every worker draws its own.
WorkerOptions make_worker(Dice& dice, const LearnerOptions& learner, std::uint64_t full_bytes, double common_mbit,
                          bool enrol, double disk_share) {
  WorkerOptions o;
  const BitRate up = BitRate::from_mbit_per_s(common_mbit > 0 ? common_mbit : dice.log_uniform(4, 100));
  const BitRate down = BitRate::from_mbit_per_s(common_mbit > 0 ? common_mbit : dice.log_uniform(8, 200));
  if (dice.chance(0.3))
    o.limits = {up, down};
  else
    o.link = {up, down};
  if (dice.chance(0.2)) o.clock_skew = dice.time(-seconds(60), seconds(60));
  if (dice.chance(0.03)) o.clock_skew = dice.time(-hours(12), hours(12));
  if (dice.chance(0.05)) o.open_files_max = 96 + dice.below(96);
  o.nat = dice.chance(0.1);
  o.enrol = enrol;
  o.disk = dice.chance(disk_share);
  o.store.memory_max = {4 * full_bytes};
  if (o.disk) {
    o.disk_options.write_delay = dice.time(Duration{}, milliseconds(10));
    o.disk_options.read_delay = dice.time(Duration{}, milliseconds(10));
    o.disk_options.save_delay = dice.time(Duration{}, milliseconds(50));
    o.store.disk_max = {4 * full_bytes};
    if (dice.chance(0.3))
      o.disk_options.capacity_bytes = full_bytes / 2 + dice.below(2 * full_bytes);
    else if (dice.chance(0.5))
      o.store.memory_max = {std::max<std::uint64_t>(full_bytes / 4, 64 * learner.chunk_bytes)};
  }
  o.install_time = dice.time(Duration{}, milliseconds(200));
  if (dice.chance(0.1)) o.install_failure_share = dice.chance(0.2) ? 0.6 : 0.05;
  o.restart_after = dice.time(milliseconds(100), seconds(2));
  return o;
}

// Adds publications at a fixed interval, and faults at random times, to the scenario.
class Script {
 public:
  Script(SoakScenario& s, Dice& dice) : s_(s), dice_(dice) {}

  void add_publications(std::size_t count, Duration every, std::uint64_t full_bytes) {
    for (std::size_t i = 0; i < count; ++i) {
      ScenarioEvent event = at(every * static_cast<std::int64_t>(i) + seconds(1));
      event.kind = ScenarioEvent::Kind::kPublish;
      event.delta = i > 0 && !dice_.chance(0.05);
      event.publish.bytes = event.delta ? 1 + dice_.below(full_bytes / 2) : full_bytes;
      event.publish.pieces = 1 + dice_.below(6);
      if (dice_.chance(0.05)) event.publish.abandon_after = dice_.below(event.publish.pieces);
      if (event.publish.pieces > 1) event.publish.encode_time = dice_.time(Duration{}, every);
      add(std::move(event));
    }
  }

  // Calls `one` zero to 2 × mean times.
  void repeat_about(double mean, const std::function<void()>& one) {
    for (std::uint64_t n = dice_.below(static_cast<std::uint64_t>(2 * mean) + 1); n > 0; --n) one();
  }

  void add_kill() {
    ScenarioEvent event = any_time(ScenarioEvent::Kind::kKill);
    event.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    if (dice_.chance(0.7)) event.length = dice_.time(milliseconds(50), seconds(6));  // otherwise it does not restart
    add(std::move(event));
  }
  void add_simple(ScenarioEvent::Kind kind) { add(any_time(kind)); }
  void add_lasting(ScenarioEvent::Kind kind, Duration length_max) {
    ScenarioEvent event = any_time(kind);
    event.length = dice_.time(milliseconds(50), length_max);
    add(std::move(event));
  }
  // The machine restarts with another time: it dies, and its process starts again after `length`.
  void add_clock_step(ScenarioEvent::Kind kind) {
    ScenarioEvent event = any_time(kind);
    event.length = dice_.time(milliseconds(50), seconds(4));
    event.step = dice_.time(-hours(6), hours(6));
    event.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    add(std::move(event));
  }
  void add_rot() {
    ScenarioEvent event = any_time(ScenarioEvent::Kind::kRot);
    event.pieces = 1 + dice_.below(8);
    add(std::move(event));
  }
  // Rarely up to 45 s, which can be more than away_max.
  void add_learner_crash() {
    ScenarioEvent event = any_time(ScenarioEvent::Kind::kLearnerCrash);
    event.length = dice_.time(milliseconds(50), dice_.chance(0.05) ? seconds(45) : seconds(5));
    event.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    if (dice_.chance(0.4)) event.versions_lost = 1 + dice_.below(3);
    add(std::move(event));
  }
  void add_partition() {  // rarely up to 45 s, as above
    ScenarioEvent event = any_time(ScenarioEvent::Kind::kPartition);
    event.length = dice_.time(milliseconds(100), dice_.chance(0.03) ? seconds(45) : seconds(8));
    const double share = dice_.between(0.05, 0.6);
    for (std::size_t i = 0; i < s_.workers.size(); ++i)
      if (dice_.chance(share)) event.group.push_back(i);
    event.with_learner = dice_.chance(0.3);
    event.one_way = dice_.chance(0.3);
    event.lose_incoming = dice_.chance(0.5);
    add(std::move(event));
  }
  void add_join(std::size_t worker) {
    ScenarioEvent event = any_time(ScenarioEvent::Kind::kJoin);
    event.worker = worker;
    add(std::move(event));
  }
  void sort() {
    std::stable_sort(s_.events.begin(), s_.events.end(),
                     [](const ScenarioEvent& a, const ScenarioEvent& b) { return a.at < b.at; });
  }

 private:
  static ScenarioEvent at(Duration when) {
    ScenarioEvent event;
    event.at = when;
    return event;
  }
  ScenarioEvent any_time(ScenarioEvent::Kind kind) {
    ScenarioEvent event = at(dice_.time(Duration{}, s_.fault_time));
    event.kind = kind;
    event.worker = dice_.below(s_.workers.size());
    return event;
  }
  void add(ScenarioEvent event) { s_.events.push_back(std::move(event)); }

  SoakScenario& s_;
  Dice& dice_;
};

}  // namespace

SoakScenario make_soak_scenario(std::uint64_t seed) {
  Dice dice(seed);
  SoakScenario s;
  s.seed = seed;
  s.world = make_world(seed, dice);
  s.fleet.seed = seed;
  s.fleet.fault_points = dice.chance(0.5);
  if (dice.chance(0.2)) s.fleet.certificate_lifetime = dice.time(seconds(8), seconds(60));
  if (dice.chance(0.3)) s.fleet.message_every = dice.time(milliseconds(200), seconds(1));
  LearnerOptions& learner = s.fleet.learner;
  learner.chunk_bytes = 4096u << dice.below(5);
  s.workers_at_start = 2 + dice.below(std::uint64_t{1} << (1 + dice.below(6)));  // 2 to 65, more often few
  const std::size_t late_workers = dice.chance(0.5) ? dice.below(1 + s.workers_at_start / 3) : 0;
  // Tens of kB to some MB, limited so that all chunks together take a fraction of a second of CPU.
  const double full_bytes_max =
      std::min(4e6, 3000.0 * learner.chunk_bytes / static_cast<double>(s.workers_at_start + late_workers));
  const auto full_bytes = static_cast<std::uint64_t>(dice.log_uniform(20'000, std::max(40'000.0, full_bytes_max)));
  randomize_learner(learner, dice, full_bytes);
  const BitRate learner_up = *(learner.limits.up ? learner.limits.up : learner.link.up);
  const double all_bits =
      8.0 * static_cast<double>(full_bytes) * static_cast<double>(s.workers_at_start + late_workers);
  // A publication must not expire before the slowest topology has delivered it.
  if (learner.publication_lifetime < std::chrono::hours(1))
    learner.publication_lifetime += from_seconds(2 * (all_bits / learner_up.bits_per_s + full_bytes * 8 / 4e6));
  const bool enrol = dice.chance(0.3);
  const double common_mbit = dice.chance(0.4) ? dice.log_uniform(8, 100) : 0, disk_share = dice.pick({0.0, 0.5, 1.0});
  for (std::size_t i = 0; i < s.workers_at_start + late_workers; ++i)
    s.workers.push_back(make_worker(dice, learner, full_bytes, common_mbit, enrol, disk_share));
  if (s.workers_at_start >= 4 && dice.chance(0.5))
    for (std::uint64_t n = 1 + dice.below(3); n > 0; --n) {
      WorkerOptions& w = s.workers[dice.below(s.workers.size())];
      w.malice = make_malice(dice);
      w.limits = {};  // whole frames, so that malice can change them
    }

  if (dice.chance(0.2))
    for (std::uint64_t n = 1 + dice.below(s.workers.size()); n > 0; --n)
      s.blocked_dials.emplace_back(dice.below(s.workers.size()), dice.below(s.workers.size()));

  const std::size_t count = 1 + dice.below(8);
  const Duration every = dice.time(milliseconds(100), milliseconds(1500));
  s.fault_time = every * static_cast<std::int64_t>(count) + seconds(2);
  Script script(s, dice);
  script.add_publications(count, every, full_bytes);
  for (std::size_t i = s.workers_at_start; i < s.workers.size(); ++i) script.add_join(i);
  const double fault_factor = dice.chance(0.15) ? 0 : 1;  // some fleets have no faults
  script.repeat_about(fault_factor * 2, [&] { script.add_kill(); });
  script.repeat_about(fault_factor * 1, [&] { script.add_simple(ScenarioEvent::Kind::kReset); });
  script.repeat_about(fault_factor * 1, [&] { script.add_lasting(ScenarioEvent::Kind::kClog, seconds(4)); });
  script.repeat_about(fault_factor * 1, [&] { script.add_lasting(ScenarioEvent::Kind::kPause, seconds(8)); });
  if (fault_factor > 0 && dice.chance(0.2)) script.add_lasting(ScenarioEvent::Kind::kLearnerPause, seconds(8));
  script.repeat_about(fault_factor * 1, [&] { script.add_partition(); });
  script.repeat_about(fault_factor * 1, [&] { script.add_lasting(ScenarioEvent::Kind::kDiskErrors, seconds(3)); });
  if (fault_factor > 0 && dice.chance(0.15)) script.add_lasting(ScenarioEvent::Kind::kLearnerDiskErrors, seconds(3));
  if (fault_factor > 0 && dice.chance(0.25)) script.add_simple(ScenarioEvent::Kind::kDrain);
  if (fault_factor > 0 && dice.chance(0.1)) script.add_simple(ScenarioEvent::Kind::kExpel);
  if (fault_factor > 0 && dice.chance(0.25)) script.add_learner_crash();
  script.repeat_about(fault_factor * 0.5, [&] { script.add_simple(ScenarioEvent::Kind::kMove); });
  script.repeat_about(fault_factor * 0.5, [&] { script.add_lasting(ScenarioEvent::Kind::kFiles, seconds(4)); });
  if (fault_factor > 0 && dice.chance(0.1)) script.add_lasting(ScenarioEvent::Kind::kLearnerFiles, seconds(3));
  if (disk_share > 0) script.repeat_about(fault_factor * 1, [&] { script.add_rot(); });
  if (fault_factor > 0 && dice.chance(0.1)) script.add_clock_step(ScenarioEvent::Kind::kClockStep);
  if (fault_factor > 0 && dice.chance(0.05)) script.add_clock_step(ScenarioEvent::Kind::kLearnerClockStep);
  script.sort();
  if (dice.chance(0.1)) {
    s.intruder = dice.time(milliseconds(100), milliseconds(500));
    if (dice.chance(0.7)) {
      WorkerOptions& w = s.workers[dice.below(s.workers.size())];
      w.malice.leak = true;
      w.limits = {};
    }
  }
  s.final_bytes = 1 + dice.below(full_bytes / 2);
  s.timed_bytes = std::max<std::uint64_t>(1, full_bytes / 2);
  s.peace_time_max = seconds(180);
  if (dice.chance(0.06)) {
    s.sleep_time = dice.time(hours(1), hours(5));
    s.fleet.message_every.reset();
    s.learner_stays_awake = dice.chance(0.4);
    if (s.learner_stays_awake) {  // sleep lasts hours, so heartbeats are less frequent
      learner.heartbeat = seconds(10);
      learner.network.heartbeat_timeout = seconds(60);
      learner.away_max = dice.chance(0.5) ? hours(8) : dice.time(seconds(60), hours(1));
      s.intruder.reset();
      s.peace_time_max = hours(1);
      for (WorkerOptions& w : s.workers) {  // endless attacks would take too many events
        w.malice.flood = w.malice.reconnect = w.malice.slander = w.malice.repeat_requests = false;
        w.malice.flood_kind.reset();
      }
    }
  }
  if (s.sleep_time == Duration{} && dice.chance(0.12)) {
    s.lag_max = seconds(45);
    // A star may first have to send a full policy to every worker.
    if (learner.policy == chains::TopologyPolicy::kStar)
      s.lag_max += from_seconds(2 * all_bits / learner_up.bits_per_s);
    s.stream_time = s.lag_max + seconds(30);
    s.stream_interval = dice.time(milliseconds(300), seconds(3));
    // The bytes that a star, or a chain of the slowest workers, carries in a quarter of that time.
    const double rate = std::min(learner_up.bits_per_s / static_cast<double>(s.workers.size()), 4e6);
    s.stream_bytes = 1 + std::min({std::uint64_t{2} * learner.chunk_bytes, full_bytes / 4,
                                   static_cast<std::uint64_t>(echoline::seconds(s.stream_interval) * rate / 32)});
  }
  for (WorkerOptions& w : s.workers)
    if (w.malice.any() && dice.chance(0.3)) {
      if (dice.chance(0.5))
        w.malice.forge_share = dice.pick({0.05, 0.5});
      else
        w.malice.withhold_share = dice.pick({0.02, 0.2});
    }
  return s;
}

std::string to_text(const SoakScenario& s) {
  std::size_t nat = 0, disk = 0;
  std::string malicious;
  for (std::size_t i = 0; i < s.workers.size(); ++i) {
    const WorkerOptions& w = s.workers[i];
    nat += w.nat;
    disk += w.disk;
    if (w.malice.any()) malicious += fmt::format(", {} {}", i, to_text(w.malice));
  }
  std::size_t publications = 0;
  for (const ScenarioEvent& event : s.events) publications += event.kind == ScenarioEvent::Kind::kPublish;
  return fmt::format(
      "{} workers and {} later ({} with a disk, {} behind NAT{}), {}, chunks of {}, {} publications of up to {} bytes "
      "in {:.1f} s, {} troubles, {} fences, delay {}, stalls {:.4f}{}{}{}{}{}{}{}{}",
      s.workers_at_start, s.workers.size() - s.workers_at_start, disk, nat, malicious,
      to_string(s.fleet.learner.policy), s.fleet.learner.chunk_bytes, publications, s.fleet.learner.snapshot_bytes,
      echoline::seconds(s.fault_time), s.events.size() - publications, s.blocked_dials.size(),
      echoline::to_text(s.world.delay), s.world.stall_share, s.workers.front().enrol ? ", enrolment" : "",
      s.fleet.fault_points ? ", fault points" : "", s.fleet.message_every ? ", messages" : "",
      s.fleet.certificate_lifetime < std::chrono::hours(1) ? ", short certificates" : "",
      s.fleet.learner.publication_lifetime < std::chrono::hours(1) ? ", publications expire" : "",
      s.intruder ? ", an intruder" : "",
      s.stream_time > Duration{} ? fmt::format(", in peace one every {}", echoline::to_text(s.stream_interval)) : "",
      s.sleep_time == Duration{}
          ? ""
          : fmt::format(", {} sleeps for {:.1f} h", s.learner_stays_awake ? "the fleet" : "everybody",
                        echoline::seconds(s.sleep_time) / 3600));
}

}  // namespace echoline::sim
