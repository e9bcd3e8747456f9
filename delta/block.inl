// The kernels of block.hpp for one instruction set. Included by kernels_portable.cpp, kernels_avx2.cpp and
// kernels_avx512.cpp, each compiled for its own processors; everything here has internal linkage, and nothing from the
// standard library is instantiated, so that no function compiled for one processor is called on another.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

#include "delta/block.hpp"
#include "delta/token.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace echoline::delta {
namespace {

template <class T>
T read_element(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

// The position of the `rank`-th set bit, which exists.
unsigned select_bit(std::uint32_t bits, std::uint32_t rank) {
#if defined(__BMI2__)
  return static_cast<unsigned>(__builtin_ctz(_pdep_u32(1u << rank, bits)));
#else
  for (; rank > 0; --rank) bits &= bits - 1;
  return static_cast<unsigned>(__builtin_ctz(bits));
#endif
}

template <class T>
unsigned class_of(T old, const BlockModel& model) {
  const auto exponent = static_cast<std::uint32_t>(old >> model.exponent_shift) & model.exponent_mask;
  const std::uint32_t above = exponent > model.base ? exponent - model.base : 0;
  return above < kClasses ? above : kClasses - 1;
}

// ---- which elements changed ----

template <class T>
std::uint32_t diff_tail(const std::byte* prev, const std::byte* cur, std::uint32_t from, std::uint32_t count,
                        std::uint32_t* changed) {
  std::uint32_t total = 0;
  for (std::uint32_t i = from; i < count; i += 32) {
    std::uint32_t bits = 0;
    const std::uint32_t end = count - i < 32 ? count - i : 32;
    if (end < 32 || std::memcmp(prev + i * sizeof(T), cur + i * sizeof(T), 32 * sizeof(T)) != 0)
      for (std::uint32_t k = 0; k < end; ++k)
        bits |= static_cast<std::uint32_t>(read_element<T>(prev + (i + k) * sizeof(T)) !=
                                           read_element<T>(cur + (i + k) * sizeof(T)))
                << k;
    changed[i / 32] = bits;
    total += static_cast<std::uint32_t>(__builtin_popcount(bits));
  }
  return total;
}

#if defined(__AVX512BW__)
template <class T>
std::uint32_t diff(const std::byte* prev, const std::byte* cur, std::uint32_t count, std::uint32_t* changed) {
  std::uint32_t total = 0, i = 0;
  for (; i + 32 <= count; i += 32) {
    const std::byte* p = prev + i * sizeof(T);
    const std::byte* c = cur + i * sizeof(T);
    std::uint32_t bits = 0;
    if constexpr (sizeof(T) == 1) {
      bits = _mm256_cmpneq_epi8_mask(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(c)));
    } else if constexpr (sizeof(T) == 2) {
      bits = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(p), _mm512_loadu_si512(c));
    } else if constexpr (sizeof(T) == 4) {
      for (unsigned k = 0; k < 2; ++k)
        bits |= static_cast<std::uint32_t>(
                    _mm512_cmpneq_epi32_mask(_mm512_loadu_si512(p + 64 * k), _mm512_loadu_si512(c + 64 * k)))
                << (16 * k);
    } else {
      for (unsigned k = 0; k < 4; ++k)
        bits |= static_cast<std::uint32_t>(
                    _mm512_cmpneq_epi64_mask(_mm512_loadu_si512(p + 64 * k), _mm512_loadu_si512(c + 64 * k)))
                << (8 * k);
    }
    changed[i / 32] = bits;
    total += static_cast<std::uint32_t>(__builtin_popcount(bits));
  }
  return total + diff_tail<T>(prev, cur, i, count, changed);
}
#elif defined(__AVX2__)
template <class T>
std::uint32_t diff(const std::byte* prev, const std::byte* cur, std::uint32_t count, std::uint32_t* changed) {
  if constexpr (sizeof(T) == 8) {
    return diff_tail<T>(prev, cur, 0, count, changed);
  } else {
    constexpr unsigned kVectors = sizeof(T);  // of 32 bytes, for 32 elements
    std::uint32_t total = 0, i = 0;
    for (; i + 32 <= count; i += 32) {
      __m256i equal[4];
      for (unsigned k = 0; k < kVectors; ++k) {
        const auto p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(prev + i * sizeof(T)) + k);
        const auto c = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(cur + i * sizeof(T)) + k);
        equal[k] = sizeof(T) == 1 ? _mm256_cmpeq_epi8(p, c)
                   : sizeof(T) == 2 ? _mm256_cmpeq_epi16(p, c)
                                    : _mm256_cmpeq_epi32(p, c);
      }
      std::uint32_t same = 0;
      if constexpr (sizeof(T) == 1) {
        same = static_cast<std::uint32_t>(_mm256_movemask_epi8(equal[0]));
      } else if constexpr (sizeof(T) == 2) {
        const auto packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal[0], equal[1]), 0xd8);
        same = static_cast<std::uint32_t>(_mm256_movemask_epi8(packed));
      } else {
        for (unsigned k = 0; k < 4; ++k)
          same |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal[k]))) << (8 * k);
      }
      changed[i / 32] = ~same;
      total += static_cast<std::uint32_t>(__builtin_popcount(~same));
    }
    return total + diff_tail<T>(prev, cur, i, count, changed);
  }
}
#else
template <class T>
std::uint32_t diff(const std::byte* prev, const std::byte* cur, std::uint32_t count, std::uint32_t* changed) {
  return diff_tail<T>(prev, cur, 0, count, changed);
}
#endif

