// Sparse coding: what changed in one segment, given its old content. Where a float changes in a training step is
// decided by its old exponent, and how it changes is nearly always one step to a neighbouring float
// (`delta/entropy.hpp` has the bound); so elements are sorted into ranges of exponents, and each range is coded with
// its own statistics. Internal to this folder; FORMAT.md, "Sparse coding".
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "base/result.hpp"
#include "delta/bytes.hpp"
#include "delta/digest.hpp"
#include "delta/entropy.hpp"
#include "delta/tensor.hpp"

namespace echoline::delta {

// Which elements of a tensor a segment holds.
struct SegmentPlace {
  DType dtype = DType::kU8;
  std::uint64_t first_element = 0;
  std::uint64_t row_elements = 0;  // of the tensor's rows; density may differ from row to row
};

struct SparseCount {
  std::uint64_t changed = 0;     // elements that differ
  std::uint64_t bound_bits = 0;  // entropy of where and how they differ, given each element's range of old values
};

// Keeps its working memory between calls: a few times the bytes it writes. One per thread.
class SparseEncoder {
 public:
  SparseEncoder();
  ~SparseEncoder();
  // Appends the coding of a segment, or nothing when no element differs. Both sides have equal size. Digests of the
  // leaves of either side, and the counts of the entropy bound, are taken on the way where a place for them is given.
  SparseCount encode(ByteSpan prev, ByteSpan cur, const SegmentPlace& place, Digest* prev_leaves, Digest* cur_leaves,
                     EntropyCounter* entropy, ByteVector& out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Called for each leaf of the segment, in order, with its new content, which is valid during the call; it is in `old`'s
// memory when nothing changes in it.
using LeafDone = std::function<void(std::size_t first_byte, ByteSpan now)>;

// Keeps its working memory between calls: some twenty bytes for each change that is coded by gaps. One per thread.
class SparseDecoder {
 public:
  SparseDecoder();
  ~SparseDecoder();
  // Decodes `changed` changes of the segment whose old content is `old`; `small` says whether dense ranges have small
  // symbols, else those of version 3. The new content is made in `whole`, of the
  // same size and apart from `old`, unless that is empty. kCorrupt when the coding is malformed; then what `leaf_done`
  // was given is of no use.
  Status decode(ByteSpan coded, bool small, std::uint64_t changed, ByteSpan old, DType dtype,
                std::span<std::byte> whole, const LeafDone& leaf_done);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echoline::delta
