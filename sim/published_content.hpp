// The learner's real publications, for comparison with all traffic. Also a SignatureChecker that caches hashes and
// signature checks: in a large fleet, all workers check the same chunks and signatures.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "overlay/wire/sealer.hpp"

namespace echoline::sim {

class PublishedContent {
 public:
  struct Publication {
    overlay::PublicationKey key;
    std::uint64_t epoch = 0;
    std::uint32_t chunk_bytes = 0;
    std::vector<overlay::SealedChunk> chunks;      // by index
    std::optional<overlay::Digest> policy_digest;  // absent until it is closed, that is, complete
    std::uint64_t bytes = 0;
  };

  void begin(const overlay::PublicationId& id, const overlay::Announcement& announcement);
  void add(const overlay::PublicationId& id, const std::vector<overlay::SealedChunk>& chunks);
  void close(const overlay::PublicationId& id, const overlay::Digest& policy_digest);

  const Publication* find(const overlay::PublicationId& id) const;
  const std::map<overlay::PublicationId, Publication>& all() const { return publications_; }
  // Whether the bytes are exactly those of this chunk.
  bool matches(const overlay::PublicationId& id, std::uint32_t index, const overlay::Slice& bytes) const;
  // Whether these consecutive pieces are exactly the payload of a closed publication with these properties.
  bool matches(const overlay::PublicationKey& key, const overlay::Digest& policy_digest,
               std::span<const overlay::Slice> pieces) const;
  // The epochs in which the learner published the policy with this digest. A restarted learner begins a new epoch.
  std::set<std::uint64_t> epochs_of(const overlay::Digest& policy_digest) const;
  // The hash of a chunk that the learner made, or null. Chunks are found by the address of their bytes, which stay in
  // place while this object lives.
  const overlay::trust::Hash* hash_of(const overlay::Slice& bytes) const;

 private:
  struct KnownChunk {
    std::size_t length;
    overlay::trust::Hash hash;
  };
  std::map<overlay::PublicationId, Publication> publications_;
  std::unordered_map<const std::byte*, KnownChunk> chunk_by_address_;
};

// Checks a signature by signing again with the run's private key, which is faster than verifying, and exact because
// Ed25519 is deterministic. Not thread-safe. `published_content` must outlive the checker.
class CachingChecker final : public overlay::SignatureChecker {
 public:
  CachingChecker(std::string run_id, overlay::trust::SigningKey run_key, const PublishedContent& published_content)
      : SignatureChecker(std::move(run_id), run_key.public_key()),
        key_(std::move(run_key)),
        published_content_(published_content) {}

  overlay::trust::Hash chunk_hash(const overlay::Slice& bytes) const override;

 protected:
  bool verify(std::string_view context, std::span<const std::byte> bytes,
              const overlay::trust::Signature& signature) const override;

 private:
  struct KeyHash {
    std::size_t operator()(const overlay::trust::Hash& hash) const;
  };
  overlay::trust::SigningKey key_;
  const PublishedContent& published_content_;
  mutable std::unordered_map<overlay::trust::Hash, bool, KeyHash> verified_;  // by the hash of all inputs of the check
};

}  // namespace echoline::sim
