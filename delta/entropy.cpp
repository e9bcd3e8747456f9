#include "delta/entropy.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

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

struct StepCount {
  std::uint64_t step = 0;  // two's complement
  std::uint64_t count = 0;
};

// Sorted steps with the number of times each occurs.
std::vector<StepCount> count_sorted(const std::vector<std::uint64_t>& steps) {
  std::vector<StepCount> counts;
  for (const std::uint64_t step : steps) {
    if (counts.empty() || counts.back().step != step) counts.push_back({step, 0});
    ++counts.back().count;
  }
  return counts;
}

// The counts of one class.
struct ClassCounts {
  std::uint64_t elements = 0;
  std::array<std::uint64_t, kPlaces> small{};
  std::vector<std::uint64_t> large;     // steps as they came
  std::vector<StepCount> large_counts;  // after settle(); by step, unless merged
  void settle() {
    std::sort(large.begin(), large.end());
    large_counts = count_sorted(large);
    large = {};
  }
};

using Counts = std::vector<ClassCounts>;  // by exponent field

// Counts a stretch of a tensor whose elements are read as unsigned T.
template <class T>
class Counter {
 public:
  Counter(DType dtype, Counts& counts)
      : counts_(counts),
        shift_(exponent_field(dtype).shift),
        mask_(static_cast<T>(exponent_field(dtype).mask)),
        is_float_(is_float(dtype)),
        is_signed_(has_sign(dtype)) {
    counts_.resize(std::size_t{mask_} + 1);
  }

  void count(const std::byte* prev, const std::byte* cur, std::size_t elements) {
    // Four histograms in turn: runs of one exponent would wait for the same memory cell otherwise.
    std::array<std::vector<std::uint64_t>, 4> seen;
    for (auto& histogram : seen) histogram.resize(counts_.size());
    constexpr std::size_t kBlock = 32 / sizeof(T);
    std::size_t i = 0;
    for (; i + kBlock <= elements; i += kBlock) {
      const std::byte* old_block = prev + i * sizeof(T);
      const std::byte* new_block = cur + i * sizeof(T);
      if (is_float_)
        for (std::size_t j = 0; j < kBlock; ++j) ++seen[j % 4][class_of(load<T>(old_block + j * sizeof(T)))];
      if (std::memcmp(old_block, new_block, 32) == 0) continue;
      for (std::size_t j = 0; j < kBlock; ++j) compare(old_block + j * sizeof(T), new_block + j * sizeof(T));
    }
    for (; i < elements; ++i) {
      if (is_float_) ++seen[0][class_of(load<T>(prev + i * sizeof(T)))];
      compare(prev + i * sizeof(T), cur + i * sizeof(T));
    }
    if (!is_float_) seen[0][0] = elements;
    for (const auto& histogram : seen)
      for (std::size_t c = 0; c < histogram.size(); ++c) counts_[c].elements += histogram[c];
  }

 private:
  std::size_t class_of(T bits) const { return static_cast<std::size_t>((bits >> shift_) & mask_); }

  // An integer that grows with the value; a bijection.
  T ordered(T bits) const {
    constexpr T kSign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
    if (is_float_ && (bits & kSign)) return static_cast<T>(~bits);
    return is_float_ || is_signed_ ? static_cast<T>(bits ^ kSign) : bits;
  }

  void compare(const std::byte* old_at, const std::byte* new_at) {
    const T old_bits = load<T>(old_at), new_bits = load<T>(new_at);
    if (old_bits == new_bits) return;
    // Modulo 2^bits, which loses nothing given the old value.
    const auto step = static_cast<std::make_signed_t<T>>(static_cast<T>(ordered(new_bits) - ordered(old_bits)));
    ClassCounts& counts = counts_[class_of(old_bits)];
    if (step >= -kSmallStep && step < kSmallStep)
      ++counts.small[static_cast<std::size_t>(step + kSmallStep)];
    else
      counts.large.push_back(static_cast<std::uint64_t>(static_cast<std::int64_t>(step)));
  }