// ---- which range elements belong to ----

// Entries of a SortedBlock are divided by class bounds; bound e is where entry e ends.
struct EntryBounds {
  std::uint32_t last = 0;  // entry
  std::uint8_t of[kRangesMax + 1] = {};
  explicit EntryBounds(const BlockModel& model) : last(model.ranges - model.dense) {
    of[0] = model.dense > 0 ? model.bound[model.dense - 1] : 0;
    for (std::uint32_t e = 1; e <= last; ++e) of[e] = model.bound[model.dense + e - 1];
  }
};

// Sets mask[e][w] to the elements in entries 0 to e, for all entries but the last, word by word; gives the number of
// words done. The others are left to nest_tail().
template <class T>
std::uint32_t nest_words(const std::byte*, std::uint32_t, const BlockModel&, const EntryBounds&, SortedBlock&) {
  return 0;
}

#if defined(__AVX512BW__)
template <>
std::uint32_t nest_words<std::uint16_t>(const std::byte* old, std::uint32_t count, const BlockModel& model,
                                        const EntryBounds& bounds, SortedBlock& sorted) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(model.exponent_shift));
  const __m512i exponent_mask = _mm512_set1_epi16(static_cast<short>(model.exponent_mask));
  const __m512i base = _mm512_set1_epi16(static_cast<short>(model.base));
  const std::uint32_t words = count / 32;
  // Four words at a time, so that each bound is loaded once for them.
  std::uint32_t w = 0;
  for (; w + 4 <= words; w += 4) {
    __m512i above[4];
    for (std::uint32_t k = 0; k < 4; ++k)
      above[k] = _mm512_subs_epu16(
          _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(old + 64 * (w + k)), shift), exponent_mask), base);
    for (std::uint32_t e = 0; e < bounds.last; ++e) {
      const __m512i bound = _mm512_set1_epi16(bounds.of[e]);
      for (std::uint32_t k = 0; k < 4; ++k) sorted.mask[e][w + k] = _mm512_cmplt_epu16_mask(above[k], bound);
    }
  }
  return w;
}
#elif defined(__AVX2__)
template <>
std::uint32_t nest_words<std::uint16_t>(const std::byte* old, std::uint32_t count, const BlockModel& model,
                                        const EntryBounds& bounds, SortedBlock& sorted) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(model.exponent_shift));
  const __m256i exponent_mask = _mm256_set1_epi16(static_cast<short>(model.exponent_mask));
  const __m256i base = _mm256_set1_epi16(static_cast<short>(model.base));
  const std::uint32_t words = count / 32;
  for (std::uint32_t w = 0; w < words; ++w) {
    __m256i above[2];
    for (unsigned k = 0; k < 2; ++k) {
      const auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(old + 64 * w) + k);
      above[k] = _mm256_subs_epu16(_mm256_and_si256(_mm256_srl_epi16(bits, shift), exponent_mask), base);
    }
    for (std::uint32_t e = 0; e < bounds.last; ++e) {
      const __m256i bound = _mm256_set1_epi16(bounds.of[e]);  // exponents fit in 15 bits: signed comparison is right
      const __m256i packed = _mm256_permute4x64_epi64(
          _mm256_packs_epi16(_mm256_cmpgt_epi16(bound, above[0]), _mm256_cmpgt_epi16(bound, above[1])), 0xd8);
      sorted.mask[e][w] = static_cast<std::uint32_t>(_mm256_movemask_epi8(packed));
    }
  }
  return words;
}
#endif

