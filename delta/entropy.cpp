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
#include "delta/parallel.hpp"

namespace echoline::delta {
namespace {

bool has_sign(DType dtype) {
  return dtype == DType::kI8 || dtype == DType::kI16 || dtype == DType::kI32 || dtype == DType::kI64;
}

constexpr std::int64_t kSmallStep = 64;  // steps in [-kSmallStep, kSmallStep) have a place in the table
constexpr std::size_t kPlaces = 2 * kSmallStep;
constexpr std::size_t kLooseSteps = 1u << 16;  // of a class, before they are sorted and counted

struct StepCount {
  std::uint64_t step = 0;  // two's complement
  std::uint64_t count = 0;
};

// Two lists in order of the step as one.
std::vector<StepCount> merged(const std::vector<StepCount>& a, const std::vector<StepCount>& b) {
  std::vector<StepCount> all(a.size() + b.size());
  std::merge(a.begin(), a.end(), b.begin(), b.end(), all.begin(),
             [](const StepCount& x, const StepCount& y) { return x.step < y.step; });
  std::size_t kept = 0;
  for (const StepCount& next : all) {
    if (kept > 0 && all[kept - 1].step == next.step)
      all[kept - 1].count += next.count;
    else
      all[kept++] = next;
  }
  all.resize(kept);
  return all;
}

// n·log2(n), the form every entropy of counts is made of.
double n_log_n(std::uint64_t n) { return n == 0 ? 0.0 : static_cast<double>(n) * std::log2(static_cast<double>(n)); }

// The counts of one class.
struct ClassCounts {
  std::uint64_t elements = 0;
  std::array<std::uint64_t, kPlaces> small{};
  std::vector<std::uint64_t> loose;  // large steps as they came
  std::vector<StepCount> large;      // those of before, in order

  void add(std::int64_t step) {
    if (step >= -kSmallStep && step < kSmallStep) {
      ++small[static_cast<std::size_t>(step + kSmallStep)];
      return;
    }
    loose.push_back(static_cast<std::uint64_t>(step));
    if (loose.size() >= std::max(kLooseSteps, large.size())) settle();
  }
  void settle() {
    if (loose.empty()) return;
    std::sort(loose.begin(), loose.end());
    std::vector<StepCount> counts;
    for (const std::uint64_t step : loose) {
      if (counts.empty() || counts.back().step != step) counts.push_back({step, 0});
      ++counts.back().count;
    }
    large = merged(large, counts);
    loose = {};
  }
};

struct TypeCounts {
  std::vector<ClassCounts> classes;  // by exponent field
  std::vector<std::uint64_t> elements;  // by exponent field, not in `classes` yet

