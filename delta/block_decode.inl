// The decoding part of block.inl, which includes it.
namespace echoline::delta {
namespace {

// ---- tokens to changes ----

// The word that holds the element with this rank: the last word with at most `rank` elements before it.
std::uint32_t word_of(const std::uint16_t* before, std::uint32_t words, std::uint32_t rank) {
#if defined(__AVX512BW__)
  const __m512i wanted = _mm512_set1_epi16(static_cast<short>(rank));
  std::uint32_t at_most = 0;
  for (std::uint32_t word = 0; word < words; word += 32)
    at_most += static_cast<std::uint32_t>(
        __builtin_popcount(_mm512_cmple_epu16_mask(_mm512_load_si512(before + word), wanted)));
  return at_most - 1;
#else
  std::uint32_t low = 0;  // binary search
  for (std::uint32_t half = kBlockWordsMax / 2; half > 0; half /= 2)
    low += low + half < words && before[low + half] <= rank ? half : 0;
  return low;
#endif
}

// Reads a run of `count` symbols of version 3. On entry, symbols[i] is the range of the i-th element.
void read_wide(ManyStateRansReader& reader, std::uint32_t count, const RansEntry* tables, std::uint16_t* symbols) {
  std::uint32_t symbols_done = 0;
#if defined(__AVX512BW__)
  constexpr unsigned kVectors = kManyStates / 16;
  __m512i state[kVectors];
  for (unsigned vector = 0; vector < kVectors; ++vector) state[vector] = _mm512_load_si512(reader.state + 16 * vector);
  const __m512i slot_mask = _mm512_set1_epi32(kRansSlots - 1), floor = _mm512_set1_epi32(kRansFloor);
  const std::byte* words = reader.words + 2 * reader.word_index;
  const std::byte* const words_end = reader.words + 2 * reader.word_count;
  // Decodes one symbol from each of 16 states: state % 2^11 is the slot, the slot's table entry has the symbol, and the
  // next state is frequency * (state / 2^11) + offset. A state below the floor takes in one word of input.
  const auto read = [&](unsigned vector, std::uint16_t* vector_symbols, __mmask16 active) {
    const __m512i range = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(active, vector_symbols));
    const __m512i slot = _mm512_and_si512(state[vector], slot_mask);
    const __m512i entry = _mm512_i32gather_epi32(_mm512_or_si512(_mm512_slli_epi32(range, kRansBits), slot), tables, 4);
    const __m512i frequency =
        _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(entry, kRansBits), slot_mask), _mm512_set1_epi32(1));
    const __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(frequency, _mm512_srli_epi32(state[vector], kRansBits)),
                                          _mm512_and_si512(entry, slot_mask));
    const __mmask16 refill = _mm512_mask_cmplt_epu32_mask(active, next, floor);
    const __m512i word = _mm512_maskz_expand_epi32(
        refill, _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words))));
    words += 2 * __builtin_popcount(refill);
    state[vector] = _mm512_mask_mov_epi32(state[vector], active,
                                          _mm512_mask_or_epi32(next, refill, _mm512_slli_epi32(next, 16), word));
    _mm256_mask_storeu_epi16(vector_symbols, active, _mm512_cvtepi32_epi16(_mm512_srli_epi32(entry, 2 * kRansBits)));
  };
  const auto has_words = [&] { return words_end - words >= static_cast<std::ptrdiff_t>(2 * kManyStates); };
  for (; symbols_done + kManyStates <= count && has_words(); symbols_done += kManyStates)
    for (unsigned vector = 0; vector < kVectors; ++vector) read(vector, symbols + symbols_done + 16 * vector, 0xffff);
  if (count - symbols_done < kManyStates && has_words()) {
    for (unsigned vector = 0; symbols_done + 16 * vector < count; ++vector) {
      const std::uint32_t symbols_left = count - symbols_done - 16 * vector;
      read(vector, symbols + symbols_done + 16 * vector,
           static_cast<__mmask16>(symbols_left < 16 ? (1u << symbols_left) - 1 : 0xffff));
    }
    symbols_done = count;
  }
  for (unsigned vector = 0; vector < kVectors; ++vector) _mm512_store_si512(reader.state + 16 * vector, state[vector]);
  reader.word_index = static_cast<std::uint64_t>(words - reader.words) / 2;
