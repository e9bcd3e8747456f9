// Recent publications of one node, complete or still arriving. A publication is one policy version as it travels: a
// full snapshot, or a delta on an older version (its base). Every chunk in the store is proven: its hash belongs to a
// seal that the learner signed (wire/proof.hpp). Memory and disk are bounded. When memory runs short, chunks that are
// on disk leave it and are read back on request. No I/O and no clock.
#pragma once
#include <deque>
#include <map>
#include <set>

#include "overlay/action.hpp"
#include "overlay/wire/control.hpp"
#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

struct StoredChunk {
  Slice head;  // frame header and chunk head, forwarded unchanged
  Slice data;  // empty while the chunk is only on disk
  std::uint32_t length = 0;
  trust::Hash hash{};
  bool on_disk = false;
};

struct StoredPublication {
  PublicationId id{};
  Announcement announcement;
  SignedAnnouncement signed_announcement;
  std::optional<Manifest> manifest;
  SignedManifest signed_manifest;
  ChunkSet have;
  std::vector<StoredChunk> chunks;  // by index; those not in `have` are empty
  std::uint64_t bytes = 0;          // of the chunks in `have`
  bool complete = false;            // its manifest and all chunks are present
  bool contested = false;           // an older publication of the same key was refused in favour of this one

  const PublicationKey& key() const { return announcement.key; }
  std::optional<std::uint32_t> chunk_count() const {
    if (!manifest) return std::nullopt;
    return manifest->chunk_count(announcement.chunk_bytes);
  }
};

// Two things may exceed `memory_max`: chunks that arrive after a failed write, and chunks read back to deliver a
// publication.
struct StoreLimits {
  Bytes memory_max{256ull << 20};
  Bytes disk_max{64ull << 30};
  bool disk = false;                                    // the node has a disk
  bool memory_is_fixed = false, disk_is_fixed = false;  // set by the user: independent of the policy's size
  // Each publication takes some kB beside its chunks, and every arrival visits all of them. A child's list of its
  // chunks has the same limit.
  std::size_t publications_max = kHaveItemsMax;
};

class PublicationStore {
 public:
  // Both references must outlive the store; `actions` receives its disk writes and reads.
  PublicationStore(const StoreLimits& limits, const SignatureChecker& checker, std::vector<Action>& actions)
      : limits_(limits), checker_(checker), actions_(actions) {}

  // Sets the limits for a policy of this size, unless the user has fixed them.
  void set_policy_size(Bytes policy);
  // kExhausted: the store has no room for a snapshot of this size.
  Status check_fits(Bytes policy) const;
  // While on, added chunks come from this node's disk and are not written there again.
  void set_recovering(bool on) { is_recovering_ = on; }
  // Opens a publication. If its key is known: the same publication changes nothing, a later announcement replaces an
  // incomplete one, and any other returns kStale. Beyond publications_max, the oldest below `keep_from` are dropped.
  Status begin(const Announcement& announcement, const SignedAnnouncement& as_signed, Version keep_from = {});
  // Closes a publication; true: it is complete. kNotFound: not announced. kCorrupt: a different manifest has closed it
  // already, or the stored chunks do not match (the publication is then dropped).
  Result<bool> close(const Manifest& manifest, const SignedManifest& as_signed);

  enum class Put { kAdded, kCompleted, kDuplicate };  // kCompleted: the publication is complete now
  // Proves the chunk and keeps it. kNotFound: not announced. kCorrupt: the proof fails (nothing changes), or the
  // complete publication differs from its manifest (it is then dropped). kExhausted: no room.
  //
  // To make room, the store drops publications below `keep_from`, oldest first, then deltas above this one, newest
  // first. `installable_now`: this publication can be installed as soon as it is complete. Then deltas above its base
  // and incomplete snapshots up to it are dropped as well.
  Result<Put> put(const Frame& frame, Version keep_from, bool installable_now = false);
  // Adds a chunk made by this learner, with the head and hash from seal().
  Status add_own(const PublicationId& id, const ChunkHead& head, const trust::Hash& hash, Slice data,
                 Version keep_from);

  // Returns the chunk if its bytes are in memory. Otherwise null: the bytes are read back, together with the next
  // chunks, and the caller asks again after on_chunk_read().
  const StoredChunk* fetch(StoredPublication& publication, std::uint32_t index);
  void on_spooled(const PublicationId& id, std::uint32_t index, bool written);
  // False: the disk returned other bytes or none, and the publication has been dropped.
  bool on_chunk_read(const PublicationId& id, std::uint32_t index, Slice data);

