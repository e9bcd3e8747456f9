#include "data_plane/adapters/maths/expression.hpp"

#include <algorithm>
#include <array>
#include <optional>

#include "base/result.hpp"

namespace echoline::data_plane::maths {
namespace {

__extension__ using Wide = __int128;

struct Fraction {
  Wide over = 0, under = 1;
};

// A recursive-descent parser; deeper than kExpressionDepthMax is not an expression. After a forbidden number or
// operation, or a division by zero, it stops computing values, so that nothing can overflow.
class Parser {
 public:
  Parser(std::string_view text, const Game& game) : text_(text), game_(game) {}

  Reached run(std::uint64_t target) {
    const Fraction value = sum(0);
    if (peek() != 0) broken_ = true;
    if (broken_) return Reached::kNothing;
    const auto used = static_cast<std::size_t>(std::count(used_.begin(), used_.end(), true));
    if (forbidden_ || (game_.all && used != game_.numbers.size())) return Reached::kForbidden;
    const bool whole = !undefined_ && value.over % value.under == 0;
    return whole && value.over / value.under == static_cast<Wide>(target) ? Reached::kTarget : Reached::kElsewhere;
  }

 private:
  static constexpr char kOther = '?';  // a character that begins no token

  // The next token's character after white space; 0 at the end.
  char peek() {
    while (!text_.empty() && std::string_view(" \t\r\n").find(text_[0]) != std::string_view::npos)
      text_.remove_prefix(1);
    if (text_.empty()) return 0;
    for (const auto& [sign, meaning] : kSigns)
      if (text_.starts_with(sign)) return meaning;
    return std::string_view("0123456789()+-*/").find(text_[0]) == std::string_view::npos ? kOther : text_[0];
  }

  void pass() {
    std::size_t bytes = 1;
    for (const auto& [sign, meaning] : kSigns)
      if (text_.starts_with(sign)) bytes = sign.size();
    text_.remove_prefix(bytes);
  }

  // Consumes one of two operators if it comes next.
  std::optional<char> operation(char a, char b) {
    const char next = peek();
    if (broken_ || (next != a && next != b)) return std::nullopt;
    pass();
    if (game_.operations.find(next) == std::string_view::npos) forbidden_ = true;
    return next;
  }

  Fraction sum(std::size_t depth) {
    Fraction value = product(depth);
    while (const auto sign = operation('+', '-')) {
      const Fraction next = product(depth);
      if (idle()) continue;
      const Wide left = value.over * next.under, right = next.over * value.under;
      value = {*sign == '+' ? left + right : left - right, value.under * next.under};
    }
    return value;
  }

  Fraction product(std::size_t depth) {
    Fraction value = factor(depth);
    while (const auto sign = operation('*', '/')) {
      Fraction next = factor(depth);
      if (*sign == '/') std::swap(next.over, next.under);
      if (next.under == 0) undefined_ = true;
      if (idle()) continue;
      value = {value.over * next.over, value.under * next.under};
    }
    return value;
  }

  Fraction factor(std::size_t depth) {
    const char next = peek();
    if (depth > kExpressionDepthMax) broken_ = true;
    if (broken_) return {};
    if (next >= '0' && next <= '9') return number();
    if (next != '-' && next != '(') {
      broken_ = true;
      return {};
    }
    pass();
    if (next == '-') {
      const Fraction value = factor(depth + 1);
      return {-value.over, value.under};
    }
    const Fraction value = sum(depth + 1);
    if (peek() != ')')
      broken_ = true;
    else
      pass();
    return value;
  }

  Fraction number() {
    std::uint64_t value = 0;
    while (!text_.empty() && text_[0] >= '0' && text_[0] <= '9') {
      value = std::min<std::uint64_t>(value * 10 + static_cast<std::uint64_t>(text_[0] - '0'), kCountdownNumberMax + 1);
      text_.remove_prefix(1);
    }
    for (std::size_t i = 0; i < game_.numbers.size(); ++i) {
      if (used_[i] || game_.numbers[i] != value) continue;
      used_[i] = true;
      return {static_cast<Wide>(value), 1};
    }
    forbidden_ = true;
    return {};
  }

  bool idle() const { return broken_ || forbidden_ || undefined_; }

  static constexpr std::pair<std::string_view, char> kSigns[] = {
      {"\xe2\x88\x92", '-'}, {"\xc3\x97", '*'}, {"\xc3\xb7", '/'}};  // U+2212, U+00D7, U+00F7
  std::string_view text_;
  const Game& game_;
  std::array<bool, kCountdownNumbersMax> used_{};
  bool broken_ = false, forbidden_ = false, undefined_ = false;
};

}  // namespace

Reached evaluate(std::string_view text, const Game& game, std::uint64_t target) {
  ECHO_CHECK(game.numbers.size() <= kCountdownNumbersMax, "{} numbers", game.numbers.size());
  if (text.size() > kExpressionBytesMax) return Reached::kNothing;
  return Parser(text, game).run(target);
}

}  // namespace echoline::data_plane::maths
