// Arithmetic expressions in the values of a sweep: "S - 1", "min(2 * kappa, 8)".
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace echoline::study {

inline constexpr std::size_t kExpressionBytesMax = 1000;
inline constexpr int kExpressionDepthMax = 32;

// An expression consists of numbers, names (letters, digits, '_', inner dots; no digit first), + - * /, min(...),
// max(...) and brackets.
class Expression {
 public:
  // kInvalid says what was expected at which place.
  static Result<Expression> parse(std::string_view text);
  // Names in the order of their first use.
  const std::vector<std::string>& names() const { return names_; }
  bool is_plain_number() const { return steps_.size() == 1 && steps_.front().kind == Kind::kNumber; }
  // kInvalid when a name has no value or the result is not finite.
  Result<double> value(const std::function<std::optional<double>(const std::string& name)>& number_of) const;

 private:
  friend class ExpressionParser;
  enum class Kind { kNumber, kName, kAdd, kSubtract, kMultiply, kDivide, kNegate, kMin, kMax };
  struct Step {
    Kind kind;
    double number = 0;         // only of kNumber
    std::size_t argument = 0;  // kName: the index of the name; kMin and kMax: the number of values
  };
  std::vector<Step> steps_;  // in the order of evaluation, operands first
  std::vector<std::string> names_;
};

// The number as a run file writes it: no decimal point in whole numbers, no superfluous digits in others.
std::string number_text(double value);

}  // namespace echoline::study
