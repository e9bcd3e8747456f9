// The encoding part of block.inl, which includes it.
namespace echoline::delta {
namespace {

// ---- changes to tokens ----

// Sets range << kTokenBits | symbol for each element. The symbol is 0 for an unchanged element, otherwise the step
// token plus one. Also stores the magnitudes of tokens that need further bits, with room for kSpareElements more, and
// returns their number.
template <class T>
std::uint32_t symbols_of(const T* old_elements, const T* now, std::uint32_t count, const BlockModel& model,
                         std::uint16_t* symbols, std::uint64_t* extras) {
  std::uint32_t extra_count = 0;
  std::uint32_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    const __m512i one = _mm512_set1_epi16(1), exact_max = _mm512_set1_epi16(kExactMagnitudeMax);
    for (; i < count; i += 32) {
      const __mmask32 active = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
      const __m512i old = _mm512_loadu_si512(old_elements + i);
      const __m512i range = _mm512_slli_epi16(lanes.range_of(old), kTokenBits);
      const __m512i step = _mm512_sub_epi16(lanes.to_ordered(_mm512_loadu_si512(now + i)), lanes.to_ordered(old));
      const __m512i magnitude = _mm512_abs_epi16(step);
      // The symbol of a magnitude m up to 8: 2 (m - 1) + towards_zero + 1. That of larger ones is set below.
      const __m512i towards_zero = _mm512_srli_epi16(_mm512_xor_si512(step, _mm512_and_si512(old, lanes.sign_bit)), 15);
      __m512i symbol = _mm512_sub_epi16(_mm512_add_epi16(_mm512_add_epi16(magnitude, magnitude), towards_zero), one);
      const __mmask32 large = _mm512_mask_cmpgt_epu16_mask(active, magnitude, exact_max);
      if (large != 0) {
        // Converted to float, a magnitude shows its length and its second highest bit. The subtraction removes the
        // exponent's bias (127) and gives a magnitude of 8, whose exponent is 3, the head 8.
        const auto head_of = [](__m256i part) {
          const __m512i bits = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(part)));
          return _mm512_cvtepi32_epi16(
              _mm512_sub_epi32(_mm512_srli_epi32(bits, 22), _mm512_set1_epi32(2 * (127 + 3) - 8)));
        };
        const __m512i head = _mm512_inserti64x4(_mm512_castsi256_si512(head_of(_mm512_castsi512_si256(magnitude))),
                                                head_of(_mm512_extracti64x4_epi64(magnitude, 1)), 1);
        symbol =
            _mm512_mask_add_epi16(symbol, large, _mm512_add_epi16(_mm512_add_epi16(head, head), towards_zero), one);
        alignas(64) std::uint16_t large_magnitudes[32];
        _mm512_store_si512(large_magnitudes, _mm512_maskz_compress_epi16(large, magnitude));
        const auto large_count = static_cast<std::uint32_t>(__builtin_popcount(large));
        for (std::uint32_t k = 0; k < large_count; k += 8) {
          const __m128i eight = _mm_load_si128(reinterpret_cast<const __m128i*>(large_magnitudes + k));
          _mm512_storeu_si512(extras + extra_count + k, _mm512_cvtepu16_epi64(eight));
        }
        extra_count += large_count;
      }
      const __mmask32 changed = _mm512_test_epi16_mask(magnitude, magnitude);
      _mm512_storeu_si512(symbols + i, _mm512_or_si512(range, _mm512_maskz_mov_epi16(changed, symbol)));
    }
    return extra_count;
  }
#endif
  for (; i < count; ++i) {
    const T old = old_elements[i];
    std::uint64_t magnitude = 0;
    const unsigned token = change_token(old, now[i], model.is_float, magnitude);
    extras[extra_count] = magnitude;
    extra_count += magnitude > kExactMagnitudeMax;  // otherwise the entry is overwritten
    symbols[i] = static_cast<std::uint16_t>(model.range_of[class_of(old, model)] << kTokenBits |
                                            (magnitude == 0 ? 0 : token + 1));
  }
  return extra_count;
}

