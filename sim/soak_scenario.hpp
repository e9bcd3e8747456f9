// The scenario of one soak seed: a fleet and its troubles. Plain data, so that it can be printed.
#pragma once
#include <string>
#include <vector>

#include "sim/fleet.hpp"

namespace echoline::sim {

// An event at a time after the start.
struct Trouble {
  enum class Kind {
    kPublish,
    kJoin,  // worker number `worker` joins
    kKill,  // crash or power loss; restarts after `length`, never if that is zero
    kDrain,
    kExpel,
    kReset,              // breaks one connection of the host
    kClog,               // for `length`
    kPause,              // of the process, for `length`
    kLearnerPause,       // for `length`
    kPartition,          // of `group`, for `length`
    kDiskErrors,         // for `length`
    kLearnerDiskErrors,  // for `length`
    kLearnerCrash,       // restarts after `length`, from a checkpoint
    kMove,               // the host gets another address
    kFiles,              // the process cannot open connections, for `length`
    kLearnerFiles,       // for `length`
    kRot,                // bits on the host's disk flip
    kClockStep,          // the machine restarts with another time
    kLearnerClockStep,   // the learner's machine restarts with another time
  };
  Duration at{}, length{};
  Kind kind{};
  std::size_t worker = 0;
  Death death = Death::kCrash;
  std::vector<std::size_t> group;  // workers on one side
  bool one_way = false, reverse = false, with_learner = false;
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
  std::vector<WorkerOptions> workers;  // the first `at_start` are present from the start
  std::size_t at_start = 0;
  std::vector<std::pair<std::size_t, std::size_t>> fences;  // pairs in which the first cannot dial the second
  std::vector<Trouble> troubles;                            // ordered by time
  Duration length{};                                        // of the phase of trouble
  Duration sleep{};                                         // machines sleep this long between trouble and peace,
  bool learner_wakes = false;                               // perhaps with the learner
  std::optional<Duration> intruder;                         // interval of an intruder's requests
  Duration peace{};                                         // time in which all workers must catch up
  Duration stream{}, stream_every{};                        // duration and interval of small publications in peace
  std::uint64_t stream_bytes = 0;                           // of each of them
  Duration behind_max{};                                    // then no worker may be further behind than this
  std::uint64_t last_bytes = 0;                             // of the publication that opens the peace
  std::uint64_t timed_bytes = 0;                            // of the timed publication
};

SoakScenario make_soak_scenario(std::uint64_t seed);
// "17 workers (2 malicious, 1 behind NAT), echo2, ..."
std::string to_text(const SoakScenario& scenario);

}  // namespace echoline::sim
