// The content of one segment: a part of a tensor, or the concatenated small tensors of a group. Internal to this
// folder.
#pragma once
#include <algorithm>
#include <vector>

#include "delta/bytes.hpp"
#include "delta/raw_memory.hpp"

namespace echoline::delta {

// A view of one or several pieces of memory. Not thread-safe, because it caches the last piece read.
class Content {
 public:
  // Implicit, because most content is one piece.
  Content(ByteSpan piece) : only_piece_(piece), size_(piece.size()) {}
  // The concatenation of the pieces, each of whole elements.
  explicit Content(std::vector<ByteSpan> pieces);

  std::size_t size() const { return size_; }
  bool is_contiguous() const { return pieces_.empty(); }
  // `count` bytes from byte `first` on. Copies them to `scratch` if they are in several pieces.
  ByteSpan part(std::size_t first, std::size_t count, RawVector<std::byte>& scratch) const {
    return pieces_.empty() ? only_piece_.subspan(first, count) : gather(first, count, scratch);
  }
  ByteSpan all_bytes(RawVector<std::byte>& scratch) const { return part(0, size_, scratch); }
  void prefetch(std::size_t byte) const {
    if (pieces_.empty())
      __builtin_prefetch(only_piece_.data() + byte);
    else if (byte < size_)
      __builtin_prefetch(pieces_[piece_of(byte)].data() + (byte - begins_[last_piece_]));
  }

 private:
  ByteSpan gather(std::size_t first, std::size_t count, RawVector<std::byte>& scratch) const;
  // Index of the piece with this byte of the content; for several pieces.
  std::size_t piece_of(std::size_t byte) const {
    const std::size_t last_begin = begins_[last_piece_];
    const bool is_in_last = byte >= last_begin && byte < last_begin + pieces_[last_piece_].size();
    if (is_in_last) return last_piece_;
    const auto next_piece = std::upper_bound(begins_.begin(), begins_.end(), byte);
    last_piece_ = static_cast<std::size_t>(next_piece - begins_.begin()) - 1;
    return last_piece_;
  }

  ByteSpan only_piece_;              // if `pieces_` is empty
  std::vector<ByteSpan> pieces_;     // several pieces
  std::vector<std::size_t> begins_;  // of each piece, in bytes of the content
  std::size_t size_ = 0;
  mutable std::size_t last_piece_ = 0;  // index of the last piece read
};

}  // namespace echoline::delta
