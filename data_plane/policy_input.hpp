// Text and messages that the policy is given, as protobuf and as JSON.
#pragma once
#include <cstddef>
#include <nlohmann/json_fwd.hpp>

#include "base/policy_input.hpp"
#include "base/result.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::data_plane {

inline constexpr std::size_t kMessagesMax = 256;  // messages per prompt or observation, at most

// The prompt of a problem, as a text or as messages.
PolicyInput prompt_of(const Problem& problem);
void set_prompt(Problem& problem, PolicyInput input);

// Reads a text, or a list of messages {role, content} whose content is a text or a list of parts {type: text, text}.
// kInvalid (the caller adds the operation) if the value is anything else, has more than `bytes_max` bytes or
// kMessagesMax messages, has no message, or ends with a message of neither a user nor a tool.
Result<PolicyInput> read_policy_input(const nlohmann::json& value, std::size_t bytes_max);
nlohmann::json to_json(const PolicyInput& input);

}  // namespace echoline::data_plane
