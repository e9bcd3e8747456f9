// Fits tables of small symbols; SparseEncoder calls it. A small symbol codes an element of a dense range: 15 of them
// stand for the upper part of a step (signed distance from the old value to the new one), the last for "unchanged". The
// low bits of the step are stored separately.
#include "delta/small_fit.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "delta/token.hpp"

namespace echoline::delta {
namespace {

constexpr double kExceptionBits = 22;  // approximate bits of a change without a symbol, beside its step's low bits

// Adds `count` steps, spread evenly from `least` to `most`, to their symbols' weights. (A sample counts steps by token,
// which leaves the steps of one token open.) Steps without a symbol are left out.
void spread_steps(std::int64_t least, std::int64_t most, unsigned low_bits, double count,
                  std::array<double, kSmallSymbols>& weights) {
  // Symbols 0 to 14 stand for the upper parts -7 to 7.
  const std::int64_t first = std::max<std::int64_t>(least >> low_bits, -std::int64_t{kZeroStep});
  const std::int64_t last = std::min<std::int64_t>(most >> low_bits, kSmallUnchanged - 1 - std::int64_t{kZeroStep});
  const double count_per_step = count / (static_cast<double>(most) - static_cast<double>(least) + 1);
  for (std::int64_t high = first; high <= last; ++high) {
    // The steps with this upper part are from `from` to `to`.
    const double from =
        std::max(std::ldexp(static_cast<double>(high), static_cast<int>(low_bits)), static_cast<double>(least));
    const double to =
        std::min(std::ldexp(static_cast<double>(high + 1), static_cast<int>(low_bits)) - 1, static_cast<double>(most));
    weights[static_cast<std::size_t>(high + kZeroStep)] += count_per_step * (to - from + 1);
  }
}

// A coding with a given number of low bits.
struct Draft {
  std::array<double, kSmallSymbols> weights{};
  double bits = 0;  // to code the sample
};

Draft draft_of(std::span<const std::uint32_t> counts, unsigned low_bits, double element_count) {
  Draft draft;
  double changed = 0, coded = 0;  // elements that change, and those of them that have a symbol
  for (std::size_t symbol = 1; symbol < counts.size(); ++symbol) {
    if (counts[symbol] == 0) continue;
    const auto token = static_cast<unsigned>(symbol - 1);
    changed += counts[symbol];
    // Longer steps never fit in a symbol, which has kSymbolBits bits and leaves out at most kLowBitsMax low bits. The
    // limit also keeps `most` from overflowing.
    if (const unsigned bits = extra_bits(token); bits < kLowBitsMax + kSymbolBits) {
      // token & ~1: the token of the same magnitudes away from zero.
      const auto least = static_cast<std::int64_t>(step_of_token(token & ~1u, /*extra=*/0));
      const std::int64_t most = least + (std::int64_t{1} << bits) - 1;
      const bool towards_zero = token & 1;
      spread_steps(towards_zero ? -most : least, towards_zero ? -least : most, low_bits, counts[symbol], draft.weights);
    }
  }
  // A symbol in the table costs every element a little. A symbol that is not in the table costs its elements an
  // exception. So a symbol is in the table from this share of the sample on.
  constexpr double kShareMin = 0.0005;
  const auto step_weights = std::span(draft.weights).first(kSmallUnchanged);
  // Also false for the wrapped index before the first symbol.
  const auto is_sampled = [&](std::size_t i) { return i < step_weights.size() && draft.weights[i] > 0; };
  std::array<double, kSmallUnchanged> fitted{};
  for (std::size_t i = 0; i < step_weights.size() && changed > 0; ++i) {  // without changes, no step has a symbol
    if (low_bits == 0 && i == kZeroStep) continue;                        // a step of 0 is no change
    // A symbol that the sample lacks gets a small weight too, because other elements may have it. The weight is larger
    // beside symbols that the sample has.
    const double unsampled_weight = is_sampled(i - 1) || is_sampled(i + 1) ? 0.5 : 0.25;
    const double weight = step_weights[i] > 0 ? step_weights[i] + 0.5 : unsampled_weight;
    if (weight >= kShareMin * element_count) fitted[i] = std::max(step_weights[i], unsampled_weight);
  }
  std::ranges::copy(fitted, step_weights.begin());
  for (const double weight : step_weights) coded += weight;
  draft.weights[kSmallUnchanged] = std::max<double>(counts[0], 0.5);  // never 0, because its logarithm is needed
  const double weight_total = coded + draft.weights[kSmallUnchanged];
  for (const double weight : draft.weights)
    if (weight > 0) draft.bits += weight * std::log2(weight_total / weight);
  const double exceptions = std::max(changed - coded, 0.0);
  draft.bits += low_bits * std::min(coded, changed) + exceptions * (kExceptionBits + low_bits);
  return draft;
}

}  // namespace

unsigned low_bits_max(std::size_t element_bytes) {
  return std::min<unsigned>(8 * static_cast<unsigned>(element_bytes) - 2, kLowBitsMax);
}

SmallFit fit_small(std::span<const std::uint32_t> counts, unsigned low_bits_max) {
  double element_count = 0;
  for (const std::uint32_t count : counts) element_count += count;
  while (counts.size() > 1 && counts.back() == 0) counts = counts.first(counts.size() - 1);
  SmallFit fit;
  Draft best = draft_of(counts, /*low_bits=*/0, element_count);
  // Fewer than 6 counts mean that all steps have at most magnitude 2, so low bits would not help. Otherwise, let the
  // longest step's token have n extra bits. With more than n + 1 low bits, all steps of the sample would share one or
  // two symbols.
  unsigned useful_max = 0;
  if (counts.size() >= 6) {
    const auto longest_token = static_cast<unsigned>(counts.size() - 2);  // counts[t + 1] is of token t
    useful_max = extra_bits(longest_token) + 1;
  }
  for (unsigned low_bits = 1; low_bits <= std::min(low_bits_max, useful_max); ++low_bits) {
    Draft draft = draft_of(counts, low_bits, element_count);
    if (draft.bits >= best.bits) continue;
    best = draft;
    fit.low_bits = low_bits;
  }
  fit.table = normalise_small(best.weights);
  fit.bits_per_element = element_count > 0 ? best.bits / element_count : 0;
  return fit;
}

}  // namespace echoline::delta