#endif
  rans_read_many_states(reader, symbols_done, count, tables, symbols);
}

// Reads the symbols of the dense elements of a block (version 3 of the format).
template <class T>
void read_dense(const T* old_elements, std::uint32_t count, const BlockModel& model, BlockSource& source,
                std::uint16_t* symbols) {
  std::uint32_t i = 0;
#if defined(__AVX512BW__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    for (; i < count; i += 32) _mm512_storeu_si512(symbols + i, lanes.range_of(_mm512_loadu_si512(old_elements + i)));
  }
#endif
  for (; i < count; ++i) symbols[i] = model.range_of[class_of(old_elements[i], model)];
  const RansEntry* const tables = source.dense_tables;
  if (source.is_wide) return read_wide(source.wide, count, tables, symbols);
  RansReader rans = source.narrow;
  rans_read_run(
      rans, count, [&](std::uint64_t k) { return tables + symbols[k] * kRansSlots; }, symbols);
  source.narrow = rans;
}

// Applies an "open" step: one whose token is not exact, or follows an escape.
template <class T>
T apply_open_step(T old, unsigned symbol, const BlockModel& model, BlockSource& source) {
  unsigned token = symbol - 1;
  if (symbol == kEscape) {
    token = static_cast<unsigned>(get_bits(source.bits, kTokenBits));
    if (token >= kStepTokensMax) {
      source.malformed = true;
      return old;
    }
  }
  const std::uint64_t extra = token < kExactTokens ? 0 : get_extra(source.bits, token);
  return apply_step(old, step_of_token(token, extra), model.is_float);
}

#if defined(__AVX512VBMI2__)
// apply_open_step() for sixteen 16-bit elements. Returns false, without effect, for an escape, a token of wider types,
// or the end of the bits.
bool apply_open_steps(__m512i symbol, std::uint16_t* old_elements, const BlockModel& model, BlockSource& source) {
  const auto set = [](unsigned value) { return _mm512_set1_epi32(static_cast<int>(value)); };
  constexpr unsigned kLargestToken = kExactTokens + 4 * (16 - 4) + 3;  // of elements of 16 bits
  const __m512i zero = _mm512_setzero_si512(), token = _mm512_sub_epi32(symbol, set(1)),
                above = _mm512_sub_epi32(token, set(kExactTokens));
  if (_mm512_cmpgt_epu32_mask(token, set(kLargestToken)) != 0) return false;
  // Number of each element's extra bits, and their ends, counted from the end of the bits read so far.
  const __m512i length = _mm512_add_epi32(_mm512_srli_epi32(above, 2), set(2));
  __m512i end = _mm512_add_epi32(length, _mm512_alignr_epi32(length, zero, 15));  // prefix sums
  end = _mm512_add_epi32(end, _mm512_alignr_epi32(end, zero, 14));
  end = _mm512_add_epi32(end, _mm512_alignr_epi32(end, zero, 12));
  end = _mm512_add_epi32(end, _mm512_alignr_epi32(end, zero, 8));
  const auto total = static_cast<std::uint32_t>(_mm_extract_epi32(_mm512_extracti32x4_epi32(end, 3), 3));
  const std::uint64_t first_byte = source.bits.bit_index >> 3;
  if (first_byte + total / 8 + 8 > source.bits.byte_count) return false;
  const __m512i bit_position =  // of each element's extra bits, from the start of first_byte
      _mm512_add_epi32(_mm512_sub_epi32(end, length), set(static_cast<unsigned>(source.bits.bit_index & 7)));
  const __m512i window = _mm512_i32gather_epi32(_mm512_srli_epi32(bit_position, 3), source.bits.bytes + first_byte, 1);
  const __m512i extra = _mm512_andnot_si512(_mm512_sllv_epi32(set(~0u), length),
                                            _mm512_srlv_epi32(window, _mm512_and_si512(bit_position, set(7))));
  // The two highest bits of the magnitude; the extra bits are below them.
  const __m512i head = _mm512_or_si512(set(2), _mm512_and_si512(_mm512_srli_epi32(above, 1), set(1)));
  const __m512i magnitude = _mm512_or_si512(_mm512_sllv_epi32(head, length), extra);
  const __m512i old = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(old_elements)));
  // As apply_step() does: makes ordered integers, moves them by the magnitude, up or down, and converts them back.
  const unsigned sign_bit = model.is_float ? 0x8000 : 0;
  const __mmask16 negative = _mm512_test_epi32_mask(old, set(sign_bit));
  const __mmask16 down = static_cast<__mmask16>(_mm512_test_epi32_mask(token, set(1)) ^ negative);
  const __m512i ordered = _mm512_mask_xor_epi32(_mm512_or_si512(old, set(sign_bit)), negative, old, set(0xffff));
  const __m512i moved = _mm512_mask_sub_epi32(_mm512_add_epi32(ordered, magnitude), down, ordered, magnitude);
  const __mmask16 below_zero = model.is_float ? _mm512_testn_epi32_mask(moved, set(0x8000)) : 0;
  const __m512i now = _mm512_mask_xor_epi32(_mm512_andnot_si512(set(sign_bit), moved), below_zero, moved, set(0xffff));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(old_elements), _mm512_cvtepi32_epi16(now));
  source.bits.bit_index += total;
  return true;
}
#endif