template <class T>
void nest_tail(const std::byte* old, std::uint32_t from, std::uint32_t count, const BlockModel& model,
               const EntryBounds& bounds, SortedBlock& sorted) {
  for (std::uint32_t i = from; i < count; i += 32) {
    std::uint32_t nested[kRangesMax] = {};
    const std::uint32_t end = count - i < 32 ? count - i : 32;
    for (std::uint32_t k = 0; k < end; ++k) {
      const unsigned c = class_of(read_element<T>(old + (i + k) * sizeof(T)), model);
      for (std::uint32_t e = 0; e < bounds.last; ++e) nested[e] |= static_cast<std::uint32_t>(c < bounds.of[e]) << k;
    }
    for (std::uint32_t e = 0; e < bounds.last; ++e) sorted.mask[e][i / 32] = nested[e];
  }
}

// Counts the bits of mask[w] & ~inner[w], stores those masks, and what lies before each word.
std::uint32_t separate(std::uint32_t* mask, const std::uint32_t* inner, std::uint32_t words, std::uint16_t* before) {
  std::uint32_t w = 0;
  std::uint32_t total = 0;
#if defined(__AVX512VPOPCNTDQ__)
  const __m512i zero = _mm512_setzero_si512();
  __m512i carry = zero;
  for (; w + 16 <= words; w += 16) {
    const __m512i bits = _mm512_andnot_si512(_mm512_loadu_si512(inner + w), _mm512_loadu_si512(mask + w));
    _mm512_storeu_si512(mask + w, bits);
    const __m512i own = _mm512_popcnt_epi32(bits);
    __m512i sum = _mm512_add_epi32(own, _mm512_alignr_epi32(own, zero, 15));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8));
    sum = _mm512_add_epi32(sum, carry);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(before + w), _mm512_cvtepi32_epi16(_mm512_sub_epi32(sum, own)));
    carry = _mm512_permutexvar_epi32(_mm512_set1_epi32(15), sum);
  }
  total = static_cast<std::uint32_t>(_mm512_cvtsi512_si32(carry));
#endif
  for (; w < words; ++w) {
    mask[w] &= ~inner[w];
    before[w] = static_cast<std::uint16_t>(total);
    total += static_cast<std::uint32_t>(__builtin_popcount(mask[w]));
  }
  for (; w % 32 != 0; ++w) before[w] = 0xffff;
  return total;
}

template <class T>
void sort(const std::byte* old, std::uint32_t count, const BlockModel& model, SortedBlock& sorted) {
  const std::uint32_t words = (count + 31) / 32;
  const EntryBounds bounds(model);
  if (bounds.last > 0)
    nest_tail<T>(old, 32 * nest_words<T>(old, count, model, bounds, sorted), count, model, bounds, sorted);
  for (std::uint32_t w = 0; w < words; ++w) sorted.mask[bounds.last][w] = ~0u;
  if (count % 32 != 0) sorted.mask[bounds.last][words - 1] = (1u << count % 32) - 1;
  static constexpr std::uint32_t kNone[kBlockWordsMax] = {};
  for (std::uint32_t e = bounds.last + 1; e-- > 0;)
    sorted.count[e] = separate(sorted.mask[e], e > 0 ? sorted.mask[e - 1] : kNone, words, sorted.before[e]);
}

