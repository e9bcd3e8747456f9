// The grading rules of GSM8K. Both published rules look at the last 300 characters. strict: takes the last "#### " that
// precedes a number (an optional '-', then digits, '.' and ','), and compares the number without its commas. flexible:
// takes the last number of all and compares it as written: in "it is 18." it is "18.", which does not match 18.
#include <algorithm>

#include "data_plane/adapters/maths/rules.hpp"
#include "data_plane/adapters/maths/text.hpp"

namespace echoline::data_plane::maths {
namespace {

constexpr std::size_t kGradedCharacters = 300;
constexpr std::string_view kMarker = "#### ";

bool is_number_character(char c) { return (c >= '0' && c <= '9') || c == '.' || c == ','; }

struct Number {
  std::string_view text;
  std::size_t end = 0;
};

// The number at `at`, with an optional '-'.
std::optional<Number> number_at(std::string_view text, std::size_t at) {
  const std::size_t digits = at < text.size() && text[at] == '-' ? at + 1 : at;
  std::size_t end = digits;
  while (end < text.size() && is_number_character(text[end])) ++end;
  if (end == digits) return std::nullopt;
  return Number{text.substr(at, end - at), end};
}

// The last run of number characters that ends at `end` or before it, with the '-' before it.
std::optional<Number> number_before(std::string_view text, std::size_t end) {
  while (end > 0 && !is_number_character(text[end - 1])) --end;
  if (end == 0) return std::nullopt;
  std::size_t begin = end;
  while (begin > 0 && is_number_character(text[begin - 1])) --begin;
  if (begin > 0 && text[begin - 1] == '-') --begin;
  return Number{text.substr(begin, end - begin), end};
}

std::string without_commas(std::string_view number) {
  std::string plain(number);
  std::erase(plain, ',');
  return plain;
}

Verdict compared(std::string answer, std::string_view reference, std::string_view behind) {
  const bool correct = answer == reference;
  return {correct, std::move(answer), count_characters(behind)};
}

}  // namespace

Verdict gsm8k_strict(std::string_view response, std::string_view reference) {
  const std::string_view text = last_characters(response, kGradedCharacters);
  for (auto at = text.rfind(kMarker); at != std::string_view::npos;
       at = at == 0 ? std::string_view::npos : text.rfind(kMarker, at - 1))
    if (const auto number = number_at(text, at + kMarker.size()))
      return compared(without_commas(number->text), reference, text.substr(number->end));
  return {};
}

Verdict gsm8k_flexible(std::string_view response, std::string_view reference) {
  const std::string_view text = last_characters(response, kGradedCharacters);
  auto number = number_before(text, text.size());
  if (!number) return {};
  while (number->text == ".") {  // a lone "." counts only if there is no other number
    const auto before = number_before(text, number->end - number->text.size());
    if (!before) break;
    number = before;
  }
  return compared(std::string(number->text), reference, text.substr(number->end));
}

Verdict last_number(std::string_view response, std::string_view reference) {
  const std::string_view text = last_characters(response, kGradedCharacters);
  for (auto number = number_before(text, text.size()); number;
       number = number_before(text, number->end - number->text.size())) {
    std::string_view digits = number->text;
    while (digits.ends_with('.') || digits.ends_with(',')) digits.remove_suffix(1);
    if (std::any_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; }))
      return compared(without_commas(digits), reference, text.substr(number->end));
  }
  return {};
}

}  // namespace echoline::data_plane::maths
