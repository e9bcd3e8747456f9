// Chooses the statistics for a segment. A class holds the elements with one old exponent. Adjacent classes with similar
// changes share a range. Also chooses the blocks, and for each block by how many exponents its classes are shifted.
// FORMAT.md does not prescribe these choices. Internal to this folder.
#pragma once
#include <array>
#include <cmath>

#include "delta/sparse.hpp"
#include "delta/sparse_format.hpp"

namespace echoline::delta {

struct SparseModel {
  BlockModel block;
  // The expected fraction of changed elements in each entry of a SortedBlock.
  std::array<double, kRangesMax + 1> density{};
  double dense_fraction = 0;  // of elements in dense ranges
  bool rows_differ = false;   // the density of changes differs between the tensor's rows
  // By class: log2 of the probability that an element does not change, and what to add to it if the element changes.
  std::array<double, kClasses> stay_log2{}, change_log2_gain{};
};

// Fits model and blocks to a sample of the segment.
SparseModel choose_model(const Content& prev, const Content& cur, const SegmentPlace& place, BlockGrid& grid);

// Blocks of whole rows if rows are of a useful size; of single rows if they differ.
BlockGrid choose_grid(const SegmentPlace& place, bool rows_differ);

// The most likely symbol for a block's changes, with a preference for `previous`; `changed` is the result of
// Kernels::diff.
unsigned choose_symbol(const SparseModel& model, const std::byte* prev, std::uint32_t count, std::size_t element_bytes,
                       const std::uint32_t* changed, unsigned previous);

// The shortest code for the gaps of `changed` changes among `elements` elements.
GapCode choose_gap_code(double changed, double elements);

// Bits to code `count` symbols of one kind among `total` symbols.
inline double entropy_bits(double count, double total) { return count > 0 ? count * std::log2(total / count) : 0; }

}  // namespace echoline::delta
