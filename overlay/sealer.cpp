#include "overlay/sealer.hpp"

#include <algorithm>
#include <cstring>

#include "overlay/chunk_memory.hpp"

namespace echoline::overlay {

Sealer::Sealer(const Announcement& announcement, const trust::SigningKey& key)
    : announcement_(announcement), key_(key), opening_(sign(announcement, key)), id_(id_of(opening_)) {}

Result<std::vector<SealedChunk>> Sealer::write(std::span<const std::byte> bytes) {
  if (bytes_ + bytes.size() > std::uint64_t{kChunksMax} * announcement_.chunk_bytes)
    return fail(Code::kExhausted, "publish", "{}: more than {} chunks of {} bytes; use larger chunks",
                to_text(announcement_.key), kChunksMax, announcement_.chunk_bytes);
  bytes_ += bytes.size();
  std::vector<Slice> full;
  while (!bytes.empty()) {
    if (!open_) open_ = chunk_memory(announcement_.chunk_bytes);
    const std::size_t n = std::min<std::size_t>(bytes.size(), announcement_.chunk_bytes - open_bytes_);
    std::memcpy(open_.get() + open_bytes_, bytes.data(), n);
    open_bytes_ += n;
    bytes = bytes.subspan(n);
    if (open_bytes_ == announcement_.chunk_bytes)
      full.emplace_back(std::exchange(open_, {}), std::exchange(open_bytes_, 0));
  }
  return seal_full(std::move(full));
}

std::vector<SealedChunk> Sealer::seal_full(std::vector<Slice> pieces) {
  std::vector<SealedChunk> sealed;
  for (std::size_t at = 0; at < pieces.size(); at += kSealChunksMax) {
    const std::size_t n = std::min(kSealChunksMax, pieces.size() - at);
    std::vector<std::span<const std::byte>> views;
    for (std::size_t i = 0; i < n; ++i) views.push_back(pieces[at + i].bytes());
    std::vector<trust::Hash> hashes;
    std::vector<ChunkHead> heads = seal(id_, next_, views, key_, hashes);
    for (std::size_t i = 0; i < n; ++i) {
      content_.update(hashes[i]);
      sealed.push_back({std::move(heads[i]), hashes[i], std::move(pieces[at + i])});
    }
    next_ += static_cast<std::uint32_t>(n);
  }
  return sealed;
}

std::pair<std::vector<SealedChunk>, SignedManifest> Sealer::finish(const Digest& policy_digest) {
  std::vector<Slice> last;
  if (open_) last.emplace_back(std::exchange(open_, {}), std::exchange(open_bytes_, 0));
  std::vector<SealedChunk> sealed = seal_full(std::move(last));
  return {std::move(sealed), sign(Manifest{id_, bytes_, content_.finish(), policy_digest}, key_)};
}

}  // namespace echoline::overlay
