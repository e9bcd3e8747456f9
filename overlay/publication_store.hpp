// Recent publications of one node, whole or still arriving, within a byte budget. Pure.
#pragma once
#include <map>

#include "overlay/control.hpp"

namespace echoline::overlay {

// XXH3-128 of a payload (canonical bytes) and XXH3-64 of a chunk.
Digest payload_digest(std::span<const std::byte> payload);
std::uint64_t chunk_hash(std::span<const std::byte> chunk);

// A part of shared memory, kept alive while it is being sent.
struct Slice {
  SharedBytes owner;
  std::size_t offset = 0, length = 0;
  std::span<const std::byte> bytes() const {
    return owner ? std::span(*owner).subspan(offset, length) : std::span<const std::byte>();
  }
};

// A publication cut into hashed chunks: what publishing needs computed once, on the caller's thread.
struct PreparedPublication {
  Manifest manifest;
  SharedBytes payload;
  std::vector<std::uint64_t> chunk_hashes;
};
// kInvalid: no payload, base not below version, chunk size out of range, too many chunks.
Result<PreparedPublication> prepare(const Publication& publication, Bytes chunk);

struct StoredPublication {
  Manifest manifest;
  SharedBytes payload;  // sized from the start; only chunks in `have` are meaningful
  ChunkSet have;
  std::vector<std::uint64_t> chunk_hashes;
  bool verified = false;  // complete, and the payload has its digest
  bool complete() const { return verified; }
  Publication publication() const { return {manifest.key.version, manifest.key.base, manifest.policy_digest, payload}; }
};

class PublicationStore {
 public:
  explicit PublicationStore(Bytes bytes_max) : bytes_max_(bytes_max) {}

  // Makes room by dropping whole publications, oldest first, none at or above `keep_from`. kExhausted when that is not
  // enough, kCorrupt when another manifest was announced under the same key. Nothing happens for a known manifest.
  Status begin(const Manifest& manifest, Version keep_from);
  Status add(PreparedPublication publication, Version keep_from);

  enum class Put { kAdded, kCompleted, kDuplicate };
  // Verifies the chunk against its header's hash and copies it in; after the last one also the payload against its
  // digest. kNotFound: not announced. kCorrupt: wrong hash, index or length (nothing changes), or wrong digest of the
  // whole (the publication is then dropped).
  Result<Put> put(const ChunkHeader& header, std::span<const std::byte> bytes);

  const StoredPublication* find(const PublicationKey& key) const;
  const std::map<PublicationKey, StoredPublication>& entries() const { return entries_; }
  std::optional<Version> newest() const;
  // Size of the newest full snapshot that was ever announced here.
  std::optional<std::uint64_t> full_bytes_hint() const { return full_bytes_; }
  void erase(const PublicationKey& key);
  // Drops what is not whole and not above `version`: nobody will finish it.
  void erase_partial_up_to(Version version);
  Bytes bytes() const { return {bytes_}; }

 private:
  Status make_room(const Manifest& manifest, Version keep_from);
  void note_full(const Manifest& manifest);

  Bytes bytes_max_;
  std::uint64_t bytes_ = 0;
  std::map<PublicationKey, StoredPublication> entries_;
  std::map<PublicationKey, std::shared_ptr<std::vector<std::byte>>> arriving_;  // writable view of payloads in progress
  std::optional<Version> full_version_;
  std::optional<std::uint64_t> full_bytes_;
};

}  // namespace echoline::overlay
