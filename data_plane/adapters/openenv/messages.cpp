// Implements the messages for the adapter openenv.
#include "data_plane/adapters/openenv/messages.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "data_plane/adapters/json_depth.hpp"
#include "data_plane/policy_input.hpp"

namespace echoline::data_plane::openenv {
namespace {

using nlohmann::json;

constexpr std::size_t kExcerptBytesMax = 120, kUrlBytesShown = 200;
constexpr std::size_t kTextBytesMax = 256u << 10, kErrorBytesMax = 1024;  // of an observation; of the server's error

template <class... Args>
Error server_answer_error(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "environment's answer", format, std::forward<Args>(args)...);
}

std::string json_text(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}
std::string excerpt(const json& value) { return json_text(value).substr(0, kExcerptBytesMax); }

// Finds the part of the observation at `key` (a path with dots). A list of messages is passed on as messages; any other
// value that is not text, as JSON.
Result<PolicyInput> policy_input_of(const json& observation, std::string_view key) {
  const json* part = &observation;
  for (std::string_view keys_left = key; !keys_left.empty();) {
    const auto dot = std::min(keys_left.find('.'), keys_left.size());
    const auto it = part->is_object() ? part->find(std::string(keys_left.substr(0, dot))) : part->end();
    if (it == part->end())
      return server_answer_error("the observation has no '{}' (task.options.observation): {}", key,
                                 excerpt(observation));
    part = &*it;
    keys_left.remove_prefix(std::min(dot + 1, keys_left.size()));
  }
  const bool is_conversation =
      part->is_array() && !part->empty() && part->front().is_object() && part->front().contains("role");
  auto input = read_policy_input(part->is_string() || is_conversation ? *part : json(json_text(*part)), kTextBytesMax);
  if (!input) return server_answer_error("an observation: {}", input.error().detail);
  return input;
}

}  // namespace

std::string Endpoint::url() const { return fmt::format("{}://{}:{}{}", tls ? "wss" : "ws", host, port, target); }

Result<Endpoint> parse_endpoint(std::string_view url) {
  const auto url_error = [&] {
    return fail(Code::kInvalid, "environment", "expected a URL such as http://host:8000, found '{}'",
                url.substr(0, kUrlBytesShown));
  };
  Endpoint endpoint;
  constexpr std::string_view kSchemeEnd = "://";
  const auto scheme_end = url.find(kSchemeEnd);
  if (scheme_end == std::string_view::npos) return url_error();
  const std::string_view scheme = url.substr(0, scheme_end);
  if (scheme != "http" && scheme != "https" && scheme != "ws" && scheme != "wss") return url_error();
  endpoint.tls = scheme == "https" || scheme == "wss";
  const std::string_view after_scheme = url.substr(scheme_end + kSchemeEnd.size());
  const auto slash = std::min(after_scheme.find('/'), after_scheme.size());
  std::string_view authority = after_scheme.substr(0, slash), path = after_scheme.substr(slash);
  if (authority.find('@') != std::string_view::npos || url.find_first_of(" \t\r\n?#") != std::string_view::npos)
    return url_error();
  if (authority.starts_with('[')) {  // an IPv6 address, which has colons itself
    const auto end = authority.find(']');
    if (end == std::string_view::npos) return url_error();
    endpoint.host = authority.substr(1, end - 1);
    authority.remove_prefix(end + 1);
  } else {
    const auto colon = std::min(authority.find(':'), authority.size());
    endpoint.host = authority.substr(0, colon);
    authority.remove_prefix(colon);
  }
  if (!authority.empty() && !authority.starts_with(':')) return url_error();
  endpoint.port = authority.empty() ? (endpoint.tls ? "443" : "80") : std::string(authority.substr(1));
  constexpr std::size_t kPortDigitsMax = 5;
  constexpr int kPortMax = 65535;
  const bool is_number =
      !endpoint.port.empty() && endpoint.port.size() <= kPortDigitsMax &&
      std::all_of(endpoint.port.begin(), endpoint.port.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (endpoint.host.empty() || !is_number || std::stoi(endpoint.port) > kPortMax) return url_error();
  // OpenEnv's sessions are at /ws, below the path of the server.
  while (path.ends_with('/')) path.remove_suffix(1);
  endpoint.target = std::string(path) + (path.ends_with("/ws") ? "" : "/ws");
  return endpoint;
}

std::string reset_message(std::string_view arguments_json, std::uint64_t seed) {
  json data = json::parse(arguments_json, nullptr, /*allow_exceptions=*/false);
  if (!data.is_object()) data = json::object();
  data["seed"] = seed;
  return json_text({{"type", "reset"}, {"data", std::move(data)}});
}

Result<std::string> step_message(std::string_view key, std::string_view response) {
  json action{{std::string(key), response}};
  if (key.empty()) {
    action = nests_too_deep(response) ? json(json::value_t::discarded)
                                      : json::parse(response, nullptr, /*allow_exceptions=*/false);
    if (!action.is_object()) return fail(Code::kInvalid, "action", "expected a JSON object");
  }
  return json_text({{"type", "step"}, {"data", std::move(action)}});
}

std::string close_message() { return R"({"type":"close"})"; }

Result<Observation> read_message(std::string_view message, std::string_view key) {
  if (nests_too_deep(message)) return server_answer_error("nested deeper than {}", kJsonDepthMax);
  const json answer = json::parse(message, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object())
    return server_answer_error("expected a JSON object, found '{}'",
                               excerpt(json(message.substr(0, kExcerptBytesMax))));
  const auto type = answer.find("type"), data = answer.find("data");
  if (type == answer.end() || !type->is_string() || data == answer.end() || !data->is_object())
    return server_answer_error("expected 'type' and 'data', found {}", excerpt(answer));
  if (*type == "error") {
    const std::string message_text = json_text(data->value("message", json("an error"))).substr(0, kErrorBytesMax);
    const bool is_full = data->value("code", json()) == "CAPACITY_REACHED";
    return fail(is_full ? Code::kExhausted : Code::kUnavailable, "environment", "it says {} ({})", message_text,
                excerpt(data->value("code", json())));
  }
  if (*type != "observation") return server_answer_error("expected an 'observation', found '{}'", excerpt(*type));
  const auto observation = data->find("observation"), reward = data->find("reward"), done = data->find("done");
  if (observation == data->end())
    return server_answer_error("expected an 'observation' in its data, found {}", excerpt(*data));
  Observation observed;
  ECHO_ASSIGN(observed.input, policy_input_of(*observation, key));
  if (reward != data->end() && reward->is_boolean()) {
    observed.reward = reward->get<bool>() ? 1 : 0;
  } else if (reward != data->end() && !reward->is_null()) {
    if (!reward->is_number() || !std::isfinite(reward->get<double>()))
      return server_answer_error("the reward is {}, expected a finite number", excerpt(*reward));
    observed.reward = reward->get<double>();
  }
  if (done != data->end()) {
    if (!done->is_boolean()) return server_answer_error("'done' is {}, expected true or false", excerpt(*done));
    observed.done = done->get<bool>();
  }
  return observed;
}

}  // namespace echoline::data_plane::openenv
