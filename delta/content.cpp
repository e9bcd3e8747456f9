// Content in several pieces, for groups of small tensors.
#include "delta/content.hpp"

#include "base/result.hpp"

namespace echoline::delta {

Content::Content(std::vector<ByteSpan> pieces) : pieces_(std::move(pieces)) {
  std::erase_if(pieces_, [](ByteSpan piece) { return piece.empty(); });
  begins_.reserve(pieces_.size());
  for (const ByteSpan piece : pieces_) {
    begins_.push_back(size_);
    size_ += piece.size();
  }
}

ByteSpan Content::gather(std::size_t first, std::size_t count, RawVector<std::byte>& scratch) const {
  ECHO_CHECK(first + count <= size_);
  if (count == 0) return {};
  std::size_t piece = piece_of(first);
  const ByteSpan front = pieces_[piece].subspan(first - begins_[piece]);
  if (front.size() >= count) return front.first(count);
  if (scratch.size() < count) scratch.resize(count);
  std::byte* to = std::copy(front.begin(), front.end(), scratch.data());
  for (const std::byte* const end = scratch.data() + count; to != end;) {
    const ByteSpan next = pieces_[++piece];
    to = std::copy_n(next.data(), std::min(next.size(), static_cast<std::size_t>(end - to)), to);
  }
  last_piece_ = piece;
  return {scratch.data(), count};
}

}  // namespace echoline::delta
