// Sparse coding: the changes of one segment (a part of a tensor), given its old content. Whether a float changes in a
// training step depends on its old exponent, and it nearly always changes to a neighbouring float (delta/entropy.hpp
// has the bound). So elements are sorted into ranges of exponents, and each range is coded with its own statistics.
// Internal to this folder; FORMAT.md, "Sparse coding".
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "base/result.hpp"
#include "delta/bytes.hpp"
#include "delta/content.hpp"
#include "delta/digest.hpp"
#include "delta/entropy.hpp"
#include "delta/tensor.hpp"

namespace echoline::delta {

// The place of a segment in its tensor.
struct SegmentPlace {
  DType dtype = DType::kU8;
  std::uint64_t first_element = 0;
  // Length of the tensor's rows, 0 if unknown; the density of changes may differ between rows.
  std::uint64_t row_elements = 0;
};

struct SparseCount {
  std::uint64_t changed = 0;     // elements that differ
  std::uint64_t bound_bits = 0;  // entropy of positions and steps, given each element's range of old values
};

// Called for each leaf (64 KiB, digest.hpp) of a segment, in order, after its memory was read.
using LeafRead = std::function<void(std::size_t first_byte, std::size_t bytes)>;

// Keeps its working memory between calls, a few times the bytes it writes. Use one per thread.
class SparseEncoder {
 public:
  SparseEncoder();
  ~SparseEncoder();
  // Appends the coding of a segment, or nothing if no element differs. Both sides have the same size. `entropy`, unless
  // null, receives the counts of the entropy bound. `leaf_read` may be empty.
  SparseCount encode(const Content& prev, const Content& cur, const SegmentPlace& place, const LeafRead& leaf_read,
                     EntropyCounter* entropy, ByteVector& out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Returns the memory for a leaf's new content. It needs room for kSpareElements more, because the kernels store whole
// vectors. Called for each leaf, in order.
using LeafRoom = std::function<std::byte*(std::size_t first_byte, std::size_t bytes)>;
// Called for each leaf of the segment, in order, with its content, which is valid during the call. `now` is `before` if
// nothing changes in it and there is no LeafRoom.
using LeafDone = std::function<void(std::size_t first_byte, ByteSpan before, ByteSpan now)>;

// Keeps its working memory between calls, about twenty bytes per change coded by gaps. Use one per thread.
class SparseDecoder {
 public:
  SparseDecoder();
  ~SparseDecoder();
  // Decodes `changed` changes of the segment with old content `old`. `has_small_symbols`: false for the coding of
  // format version 3. Without `room`, only changed leaves are decoded, all into the same memory. kCorrupt if the coding
  // is malformed; `leaf_done` then received wrong content.
  Status decode(ByteSpan coded, bool has_small_symbols, std::uint64_t changed, const Content& old, DType dtype,
                const LeafRoom& room, const LeafDone& leaf_done);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echoline::delta
