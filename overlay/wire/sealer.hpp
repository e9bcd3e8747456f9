// Cuts the bytes of a publication into sealed chunks while the publication is still being encoded. A seal is the
// learner's signature over the Merkle root of consecutive chunks. Belongs to one thread.
#pragma once
#include <deque>
#include <functional>

#include "overlay/wire/chunk_memory.hpp"
#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

struct SealedChunk {
  ChunkHead head;
  trust::Hash hash{};
  Slice data;
};

class Sealer {
 public:
  // Returns memory for a chunk.
  using AllocateChunk = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;
  Sealer(const Announcement& announcement, const trust::SigningKey& key, AllocateChunk allocate_chunk = chunk_memory);

  const PublicationId& id() const { return id_; }
  const Announcement& announcement() const { return announcement_; }
  const SignedAnnouncement& signed_announcement() const { return signed_announcement_; }
  // Returns the chunks that became full. Seals grow with the publication: the first chunks leave at once, and many
  // chunks need few signatures. kExhausted: more than kChunksMax.
  Result<std::vector<SealedChunk>> write(std::span<const std::byte> bytes);
  // Returns the last chunks and the closing manifest. No write may follow.
  std::pair<std::vector<SealedChunk>, SignedManifest> finish(const Digest& policy_digest, const std::string& note = {});
  std::uint64_t bytes() const { return bytes_; }

 private:
  // Seals waiting chunks, at most as many as one seal covers.
  void seal_waiting(std::vector<SealedChunk>& sealed);

  Announcement announcement_;
  trust::SigningKey key_;
  AllocateChunk allocate_chunk_;
  SignedAnnouncement signed_announcement_;
  PublicationId id_;
  std::shared_ptr<std::byte> open_chunk_;  // the chunk being filled
  std::size_t open_chunk_bytes_ = 0;       // bytes in it
  std::deque<Slice> waiting_;              // full chunks, not sealed yet
  std::uint32_t next_index_ = 0;           // of the next chunk to seal
  std::uint64_t bytes_ = 0;
  trust::Hasher content_;  // over the hashes of all chunks
};

}  // namespace echoline::overlay
