// What is said to an OpenEnv server, and what it says. Forms messages and reads answers; trusts none. Private to
// data_plane/. As in meta-pytorch/OpenEnv, src/openenv/core/env_server/{types,http_server}.py (commits 42f4a83f,
// 16602b4d): a session is a WebSocket connection at /ws; over HTTP every request meets a new environment, which cannot
// hold an episode.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "base/told.hpp"

namespace echoline::data_plane::openenv {

// Where "http://host:8000/path" has its sessions.
struct Endpoint {
  bool tls = false;
  std::string host, port, target;  // "host", "8000", "/path/ws"
  std::string url() const;         // "ws://host:8000/path/ws"
};
// http, https, ws and wss; kInvalid.
Result<Endpoint> endpoint(std::string_view url);

struct Observed {
  Told told;
  double reward = 0;
  bool done = false;
};

// `arguments_json`: what a reset takes besides the seed, an object.
std::string reset_message(std::string_view arguments_json, std::uint64_t seed);
// `key`: the field of the action that is the response; empty: the response is the action, a JSON object, and kInvalid
// where it is not.
Result<std::string> step_message(std::string_view key, std::string_view response);
std::string close_message();

// `key`: which part of the observation is the text, dots lead into mappings; empty: all of it, as JSON. kUnavailable:
// the server's error, in its words; kExhausted: it has no room for another session now; kCorrupt: no such message, or
// no such part.
Result<Observed> read_message(std::string_view message, std::string_view key);

}  // namespace echoline::data_plane::openenv
