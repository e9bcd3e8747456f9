// Counts the steps (signed distances from old to new values) of each class (elements with one old exponent), and
// computes the bound from the counts.
#include "delta/entropy.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <map>
#include <type_traits>
#include <utility>

#include "delta/block.hpp"
#include "delta/bytes.hpp"
#include "delta/exponent.hpp"

namespace echoline::delta {
namespace {

bool is_signed_integer(DType dtype) {
  return dtype == DType::kI8 || dtype == DType::kI16 || dtype == DType::kI32 || dtype == DType::kI64;
}

constexpr std::int64_t kSmallStepsEnd = 64;  // steps in [-kSmallStepsEnd, kSmallStepsEnd) have a table entry
constexpr std::size_t kSmallSteps = 2 * kSmallStepsEnd;
constexpr std::size_t kPendingStepsMin = 1u << 16;  // large steps of a class, before they are sorted and counted

struct StepCount {
  std::uint64_t step = 0;  // two's complement
  std::uint64_t count = 0;
};

// Merges two lists sorted by step.
std::vector<StepCount> merge_sorted(const std::vector<StepCount>& a, const std::vector<StepCount>& b) {
  std::vector<StepCount> merged(a.size() + b.size());
  std::merge(a.begin(), a.end(), b.begin(), b.end(), merged.begin(),
             [](const StepCount& x, const StepCount& y) { return x.step < y.step; });
  // Adds up the counts of equal steps, in place.
  std::size_t distinct_steps = 0;
  for (const StepCount& entry : merged) {
    if (distinct_steps > 0 && merged[distinct_steps - 1].step == entry.step)
      merged[distinct_steps - 1].count += entry.count;
    else
      merged[distinct_steps++] = entry;
  }
  merged.resize(distinct_steps);
  return merged;
}

// Returns n·log2(n). The entropy of counts is a sum of such terms.
double n_log_n(std::uint64_t n) { return n == 0 ? 0.0 : static_cast<double>(n) * std::log2(static_cast<double>(n)); }

// Counts how far the elements with one old exponent moved: step = new minus old bits, as ordered integers
// (entropy.hpp).
struct ClassCounts {
  std::uint64_t elements = 0;
  std::array<std::uint64_t, kSmallSteps> small_step_counts{};  // by step + kSmallStepsEnd
  std::vector<std::uint64_t> pending_large_steps;              // unsorted, not yet in `large_step_counts`
  std::vector<StepCount> large_step_counts;                    // sorted by step

  void add(std::int64_t step) {
    if (step >= -kSmallStepsEnd && step < kSmallStepsEnd) {
      ++small_step_counts[static_cast<std::size_t>(step + kSmallStepsEnd)];
      return;
    }
    pending_large_steps.push_back(static_cast<std::uint64_t>(step));
    // Waits for at least as many as are counted already, so that all merges together take linear time.
    if (pending_large_steps.size() >= std::max(kPendingStepsMin, large_step_counts.size())) sort_and_count();
  }
  void sort_and_count() {
    if (pending_large_steps.empty()) return;
    std::sort(pending_large_steps.begin(), pending_large_steps.end());
    std::vector<StepCount> counts;
    for (const std::uint64_t step : pending_large_steps) {
      if (counts.empty() || counts.back().step != step) counts.push_back({.step = step});
      ++counts.back().count;
    }
    large_step_counts = merge_sorted(large_step_counts, counts);
    pending_large_steps = {};
  }
};

struct TypeCounts {
  std::vector<ClassCounts> classes;  // by exponent
  // Elements by exponent that `classes` lacks yet. A flat array, because a kernel increments it for every element.
  std::vector<std::uint64_t> pending_elements;

