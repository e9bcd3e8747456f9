// Writes messages to an OpenEnv server and parses its answers, none of which it trusts. Private to data_plane/. As in
// meta-pytorch/OpenEnv, src/openenv/core/env_server/{types,http_server}.py (commits 42f4a83f, 16602b4d): a session is a
// WebSocket connection at /ws. Plain HTTP cannot hold an episode, because each request gets a new environment.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "base/policy_input.hpp"
#include "base/result.hpp"

namespace echoline::data_plane::openenv {

// The WebSocket endpoint of "http://host:8000/path".
struct Endpoint {
  bool tls = false;
  std::string host, port, target;  // "host", "8000", "/path/ws"
  std::string url() const;         // "ws://host:8000/path/ws"
};
// Accepts http, https, ws and wss; kInvalid otherwise.
Result<Endpoint> parse_endpoint(std::string_view url);

// The environment's answer to a reset or a step.
struct Observation {
  PolicyInput input;
  double reward = 0;
  bool done = false;
};

// `arguments_json`: an object of further arguments of the reset, besides the seed.
std::string reset_message(std::string_view arguments_json, std::uint64_t seed);
// `key`: the action's field that holds the response. Empty: the response itself is the action, a JSON object; kInvalid
// if it is not one.
Result<std::string> step_message(std::string_view key, std::string_view response);
std::string close_message();

// `key`: the part of the observation to use as text, a path with dots; empty: all of it, as JSON. kUnavailable: the
// server's error, in its words; kExhausted: the server has no room for another session now; kCorrupt: not such a
// message, or it lacks that part.
Result<Observation> read_message(std::string_view message, std::string_view key);

}  // namespace echoline::data_plane::openenv
