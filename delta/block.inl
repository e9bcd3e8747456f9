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

#if defined(__AVX512BW__)
__m512i iota16() {
  return _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8,
                          7, 6, 5, 4, 3, 2, 1, 0);
}
#endif

// The numbers of the elements that `mask` has and `without`, unless null, has not; gives how many there are. There is
// room for kSpareElements more.
std::uint32_t pick(const std::uint32_t* mask, const std::uint32_t* without, std::uint32_t words, std::uint16_t* index) {
  std::uint32_t count = 0;
  std::uint32_t w = 0;
#if defined(__AVX512VBMI2__)
  __m512i lanes = iota16();
  const __m512i step = _mm512_set1_epi16(32);
  for (; w < words; ++w) {
    const std::uint32_t bits = without ? mask[w] & ~without[w] : mask[w];
    _mm512_storeu_si512(index + count, _mm512_maskz_compress_epi16(bits, lanes));
    count += static_cast<std::uint32_t>(__builtin_popcount(bits));
    lanes = _mm512_add_epi16(lanes, step);
  }
#else
  for (; w < words; ++w)
    for (std::uint32_t bits = without ? mask[w] & ~without[w] : mask[w]; bits != 0; bits &= bits - 1)
      index[count++] = static_cast<std::uint16_t>(w * 32 + static_cast<std::uint32_t>(__builtin_ctz(bits)));
#endif
  return count;
}

// Calls f(w) for the words of a mask that has `elements` elements: for all of them where most are not zero, because
// whether one is would be mispredicted often.
// Inlined in any case: what `f` counts has to stay in registers.
template <class F>
[[gnu::always_inline]] inline void for_each_word(const std::uint32_t* mask, std::uint32_t words,
                                                 [[maybe_unused]] std::uint32_t elements, F&& f) {
  std::uint32_t w = 0;
#if defined(__AVX512F__)
  for (; elements >= words && w < words; ++w) f(w);
  for (; w + 16 <= words; w += 16) {
    const __m512i part = _mm512_loadu_si512(mask + w);
    for (unsigned bits = _mm512_test_epi32_mask(part, part); bits != 0; bits &= bits - 1)
      f(w + static_cast<std::uint32_t>(__builtin_ctz(bits)));
  }
#endif
  for (; w < words; ++w)
    if (mask[w] != 0) f(w);
}

// Elements of a block that lie side by side.
template <class T>
using Packed = T[kBlockElementsMax + kSpareElements];

// Puts the `elements` elements in `mask` side by side.
template <class T>
void pack(const std::byte* block, const std::uint32_t* mask, std::uint32_t words, std::uint32_t elements, T* packed) {
  std::uint32_t count = 0;
  for_each_word(mask, words, elements, [&](std::uint32_t w) {
    std::uint32_t bits = mask[w];
    const std::byte* at = block + w * 32 * sizeof(T);
#if defined(__AVX512VBMI2__)
    if constexpr (sizeof(T) == 2) {
      _mm512_storeu_si512(packed + count, _mm512_maskz_compress_epi16(bits, _mm512_maskz_loadu_epi16(bits, at)));
      count += static_cast<std::uint32_t>(__builtin_popcount(bits));
      return;
    }
#endif
    for (; bits != 0; bits &= bits - 1)
      packed[count++] = read_element<T>(at + static_cast<std::size_t>(__builtin_ctz(bits)) * sizeof(T));
  });
}

