// Estimates from a sample of a segment how often its elements change, and by which steps, for each class of elements
// (those with the same exponent). Joins adjacent classes into ranges that share code tables: dense ranges, in which a
// symbol is coded for every element, and ranges in which the gaps between changes are coded. SparseEncoder calls it.
// Constants without a reason are compromises of size and time; FORMAT.md prescribes none of them.
#include "delta/sparse_model.hpp"

#include <algorithm>
#include <cstring>
#include <limits>

#include "delta/token.hpp"

namespace echoline::delta {
namespace {

constexpr std::uint32_t kBlockElements = 4096;  // approximate length of blocks; FORMAT.md allows up to 8192
// Elements. Rows (of the tensor's last dimension) at least this long get blocks of their own if the fraction of changes
// differs between rows.
constexpr std::uint32_t kRowBlockMin = 512;
// Approximate bits of a table of steps (its head, and each symbol), and of a range's fields outside the table.
constexpr double kTableHeadBits = 12, kTableSymbolBits = 10, kRangeHeadBits = 40;

// Number of step tokens (classes of steps of similar size, token.hpp) that a sample counts. The last also counts all
// greater ones.
constexpr unsigned kSampledTokens = 24;

// Counts of sampled elements, of one class or of several.
struct ClassSample {
  double elements = 0;
  double changed = 0;
  std::array<double, kSampledTokens> tokens{};
};

// Bits to code the steps (differences of new and old values) of the changes, without the bits that their tokens do not
// give.
double step_bits(const ClassSample& class_sample) {
  double bits = 0;
  for (const double count : class_sample.tokens) bits += entropy_bits(count, class_sample.changed);
  return bits;
}
// Bits to code which elements change.
double flag_bits(const ClassSample& class_sample) {
  return entropy_bits(class_sample.changed, class_sample.elements) +
         entropy_bits(class_sample.elements - class_sample.changed, class_sample.elements);
}
// Approximate bits of a table of steps. 1: it also has a symbol that the sample lacks, such as "unchanged".
double table_bits(const ClassSample& class_sample) {
  double symbol_count = 1;
  for (const double count : class_sample.tokens) symbol_count += count > 0;
  return kTableHeadBits + kTableSymbolBits * symbol_count;
}
// The fraction of changed elements. Smoothed as if one more element were sampled, of which 2 % changed, because changes
// may exist although the sample has none.
double smoothed_density(const ClassSample& class_sample) {
  return (class_sample.changed + 0.02) / (class_sample.elements + 1);
}

ClassSample joined(const ClassSample& a, const ClassSample& b) {
  ClassSample sum{.elements = a.elements + b.elements, .changed = a.changed + b.changed};
  for (unsigned token = 0; token < kSampledTokens; ++token) sum.tokens[token] = a.tokens[token] + b.tokens[token];
  return sum;
}

// A run of adjacent classes that may become a range.
struct RangeDraft {
  ClassSample sample;
  unsigned class_end = 0;  // exclusive
  bool dense = false;      // a symbol is coded for every element; false: the gaps between changes are coded
  double bits = 0;         // estimate for this range in the whole segment, not only in the sample
};
// Bits to code a range of the whole segment. `scale`: elements of the segment for each sampled one. A range without
// sampled elements counts as free.
double range_bits(const ClassSample& sample, double scale) {
  const double head_bits = sample.elements > 0 ? kRangeHeadBits + table_bits(sample) : 0;
  return scale * (flag_bits(sample) + step_bits(sample)) + head_bits;
}

// Joins the best pair of adjacent ranges while that saves more bits in tables than it loses in precision, or while
// there are more than kRangesMax. Then also joins dense ranges until at most kDenseRangesMax are left.
// `gap_range_bits`: the price of a gap-coded range beside the head and table that range_bits() counts.
void join_ranges(std::vector<RangeDraft>& drafts, double scale, double gap_range_bits) {
  constexpr double kDenseRangeBits = 50;         // the same price of a dense range
  constexpr std::ptrdiff_t kDenseRangesMax = 8;  // the kernels take twice as long to look up more tables
  struct Pair {
    RangeDraft joint;
    double saved_bits = 0;
    bool allowed = false;
  };
  // Drafts i and i + 1 as one range. If one of them has no sampled elements, the other's statistics stand for both.
  const auto pair_at = [&](std::size_t i) -> Pair {
    const RangeDraft &a = drafts[i], &b = drafts[i + 1];
    if (a.dense != b.dense) return {};  // a dense range is not joined with one coded by gaps
    RangeDraft joint{.sample = {}, .class_end = b.class_end, .dense = a.dense};
    if (a.sample.elements == 0 || b.sample.elements == 0) {
      joint.sample = a.sample.elements == 0 ? b.sample : a.sample;
      joint.bits = a.bits + b.bits;
    } else {
      joint.sample = joined(a.sample, b.sample);
      joint.bits = range_bits(joint.sample, scale);
    }
    const double overhead_bits = a.dense ? kDenseRangeBits : gap_range_bits;
    return {.joint = joint, .saved_bits = a.bits + b.bits - joint.bits + overhead_bits, .allowed = true};
  };
  std::vector<Pair> pairs;  // pairs[i]: drafts i and i + 1
  for (std::size_t i = 0; i + 1 < drafts.size(); ++i) pairs.push_back(pair_at(i));
  std::ptrdiff_t dense_ranges = std::ranges::count_if(drafts, &RangeDraft::dense);
  while (!pairs.empty()) {
    constexpr bool kAnyPair = false, kDensePair = true;
    const auto best_pair = [&](bool dense_only) {
      return std::ranges::max_element(pairs, {}, [&](const Pair& pair) {
        const bool is_eligible = pair.allowed && (pair.joint.dense || !dense_only);
        return is_eligible ? pair.saved_bits : -std::numeric_limits<double>::infinity();
      });
    };
    auto best = best_pair(kAnyPair);
    if (!best->allowed) break;
    if (best->saved_bits <= 0 && drafts.size() <= kRangesMax) {  // joining no longer saves bits and is not needed
      if (dense_ranges <= kDenseRangesMax) break;
      best = best_pair(kDensePair);
    }
    if (best->joint.dense) --dense_ranges;
    const auto i = static_cast<std::size_t>(best - pairs.begin());
    drafts[i] = best->joint;
    drafts.erase(drafts.begin() + static_cast<std::ptrdiff_t>(i) + 1);
    pairs.erase(best);
    // Only the neighbouring pairs change.
    if (i > 0) pairs[i - 1] = pair_at(i - 1);
    if (i < pairs.size()) pairs[i] = pair_at(i);
  }
}

// `base`: the exponent of class 0. `elements`: of the segment, `scale` times as many as the sample has.
SparseModel fit_model(const std::array<ClassSample, kClasses>& classes, std::uint32_t base, double elements,
                      double scale) {
  constexpr double kDenseDensityMin = 1.0 / 32;  // a class with this fraction of changes is dense
  // A gap-coded range costs time for every element of the segment. This is its price in bits: one for 4096 elements.
  const double gap_range_bits = elements / 4096;
  constexpr double kDenseFlagBits = 0.012;     // approximate bits of an unchanged element in a dense range
  constexpr double kSizeLossForSpeed = 0.004;  // growth of the result that is accepted, as a fraction
  SparseModel model;
  model.block.base = base;
  unsigned dense_classes = 0;  // the classes below this are dense
  for (unsigned class_index = 0; class_index < kClasses; ++class_index) {
    const ClassSample& class_sample = classes[class_index];
    // The limits keep both logarithms finite.
    const double density = std::clamp(smoothed_density(class_sample), 1e-7, 1 - 1e-7);
    model.stay_log2[class_index] = std::log2(1 - density);
    model.change_log2_gain[class_index] = std::log2(density) - model.stay_log2[class_index];
    // Two changes, because a single one shows little. Changes become rarer as the exponent grows, so all lower classes
    // are dense too.
    if (class_sample.elements > 0 && class_sample.changed >= kDenseDensityMin * class_sample.elements &&
        class_sample.changed >= 2)
      dense_classes = class_index + 1;
  }
  double sample_bits = 0, sampled_elements = 0;
  double sampled_by_gaps = 0;  // elements that would be coded by gaps
  for (unsigned class_index = 0; class_index < kClasses; ++class_index) {
    sample_bits += flag_bits(classes[class_index]) + step_bits(classes[class_index]);
    sampled_elements += classes[class_index].elements;
    if (class_index >= dense_classes) sampled_by_gaps += classes[class_index].elements;
  }
  // A segment without gap-coded ranges is coded faster, so all classes become dense if that costs few bits and at most
  // half of the elements would be coded by gaps.
  if (sampled_by_gaps <= sampled_elements / 2 && kDenseFlagBits * sampled_by_gaps <= kSizeLossForSpeed * sample_bits)
    dense_classes = kClasses;
  std::vector<RangeDraft> drafts;
  for (unsigned class_index = 0; class_index < kClasses; ++class_index)
    drafts.push_back({.sample = classes[class_index],
                      .class_end = class_index + 1,
                      .dense = class_index < dense_classes,
                      .bits = range_bits(classes[class_index], scale)});
  join_ranges(drafts, scale, gap_range_bits);
  model.block.range_count = static_cast<std::uint32_t>(drafts.size());
  unsigned class_index = 0;
  ClassSample dense_sample;
  for (unsigned range = 0; range < drafts.size(); ++range) {
    model.block.dense_range_count += drafts[range].dense;
    if (drafts[range].dense) dense_sample = joined(dense_sample, drafts[range].sample);
    model.block.range_end[range] = static_cast<std::uint8_t>(drafts[range].class_end);
    for (; class_index < drafts[range].class_end; ++class_index)
      model.block.range_of[class_index] = static_cast<std::uint8_t>(range);
    // `density` has the entries of SortedBlock (block.hpp): dense ranges come first and share entry 0.
    const std::size_t entry = range + 1 - model.block.dense_range_count;
    model.density[entry] = smoothed_density(drafts[range].dense ? dense_sample : drafts[range].sample);
  }
  model.dense_fraction = dense_sample.elements / std::max(sampled_elements, 1.0);
  return model;
}

// The result of sampling a segment (a part of a tensor that is coded independently).
struct Sample {
  std::vector<ClassSample> by_exponent;
  std::size_t elements = 0;  // read, or skipped because nothing changes around them
  // Variance / mean of the number of changes in a run: at most 1 if they are independent (Poisson), more if rows
  // differ, much more if some rows have no changes.
  double dispersion = 1;
};

// First element of the block (elements that the kernels code together) that contains this element.
std::size_t block_start(const BlockGrid& grid, std::size_t element) {
  return element < grid.first ? 0 : element - (element - grid.first) % grid.length;
}

// Samples a segment.
class Sampler {
 public:
  explicit Sampler(const ExponentField& field) : field_(field), by_exponent_(field.mask + 1) {
    for (auto& counts : elements_) counts.resize(by_exponent_.size());
  }
  // Reads about `sample_elements` elements, in runs spread evenly over the segment. With `grid`, skips runs in blocks
  // that do not change.
  template <class T>
  void add(const Content& prev, const Content& cur, std::size_t sample_elements, const BlockGrid* grid);
  double changes() const { return changes_; }
  Sample finish() &&;

