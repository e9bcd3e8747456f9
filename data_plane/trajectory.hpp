// Parses and checks trajectories and work messages from the wire, before any other code uses them.
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

// Bytes of one trajectory's metadata_json: the largest limit a run file may set, and the default limit
// (rollout.metadata_max).
inline constexpr Bytes kMetadataMost{1u << 20}, kMetadataMax{64'000};

// Upper bounds of one trajectory. The defaults fit every built-in task with a wide margin.
struct TrajectoryLimits {
  std::uint32_t prompt_tokens_max = 1u << 17;
  std::uint32_t response_tokens_max = 1u << 18;
  std::uint32_t spans_max = 4096;
  std::uint32_t components_max = 64;
  std::uint32_t name_bytes_max = 128;  // ids and component names
  std::uint32_t digest_bytes_max = 64;
  Bytes text_max{4u << 20};
  Bytes metadata_max = kMetadataMost;  // a run's own limit may be lower
  Bytes message_max{64u << 20};        // one WorkerMessage or LearnerMessage
};

// A log-probability above zero is a mistake; rounding in the sampler may leave this much.
inline constexpr float kLogprobTolerance = 1e-4f;

// Returns the trajectory if it obeys schema.proto and `limits`. Otherwise kInvalid, naming the field, the trajectory,
// what was expected and what was found.
Result<Trajectory> validate(Trajectory trajectory, const TrajectoryLimits& limits = {});
// The same check without taking the trajectory.
Status check(const Trajectory& trajectory, const TrajectoryLimits& limits = {});

// The part of check() that a worker runs before it sends: kInvalid if metadata_json has more bytes than the run allows,
// with the same text as the learner's check.
Status check_metadata_size(const Trajectory& trajectory, Bytes most);

// kCorrupt if the bytes are not a serialised message, kExhausted above message_max, kInvalid if a trajectory outside a
// submission fails check() or no body is set. These functions do NOT check the trajectories of a submission: the
// learner checks them when it accepts the submission, so that a refusal names the lease and the group is not lost.
Result<Trajectory> parse_trajectory(std::string_view bytes, const TrajectoryLimits& limits = {});
Result<schema::WorkerMessage> parse_worker_message(std::string_view bytes, const TrajectoryLimits& limits = {});
Result<schema::LearnerMessage> parse_learner_message(std::string_view bytes, const TrajectoryLimits& limits = {});

// Reads a heartbeat's figures; all are zero if it has none. kCorrupt, kExhausted or kInvalid as above, also for a
// negative or infinite time and for totals that no machine reaches.
Result<schema::Vitals> parse_vitals(std::string_view bytes);

// The oldest policy that generated any token; staleness is counted from it. Requires a checked trajectory.
Version oldest_version(const Trajectory& trajectory);

}  // namespace echoline::data_plane
