// Expressions over given numbers, evaluated exactly. Private to data_plane/adapters/.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace echoline::data_plane::maths {

// With these limits, numerators and denominators fit in 128 bits: n numbers up to m reach at most 2^(n-1) m^n = 1.3e34.
inline constexpr std::size_t kCountdownNumbersMax = 8;
inline constexpr std::uint32_t kCountdownNumberMax = 10'000;
inline constexpr std::size_t kExpressionBytesMax = 1024, kExpressionDepthMax = 64;

// Which numbers and operations an expression may use.
struct ExpressionRules {
  std::span<const std::uint32_t> numbers;  // at most kCountdownNumbersMax of at most kCountdownNumberMax each
  std::string_view operations = "+-*/";
  bool use_all = true;  // each number exactly once; false: at most once
};

enum class ExpressionResult {
  kTarget,
  kOtherValue,    // another value, a fraction, or division by zero
  kForbidden,     // an expression that uses other numbers or operations
  kNoExpression,  // not an expression
};

// Compares `text` with the target. An expression consists of sums, differences, products, quotients, brackets and a '-'
// in front, with white space between; U+2212, U+00D7 and U+00F7 count as '-', '*' and '/'. Any bytes are accepted. An
// expression has at most kExpressionBytesMax bytes, and brackets and signs nested at most kExpressionDepthMax deep.
// Linear time.
ExpressionResult evaluate(std::string_view text, const ExpressionRules& rules, std::uint64_t target);

}  // namespace echoline::data_plane::maths