  explicit TypeCounts(DType dtype) : classes(exponent_field(dtype).mask + 1), elements(classes.size()) {}
  void settle() {
    for (std::size_t c = 0; c < classes.size(); ++c) {
      classes[c].elements += std::exchange(elements[c], 0);
      classes[c].settle();
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
  // An integer that grows with the value; a bijection.
  const auto ordered = [&](T bits) -> T {
    constexpr T kSign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
    if (is_float && (bits & kSign)) return static_cast<T>(~bits);
    return is_float || has_sign(dtype) ? static_cast<T>(bits ^ kSign) : bits;
  };

  if (is_float)
    kernels().count_exponents[width_index(sizeof(T))](prev, count, field.shift, field.mask, counts.elements.data());
  else
    counts.elements[0] += count;
  for (std::uint32_t word = 0; word * 32 < count; ++word)
    for (std::uint32_t bits = changed[word]; bits != 0; bits &= bits - 1) {
      const std::size_t at = (word * 32 + static_cast<std::uint32_t>(std::countr_zero(bits))) * sizeof(T);
      const T from = load<T>(prev + at), to = load<T>(cur + at);
      // Modulo 2^bits, which loses nothing given the old value.
      counts.classes[class_of(from)].add(static_cast<std::make_signed_t<T>>(static_cast<T>(ordered(to) - ordered(from))));
    }
}

}  // namespace

struct EntropyCounter::Types {
  std::map<DType, TypeCounts> of;
};

EntropyCounter::EntropyCounter() : types_(std::make_unique<Types>()) {}
EntropyCounter::~EntropyCounter() = default;
EntropyCounter::EntropyCounter(EntropyCounter&&) noexcept = default;
EntropyCounter& EntropyCounter::operator=(EntropyCounter&&) noexcept = default;

void EntropyCounter::add(DType dtype, const std::byte* prev, const std::byte* cur, std::uint32_t count,
                         const std::uint32_t* changed) {
  TypeCounts& counts = types_->of.try_emplace(dtype, dtype).first->second;
  with_element_type(dtype_bytes(dtype), [&]<class T>(T) { count_block<T>(dtype, prev, cur, count, changed, counts); });
}

void EntropyCounter::join(EntropyCounter&& other) {
  for (auto& [dtype, from] : other.types_->of) {
    TypeCounts& to = types_->of.try_emplace(dtype, dtype).first->second;
    from.settle();
    to.settle();
    for (std::size_t c = 0; c < from.classes.size(); ++c) {
      to.classes[c].elements += from.classes[c].elements;
      for (std::size_t p = 0; p < kPlaces; ++p) to.classes[c].small[p] += from.classes[c].small[p];
      to.classes[c].large = merged(to.classes[c].large, from.classes[c].large);
    }
  }
  other.types_->of.clear();
}

EntropyBound EntropyCounter::bound() {
  EntropyBound total;
  for (auto& [dtype, counts] : types_->of) {
    counts.settle();
    for (const ClassCounts& c : counts.classes) {
      std::uint64_t changed = 0;
      double observed = 0;
      const auto add = [&](std::uint64_t count) {
        changed += count;
        observed += n_log_n(count);
      };
      for (const std::uint64_t count : c.small) add(count);
      for (const StepCount& step : c.large) add(step.count);
      total.elements += c.elements;
      total.changed += changed;
      total.position_bits += n_log_n(c.elements) - n_log_n(changed) - n_log_n(c.elements - changed);
      total.step_bits += n_log_n(changed) - observed;
    }
  }
  return total;
}

namespace {

EntropyCounter count_tensor(const TensorView& prev, const TensorView& cur, unsigned threads) {
  constexpr std::size_t kWorthAThread = 1u << 18;
  const std::size_t size = dtype_bytes(cur.dtype);
  const std::size_t elements = cur.bytes.size() / size;
  const std::size_t parts = std::clamp<std::size_t>(elements / kWorthAThread, 1, std::clamp(threads, 1u, 256u));
  std::vector<EntropyCounter> counters(parts);
  for_each_parallel(parts, static_cast<unsigned>(parts), [&](unsigned, std::size_t part) {
    const std::size_t end = part + 1 == parts ? elements : elements / parts * (part + 1);
    std::uint32_t changed[kBlockWordsMax];
    for (std::size_t at = elements / parts * part; at < end; at += kBlockElementsMax) {
      const auto count = static_cast<std::uint32_t>(std::min<std::size_t>(end - at, kBlockElementsMax));
      const std::byte* from = prev.bytes.data() + at * size;
      const std::byte* to = cur.bytes.data() + at * size;
      kernels().diff[width_index(size)](from, to, count, changed);
      counters[part].add(cur.dtype, from, to, count, changed);
    }
  });
  for (std::size_t part = 1; part < parts; ++part) counters[0].join(std::move(counters[part]));
  return std::move(counters[0]);
}

Status check_same_tensors(const StateView& prev, const StateView& cur) {
  constexpr std::string_view kOperation = "entropy bound";
  if (prev.size() != cur.size())
    return fail(Code::kInvalid, kOperation, "the old state has {} tensors, the new one {}; expected the same",
                prev.size(), cur.size());
  for (std::size_t i = 0; i < cur.size(); ++i) {
    if (prev[i].name != cur[i].name)
      return fail(Code::kInvalid, kOperation, "tensor {} is '{}' in the old state and '{}' in the new one", i,
                  prev[i].name, cur[i].name);
    if (prev[i].dtype != cur[i].dtype || prev[i].shape != cur[i].shape)
      return fail(Code::kInvalid, kOperation, "tensor '{}' is {} [{}] in the old state and {} [{}] in the new one",
                  cur[i].name, dtype_name(prev[i].dtype), fmt::join(prev[i].shape, ", "), dtype_name(cur[i].dtype),
                  fmt::join(cur[i].shape, ", "));
  }
  return ok();
}

}  // namespace

Result<StateEntropy> entropy_bound(const StateView& prev, const StateView& cur, unsigned threads) {
  ECHO_ASSIGN(const StateView from, canonical(prev));
  ECHO_ASSIGN(const StateView to, canonical(cur));
  ECHO_TRY(check_same_tensors(from, to));
  StateEntropy result;
  EntropyCounter pool;
  for (std::size_t i = 0; i < to.size(); ++i) {
    EntropyCounter counter = count_tensor(from[i], to[i], threads);
    result.tensors.push_back({to[i].name, to[i].dtype, counter.bound()});
    pool.join(std::move(counter));
  }
  result.total = pool.bound();
  return result;
}

}  // namespace echoline::delta
