// A parser and evaluator of arithmetic expressions, for study/sweep_grid.cpp.
#include "study/sweep_expression.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/text.hpp"

namespace echoline::study {
namespace {

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

}  // namespace

class ExpressionParser {
 public:
  explicit ExpressionParser(std::string_view text) : text_(text) {}

  Result<Expression> parse() {
    if (text_.size() > kExpressionBytesMax)
      return fail(Code::kInvalid, "", "expected an expression of at most {} bytes, found {}", kExpressionBytesMax,
                  text_.size());
    ECHO_TRY(parse_sum(0));
    if (!at_end()) return expected_error("an operator or the end");
    return std::move(out_);
  }

 private:
  using Kind = Expression::Kind;

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
  }
  bool at_end() {
    skip_space();
    return at_ == text_.size();
  }
  // Skips `c` if it is the next character; false: it is not.
  bool consume(char c) {
    skip_space();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  Error expected_error(std::string_view what) {
    return fail(Code::kInvalid, "", "expected {} in '{}', found {}", what, printable(text_, 80),
                at_end() ? "its end" : fmt::format("'{}'", printable(text_.substr(at_), 40)));
  }
  // Appends a step to the expression.
  void emit(Kind kind, double number = 0, std::size_t count = 0) { out_.steps_.push_back({kind, number, count}); }

  Status parse_sum(int depth) {
    if (depth > kExpressionDepthMax)
      return fail(Code::kInvalid, "", "expected at most {} levels of brackets", kExpressionDepthMax);
    ECHO_TRY(parse_product(depth));
    for (;;) {
      const bool add = consume('+');
      if (!add && !consume('-')) return ok();
      ECHO_TRY(parse_product(depth));
      emit(add ? Kind::kAdd : Kind::kSubtract);
    }
  }

  Status parse_product(int depth) {
    ECHO_TRY(parse_factor(depth));
    for (;;) {
      const bool multiply = consume('*');
      if (!multiply && !consume('/')) return ok();
      ECHO_TRY(parse_factor(depth));
      emit(multiply ? Kind::kMultiply : Kind::kDivide);
    }
  }

  Status parse_factor(int depth) {
    bool negative = false;
    while (consume('-')) negative = !negative;
    ECHO_TRY(parse_operand(depth));
    if (negative) emit(Kind::kNegate);
    return ok();
  }

  Status parse_operand(int depth) {
    if (consume('(')) {
      ECHO_TRY(parse_sum(depth + 1));
      return consume(')') ? ok() : Status(expected_error("')'"));
    }
    if (at_end()) return expected_error("a number or a name");
    if (is_digit(text_[at_])) return parse_number();
    if (is_letter(text_[at_])) return parse_name(depth);
    return expected_error("a number or a name");
  }

  Status parse_number() {
    std::string digits;
    std::size_t end = at_;
    for (bool exponent = false; end < text_.size(); ++end) {
      const char c = text_[end];
      const bool sign = (c == '-' || c == '+') && exponent && (text_[end - 1] == 'e' || text_[end - 1] == 'E');
      if (c == '_' && is_digit(text_[end - 1]) && end + 1 < text_.size() && is_digit(text_[end + 1])) continue;
      if ((c == 'e' || c == 'E') && !exponent)
        exponent = true;
      else if (!is_digit(c) && c != '.' && !sign)
        break;
      digits += c;
    }
    double value = 0;
    const char* last = digits.data() + digits.size();
    const auto [stop, error] = std::from_chars(digits.data(), last, value);
    if (error != std::errc{} || stop != last || !std::isfinite(value)) return expected_error("a number");
    at_ = end;
    emit(Kind::kNumber, value);
    return ok();
  }

  Status parse_name(int depth) {
    const std::size_t begin = at_;
    while (at_ < text_.size()) {
      const bool inner_dot = text_[at_] == '.' && at_ + 1 < text_.size() && is_letter(text_[at_ + 1]);
      if (!is_letter(text_[at_]) && !is_digit(text_[at_]) && !inner_dot) break;
      ++at_;
    }
    const std::string name(text_.substr(begin, at_ - begin));
    if ((name == "min" || name == "max") && consume('(')) {
      std::size_t count = 0;
      do {
        ECHO_TRY(parse_sum(depth + 1));
        ++count;
      } while (consume(','));
      if (!consume(')')) return expected_error("',' or ')'");
      emit(name == "min" ? Kind::kMin : Kind::kMax, 0, count);
      return ok();
    }
    auto& names = out_.names_;
    const auto known = std::find(names.begin(), names.end(), name);
    emit(Kind::kName, 0, static_cast<std::size_t>(known - names.begin()));
    if (known == names.end()) names.push_back(name);
    return ok();
  }

  std::string_view text_;
  std::size_t at_ = 0;
  Expression out_;
};

Result<Expression> Expression::parse(std::string_view text) { return ExpressionParser(text).parse(); }

Result<double> Expression::value(const std::function<std::optional<double>(const std::string&)>& number_of) const {
  std::vector<double> stack;
  const auto pop = [&] {
    const double top = stack.back();
    stack.pop_back();
    return top;
  };
  for (const Step& s : steps_) {
    if (s.kind == Kind::kNumber) {
      stack.push_back(s.number);
    } else if (s.kind == Kind::kName) {
      const auto known = number_of(names_[s.count]);
      if (!known) return fail(Code::kInvalid, "", "'{}' has no value that is a number", names_[s.count]);
      stack.push_back(*known);
    } else if (s.kind == Kind::kNegate) {
      stack.push_back(-pop());
    } else if (s.kind == Kind::kMin || s.kind == Kind::kMax) {
      double best = pop();
      for (std::size_t i = 1; i < s.count; ++i)
        best = s.kind == Kind::kMin ? std::min(best, pop()) : std::max(best, pop());
      stack.push_back(best);
    } else {
      const double b = pop(), a = pop();
      if (s.kind == Kind::kDivide && b == 0) return fail(Code::kInvalid, "", "division by zero");
      stack.push_back(s.kind == Kind::kAdd        ? a + b
                      : s.kind == Kind::kSubtract ? a - b
                      : s.kind == Kind::kMultiply ? a * b
                                                  : a / b);
    }
  }
  if (!std::isfinite(stack.back())) return fail(Code::kInvalid, "", "the result is too large");
  return stack.back();
}

std::string number_text(double value) {
  if (value == 0) return "0";
  if (value == std::floor(value) && std::abs(value) < 9e15) return fmt::format("{}", static_cast<std::int64_t>(value));
  return fmt::format("{}", value);
}

}  // namespace echoline::study
