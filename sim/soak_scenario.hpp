// A random soak test by its seed: a fleet, its publications and its faults. Plain data, so that it can be printed.
#pragma once
#include <string>
#include <vector>

#include "sim/fleet.hpp"

namespace echoline::sim {

// A publication, a fault or another event at a time after the start.
struct ScenarioEvent {
  enum class Kind {
    kPublish,
    kJoin,  // worker number `worker` joins
    kKill,  // crash or power loss; restarts after `length`, never if that is zero
    kDrain,
    kExpel,
    kReset,              // breaks one connection of the host
    kClog,               // no data passes the host's links, for `length`
    kPause,              // of the process, for `length`
    kLearnerPause,       // for `length`
    kPartition,          // of `group`, for `length`
    kDiskErrors,         // of the host's disk, for `length`
    kLearnerDiskErrors,  // of the learner's disk, for `length`
    kLearnerCrash,       // restarts after `length`, from a checkpoint
    kMove,               // the host gets another address
    kFiles,              // the process cannot open connections, for `length`
    kLearnerFiles,       // the learner cannot open connections, for `length`
    kRot,                // bits on the host's disk flip
    kClockStep,          // the machine restarts with another time
    kLearnerClockStep,   // the learner's machine restarts with another time
  };
  Duration at{}, length{};
  Kind kind{};
  std::size_t worker = 0;
  Death death = Death::kCrash;
  // Workers on one side of a partition. `one_way`: only data from that side to the other is lost; with `lose_incoming`,
  // only data to it. `with_learner`: the learner is on that side.
  std::vector<std::size_t> group;
  bool one_way = false, lose_incoming = false, with_learner = false;
  PublishSpec publish;
  Duration step{};                  // of a clock
  std::size_t pieces = 0;           // pieces of the disk that rot
  std::uint64_t versions_lost = 0;  // missing from the trainer's checkpoint
  bool delta = false;               // based on the newest version at that time
};

struct SoakScenario {
  std::uint64_t seed = 0;
  WorldOptions world;
  FleetOptions fleet;
  std::vector<WorkerOptions> workers;  // the first workers_at_start are present from the start
  std::size_t workers_at_start = 0;
  std::vector<std::pair<std::size_t, std::size_t>> blocked_dials;  // pairs in which the first cannot dial the second
  std::vector<ScenarioEvent> events;                               // ordered by time
  Duration fault_time{};                                           // the faults end after it: peace
  Duration sleep_time{};                      // machines sleep this long before the peace; zero: they do not
  bool learner_stays_awake = false;           // false: the learner's machine sleeps too
  std::optional<Duration> intruder;           // interval of an intruder's requests
  Duration peace_time_max{};                  // time in which all workers must catch up
  Duration stream_time{}, stream_interval{};  // duration and interval of small publications in peace
  std::uint64_t stream_bytes = 0;             // of each of them
  Duration lag_max{};                         // after stream_time no worker may be further behind than this
  std::uint64_t final_bytes = 0;              // of the publication that opens the peace
  std::uint64_t timed_bytes = 0;              // of the timed publication
};

SoakScenario make_soak_scenario(std::uint64_t seed);
// "17 workers (2 malicious, 1 behind NAT), echo2, ..."
std::string to_text(const SoakScenario& scenario);

}  // namespace echoline::sim
