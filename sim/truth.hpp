// What the learner of a simulation really published, against which everything that travels is held; and a Checker that
// remembers what it has hashed and verified, so that a fleet of ten thousand costs little more than one worker.
#pragma once
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "overlay/wire/sealer.hpp"

namespace echoline::sim {

class Truth {
 public:
  struct Publication {
    overlay::PublicationKey key;
    std::uint64_t epoch = 0;
    std::uint32_t chunk_bytes = 0;
    std::vector<overlay::SealedChunk> chunks;      // by index
    std::optional<overlay::Digest> policy_digest;  // once it is closed
    std::uint64_t bytes = 0;
  };

  void begin(const overlay::PublicationId& id, const overlay::Announcement& announcement);
  void add(const overlay::PublicationId& id, const std::vector<overlay::SealedChunk>& chunks);
  void close(const overlay::PublicationId& id, const overlay::Digest& policy_digest);

  const Publication* find(const overlay::PublicationId& id) const;
  const std::map<overlay::PublicationId, Publication>& all() const { return publications_; }
  // The bytes are exactly those of this chunk.
  bool holds(const overlay::PublicationId& id, std::uint32_t index, const overlay::Slice& bytes) const;
  // These pieces one after another are exactly the payload of a publication that was closed with these facts.
  bool holds(const overlay::PublicationKey& key, const overlay::Digest& policy_digest,
             std::span<const overlay::Slice> pieces) const;
  // The epochs of the learner in which the policy with this digest was published.
  std::set<std::uint64_t> epochs_of(const overlay::Digest& policy_digest) const;
  // The hash of a chunk that the learner made, by where its bytes lie; they stay there as long as this object lives.
  const overlay::trust::Hash* hash_of(const overlay::Slice& bytes) const;

 private:
  struct Known {
    std::size_t length;
    overlay::trust::Hash hash;
  };
  std::map<overlay::PublicationId, Publication> publications_;
  std::unordered_map<const std::byte*, Known> known_;
};

// `truth` must outlive it. Ed25519 is deterministic: the run's signature is the one that its key makes. One thread.
class RememberingChecker final : public overlay::Checker {
 public:
  RememberingChecker(std::string run_id, overlay::trust::SigningKey run_key, const Truth& truth)
      : Checker(std::move(run_id), run_key.public_key()), key_(std::move(run_key)), truth_(truth) {}

  overlay::trust::Hash chunk_hash(const overlay::Slice& bytes) const override;

 protected:
  bool verify(std::string_view context, std::span<const std::byte> bytes,
              const overlay::trust::Signature& signature) const override;

 private:
  struct KeyHash {
    std::size_t operator()(const overlay::trust::Hash& hash) const;
  };
  overlay::trust::SigningKey key_;
  const Truth& truth_;
  mutable std::unordered_map<overlay::trust::Hash, bool, KeyHash> verified_;  // by everything that was asked
};

}  // namespace echoline::sim