// Applies all steps to `values`.
template <class T>
void apply_steps(T* values, std::uint32_t count, const std::uint16_t* symbols, const BlockModel& model,
                 BlockSource& source) {
  std::uint32_t i = 0;
#if defined(__AVX512VBMI2__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    const __m512i one = _mm512_set1_epi16(1);
    Packed<std::uint16_t> open_indices, old_elements;  // of elements with open symbols
    std::uint32_t open_count = 0, changed = 0;
    __m512i lane = iota16();
    for (; i < count; i += 32) {
      const __mmask32 active = count - i < 32 ? (1u << (count - i)) - 1 : ~0u;
      const __m512i symbol = _mm512_maskz_loadu_epi16(active, symbols + i);
      changed += static_cast<std::uint32_t>(__builtin_popcount(_mm512_test_epi16_mask(symbol, symbol)));
      const __m512i old = _mm512_loadu_si512(values + i);
      // Odd symbols step away from zero, even ones towards zero; below zero, ordered integers decrease away from zero.
      const __m512i magnitude = _mm512_srli_epi16(_mm512_add_epi16(symbol, one), 1);
      const __mmask32 down = ~_mm512_test_epi16_mask(symbol, one) ^ _mm512_test_epi16_mask(old, lanes.sign_bit);
      const __m512i ordered = lanes.to_ordered(old);
      const __m512i now =
          lanes.from_ordered(_mm512_mask_sub_epi16(_mm512_add_epi16(ordered, magnitude), down, ordered, magnitude));
      const __mmask32 is_open = _mm512_cmpgt_epu16_mask(symbol, _mm512_set1_epi16(kExactTokens));
      _mm512_storeu_si512(values + i, now);
      if (is_open != 0) {
        _mm512_storeu_si512(open_indices + open_count, _mm512_maskz_compress_epi16(is_open, lane));
        _mm512_storeu_si512(old_elements + open_count, _mm512_maskz_compress_epi16(is_open, old));
        open_count += static_cast<std::uint32_t>(__builtin_popcount(is_open));
      }
      lane = _mm512_add_epi16(lane, _mm512_set1_epi16(32));
    }
    source.changed += changed;
    for (i = 0; i < open_count; i += 16) {
      const std::uint32_t part = open_count - i < 16 ? open_count - i : 16;
      alignas(64) std::uint32_t open_symbols[16];
      for (std::uint32_t k = 0; k < part; ++k) open_symbols[k] = symbols[open_indices[i + k]];
      if (part < 16 || !apply_open_steps(_mm512_load_si512(open_symbols), old_elements + i, model, source))
        for (std::uint32_t k = 0; k < part; ++k)
          old_elements[i + k] = apply_open_step(old_elements[i + k], open_symbols[k], model, source);
      for (std::uint32_t k = 0; k < part; ++k) values[open_indices[i + k]] = old_elements[i + k];
    }
    return;
  }
#endif
  for (; i < count; ++i) {
    const unsigned symbol = symbols[i];
    if (symbol > kExactTokens) {  // symbol: token + 1
      values[i] = apply_open_step(values[i], symbol, model, source);
    } else if (symbol != 0) {
      values[i] = apply_step(values[i], step_of_token(symbol - 1, 0), model.is_float);
    }
    source.changed += symbol != 0;
  }
}