  explicit TypeCounts(DType dtype) : classes(exponent_field(dtype).mask + 1), pending_elements(classes.size()) {}
  void flush_and_count() {
    for (std::size_t exponent = 0; exponent < classes.size(); ++exponent) {
      classes[exponent].elements += std::exchange(pending_elements[exponent], 0);
      classes[exponent].sort_and_count();
    }
  }
};

template <class T>
void count_block(DType dtype, const std::byte* prev, const std::byte* cur, std::uint32_t count,
                 const std::uint32_t* changed, TypeCounts& counts) {
  const ExponentField field = exponent_field(dtype);
  const bool is_float = field.mask != 0;
  const T mask = static_cast<T>(field.mask);
  const auto class_of = [&](T bits) { return static_cast<std::size_t>((bits >> field.shift) & mask); };
  // A bijection to integers that increase with the value: negative floats have the order of their magnitudes reversed.
  const auto ordered = [&](T bits) -> T {
    constexpr T kSign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
    if (is_float && (bits & kSign)) return static_cast<T>(~bits);
    return is_float || is_signed_integer(dtype) ? static_cast<T>(bits ^ kSign) : bits;
  };

  if (is_float)
    kernels().count_exponents[width_index(sizeof(T))](prev, count, field.shift, field.mask,
                                                      counts.pending_elements.data());
  else
    counts.pending_elements[0] += count;
  for (std::uint32_t word = 0; word * 32 < count; ++word)
    for (std::uint32_t bits = changed[word]; bits != 0; bits &= bits - 1) {
      const std::size_t offset = (word * 32 + static_cast<std::uint32_t>(std::countr_zero(bits))) * sizeof(T);
      const T old = load<T>(prev + offset), now = load<T>(cur + offset);
      // Modulo 2^bits, which is reversible given the old value.
      const T step = static_cast<T>(ordered(now) - ordered(old));
      counts.classes[class_of(old)].add(static_cast<std::make_signed_t<T>>(step));
    }
}

}  // namespace

struct EntropyCounter::Types {
  std::map<DType, TypeCounts> by_dtype;
};

EntropyCounter::EntropyCounter() : types_(std::make_unique<Types>()) {}
EntropyCounter::~EntropyCounter() = default;
EntropyCounter::EntropyCounter(EntropyCounter&&) noexcept = default;
EntropyCounter& EntropyCounter::operator=(EntropyCounter&&) noexcept = default;

void EntropyCounter::add(DType dtype, const std::byte* prev, const std::byte* cur, std::uint32_t count,
                         const std::uint32_t* changed) {
  TypeCounts& counts = types_->by_dtype.try_emplace(dtype, dtype).first->second;
  with_element_type(dtype_bytes(dtype), [&]<class T>(T) { count_block<T>(dtype, prev, cur, count, changed, counts); });
}

void EntropyCounter::merge(EntropyCounter&& other) {
  for (auto& [dtype, from] : other.types_->by_dtype) {
    TypeCounts& to = types_->by_dtype.try_emplace(dtype, dtype).first->second;
    from.flush_and_count();
    to.flush_and_count();
    for (std::size_t exponent = 0; exponent < from.classes.size(); ++exponent) {
      to.classes[exponent].elements += from.classes[exponent].elements;
      for (std::size_t i = 0; i < kSmallSteps; ++i)
        to.classes[exponent].small_step_counts[i] += from.classes[exponent].small_step_counts[i];
      to.classes[exponent].large_step_counts =
          merge_sorted(to.classes[exponent].large_step_counts, from.classes[exponent].large_step_counts);
    }
  }
  other.types_->by_dtype.clear();
}

EntropyBound EntropyCounter::bound() {
  EntropyBound total;
  for (auto& [dtype, counts] : types_->by_dtype) {
    counts.flush_and_count();
    for (const ClassCounts& class_counts : counts.classes) {
      std::uint64_t changed = 0;
      double step_log_sum = 0;
      const auto add = [&](std::uint64_t count) {
        changed += count;
        step_log_sum += n_log_n(count);
      };
      for (const std::uint64_t count : class_counts.small_step_counts) add(count);
      for (const StepCount& step : class_counts.large_step_counts) add(step.count);
      total.elements += class_counts.elements;
      total.changed += changed;
      // n H2(k / n) = n log n - k log k - (n - k) log(n - k), with n elements and k changes; likewise for the steps.
      total.position_bits +=
          n_log_n(class_counts.elements) - n_log_n(changed) - n_log_n(class_counts.elements - changed);
      total.step_bits += n_log_n(changed) - step_log_sum;
    }
  }
  return total;
}

}  // namespace echoline::delta
