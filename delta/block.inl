// The kernels of block.hpp for one instruction set. Included by kernels_portable.cpp, kernels_avx2.cpp and
// kernels_avx512.cpp, each compiled for its own processors. Everything here has internal linkage and no standard
// library template is instantiated, so that no function compiled for one processor is called on another.
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
T read_element(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The position of the `rank`-th set bit, which must exist.
unsigned select_bit(std::uint32_t bits, std::uint32_t rank) {
#if defined(__BMI2__)
  // Moves a single bit to the place of the `rank`-th set bit.
  return static_cast<unsigned>(__builtin_ctz(_pdep_u32(1u << rank, bits)));
#else
  for (; rank > 0; --rank) bits &= bits - 1;
  return static_cast<unsigned>(__builtin_ctz(bits));
#endif
}

// The class of an element with this old value: its exponent above the model's base, at most kClasses - 1.
template <class T>
unsigned class_of(T old, const BlockModel& model) {
  const auto exponent = static_cast<std::uint32_t>(old >> model.exponent_shift) & model.exponent_mask;
  const std::uint32_t above_base = exponent > model.base ? exponent - model.base : 0;
  return above_base < kClasses ? above_base : kClasses - 1;
}

// ---- which elements changed ----

// Kernels::diff for the elements [from, count), without vector instructions.
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
    const std::byte* old_part = prev + i * sizeof(T);
    const std::byte* new_part = cur + i * sizeof(T);
    std::uint32_t bits = 0;
    if constexpr (sizeof(T) == 1) {
      bits = _mm256_cmpneq_epi8_mask(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(old_part)),
                                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(new_part)));
    } else if constexpr (sizeof(T) == 2) {
      bits = _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(old_part), _mm512_loadu_si512(new_part));
    } else if constexpr (sizeof(T) == 4) {
      for (unsigned k = 0; k < 2; ++k)
        bits |= static_cast<std::uint32_t>(_mm512_cmpneq_epi32_mask(_mm512_loadu_si512(old_part + 64 * k),
                                                                    _mm512_loadu_si512(new_part + 64 * k)))
                << (16 * k);
    } else {
      for (unsigned k = 0; k < 4; ++k)
        bits |= static_cast<std::uint32_t>(_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(old_part + 64 * k),
                                                                    _mm512_loadu_si512(new_part + 64 * k)))
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
        const auto old_part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(prev + i * sizeof(T)) + k);
        const auto new_part = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(cur + i * sizeof(T)) + k);
        equal[k] = sizeof(T) == 1 ? _mm256_cmpeq_epi8(old_part, new_part)
                   : sizeof(T) == 2 ? _mm256_cmpeq_epi16(old_part, new_part)
                                    : _mm256_cmpeq_epi32(old_part, new_part);
      }
      std::uint32_t same = 0;
      if constexpr (sizeof(T) == 1) {
        same = static_cast<std::uint32_t>(_mm256_movemask_epi8(equal[0]));
      } else if constexpr (sizeof(T) == 2) {
        // Packing interleaves the two vectors' halves; 0xd8 swaps the middle quarters and so puts them back in order.
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

// The entries of a SortedBlock are adjacent classes. An entry ends before class class_end[entry].
struct EntryBounds {
  std::uint32_t last_entry = 0;
  std::uint8_t class_end[kRangesMax + 1] = {};
  explicit EntryBounds(const BlockModel& model) : last_entry(model.range_count - model.dense_range_count) {
    class_end[0] = model.dense_range_count > 0 ? model.range_end[model.dense_range_count - 1] : 0;
    for (std::uint32_t entry = 1; entry <= last_entry; ++entry)
      class_end[entry] = model.range_end[model.dense_range_count + entry - 1];
  }
};

// Sets mask[entry][word] to the elements in entries 0 to `entry`, for all entries but the last, word by word. These
// nested masks need one comparison per entry; separate_entry() then removes each mask from the next one. Returns the
// number of words done, none without vector instructions; nest_tail() does the others.
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
  std::uint32_t word = 0;
  for (; word + 4 <= words; word += 4) {
    __m512i above[4];  // exponents above the base, which are the classes before clamping
    for (std::uint32_t k = 0; k < 4; ++k)
      above[k] = _mm512_subs_epu16(
          _mm512_and_si512(_mm512_srl_epi16(_mm512_loadu_si512(old + 64 * (word + k)), shift), exponent_mask), base);
    for (std::uint32_t entry = 0; entry < bounds.last_entry; ++entry) {
      const __m512i bound = _mm512_set1_epi16(bounds.class_end[entry]);
      for (std::uint32_t k = 0; k < 4; ++k) sorted.mask[entry][word + k] = _mm512_cmplt_epu16_mask(above[k], bound);
    }
  }
  return word;
}
#elif defined(__AVX2__)
template <>
std::uint32_t nest_words<std::uint16_t>(const std::byte* old, std::uint32_t count, const BlockModel& model,
                                        const EntryBounds& bounds, SortedBlock& sorted) {
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(model.exponent_shift));
  const __m256i exponent_mask = _mm256_set1_epi16(static_cast<short>(model.exponent_mask));
  const __m256i base = _mm256_set1_epi16(static_cast<short>(model.base));
  const std::uint32_t words = count / 32;
  for (std::uint32_t word = 0; word < words; ++word) {
    __m256i above[2];  // exponents above the base, which are the classes before clamping
    for (unsigned k = 0; k < 2; ++k) {
      const auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(old + 64 * word) + k);
      above[k] = _mm256_subs_epu16(_mm256_and_si256(_mm256_srl_epi16(bits, shift), exponent_mask), base);
    }
    for (std::uint32_t entry = 0; entry < bounds.last_entry; ++entry) {
      // Exponents fit in 15 bits, so signed comparison is correct. 0xd8: as in diff(), restores the order.
      const __m256i bound = _mm256_set1_epi16(bounds.class_end[entry]);
      const __m256i packed = _mm256_permute4x64_epi64(
          _mm256_packs_epi16(_mm256_cmpgt_epi16(bound, above[0]), _mm256_cmpgt_epi16(bound, above[1])), 0xd8);
      sorted.mask[entry][word] = static_cast<std::uint32_t>(_mm256_movemask_epi8(packed));
    }
  }
  return words;
}
#endif