// Kernels::count_steps.
template <class T>
void count_steps(const std::byte* old_elements, const std::byte* now, std::uint32_t count, const BlockModel& model,
                 std::uint32_t* counts) {
  Packed<T> before, after;
  Packed<std::uint16_t> symbols;
  std::uint64_t extras[kBlockElementsMax + kSpareElements];
  std::memcpy(before, old_elements, count * sizeof(T));  // symbols_of() needs aligned elements
  std::memcpy(after, now, count * sizeof(T));
  symbols_of(before, after, count, model, symbols, extras);
  for (std::uint32_t i = 0; i < count; ++i) ++counts[symbols[i]];
}

// Kernels::pack: the elements of both sides that are in dense ranges.
template <class T>
void pack_dense(const std::byte* prev, const std::byte* cur, std::uint32_t count, const SortedBlock& sorted,
                std::byte* old_elements, std::byte* now) {
  const std::uint32_t words = (count + 31) / 32;
  pack<T>(prev, sorted.mask[0], words, sorted.count[0], old_elements);
  pack<T>(cur, sorted.mask[0], words, sorted.count[0], now);
}

// The step from `old` to `now`, as apply_step() takes it.
template <class T>
T step_between(T old, T now, bool is_float) {
  const T step = static_cast<T>(to_ordered(now, is_float) - to_ordered(old, is_float));
  return static_cast<T>(is_float && (old & kSignBit<T>) ? ~step + 1 : step);
}

// Adds an exception: a change without a symbol in its range's table. `rank` is the element's index among the block's
// dense elements.
template <class T>
void put_exception(T old, T now, std::uint32_t rank, bool is_float, GapSink& out) {
  std::uint64_t magnitude = 0;
  const unsigned token = change_token(old, now, is_float, magnitude);
  out.gaps[out.count] = static_cast<std::uint32_t>(out.elements_seen + rank - out.next_rank);
  out.next_rank = out.elements_seen + rank + 1;
  out.tokens[out.count++] = static_cast<std::uint16_t>(token);
  if (token >= kExactTokens) out.extras[out.extra_count++] = magnitude;
}

#if defined(__AVX512VBMI2__)
// Appends values of `lengths` bits, at most 14 each. Joins four at a time, because one call of put_bits() per value
// would take longer. Both arrays have room for kSpareElements more.
void put_lows(std::uint16_t* lows, std::uint16_t* lengths, std::uint32_t count, BitSink& sink) {
  const __m512i zero = _mm512_setzero_si512(), low16 = _mm512_set1_epi32(0xffff), low32 = _mm512_set1_epi64(0xffffffff);
  _mm512_storeu_si512(lows + count, zero);
  _mm512_storeu_si512(lengths + count, zero);
  BitSink bits = sink;  // in registers
  for (std::uint32_t i = 0; i < count; i += 32) {
    const __m512i value = _mm512_loadu_si512(lows + i), length = _mm512_loadu_si512(lengths + i);
    // Joins two, then four values.
    const __m512i length_of_first = _mm512_and_si512(length, low16);
    const __m512i two = _mm512_or_si512(_mm512_and_si512(value, low16),
                                        _mm512_sllv_epi32(_mm512_srli_epi32(value, 16), length_of_first));
    const __m512i length_of_two = _mm512_add_epi32(length_of_first, _mm512_srli_epi32(length, 16));
    const __m512i length_of_left = _mm512_and_si512(length_of_two, low32);
    const __m512i four =
        _mm512_or_si512(_mm512_and_si512(two, low32), _mm512_sllv_epi64(_mm512_srli_epi64(two, 32), length_of_left));
    alignas(64) std::uint64_t part[8], part_bits[8];
    _mm512_store_si512(part, four);
    _mm512_store_si512(part_bits, _mm512_add_epi64(length_of_left, _mm512_srli_epi64(length_of_two, 32)));
    for (unsigned k = 0; k < 8; ++k) put_bits(bits, part[k], static_cast<unsigned>(part_bits[k]));
  }
  sink = bits;
}
#endif

