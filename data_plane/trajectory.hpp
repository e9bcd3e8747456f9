// Parses and checks trajectories (a response with its tokens, log-probabilities and reward) and work messages from the
// wire, before any other code uses them.
#pragma once
#include <cstdint>
#include <string_view>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/units.hpp"
#include "data_plane/schema.pb.h"

namespace echoline::data_plane {

using schema::Problem;
using schema::Trajectory;

// Limits of one trajectory's metadata_json (rollout.metadata_max): the largest that a run file may set, and the
// default.
inline constexpr Bytes kMetadataLimitMax{1u << 20}, kMetadataLimitDefault{64'000};

// Upper bounds of one trajectory. The defaults fit every built-in task with a wide margin.
struct TrajectoryLimits {
  std::uint32_t prompt_tokens_max = 1u << 17;
  std::uint32_t response_tokens_max = 1u << 18;
  std::uint32_t spans_max = 4096;      // runs of tokens from one policy version
  std::uint32_t components_max = 64;   // named parts of the reward
  std::uint32_t name_bytes_max = 128;  // ids and component names
  std::uint32_t digest_bytes_max = 64;
  Bytes text_max{4u << 20};
  Bytes metadata_max = kMetadataLimitMax;  // a run's own limit may be lower
  Bytes message_max{64u << 20};            // one WorkerMessage or LearnerMessage
};

// A log-probability above zero is a mistake; rounding in the sampler may leave this much.
inline constexpr float kLogprobTolerance = 1e-4f;

// Returns the trajectory if it obeys schema.proto and `limits`. Otherwise kInvalid, naming the field, the trajectory,
// what was expected and what was found.
Result<Trajectory> validate(Trajectory trajectory, const TrajectoryLimits& limits = {});
// The check of validate().
Status check(const Trajectory& trajectory, const TrajectoryLimits& limits = {});

// The part of check() that a worker runs before it sends: kInvalid if metadata_json has more than `limit`, with the
// same text as the learner's check.
Status check_metadata_size(const Trajectory& trajectory, Bytes limit);

// kCorrupt if the bytes are not a serialised message; kExhausted above message_max; kInvalid if a message has no body,
// or if parse_trajectory()'s trajectory fails check(). The trajectories in a worker's submission are NOT checked here.
// The learner checks them when it accepts the submission, so that it can refuse them by lease and lease their group
// again.
Result<Trajectory> parse_trajectory(std::string_view bytes, const TrajectoryLimits& limits = {});
Result<schema::WorkerMessage> parse_worker_message(std::string_view bytes, const TrajectoryLimits& limits = {});
Result<schema::LearnerMessage> parse_learner_message(std::string_view bytes, const TrajectoryLimits& limits = {});

// Reads the measurements in a heartbeat; all are zero if it has none. kCorrupt, kExhausted or kInvalid as above, also
// for a negative or infinite time and for totals that no machine reaches.
Result<schema::Vitals> parse_vitals(std::string_view bytes);

// The oldest policy that generated any token. A trajectory's staleness is the number of versions that the learner is
// ahead of it. Requires a checked trajectory.
Version oldest_version(const Trajectory& trajectory);

}  // namespace echoline::data_plane