// nest_words() for the elements from `from` on, without vector instructions.
template <class T>
void nest_tail(const std::byte* old, std::uint32_t from, std::uint32_t count, const BlockModel& model,
               const EntryBounds& bounds, SortedBlock& sorted) {
  for (std::uint32_t i = from; i < count; i += 32) {
    std::uint32_t nested[kRangesMax] = {};
    const std::uint32_t end = count - i < 32 ? count - i : 32;
    for (std::uint32_t k = 0; k < end; ++k) {
      const unsigned class_index = class_of(read_element<T>(old + (i + k) * sizeof(T)), model);
      for (std::uint32_t entry = 0; entry < bounds.last_entry; ++entry)
        nested[entry] |= static_cast<std::uint32_t>(class_index < bounds.class_end[entry]) << k;
    }
    for (std::uint32_t entry = 0; entry < bounds.last_entry; ++entry) sorted.mask[entry][i / 32] = nested[entry];
  }
}

// Replaces each mask[word] by mask[word] & ~inner[word], and stores in `before` the number of bits before each word.
// `inner`: the nested masks of the entry before. Returns the number of bits.
std::uint32_t separate_entry(std::uint32_t* mask, const std::uint32_t* inner, std::uint32_t words,
                             std::uint16_t* before) {
  std::uint32_t word = 0;
  std::uint32_t total = 0;
#if defined(__AVX512VPOPCNTDQ__)
  const __m512i zero = _mm512_setzero_si512();
  __m512i carry = zero;
  for (; word + 16 <= words; word += 16) {
    const __m512i bits = _mm512_andnot_si512(_mm512_loadu_si512(inner + word), _mm512_loadu_si512(mask + word));
    _mm512_storeu_si512(mask + word, bits);
    const __m512i bit_counts = _mm512_popcnt_epi32(bits);
    // Prefix sums: adds the sums of 1, 2, 4 and 8 words before.
    __m512i sum = _mm512_add_epi32(bit_counts, _mm512_alignr_epi32(bit_counts, zero, 15));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 14));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 12));
    sum = _mm512_add_epi32(sum, _mm512_alignr_epi32(sum, zero, 8));
    sum = _mm512_add_epi32(sum, carry);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(before + word),
                        _mm512_cvtepi32_epi16(_mm512_sub_epi32(sum, bit_counts)));
    carry = _mm512_permutexvar_epi32(_mm512_set1_epi32(15), sum);
  }
  total = static_cast<std::uint32_t>(_mm512_cvtsi512_si32(carry));
