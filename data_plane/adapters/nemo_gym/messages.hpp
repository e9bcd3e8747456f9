// What is said to a resources server of NeMo Gym, and what it says. Forms requests and reads answers; trusts none.
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

// A row of a data set, {"responses_create_params": {"input": ...}, ...}: the one message of a user, and the row as the
// reference.
Result<maths::Row> read_row(const nlohmann::json& row);

// The body of /verify; kInvalid where the reference is no row.
Result<std::string> verify_body(const Problem& problem, std::string_view response);

// kCorrupt: no reward. kUnavailable: the server says that its reward means nothing (mask_sample), and why.
Result<Score> read_verdict(std::string_view body, double correct_at);

}  // namespace echoline::data_plane::nemo_gym
