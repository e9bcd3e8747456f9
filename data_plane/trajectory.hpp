// Trajectories and work messages as they come off the wire: parsed, bounded and checked before anything uses them.
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

// Of one trajectory's metadata_json: what a run may allow (rollout.metadata_max), and what it allows unless it says
// otherwise.
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

// Returns the trajectory when it obeys schema.proto and `limits`; kInvalid naming the field, the trajectory, what
// was expected and what was found otherwise.
Result<Trajectory> validate(Trajectory trajectory, const TrajectoryLimits& limits = {});
// The same check without taking the trajectory.
Status check(const Trajectory& trajectory, const TrajectoryLimits& limits = {});

// The part of it that a worker looks at before it sends: kInvalid when metadata_json has more bytes than the run
// allows, with the same text as at the learner's door.
Status check_metadata_size(const Trajectory& trajectory, Bytes most);

// kCorrupt when the bytes are not a serialised message, kExhausted above message_max, kInvalid when a trajectory by
// itself fails check(), or no body is set. The trajectories of a submission are NOT checked: whoever takes it in
// refuses it by its lease, so that the group is not lost with it.
Result<Trajectory> parse_trajectory(std::string_view bytes, const TrajectoryLimits& limits = {});
Result<schema::WorkerMessage> parse_worker_message(std::string_view bytes, const TrajectoryLimits& limits = {});
Result<schema::LearnerMessage> parse_learner_message(std::string_view bytes, const TrajectoryLimits& limits = {});

// What a heartbeat says; all zero where it says nothing yet. kCorrupt, kExhausted or kInvalid as above: a time that is
// no finite number of seconds from zero on, or totals that no machine reaches.
Result<schema::Vitals> parse_vitals(std::string_view bytes);

// The oldest policy that generated any token: what staleness is counted from. Needs a checked trajectory.
Version oldest_version(const Trajectory& trajectory);

}  // namespace echoline::data_plane