// The inverse: puts them back to where `mask` has them.
template <class T>
void unpack(const T* packed, const std::uint32_t* mask, std::uint32_t words, std::uint32_t elements, std::byte* block) {
  for_each_word(mask, words, elements, [&](std::uint32_t w) {
    std::uint32_t bits = mask[w];
    std::byte* at = block + w * 32 * sizeof(T);
#if defined(__AVX512VBMI2__)
    if constexpr (sizeof(T) == 2) {
      _mm512_mask_storeu_epi16(at, bits, _mm512_maskz_expand_epi16(bits, _mm512_loadu_si512(packed)));
      packed += __builtin_popcount(bits);
      return;
    }
#endif
    for (; bits != 0; bits &= bits - 1, ++packed)
      std::memcpy(at + static_cast<std::size_t>(__builtin_ctz(bits)) * sizeof(T), packed, sizeof(T));
  });
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

// For each element: range << kTokenBits | symbol, the symbol being 0 for an unchanged element and the step token plus
// one otherwise; and its magnitude where the token leaves bits open, with room for kSpareElements more. Gives the
// number of magnitudes.
template <class T>
std::uint32_t symbols_of(const T* olds, const T* now, std::uint32_t count, const BlockModel& model,
                         std::uint16_t* symbols, std::uint64_t* extras) {
  std::uint32_t extra_count = 0;
  std::uint32_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    const __m512i one = _mm512_set1_epi16(1), small = _mm512_set1_epi16(8);
    for (; i < count; i += 32) {
      const __mmask32 active = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
      const __m512i old = _mm512_loadu_si512(olds + i);
      const __m512i range = _mm512_slli_epi16(lanes.range_of(old), kTokenBits);
      const __m512i step = _mm512_sub_epi16(lanes.to_ordered(_mm512_loadu_si512(now + i)), lanes.to_ordered(old));
      const __m512i magnitude = _mm512_abs_epi16(step);
      const __m512i towards_zero = _mm512_srli_epi16(_mm512_xor_si512(step, _mm512_and_si512(old, lanes.top)), 15);
      __m512i symbol = _mm512_sub_epi16(_mm512_add_epi16(_mm512_add_epi16(magnitude, magnitude), towards_zero), one);
      const __mmask32 large = _mm512_mask_cmpgt_epu16_mask(active, magnitude, small);
      if (large != 0) {
        // The bits of a float of the magnitude begin with its length and its second highest bit.
        const auto head_of = [](__m256i part) {
          const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(part)));
          return _mm512_cvtepi32_epi16(
              _mm512_sub_epi32(_mm512_srli_epi32(bits, 22), _mm512_set1_epi32(2 * (127 + 3) - 8)));
        };
        const __m512i head = _mm512_inserti64x4(_mm512_castsi256_si512(head_of(_mm512_castsi512_si256(magnitude))),
                                                head_of(_mm512_extracti64x4_epi64(magnitude, 1)), 1);
        symbol =
            _mm512_mask_add_epi16(symbol, large, _mm512_add_epi16(_mm512_add_epi16(head, head), towards_zero), one);
        alignas(64) std::uint16_t open[32];
        _mm512_store_si512(open, _mm512_maskz_compress_epi16(large, magnitude));
        const auto more = static_cast<std::uint32_t>(__builtin_popcount(large));
        for (std::uint32_t k = 0; k < more; k += 8)
          _mm512_storeu_si512(extras + extra_count + k,
                              _mm512_cvtepu16_epi64(_mm_load_si128(reinterpret_cast<const __m128i*>(open + k))));
        extra_count += more;
      }
      const __mmask32 changed = _mm512_test_epi16_mask(magnitude, magnitude);
      _mm512_storeu_si512(symbols + i, _mm512_or_si512(range, _mm512_maskz_mov_epi16(changed, symbol)));
    }
    return extra_count;
  }
#endif
  for (; i < count; ++i) {
    const T old = olds[i];
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
  Packed<T> olds, now;
  if (model.dense > 0) {
    const std::uint32_t packed = sorted.count[0];
    pack(prev, sorted.mask[0], words, packed, olds);
    pack(cur, sorted.mask[0], words, packed, now);
    sink.dense_extra_count +=
        symbols_of(olds, now, packed, model, sink.dense + sink.dense_count, sink.dense_extras + sink.dense_extra_count);
    sink.dense_count += packed;
  }
  if (model.dense == model.ranges) return;
  Packed<std::uint16_t> index, symbols;
  const std::uint32_t picked = pick(changed, model.dense > 0 ? sorted.mask[0] : nullptr, words, index);
  for (std::uint32_t i = 0; i < picked; ++i) {
    olds[i] = read_element<T>(prev + index[i] * sizeof(T));
    now[i] = read_element<T>(cur + index[i] * sizeof(T));
  }
  std::uint64_t extras[kBlockElementsMax + kSpareElements];
  symbols_of(olds, now, picked, model, symbols, extras);
  const std::uint64_t* extra = extras;
  for (std::uint32_t i = 0; i < picked; ++i) {
    const std::uint32_t w = index[i] / 32;
    const std::uint32_t r = symbols[i] >> kTokenBits, e = r - model.dense + 1;
    const unsigned token = (symbols[i] & ((1u << kTokenBits) - 1)) - 1;
    GapSink& out = sink.gap[r];
    const std::uint32_t below = sorted.mask[e][w] & ((1u << index[i] % 32) - 1);
    const std::uint64_t rank = out.seen + sorted.before[e][w] + static_cast<std::uint32_t>(__builtin_popcount(below));
    out.gaps[out.count] = static_cast<std::uint32_t>(rank - out.next);
    out.next = rank + 1;
    out.tokens[out.count++] = static_cast<std::uint16_t>(token);
    if (token >= 16) out.extras[out.extra_count++] = *extra++;
  }
  for (std::uint32_t r = model.dense; r < model.ranges; ++r) sink.gap[r].seen += sorted.count[r - model.dense + 1];
}

