// What one seed of the soak test makes: a fleet, and the troubles it meets. Plain data, so that it can be told.
#pragma once
#include <string>
#include <vector>

#include "sim/fleet.hpp"

namespace echoline::sim {

// What happens at a time after the start.
struct Trouble {
  enum class Kind {
    kPublish,
    kJoin,  // a further worker: `worker` is its number
    kKill,  // crash or power loss; comes back after `length`, or never when that is zero
    kDrain,
    kExpel,
    kReset,              // one connection of the host breaks
    kClog,               // for `length`
    kPause,              // of the process, for `length`
    kLearnerPause,       // for `length`
    kPartition,          // of `group`, for `length`
    kDiskErrors,         // for `length`
    kLearnerDiskErrors,  // for `length`
    kLearnerCrash,       // back after `length`, from a checkpoint
    kMove,               // the host has another address
    kFiles,              // the process can open no more connections, for `length`
    kLearnerFiles,       // for `length`
    kRot,                // bits of what lies on the host's disk turn over
    kClockStep,          // the machine starts again with another time
    kLearnerClockStep,   // the learner's, likewise
  };
  Duration at{}, length{};
  Kind kind{};
  std::size_t worker = 0;
  Death death = Death::kCrash;
  std::vector<std::size_t> group;  // workers on one side
  bool one_way = false, reverse = false, with_learner = false;
  PublishSpec publish;
  Duration step{};                  // of a clock
  std::size_t pieces = 0;           // of a disk that rot
  std::uint64_t versions_lost = 0;  // that the trainer's checkpoint lacks
  bool delta = false;               // on the newest version, whichever that is then
};

struct SoakScenario {
  std::uint64_t seed = 0;
  WorldOptions world;
  FleetOptions fleet;
  std::vector<WorkerOptions> workers;  // the first `at_start` are there from the start
  std::size_t at_start = 0;
  std::vector<std::pair<std::size_t, std::size_t>> fences;  // workers of which the first cannot dial the second
  std::vector<Trouble> troubles;                            // in order of time
  Duration length{};                                        // of the phase of trouble
  Duration sleep{};                   // between trouble and peace: everybody is suspended or switched off for so long,
  bool learner_wakes = false;         // and the learner, too, or not
  std::optional<Duration> intruder;   // asks so often for what it is not granted
  Duration peace{};                   // within which everybody must have caught up afterwards
  Duration stream{}, stream_every{};  // how long there are small publications in peace, and how often,
  std::uint64_t stream_bytes = 0;     // of so many bytes
  Duration behind_max{};              // then nobody may be further behind than what was published so long ago
  std::uint64_t last_bytes = 0;       // of the publication that opens the phase of peace
  std::uint64_t timed_bytes = 0;      // of the one that is timed
};

SoakScenario make_soak_scenario(std::uint64_t seed);
// "17 workers (2 malicious, 1 behind NAT), echo2, ..."
std::string to_text(const SoakScenario& scenario);

}  // namespace echoline::sim