// Elements picked from a block: their numbers and old bits.
template <class T>
struct Picked {
  std::uint32_t count;
  std::uint16_t index[kBlockElementsMax + 32];
  T old[kBlockElementsMax + 32];
};

// Picks the elements that `mask` has and `without`, unless null, has not.
template <class T>
void pick(const std::byte* old, const std::uint32_t* mask, const std::uint32_t* without, std::uint32_t words,
          Picked<T>& picked) {
  std::uint32_t count = 0;
  std::uint32_t w = 0;
#if defined(__AVX512VBMI2__)
  __m512i lanes = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11,
                                   10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i step = _mm512_set1_epi16(32);
  for (; w < words; ++w) {
    const std::uint32_t bits = without ? mask[w] & ~without[w] : mask[w];
    _mm512_storeu_si512(picked.index + count, _mm512_maskz_compress_epi16(bits, lanes));
    count += static_cast<std::uint32_t>(__builtin_popcount(bits));
    lanes = _mm512_add_epi16(lanes, step);
  }
#else
  for (; w < words; ++w)
    for (std::uint32_t bits = without ? mask[w] & ~without[w] : mask[w]; bits != 0; bits &= bits - 1)
      picked.index[count++] = static_cast<std::uint16_t>(w * 32 + static_cast<std::uint32_t>(__builtin_ctz(bits)));
#endif
  for (std::uint32_t i = 0; i < count; ++i) picked.old[i] = read_element<T>(old + picked.index[i] * sizeof(T));
  picked.count = count;
}

#if defined(__AVX512BW__)
// The 16-bit arithmetic of token.hpp and class_of() on 32 elements.
struct Lanes16 {
  __m128i shift;
  __m512i exponent_mask, base, top, ranges;
  bool is_float;
  explicit Lanes16(const BlockModel& model)
      : shift(_mm_cvtsi32_si128(static_cast<int>(model.exponent_shift))),
        exponent_mask(_mm512_set1_epi16(static_cast<short>(model.exponent_mask))),
        base(_mm512_set1_epi16(static_cast<short>(model.base))),
        top(_mm512_set1_epi16(model.is_float ? -0x8000 : 0)),
        is_float(model.is_float) {
    alignas(64) std::uint16_t range_of[kClasses];
    for (unsigned c = 0; c < kClasses; ++c) range_of[c] = model.range_of[c];
    ranges = _mm512_load_si512(range_of);
  }
  __m512i range_of(__m512i old) const {
    const __m512i above = _mm512_subs_epu16(_mm512_and_si512(_mm512_srl_epi16(old, shift), exponent_mask), base);
    return _mm512_permutexvar_epi16(_mm512_min_epu16(above, _mm512_set1_epi16(kClasses - 1)), ranges);
  }
  __m512i to_ordered(__m512i bits) const {
    return is_float ? _mm512_xor_si512(bits, _mm512_or_si512(_mm512_srai_epi16(bits, 15), top)) : bits;
  }
  __m512i from_ordered(__m512i ordered) const {
    return is_float ? _mm512_xor_si512(
                          ordered,
                          _mm512_or_si512(_mm512_xor_si512(_mm512_srai_epi16(ordered, 15), _mm512_set1_epi16(-1)), top))
                    : ordered;
  }
};
#endif

// ---- changes to tokens ----

