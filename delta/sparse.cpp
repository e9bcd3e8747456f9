#include "delta/sparse.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "delta/block.hpp"
#include "delta/rans.hpp"
#include "delta/token.hpp"

namespace echoline::delta {
namespace {

constexpr std::uint32_t kBlockElements = 4096;  // what blocks should have about; FORMAT.md allows up to 8192
constexpr unsigned kSymbolUntouched = 0;
constexpr unsigned kSymbolUnshifted = 8;  // block symbol s shifts the classes by s - 8 exponents
constexpr unsigned kBlockSymbols = 16;

constexpr std::size_t kLineBytes = 64;
constexpr std::size_t kPrefetchBytes = 8192;

constexpr unsigned kGapTables = 24;
constexpr unsigned kGapEscape = 31;  // stands for 31 and another token
constexpr unsigned kGapShiftMax = 31;

Error corrupt(std::string_view why) { return fail(Code::kCorrupt, "decode patch", "{}", why); }

// ---- the parts of the format that are constants ----

// Where the exponent lies in a type's bits.
struct ExponentField {
  unsigned shift = 0;
  std::uint32_t mask = 0;  // zero: not a float, all elements are of class 0
};
ExponentField exponent_field(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3:
      return {3, 0xf};
    case DType::kF8E5M2:
      return {2, 0x1f};
    case DType::kF16:
      return {10, 0x1f};
    case DType::kBF16:
      return {7, 0xff};
    case DType::kF32:
      return {23, 0xff};
    case DType::kF64:
      return {52, 0x7ff};
    default:
      return {};
  }
}

// Tables of gap tokens: geometric distributions whose means m are 2^((i + 1/2) / 8); the numbers are 65536 m / (1 + m).
const std::array<Frequencies, kGapTables>& gap_frequencies() {
  static const auto tables = [] {
    constexpr std::array<std::uint64_t, kGapTables> kRatio = {33478, 34894, 36303, 37699, 39076, 40431, 41759, 43055,
                                                              44317, 45541, 46724, 47864, 48960, 50010, 51013, 51969,
                                                              52877, 53739, 54554, 55323, 56048, 56730, 57370, 57969};
    std::array<Frequencies, kGapTables> made;
    for (unsigned i = 0; i < kGapTables; ++i) {
      std::array<std::uint64_t, kGapEscape + 1> weights;
      weights[0] = 1u << 28;
      for (unsigned t = 1; t <= kGapEscape; ++t) weights[t] = std::max<std::uint64_t>(weights[t - 1] * kRatio[i] >> 16, 1);
      weights[kGapEscape] = (weights[kGapEscape] << 16) / (65536 - kRatio[i]);
      made[i] = normalise(weights);
    }
    return made;
  }();
  return tables;
}

// Blocks end at multiples of the block length, counted over the tensor, and at the ends of leaves. Calls
// f(first element, count) for each block of the leaf that starts at element `from` of the segment.
struct BlockGrid {
  std::uint32_t length = kBlockElements;
  std::uint32_t first = kBlockElements;  // elements of the segment's first block
};
template <class F>
bool for_each_block(const BlockGrid& grid, std::uint64_t from, std::uint64_t to, F&& f) {
  while (from < to) {
    const std::uint64_t end =
        from < grid.first ? grid.first : grid.first + ((from - grid.first) / grid.length + 1) * grid.length;
    const std::uint64_t stop = std::min(end, to);
    if (!f(from, static_cast<std::uint32_t>(stop - from))) return false;
    from = stop;
  }
  return true;
}

// Whole rows where they are of a useful size.
BlockGrid choose_grid(const SegmentPlace& place) {
  BlockGrid grid;
  const std::uint64_t row = place.row_elements;
  if (row > 0 && row < kBlockElements) {
    grid.length = static_cast<std::uint32_t>(row >= 1024 ? row : kBlockElements / row * row);
  } else if (row >= kBlockElements && row < 4ull * kBlockElementsMax) {
    const std::uint64_t parts = (row + kBlockElementsMax / 2) / kBlockElements;
    grid.length = static_cast<std::uint32_t>((row + parts - 1) / std::max<std::uint64_t>(parts, 1));
  }
  grid.first = static_cast<std::uint32_t>(grid.length - place.first_element % grid.length);
  return grid;
}

BlockModel shifted(const BlockModel& model, int shift) {
  BlockModel m = model;
  const std::int64_t base = static_cast<std::int64_t>(model.base) + shift;
  m.base = static_cast<std::uint32_t>(std::max<std::int64_t>(base, 0));
  return m;
}

// ---- choosing a model from a sample ----

constexpr unsigned kSampledTokens = 24;  // the last one stands for all above

struct ClassSample {
  double elements = 0;
  double changed = 0;
  std::array<double, kSampledTokens> tokens{};
};

double entropy_bits(double part, double whole) { return part > 0 ? part * std::log2(whole / part) : 0; }

// Bits to code the steps of the changes.
double step_bits(const ClassSample& c) {
  double bits = 0;
  for (const double n : c.tokens) bits += entropy_bits(n, c.changed);
  return bits;
}
double flag_bits(const ClassSample& c) {
  return entropy_bits(c.changed, c.elements) + entropy_bits(c.elements - c.changed, c.elements);
}
double table_bits(const ClassSample& c) {
  double symbols = 1;
  for (const double n : c.tokens) symbols += n > 0;
  return 12 + 10 * symbols;
}

ClassSample joined(const ClassSample& a, const ClassSample& b) {
  ClassSample c{a.elements + b.elements, a.changed + b.changed, {}};
  for (unsigned t = 0; t < kSampledTokens; ++t) c.tokens[t] = a.tokens[t] + b.tokens[t];
  return c;
}

struct Model {
  BlockModel block;
  std::array<double, kRangesMax + 1> density{};  // expected part of changed elements in each entry of a SortedBlock
  std::array<double, kClasses> class_density{};
};

// Adjacent classes share a range when that saves more in tables than it loses in precision.
struct RangeDraft {
  ClassSample sample;
  unsigned bound = 0;
  bool dense = false;
  double cost = 0;  // bits for the whole segment
};
double draft_cost(const ClassSample& sample, double scale) {
  return scale * (flag_bits(sample) + step_bits(sample)) + (sample.elements > 0 ? 40 + table_bits(sample) : 0);
}

Model fit_model(const std::array<ClassSample, kClasses>& classes, std::uint32_t base, double elements, double scale) {
  constexpr double kDenseFrom = 1.0 / 7;
  // A range costs time for every element, wherever its changes are; what that is worth in bits.
  const double gap_range_bits = elements / 4096;
  constexpr double kDenseRangeBits = 50;
  Model model;
  model.block.base = base;
  unsigned dense_classes = 0;
  for (unsigned c = 0; c < kClasses; ++c) {
    const ClassSample& s = classes[c];
    model.class_density[c] = (s.changed + 0.02) / (s.elements + 1);
    if (s.elements > 0 && s.changed >= kDenseFrom * s.elements && s.changed >= 2) dense_classes = c + 1;
  }
  std::vector<RangeDraft> drafts;
  for (unsigned c = 0; c < kClasses; ++c)
    drafts.push_back({classes[c], c + 1, c < dense_classes, draft_cost(classes[c], scale)});
  while (drafts.size() > 1) {
    std::size_t best = drafts.size();
    double best_gain = 0;
    RangeDraft best_joined;
    for (std::size_t i = 0; i + 1 < drafts.size(); ++i) {
      if (drafts[i].dense != drafts[i + 1].dense) continue;
      RangeDraft both{{}, drafts[i + 1].bound, drafts[i].dense, 0};
      if (drafts[i].sample.elements == 0 || drafts[i + 1].sample.elements == 0) {
        both.sample = drafts[i].sample.elements == 0 ? drafts[i + 1].sample : drafts[i].sample;
        both.cost = drafts[i].cost + drafts[i + 1].cost;
      } else {
        both.sample = joined(drafts[i].sample, drafts[i + 1].sample);
        both.cost = draft_cost(both.sample, scale);
      }
      const double gain =
          drafts[i].cost + drafts[i + 1].cost - both.cost + (drafts[i].dense ? kDenseRangeBits : gap_range_bits);
      if (best == drafts.size() || gain > best_gain) {
        best = i;
        best_gain = gain;
        best_joined = both;
      }
    }
    if (best == drafts.size() || (best_gain <= 0 && drafts.size() <= kRangesMax)) break;
    drafts[best] = best_joined;
    drafts.erase(drafts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  model.block.ranges = static_cast<std::uint32_t>(drafts.size());
  unsigned c = 0;
  ClassSample dense;
  for (unsigned r = 0; r < drafts.size(); ++r) {
    model.block.dense += drafts[r].dense;
    if (drafts[r].dense) dense = joined(dense, drafts[r].sample);
    model.block.bound[r] = static_cast<std::uint8_t>(drafts[r].bound);
    for (; c < drafts[r].bound; ++c) model.block.range_of[c] = static_cast<std::uint8_t>(r);
    const ClassSample& s = drafts[r].dense ? dense : drafts[r].sample;
    model.density[r + 1 - model.block.dense] = (s.changed + 0.02) / (s.elements + 1);
  }
  return model;
}

// Looks at runs of elements spread evenly over the segment.
template <class T>
Model sample_model(ByteSpan prev, ByteSpan cur, DType dtype) {
  constexpr std::size_t kRun = 32, kSampled = 32 * 1024;
  const ExponentField field = exponent_field(dtype);
  const bool is_float = field.mask != 0;
  const std::size_t count = cur.size() / sizeof(T);
  const std::size_t stride = std::max<std::size_t>(count / kSampled, 1) * kRun;
  std::vector<ClassSample> by_exponent(field.mask + 1);
  std::size_t sampled = 0;
  for (std::size_t at = 0; at < count; at += stride) {
    const std::size_t end = std::min(at + kRun, count);
    sampled += end - at;
    __builtin_prefetch(prev.data() + (at + 12 * stride) * sizeof(T));
    __builtin_prefetch(cur.data() + (at + 12 * stride) * sizeof(T));
    for (std::size_t i = at; i < end; ++i) {
      const T old = load<T>(prev.data() + i * sizeof(T)), now = load<T>(cur.data() + i * sizeof(T));
      ClassSample& s = by_exponent[static_cast<std::size_t>(old >> field.shift) & field.mask];
      s.elements += 1;
      if (old == now) continue;
      std::uint64_t magnitude = 0;
      s.changed += 1;
      s.tokens[std::min(change_token(old, now, is_float, magnitude), kSampledTokens - 1)] += 1;
    }
  }
  std::size_t highest = by_exponent.size() - 1;
  while (highest > 0 && by_exponent[highest].elements == 0) --highest;
  const std::size_t base = highest >= kClasses ? highest - (kClasses - 1) : 0;
  std::array<ClassSample, kClasses> classes{};
  for (std::size_t e = 0; e < by_exponent.size(); ++e) {
    if (by_exponent[e].elements == 0) continue;
    ClassSample& c = classes[std::min<std::size_t>(e > base ? e - base : 0, kClasses - 1)];
    c = joined(c, by_exponent[e]);
  }
  Model model = fit_model(classes, static_cast<std::uint32_t>(base), static_cast<double>(count),
                          static_cast<double>(count) / static_cast<double>(sampled));
  model.block.exponent_shift = field.shift;
  model.block.exponent_mask = field.mask;
  model.block.is_float = is_float;
  return model;
}

// ---- gaps ----

struct GapCode {
  unsigned shift = 0;
  unsigned table = 0;
};

GapCode choose_gap_code(double changed, double elements) {
  const double stay = std::clamp(1 - changed / std::max(elements, 1.0), 0.0, 1 - 1e-10);
  GapCode code;
  double ratio = stay;
  while (ratio / (1 - ratio) >= 8 && code.shift < kGapShiftMax) {
    ++code.shift;
    ratio *= ratio;
  }
  const double mean = std::max(ratio / (1 - ratio), 1.0);
  code.table = static_cast<unsigned>(std::clamp(8 * std::log2(mean), 0.0, kGapTables - 1.0));
  return code;
}

}  // namespace

// ---- encoding ----

struct SparseEncoder::State {
  // The changes of a range; kept between calls for their memory.
  struct Range {
    std::vector<std::uint32_t> gaps;
    std::vector<std::uint16_t> tokens;
    std::vector<std::uint64_t> extras;
  };
  std::array<Range, kRangesMax> ranges;
  std::vector<std::uint16_t> dense, block_symbols;
  std::vector<std::uint64_t> dense_extras;
  BlockSink sink;
  SortedBlock sorted;
  std::uint32_t changed_bits[kBlockWordsMax];

  template <class V>
  static auto* with_room(V& v, std::size_t used, std::size_t more) {
    if (v.size() < used + more) v.resize(std::max(2 * v.size(), used + more + 4096));
    return v.data();
  }
  void make_room(const BlockModel& model, std::uint32_t elements) {
    elements += 32;  // vectors may be stored whole
    for (std::uint32_t r = model.dense; r < model.ranges; ++r) {
      GapSink& g = sink.gap[r];
      g.gaps = with_room(ranges[r].gaps, g.count, elements);
      g.tokens = with_room(ranges[r].tokens, g.count, elements);
      g.extras = with_room(ranges[r].extras, g.extra_count, elements);
    }
    if (model.dense == 0) return;
    sink.dense = with_room(dense, sink.dense_count, elements);
    sink.dense_extras = with_room(dense_extras, sink.dense_extra_count, elements);
  }
  unsigned choose_symbol(const Kernels& k, unsigned width, const std::byte* prev, std::uint32_t count,
                         std::uint32_t changed, const Model& model, unsigned previous);
  std::uint64_t write(const Model& model, const BlockGrid& grid, ByteVector& out);
};

namespace {

// How well a shift of the classes explains the changes of a block: log2 of the likelihood.
struct BlockCounts {
  std::array<std::uint32_t, 64> elements{}, changed{};  // by class of the model shifted down by 16, without its ends
};
double likelihood(const BlockCounts& counts, const Model& model, int shift) {
  double bits = 0;
  for (int i = 0; i < 64; ++i) {
    if (counts.elements[static_cast<std::size_t>(i)] == 0) continue;
    const auto c = static_cast<std::size_t>(std::clamp(i - 16 - shift, 0, static_cast<int>(kClasses) - 1));
    const double p = std::clamp(model.class_density[c], 1e-7, 1 - 1e-7);
    const double n = counts.elements[static_cast<std::size_t>(i)], k = counts.changed[static_cast<std::size_t>(i)];
    bits += k * std::log2(p) + (n - k) * std::log2(1 - p);
  }
  return bits;
}

template <class T>
BlockCounts count_classes(const std::byte* prev, std::uint32_t count, const BlockModel& model,
                          const std::uint32_t* changed) {
  BlockCounts counts;
  for (std::uint32_t i = 0; i < count; ++i) {
    const auto exponent =
        static_cast<std::int64_t>((load<T>(prev + i * sizeof(T)) >> model.exponent_shift) & model.exponent_mask);
    const auto at = static_cast<std::size_t>(std::clamp<std::int64_t>(exponent - model.base + 16, 0, 63));
    ++counts.elements[at];
    counts.changed[at] += changed[i / 32] >> (i % 32) & 1;
  }
  return counts;
}

}  // namespace

// The block's symbol; `sorted` is that of the chosen model afterwards, unless the block is untouched.
unsigned SparseEncoder::State::choose_symbol(const Kernels& k, unsigned width, const std::byte* prev,
                                             std::uint32_t count, std::uint32_t changed, const Model& model,
                                             unsigned previous) {
  const auto sort = [&](unsigned symbol) {
    const int shift = static_cast<int>(symbol) - static_cast<int>(kSymbolUnshifted);
    k.sort[width](prev, count, shifted(model.block, shift), sorted);
  };
  sort(previous);
  double e = 0;  // changes to be expected
  for (std::uint32_t i = 0; i <= model.block.ranges - model.block.dense; ++i) e += sorted.count[i] * model.density[i];
  if (changed == 0 && (e > 3 || e < 0.05)) return kSymbolUntouched;
  if (model.block.exponent_mask == 0 || std::abs(changed - e) <= 4 + 3 * std::sqrt(e)) return previous;
  const BlockCounts counts = width == 0   ? count_classes<std::uint8_t>(prev, count, model.block, changed_bits)
                             : width == 1 ? count_classes<std::uint16_t>(prev, count, model.block, changed_bits)
                             : width == 2 ? count_classes<std::uint32_t>(prev, count, model.block, changed_bits)
                                          : count_classes<std::uint64_t>(prev, count, model.block, changed_bits);
  constexpr double kSwitchBits = 4;
  unsigned best = previous;
  double best_bits =
      likelihood(counts, model, static_cast<int>(previous) - static_cast<int>(kSymbolUnshifted)) + kSwitchBits;
  for (unsigned symbol = 1; symbol < kBlockSymbols; ++symbol) {
    const double bits = likelihood(counts, model, static_cast<int>(symbol) - static_cast<int>(kSymbolUnshifted));
    if (bits > best_bits) {
      best = symbol;
      best_bits = bits;
    }
  }
  if (best != previous) sort(best);
  return best;
}

// Gives the entropy of what it wrote, in bits.
std::uint64_t SparseEncoder::State::write(const Model& model, const BlockGrid& grid, ByteVector& out) {
  const BlockModel& block = model.block;
  BitWriter bits;
  std::vector<RansRun> runs;
  std::vector<std::vector<std::uint16_t>> gap_tokens(kRangesMax);
  std::vector<Frequencies> tables;  // of all runs; reserved, because runs point into it
  tables.reserve(1 + 3 * kRangesMax);
  const auto add_table = [&](Frequencies table) -> std::span<const Frequencies> {
    tables.push_back(std::move(table));
    return std::span(tables).last(1);
  };
  const auto count_symbols = [](std::span<const std::uint16_t> symbols) {
    std::vector<std::uint64_t> counts(kTokensMax);
    for (const std::uint16_t s : symbols) ++counts[s];
    return counts;
  };
  double bound = 0;
  const auto add_bound = [&](std::span<const std::uint64_t> counts) {
    double whole = 0;
    for (const std::uint64_t n : counts) whole += static_cast<double>(n);
    for (const std::uint64_t n : counts) bound += entropy_bits(static_cast<double>(n), whole);
  };
  const auto put_extras = [&](std::span<const std::uint16_t> tokens, const std::uint64_t* extras,
                              unsigned token_offset) {
    for (const std::uint16_t entry : tokens) {
      const unsigned t = entry & ((1u << kTokenBits) - 1);
      if (t < token_offset + 16) continue;
      const unsigned open = extra_bits(t - token_offset);
      const std::uint64_t magnitude = *extras++;
      bound += open;
      if (open > 32) bits.put(magnitude >> 32, open - 32);
      bits.put(magnitude, std::min(open, 32u));
    }
  };

  bits.put(grid.length - 1, 13);
  bits.put(grid.first - 1, 13);
  bits.put(block.base, 11);
  bits.put(block.ranges - 1, 4);
  bits.put(block.dense, 5);
  for (std::uint32_t r = 0; r + 1 < block.ranges; ++r) bits.put(block.bound[r], 5);
  const auto symbol_table = add_table(normalise(count_symbols(block_symbols)));
  write_frequencies(symbol_table.front(), bits);
  runs.push_back({block_symbols, symbol_table});

  // Headers first, so that a reader has all tables before the first symbol.
  std::array<GapCode, kRangesMax> codes;
  for (std::uint32_t r = block.dense; r < block.ranges; ++r) {
    const GapSink& g = sink.gap[r];
    bits.put_number(g.count);
    if (g.count == 0) continue;
    codes[r] = choose_gap_code(static_cast<double>(g.count), static_cast<double>(g.seen));
    bits.put(codes[r].shift, 5);
    bits.put(codes[r].table, 5);
    std::vector<std::uint16_t>& tokens = gap_tokens[r];
    tokens.reserve(g.count + g.count / 16);
    for (std::uint32_t i = 0; i < g.count; ++i) {
      std::uint32_t high = g.gaps[i] >> codes[r].shift;
      for (; high >= kGapEscape; high -= kGapEscape) tokens.push_back(kGapEscape);
      tokens.push_back(static_cast<std::uint16_t>(high));
    }
    const std::span<const std::uint16_t> steps(g.tokens, g.count);
    runs.push_back({tokens, std::span(gap_frequencies()).subspan(codes[r].table, 1)});
    const std::vector<std::uint64_t> step_counts = count_symbols(steps);
    add_bound(step_counts);
    add_bound(std::array<std::uint64_t, 2>{g.count, g.seen - g.count});
    const auto step_table = add_table(normalise(step_counts));
    write_frequencies(step_table.front(), bits);
    runs.push_back({steps, step_table});
  }
  const std::span<const std::uint16_t> dense_symbols(sink.dense, sink.dense_count);
  if (block.dense > 0) {
    std::vector<std::uint64_t> counts(static_cast<std::size_t>(block.dense) << kTokenBits);
    for (const std::uint16_t s : dense_symbols) ++counts[s];
    const std::size_t first = tables.size();
    for (std::uint32_t r = 0; r < block.dense; ++r) {
      const auto of_range = std::span(counts).subspan(static_cast<std::size_t>(r) << kTokenBits, kTokensMax);
      add_bound(of_range);
      const auto table = add_table(normalise(of_range));
      bits.put(!table.front().empty(), 1);
      if (!table.front().empty()) write_frequencies(table.front(), bits);
    }
    runs.push_back({dense_symbols, std::span(tables).subspan(first)});
  }
  for (std::uint32_t r = block.dense; r < block.ranges; ++r) {
    const GapSink& g = sink.gap[r];
    if (codes[r].shift > 0)
      for (std::uint32_t i = 0; i < g.count; ++i) bits.put(g.gaps[i], codes[r].shift);
    if (g.extra_count > 0) put_extras({g.tokens, g.count}, g.extras, 0);
  }
  if (sink.dense_extra_count > 0) put_extras(dense_symbols, sink.dense_extras, 1);

  const ByteVector bit_bytes = std::move(bits).finish();
  put_varint(out, bit_bytes.size());
  put_bytes(out, bit_bytes);
  rans_write(runs, out);
  return static_cast<std::uint64_t>(bound);
}

SparseEncoder::SparseEncoder() : state_(std::make_unique<State>()) {}
SparseEncoder::~SparseEncoder() = default;

SparseCount SparseEncoder::encode(ByteSpan prev, ByteSpan cur, const SegmentPlace& place, Digest* prev_leaves,
                                  Digest* cur_leaves, ByteVector& out) {
  const std::size_t size = dtype_bytes(place.dtype);
  const unsigned width = width_index(size);
  const Kernels& k = kernels();
  State& s = *state_;
  const Model model = width == 0   ? sample_model<std::uint8_t>(prev, cur, place.dtype)
                      : width == 1 ? sample_model<std::uint16_t>(prev, cur, place.dtype)
                      : width == 2 ? sample_model<std::uint32_t>(prev, cur, place.dtype)
                                   : sample_model<std::uint64_t>(prev, cur, place.dtype);
  const BlockGrid grid = choose_grid(place);
  s.sink = {};
  s.block_symbols.clear();
  unsigned symbol = kSymbolUnshifted;
  std::uint64_t total = 0;
  for (std::size_t leaf = 0; leaf < cur.size(); leaf += kLeafBytes) {
    const std::size_t leaf_end = std::min(leaf + kLeafBytes, cur.size());
    if (prev_leaves) *prev_leaves++ = digest_bytes(prev.subspan(leaf, leaf_end - leaf));
    if (cur_leaves) *cur_leaves++ = digest_bytes(cur.subspan(leaf, leaf_end - leaf));
    for_each_block(grid, leaf / size, leaf_end / size, [&](std::uint64_t first, std::uint32_t count) {
      const std::byte* old = prev.data() + first * size;
      const std::byte* now = cur.data() + first * size;
      // The old side is read here first; the new one was just hashed. Prefetching beyond the end is harmless.
      for (std::size_t at = 0; at < count * size; at += kLineBytes) __builtin_prefetch(old + kPrefetchBytes + at);
      const std::uint32_t changed = k.diff[width](old, now, count, s.changed_bits);
      total += changed;
      const unsigned chosen = s.choose_symbol(k, width, old, count, changed, model, symbol);
      s.block_symbols.push_back(static_cast<std::uint16_t>(chosen));
      if (chosen == kSymbolUntouched) return true;
      symbol = chosen;
      s.make_room(model.block, count);
      k.collect[width](old, now, count,
                       shifted(model.block, static_cast<int>(symbol) - static_cast<int>(kSymbolUnshifted)), s.sorted,
                       s.changed_bits, s.sink);
      return true;
    });
  }
  return {total, total > 0 ? s.write(model, grid, out) : 0};
}

// ---- decoding ----

struct SparseDecoder::State {
  BlockGrid grid;
  BlockModel model;
  BlockSource source;
  SortedBlock sorted;
  std::vector<std::uint8_t> block_symbols;
  std::array<std::vector<std::uint64_t>, kRangesMax> ranks, steps;
  std::array<std::array<RansEntry, kRansSlots>, kRangesMax> dense_tables;
  std::array<RansEntry, kRansSlots> gap_table, step_table;

  Status parse_model(BitReader& bits, DType dtype);
  Status parse(ByteSpan coded, std::uint64_t changed, std::uint64_t elements, DType dtype);
  Status decode_gaps(BitReader& bits, const GapCode& code, std::uint64_t elements, std::uint64_t count,
                     std::uint64_t* ranks, std::uint64_t* steps);
};

Status SparseDecoder::State::parse_model(BitReader& bits, DType dtype) {
  const ExponentField field = exponent_field(dtype);
  grid.length = static_cast<std::uint32_t>(get_bits(bits, 13)) + 1;
  grid.first = static_cast<std::uint32_t>(get_bits(bits, 13)) + 1;
  model = {};
  model.exponent_shift = field.shift;
  model.exponent_mask = field.mask;
  model.is_float = field.mask != 0;
  model.base = static_cast<std::uint32_t>(get_bits(bits, 11));
  model.ranges = static_cast<std::uint32_t>(get_bits(bits, 4)) + 1;
  model.dense = static_cast<std::uint32_t>(get_bits(bits, 5));
  if (model.dense > model.ranges || grid.first > grid.length) return corrupt("a segment's model is malformed");
  unsigned c = 0;
  for (std::uint32_t r = 0; r < model.ranges; ++r) {
    const auto bound = r + 1 < model.ranges ? static_cast<unsigned>(get_bits(bits, 5)) : kClasses;
    if (bound <= c) return corrupt("a segment's ranges are not in order");
    model.bound[r] = static_cast<std::uint8_t>(bound);
    for (; c < bound; ++c) model.range_of[c] = static_cast<std::uint8_t>(r);
  }
  return ok();
}

namespace {

std::uint64_t get_extra(BitReader& bits, unsigned token) {
  const unsigned count = extra_bits(token);
  const std::uint64_t high = count > 32 ? get_bits(bits, count - 32) << 32 : 0;
  return high | get_bits(bits, std::min(count, 32u));
}

}  // namespace

// Gaps and steps of one range, which has `elements` elements at most.
Status SparseDecoder::State::decode_gaps(BitReader& bits, const GapCode& code, std::uint64_t elements,
                                         std::uint64_t count, std::uint64_t* ranks, std::uint64_t* steps) {
  RansReader rans = source.dense;
  rans.turn = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    unsigned token = rans_read(rans, gap_table.data());
    std::uint64_t high = token;
    for (; token == kGapEscape && high <= elements; high += token) token = rans_read(rans, gap_table.data());
    ranks[i] = high;
  }
  rans.turn = 0;
  for (std::uint64_t i = 0; i < count; ++i) steps[i] = rans_read(rans, step_table.data());
  source.dense = rans;
  std::uint64_t next = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t high = std::min(ranks[i], elements);  // keeps the sum below from wrapping around
    ranks[i] = next + (high << code.shift | get_bits(bits, code.shift));
    next = ranks[i] + 1;
    if (next > elements) return corrupt("a gap leaves its segment");
  }
  for (std::uint64_t i = 0; i < count; ++i) {
    const auto token = static_cast<unsigned>(steps[i]);
    steps[i] = token_step(token, token < 16 ? 0 : get_extra(bits, token));
  }
  return ok();
}

