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
  };
  Duration at{}, length{};
  Kind kind{};
  std::size_t worker = 0;
  Death death = Death::kCrash;
  std::vector<std::size_t> group;  // workers on one side
  bool one_way = false, reverse = false, with_learner = false;
  PublishSpec publish;
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
  Duration peace{};                                         // within which everybody must have caught up afterwards
  std::uint64_t last_bytes = 0;                             // of the publication that opens the phase of peace
};

SoakScenario make_soak_scenario(std::uint64_t seed);
// "17 workers (2 malicious, 1 behind NAT), echo2, ..."
std::string to_text(const SoakScenario& scenario);

}  // namespace echoline::sim