// For each picked element: range << kTokenBits | symbol, the symbol being 0 for an unchanged element and the step token
// plus one otherwise; and its magnitude where the token leaves bits open. Gives the number of magnitudes.
template <class T>
std::uint32_t symbols_of(const Picked<T>& picked, const T* now, const BlockModel& model, std::uint16_t* symbols,
                         std::uint64_t* extras) {
  std::uint32_t extra_count = 0;
  std::uint32_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    const __m512i one = _mm512_set1_epi16(1), small = _mm512_set1_epi16(8);
    for (; i < picked.count; i += 32) {
      const __m512i old = _mm512_loadu_si512(picked.old + i);
      const __m512i range = _mm512_slli_epi16(lanes.range_of(old), kTokenBits);
      const __m512i step = _mm512_sub_epi16(lanes.to_ordered(_mm512_loadu_si512(now + i)), lanes.to_ordered(old));
      const __m512i magnitude = _mm512_abs_epi16(step);
      const __m512i towards_zero = _mm512_srli_epi16(_mm512_xor_si512(step, _mm512_and_si512(old, lanes.top)), 15);
      const __m512i symbol =
          _mm512_sub_epi16(_mm512_add_epi16(_mm512_add_epi16(magnitude, magnitude), towards_zero), one);
      const __mmask32 changed = _mm512_test_epi16_mask(magnitude, magnitude);
      _mm512_storeu_si512(symbols + i, _mm512_or_si512(range, _mm512_maskz_mov_epi16(changed, symbol)));
      std::uint32_t large = _mm512_cmpgt_epu16_mask(magnitude, small);
      if (picked.count - i < 32) large &= (1u << (picked.count - i)) - 1;
      for (; large != 0; large &= large - 1) {
        const std::uint32_t k = i + static_cast<std::uint32_t>(__builtin_ctz(large));
        const unsigned token = change_token(picked.old[k], now[k], model.is_float, extras[extra_count++]);
        symbols[k] =
            static_cast<std::uint16_t>(model.range_of[class_of(picked.old[k], model)] << kTokenBits | (token + 1));
      }
    }
    return extra_count;
  }
#endif
  for (; i < picked.count; ++i) {
    const T old = picked.old[i];
    std::uint64_t magnitude = 0;
    const unsigned token = change_token(old, now[i], model.is_float, magnitude);
    extras[extra_count] = magnitude;
    extra_count += magnitude > 8;
    symbols[i] = static_cast<std::uint16_t>(model.range_of[class_of(old, model)] << kTokenBits |
                                            (magnitude == 0 ? 0 : token + 1));
  }
  return extra_count;
}

template <class T>
void collect(const std::byte* prev, const std::byte* cur, std::uint32_t count, const BlockModel& model,
             const SortedBlock& sorted, const std::uint32_t* changed, BlockSink& sink) {
  const std::uint32_t words = (count + 31) / 32;
  Picked<T> picked;
  T now[kBlockElementsMax + 32];
  if (model.dense > 0) {
    pick(prev, sorted.mask[0], nullptr, words, picked);
    for (std::uint32_t i = 0; i < picked.count; ++i) now[i] = read_element<T>(cur + picked.index[i] * sizeof(T));
    sink.dense_extra_count +=
        symbols_of(picked, now, model, sink.dense + sink.dense_count, sink.dense_extras + sink.dense_extra_count);
    sink.dense_count += picked.count;
  }
  if (model.dense == model.ranges) return;
  pick(prev, changed, model.dense > 0 ? sorted.mask[0] : nullptr, words, picked);
  for (std::uint32_t i = 0; i < picked.count; ++i) now[i] = read_element<T>(cur + picked.index[i] * sizeof(T));
  std::uint16_t symbols[kBlockElementsMax + 32];
  std::uint64_t extras[kBlockElementsMax];
  symbols_of(picked, now, model, symbols, extras);
  const std::uint64_t* extra = extras;
  for (std::uint32_t i = 0; i < picked.count; ++i) {
    const std::uint32_t w = picked.index[i] / 32;
    const std::uint32_t r = symbols[i] >> kTokenBits, e = r - model.dense + 1;
    const unsigned token = (symbols[i] & ((1u << kTokenBits) - 1)) - 1;
    GapSink& out = sink.gap[r];
    const std::uint32_t below = sorted.mask[e][w] & ((1u << picked.index[i] % 32) - 1);
    const std::uint64_t rank = out.seen + sorted.before[e][w] + static_cast<std::uint32_t>(__builtin_popcount(below));
    out.gaps[out.count] = static_cast<std::uint32_t>(rank - out.next);
    out.next = rank + 1;
    out.tokens[out.count++] = static_cast<std::uint16_t>(token);
    if (token >= 16) out.extras[out.extra_count++] = *extra++;
  }
  for (std::uint32_t r = model.dense; r < model.ranges; ++r) sink.gap[r].seen += sorted.count[r - model.dense + 1];
}