// ---- symbols to bits ----

std::uint16_t* write_wide(const std::uint16_t* symbols, const std::uint32_t* lengths, std::size_t runs,
                          const RansCode* codes, std::uint32_t* states, std::uint16_t* end) {
  for (std::size_t r = 0; r < runs; ++r) symbols += lengths[r];
#if defined(__AVX512BW__)
  constexpr unsigned kVectors = kWideStates / 16;
  __m512i state[kVectors];
  for (unsigned v = 0; v < kVectors; ++v) state[v] = _mm512_loadu_si512(states + 16 * v);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512i field = _mm512_set1_epi32(0xfff);
  const auto put = [&](unsigned v, const std::uint16_t* from, __mmask16 active) {
    const __m512i symbol = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(active, from));
    const __m512i low = _mm512_i32gather_epi64(_mm512_castsi512_si256(symbol), codes, 8);
    const __m512i high = _mm512_i32gather_epi64(_mm512_extracti64x4_epi64(symbol, 1), codes, 8);
    const __m512i reciprocal = _mm512_permutex2var_epi32(low, even, high);
    const __m512i rest = _mm512_permutex2var_epi32(low, odd, high);
    const __m512i others = _mm512_and_si512(rest, field);
    __m512i x = state[v];
    const __mmask16 spill =
        _mm512_mask_test_epi32_mask(active, _mm512_add_epi32(x, _mm512_slli_epi32(others, 31 - kRansBits)),
                                    _mm512_set1_epi32(static_cast<int>(0x80000000u)));
    const auto spilled = static_cast<unsigned>(__builtin_popcount(spill));
    end -= spilled;
    _mm256_mask_storeu_epi16(end, static_cast<__mmask16>((1u << spilled) - 1),
                             _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(spill, x)));
    x = _mm512_mask_srli_epi32(x, spill, x, 16);
    const __m512i even_product = _mm512_mul_epu32(x, reciprocal);
    const __m512i odd_product = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(reciprocal, 32));
    const __m512i product = _mm512_mask_mov_epi32(_mm512_srli_epi64(even_product, 32), 0xaaaa, odd_product);
    const __m512i quotient = _mm512_srlv_epi32(product, _mm512_srli_epi32(rest, 24));
    const __m512i start = _mm512_and_si512(_mm512_srli_epi32(rest, 12), field);
    const __m512i moved = _mm512_add_epi32(_mm512_add_epi32(x, start), _mm512_mullo_epi32(quotient, others));
    state[v] = _mm512_mask_mov_epi32(x, active, moved);
  };
  for (std::size_t r = runs; r-- > 0;) {
    const std::uint16_t* const first = symbols -= lengths[r];
    std::uint32_t left = lengths[r] % kWideStates;
    std::uint32_t at = lengths[r] - left;
    for (unsigned v = kVectors; v-- > 0;)
      if (left > 16 * v) {
        put(v, first + at + 16 * v, static_cast<__mmask16>(left - 16 * v < 16 ? (1u << (left - 16 * v)) - 1 : 0xffff));
        left = 16 * v;
      }
    while (at > 0) {
      at -= kWideStates;
      for (unsigned v = kVectors; v-- > 0;) put(v, first + at + 16 * v, 0xffff);
    }
  }
  for (unsigned v = 0; v < kVectors; ++v) _mm512_storeu_si512(states + 16 * v, state[v]);