  const StoredPublication* find(const PublicationKey& key) const;
  const StoredPublication* find(const PublicationId& id) const;
  StoredPublication* find(const PublicationKey& key);
  const std::map<PublicationKey, StoredPublication>& entries() const { return entries_; }
  std::optional<Version> newest() const;
  // Size of the newest full snapshot that has ever been complete here.
  std::optional<std::uint64_t> full_bytes_hint() const { return full_bytes_; }
  void erase(const PublicationKey& key);  // does nothing for an unknown key
  // Drops incomplete publications up to `version`: no node will complete them.
  void erase_partial_up_to(Version version);
  // A complete publication for the application: its bytes in memory, or its spool. Absent if only some bytes are on
  // disk and only others in memory: the rest is then read back, and the caller asks again after on_chunk_read().
  std::optional<act::DeliverPublication> delivery(StoredPublication& publication);

  // Drops expired publications with versions below `keep_from`. Returns whether any was dropped.
  bool erase_expired(std::uint64_t unix_ms, Version keep_from);
  // Drops incomplete publications that the learner has withdrawn: announced some time before `issue_time`, but newer
  // than `newest`, the learner's newest version at that time. Returns whether any was dropped.
  bool erase_abandoned(std::optional<Version> newest, std::uint64_t issue_time);
  // Drops incomplete publications that exclude an older one of the same key. Other nodes may have that one complete,
  // from before the learner's restart. Returns whether any was dropped.
  bool erase_contested();

  Bytes memory() const { return {memory_bytes_}; }
  Bytes memory_peak() const { return {memory_peak_bytes_}; }
  Bytes disk() const { return {disk_bytes_}; }
  // Length of resident_. At most half of the entries, and a few more, belong to dropped publications.
  std::size_t residents_listed() const { return resident_.size(); }
  // The disk is behind, and memory is above its limit: accept no more chunks for now.
  bool is_congested() const { return limits_.disk && !has_disk_failed_ && memory_bytes_ > limits_.memory_max.count; }
  // A write has failed. Chunks stay in memory until the disk has been offered all unwritten chunks again.
  bool has_disk_failed() const { return has_disk_failed_; }

 private:
  struct Seal {
    std::uint16_t chunk_count;
    trust::Hash root;  // of the Merkle tree over the chunks' hashes
  };
  Status prove(const StoredPublication& publication, const Frame& frame, trust::Hash& hash);  // sets `hash`
  Status make_room(std::uint64_t bytes, const PublicationKey& for_key, Version keep_from, bool may_drop_later,
                   bool installable_now);
  void store_chunk(StoredPublication& publication, std::uint32_t index, StoredChunk chunk);
  Result<bool> complete_if_whole(StoredPublication& publication);
  void evict();           // drops chunks from memory that are on disk
  void sweep_resident();  // removes the entries of dropped publications from resident_
  void try_disk_again();
  // Request a disk write: of an announcement or manifest, and of a chunk with its head.
  void spool_record(const StoredPublication& publication, Slice record);
  void spool_chunk(const StoredPublication& publication, std::uint32_t index);

  StoreLimits limits_;
  const SignatureChecker& checker_;
  std::vector<Action>& actions_;
  std::map<PublicationKey, StoredPublication> entries_;
  std::map<PublicationId, PublicationKey> key_by_id_;
  // Verified seals of arriving publications, by first chunk.
  std::map<PublicationId, std::map<std::uint32_t, Seal>> seals_;
  // Chunks in memory and on disk, in order of arrival. Entries of dropped publications are removed once they are more
  // than half.
  std::deque<std::pair<PublicationId, std::uint32_t>> resident_;
  std::size_t resident_dropped_ = 0;  // upper bound on the entries of dropped publications
  std::set<std::pair<PublicationId, std::uint32_t>> reads_in_progress_;  // of chunks
  // The number of unfinished writes of each chunk. Only the last one marks the chunk as on disk: between two writes,
  // the publication may have been dropped and opened again.
  std::map<std::pair<PublicationId, std::uint32_t>, std::size_t> writes_in_progress_;
  std::set<std::pair<PublicationId, std::uint32_t>> unwritten_;  // chunks whose write failed
  bool has_disk_failed_ = false, is_recovering_ = false;
  std::uint64_t memory_bytes_ = 0, memory_peak_bytes_ = 0, disk_bytes_ = 0;
  std::optional<Version> full_version_;      // of the newest full snapshot that was complete here
  std::optional<std::uint64_t> full_bytes_;  // its size
};

}  // namespace echoline::overlay