// ---- tokens to changes ----

// The word that holds the element with this rank: the last one with at most `rank` elements before it.
std::uint32_t word_of(const std::uint16_t* before, std::uint32_t words, std::uint32_t rank) {
#if defined(__AVX512BW__)
  const __m512i wanted = _mm512_set1_epi16(static_cast<short>(rank));
  std::uint32_t at_most = 0;
  for (std::uint32_t w = 0; w < words; w += 32)
    at_most +=
        static_cast<std::uint32_t>(__builtin_popcount(_mm512_cmple_epu16_mask(_mm512_load_si512(before + w), wanted)));
  return at_most - 1;
#else
  std::uint32_t low = 0;
  for (std::uint32_t half = kBlockWordsMax / 2; half > 0; half /= 2)
    low += low + half < words && before[low + half] <= rank ? half : 0;
  return low;
#endif
}

// The symbols of the picked elements.
template <class T>
void read_dense(const Picked<T>& picked, const BlockModel& model, BlockSource& source, std::uint16_t* symbols) {
  std::uint32_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    for (; i < picked.count; i += 32)
      _mm512_storeu_si512(symbols + i, lanes.range_of(_mm512_loadu_si512(picked.old + i)));
  }
#endif
  for (; i < picked.count; ++i) symbols[i] = model.range_of[class_of(picked.old[i], model)];
  RansReader rans = source.dense;
  const RansEntry* const tables = source.dense_tables;
  rans_read_run(
      rans, picked.count, [&](std::uint64_t k) { return tables + symbols[k] * kRansSlots; }, symbols);
  source.dense = rans;
}

// Appends those that change at `out`, up to 32 elements from `i` on; gives where the next change goes.
template <class T>
std::uint64_t place_some(const Picked<T>& picked, std::uint32_t i, const std::uint16_t* symbols,
                         const BlockModel& model, std::uint32_t first, BlockSource& source, std::uint64_t out) {
  const std::uint32_t end = picked.count - i < 32 ? picked.count : i + 32;
  for (; i < end; ++i) {
    const unsigned token = symbols[i] - (symbols[i] != 0);
    const std::uint64_t extra = symbols[i] > 16 ? get_extra(source.bits, token) : 0;
    // Written in any case, kept when it is a change: whether it is cannot be predicted.
    const T value = apply_step(picked.old[i], token_step(token, extra), model.is_float);
    source.positions[out] = first + picked.index[i];
    std::memcpy(source.values + out * sizeof(T), &value, sizeof(T));
    out += symbols[i] != 0;
  }
  return out;
}

template <class T>
std::uint64_t place_dense(const Picked<T>& picked, const std::uint16_t* symbols, const BlockModel& model,
                          std::uint32_t first, BlockSource& source, std::uint64_t out) {
#if defined(__AVX512VBMI2__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    const __m512i one = _mm512_set1_epi16(1), origin = _mm512_set1_epi32(static_cast<int>(first));
    for (std::uint32_t i = 0; i < picked.count; i += 32) {
      const __m512i symbol = _mm512_loadu_si512(symbols + i);
      if (picked.count - i < 32 || _mm512_cmpgt_epu16_mask(symbol, _mm512_set1_epi16(16)) != 0) {
        out = place_some(picked, i, symbols, model, first, source, out);
        continue;
      }
      const __m512i old = _mm512_loadu_si512(picked.old + i);
      const __mmask32 changed = _mm512_test_epi16_mask(symbol, symbol);
      // Odd symbols step away from zero, even ones towards it; ordered integers fall away from zero below it.
      const __m512i magnitude = _mm512_srli_epi16(_mm512_add_epi16(symbol, one), 1);
      const __mmask32 down = ~_mm512_test_epi16_mask(symbol, one) ^ _mm512_test_epi16_mask(old, lanes.top);
      const __m512i ordered = lanes.to_ordered(old);
      const __m512i now =
          lanes.from_ordered(_mm512_mask_sub_epi16(_mm512_add_epi16(ordered, magnitude), down, ordered, magnitude));
      const auto index = _mm512_loadu_si512(picked.index + i);
      const auto low = _mm512_add_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(index)), origin);
      const auto high = _mm512_add_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(index, 1)), origin);
      const auto low_changed = static_cast<__mmask16>(changed), high_changed = static_cast<__mmask16>(changed >> 16);
      const auto low_count = static_cast<unsigned>(__builtin_popcount(low_changed));
      _mm512_storeu_si512(source.positions + out, _mm512_maskz_compress_epi32(low_changed, low));
      _mm512_storeu_si512(source.positions + out + low_count, _mm512_maskz_compress_epi32(high_changed, high));
      _mm512_storeu_si512(source.values + 2 * out, _mm512_maskz_compress_epi16(changed, now));
      out += static_cast<unsigned>(__builtin_popcount(changed));
    }
    return out;
  }
