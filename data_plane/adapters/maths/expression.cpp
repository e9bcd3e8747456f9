// Parses and evaluates an expression in one pass, for the task "countdown".
#include "data_plane/adapters/maths/expression.hpp"

#include <algorithm>
#include <array>
#include <optional>

#include "base/result.hpp"

namespace echoline::data_plane::maths {
namespace {

__extension__ using Wide = __int128;  // __extension__: no warning, although __int128 is not standard C++

struct Fraction {
  Wide numerator = 0, denominator = 1;
};

// A recursive-descent parser; deeper than kExpressionDepthMax is not an expression. After a forbidden number or
// operation, or a division by zero, it stops computing values, so that nothing can overflow.
class Parser {
 public:
  Parser(std::string_view text, const ExpressionRules& rules) : text_(text), rules_(rules) {}

  ExpressionResult run(std::uint64_t target) {
    const Fraction value = parse_sum(/*depth=*/0);
    if (peek() != 0) malformed_ = true;
    if (malformed_) return ExpressionResult::kNoExpression;
    const auto used_count = static_cast<std::size_t>(std::count(used_.begin(), used_.end(), true));
    if (forbidden_ || (rules_.use_all && used_count != rules_.numbers.size())) return ExpressionResult::kForbidden;
    const bool is_whole = !undefined_ && value.numerator % value.denominator == 0;
    return is_whole && value.numerator / value.denominator == static_cast<Wide>(target) ? ExpressionResult::kTarget
                                                                                        : ExpressionResult::kOtherValue;
  }

 private:
  static constexpr char kUnknownCharacter = '?';  // a character that begins no token

  // The next token's character after white space; 0 at the end.
  char peek() {
    while (!text_.empty() && std::string_view(" \t\r\n").find(text_[0]) != std::string_view::npos)
      text_.remove_prefix(1);
    if (text_.empty()) return 0;
    for (const auto& [sign, meaning] : kOtherOperators)
      if (text_.starts_with(sign)) return meaning;
    return std::string_view("0123456789()+-*/").find(text_[0]) == std::string_view::npos ? kUnknownCharacter : text_[0];
  }

  void skip_token() {
    std::size_t bytes = 1;
    for (const auto& [sign, meaning] : kOtherOperators)
      if (text_.starts_with(sign)) bytes = sign.size();
    text_.remove_prefix(bytes);
  }

  // Consumes one of two operators if it comes next.
  std::optional<char> take_operator(char first, char second) {
    const char next = peek();
    if (malformed_ || (next != first && next != second)) return std::nullopt;
    skip_token();
    if (rules_.operations.find(next) == std::string_view::npos) forbidden_ = true;
    return next;
  }

  Fraction parse_sum(std::size_t depth) {
    Fraction value = parse_product(depth);
    while (const auto sign = take_operator('+', '-')) {
      const Fraction next = parse_product(depth);
      if (has_no_value()) continue;
      const Wide left = value.numerator * next.denominator, right = next.numerator * value.denominator;
      value = {.numerator = *sign == '+' ? left + right : left - right,
               .denominator = value.denominator * next.denominator};
    }
    return value;
  }

  Fraction parse_product(std::size_t depth) {
    Fraction value = parse_factor(depth);
    while (const auto sign = take_operator('*', '/')) {
      Fraction next = parse_factor(depth);
      if (*sign == '/') std::swap(next.numerator, next.denominator);
      if (next.denominator == 0) undefined_ = true;  // a division by zero
      if (has_no_value()) continue;
      value = {.numerator = value.numerator * next.numerator, .denominator = value.denominator * next.denominator};
    }
    return value;
  }

  Fraction parse_factor(std::size_t depth) {
    const char next = peek();
    if (depth > kExpressionDepthMax) malformed_ = true;
    if (malformed_) return {};
    if (next >= '0' && next <= '9') return parse_number();
    if (next != '-' && next != '(') {
      malformed_ = true;
      return {};
    }
    skip_token();
    if (next == '-') {
      const Fraction value = parse_factor(depth + 1);
      return {.numerator = -value.numerator, .denominator = value.denominator};
    }
    const Fraction value = parse_sum(depth + 1);
    if (peek() != ')')
      malformed_ = true;
    else
      skip_token();
    return value;
  }

  // Marks the number as used. A number above the limit is read as the limit plus 1, which no problem has.
  Fraction parse_number() {
    std::uint64_t value = 0;
    while (!text_.empty() && text_[0] >= '0' && text_[0] <= '9') {
      value = std::min<std::uint64_t>(value * 10 + static_cast<std::uint64_t>(text_[0] - '0'), kCountdownNumberMax + 1);
      text_.remove_prefix(1);
    }
    for (std::size_t i = 0; i < rules_.numbers.size(); ++i) {
      if (used_[i] || rules_.numbers[i] != value) continue;
      used_[i] = true;
      return {.numerator = static_cast<Wide>(value), .denominator = 1};
    }
    forbidden_ = true;
    return {};
  }

  // Whether the remaining text is only checked for its form.
  bool has_no_value() const { return malformed_ || forbidden_ || undefined_; }

  // Other characters for the operators, as UTF-8.
  static constexpr std::pair<std::string_view, char> kOtherOperators[] = {
      {"\xe2\x88\x92", '-'}, {"\xc3\x97", '*'}, {"\xc3\xb7", '/'}};  // U+2212, U+00D7, U+00F7
  std::string_view text_;
  const ExpressionRules& rules_;
  std::array<bool, kCountdownNumbersMax> used_{};
  bool malformed_ = false, forbidden_ = false, undefined_ = false;
};

}  // namespace

ExpressionResult evaluate(std::string_view text, const ExpressionRules& rules, std::uint64_t target) {
  ECHO_CHECK(rules.numbers.size() <= kCountdownNumbersMax, "{} numbers", rules.numbers.size());
  if (text.size() > kExpressionBytesMax) return ExpressionResult::kNoExpression;
  return Parser(text, rules).run(target);
}

}  // namespace echoline::data_plane::maths
