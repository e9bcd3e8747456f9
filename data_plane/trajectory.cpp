// Checks messages from the wire. The learner and the workers call it before anything else reads them.
#include "data_plane/trajectory.hpp"

#include <google/protobuf/stubs/common.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/text.hpp"
#include "data_plane/routed_experts.hpp"

namespace echoline::data_plane {
namespace {

constexpr std::string_view kOperation = "check trajectory";
constexpr std::size_t kIdBytesShown = 64;
constexpr int kMetadataDepthMax = 64;
constexpr std::size_t kFailureBytesMax = 4096;
constexpr int kLeasesMax = 4096;  // leases in one message, at most
constexpr std::uint64_t kVitalsBytesMax = 256;
constexpr double kBusySecondsMax = 1e10;         // 300 years; also the limit of the time for installing policies
constexpr std::uint64_t kCountMax = 1ull << 53;  // rollouts or policies; integers up to this are exact in a double
constexpr std::uint64_t kMemoryBytesMax = 1ull << 53;

std::string printable_id(std::string_view id) { return printable(id, kIdBytesShown); }

template <class... Args>
Error trajectory_error(const Trajectory& trajectory, fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, kOperation, "trajectory '{}': {}", printable_id(trajectory.id()),
              fmt::format(format, std::forward<Args>(args)...));
}

// Checks the length of a required text.
Status check_name(const Trajectory& trajectory, std::string_view field, std::string_view value, std::size_t bytes_max) {
  if (value.empty() || value.size() > bytes_max)
    return trajectory_error(trajectory, "{} has {} bytes, expected 1..{}", field, value.size(), bytes_max);
  return ok();
}

Status check_metadata(const Trajectory& trajectory, const TrajectoryLimits& limits) {
  const std::string& json = trajectory.metadata_json();
  if (json.empty()) return ok();
  ECHO_TRY(check_metadata_size(trajectory, limits.metadata_max));
  // Deep nesting would overflow the stack of a recursive JSON parser. Brackets in strings count too.
  int depth = 0;
  for (const char c : json) {
    if (c == '[' || c == '{') ++depth;
    if (c == ']' || c == '}') --depth;
    if (depth > kMetadataDepthMax)
      return trajectory_error(trajectory, "metadata_json nests deeper than {}", kMetadataDepthMax);
  }
  if (!nlohmann::json::accept(json)) return trajectory_error(trajectory, "metadata_json is not valid JSON");
  return ok();
}

Status check_tokens(const Trajectory& trajectory, const TrajectoryLimits& limits) {
  const auto prompt_tokens = static_cast<std::size_t>(trajectory.prompt_tokens_size());
  const auto response_tokens = static_cast<std::size_t>(trajectory.response_tokens_size());
  if (prompt_tokens == 0 || prompt_tokens > limits.prompt_tokens_max)
    return trajectory_error(trajectory, "{} prompt tokens, expected 1..{}", prompt_tokens, limits.prompt_tokens_max);
  if (response_tokens == 0 || response_tokens > limits.response_tokens_max)
    return trajectory_error(trajectory, "{} response tokens, expected 1..{}", response_tokens,
                            limits.response_tokens_max);
  // Token ids become tensor indices, which are signed.
  for (const auto* tokens : {&trajectory.prompt_tokens(), &trajectory.response_tokens()})
    for (const std::uint32_t token : *tokens)
      if (token > static_cast<std::uint32_t>(INT32_MAX))
        return trajectory_error(trajectory, "token id {} is out of range", token);
  if (static_cast<std::size_t>(trajectory.logprobs_size()) != response_tokens)
    return trajectory_error(trajectory, "{} log-probabilities for {} response tokens, expected one each",
                            trajectory.logprobs_size(), response_tokens);
  for (int i = 0; i < trajectory.logprobs_size(); ++i)
    if (!std::isfinite(trajectory.logprobs(i)) || trajectory.logprobs(i) > kLogprobTolerance)
      return trajectory_error(trajectory, "log-probability {} of response token {} is not a finite number <= 0",
                              trajectory.logprobs(i), i);
  if (trajectory.loss_mask_size() != 0 && static_cast<std::size_t>(trajectory.loss_mask_size()) != response_tokens)
    return trajectory_error(trajectory, "{} loss_mask entries for {} response tokens, expected none or one each",
                            trajectory.loss_mask_size(), response_tokens);
  for (int i = 0; i < trajectory.loss_mask_size(); ++i)
    if (trajectory.loss_mask(i) > 1)
      return trajectory_error(trajectory, "loss_mask[{}] is {}, expected 0 or 1", i, trajectory.loss_mask(i));
  return ok();
}

Status check_experts(const Trajectory& trajectory) {
  const auto tokens = static_cast<std::size_t>(trajectory.prompt_tokens_size() + trajectory.response_tokens_size());
  if (const auto experts = unpack_experts(trajectory.routed_experts(), tokens); !experts)
    return trajectory_error(trajectory, "routed_experts: {}", experts.error().detail);
  return ok();
}

// A span is a run of response tokens that one policy version generated.
Status check_spans(const Trajectory& trajectory, const TrajectoryLimits& limits) {
  if (trajectory.spans_size() == 0 || static_cast<std::size_t>(trajectory.spans_size()) > limits.spans_max)
    return trajectory_error(trajectory, "{} version spans, expected 1..{}", trajectory.spans_size(), limits.spans_max);
  std::uint32_t expected_begin = 0;
  for (int i = 0; i < trajectory.spans_size(); ++i) {
    const schema::VersionSpan& span = trajectory.spans(i);
    if (span.begin() != expected_begin || span.end() <= span.begin())
      return trajectory_error(trajectory, "version span {} is [{}, {}), expected a non-empty one that begins at {}", i,
                              span.begin(), span.end(), expected_begin);
    if (i > 0 && span.version() <= trajectory.spans(i - 1).version())
      return trajectory_error(trajectory, "version span {} has version {} after {}, expected a newer one", i,
                              span.version(), trajectory.spans(i - 1).version());
    if (span.version() > static_cast<std::uint64_t>(INT64_MAX))
      return trajectory_error(trajectory, "version {} is out of range", span.version());
    expected_begin = span.end();
  }
  if (expected_begin != static_cast<std::uint32_t>(trajectory.response_tokens_size()))
    return trajectory_error(trajectory, "version spans end at {}, expected {} (every response token)", expected_begin,
                            trajectory.response_tokens_size());
  return ok();
}

Status check_reward(const Trajectory& trajectory, const TrajectoryLimits& limits) {
  if (!std::isfinite(trajectory.reward()))
    return trajectory_error(trajectory, "reward is {}, expected a finite number", trajectory.reward());
  if (static_cast<std::size_t>(trajectory.components_size()) > limits.components_max)
    return trajectory_error(trajectory, "{} reward components, at most {} are allowed", trajectory.components_size(),
                            limits.components_max);
  for (const auto& [name, value] : trajectory.components()) {
    ECHO_TRY(check_name(trajectory, "a reward component's name", name, limits.name_bytes_max));
    if (!std::isfinite(value))
      return trajectory_error(trajectory, "reward component '{}' is {}, expected a finite number", printable_id(name),
                              value);
  }
  return ok();
}

template <class Message>
Result<Message> parse(std::string_view what, std::string_view bytes, const TrajectoryLimits& limits) {
  if (bytes.size() > limits.message_max.count || bytes.size() > static_cast<std::size_t>(INT_MAX))
    return fail(Code::kExhausted, fmt::format("parse {}", what), "{} bytes, at most {} are allowed", bytes.size(),
                limits.message_max.count);
  Message message;  // its parser takes the size as an int
  if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return fail(Code::kCorrupt, fmt::format("parse {}", what),
                "{} bytes that are not a {} of echoline.schema; both ends must run the same release", bytes.size(),
                what);
  return message;
}

// protobuf prints errors about malformed input to stderr; our errors already report them.
const bool kQuietProtobuf = [] {
  google::protobuf::SetLogHandler(nullptr);
  return true;
}();

}  // namespace