// ---- small symbols to changes ----

#if defined(__AVX512VBMI2__)
// Reads kGroups times 64 symbols. Each instruction of a group waits for the previous one, so those of several groups
// are interleaved. kHalf: the tables of all ranges fit in 128 entries, half of the largest size.
template <bool kHalf, unsigned kGroups>
struct SmallLanes {
  const ByteTable<kHalf> first_of, frequency_minus_one_of;
  __m512i low_bytes;
  explicit SmallLanes(const SmallTables& tables)
      : first_of(tables.first_slot), frequency_minus_one_of(tables.frequency_minus_one) {
    alignas(64) std::uint8_t lows[64];
    for (unsigned k = 0; k < 64; ++k) lows[k] = static_cast<std::uint8_t>(2 * k);
    low_bytes = _mm512_load_si512(lows);
  }
  // Reads `count` symbols, at most 64 * kGroups. Returns the position after the bytes read.
  const std::byte* read(SmallReader& reader, std::uint32_t turn, std::uint32_t count, std::uint8_t* symbols,
                        const std::byte* bytes) const {
    const __m512i byte = _mm512_set1_epi16(0xff), floor = _mm512_set1_epi16(kSmallFloor);
    std::uint16_t* state[kGroups];
    __m512i slot[kGroups], symbol[kGroups];
    __mmask64 active[kGroups], high[kGroups];
    for (unsigned group = 0; group < kGroups; ++group) {
      state[group] = reader.state + (turn + 64 * group) % reader.state_count;
      active[group] = first_lanes(count > 64 * group ? count - 64 * group : 0);
      slot[group] =
          _mm512_permutex2var_epi8(_mm512_load_si512(state[group]), low_bytes, _mm512_load_si512(state[group] + 32));
      symbol[group] = _mm512_maskz_loadu_epi8(active[group], symbols + 64 * group);
      high[group] = kHalf ? 0 : _mm512_movepi8_mask(symbol[group]);
    }
    // Binary search in each lane: the symbol is the last one whose first slot is at most `slot`.
    for (unsigned bit = kSmallSymbols / 2; bit > 0; bit /= 2)
      for (unsigned group = 0; group < kGroups; ++group) {
        const __m512i further = _mm512_or_si512(symbol[group], _mm512_set1_epi8(static_cast<char>(bit)));
        const __mmask64 is_further = _mm512_cmple_epu8_mask(first_of.at(further, high[group]), slot[group]);
        symbol[group] = _mm512_mask_mov_epi8(symbol[group], is_further, further);
      }
    __m512i offset[kGroups], frequency_minus_one[kGroups];
    for (unsigned group = 0; group < kGroups; ++group) {
      _mm512_mask_storeu_epi8(symbols + 64 * group, active[group], symbol[group]);
      offset[group] = order_for_unpacking(_mm512_sub_epi8(slot[group], first_of.at(symbol[group], high[group])));
      frequency_minus_one[group] = order_for_unpacking(frequency_minus_one_of.at(symbol[group], high[group]));
    }
    for (unsigned group = 0; group < kGroups; ++group) {
      // Advances 32 states past their symbols. A 16-bit lane has the offset in its low byte, the frequency minus one
      // above.
      const auto advance_half = [&](std::uint16_t* half_states, __mmask32 half_active, __m512i offset_and_frequency) {
        const __m512i x = _mm512_load_si512(half_states), upper = _mm512_srli_epi16(x, 8);
        const __m512i next = _mm512_add_epi16(
            _mm512_add_epi16(_mm512_mullo_epi16(upper, _mm512_srli_epi16(offset_and_frequency, 8)), upper),
            _mm512_and_si512(offset_and_frequency, byte));
        const __mmask32 refill = _mm512_mask_cmplt_epu16_mask(half_active, next, floor);
        const __m512i low = _mm512_maskz_expand_epi16(
            refill, _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes))));
        bytes += __builtin_popcount(refill);
        const __m512i full = _mm512_or_si512(_mm512_mask_slli_epi16(next, refill, next, 8), low);
        _mm512_store_si512(half_states, _mm512_mask_mov_epi16(x, half_active, full));
      };
      advance_half(state[group], static_cast<__mmask32>(active[group]),
                   _mm512_unpacklo_epi8(offset[group], frequency_minus_one[group]));
      advance_half(state[group] + 32, static_cast<__mmask32>(active[group] >> 32),
                   _mm512_unpackhi_epi8(offset[group], frequency_minus_one[group]));
    }
    return bytes;
  }
};

