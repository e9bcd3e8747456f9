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
#include "delta/content.hpp"
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

// Called for each leaf of a segment, in order, once its memory has been read.
using LeafRead = std::function<void(std::size_t first_byte, std::size_t bytes)>;

// Keeps its working memory between calls: a few times the bytes it writes. One per thread.
class SparseEncoder {
 public:
  SparseEncoder();
  ~SparseEncoder();
  // Appends the coding of a segment, or nothing when no element differs. Both sides have equal size. `entropy`, unless
  // null, takes the counts of the entropy bound. `leaf_read` may be empty.
  SparseCount encode(const Content& prev, const Content& cur, const SegmentPlace& place, const LeafRead& leaf_read,
                     EntropyCounter* entropy, ByteVector& out);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Where the new content of a leaf is to be made; called for each leaf, in order. There is room for kSpareElements more.
using LeafRoom = std::function<std::byte*(std::size_t first_byte, std::size_t bytes)>;
// Called for each leaf of the segment, in order, with its content, which is valid during the call. `now` is `before`
// when nothing changes in it and there is no LeafRoom.
using LeafDone = std::function<void(std::size_t first_byte, ByteSpan before, ByteSpan now)>;

// Keeps its working memory between calls: some twenty bytes for each change that is coded by gaps. One per thread.
class SparseDecoder {
 public:
  SparseDecoder();
  ~SparseDecoder();
  // Decodes `changed` changes of the segment whose old content is `old`; `small` says whether dense ranges have small
  // symbols, else those of version 3. Without `room`, only the leaves that change are made, each in the same memory.
  // kCorrupt: the coding is malformed; then `leaf_done` was given wrong content.
  Status decode(ByteSpan coded, bool small, std::uint64_t changed, const Content& old, DType dtype,
                const LeafRoom& room, const LeafDone& leaf_done);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace echoline::delta
