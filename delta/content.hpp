// The content that one segment codes: a part of a tensor, or the small tensors of a group as if they lay side by side.
// Internal to this folder.
#pragma once
#include <algorithm>
#include <vector>

#include "delta/bytes.hpp"
#include "delta/raw_memory.hpp"

namespace echoline::delta {

// A view. One thread at a time uses it, since it remembers the piece that was read last.
class Content {
 public:
  Content(ByteSpan piece) : piece_(piece), size_(piece.size()) {}
  // The pieces one after the other. Each has whole elements.
  explicit Content(std::vector<ByteSpan> pieces);

  std::size_t size() const { return size_; }
  bool in_one_piece() const { return pieces_.empty(); }
  // Bytes from `first` on. They are copied to `room` unless they lie in one piece.
  ByteSpan part(std::size_t first, std::size_t count, RawVector<std::byte>& room) const {
    return pieces_.empty() ? piece_.subspan(first, count) : gathered(first, count, room);
  }
  ByteSpan whole(RawVector<std::byte>& room) const { return part(0, size_, room); }
  void prefetch(std::size_t byte) const {
    if (pieces_.empty())
      __builtin_prefetch(piece_.data() + byte);
    else if (byte < size_)
      __builtin_prefetch(pieces_[piece_of(byte)].data() + (byte - begins_[last_]));
  }

 private:
  ByteSpan gathered(std::size_t first, std::size_t count, RawVector<std::byte>& room) const;
  std::size_t piece_of(std::size_t byte) const {
    const auto ends_behind = [&](std::size_t i) { return byte < begins_[i] + pieces_[i].size(); };
    if (byte >= begins_[last_] && ends_behind(last_)) return last_;
    last_ = static_cast<std::size_t>(std::upper_bound(begins_.begin(), begins_.end(), byte) - begins_.begin()) - 1;
    return last_;
  }

  ByteSpan piece_;
  std::vector<ByteSpan> pieces_;     // none when there is one piece
  std::vector<std::size_t> begins_;  // of each piece, in bytes of the content
  std::size_t size_ = 0;
  mutable std::size_t last_ = 0;  // the piece that was read last
};

}  // namespace echoline::delta