#else
  for (std::size_t r = runs; r-- > 0;) {
    symbols -= lengths[r];
    for (std::uint32_t i = lengths[r]; i-- > 0;) end -= rans_put(states[i % kWideStates], codes[symbols[i]], end - 1);
  }
#endif
  return end;
}

void find_open(const std::uint16_t* symbols, std::size_t count, const std::uint16_t* limits, std::uint32_t* open) {
  constexpr std::uint16_t kSymbolMask = (1u << kTokenBits) - 1;
#if defined(__AVX512BW__)
  const __m512i limit_of = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(limits)));
  for (std::size_t i = 0; i < count; i += 32) {
    const __m512i entry = _mm512_loadu_si512(symbols + i);
    const __m512i limit = _mm512_permutexvar_epi16(_mm512_srli_epi16(entry, kTokenBits), limit_of);
    open[i / 32] = _mm512_cmpge_epu16_mask(_mm512_and_si512(entry, _mm512_set1_epi16(kSymbolMask)), limit);
  }
#else
  for (std::size_t i = 0; i < count; i += 32) {
    std::uint32_t bits = 0;
    for (std::size_t k = 0; k < 32; ++k) {
      const std::uint16_t entry = symbols[i + k];
      bits |= static_cast<std::uint32_t>((entry & kSymbolMask) >= limits[entry >> kTokenBits & (kRangesMax - 1)]) << k;
    }
    open[i / 32] = bits;
  }
#endif
  if (count % 32 != 0) open[count / 32] &= (1u << count % 32) - 1;
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

// Reads a run of `count` symbols; on entry symbols[i] is the range of the i-th.
void read_wide(WideRansReader& reader, std::uint32_t count, const RansEntry* tables, std::uint16_t* symbols) {
  std::uint32_t done = 0;
#if defined(__AVX512BW__)
  constexpr unsigned kVectors = kWideStates / 16;
  __m512i state[kVectors];
  for (unsigned v = 0; v < kVectors; ++v) state[v] = _mm512_load_si512(reader.state + 16 * v);
  const __m512i slot_mask = _mm512_set1_epi32(kRansSlots - 1), floor = _mm512_set1_epi32(kRansFloor);
  const std::byte* words = reader.words + 2 * reader.at;
  const std::byte* const last = reader.words + 2 * reader.word_count;
  const auto read = [&](unsigned v, std::uint16_t* at, __mmask16 active) {
    const __m512i range = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(active, at));
    const __m512i slot = _mm512_and_si512(state[v], slot_mask);
    const __m512i entry = _mm512_i32gather_epi32(_mm512_or_si512(_mm512_slli_epi32(range, kRansBits), slot), tables, 4);
    const __m512i frequency =
        _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(entry, kRansBits), slot_mask), _mm512_set1_epi32(1));
    const __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(state[v], kRansBits)),
                                          _mm512_and_si512(entry, slot_mask));
    const __mmask16 refill = _mm512_mask_cmplt_epu32_mask(active, next, floor);
    const __m512i word = _mm512_maskz_expand_epi32(
        refill, _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words))));
    words += 2 * __builtin_popcount(refill);
    state[v] =
        _mm512_mask_mov_epi32(state[v], active, _mm512_mask_or_epi32(next, refill, _mm512_slli_epi32(next, 16), word));
    _mm256_mask_storeu_epi16(at, active, _mm512_cvtepi32_epi16(_mm512_srli_epi32(entry, 2 * kRansBits)));
  };
  const auto has_words = [&] { return last - words >= static_cast<std::ptrdiff_t>(2 * kWideStates); };
  for (; done + kWideStates <= count && has_words(); done += kWideStates)
    for (unsigned v = 0; v < kVectors; ++v) read(v, symbols + done + 16 * v, 0xffff);
  if (count - done < kWideStates && has_words()) {
    for (unsigned v = 0; done + 16 * v < count; ++v) {
      const std::uint32_t left = count - done - 16 * v;
      read(v, symbols + done + 16 * v, static_cast<__mmask16>(left < 16 ? (1u << left) - 1 : 0xffff));
    }
    done = count;
  }
  for (unsigned v = 0; v < kVectors; ++v) _mm512_store_si512(reader.state + 16 * v, state[v]);
  reader.at = static_cast<std::uint64_t>(words - reader.words) / 2;
