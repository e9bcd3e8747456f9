#include "sim/soak_scenario.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::sim {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

// Draws from one random stream, in a fixed order.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : random_(seed, 9) {}
  std::uint64_t below(std::uint64_t n) { return random_.below(n); }
  bool chance(double p) { return random_.uniform() < p; }
  double between(double low, double high) { return low + (high - low) * random_.uniform(); }
  // Uniform in the logarithm.
  double spread(double low, double high) { return low * std::pow(high / low, random_.uniform()); }
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
  if (dice.chance(0.5)) o.stall_share = dice.spread(0.0005, 0.02);
  if (dice.chance(0.4)) o.split_share = dice.between(0, 0.3);
  return o;
}

void make_learner(LearnerOptions& o, Dice& dice, std::uint64_t full_bytes) {
  const BitRate up = BitRate::from_mbit_per_s(dice.spread(16, 400));
  if (dice.chance(0.3))
    o.limits.up = up;
  else
    o.link = {up, up};
  if (dice.chance(0.2)) o.clock_skew = dice.time(-seconds(30), seconds(30));
  if (dice.chance(0.05)) o.clock_skew = dice.time(-hours(12), hours(12));
  using enum chains::TopologyPolicy;
  o.policy = dice.pick({kTrees, kTrees, kTrees, kEcho2, kEcho2, kBestChains, kStar, kStripes});
  o.chooses_policy = dice.chance(0.3);
  o.chain_rate = BitRate::from_mbit_per_s(dice.spread(4, 40));
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
      m.freeze = true;
      break;
    case 5:
      m.greedy = true;
      break;
    default:
      m.lie = true;
      break;
  }
  if (dice.chance(0.1)) m.slander = true;
  if (dice.chance(0.1)) m.flood = true;
  if (dice.chance(0.1)) {
    using enum overlay::MessageBudget::Kind;
    m.flood_of = dice.pick({kHave, kRenew, kNeedHelp, kAck, kTrouble, kChunkRequest});
  }
  if (dice.chance(0.1)) m.reconnect = true;
  if (dice.chance(0.2)) m.lie = true;
  return m;
}

