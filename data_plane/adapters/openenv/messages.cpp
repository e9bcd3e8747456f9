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

constexpr std::size_t kTextBytesMax = 256u << 10, kWordsMax = 1024;

template <class... Args>
Error bad(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "environment's answer", format, std::forward<Args>(args)...);
}

std::string written(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }
std::string shown(const json& value) { return written(value).substr(0, 120); }

// A list of messages is passed on as messages; any other value that is not text, as JSON.
Result<PolicyInput> policy_input_of(const json& observation, std::string_view key) {
  const json* part = &observation;
  for (std::string_view left = key; !left.empty();) {
    const auto dot = std::min(left.find('.'), left.size());
    const auto found = part->is_object() ? part->find(std::string(left.substr(0, dot))) : part->end();
    if (found == part->end())
      return bad("the observation has no '{}' (task.options.observation): {}", key, shown(observation));
    part = &*found;
    left.remove_prefix(std::min(dot + 1, left.size()));
  }
  const bool messages =
      part->is_array() && !part->empty() && part->front().is_object() && part->front().contains("role");
  auto input = read_policy_input(part->is_string() || messages ? *part : json(written(*part)), kTextBytesMax);
  if (!input) return bad("an observation: {}", input.error().detail);
  return input;
}

}  // namespace

std::string Endpoint::url() const { return fmt::format("{}://{}:{}{}", tls ? "wss" : "ws", host, port, target); }

Result<Endpoint> parse_endpoint(std::string_view url) {
  const auto wrong = [&] {
    return fail(Code::kInvalid, "environment", "expected a URL such as http://host:8000, found '{}'",
                url.substr(0, 200));
  };
  Endpoint to;
  std::string_view left = url;
  const auto scheme = left.find("://");
  if (scheme == std::string_view::npos) return wrong();
  const std::string_view how = left.substr(0, scheme);
  if (how != "http" && how != "https" && how != "ws" && how != "wss") return wrong();
  to.tls = how == "https" || how == "wss";
  left.remove_prefix(scheme + 3);
  const auto path = std::min(left.find('/'), left.size());
  std::string_view place = left.substr(0, path), rest = left.substr(path);
  if (place.find('@') != std::string_view::npos || url.find_first_of(" \t\r\n?#") != std::string_view::npos)
    return wrong();
  if (place.starts_with('[')) {
    const auto end = place.find(']');
    if (end == std::string_view::npos) return wrong();
    to.host = place.substr(1, end - 1);
    place.remove_prefix(end + 1);
  } else {
    const auto colon = std::min(place.find(':'), place.size());
    to.host = place.substr(0, colon);
    place.remove_prefix(colon);
  }
  if (!place.empty() && !place.starts_with(':')) return wrong();
  to.port = place.empty() ? (to.tls ? "443" : "80") : std::string(place.substr(1));
  const bool digits = !to.port.empty() && to.port.size() <= 5 &&
                      std::all_of(to.port.begin(), to.port.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (to.host.empty() || !digits || std::stoi(to.port) > 65535) return wrong();
  while (rest.ends_with('/')) rest.remove_suffix(1);
  to.target = std::string(rest) + (rest.ends_with("/ws") ? "" : "/ws");
  return to;
}

std::string reset_message(std::string_view arguments_json, std::uint64_t seed) {
  json data = json::parse(arguments_json, nullptr, false);
  if (!data.is_object()) data = json::object();
  data["seed"] = seed;
  return written({{"type", "reset"}, {"data", std::move(data)}});
}

Result<std::string> step_message(std::string_view key, std::string_view response) {
  json action{{std::string(key), response}};
  if (key.empty()) {
    action = nests_too_deep(response) ? json(json::value_t::discarded) : json::parse(response, nullptr, false);
    if (!action.is_object()) return fail(Code::kInvalid, "action", "expected a JSON object");
  }
  return written({{"type", "step"}, {"data", std::move(action)}});
}

std::string close_message() { return R"({"type":"close"})"; }

Result<Observation> read_message(std::string_view message, std::string_view key) {
  if (nests_too_deep(message)) return bad("nested deeper than {}", kJsonDepthMax);
  const json said = json::parse(message, nullptr, false);
  if (!said.is_object()) return bad("expected a JSON object, found '{}'", shown(json(message.substr(0, 120))));
  const auto type = said.find("type"), data = said.find("data");
  if (type == said.end() || !type->is_string() || data == said.end() || !data->is_object())
    return bad("expected 'type' and 'data', found {}", shown(said));
  if (*type == "error") {
    const std::string words = written(data->value("message", json("an error"))).substr(0, kWordsMax);
    const bool full = data->value("code", json()) == "CAPACITY_REACHED";
    return fail(full ? Code::kExhausted : Code::kUnavailable, "environment", "it says {} ({})", words,
                shown(data->value("code", json())));
  }
  if (*type != "observation") return bad("expected an 'observation', found '{}'", shown(*type));
  const auto observation = data->find("observation"), reward = data->find("reward"), done = data->find("done");
  if (observation == data->end()) return bad("expected an 'observation' in its data, found {}", shown(*data));
  Observation observed;
  ECHO_ASSIGN(observed.input, policy_input_of(*observation, key));
  if (reward != data->end() && reward->is_boolean()) {
    observed.reward = reward->get<bool>() ? 1 : 0;
  } else if (reward != data->end() && !reward->is_null()) {
    if (!reward->is_number() || !std::isfinite(reward->get<double>()))
      return bad("the reward is {}, expected a finite number", shown(*reward));
    observed.reward = reward->get<double>();
  }
  if (done != data->end()) {
    if (!done->is_boolean()) return bad("'done' is {}, expected true or false", shown(*done));
    observed.done = done->get<bool>();
  }
  return observed;
}

}  // namespace echoline::data_plane::openenv
