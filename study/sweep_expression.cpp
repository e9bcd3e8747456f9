// A parser and evaluator of arithmetic expressions, for study/sweep_grid.cpp.
#include "study/sweep_expression.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/text.hpp"

namespace echoline::study {
namespace {

constexpr std::string_view kNoOperation = "";  // of errors; the caller knows what it was parsing

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

}  // namespace

class ExpressionParser {
 public:
  explicit ExpressionParser(std::string_view text) : text_(text) {}

  Result<Expression> parse() {
    if (text_.size() > kExpressionBytesMax)
      return fail(Code::kInvalid, kNoOperation, "expected an expression of at most {} bytes, found {}",
                  kExpressionBytesMax, text_.size());
    ECHO_TRY(parse_sum(/*depth=*/0));
    if (!at_end()) return expected_error("an operator or the end");
    return std::move(expression_);
  }

 private:
  using Kind = Expression::Kind;

  void skip_space() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\t')) ++position_;
  }
  bool at_end() {
    skip_space();
    return position_ == text_.size();
  }
  // Skips `c` if it is the next character; false: it is not.
  bool consume(char c) {
    skip_space();
    if (position_ == text_.size() || text_[position_] != c) return false;
    ++position_;
    return true;
  }
  Error expected_error(std::string_view what) {
    return fail(Code::kInvalid, kNoOperation, "expected {} in '{}', found {}", what, printable(text_, 80),
                at_end() ? "its end" : fmt::format("'{}'", printable(text_.substr(position_), 40)));
  }
  // Appends a step. Operands are appended before their operator, so that a stack evaluates the steps in order.
  void emit(Kind kind, double number = 0, std::size_t argument = 0) {
    expression_.steps_.push_back({kind, number, argument});
  }

  // The grammar: a sum consists of products, a product of factors, a factor of minus signs and an operand. `depth`: the
  // number of open brackets.
  Status parse_sum(int depth) {
    if (depth > kExpressionDepthMax)
      return fail(Code::kInvalid, kNoOperation, "expected at most {} levels of brackets", kExpressionDepthMax);
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
    if (is_digit(text_[position_])) return parse_number();
    if (is_letter(text_[position_])) return parse_name(depth);
    return expected_error("a number or a name");
  }

  // Takes digits, points and one exponent with its sign. from_chars() then checks their order.
  Status parse_number() {
    std::string digits;
    std::size_t end = position_;
    const auto is_e = [](char c) { return c == 'e' || c == 'E'; };
    for (bool in_exponent = false; end < text_.size(); ++end) {
      const char c = text_[end];
      const bool is_exponent_sign = (c == '-' || c == '+') && in_exponent && is_e(text_[end - 1]);
      // An underscore between two digits only groups them.
      if (c == '_' && is_digit(text_[end - 1]) && end + 1 < text_.size() && is_digit(text_[end + 1])) continue;
      if (is_e(c) && !in_exponent)
        in_exponent = true;
      else if (!is_digit(c) && c != '.' && !is_exponent_sign)
        break;
      digits += c;
    }
    double value = 0;
    const char* const digits_end = digits.data() + digits.size();
    const auto [parsed_end, error] = std::from_chars(digits.data(), digits_end, value);
    if (error != std::errc{} || parsed_end != digits_end || !std::isfinite(value)) return expected_error("a number");
    position_ = end;
    emit(Kind::kNumber, value);
    return ok();
  }

  Status parse_name(int depth) {
    const std::size_t begin = position_;
    while (position_ < text_.size()) {
      const bool is_inner_dot =
          text_[position_] == '.' && position_ + 1 < text_.size() && is_letter(text_[position_ + 1]);
      if (!is_letter(text_[position_]) && !is_digit(text_[position_]) && !is_inner_dot) break;
      ++position_;
    }
    const std::string name(text_.substr(begin, position_ - begin));
    if ((name == "min" || name == "max") && consume('(')) {
      std::size_t count = 0;
      do {
        ECHO_TRY(parse_sum(depth + 1));
        ++count;
      } while (consume(','));
      if (!consume(')')) return expected_error("',' or ')'");
      emit(name == "min" ? Kind::kMin : Kind::kMax, /*number=*/0, /*argument=*/count);
      return ok();
    }
    auto& names = expression_.names_;
    const auto it = std::find(names.begin(), names.end(), name);
    emit(Kind::kName, /*number=*/0, /*argument=*/static_cast<std::size_t>(it - names.begin()));
    if (it == names.end()) names.push_back(name);  // its index is then the one that was emitted
    return ok();
  }

  std::string_view text_;
  std::size_t position_ = 0;
  Expression expression_;
};

Result<Expression> Expression::parse(std::string_view text) { return ExpressionParser(text).parse(); }

Result<double> Expression::value(const std::function<std::optional<double>(const std::string&)>& number_of) const {
  std::vector<double> stack;
  const auto pop = [&] {
    const double top = stack.back();
    stack.pop_back();
    return top;
  };
  for (const Step& step : steps_) {
    if (step.kind == Kind::kNumber) {
      stack.push_back(step.number);
    } else if (step.kind == Kind::kName) {
      const std::string& name = names_[step.argument];
      const auto number = number_of(name);
      if (!number) return fail(Code::kInvalid, kNoOperation, "'{}' has no value that is a number", name);
      stack.push_back(*number);
    } else if (step.kind == Kind::kNegate) {
      stack.push_back(-pop());
    } else if (step.kind == Kind::kMin || step.kind == Kind::kMax) {
      double extreme = pop();
      for (std::size_t i = 1; i < step.argument; ++i)
        extreme = step.kind == Kind::kMin ? std::min(extreme, pop()) : std::max(extreme, pop());
      stack.push_back(extreme);
    } else {
      const double right = pop(), left = pop();
      if (step.kind == Kind::kDivide && right == 0) return fail(Code::kInvalid, kNoOperation, "division by zero");
      stack.push_back(step.kind == Kind::kAdd        ? left + right
                      : step.kind == Kind::kSubtract ? left - right
                      : step.kind == Kind::kMultiply ? left * right
                                                     : left / right);
    }
  }
  if (!std::isfinite(stack.back())) return fail(Code::kInvalid, kNoOperation, "the result is too large");
  return stack.back();
}

std::string number_text(double value) {
  if (value == 0) return "0";
  constexpr double kExactMax = 9e15;  // a double holds whole numbers exactly below 2^53, about 9.007e15
  if (value == std::floor(value) && std::abs(value) < kExactMax)
    return fmt::format("{}", static_cast<std::int64_t>(value));
  return fmt::format("{}", value);
}

}  // namespace echoline::study
