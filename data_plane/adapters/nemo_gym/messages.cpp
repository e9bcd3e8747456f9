// Implements the messages for the adapter nemo_gym.
#include "data_plane/adapters/nemo_gym/messages.hpp"

#include <cmath>
#include <nlohmann/json.hpp>

#include "data_plane/adapters/json_depth.hpp"

namespace echoline::data_plane::nemo_gym {
namespace {

using nlohmann::json;

constexpr std::size_t kComponentsMax = 64, kNameBytesMax = 128, kExcerptBytesMax = 120, kReasonBytesMax = 1024;

std::string json_text(const json& value) {
  return value.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}
std::string excerpt(const json& value) { return json_text(value).substr(0, kExcerptBytesMax); }

template <class... Args>
Error verdict_error(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "verdict", format, std::forward<Args>(args)...);
}

}  // namespace

Result<maths::Row> read_row(const json& row) {
  const auto params = row.find("responses_create_params");
  if (params == row.end() || !params->is_object() || !params->contains("input"))
    return fail(Code::kInvalid, "",
                "expected 'responses_create_params.input', a text or a list of messages, found none");
  maths::Row result;
  ECHO_ASSIGN(result.prompt, maths::prompt_at(row, "responses_create_params.input"));
  result.reference = json_text(row);  // the whole row, because verify_body() sends it back to the server
  return result;
}

Result<std::string> verify_body(const Problem& problem, std::string_view response) {
  json body = nests_too_deep(problem.reference())
                  ? json()
                  : json::parse(problem.reference(), nullptr, /*allow_exceptions=*/false);
  if (!body.is_object() || !body.contains("responses_create_params"))
    return fail(Code::kInvalid, "nemo_gym", "'{}': expected a row of a data set as its reference", problem.id());
  // An answer in the form of OpenAI's Responses API. Besides the text it has the fields that the API requires.
  const json message{
      {"id", "msg_1"},
      {"type", "message"},
      {"role", "assistant"},
      {"status", "completed"},
      {"content", json::array({{{"type", "output_text"}, {"text", response}, {"annotations", json::array()}}})}};
  body["response"] = {{"id", "resp_1"},
                      {"object", "response"},
                      {"created_at", 0},
                      {"model", "policy"},
                      {"output", json::array({message})},
                      {"parallel_tool_calls", true},
                      {"tool_choice", "auto"},
                      {"tools", json::array()}};
  return json_text(body);
}

Result<Score> read_verdict(std::string_view body, double correct_at) {
  if (nests_too_deep(body)) return verdict_error("nested deeper than {}", kJsonDepthMax);
  const json answer = json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!answer.is_object())
    // As a JSON text, which replaces invalid UTF-8.
    return verdict_error("expected a JSON object, found '{}'", excerpt(json(body.substr(0, kExcerptBytesMax))));
  const auto reward = answer.find("reward");
  if (reward == answer.end() || !reward->is_number() || !std::isfinite(reward->get<double>()))
    return verdict_error("expected a finite number 'reward', found {}",
                         reward == answer.end() ? "none" : excerpt(*reward));
  if (answer.value("mask_sample", json()) == true)
    return fail(Code::kUnavailable, "verdict", "the server marks its reward as invalid: {}",
                json_text(answer.value("failure_reason", answer.value("failure_kind", json("no reason given"))))
                    .substr(0, kReasonBytesMax));
  Score score;
  score.reward = reward->get<double>();
  score.correct = score.reward >= correct_at;
  if (const auto parts = answer.find("reward_components"); parts != answer.end() && !parts->is_null()) {
    if (!parts->is_object() || parts->size() > kComponentsMax)
      return verdict_error("'reward_components' is {}, expected at most {} named numbers", excerpt(*parts),
                           kComponentsMax);
    for (const auto& [name, value] : parts->items()) {
      if (name.empty() || name.size() > kNameBytesMax || !value.is_number() || !std::isfinite(value.get<double>()))
        return verdict_error("component '{}' is {}, expected a name of 1 to {} bytes and a finite number",
                             name.substr(0, 80), excerpt(value), kNameBytesMax);
      score.components[name] = value.get<double>();
    }
  }
  return score;
}

}  // namespace echoline::data_plane::nemo_gym