#endif
  for (; word < words; ++word) {
    mask[word] &= ~inner[word];
    before[word] = static_cast<std::uint16_t>(total);
    total += static_cast<std::uint32_t>(__builtin_popcount(mask[word]));
  }
  for (; word % 32 != 0; ++word) before[word] = 0xffff;  // word_of() compares 32 words at a time
  return total;
}

// Kernels::sort. Entries are nested first and then separated from the last to the first.
template <class T>
void sort(const std::byte* old, std::uint32_t count, const BlockModel& model, SortedBlock& sorted) {
  const std::uint32_t words = (count + 31) / 32;
  const EntryBounds bounds(model);
  if (bounds.last_entry == 0) {  // the mask of an entry with all elements is never read
    sorted.count[0] = count;
    return;
  }
  nest_tail<T>(old, 32 * nest_words<T>(old, count, model, bounds, sorted), count, model, bounds, sorted);
  for (std::uint32_t word = 0; word < words; ++word) sorted.mask[bounds.last_entry][word] = ~0u;
  if (count % 32 != 0) sorted.mask[bounds.last_entry][words - 1] = (1u << count % 32) - 1;
  static constexpr std::uint32_t kNoElements[kBlockWordsMax] = {};
  for (std::uint32_t entry = bounds.last_entry + 1; entry-- > 0;)
    sorted.count[entry] = separate_entry(sorted.mask[entry], entry > 0 ? sorted.mask[entry - 1] : kNoElements, words,
                                         sorted.before[entry]);
}

#if defined(__AVX512BW__)
// 0, 1, ..., 31.
__m512i iota16() {
  return _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10, 9, 8,
                          7, 6, 5, 4, 3, 2, 1, 0);
}
#endif

// Writes the indices of the elements in `mask` but not in `without` (which may be null). Returns their number. There is
// room for kSpareElements more.
std::uint32_t list_indices(const std::uint32_t* mask, const std::uint32_t* without, std::uint32_t words,
                           std::uint16_t* index) {
  std::uint32_t count = 0;
  std::uint32_t word = 0;
#if defined(__AVX512VBMI2__)
  __m512i word_indices = iota16();  // of the 32 elements of `word`
  const __m512i word_elements = _mm512_set1_epi16(32);
  for (; word < words; ++word) {
    const std::uint32_t bits = without ? mask[word] & ~without[word] : mask[word];
    _mm512_storeu_si512(index + count, _mm512_maskz_compress_epi16(bits, word_indices));
    count += static_cast<std::uint32_t>(__builtin_popcount(bits));
    word_indices = _mm512_add_epi16(word_indices, word_elements);
  }
#else
  for (; word < words; ++word)
    for (std::uint32_t bits = without ? mask[word] & ~without[word] : mask[word]; bits != 0; bits &= bits - 1)
      index[count++] = static_cast<std::uint16_t>(word * 32 + static_cast<std::uint32_t>(__builtin_ctz(bits)));
#endif
  return count;
}

// Calls f(word) for the words of a mask with `elements` elements. If most words are not zero, it calls f for all,
// because the test would often be mispredicted. Always inlined, so that f's counters stay in registers.
template <class F>
[[gnu::always_inline]] inline void for_each_word(const std::uint32_t* mask, std::uint32_t words,
                                                 [[maybe_unused]] std::uint32_t elements, F&& f) {
  std::uint32_t word = 0;
#if defined(__AVX512F__)
  for (; elements >= words && word < words; ++word) f(word);
  for (; word + 16 <= words; word += 16) {
    const __m512i part = _mm512_loadu_si512(mask + word);
    for (unsigned bits = _mm512_test_epi32_mask(part, part); bits != 0; bits &= bits - 1)
      f(word + static_cast<std::uint32_t>(__builtin_ctz(bits)));
  }
#endif
  for (; word < words; ++word)
    if (mask[word] != 0) f(word);
}

// Some elements of a block, one after the other.
template <class T>
using Packed = T[kBlockElementsMax + kSpareElements];

// Packs the `elements` elements in `mask`.
template <class T>
void pack(const std::byte* block, const std::uint32_t* mask, std::uint32_t words, std::uint32_t elements,
          std::byte* packed) {
  std::size_t count = 0;
  for_each_word(mask, words, elements, [&](std::uint32_t word) {
    std::uint32_t bits = mask[word];
    const std::byte* elements_of_word = block + word * 32 * sizeof(T);
#if defined(__AVX512VBMI2__)
    if constexpr (sizeof(T) == 2) {
      const __m512i loaded = _mm512_maskz_loadu_epi16(bits, elements_of_word);
      _mm512_storeu_si512(packed + 2 * count, _mm512_maskz_compress_epi16(bits, loaded));
      count += static_cast<std::uint32_t>(__builtin_popcount(bits));
      return;
    }
#endif
    for (; bits != 0; bits &= bits - 1) {
      const auto index = static_cast<std::size_t>(__builtin_ctz(bits));
      std::memcpy(packed + sizeof(T) * count++, elements_of_word + index * sizeof(T), sizeof(T));
    }
  });
}

