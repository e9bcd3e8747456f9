// Clocks that are hours off, and machines that are away for longer than a certificate lives.
#include <gtest/gtest.h>

#include "base/log.hpp"
#include "sim/fleet.hpp"

namespace echoline::sim {
namespace {

using std::chrono::hours;
using std::chrono::minutes;
using std::chrono::seconds;

struct Trial {
  World world{WorldOptions{}};
  Fleet fleet{world, slow_heartbeats()};
  std::vector<std::size_t> workers;

  static FleetOptions slow_heartbeats() {  // hours pass
    FleetOptions o;
    o.learner.heartbeat = seconds(10);
    o.learner.network.heartbeat_timeout = seconds(60);
    return o;
  }
  void start(const std::vector<Duration>& skews) {
    log::configure(log::Level::kOff, "simulation");
    fleet.start_learner();
    for (const Duration skew : skews) {
      WorkerOptions o;
      o.clock_skew = skew;
      o.disk = true;
      o.store.memory_max = Bytes{1u << 20};
      o.store.disk_max = Bytes{1u << 24};
      workers.push_back(fleet.add_worker(o));
      fleet.start_worker(workers.back());
    }
  }
  bool run_until(const std::function<bool()>& holds, Duration limit = minutes(5)) {
    return world.run(world.now() + limit, [&] {
      fleet.check();
      world.check();
      return holds();
    });
  }
  bool all_have(Version version) {
    return run_until([&] {
      return std::all_of(workers.begin(), workers.end(), [&](std::size_t i) {
        const auto& active = fleet.worker(i).active;
        return active && active->version == version;
      });
    });
  }
  void publish(std::uint64_t version) {
    PublishSpec spec;
    if (version > 0) spec.base = Version{version - 1};
    spec.bytes = 100'000;
    fleet.publish(spec);
  }
};

TEST(Absence, ClocksThatAreHoursOffHinderNoWorker) {
  Trial trial;
  trial.start({hours(3), -hours(3), Duration{}, hours(12)});
  ASSERT_TRUE(trial.run_until([&] { return trial.fleet.learner()->stats().workers.size() == 4; }));
  trial.world.run(trial.world.now() + seconds(5));
  trial.publish(0);
  EXPECT_TRUE(trial.all_have(Version{0}));
  trial.world.run(trial.world.now() + hours(2));  // certificates have been renewed, grants too
  trial.publish(1);
  EXPECT_TRUE(trial.all_have(Version{1}));
  EXPECT_EQ(trial.fleet.learner()->stats().joined, 4u);
  EXPECT_EQ(trial.fleet.application_error(), "");
  // Workers forwarded to each other: the learner has sent each version about once.
  EXPECT_LE(trial.fleet.learner()->stats().chunk_bytes_sent.count, 8 * 100'000u);
}

TEST(Absence, AMachineThatSleptForHoursKeepsItsIdentity) {
  Trial trial;
  trial.start({Duration{}, Duration{}, Duration{}});
  ASSERT_TRUE(trial.run_until([&] { return trial.fleet.learner()->stats().workers.size() == 3; }));
  trial.publish(0);
  ASSERT_TRUE(trial.all_have(Version{0}));
  const WorkerId id = trial.fleet.worker(1).state->worker;
  const std::uint64_t enrolments = trial.fleet.worker(1).enrolments;
  trial.world.pause(trial.fleet.worker(1).host, trial.world.now() + hours(3));
  trial.world.run(trial.world.now() + hours(3) - seconds(1));
  EXPECT_EQ(trial.fleet.learner()->stats().workers.size(), 2u);
  trial.publish(1);
  EXPECT_TRUE(trial.all_have(Version{1}));
  EXPECT_EQ(trial.fleet.worker(1).state->worker, id);
  EXPECT_EQ(trial.fleet.worker(1).enrolments, enrolments) << "with the key it had";
  EXPECT_EQ(trial.fleet.learner()->stats().workers.size(), 3u);
  // A machine that was switched off keeps everything on its disk.
  trial.fleet.kill_worker(2, Death::kPowerLoss);
  trial.world.run(trial.world.now() + hours(3));
  trial.fleet.start_worker(2);
  trial.publish(2);
  EXPECT_TRUE(trial.all_have(Version{2}));
  EXPECT_EQ(trial.fleet.worker(2).enrolments, 1u);
  EXPECT_EQ(trial.fleet.application_error(), "");
}

}  // namespace
}  // namespace echoline::sim
