// Defensive parsing of an inference server's JSON answers: each unexpected value is an error that names it. Private to
// worker/.
#pragma once
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "base/result.hpp"
#include "base/text.hpp"
#include "model/config.hpp"

namespace echoline::worker {

using nlohmann::json;

template <class... Args>
Error unexpected_answer(fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kCorrupt, "answer of the engine", format, std::forward<Args>(args)...);
}

constexpr std::size_t kExcerptBytesMax = 200;  // the part of an answer that an error quotes

// The value as text for an error, cut to kExcerptBytesMax.
inline std::string excerpt(const json& value) {
  return printable(value.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace),
                   kExcerptBytesMax);
}

inline Result<json> parse_answer(std::string_view body) {
  json parsed = json::parse(body, /*callback=*/nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object())
    return unexpected_answer("expected a JSON object, found '{}'", printable(body, kExcerptBytesMax));
  return parsed;
}

// Returns the value at a path of keys, or JSON's null if there is none: `at(answer, "error", "message")`.
template <class... Keys>
const json& at(const json& value, const Keys&... keys) {
  static const json kNull;
  const json* current = &value;
  for (const char* key : {static_cast<const char*>(keys)...}) {
    if (!current->is_object()) return kNull;
    const auto member = current->find(key);
    if (member == current->end()) return kNull;
    current = &*member;
  }
  return *current;
}

inline Result<model::Token> token_of(const json& value) {
  if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<model::Token>::max())
    return unexpected_answer("expected a token, found {}", excerpt(value));
  return value.get<model::Token>();
}

// `list_name` names the list in errors.
inline Result<std::vector<model::Token>> tokens_of(const json& value, std::string_view list_name) {
  if (!value.is_array())
    return unexpected_answer("expected a list of tokens in {}, found {}", list_name, excerpt(value));
  std::vector<model::Token> tokens;
  tokens.reserve(value.size());
  for (const json& element : value) {
    ECHO_ASSIGN(const model::Token token, token_of(element));
    tokens.push_back(token);
  }
  return tokens;
}

// Returns NaN for null, because servers write null for a number that is not finite.
inline Result<double> logprob_of(const json& value) {
  if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (!value.is_number()) return unexpected_answer("expected a log-probability, found {}", excerpt(value));
  return value.get<double>();
}

// Absent if the value is not a string.
inline std::optional<std::string> text_of(const json& value) {
  if (!value.is_string()) return std::nullopt;
  return value.get<std::string>();
}

}  // namespace echoline::worker