#endif
  for (std::uint32_t i = 0; i < picked.count; i += 32) out = place_some(picked, i, symbols, model, first, source, out);
  return out;
}

template <class T>
bool resolve(const std::byte* old, std::uint32_t count, const BlockModel& model, std::uint32_t first,
             SortedBlock& sorted, BlockSource& source) {
  // The memory of a later block is asked for bit by bit between the steps: all at once would wait for it.
  const std::uint32_t step_bytes = count * sizeof(T) / (model.ranges - model.dense + 1);
  const std::byte* ahead = old + kPrefetchBytes;
  const auto prefetch_some = [&] {
    for (const std::byte* end = ahead + step_bytes; ahead < end; ahead += 64) __builtin_prefetch(ahead);
  };
  sort<T>(old, count, model, sorted);
  prefetch_some();
  const std::uint32_t words = (count + 31) / 32;
  const bool is_float = model.is_float;
  std::uint64_t out = source.count;
  for (std::uint32_t r = model.dense; r < model.ranges; ++r) {
    GapSource& from = source.gap[r];
    const std::uint64_t seen = from.seen;
    const std::uint32_t e = r - model.dense + 1;
    const std::uint64_t end = from.seen = seen + sorted.count[e];
    std::uint64_t at = from.at;
    prefetch_some();
    for (; at < from.count && from.ranks[at] < end; ++at) {
      const auto rank = static_cast<std::uint32_t>(from.ranks[at] - seen);
      const std::uint32_t w = word_of(sorted.before[e], words, rank);
      const std::uint32_t index = w * 32 + select_bit(sorted.mask[e][w], rank - sorted.before[e][w]);
      source.positions[out] = first + index;
      const T value = apply_step(read_element<T>(old + index * sizeof(T)), from.steps[at], is_float);
      std::memcpy(source.values + out * sizeof(T), &value, sizeof(T));
      ++out;
    }
    from.at = at;
  }
  if (model.dense > 0) {
    Picked<T> picked;
    pick(old, sorted.mask[0], nullptr, words, picked);
    std::uint16_t symbols[kBlockElementsMax + 32];
    read_dense(picked, model, source, symbols);
    out = place_dense(picked, symbols, model, first, source, out);
  }
  source.count = out;
  return out <= source.capacity;
}

void hash_bytes(const std::byte* bytes, std::size_t count, std::uint64_t* low, std::uint64_t* high) {
  const XXH128_hash_t h = XXH3_128bits(bytes, count);
  *low = h.low64;
  *high = h.high64;
}

// ---- how many elements have which exponent ----