// Reads symbols in groups of 64 while there is input. Returns the number read, at most `count`.
template <bool kHalf, unsigned kGroups>
std::uint32_t read_small_lanes(SmallReader& reader, std::uint32_t count, const SmallTables& tables,
                               std::uint8_t* symbols) {
  const SmallLanes<kHalf, kGroups> groups(tables);
  const SmallLanes<kHalf, 1> one(tables);
  const std::byte* bytes = reader.bytes + reader.byte_index;
  const std::byte* bytes_end = reader.bytes + reader.byte_count;
  // Whole vectors are loaded, so the end of the input is copied to a buffer and padded with zeros.
  constexpr std::ptrdiff_t kRoom = 64 * kGroups;
  std::byte padded_end[3 * kRoom];
  const std::byte* origin = reader.bytes;
  std::uint64_t bytes_before_origin = 0;
  const auto prepare_input = [&] {
    if (bytes_end - bytes >= kRoom) return true;
    // The padded end is used up, or there was no input at all.
    if (origin != reader.bytes || reader.byte_index > reader.byte_count) return false;
    std::memset(padded_end, 0, sizeof padded_end);
    std::memcpy(padded_end, bytes, static_cast<std::size_t>(bytes_end - bytes));
    bytes_before_origin = static_cast<std::uint64_t>(bytes - origin);
    origin = bytes = padded_end;
    bytes_end = padded_end + sizeof padded_end;
    return true;
  };
  std::uint32_t symbols_done = 0;
  while (symbols_done < count && prepare_input()) {
    const std::uint32_t symbols_left = count - symbols_done;
    bytes = symbols_left > 64
                ? groups.read(reader, reader.turn + symbols_done, symbols_left, symbols + symbols_done, bytes)
                : one.read(reader, reader.turn + symbols_done, symbols_left, symbols + symbols_done, bytes);
    symbols_done += symbols_left > 64 ? 64 * kGroups : 64;
  }
  reader.byte_index = bytes_before_origin + static_cast<std::uint64_t>(bytes - origin);
  return symbols_done < count ? symbols_done : count;
}

// Reads values of `lengths` bits, at most 14 each, written by put_lows(). Both arrays have room for kSpareElements
// more.
void get_lows(BitReader& reader, std::uint16_t* lengths, std::uint32_t count, std::uint16_t* lows) {
  _mm512_storeu_si512(lengths + count, _mm512_setzero_si512());
  const __m512i low16 = _mm512_set1_epi64(0xffff), ones = _mm512_set1_epi64(-1);
  BitReader bits = reader;  // in registers
  for (std::uint32_t i = 0; i < count; i += 32) {
    alignas(64) std::uint64_t part[8];
    for (unsigned k = 0; k < 8; ++k) {
      std::uint64_t four = 0;
      std::memcpy(&four, lengths + i + 4 * k, 8);
      // The multiplication adds up the four lengths in its highest 16 bits.
      part[k] = get_bits(bits, static_cast<unsigned>(four * 0x0001000100010001u >> 48));
    }
    __m512i window = _mm512_load_si512(part), length = _mm512_loadu_si512(lengths + i);
    __m512i all = _mm512_setzero_si512();
    for (unsigned k = 0; k < 4; ++k) {
      const __m512i first_length = _mm512_and_si512(length, low16);
      const __m512i value = _mm512_andnot_si512(_mm512_sllv_epi64(ones, first_length), window);
      all = _mm512_or_si512(all, _mm512_slli_epi64(value, 16 * k));
      window = _mm512_srlv_epi64(window, first_length);
      length = _mm512_srli_epi64(length, 16);
    }
    _mm512_storeu_si512(lows + i, all);
  }
  reader = bits;
}
#endif