// Appends the small symbols of packed elements, their low bits and exceptions to `sink`.
template <class T>
void put_dense(const std::byte* old_elements, const std::byte* now, std::uint32_t count, const BlockModel& model,
               BlockSink& sink) {
  std::uint8_t* const symbols = sink.dense_symbols + sink.dense_symbol_count;
  GapSink& exceptions = sink.gap[kRangesMax];
  std::uint32_t i = 0;
#if defined(__AVX512VBMI2__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    const __m512i zero = _mm512_setzero_si512(), one = _mm512_set1_epi16(1), ones = _mm512_set1_epi16(-1);
    alignas(64) std::uint16_t range_at[kClasses], low_at[kClasses], coded_at[kClasses];
    for (unsigned class_index = 0; class_index < kClasses; ++class_index) {
      const unsigned range = model.range_of[class_index];
      range_at[class_index] = static_cast<std::uint16_t>(range << kSymbolBits);
      low_at[class_index] = model.low_bits[range];
      coded_at[class_index] = model.coded_symbols[range];
    }
    const __m512i range_of = _mm512_load_si512(range_at), low_of = _mm512_load_si512(low_at),
                  coded_of = _mm512_load_si512(coded_at);
    Packed<std::uint16_t> lows, lengths;
    std::uint32_t low_count = 0;
    const auto put = [&](__mmask32 active, const bool has_low_bits) {
      const __m512i old = _mm512_maskz_loadu_epi16(active, old_elements + 2 * i);
      const __m512i next = _mm512_maskz_loadu_epi16(active, now + 2 * i);
      const __m512i class_index = lanes.class_of(old);
      const __mmask32 negative = _mm512_test_epi16_mask(old, lanes.sign_bit);
      __m512i step = _mm512_sub_epi16(lanes.to_ordered(next), lanes.to_ordered(old));
      step = _mm512_mask_sub_epi16(step, negative, zero, step);
      const __mmask32 changed = _mm512_test_epi16_mask(step, step);
      const __m512i low = _mm512_permutexvar_epi16(class_index, low_of);
      const __m512i place =
          _mm512_add_epi16(has_low_bits ? _mm512_srav_epi16(step, low) : step, _mm512_set1_epi16(kZeroStep));
      const __mmask32 fits = _mm512_mask_test_epi16_mask(changed, _mm512_sllv_epi16(one, place),
                                                         _mm512_permutexvar_epi16(class_index, coded_of));
      const __m512i symbol = _mm512_mask_mov_epi16(_mm512_set1_epi16(kSmallUnchanged), fits, place);
      const __m512i entry = _mm512_or_si512(symbol, _mm512_permutexvar_epi16(class_index, range_of));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(symbols + i), _mm512_cvtepi16_epi8(entry));
      if (has_low_bits) {
        const __mmask32 has_low = _mm512_mask_test_epi16_mask(fits, low, low);
        const __m512i low_of_step = _mm512_andnot_si512(_mm512_sllv_epi16(ones, low), step);
        _mm512_storeu_si512(lows + low_count, _mm512_maskz_compress_epi16(has_low, low_of_step));
        _mm512_storeu_si512(lengths + low_count, _mm512_maskz_compress_epi16(has_low, low));
        low_count += static_cast<std::uint32_t>(__builtin_popcount(has_low));
      }
      for (std::uint32_t without_symbol = changed & ~fits; without_symbol != 0; without_symbol &= without_symbol - 1) {
        const auto k = i + static_cast<std::uint32_t>(__builtin_ctz(without_symbol));
        put_exception(read_element<T>(old_elements + 2 * k), read_element<T>(now + 2 * k), k, model.is_float,
                      exceptions);
      }
    };
    if (model.has_low_bits) {  // two loops, so that the compiler makes one without the code for low bits
      for (; i + 32 <= count; i += 32) put(~0u, /*has_low_bits=*/true);
    } else {
      for (; i + 32 <= count; i += 32) put(~0u, /*has_low_bits=*/false);
    }
    if (i < count) put((1u << (count - i)) - 1, /*has_low_bits=*/true);
    if (low_count > 0) put_lows(lows, lengths, low_count, sink.low);
    i = count;
  }
