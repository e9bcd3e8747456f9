// A random soak test by its seed: a fleet, its publications and its faults. After the faults comes a phase without any,
// the peace, in which all workers must catch up. Plain data, so that it can be printed.
#pragma once
#include <string>
#include <vector>

#include "sim/fleet.hpp"

namespace echoline::sim {

// A publication, a fault or another event at a time after the start. Unless a comment names the learner, it is about
// worker number `worker` and its host.
struct ScenarioEvent {
  enum class Kind {
    kPublish,            // the learner publishes the next version, as `publish` and `is_delta` say
    kJoin,               // worker number `worker` joins
    kKill,               // crash or power loss; restarts after `length`, never if that is zero
    kDrain,              // the worker leaves in an orderly way
    kExpel,              // the learner revokes the worker
    kResetConnection,    // breaks one connection of the host
    kStopLinks,          // no data passes the host's links, for `length`
    kPause,              // stops the process, for `length`
    kLearnerPause,       // stops the learner's process, for `length`
    kPartition,          // separates `group` from all other hosts, for `length`
    kDiskErrors,         // operations of the host's disk fail, for `length`
    kLearnerDiskErrors,  // operations of the learner's disk fail, for `length`
    kLearnerCrash,       // the learner restarts after `length`, from a checkpoint
    kChangeAddress,      // the host gets another address
    kNoFiles,            // the process may not open files, so no connections, for `length`
    kLearnerNoFiles,     // the learner may not open files, so no connections, for `length`
    kDiskCorruption,     // bits on the host's disk flip
    kClockStep,          // the machine dies; it restarts after `length` with its clock moved by `clock_step`
    kLearnerClockStep,   // the learner's machine dies, and restarts in the same way
  };
  Duration at{};      // after the start
  Duration length{};  // of the fault, or until a restart
  Kind kind{};
  std::size_t worker = 0;
  Death death = Death::kCrash;
  // Workers on one side of a partition. `with_learner`: the learner is on that side. `is_one_way`: only data from that
  // side is lost, or only data to that side if `loses_incoming` is set.
  std::vector<std::size_t> group;
  bool is_one_way = false, loses_incoming = false, with_learner = false;
  PublishSpec publish;
  Duration clock_step{};             // added to the host's clock
  std::size_t corrupted_pieces = 0;  // data pieces on the disk in which a bit flips
  std::uint64_t versions_lost = 0;   // newest versions that the trainer's checkpoint lacks
  bool is_delta = false;             // the publication is based on the newest version at that time
};

struct SoakScenario {
  std::uint64_t seed = 0;
  WorldOptions world;
  FleetOptions fleet;
  std::vector<WorkerOptions> workers;  // the first workers_at_start are present from the start
  std::size_t workers_at_start = 0;
  std::vector<std::pair<std::size_t, std::size_t>> blocked_dials;  // pairs in which the first cannot dial the second
  std::vector<ScenarioEvent> events;                               // ordered by time
  Duration fault_time{};                                           // from the start until the faults end
  Duration sleep_time{};                      // machines sleep this long before the peace; zero: they do not
  bool learner_stays_awake = false;           // false: the learner's machine sleeps too
  std::optional<Duration> intruder;           // interval of an intruder's requests
  Duration catch_up_time_max{};               // time in peace in which all workers must catch up
  Duration stream_time{}, stream_interval{};  // duration and interval of small publications in peace
  std::uint64_t stream_bytes = 0;             // of each of these publications
  // After stream_time, every worker must have the version that was the newest this long ago.
  Duration delivery_time_max{};
  std::uint64_t final_bytes = 0;  // of the publication that opens the peace
  std::uint64_t timed_bytes = 0;  // of the publication whose delivery time is checked
};

SoakScenario make_soak_scenario(std::uint64_t seed);
// A description in one line.
std::string to_text(const SoakScenario& scenario);

}  // namespace echoline::sim