#endif
  rans_read_wide(reader, done, count, tables, symbols);
}

// The symbols of the dense elements of a block.
template <class T>
void read_dense(const T* olds, std::uint32_t count, const BlockModel& model, BlockSource& source,
                std::uint16_t* symbols) {
  std::uint32_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    for (; i < count; i += 32) _mm512_storeu_si512(symbols + i, lanes.range_of(_mm512_loadu_si512(olds + i)));
  }
#endif
  for (; i < count; ++i) symbols[i] = model.range_of[class_of(olds[i], model)];
  const RansEntry* const tables = source.dense_tables;
  if (source.is_wide) return read_wide(source.wide, count, tables, symbols);
  RansReader rans = source.narrow;
  rans_read_run(
      rans, count, [&](std::uint64_t k) { return tables + symbols[k] * kRansSlots; }, symbols);
  source.narrow = rans;
}

// Takes a step whose symbol does not say all about it.
template <class T>
T open_step(T old, unsigned symbol, const BlockModel& model, BlockSource& source) {
  unsigned token = symbol - 1;
  if (symbol == kEscape) {
    token = static_cast<unsigned>(get_bits(source.bits, kTokenBits));
    if (token >= kStepTokensMax) {
      source.malformed = true;
      return old;
    }
  }
  const std::uint64_t extra = token < 16 ? 0 : get_extra(source.bits, token);
  return apply_step(old, token_step(token, extra), model.is_float);
}

#if defined(__AVX512VBMI2__)
// open_step() for sixteen 16-bit elements; false, and nothing done, where that takes the long way: an escape, a token
// of wider types, or the end of the bits.
bool open_steps(__m512i symbol, std::uint16_t* olds, const BlockModel& model, BlockSource& source) {
  const auto set = [](unsigned value) { return _mm512_set1_epi32(static_cast<int>(value)); };
  constexpr unsigned kLargest = 16 + 4 * (16 - 4) + 3;
  const __m512i zero = _mm512_setzero_si512(), token = _mm512_sub_epi32(symbol, set(1)),
                above = _mm512_sub_epi32(token, set(16));
  if (_mm512_cmpgt_epu32_mask(token, set(kLargest)) != 0) return false;
  const __m512i length = _mm512_add_epi32(_mm512_srli_epi32(above, 2), set(2));
  __m512i end = _mm512_add_epi32(length, _mm512_alignr_epi32(length, zero, 15));  // sums up to each
  end = _mm512_add_epi32(end, _mm512_alignr_epi32(end, zero, 14));
  end = _mm512_add_epi32(end, _mm512_alignr_epi32(end, zero, 12));
  end = _mm512_add_epi32(end, _mm512_alignr_epi32(end, zero, 8));
  const auto total = static_cast<std::uint32_t>(_mm_extract_epi32(_mm512_extracti32x4_epi32(end, 3), 3));
  const std::uint64_t first_byte = source.bits.at >> 3;
  if (first_byte + total / 8 + 8 > source.bits.byte_count) return false;
  const __m512i at = _mm512_add_epi32(_mm512_sub_epi32(end, length), set(static_cast<unsigned>(source.bits.at & 7)));
  const __m512i window = _mm512_i32gather_epi32(_mm512_srli_epi32(at, 3), source.bits.bytes + first_byte, 1);
  const __m512i extra =
      _mm512_andnot_si512(_mm512_sllv_epi32(set(~0u), length), _mm512_srlv_epi32(window, _mm512_and_si512(at, set(7))));
  const __m512i head = _mm512_or_si512(set(2), _mm512_and_si512(_mm512_srli_epi32(above, 1), set(1)));
  const __m512i magnitude = _mm512_or_si512(_mm512_sllv_epi32(head, length), extra);
  const __m512i old = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(olds)));
  const unsigned top = model.is_float ? 0x8000 : 0;
  const __mmask16 negative = _mm512_test_epi32_mask(old, set(top));
  const __mmask16 down = static_cast<__mmask16>(_mm512_test_epi32_mask(token, set(1)) ^ negative);
  const __m512i ordered = _mm512_mask_xor_epi32(_mm512_or_si512(old, set(top)), negative, old, set(0xffff));
  const __m512i moved = _mm512_mask_sub_epi32(_mm512_add_epi32(ordered, magnitude), down, ordered, magnitude);
  const __mmask16 below_zero = model.is_float ? _mm512_testn_epi32_mask(moved, set(0x8000)) : 0;
  const __m512i now = _mm512_mask_xor_epi32(_mm512_andnot_si512(set(top), moved), below_zero, moved, set(0xffff));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(olds), _mm512_cvtepi32_epi16(now));
  source.bits.at += total;
  return true;
}
#endif