// Everything that does not need the old content.
Status SparseDecoder::State::parse(ByteSpan coded, std::uint64_t changed, std::uint64_t elements, DType dtype) {
  Reader reader(coded);
  const ByteSpan bit_bytes = reader.bytes(reader.varint());
  source = {};
  if (reader.failed() || !rans_open(reader.rest(), source.dense)) return corrupt("the bytes end within a segment");
  BitReader bits{bit_bytes.data(), bit_bytes.size(), 0};
  ECHO_TRY(parse_model(bits, dtype));
  const Frequencies symbols = read_frequencies(bits, kBlockSymbols);
  if (symbols.empty()) return corrupt("a segment's table of blocks is malformed");
  std::array<GapCode, kRangesMax> codes;
  std::array<Frequencies, kRangesMax> step_frequencies;
  std::uint64_t gaps = 0;
  for (std::uint32_t r = model.dense; r < model.ranges; ++r) {
    const std::uint64_t count = get_number(bits);
    if (exhausted(bits) || count > changed - gaps) return corrupt("a segment declares more changes than it has");
    gaps += count;
    source.gap[r].count = count;
    if (count == 0) continue;
    codes[r].shift = static_cast<unsigned>(get_bits(bits, 5));
    codes[r].table = static_cast<unsigned>(get_bits(bits, 5));
    step_frequencies[r] = read_frequencies(bits, kStepTokensMax);
    if (codes[r].table >= kGapTables || step_frequencies[r].empty())
      return corrupt("a segment's table of gaps is malformed");
  }
  for (std::uint32_t r = 0; r < model.dense; ++r) {
    const bool given = get_bits(bits, 1) != 0;
    const Frequencies table = given ? read_frequencies(bits, kTokensMax) : Frequencies{kRansSlots};
    if (table.empty()) return corrupt("a segment's table of steps is malformed");
    rans_table(table, dense_tables[r].data());
  }
  source.dense_tables = dense_tables.front().data();
  rans_table(symbols, gap_table.data());
  block_symbols.clear();
  const std::size_t leaf_elements = kLeafBytes / dtype_bytes(dtype);
  for (std::uint64_t leaf = 0; leaf < elements; leaf += leaf_elements)
    for_each_block(grid, leaf, std::min<std::uint64_t>(leaf + leaf_elements, elements),
                   [&](std::uint64_t, std::uint32_t) {
                     block_symbols.push_back(static_cast<std::uint8_t>(rans_read(source.dense, gap_table.data())));
                     return true;
                   });
  for (std::uint32_t r = model.dense; r < model.ranges; ++r) {
    GapSource& gap = source.gap[r];
    if (gap.count == 0) continue;
    if (ranks[r].size() < gap.count) ranks[r].resize(gap.count);
    if (steps[r].size() < gap.count) steps[r].resize(gap.count);
    gap.ranks = ranks[r].data();
    gap.steps = steps[r].data();
    rans_table(gap_frequencies()[codes[r].table], gap_table.data());
    rans_table(step_frequencies[r], step_table.data());
    ECHO_TRY(decode_gaps(bits, codes[r], elements, gap.count, ranks[r].data(), steps[r].data()));
  }
  if (exhausted(bits)) return corrupt("the bytes end within a segment's gaps");
  source.dense.turn = 0;
  source.bits = bits;
  return ok();
}