Status check_metadata_size(const Trajectory& trajectory, Bytes limit) {
  if (trajectory.metadata_json().size() <= limit.count) return ok();
  return trajectory_error(trajectory, "metadata_json has {} bytes, at most {} are allowed (rollout.metadata_max)",
                          trajectory.metadata_json().size(), limit.count);
}

Status check(const Trajectory& trajectory, const TrajectoryLimits& limits) {
  (void)kQuietProtobuf;  // used here, so that no compiler calls it unused
  // protobuf keeps unknown fields of any size. They would be stored with the trajectory.
  const auto has_unknown_fields = [](const auto& message) {
    return !message.GetReflection()->GetUnknownFields(message).empty();
  };
  if (has_unknown_fields(trajectory) || std::ranges::any_of(trajectory.spans(), has_unknown_fields))
    return trajectory_error(
        trajectory, "it has fields that no Trajectory of echoline.schema has; both ends must run the same release");
  ECHO_TRY(check_name(trajectory, "id", trajectory.id(), limits.name_bytes_max));
  ECHO_TRY(check_name(trajectory, "problem_id", trajectory.problem_id(), limits.name_bytes_max));
  ECHO_TRY(check_name(trajectory, "policy_digest", trajectory.policy_digest(), limits.digest_bytes_max));
  // The database stores these as signed 64-bit integers.
  for (const std::uint64_t id : {trajectory.group(), trajectory.lease(), trajectory.worker()})
    if (id > static_cast<std::uint64_t>(INT64_MAX))
      return trajectory_error(trajectory, "group, lease or worker id {} is out of range", id);
  ECHO_TRY(check_tokens(trajectory, limits));
  ECHO_TRY(check_experts(trajectory));
  ECHO_TRY(check_spans(trajectory, limits));
  ECHO_TRY(check_reward(trajectory, limits));
  if (trajectory.text().size() > limits.text_max.count)
    return trajectory_error(trajectory, "text has {} bytes, at most {} are allowed", trajectory.text().size(),
                            limits.text_max.count);
  return check_metadata(trajectory, limits);
}