// Takes all steps, in `values`.
template <class T>
void take_steps(T* values, std::uint32_t count, const std::uint16_t* symbols, const BlockModel& model,
                BlockSource& source) {
  std::uint32_t i = 0;
#if defined(__AVX512VBMI2__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    const __m512i one = _mm512_set1_epi16(1);
    Packed<std::uint16_t> open, olds;  // those whose symbols do not say all
    std::uint32_t open_count = 0, changed = 0;
    __m512i lane = iota16();
    for (; i < count; i += 32) {
      const __mmask32 active = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
      const __m512i symbol = _mm512_maskz_loadu_epi16(active, symbols + i);
      changed += static_cast<std::uint32_t>(__builtin_popcount(_mm512_test_epi16_mask(symbol, symbol)));
      const __m512i old = _mm512_loadu_si512(values + i);
      // Odd symbols step away from zero, even ones towards it; ordered integers fall away from zero below it.
      const __m512i magnitude = _mm512_srli_epi16(_mm512_add_epi16(symbol, one), 1);
      const __mmask32 down = ~_mm512_test_epi16_mask(symbol, one) ^ _mm512_test_epi16_mask(old, lanes.top);
      const __m512i ordered = lanes.to_ordered(old);
      const __m512i now =
          lanes.from_ordered(_mm512_mask_sub_epi16(_mm512_add_epi16(ordered, magnitude), down, ordered, magnitude));
      const __mmask32 is_open = _mm512_cmpgt_epu16_mask(symbol, _mm512_set1_epi16(16));
      _mm512_storeu_si512(values + i, now);
      if (is_open != 0) {
        _mm512_storeu_si512(open + open_count, _mm512_maskz_compress_epi16(is_open, lane));
        _mm512_storeu_si512(olds + open_count, _mm512_maskz_compress_epi16(is_open, old));
        open_count += static_cast<std::uint32_t>(__builtin_popcount(is_open));
      }
      lane = _mm512_add_epi16(lane, _mm512_set1_epi16(32));
    }
    source.changed += changed;
    for (i = 0; i < open_count; i += 16) {
      const std::uint32_t part = open_count - i < 16 ? open_count - i : 16;
      alignas(64) std::uint32_t own[16];
      for (std::uint32_t k = 0; k < part; ++k) own[k] = symbols[open[i + k]];
      if (part < 16 || !open_steps(_mm512_load_si512(own), olds + i, model, source))
        for (std::uint32_t k = 0; k < part; ++k) olds[i + k] = open_step(olds[i + k], own[k], model, source);
      for (std::uint32_t k = 0; k < part; ++k) values[open[i + k]] = olds[i + k];
    }
    return;
  }
#endif
  for (; i < count; ++i) {
    const unsigned symbol = symbols[i];
    if (symbol > 16) {
      values[i] = open_step(values[i], symbol, model, source);
    } else if (symbol != 0) {
      values[i] = apply_step(values[i], token_step(symbol - 1, 0), model.is_float);
    }
    source.changed += symbol != 0;
  }
}

