// Cuts and seals chunks on the thread that encodes a publication. Called by PublicationWriter.
#include "overlay/wire/sealer.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace echoline::overlay {

Sealer::Sealer(const Announcement& announcement, const trust::SigningKey& key, AllocateChunk allocate_chunk)
    : announcement_(announcement),
      key_(key),
      allocate_chunk_(std::move(allocate_chunk)),
      signed_announcement_(sign(announcement, key)),
      id_(id_of(signed_announcement_)) {}

Result<std::vector<SealedChunk>> Sealer::write(std::span<const std::byte> bytes) {
  if (bytes_ + bytes.size() > std::uint64_t{kChunksMax} * announcement_.chunk_bytes)
    return fail(Code::kExhausted, "publish", "{}: more than {} chunks of {} bytes; use larger chunks",
                to_text(announcement_.key), kChunksMax, announcement_.chunk_bytes);
  bytes_ += bytes.size();
  std::vector<SealedChunk> sealed;
  while (!bytes.empty()) {
    if (!open_chunk_) open_chunk_ = allocate_chunk_(announcement_.chunk_bytes);
    const std::size_t part_bytes = std::min<std::size_t>(bytes.size(), announcement_.chunk_bytes - open_chunk_bytes_);
    std::memcpy(open_chunk_.get() + open_chunk_bytes_, bytes.data(), part_bytes);
    open_chunk_bytes_ += part_bytes;
    bytes = bytes.subspan(part_bytes);
    if (open_chunk_bytes_ == announcement_.chunk_bytes)
      waiting_.emplace_back(std::exchange(open_chunk_, {}), std::exchange(open_chunk_bytes_, 0));
  }
  // Waiting chunks are sealed together, with one signature, once they are an eighth of those sealed before
  // (`next_index_`). So the first chunks leave at once, and later ones share signatures.
  constexpr std::uint32_t kSealedPerWaiting = 8;
  while (waiting_.size() >= std::clamp<std::size_t>(next_index_ / kSealedPerWaiting, 1, kSealChunksMax))
    seal_waiting(sealed);
  return sealed;
}

void Sealer::seal_waiting(std::vector<SealedChunk>& sealed) {
  const std::size_t count = std::min(waiting_.size(), kSealChunksMax);
  std::vector<std::span<const std::byte>> views;
  for (std::size_t i = 0; i < count; ++i) views.push_back(waiting_[i].bytes());
  std::vector<trust::Hash> hashes;
  std::vector<ChunkHead> heads = seal(id_, next_index_, views, key_, hashes);
  for (std::size_t i = 0; i < count; ++i) {
    content_.update(hashes[i]);
    sealed.push_back({std::move(heads[i]), hashes[i], std::move(waiting_.front())});
    waiting_.pop_front();
  }
  next_index_ += static_cast<std::uint32_t>(count);
}

std::pair<std::vector<SealedChunk>, SignedManifest> Sealer::finish(const Digest& policy_digest,
                                                                   const std::string& note) {
  std::vector<SealedChunk> sealed;
  if (open_chunk_) waiting_.emplace_back(std::exchange(open_chunk_, {}), std::exchange(open_chunk_bytes_, 0));
  while (!waiting_.empty()) seal_waiting(sealed);
  return {std::move(sealed), sign(Manifest{.publication = id_,
                                           .payload_bytes = bytes_,
                                           .content = content_.finish(),
                                           .policy_digest = policy_digest,
                                           .note = note},
                                  key_)};
}

}  // namespace echoline::overlay
