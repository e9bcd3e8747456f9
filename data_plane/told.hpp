// What a policy is told, in problems and in JSON.
#pragma once
#include <cstddef>
#include <nlohmann/json_fwd.hpp>

#include "base/result.hpp"
#include "base/told.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::data_plane {

inline constexpr std::size_t kMessagesMax = 256;  // of a prompt or an observation

Told prompt_of(const Problem& problem);
void set_prompt(Problem& problem, Told told);

// A text, or a list of messages {role, content}, where a content is a text or a list of parts {type: text, text}.
// kInvalid, without an operation: anything else, more bytes than that, more messages than kMessagesMax, none, or a last
// one that is neither a user's nor a tool's.
Result<Told> read_told(const nlohmann::json& value, std::size_t bytes_max);
nlohmann::json to_json(const Told& told);

}  // namespace echoline::data_plane
