// Turns the bytes of a publication into sealed chunks while they are still being made. Belongs to one thread.
#pragma once
#include <deque>

#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

struct SealedChunk {
  ChunkHead head;
  trust::Hash hash{};
  Slice data;
};

class Sealer {
 public:
  Sealer(const Announcement& announcement, const trust::SigningKey& key);

  const PublicationId& id() const { return id_; }
  const Announcement& announcement() const { return announcement_; }
  const SignedAnnouncement& opening() const { return opening_; }
  // The chunks that became full, under seals that grow as the publication does: the first leave at once, and of many
  // chunks few signatures have to be made and verified. kExhausted: more than kChunksMax.
  Result<std::vector<SealedChunk>> write(std::span<const std::byte> bytes);
  // The last chunks, and the manifest that closes the publication. Nothing may be written after it.
  std::pair<std::vector<SealedChunk>, SignedManifest> finish(const Digest& policy_digest, const std::string& note = {});
  std::uint64_t bytes() const { return bytes_; }

 private:
  // Appends what waits, or as much of it as one seal may cover.
  void seal_waiting(std::vector<SealedChunk>& sealed);

  Announcement announcement_;
  trust::SigningKey key_;
  SignedAnnouncement opening_;
  PublicationId id_;
  std::shared_ptr<std::byte> open_;  // the chunk that is being filled
  std::size_t open_bytes_ = 0;
  std::deque<Slice> waiting_;  // full, and not sealed yet
  std::uint32_t next_ = 0;
  std::uint64_t bytes_ = 0;
  trust::Hasher content_;
};

}  // namespace echoline::overlay