#endif
  for (; i < count; ++i) {
    const T old = read_element<T>(old_elements + i * sizeof(T)), next = read_element<T>(now + i * sizeof(T));
    const unsigned range = model.range_of[class_of(old, model)], low = model.low_bits[range];
    unsigned symbol = kSmallUnchanged;
    if (old != next) {
      const T step = step_between(old, next, model.is_float);
      // Shifts left first, because the shift right then extends the sign.
      constexpr unsigned kUnusedBits = 64 - 8 * sizeof(T);
      const std::int64_t high = static_cast<std::int64_t>(std::uint64_t{step} << kUnusedBits) >> (kUnusedBits + low);
      if (const std::int64_t place = high + kZeroStep;
          place >= 0 && place < kSmallUnchanged && (model.coded_symbols[range] >> place & 1)) {
        symbol = static_cast<unsigned>(place);
        if (low > 0) put_bits(sink.low, step & ((std::uint64_t{1} << low) - 1), low);
      } else {
        put_exception(old, next, i, model.is_float, exceptions);
      }
    }
    symbols[i] = static_cast<std::uint8_t>(range << kSymbolBits | symbol);
  }
  sink.dense_symbol_count += count;
  exceptions.elements_seen += count;
}

// Kernels::collect: the changed elements outside dense ranges, with their gaps and tokens.
template <class T>
void collect(const std::byte* prev, const std::byte* cur, std::uint32_t count, const BlockModel& model,
             const SortedBlock& sorted, const std::uint32_t* changed, BlockSink& sink) {
  const std::uint32_t words = (count + 31) / 32;
  Packed<T> old_elements, now;
  Packed<std::uint16_t> index, symbols;
  const std::uint32_t index_count =
      list_indices(changed, model.dense_range_count > 0 ? sorted.mask[0] : nullptr, words, index);
  for (std::uint32_t i = 0; i < index_count; ++i) {
    old_elements[i] = read_element<T>(prev + index[i] * sizeof(T));
    now[i] = read_element<T>(cur + index[i] * sizeof(T));
  }
  std::uint64_t extras[kBlockElementsMax + kSpareElements];
  symbols_of(old_elements, now, index_count, model, symbols, extras);
  const std::uint64_t* extra = extras;
  for (std::uint32_t i = 0; i < index_count; ++i) {
    const std::uint32_t word = index[i] / 32;
    const std::uint32_t range = symbols[i] >> kTokenBits, entry = range - model.dense_range_count + 1;
    const unsigned token = (symbols[i] & ((1u << kTokenBits) - 1)) - 1;
    GapSink& out = sink.gap[range];
    // The element's rank within its range: elements in earlier blocks, in earlier words, and before it in its word.
    const std::uint32_t below = sorted.mask[entry][word] & ((1u << index[i] % 32) - 1);
    const std::uint64_t rank =
        out.elements_seen + sorted.before[entry][word] + static_cast<std::uint32_t>(__builtin_popcount(below));
    out.gaps[out.count] = static_cast<std::uint32_t>(rank - out.next_rank);
    out.next_rank = rank + 1;
    out.tokens[out.count++] = static_cast<std::uint16_t>(token);
    if (token >= kExactTokens) out.extras[out.extra_count++] = *extra++;
  }
  for (std::uint32_t range = model.dense_range_count; range < model.range_count; ++range)
    sink.gap[range].elements_seen += sorted.count[range - model.dense_range_count + 1];
}

// ---- symbols to bits ----