Result<Trajectory> validate(Trajectory trajectory, const TrajectoryLimits& limits) {
  ECHO_TRY(check(trajectory, limits));
  return trajectory;
}

Result<Trajectory> parse_trajectory(std::string_view bytes, const TrajectoryLimits& limits) {
  ECHO_ASSIGN(Trajectory trajectory, parse<Trajectory>("Trajectory", bytes, limits));
  return validate(std::move(trajectory), limits);
}

Result<schema::WorkerMessage> parse_worker_message(std::string_view bytes, const TrajectoryLimits& limits) {
  ECHO_ASSIGN(schema::WorkerMessage message, parse<schema::WorkerMessage>("WorkerMessage", bytes, limits));
  if (message.body_case() == schema::WorkerMessage::BODY_NOT_SET)
    return fail(Code::kInvalid, "parse WorkerMessage",
                "empty, expected a request, a submission, progress, a failure or leases");
  if (message.failed().detail().size() > kFailureBytesMax)
    return fail(Code::kInvalid, "parse WorkerMessage", "a failure of {} bytes, at most {} are allowed",
                message.failed().detail().size(), kFailureBytesMax);
  if (const int lease_count = std::max(message.progress().leases_size(), message.returned().leases_size());
      lease_count > kLeasesMax)
    return fail(Code::kInvalid, "parse WorkerMessage", "it names {} leases, at most {} are allowed", lease_count,
                kLeasesMax);
  return message;
}

Result<schema::LearnerMessage> parse_learner_message(std::string_view bytes, const TrajectoryLimits& limits) {
  ECHO_ASSIGN(schema::LearnerMessage message, parse<schema::LearnerMessage>("LearnerMessage", bytes, limits));
  if (message.body_case() == schema::LearnerMessage::BODY_NOT_SET)
    return fail(Code::kInvalid, "parse LearnerMessage", "empty, expected a grant, an ack or a stop");
  return message;
}

Result<schema::Vitals> parse_vitals(std::string_view bytes) {
  TrajectoryLimits limits;
  limits.message_max = Bytes{kVitalsBytesMax};
  ECHO_ASSIGN(schema::Vitals vitals, parse<schema::Vitals>("Vitals", bytes, limits));
  if (!(vitals.busy_s() >= 0 && vitals.busy_s() <= kBusySecondsMax) || vitals.rollouts() > kCountMax)
    return fail(Code::kInvalid, "parse Vitals", "{} rollouts in {} s, expected at most {} in 0 .. {:.0f} s",
                vitals.rollouts(), vitals.busy_s(), kCountMax, kBusySecondsMax);
  if (!(vitals.install_s() >= 0 && vitals.install_s() <= kBusySecondsMax) || vitals.policies() > kCountMax)
    return fail(Code::kInvalid, "parse Vitals", "{} policies installed in {} s, expected at most {} in 0 .. {:.0f} s",
                vitals.policies(), vitals.install_s(), kCountMax, kBusySecondsMax);
  if (const std::uint64_t memory_bytes = std::max(vitals.resident_bytes(), vitals.heap_bytes());
      memory_bytes > kMemoryBytesMax)
    return fail(Code::kInvalid, "parse Vitals", "{} bytes of memory, expected at most {}", memory_bytes,
                kMemoryBytesMax);
  return vitals;
}

Version oldest_version(const Trajectory& trajectory) {
  ECHO_CHECK(trajectory.spans_size() > 0, "trajectory '{}' was not checked", printable_id(trajectory.id()));
  std::uint64_t oldest = trajectory.spans(0).version();
  for (const schema::VersionSpan& span : trajectory.spans()) oldest = std::min(oldest, span.version());
  return Version{oldest};
}

}  // namespace echoline::data_plane