// Reads a run of small symbols. On entry, symbols[i] is the range of the i-th element << kSymbolBits; the symbol is
// added to it.
void read_small(SmallReader& reader, std::uint32_t count, [[maybe_unused]] std::uint32_t range_count,
                const SmallTables& tables, std::uint8_t* symbols) {
  std::uint32_t symbols_done = 0;
#if defined(__AVX512VBMI2__)
  // Reads four, two or one group of 64 states at a time; with whole tables, at most two groups.
  const bool uses_half_tables = fit_half_table(range_count);
  if (reader.state_count >= 4 * kRunStateAlignment)
    symbols_done = uses_half_tables ? read_small_lanes<true, 4>(reader, count, tables, symbols)
                                    : read_small_lanes<false, 2>(reader, count, tables, symbols);
  else if (reader.state_count == 2 * kRunStateAlignment)
    symbols_done = uses_half_tables ? read_small_lanes<true, 2>(reader, count, tables, symbols)
                                    : read_small_lanes<false, 2>(reader, count, tables, symbols);
  else if (reader.state_count == kRunStateAlignment)
    symbols_done = uses_half_tables ? read_small_lanes<true, 1>(reader, count, tables, symbols)
                                    : read_small_lanes<false, 1>(reader, count, tables, symbols);
#endif
  read_small_run(reader, symbols_done, count, tables, symbols);
  reader.turn = (reader.turn + states_of_run(count)) % reader.state_count;
}

// Applies the exceptions (changes without a symbol in their range's table) among a block's dense elements, whose old
// values are `old_elements` and whose ranks are from `first_rank` to below `rank_end`.
template <class T>
void apply_exceptions(const T* old_elements, const std::uint8_t* symbols, std::uint64_t first_rank,
                      std::uint64_t rank_end, bool is_float, GapSource& exceptions, BlockSource& source,
                      std::byte* now) {
  for (std::uint64_t& k = exceptions.next_index; k < exceptions.count && exceptions.ranks[k] < rank_end; ++k) {
    const std::uint64_t index = exceptions.ranks[k] - first_rank;
    source.malformed |= (symbols[index] & (kSmallSymbols - 1)) != kSmallUnchanged;
    const T value = apply_step(old_elements[index], exceptions.steps[k], is_float);
    std::memcpy(now + index * sizeof(T), &value, sizeof(T));
    ++source.changed;
  }
}