// The inverse of pack(): moves elements to their places in `mask`.
template <class T>
void unpack(const T* packed, const std::uint32_t* mask, std::uint32_t words, std::uint32_t elements, std::byte* block) {
  for_each_word(mask, words, elements, [&](std::uint32_t word) {
    std::uint32_t bits = mask[word];
    std::byte* elements_of_word = block + word * 32 * sizeof(T);
#if defined(__AVX512VBMI2__)
    if constexpr (sizeof(T) == 2) {
      _mm512_mask_storeu_epi16(elements_of_word, bits, _mm512_maskz_expand_epi16(bits, _mm512_loadu_si512(packed)));
      packed += __builtin_popcount(bits);
      return;
    }
#endif
    for (; bits != 0; bits &= bits - 1, ++packed)
      std::memcpy(elements_of_word + static_cast<std::size_t>(__builtin_ctz(bits)) * sizeof(T), packed, sizeof(T));
  });
}

#if defined(__AVX512BW__)
// The 16-bit arithmetic of token.hpp and class_of() on 32 elements.
struct Lanes16 {
  __m128i shift;
  __m512i exponent_mask, base;
  __m512i sign_bit;  // 0 for integers
  __m512i ranges;    // by class
  bool is_float;
  explicit Lanes16(const BlockModel& model)
      : shift(_mm_cvtsi32_si128(static_cast<int>(model.exponent_shift))),
        exponent_mask(_mm512_set1_epi16(static_cast<short>(model.exponent_mask))),
        base(_mm512_set1_epi16(static_cast<short>(model.base))),
        sign_bit(_mm512_set1_epi16(model.is_float ? -0x8000 : 0)),
        is_float(model.is_float) {
    alignas(64) std::uint16_t range_of[kClasses];
    for (unsigned class_index = 0; class_index < kClasses; ++class_index)
      range_of[class_index] = model.range_of[class_index];
    ranges = _mm512_load_si512(range_of);
  }
  __m512i class_of(__m512i old) const {
    const __m512i above = _mm512_subs_epu16(_mm512_and_si512(_mm512_srl_epi16(old, shift), exponent_mask), base);
    return _mm512_min_epu16(above, _mm512_set1_epi16(kClasses - 1));
  }
  __m512i range_of(__m512i old) const { return _mm512_permutexvar_epi16(class_of(old), ranges); }
  // Flips all bits of a negative float, and only the sign bit of another one. from_ordered() is the inverse.
  __m512i to_ordered(__m512i bits) const {
    return is_float ? _mm512_xor_si512(bits, _mm512_or_si512(_mm512_srai_epi16(bits, 15), sign_bit)) : bits;
  }
  __m512i from_ordered(__m512i ordered) const {
    return is_float
               ? _mm512_xor_si512(
                     ordered,
                     _mm512_or_si512(_mm512_xor_si512(_mm512_srai_epi16(ordered, 15), _mm512_set1_epi16(-1)), sign_bit))
               : ordered;
  }
};
#endif

// A table of kRangesMax * kSmallSymbols bytes for lookups by 64 lanes. kHalf: the ranges are so few that only the first
// half is used.
#if defined(__AVX512VBMI2__)
template <bool kHalf>
struct ByteTable {
  __m512i part[4];
  explicit ByteTable(const std::uint8_t* table) {
    for (unsigned k = 0; k < (kHalf ? 2 : 4); ++k) part[k] = _mm512_load_si512(table + 64 * k);
  }
  // `high`: the lanes whose index is 128 or more.
  __m512i at(__m512i index, [[maybe_unused]] __mmask64 high) const {
    const __m512i low_half = _mm512_permutex2var_epi8(part[0], index, part[1]);
    if constexpr (kHalf) return low_half;
    return _mm512_mask_mov_epi8(low_half, high, _mm512_permutex2var_epi8(part[2], index, part[3]));
  }
};

// Whether the symbols of so many ranges fit in half a ByteTable.
bool fit_half_table(std::uint32_t range_count) { return 2 * range_count <= kRangesMax; }