  Counts& counts_;
  const unsigned shift_;
  const T mask_;
  const bool is_float_;
  const bool is_signed_;
};

void count_stretch(const TensorView& prev, const TensorView& cur, std::size_t first, std::size_t elements,
                   Counts& counts) {
  const std::size_t size = dtype_bytes(cur.dtype);
  const std::byte* from = prev.bytes.data() + first * size;
  const std::byte* to = cur.bytes.data() + first * size;
  with_element_type(size, [&]<class T>(T) { Counter<T>(cur.dtype, counts).count(from, to, elements); });
}

// Adds `from`, which may be given up, to `to`; both before settle(), or both after it.
void merge(Counts& to, Counts&& from) {
  to.resize(std::max(to.size(), from.size()));
  for (std::size_t c = 0; c < from.size(); ++c) {
    to[c].elements += from[c].elements;
    for (std::size_t p = 0; p < kPlaces; ++p) to[c].small[p] += from[c].small[p];
    to[c].large.insert(to[c].large.end(), from[c].large.begin(), from[c].large.end());
    to[c].large_counts.insert(to[c].large_counts.end(), from[c].large_counts.begin(), from[c].large_counts.end());
  }
}

// n·log2(n), the form every entropy of counts is made of.
double n_log_n(std::uint64_t n) { return n == 0 ? 0.0 : static_cast<double>(n) * std::log2(static_cast<double>(n)); }

EntropyBound bound_of(const Counts& counts) {
  EntropyBound bound;
  for (const ClassCounts& c : counts) {
    std::uint64_t changed = 0;
    double observed = 0;
    const auto add = [&](std::uint64_t count) {
      changed += count;
      observed += n_log_n(count);
    };
    for (const std::uint64_t count : c.small) add(count);
    for (const StepCount& step : c.large_counts) add(step.count);
    bound.elements += c.elements;
    bound.changed += changed;
    bound.position_bits += n_log_n(c.elements) - n_log_n(changed) - n_log_n(c.elements - changed);
    bound.step_bits += n_log_n(changed) - observed;
  }
  return bound;
}

Counts count_tensor(const TensorView& prev, const TensorView& cur, unsigned threads) {
  constexpr std::size_t kWorthAThread = 1u << 18;
  const std::size_t elements = cur.bytes.size() / dtype_bytes(cur.dtype);
  const std::size_t parts = std::clamp<std::size_t>(elements / kWorthAThread, 1, std::clamp(threads, 1u, 256u));
  std::vector<Counts> counts(parts);
  for_each_parallel(parts, static_cast<unsigned>(parts), [&](unsigned, std::size_t part) {
    const std::size_t first = elements / parts * part;
    const std::size_t last = part + 1 == parts ? elements : first + elements / parts;
    count_stretch(prev, cur, first, last - first, counts[part]);
  });
  for (std::size_t part = 1; part < parts; ++part) merge(counts[0], std::move(counts[part]));
  for (ClassCounts& c : counts[0]) c.settle();
  return std::move(counts[0]);
}

// Several tensors' sorted counts as one.
void settle_pool(Counts& pool) {
  for (ClassCounts& c : pool) {
    auto& counts = c.large_counts;
    std::sort(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
    std::size_t kept = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (kept > 0 && counts[kept - 1].step == counts[i].step)
        counts[kept - 1].count += counts[i].count;
      else
        counts[kept++] = counts[i];
    }
    counts.resize(kept);
  }
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
  std::map<DType, Counts> pools;
  for (std::size_t i = 0; i < to.size(); ++i) {
    Counts counts = count_tensor(from[i], to[i], threads);
    result.tensors.push_back({to[i].name, to[i].dtype, bound_of(counts)});
    merge(pools[to[i].dtype], std::move(counts));
  }
  for (auto& [dtype, pool] : pools) {
    settle_pool(pool);
    const EntropyBound bound = bound_of(pool);
    result.total.elements += bound.elements;
    result.total.changed += bound.changed;
    result.total.position_bits += bound.position_bits;
    result.total.step_bits += bound.step_bits;
  }
  return result;
}

}  // namespace echoline::delta