// Computes the new values of packed dense elements; `now` may be `old_elements`. kPrefetches: they are a block of the
// segment itself, and later memory is prefetched.
template <class T, bool kPrefetches>
void resolve_dense(const std::byte* old_elements, std::uint32_t count, const BlockModel& model, BlockSource& source,
                   std::byte* now) {
  alignas(64) Packed<std::uint8_t> symbols;
  GapSource& exceptions = source.gap[kRangesMax];
  const std::uint64_t first_rank = exceptions.elements_seen, rank_end = first_rank + count;
  exceptions.elements_seen = rank_end;
  std::uint32_t changed = 0, i = 0;
#if defined(__AVX512VBMI2__)
  if constexpr (sizeof(T) == 2) {
    const Lanes16 lanes(model);
    alignas(64) std::uint16_t range_at[kClasses], low_at[32] = {};  // vectors of 32 lanes, by class and by range
    for (unsigned class_index = 0; class_index < kClasses; ++class_index)
      range_at[class_index] = static_cast<std::uint16_t>(model.range_of[class_index] << kSymbolBits);
    for (unsigned range = 0; range < kRangesMax; ++range) low_at[range] = model.low_bits[range];
    const __m512i range_of = _mm512_load_si512(range_at), low_of = _mm512_load_si512(low_at);
    const auto mask_at = [&](std::uint32_t first) { return count - first < 32 ? (1u << (count - first)) - 1 : ~0u; };
    for (i = 0; i < count; i += 32) {
      if constexpr (kPrefetches) __builtin_prefetch(old_elements + 2 * i + kPrefetchBytes);
      _mm256_store_si256(reinterpret_cast<__m256i*>(symbols + i),
                         _mm512_cvtepi16_epi8(_mm512_permutexvar_epi16(
                             lanes.class_of(_mm512_maskz_loadu_epi16(mask_at(i), old_elements + 2 * i)), range_of)));
    }
    read_small(source.small, count, model.dense_range_count, *source.small_tables, symbols);
    const auto entry_at = [&](std::uint32_t first) {
      return _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(symbols + first)));
    };
    const __m512i unchanged = _mm512_set1_epi16(kSmallUnchanged), zero = _mm512_setzero_si512();
    Packed<std::uint16_t> lows, lengths;
    if (model.has_low_bits) {
      std::uint32_t low_count = 0;
      for (i = 0; i < count; i += 32) {
        const __m512i entry = entry_at(i);
        const __m512i low = _mm512_permutexvar_epi16(_mm512_srli_epi16(entry, kSymbolBits), low_of);
        // All four bits of kSmallUnchanged are set, so it is also the mask of an entry's symbol.
        const __mmask32 has_symbol =
            _mm512_mask_cmpneq_epi16_mask(mask_at(i), _mm512_and_si512(entry, unchanged), unchanged);
        const __mmask32 has_low = _mm512_mask_test_epi16_mask(has_symbol, low, low);
        _mm512_storeu_si512(lengths + low_count, _mm512_maskz_compress_epi16(has_low, low));
        low_count += static_cast<std::uint32_t>(__builtin_popcount(has_low));
      }
      if (low_count > 0) get_lows(source.low, lengths, low_count, lows);
    }
    const std::uint16_t* next_low = lows;
    // Called with constants, so that the compiler makes one copy without the code for low bits.
    const auto apply_symbols = [&](const bool has_low_bits) {
      for (i = 0; i < count; i += 32) {
        const __mmask32 active = mask_at(i);
        if constexpr (kPrefetches)
          if (source.has_output_per_block) __builtin_prefetch(now + 2 * i + kPrefetchBytes, /*for writing=*/1);
        const __m512i entry = entry_at(i), symbol = _mm512_and_si512(entry, unchanged);
        const __mmask32 has_symbol = _mm512_mask_cmpneq_epi16_mask(active, symbol, unchanged);
        __m512i step = _mm512_sub_epi16(symbol, _mm512_set1_epi16(kZeroStep));
        if (has_low_bits) {
          const __m512i low = _mm512_permutexvar_epi16(_mm512_srli_epi16(entry, kSymbolBits), low_of);
          const __mmask32 has_low = _mm512_mask_test_epi16_mask(has_symbol, low, low);
          step = _mm512_or_si512(_mm512_sllv_epi16(step, low),
                                 _mm512_maskz_expand_epi16(has_low, _mm512_loadu_si512(next_low)));
          next_low += __builtin_popcount(has_low);
        }
        const __m512i old = _mm512_maskz_loadu_epi16(active, old_elements + 2 * i);
        const __mmask32 moved = _mm512_mask_test_epi16_mask(has_symbol, step, step);
        changed += static_cast<std::uint32_t>(__builtin_popcount(moved));
        const __mmask32 negative = _mm512_test_epi16_mask(old, lanes.sign_bit);
        step = _mm512_mask_sub_epi16(step, negative, zero, step);
        const __m512i ordered = lanes.to_ordered(old);
        const __m512i next = lanes.from_ordered(_mm512_mask_add_epi16(ordered, moved, ordered, step));
        _mm512_mask_storeu_epi16(now + 2 * i, active, next);
      }
    };
    const bool has_exceptions =
        exceptions.next_index < exceptions.count && exceptions.ranks[exceptions.next_index] < rank_end;
    if (has_exceptions) {
      Packed<T> old_values;  // a copy, because `now` may be the same memory
      std::memcpy(old_values, old_elements, count * sizeof(T));
      model.has_low_bits ? apply_symbols(/*has_low_bits=*/true) : apply_symbols(/*has_low_bits=*/false);
      apply_exceptions(old_values, symbols, first_rank, rank_end, model.is_float, exceptions, source, now);
    } else {
      model.has_low_bits ? apply_symbols(/*has_low_bits=*/true) : apply_symbols(/*has_low_bits=*/false);
    }
    source.changed += changed;
    return;
  }