// Rearranges groups of eight bytes, because unpacking the low and high halves then gives elements 0 to 31 and 32 to 63.
__m512i order_for_unpacking(__m512i bytes) {
  return _mm512_permutexvar_epi64(_mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), bytes);
}

// The first `count` of 64 lanes.
__mmask64 first_lanes(std::uint32_t count) { return count < 64 ? (std::uint64_t{1} << count) - 1 : ~std::uint64_t{0}; }
#endif

}  // namespace
}  // namespace echoline::delta

#include "delta/block_decode.inl"
#include "delta/block_encode.inl"

namespace echoline::delta {
namespace {

// Kernels::extract.
template <class T>
void extract(const std::byte* now, const std::uint32_t* changed, std::uint32_t count, std::uint32_t changed_count,
             std::uint32_t first, std::uint32_t* positions, std::byte* values) {
  std::uint32_t written = 0;  // elements
  for_each_word(changed, (count + 31) / 32, changed_count, [&](std::uint32_t word) {
    std::uint32_t bits = changed[word];
    const std::byte* elements_of_word = now + word * 32 * sizeof(T);
    const std::uint32_t position = first + word * 32;
#if defined(__AVX512VBMI2__)
    if constexpr (sizeof(T) == 2) {
      const __m512i low = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                           _mm512_set1_epi32(static_cast<int>(position)));
      const auto low_bits = static_cast<__mmask16>(bits), high_bits = static_cast<__mmask16>(bits >> 16);
      const auto low_count = static_cast<std::uint32_t>(__builtin_popcount(low_bits));
      _mm512_storeu_si512(positions + written, _mm512_maskz_compress_epi32(low_bits, low));
      _mm512_storeu_si512(positions + written + low_count,
                          _mm512_maskz_compress_epi32(high_bits, _mm512_add_epi32(low, _mm512_set1_epi32(16))));
      _mm512_storeu_si512(values + written * sizeof(T),
                          _mm512_maskz_compress_epi16(bits, _mm512_maskz_loadu_epi16(bits, elements_of_word)));
      written += static_cast<std::uint32_t>(__builtin_popcount(bits));
      return;
    }
#endif
    for (; bits != 0; bits &= bits - 1, ++written) {
      const auto i = static_cast<std::uint32_t>(__builtin_ctz(bits));
      positions[written] = position + i;
      std::memcpy(values + written * sizeof(T), elements_of_word + i * sizeof(T), sizeof(T));
    }
  });
}

void hash_bytes(const std::byte* bytes, std::size_t count, std::uint64_t* low, std::uint64_t* high) {
  const XXH128_hash_t hash = XXH3_128bits(bytes, count);
  *low = hash.low64;
  *high = hash.high64;
}

// ---- count elements by exponent ----

// Kernels::count_exponents.
template <class T>
void count_exponents(const std::byte* old, std::uint32_t count, std::uint32_t shift, std::uint32_t mask,
                     std::uint64_t* counts) {
  if (mask > 0xff) {  // an exponent of this type does not fit in a byte
    for (std::uint32_t i = 0; i < count; ++i)
      ++counts[static_cast<std::uint32_t>(read_element<T>(old + i * sizeof(T)) >> shift) & mask];
    return;
  }
  // Stores exponents as bytes, in whole stripes of several vectors. The padding gets the first element's exponent and
  // is subtracted again.
#if defined(__AVX512BW__)
  constexpr std::uint32_t kVectorBytes = 64;
#elif defined(__AVX2__)
  constexpr std::uint32_t kVectorBytes = 32;
#else
  constexpr std::uint32_t kVectorBytes = 16;
#endif
  constexpr std::uint32_t kStripeBytes = 64, kVectors = kStripeBytes / kVectorBytes, kWindowExponents = 12;
  using Vector [[gnu::vector_size(kVectorBytes)]] = std::uint8_t;
  alignas(64) std::uint8_t exponents[kBlockElementsMax];
  if (count == 0) return;
  const std::uint32_t stripes = (count + kStripeBytes - 1) / kStripeBytes;
  std::uint32_t elements_done = 0;
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 2)
    for (; elements_done + 32 <= count; elements_done += 32) {
      const auto exponents_at = [&](std::uint32_t first) {
        const auto bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(old + first * sizeof(T)));
        return _mm256_and_si256(_mm256_srl_epi16(bits, _mm_cvtsi32_si128(static_cast<int>(shift))),
                                _mm256_set1_epi16(static_cast<short>(mask)));
      };
      // 0xd8: as in diff(), restores the order.
      const auto packed = _mm256_permute4x64_epi64(
          _mm256_packus_epi16(exponents_at(elements_done), exponents_at(elements_done + 16)), 0xd8);
      _mm256_store_si256(reinterpret_cast<__m256i*>(exponents + elements_done), packed);
    }
