// Small arithmetic on the keys of a sweep: "S - 1", "min(2 * kappa, 8)".
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

// Numbers, names (letters, digits, '_' and inner dots, not beginning with a digit), + - * /, min(...), max(...),
// brackets.
class Expression {
 public:
  // kInvalid, saying what was expected where, when the text is something else.
  static Result<Expression> parse(std::string_view text);
  // Names in the order of their first use.
  const std::vector<std::string>& names() const { return names_; }
  bool is_plain_number() const { return steps_.size() == 1 && steps_.front().kind == Kind::kNumber; }
  // kInvalid when a name has no value or the result is no finite number.
  Result<double> value(const std::function<std::optional<double>(const std::string& name)>& of) const;

 private:
  friend class ExpressionParser;
  enum class Kind { kNumber, kName, kAdd, kSubtract, kMultiply, kDivide, kNegate, kMin, kMax };
  struct Step {
    Kind kind;
    double number = 0;      // of kNumber
    std::size_t count = 0;  // of kName: which one; of kMin and kMax: how many values
  };
  std::vector<Step> steps_;  // in the order of evaluation: operands before what uses them
  std::vector<std::string> names_;
};

// As a run file writes it: whole numbers without a point, others with as many digits as they need.
std::string number_text(double value);

}  // namespace echoline::study