SparseDecoder::SparseDecoder() : state_(std::make_unique<State>()) {}
SparseDecoder::~SparseDecoder() = default;

Status SparseDecoder::decode(ByteSpan coded, std::uint64_t changed, ByteSpan old, DType dtype, Changes& out,
                             const LeafDone& leaf_done) {
  const std::size_t size = dtype_bytes(dtype);
  const unsigned width = width_index(size);
  const Kernels& k = kernels();
  State& s = *state_;
  ECHO_CHECK(changed <= old.size() / size);
  ECHO_TRY(s.parse(coded, changed, old.size() / size, dtype));
  if (out.positions.size() < changed + kSpareChanges) out.positions.resize(changed + kSpareChanges);
  if (out.values.size() < (changed + kSpareChanges) * size) out.values.resize((changed + kSpareChanges) * size);
  out.count = changed;
  s.source.positions = out.positions.data();
  s.source.values = out.values.data();
  s.source.capacity = changed;
  const std::uint8_t* symbol = s.block_symbols.data();
  bool fits = true;
  for (std::size_t leaf = 0; fits && leaf < old.size(); leaf += kLeafBytes) {
    const std::uint64_t before = s.source.count;
    const std::size_t leaf_end = std::min(leaf + kLeafBytes, old.size());
    fits = for_each_block(s.grid, leaf / size, leaf_end / size, [&](std::uint64_t first, std::uint32_t count) {
      const unsigned chosen = *symbol++;
      for (std::size_t at = 0; at < count * size; at += kLineBytes)
        __builtin_prefetch(old.data() + first * size + kPrefetchBytes + at);
      if (chosen == kSymbolUntouched) return true;
      const BlockModel model = shifted(s.model, static_cast<int>(chosen) - static_cast<int>(kSymbolUnshifted));
      return k.resolve[width](old.data() + first * size, count, model, static_cast<std::uint32_t>(first), s.sorted,
                              s.source);
    });
    if (fits) leaf_done(leaf, before, s.source.count);
  }
  fits = fits && s.source.count == changed && rans_at_end(s.source.dense) && !exhausted(s.source.bits);
  for (const GapSource& gap : s.source.gap) fits &= gap.at == gap.count;
  if (!fits) return corrupt("a segment does not fit the state it is applied to");
  return ok();
}

}  // namespace echoline::delta