#endif
  for (i = 0; i < count; ++i)
    symbols[i] = static_cast<std::uint8_t>(
        model.range_of[class_of(read_element<T>(old_elements + i * sizeof(T)), model)] << kSymbolBits);
  read_small(source.small, count, model.dense_range_count, *source.small_tables, symbols);
  Packed<T> old_values;
  std::memcpy(old_values, old_elements, count * sizeof(T));
  for (i = 0; i < count; ++i) {
    const unsigned symbol = symbols[i] & (kSmallSymbols - 1), low = model.low_bits[symbols[i] >> kSymbolBits];
    T value = old_values[i];
    if (symbol != kSmallUnchanged) {
      std::uint64_t step = (std::uint64_t{symbol} - kZeroStep) << low;
      if (low > 0) step |= get_bits(source.low, low);
      value = apply_step(old_values[i], step, model.is_float);
      changed += value != old_values[i];
    }
    std::memcpy(now + i * sizeof(T), &value, sizeof(T));
  }
  apply_exceptions(old_values, symbols, first_rank, rank_end, model.is_float, exceptions, source, now);
  source.changed += changed;
}

// Kernels::resolve: copies the block, and applies the changes of each range.
template <class T>
void resolve(const std::byte* old, std::uint32_t count, const BlockModel& model, SortedBlock& sorted,
             BlockSource& source, std::byte* now) {
  // Prefetches a later block in small parts between the steps, because one large prefetch would stall.
  const std::uint32_t step_bytes = count * sizeof(T) / (model.range_count - model.dense_range_count + 1);
  const std::byte* old_ahead = old + kPrefetchBytes;
  const std::byte* now_ahead = now + kPrefetchBytes;
  const auto prefetch_some = [&] {
    for (const std::byte* end = old_ahead + step_bytes; old_ahead < end; old_ahead += 64, now_ahead += 64) {
      __builtin_prefetch(old_ahead);
      if (source.has_output_per_block) __builtin_prefetch(now_ahead, /*for writing=*/1);
    }
  };
  const bool is_float = model.is_float, all_dense = model.dense_range_count == model.range_count;
  if (all_dense && source.small_tables) {
    if constexpr (sizeof(T) != 2) prefetch_some();  // the vector code for 16-bit elements prefetches by itself
    return resolve_dense<T, /*kPrefetches=*/true>(old, count, model, source, now);
  }
  std::memcpy(now, old, count * sizeof(T));
  sort<T>(old, count, model, sorted);
  prefetch_some();
  const std::uint32_t words = (count + 31) / 32;
  for (std::uint32_t range = model.dense_range_count; range < model.range_count; ++range) {
    GapSource& gap = source.gap[range];
    const std::uint32_t entry = range - model.dense_range_count + 1;
    const std::uint64_t first_rank = gap.elements_seen, rank_end = first_rank + sorted.count[entry];
    gap.elements_seen = rank_end;
    std::uint64_t k = gap.next_index;
    prefetch_some();
    for (; k < gap.count && gap.ranks[k] < rank_end; ++k) {
      const auto rank = static_cast<std::uint32_t>(gap.ranks[k] - first_rank);
      const std::uint32_t word = word_of(sorted.before[entry], words, rank);
      const std::uint32_t index = word * 32 + select_bit(sorted.mask[entry][word], rank - sorted.before[entry][word]);
      const T value = apply_step(read_element<T>(old + index * sizeof(T)), gap.steps[k], is_float);
      std::memcpy(now + index * sizeof(T), &value, sizeof(T));
    }
    source.changed += k - gap.next_index;
    gap.next_index = k;
  }
  const std::uint32_t dense_count = sorted.count[0];
  if (model.dense_range_count == 0 || dense_count == 0) return;
  Packed<T> values;
  if (all_dense)
    std::memcpy(values, old, count * sizeof(T));
  else
    pack<T>(old, sorted.mask[0], words, dense_count, reinterpret_cast<std::byte*>(values));
  if (source.small_tables) {
    resolve_dense<T, /*kPrefetches=*/false>(reinterpret_cast<const std::byte*>(values), dense_count, model, source,
                                            reinterpret_cast<std::byte*>(values));
  } else {
    Packed<std::uint16_t> symbols;
    read_dense(values, dense_count, model, source, symbols);
    apply_steps(values, dense_count, symbols, model, source);
  }
  if (all_dense)
    std::memcpy(now, values, count * sizeof(T));
  else
    unpack(values, sorted.mask[0], words, dense_count, now);
}

}  // namespace
}  // namespace echoline::delta