#if defined(__AVX512VBMI2__)
// write_small() for 64 states at a time. `turn`: the number of the state after the last run. kHalf: as in ByteTable.
template <bool kHalf>
std::byte* write_small_lanes(const std::uint8_t* symbols, const std::uint32_t* run_lengths, std::size_t run_count,
                             const SmallCodes& codes, std::uint32_t state_count, std::uint32_t turn,
                             std::uint16_t* states, std::byte* end) {
  const ByteTable<kHalf> others_of(codes.other_slots), first_of(codes.first_slot), low_of(codes.reciprocal_low),
      high_of(codes.reciprocal_high), shift_of(codes.shift);
  const __m512i byte = _mm512_set1_epi16(0xff), zero = _mm512_setzero_si512();
  // Encodes the next symbols with the states of 64 lanes from `lane` on, as put_small() does with one state.
  const auto put = [&](const std::uint8_t* from, std::uint32_t lane, __mmask64 active) {
    const __m512i symbol = order_for_unpacking(_mm512_maskz_loadu_epi8(active, from));
    const __mmask64 high = kHalf ? 0 : _mm512_movepi8_mask(symbol);
    const __m512i others8 = others_of.at(symbol, high), first8 = first_of.at(symbol, high),
                  low8 = low_of.at(symbol, high), high8 = high_of.at(symbol, high), shift8 = shift_of.at(symbol, high);
    // Encodes 32 symbols. A 16-bit lane of `place` has the first slot in its low byte, the number of other slots above.
    const auto encode_half = [&](std::uint16_t* state, __mmask32 on, __m512i reciprocal, __m512i place, __m512i shift) {
      const __m512i x = _mm512_loadu_si512(state);
      const __m512i others = _mm512_srli_epi16(place, 8), upper = _mm512_srli_epi16(x, 8);
      const __mmask32 spill = _mm512_mask_cmpgt_epu16_mask(on, _mm512_add_epi16(upper, others), byte);
      const auto spilled = static_cast<unsigned>(__builtin_popcount(spill));
      end -= spilled;
      _mm256_mask_storeu_epi8(end, static_cast<__mmask32>((std::uint64_t{1} << spilled) - 1),
                              _mm256_maskz_compress_epi8(spill, _mm512_cvtepi16_epi8(x)));
      const __m512i y = _mm512_mask_mov_epi16(x, spill, upper);
      const __m512i quotient = _mm512_srlv_epi16(_mm512_mulhi_epu16(y, reciprocal), shift);
      __m512i next =
          _mm512_add_epi16(_mm512_add_epi16(y, _mm512_and_si512(place, byte)), _mm512_mullo_epi16(quotient, others));
      // The correction for frequency 1.
      next = _mm512_mask_add_epi16(next, _mm512_cmpeq_epi16_mask(others, byte), next, byte);
      _mm512_storeu_si512(state, _mm512_mask_mov_epi16(x, on, next));
    };
    encode_half(states + lane + 32, static_cast<__mmask32>(active >> 32), _mm512_unpackhi_epi8(low8, high8),
                _mm512_unpackhi_epi8(first8, others8), _mm512_unpackhi_epi8(shift8, zero));
    encode_half(states + lane, static_cast<__mmask32>(active), _mm512_unpacklo_epi8(low8, high8),
                _mm512_unpacklo_epi8(first8, others8), _mm512_unpacklo_epi8(shift8, zero));
  };
  for (std::size_t run = run_count; run-- > 0;) {
    symbols -= run_lengths[run];
    for (std::uint32_t first = (run_lengths[run] + 63) / 64 * 64; first > 0;) {
      first -= 64;
      turn -= 64;
      put(symbols + first, turn % state_count, first_lanes(run_lengths[run] - first));
    }
  }
  return end;
}
#endif

// Kernels::write_small.
std::byte* write_small(const std::uint8_t* symbols, const std::uint32_t* run_lengths, std::size_t run_count,
                       [[maybe_unused]] std::uint32_t range_count, const SmallCodes& codes, std::uint32_t state_count,
                       std::uint16_t* states, std::byte* end) {
  std::uint32_t turn = 0;  // number of the state after the current run, over all runs
  for (std::size_t run = 0; run < run_count; ++run) {
    symbols += run_lengths[run];
    turn += states_of_run(run_lengths[run]);
  }
#if defined(__AVX512VBMI2__)
  if (state_count >= kRunStateAlignment) {
    const bool uses_half_tables = fit_half_table(range_count);
    return uses_half_tables
               ? write_small_lanes<true>(symbols, run_lengths, run_count, codes, state_count, turn, states, end)
               : write_small_lanes<false>(symbols, run_lengths, run_count, codes, state_count, turn, states, end);
  }
#endif
  for (std::size_t run = run_count; run-- > 0;) {
    symbols -= run_lengths[run];
    turn -= states_of_run(run_lengths[run]);
    for (std::uint32_t i = run_lengths[run]; i-- > 0;)
      // put_small() returns whether it output a byte: 0 or 1 bytes.
      end -= put_small(states[(turn + i) % state_count], codes, symbols[i], end - 1);
  }
  return end;
}

}  // namespace
}  // namespace echoline::delta