 private:
  const ExponentField field_;
  std::vector<ClassSample> by_exponent_;
  // By exponent. Even and odd elements have separate counters, so that an increment need not wait for the store of the
  // previous one.
  std::array<std::vector<std::uint32_t>, 2> elements_;
  std::size_t sampled_elements_ = 0;
  double runs_ = 0, changes_ = 0, squared_changes_ = 0;  // squared: the sum over runs of their changes squared
  RawVector<std::byte> prev_scratch_, cur_scratch_;
};

template <class T>
void Sampler::add(const Content& prev, const Content& cur, std::size_t sample_elements, const BlockGrid* grid) {
  constexpr std::size_t kRunElements = 32;  // adjacent elements, because they share cache lines
  constexpr std::size_t kRunsAhead = 12;    // distance of prefetched memory
  const bool is_float = field_.mask != 0;
  const std::size_t count = cur.size() / sizeof(T);
  const std::size_t stride = std::max<std::size_t>(count / sample_elements, 1) * kRunElements;
  for (std::size_t begin = 0; begin < count; begin += stride) {
    const std::size_t end = std::min(begin + kRunElements, count);
    sampled_elements_ += end - begin;
    prev.prefetch((begin + kRunsAhead * stride) * sizeof(T));
    cur.prefetch((begin + kRunsAhead * stride) * sizeof(T));
    if (grid) {
      const std::size_t block = block_start(*grid, begin);
      // Reaches into the second block if the first is shorter than the others.
      const std::size_t bytes = (std::min<std::size_t>(block + grid->length, count) - block) * sizeof(T);
      if (std::memcmp(prev.part(block * sizeof(T), bytes, prev_scratch_).data(),
                      cur.part(block * sizeof(T), bytes, cur_scratch_).data(), bytes) == 0)
        continue;
    }
    const std::byte* const old_run = prev.part(begin * sizeof(T), (end - begin) * sizeof(T), prev_scratch_).data();
    const std::byte* const new_run = cur.part(begin * sizeof(T), (end - begin) * sizeof(T), cur_scratch_).data();
    double changed = 0;
    for (std::size_t i = 0; i < end - begin; ++i) {
      const T old = load<T>(old_run + i * sizeof(T)), now = load<T>(new_run + i * sizeof(T));
      const std::size_t exponent = static_cast<std::size_t>(old >> field_.shift) & field_.mask;
      ++elements_[i % 2][exponent];
      if (old == now) continue;
      ClassSample& exponent_sample = by_exponent_[exponent];
      std::uint64_t magnitude = 0;
      exponent_sample.changed += 1;
      exponent_sample.tokens[std::min(change_token(old, now, is_float, magnitude), kSampledTokens - 1)] += 1;
      changed += 1;
    }
    runs_ += 1;
    changes_ += changed;
    squared_changes_ += changed * changed;
  }
}

Sample Sampler::finish() && {
  Sample sample{.by_exponent = std::move(by_exponent_), .elements = sampled_elements_};
  for (std::size_t exponent = 0; exponent <= field_.mask; ++exponent)
    sample.by_exponent[exponent].elements = elements_[0][exponent] + elements_[1][exponent];
  const double mean = changes_ / std::max(runs_, 1.0);
  // With fewer runs the variance is too uncertain, and the rows count as equal.
  if (runs_ >= 64 && changes_ > 0) sample.dispersion = (squared_changes_ / runs_ - mean * mean) / mean;
  return sample;
}

template <class T>
Sample take_sample(const Content& prev, const Content& cur, const ExponentField& field, const BlockGrid* grid) {
  constexpr double kChangesEnough = 400;  // for frequencies with an error of about 1 / sqrt(400) = 5 %
  const std::size_t elements = cur.size() / sizeof(T);
  constexpr std::size_t kSampledMin = 4 * 1024, kSampledMax = 32 * 1024;  // elements
  const auto sample_one_in = [&](std::size_t n) {
    Sampler sampler(field);
    sampler.add<T>(prev, cur, std::clamp(elements / n, kSampledMin, kSampledMax), grid);
    return sampler;
  };
  if (Sampler sampler = sample_one_in(160); sampler.changes() >= kChangesEnough) return std::move(sampler).finish();
  return sample_one_in(64).finish();
}

// From these values of Sample::dispersion on, rows count as different, or some as without changes. They are above 1,
// the dispersion of independent changes, by more than the error of a sample.
constexpr double kRowsDifferDispersion = 1.15, kRowsUntouchedDispersion = 1.5;

// Returns the model for a segment of `elements` elements of type `dtype`.
SparseModel model_of(const Sample& sample, DType dtype, double elements) {
  const ExponentField field = exponent_field(dtype);
  const std::vector<ClassSample>& by_exponent = sample.by_exponent;
  // Class c has the exponent base + c. The base is chosen so that the highest exponent has at most the last class;
  // lower ones than the base join class 0.
  std::size_t highest = by_exponent.size() - 1;
  while (highest > 0 && by_exponent[highest].elements == 0) --highest;
  const std::size_t base = highest >= kClasses ? highest - (kClasses - 1) : 0;
  std::array<ClassSample, kClasses> classes{};
  for (std::size_t exponent = 0; exponent < by_exponent.size(); ++exponent) {
    if (by_exponent[exponent].elements == 0) continue;
    ClassSample& class_sample = classes[exponent > base ? exponent - base : 0];
    class_sample = joined(class_sample, by_exponent[exponent]);
  }
  SparseModel model = fit_model(classes, static_cast<std::uint32_t>(base), elements,
                                elements / std::max(1.0, static_cast<double>(sample.elements)));
  model.block.exponent_shift = field.shift;
  model.block.exponent_mask = field.mask;
  model.block.is_float = is_float(dtype);
  return model;
}

template <class T>
SparseModel sample_model(const Content& prev, const Content& cur, const SegmentPlace& place, BlockGrid& grid) {
  const ExponentField field = exponent_field(place.dtype);
  Sample sample = take_sample<T>(prev, cur, field, /*grid=*/nullptr);
  const bool rows_differ = sample.dispersion > kRowsDifferDispersion;
  grid = choose_grid(place, rows_differ);
  // Blocks without changes are not coded, so they must not count in the frequencies.
  if (sample.dispersion > kRowsUntouchedDispersion) sample = take_sample<T>(prev, cur, field, &grid);
  SparseModel model = model_of(sample, place.dtype, static_cast<double>(cur.size() / sizeof(T)));
  model.rows_differ = rows_differ;
  return model;
}

// Elements and changes of a block, by class before clamping and shifting. Index kClassesBelow is the model's first
// class. There are 16 classes more below and above the model's 32, so that all shifts (-7 to 7) find their elements.
constexpr int kClassesBelow = 16, kCountedClasses = 64;
struct BlockCounts {
  std::array<double, kCountedClasses> elements{}, changed{};
  int first = 0, last = kCountedClasses - 1;  // all other counts are zero
};

// log2 of the probability of a block's changes if its classes are shifted by `shift` exponents.
double log2_likelihood(const BlockCounts& counts, const SparseModel& model, int shift) {
  double sum = 0;
  for (int i = counts.first; i <= counts.last; ++i) {
    const auto index = static_cast<std::size_t>(i);
    const auto class_index =
        static_cast<std::size_t>(std::clamp(i - kClassesBelow - shift, 0, static_cast<int>(kClasses) - 1));
    sum += counts.elements[index] * model.stay_log2[class_index] +
           counts.changed[index] * model.change_log2_gain[class_index];
  }
  return sum;
}

// Counts all elements, or in a large block every eighth word of 32 elements, weighted by eight: a sample is enough to
// choose a model.
template <class T>
BlockCounts count_classes(const std::byte* prev, std::uint32_t count, const BlockModel& model,
                          const std::uint32_t* changed) {
  const std::uint32_t word_stride = count >= 2048 ? 8 : 1;
  std::array<std::uint32_t, kCountedClasses> elements{}, changes{};
  for (std::uint32_t word = 0; word * 32 < count; word += word_stride)
    for (std::uint32_t i = word * 32; i < std::min(count, word * 32 + 32); ++i) {
      const auto exponent =
          static_cast<std::int64_t>((load<T>(prev + i * sizeof(T)) >> model.exponent_shift) & model.exponent_mask);
      const std::int64_t class_index = exponent - model.base + kClassesBelow;
      const auto index = static_cast<std::size_t>(std::clamp<std::int64_t>(class_index, 0, kCountedClasses - 1));
      ++elements[index];
      changes[index] += changed[word] >> i % 32 & 1;
    }
  BlockCounts counts;
  for (std::size_t i = 0; i < elements.size(); ++i) {
    counts.elements[i] = word_stride * elements[i];
    counts.changed[i] = word_stride * changes[i];
  }
  const auto is_empty = [&](int i) {
    return counts.elements[static_cast<std::size_t>(i)] == 0 && counts.changed[static_cast<std::size_t>(i)] == 0;
  };
  while (counts.first < counts.last && is_empty(counts.first)) ++counts.first;
  while (counts.first < counts.last && is_empty(counts.last)) --counts.last;
  return counts;
}

}  // namespace

BlockGrid choose_grid(const SegmentPlace& place, bool rows_differ) {
  BlockGrid grid{.length = kBlockElements};
  const std::uint64_t row_elements = place.row_elements;
  if (row_elements > 0 && row_elements < kBlockElements) {  // a row, or several rows
    const bool is_single_row = rows_differ && row_elements >= kRowBlockMin;
    // Otherwise as many whole rows as fit in kBlockElements.
    grid.length =
        static_cast<std::uint32_t>(is_single_row ? row_elements : kBlockElements / row_elements * row_elements);
  } else if (row_elements >= kBlockElements && row_elements < 4ull * kBlockElementsMax) {  // a part of a row
    const std::uint64_t parts = row_elements / kBlockElements + 1;  // so that each is shorter than kBlockElements
    grid.length = static_cast<std::uint32_t>((row_elements + parts - 1) / parts);
  }  // otherwise, blocks do not end with the rows
  // The block grid is counted over the tensor, so a segment may begin within a block.
  grid.first = static_cast<std::uint32_t>(grid.length - place.first_element % grid.length);
  return grid;
}

SparseModel choose_model(const Content& prev, const Content& cur, const SegmentPlace& place, BlockGrid& grid) {
  return with_element_type(dtype_bytes(place.dtype),
                           [&]<class T>(T) { return sample_model<T>(prev, cur, place, grid); });
}

unsigned choose_symbol(const SparseModel& model, const std::byte* prev, std::uint32_t count, std::size_t element_bytes,
                       const std::uint32_t* changed, unsigned previous) {
  // Approximate bits of a symbol other than the previous block's. Most blocks repeat it, so the others are rare. A
  // block's symbol says by how many exponents the classes are shifted in it.
  constexpr double kSwitchBits = 4;
  const BlockCounts counts =
      with_element_type(element_bytes, [&]<class T>(T) { return count_classes<T>(prev, count, model.block, changed); });
  const auto log2_likelihood_of = [&](unsigned symbol) {
    return log2_likelihood(counts, model, static_cast<int>(symbol) - static_cast<int>(kSymbolUnshifted));
  };
  unsigned best = previous;
  double best_log2 = log2_likelihood_of(previous) + kSwitchBits;
  for (unsigned symbol = 1; symbol < kBlockSymbols; ++symbol) {  // 0 is kSymbolUntouched
    const double candidate_log2 = log2_likelihood_of(symbol);
    if (candidate_log2 > best_log2) {
      best = symbol;
      best_log2 = candidate_log2;
    }
  }
  return best;
}

GapCode choose_gap_code(double changed, double elements) {
  // A gap is the number of unchanged elements between two changes. It is coded as a token, the gap without its lowest
  // `shift` bits, and these bits. Gaps are taken as geometrically distributed; `ratio` is the probability that an
  // element does not change. Each low bit of a gap halves the mean of the token that remains, and squares the ratio.
  GapCode code;
  double ratio = std::clamp(1 - changed / std::max(elements, 1.0), 0.0, 1 - 1e-10);
  while (ratio / (1 - ratio) >= 8 && code.shift < kGapShiftMax) {  // until the tokens' mean is below 8
    ++code.shift;
    ratio *= ratio;
  }
  const double mean = std::max(ratio / (1 - ratio), 1.0);
  // Table i is for means from 2^(i / 8) on (gap_frequencies()).
  code.table = static_cast<unsigned>(std::clamp(8 * std::log2(mean), 0.0, kGapTables - 1.0));
  return code;
}

}  // namespace echoline::delta