WorkerOptions make_worker(Dice& dice, const LearnerOptions& learner, std::uint64_t full_bytes, double equal_mbit,
                          bool enrol, double disk_share) {
  WorkerOptions o;
  const BitRate up = BitRate::from_mbit_per_s(equal_mbit > 0 ? equal_mbit : dice.spread(4, 100));
  const BitRate down = BitRate::from_mbit_per_s(equal_mbit > 0 ? equal_mbit : dice.spread(8, 200));
  if (dice.chance(0.3))
    o.limits = {up, down};
  else
    o.link = {up, down};
  if (dice.chance(0.2)) o.clock_skew = dice.time(-seconds(60), seconds(60));
  if (dice.chance(0.03)) o.clock_skew = dice.time(-hours(12), hours(12));
  if (dice.chance(0.05)) o.files = 96 + dice.below(96);
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

class Script {
 public:
  Script(SoakScenario& s, Dice& dice) : s_(s), dice_(dice) {}

  void publications(std::size_t count, Duration every, std::uint64_t full_bytes) {
    for (std::size_t i = 0; i < count; ++i) {
      Trouble t = at(every * static_cast<std::int64_t>(i) + seconds(1));
      t.kind = Trouble::Kind::kPublish;
      t.delta = i > 0 && !dice_.chance(0.05);
      t.publish.bytes = t.delta ? 1 + dice_.below(full_bytes / 2) : full_bytes;
      t.publish.pieces = 1 + dice_.below(6);
      if (dice_.chance(0.05)) t.publish.abandon_after = dice_.below(t.publish.pieces);
      if (t.publish.pieces > 1) t.publish.encode_time = dice_.time(Duration{}, every);
      add(std::move(t));
    }
  }

  void some(double mean, const std::function<void()>& one) {
    for (std::uint64_t n = dice_.below(static_cast<std::uint64_t>(2 * mean) + 1); n > 0; --n) one();
  }

  void kill() {
    Trouble t = any_time(Trouble::Kind::kKill);
    t.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    if (dice_.chance(0.7)) t.length = dice_.time(milliseconds(50), seconds(6));
    add(std::move(t));
  }
  void simple(Trouble::Kind kind) { add(any_time(kind)); }
  void lasting(Trouble::Kind kind, Duration most) {
    Trouble t = any_time(kind);
    t.length = dice_.time(milliseconds(50), most);
    add(std::move(t));
  }
  void clock_step(Trouble::Kind kind) {
    Trouble t = any_time(kind);
    t.length = dice_.time(milliseconds(50), seconds(4));
    t.step = dice_.time(-hours(6), hours(6));
    t.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    add(std::move(t));
  }
  void rot() {
    Trouble t = any_time(Trouble::Kind::kRot);
    t.pieces = 1 + dice_.below(8);
    add(std::move(t));
  }
  void learner_crash() {
    Trouble t = any_time(Trouble::Kind::kLearnerCrash);
    t.length = dice_.time(milliseconds(50), dice_.chance(0.05) ? seconds(45) : seconds(5));
    t.death = dice_.chance(0.5) ? Death::kCrash : Death::kPowerLoss;
    if (dice_.chance(0.4)) t.versions_lost = 1 + dice_.below(3);
    add(std::move(t));
  }
  void partition() {
    Trouble t = any_time(Trouble::Kind::kPartition);
    t.length = dice_.time(milliseconds(100), dice_.chance(0.03) ? seconds(45) : seconds(8));
    const double share = dice_.between(0.05, 0.6);
    for (std::size_t i = 0; i < s_.workers.size(); ++i)
      if (dice_.chance(share)) t.group.push_back(i);
    t.with_learner = dice_.chance(0.3);
    t.one_way = dice_.chance(0.3);
    t.reverse = dice_.chance(0.5);
    add(std::move(t));
  }
  void join(std::size_t worker) {
    Trouble t = any_time(Trouble::Kind::kJoin);
    t.worker = worker;
    add(std::move(t));
  }
  void sort() {
    std::stable_sort(s_.troubles.begin(), s_.troubles.end(),
                     [](const Trouble& a, const Trouble& b) { return a.at < b.at; });
  }

 private:
  static Trouble at(Duration when) {
    Trouble t;
    t.at = when;
    return t;
  }
  Trouble any_time(Trouble::Kind kind) {
    Trouble t = at(dice_.time(Duration{}, s_.length));
    t.kind = kind;
    t.worker = dice_.below(s_.workers.size());
    return t;
  }
  void add(Trouble t) { s_.troubles.push_back(std::move(t)); }

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
  s.at_start = 2 + dice.below(std::uint64_t{1} << (1 + dice.below(6)));
  const std::size_t late = dice.chance(0.5) ? dice.below(1 + s.at_start / 3) : 0;
  // Tens of kB to some MB, limited so that all chunks together take a fraction of a second of CPU.
  const double most = std::min(4e6, 3000.0 * learner.chunk_bytes / static_cast<double>(s.at_start + late));
  const auto full_bytes = static_cast<std::uint64_t>(dice.spread(20'000, std::max(40'000.0, most)));
  make_learner(learner, dice, full_bytes);
  const BitRate learner_up = *(learner.limits.up ? learner.limits.up : learner.link.up);
  const double all_bits = 8.0 * static_cast<double>(full_bytes) * static_cast<double>(s.at_start + late);
  // A publication must not expire before the slowest topology has delivered it.
  if (learner.publication_lifetime < std::chrono::hours(1))
    learner.publication_lifetime += from_seconds(2 * (all_bits / learner_up.bits_per_s + full_bytes * 8 / 4e6));
  const bool enrol = dice.chance(0.3);
  const double equal_mbit = dice.chance(0.4) ? dice.spread(8, 100) : 0, disk_share = dice.pick({0.0, 0.5, 1.0});
  for (std::size_t i = 0; i < s.at_start + late; ++i)
    s.workers.push_back(make_worker(dice, learner, full_bytes, equal_mbit, enrol, disk_share));
  if (s.at_start >= 4 && dice.chance(0.5))
    for (std::uint64_t n = 1 + dice.below(3); n > 0; --n) {
      WorkerOptions& w = s.workers[dice.below(s.workers.size())];
      w.malice = make_malice(dice);
      w.limits = {};  // whole frames, so that malice can change them
    }

  if (dice.chance(0.2))
    for (std::uint64_t n = 1 + dice.below(s.workers.size()); n > 0; --n)
      s.fences.emplace_back(dice.below(s.workers.size()), dice.below(s.workers.size()));

  const std::size_t count = 1 + dice.below(8);
  const Duration every = dice.time(milliseconds(100), milliseconds(1500));
  s.length = every * static_cast<std::int64_t>(count) + seconds(2);
  Script script(s, dice);
  script.publications(count, every, full_bytes);
  for (std::size_t i = s.at_start; i < s.workers.size(); ++i) script.join(i);
  const double calm = dice.chance(0.15) ? 0 : 1;  // some fleets meet no trouble
  script.some(calm * 2, [&] { script.kill(); });
  script.some(calm * 1, [&] { script.simple(Trouble::Kind::kReset); });
  script.some(calm * 1, [&] { script.lasting(Trouble::Kind::kClog, seconds(4)); });
  script.some(calm * 1, [&] { script.lasting(Trouble::Kind::kPause, seconds(8)); });
  if (calm > 0 && dice.chance(0.2)) script.lasting(Trouble::Kind::kLearnerPause, seconds(8));
  script.some(calm * 1, [&] { script.partition(); });
  script.some(calm * 1, [&] { script.lasting(Trouble::Kind::kDiskErrors, seconds(3)); });
  if (calm > 0 && dice.chance(0.15)) script.lasting(Trouble::Kind::kLearnerDiskErrors, seconds(3));
  if (calm > 0 && dice.chance(0.25)) script.simple(Trouble::Kind::kDrain);
  if (calm > 0 && dice.chance(0.1)) script.simple(Trouble::Kind::kExpel);
  if (calm > 0 && dice.chance(0.25)) script.learner_crash();
  script.some(calm * 0.5, [&] { script.simple(Trouble::Kind::kMove); });
  script.some(calm * 0.5, [&] { script.lasting(Trouble::Kind::kFiles, seconds(4)); });
  if (calm > 0 && dice.chance(0.1)) script.lasting(Trouble::Kind::kLearnerFiles, seconds(3));
  if (disk_share > 0) script.some(calm * 1, [&] { script.rot(); });
  if (calm > 0 && dice.chance(0.1)) script.clock_step(Trouble::Kind::kClockStep);
  if (calm > 0 && dice.chance(0.05)) script.clock_step(Trouble::Kind::kLearnerClockStep);
  script.sort();
  if (dice.chance(0.1)) {
    s.intruder = dice.time(milliseconds(100), milliseconds(500));
    if (dice.chance(0.7)) {
      WorkerOptions& w = s.workers[dice.below(s.workers.size())];
      w.malice.leak = true;
      w.limits = {};
    }
  }
  s.last_bytes = 1 + dice.below(full_bytes / 2);
  s.timed_bytes = std::max<std::uint64_t>(1, full_bytes / 2);
  s.peace = seconds(180);
  if (dice.chance(0.06)) {
    s.sleep = dice.time(hours(1), hours(5));
    s.fleet.message_every.reset();
    s.learner_wakes = dice.chance(0.4);
    if (s.learner_wakes) {  // sleep lasts hours, so heartbeats are less frequent
      learner.heartbeat = seconds(10);
      learner.network.heartbeat_timeout = seconds(60);
      learner.away_max = dice.chance(0.5) ? hours(8) : dice.time(seconds(60), hours(1));
      s.intruder.reset();
      s.peace = hours(1);
      for (WorkerOptions& w : s.workers) {  // nor are endless attacks
        w.malice.flood = w.malice.reconnect = w.malice.slander = w.malice.greedy = false;
        w.malice.flood_of.reset();
      }
    }
  }
  if (s.sleep == Duration{} && dice.chance(0.12)) {
    s.behind_max = seconds(45);
    // A star may first have to send a full policy to every worker.
    if (learner.policy == chains::TopologyPolicy::kStar)
      s.behind_max += from_seconds(2 * all_bits / learner_up.bits_per_s);
    s.stream = s.behind_max + seconds(30);
    s.stream_every = dice.time(milliseconds(300), seconds(3));
    // The bytes that a star, or a chain of the slowest workers, carries in a quarter of that time.
    const double rate = std::min(learner_up.bits_per_s / static_cast<double>(s.workers.size()), 4e6);
    s.stream_bytes = 1 + std::min({std::uint64_t{2} * learner.chunk_bytes, full_bytes / 4,
                                   static_cast<std::uint64_t>(echoline::seconds(s.stream_every) * rate / 32)});
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
  for (const Trouble& t : s.troubles) publications += t.kind == Trouble::Kind::kPublish;
  return fmt::format(
      "{} workers and {} later ({} with a disk, {} behind NAT{}), {}, chunks of {}, {} publications of up to {} bytes "
      "in "
      "{:.1f} s, {} troubles, {} fences, delay {}, stalls {:.4f}{}{}{}{}{}{}{}{}",
      s.at_start, s.workers.size() - s.at_start, disk, nat, malicious, to_string(s.fleet.learner.policy),
      s.fleet.learner.chunk_bytes, publications, s.fleet.learner.snapshot_bytes, echoline::seconds(s.length),
      s.troubles.size() - publications, s.fences.size(), echoline::to_text(s.world.delay), s.world.stall_share,
      s.workers.front().enrol ? ", enrolment" : "", s.fleet.fault_points ? ", fault points" : "",
      s.fleet.message_every ? ", messages" : "",
      s.fleet.certificate_lifetime < std::chrono::hours(1) ? ", short certificates" : "",
      s.fleet.learner.publication_lifetime < std::chrono::hours(1) ? ", publications expire" : "",
      s.intruder ? ", an intruder" : "",
      s.stream > Duration{} ? fmt::format(", in peace one every {}", echoline::to_text(s.stream_every)) : "",
      s.sleep == Duration{} ? ""
                            : fmt::format(", {} sleeps for {:.1f} h", s.learner_wakes ? "the fleet" : "everybody",
                                          echoline::seconds(s.sleep) / 3600));
}

}  // namespace echoline::sim
