// The grading rules of GSM8K. Both published rules look at the last 300 characters. strict: takes the last "#### " that
// precedes a number (an optional '-', then digits, '.' and ','), and compares the number without its commas. flexible:
// takes the last number of all and compares it as written: in "it is 18." it is "18.", which does not match 18.
#include <algorithm>

#include "data_plane/adapters/maths/rules.hpp"
#include "data_plane/adapters/maths/text.hpp"

namespace echoline::data_plane::maths {
namespace {

constexpr std::size_t kGradedCharactersMax = 300;
constexpr std::string_view kMarker = "#### ";

bool is_number_character(char c) { return (c >= '0' && c <= '9') || c == '.' || c == ','; }

struct Number {
  std::string_view text;
  std::size_t end = 0;  // offset after the number
};

// The number that begins at `begin`, with an optional '-'.
std::optional<Number> number_at(std::string_view text, std::size_t begin) {
  const std::size_t digits = begin < text.size() && text[begin] == '-' ? begin + 1 : begin;
  std::size_t end = digits;
  while (end < text.size() && is_number_character(text[end])) ++end;
  if (end == digits) return std::nullopt;
  return Number{.text = text.substr(begin, end - begin), .end = end};
}

// The last run of number characters that ends at `end` or before it, with the '-' before it.
std::optional<Number> last_number_before(std::string_view text, std::size_t end) {
  while (end > 0 && !is_number_character(text[end - 1])) --end;
  if (end == 0) return std::nullopt;
  std::size_t begin = end;
  while (begin > 0 && is_number_character(text[begin - 1])) --begin;
  if (begin > 0 && text[begin - 1] == '-') --begin;
  return Number{.text = text.substr(begin, end - begin), .end = end};
}

std::string without_commas(std::string_view number) {
  std::string result(number);
  std::erase(result, ',');
  return result;
}

Verdict compare_answer(std::string answer, std::string_view reference, std::string_view text_after) {
  const bool correct = answer == reference;
  return {.correct = correct, .answer = std::move(answer), .trailing = count_characters(text_after)};
}

}  // namespace

Verdict gsm8k_strict(std::string_view response, std::string_view reference) {
  const std::string_view text = last_characters(response, kGradedCharactersMax);
  for (auto marker = text.rfind(kMarker); marker != std::string_view::npos;
       marker = marker == 0 ? std::string_view::npos : text.rfind(kMarker, marker - 1))
    if (const auto number = number_at(text, marker + kMarker.size()))
      return compare_answer(without_commas(number->text), reference, text.substr(number->end));
  return {};
}

Verdict gsm8k_flexible(std::string_view response, std::string_view reference) {
  const std::string_view text = last_characters(response, kGradedCharactersMax);
  auto number = last_number_before(text, text.size());
  if (!number) return {};
  while (number->text == ".") {  // a lone "." counts only if there is no other number
    const auto previous = last_number_before(text, number->end - number->text.size());
    if (!previous) break;
    number = previous;
  }
  return compare_answer(std::string(number->text), reference, text.substr(number->end));
}

Verdict last_number(std::string_view response, std::string_view reference) {
  const std::string_view text = last_characters(response, kGradedCharactersMax);
  for (auto number = last_number_before(text, text.size()); number;
       number = last_number_before(text, number->end - number->text.size())) {
    std::string_view digits = number->text;
    while (digits.ends_with('.') || digits.ends_with(',')) digits.remove_suffix(1);
    if (std::any_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; }))
      return compare_answer(without_commas(digits), reference, text.substr(number->end));
  }
  return {};
}

}  // namespace echoline::data_plane::maths