template <class T>
void resolve(const std::byte* old, std::uint32_t count, const BlockModel& model, SortedBlock& sorted,
             BlockSource& source, std::byte* now) {
  // The memory of a later block is asked for bit by bit between the steps: all at once would wait for it.
  const std::uint32_t step_bytes = count * sizeof(T) / (model.ranges - model.dense + 1);
  const std::byte* ahead = old + kPrefetchBytes;
  const std::byte* ahead_now = now + kPrefetchBytes;
  const auto prefetch_some = [&] {
    for (const std::byte* end = ahead + step_bytes; ahead < end; ahead += 64, ahead_now += 64) {
      __builtin_prefetch(ahead);
      if (source.is_whole) __builtin_prefetch(ahead_now, 1);
    }
  };
  std::memcpy(now, old, count * sizeof(T));
  sort<T>(old, count, model, sorted);
  prefetch_some();
  const std::uint32_t words = (count + 31) / 32;
  const bool is_float = model.is_float;
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
      const T value = apply_step(read_element<T>(old + index * sizeof(T)), from.steps[at], is_float);
      std::memcpy(now + index * sizeof(T), &value, sizeof(T));
    }
    source.changed += at - from.at;
    from.at = at;
  }
  if (model.dense == 0) return;
  Packed<T> values;
  Packed<std::uint16_t> symbols;
  const std::uint32_t packed = sorted.count[0];
  pack(old, sorted.mask[0], words, packed, values);
  read_dense(values, packed, model, source, symbols);
  take_steps(values, packed, symbols, model, source);
  unpack(values, sorted.mask[0], words, packed, now);
}

template <class T>
void extract(const std::byte* now, const std::uint32_t* changed, std::uint32_t count, std::uint32_t elements,
             std::uint32_t first, std::uint32_t* positions, std::byte* values) {
  std::uint32_t out = 0;
  for_each_word(changed, (count + 31) / 32, elements, [&](std::uint32_t w) {
    std::uint32_t bits = changed[w];
    const std::byte* at = now + w * 32 * sizeof(T);
    const std::uint32_t position = first + w * 32;
#if defined(__AVX512VBMI2__)
    if constexpr (sizeof(T) == 2) {
      const __m512i low = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                           _mm512_set1_epi32(static_cast<int>(position)));
      const auto low_bits = static_cast<__mmask16>(bits), high_bits = static_cast<__mmask16>(bits >> 16);
      const auto low_count = static_cast<std::uint32_t>(__builtin_popcount(low_bits));
      _mm512_storeu_si512(positions + out, _mm512_maskz_compress_epi32(low_bits, low));
      _mm512_storeu_si512(positions + out + low_count,
                          _mm512_maskz_compress_epi32(high_bits, _mm512_add_epi32(low, _mm512_set1_epi32(16))));
      _mm512_storeu_si512(values + out * sizeof(T),
                          _mm512_maskz_compress_epi16(bits, _mm512_maskz_loadu_epi16(bits, at)));
      out += static_cast<std::uint32_t>(__builtin_popcount(bits));
      return;
    }
#endif
    for (; bits != 0; bits &= bits - 1, ++out) {
      const auto i = static_cast<std::uint32_t>(__builtin_ctz(bits));
      positions[out] = position + i;
      std::memcpy(values + out * sizeof(T), at + i * sizeof(T), sizeof(T));
    }
  });
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

  // Nearly all weights lie within a few exponents below the greatest: those are counted one after the other, a stripe
  // at a time; 8192 / 64 stripes do not overflow a byte. The others one by one.
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

#define ECHOLINE_KERNEL_SET(label)                                                                       \
  {                                                                                                      \
    label, {diff<std::uint8_t>, diff<std::uint16_t>, diff<std::uint32_t>, diff<std::uint64_t>},          \
        {sort<std::uint8_t>, sort<std::uint16_t>, sort<std::uint32_t>, sort<std::uint64_t>},             \
        {collect<std::uint8_t>, collect<std::uint16_t>, collect<std::uint32_t>, collect<std::uint64_t>}, \
        {resolve<std::uint8_t>, resolve<std::uint16_t>, resolve<std::uint32_t>, resolve<std::uint64_t>}, \
        {extract<std::uint8_t>, extract<std::uint16_t>, extract<std::uint32_t>, extract<std::uint64_t>}, \
        {count_exponents<std::uint8_t>, count_exponents<std::uint16_t>, count_exponents<std::uint32_t>,  \
         count_exponents<std::uint64_t>},                                                                \
        write_wide, find_open, hash_bytes                                                                \
  }