template <class T>
void count_exponents(const std::byte* old, std::uint32_t count, std::uint32_t shift, std::uint32_t mask,
                     std::uint64_t* counts) {
  if (mask > 0xff) {
    for (std::uint32_t i = 0; i < count; ++i)
      ++counts[static_cast<std::uint32_t>(read_element<T>(old + i * sizeof(T)) >> shift) & mask];
    return;
  }
  // Exponents as bytes, in whole stripes of several vectors: what lies behind the last element gets the exponent of the
  // first and is taken off again.
#if defined(__AVX512BW__)
  constexpr std::uint32_t kVector = 64;
#elif defined(__AVX2__)
  constexpr std::uint32_t kVector = 32;
#else
  constexpr std::uint32_t kVector = 16;
#endif
  constexpr std::uint32_t kStripe = 64, kVectors = kStripe / kVector, kWindow = 12;
  using Vector [[gnu::vector_size(kVector)]] = std::uint8_t;
  alignas(64) std::uint8_t exponents[kBlockElementsMax];
  if (count == 0) return;
  const std::uint32_t stripes = (count + kStripe - 1) / kStripe;
  std::uint32_t done = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 2)
    for (; done + 32 <= count; done += 32) {
      const auto field = [&](std::uint32_t first) {
        const auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(old + first * sizeof(T)));
        return _mm256_and_si256(_mm256_srl_epi16(bits, _mm_cvtsi32_si128(static_cast<int>(shift))),
                                _mm256_set1_epi16(static_cast<short>(mask)));
      };
      const auto packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(field(done), field(done + 16)), 0xd8);
      _mm256_store_si256(reinterpret_cast<__m256i*>(exponents + done), packed);
    }
#endif
  for (; done < count; ++done)
    exponents[done] = static_cast<std::uint8_t>((read_element<T>(old + done * sizeof(T)) >> shift) & mask);
  for (std::uint32_t i = count; i < stripes * kStripe; ++i) exponents[i] = exponents[0];
  counts[exponents[0]] -= stripes * kStripe - count;

  // Nearly all weights lie within a few exponents below the greatest: those are counted one after the other, a stripe at
  // a time; 8192 / 64 stripes do not overflow a byte. The others one by one.
  std::uint8_t greatest = 0;
  for (std::uint32_t i = 0; i < stripes * kStripe; ++i) greatest = exponents[i] > greatest ? exponents[i] : greatest;
  const auto least = static_cast<std::uint8_t>(greatest >= kWindow ? greatest - kWindow + 1 : 0);
  for (std::uint32_t e = least; e <= greatest; ++e) {
    Vector sums[kVectors] = {};
    for (std::uint32_t s = 0; s < stripes; ++s)
      for (std::uint32_t k = 0; k < kVectors; ++k) {
        Vector part;
        std::memcpy(&part, exponents + s * kStripe + k * kVector, kVector);
        sums[k] -= (Vector)(part == static_cast<std::uint8_t>(e));  // true is -1
      }
    std::uint64_t words[kStripe / 8], halves = 0;  // four sums of 16 bits
    std::memcpy(words, sums, kStripe);
    for (const std::uint64_t word : words) halves += (word & 0x00ff00ff00ff00ffu) + (word >> 8 & 0x00ff00ff00ff00ffu);
    counts[e] += (halves * 0x0001000100010001u) >> 48;
  }
  if (least == 0) return;
  for (std::uint32_t at = 0; at < stripes * kStripe; at += kVector) {
    Vector part;
    std::memcpy(&part, exponents + at, kVector);
    const Vector below = (Vector)(part < least);
    std::uint64_t words[kVector / 8], any = 0;
    std::memcpy(words, &below, kVector);
    for (const std::uint64_t word : words) any |= word;
    for (std::uint32_t i = at; any != 0 && i < at + kVector; ++i)
      if (exponents[i] < least) ++counts[exponents[i]];
  }
}

}  // namespace
}  // namespace echoline::delta

#define ECHOLINE_KERNEL_SET(label)                                                                                  \
  {                                                                                                                 \
    label, {diff<std::uint8_t>, diff<std::uint16_t>, diff<std::uint32_t>, diff<std::uint64_t>},                     \
        {sort<std::uint8_t>, sort<std::uint16_t>, sort<std::uint32_t>, sort<std::uint64_t>},                        \
        {collect<std::uint8_t>, collect<std::uint16_t>, collect<std::uint32_t>, collect<std::uint64_t>},            \
        {resolve<std::uint8_t>, resolve<std::uint16_t>, resolve<std::uint32_t>, resolve<std::uint64_t>},            \
        {count_exponents<std::uint8_t>, count_exponents<std::uint16_t>, count_exponents<std::uint32_t>,             \
         count_exponents<std::uint64_t>},                                                                           \
        hash_bytes                                                                                                  \
  }