#endif
  for (; elements_done < count; ++elements_done)
    exponents[elements_done] =
        static_cast<std::uint8_t>((read_element<T>(old + elements_done * sizeof(T)) >> shift) & mask);
  for (std::uint32_t i = count; i < stripes * kStripeBytes; ++i) exponents[i] = exponents[0];
  counts[exponents[0]] -= stripes * kStripeBytes - count;

  // Nearly all weights have exponents within a small window below the greatest. Counts these one exponent at a time
  // over all stripes (8192 / 64 stripes do not overflow a byte), and the others individually.
  std::uint8_t greatest = 0;
  for (std::uint32_t i = 0; i < stripes * kStripeBytes; ++i)
    greatest = exponents[i] > greatest ? exponents[i] : greatest;
  const auto least = static_cast<std::uint8_t>(greatest >= kWindowExponents ? greatest - kWindowExponents + 1 : 0);
  for (std::uint32_t exponent = least; exponent <= greatest; ++exponent) {
    Vector sums[kVectors] = {};
    for (std::uint32_t stripe = 0; stripe < stripes; ++stripe)
      for (std::uint32_t k = 0; k < kVectors; ++k) {
        Vector part;
        std::memcpy(&part, exponents + stripe * kStripeBytes + k * kVectorBytes, kVectorBytes);
        sums[k] -= (Vector)(part == static_cast<std::uint8_t>(exponent));  // true is -1
      }
    // Adds all bytes: first as four sums of 16 bits, which the multiplication adds up in its highest 16 bits.
    std::uint64_t words[kStripeBytes / 8], sums16 = 0;
    std::memcpy(words, sums, kStripeBytes);
    for (const std::uint64_t word : words) sums16 += (word & 0x00ff00ff00ff00ffu) + (word >> 8 & 0x00ff00ff00ff00ffu);
    counts[exponent] += (sums16 * 0x0001000100010001u) >> 48;
  }
  // Counts the exponents below the window.
  if (least == 0) return;
  for (std::uint32_t first = 0; first < stripes * kStripeBytes; first += kVectorBytes) {
    Vector part;
    std::memcpy(&part, exponents + first, kVectorBytes);
    const Vector below = (Vector)(part < least);
    std::uint64_t words[kVectorBytes / 8], any = 0;
    std::memcpy(words, &below, kVectorBytes);
    for (const std::uint64_t word : words) any |= word;
    for (std::uint32_t i = first; any != 0 && i < first + kVectorBytes; ++i)
      if (exponents[i] < least) ++counts[exponents[i]];
  }
}

}  // namespace
}  // namespace echoline::delta

#define ECHOLINE_KERNEL_SET(label)                                                                                   \
  {                                                                                                                  \
    label, {diff<std::uint8_t>, diff<std::uint16_t>, diff<std::uint32_t>, diff<std::uint64_t>},                      \
        {sort<std::uint8_t>, sort<std::uint16_t>, sort<std::uint32_t>, sort<std::uint64_t>},                         \
        {collect<std::uint8_t>, collect<std::uint16_t>, collect<std::uint32_t>, collect<std::uint64_t>},             \
        {pack_dense<std::uint8_t>, pack_dense<std::uint16_t>, pack_dense<std::uint32_t>, pack_dense<std::uint64_t>}, \
        {put_dense<std::uint8_t>, put_dense<std::uint16_t>, put_dense<std::uint32_t>, put_dense<std::uint64_t>},     \
        {resolve<std::uint8_t>, resolve<std::uint16_t>, resolve<std::uint32_t>, resolve<std::uint64_t>},             \
        {extract<std::uint8_t>, extract<std::uint16_t>, extract<std::uint32_t>, extract<std::uint64_t>},             \
        {count_exponents<std::uint8_t>, count_exponents<std::uint16_t>, count_exponents<std::uint32_t>,              \
         count_exponents<std::uint64_t>},                                                                            \
        {count_steps<std::uint8_t>, count_steps<std::uint16_t>, count_steps<std::uint32_t>,                          \
         count_steps<std::uint64_t>},                                                                                \
        write_small, hash_bytes                                                                                      \
  }
