// Writes requests to a resources server of NeMo Gym and parses its answers, none of which it trusts.
// Private to data_plane/. As in NVIDIA-NeMo/Gym, nemo_gym/base_resources_server.py and
// responses_api_agents/simple_agent/app.py (commits 011c3386, 00be44f9): POST /seed_session with the row of the data
// set, then POST /verify with the row and `response`, an object of OpenAI's Responses API; the session is in cookies.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "data_plane/adapters/adapter.hpp"
#include "data_plane/adapters/maths/rows.hpp"

namespace echoline::data_plane::nemo_gym {

// Turns a row of a data set, {"responses_create_params": {"input": ...}, ...}, into a prompt (the one user message) and
// a reference (the row).
Result<maths::Row> read_row(const nlohmann::json& row);

// The body of /verify; kInvalid if the reference is not a row.
Result<std::string> verify_body(const Problem& problem, std::string_view response);

// Parses the answer of /verify. `correct_at`: the least reward that counts as correct. kCorrupt: the answer has no
// reward. kUnavailable: the server marks the reward as invalid (mask_sample), with its reason.
Result<Score> read_verdict(std::string_view body, double correct_at);

}  // namespace echoline::data_plane::nemo_gym
