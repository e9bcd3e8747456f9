// The learner's signatures over a publication, and the checks of a node before it uses, keeps or forwards any part.
//
// A publication opens with a signed announcement. While it is still being encoded, the learner seals its chunks, a few
// at a time, with a signature over the Merkle root of their hashes. A signed manifest closes it. A beacon is the
// learner's signed heartbeat. Any node can forward these messages; only the run's key can make them.
#pragma once
#include <span>
#include <string>
#include <vector>

#include "overlay/trust/authority.hpp"
#include "overlay/wire/control.hpp"

namespace echoline::overlay {

struct Announcement {
  std::string run_id;
  std::uint64_t epoch = 0;
  PublicationKey key;
  Digest base_digest{};  // of the policy it must be installed on; zeros for a full snapshot
  std::uint32_t chunk_bytes = 0;
  std::uint64_t issued = 0;           // the learner's issue time [ms] (LearnerCore::issue_time)
  std::uint64_t expires_unix_ms = 0;  // by the learner's clock
  friend bool operator==(const Announcement&, const Announcement&) = default;
};

struct Manifest {
  PublicationId publication{};
  std::uint64_t payload_bytes = 0;
  trust::Hash content{};   // BLAKE3 over the hashes of all chunks in order
  Digest policy_digest{};  // of the policy after installation; the application's own
  std::string note;        // the application's description of the policy; at most kNoteBytesMax
  std::uint32_t chunk_count(std::uint32_t chunk_bytes) const {
    return static_cast<std::uint32_t>((payload_bytes + chunk_bytes - 1) / chunk_bytes);
  }
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// A set of workers as ranges of their ids: consecutive ids take the room of one range.
class WorkerSet {
 public:
  struct Range {
    std::uint64_t first = 0, last = 0;
    friend bool operator==(const Range&, const Range&) = default;
  };
  WorkerSet() = default;
  WorkerSet(std::initializer_list<WorkerId> ids) {
    for (const WorkerId id : ids) append(id.value, id.value);
  }
  // Adds ids above all in the set (checked).
  void append(std::uint64_t first, std::uint64_t last);
  bool contains(WorkerId id) const;
  const std::vector<Range>& ranges() const { return ranges_; }
  // Reduces the number of ranges by filling gaps, smallest gaps first. Fills no gap that contains one of `excluded`
  // (ascending).
  void widen(std::size_t ranges_max, const std::vector<WorkerId>& excluded);
  friend bool operator==(const WorkerSet&, const WorkerSet&) = default;

 private:
  std::vector<Range> ranges_;
};

struct Beacon {
  std::string run_id;
  std::uint64_t epoch = 0;
  std::uint64_t sequence = 0;  // the learner's issue time [ms] (LearnerCore::issue_time); orders beacons
  std::uint64_t issued_unix_ms = 0, expires_unix_ms = 0;
  std::optional<Version> newest;
  WorkerSet revoked;
};

PublicationId id_of(const SignedAnnouncement& announcement);
// The chunk size that an announcement states, unverified; 0 if it cannot be read.
std::uint32_t announced_chunk_bytes(const SignedAnnouncement& announcement);
SignedAnnouncement sign(const Announcement& announcement, const trust::SigningKey& key);
SignedManifest sign(const Manifest& manifest, const trust::SigningKey& key);
SignedBeacon sign(const Beacon& beacon, const trust::SigningKey& key);

// Heads of consecutive chunks under one seal: 1 to kSealChunksMax pieces, the first of them chunk `first`.
// `hashes` receives the hash of every piece.
std::vector<ChunkHead> seal(const PublicationId& publication, std::uint32_t first,
                            std::span<const std::span<const std::byte>> pieces, const trust::SigningKey& key,
                            std::vector<trust::Hash>& hashes);

// Checks signatures against the run's public key. No I/O and no clock. The two virtual functions let a simulation of
// ten thousand workers hash each chunk once.
class SignatureChecker {
 public:
  SignatureChecker(std::string run_id, const trust::PublicKey& run_key)
      : run_id_(std::move(run_id)), verifier_(run_key) {}
  virtual ~SignatureChecker() = default;

  // kCorrupt: not signed by this run's learner, of another run, or breaking a limit. The caller checks expiry.
  Result<Announcement> open(const SignedAnnouncement& announcement) const;
  Result<Manifest> open(const SignedManifest& manifest) const;
  Result<Beacon> open(const Signed& beacon) const;
  // kCorrupt: the body was not signed by this run's learner, for this purpose.
  Status check(std::string_view context, const Signed& message) const;
  // The Merkle root from the chunk and its path, for seal_holds(). `hash` is chunk_hash() of its bytes.
  static trust::Hash root_of(const ChunkHead& head, const trust::Hash& hash);
  // Whether the learner has signed this root in the chunk's seal.
  bool seal_holds(const ChunkHead& head, const trust::Hash& root) const;

  virtual trust::Hash chunk_hash(const Slice& bytes) const { return trust::blake3(bytes.bytes()); }
  const std::string& run_id() const { return run_id_; }
  const trust::PublicKey& run_key() const { return verifier_.public_key(); }

 protected:
  virtual bool verify(std::string_view context, std::span<const std::byte> bytes,
                      const trust::Signature& signature) const {
    return verifier_.verify(context, bytes, signature);
  }

 private:
  std::string run_id_;
  trust::Verifier verifier_;
};

}  // namespace echoline::overlay
