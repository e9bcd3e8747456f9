// Recent publications of one node, whole or still arriving. Every chunk in it is proven. Within a budget of memory, and
// of disk where there is one: chunks that are on disk leave memory when it runs short and are read back when asked for.
// Pure.
#pragma once
#include <deque>
#include <map>
#include <set>

#include "overlay/action.hpp"
#include "overlay/wire/control.hpp"
#include "overlay/wire/proof.hpp"

namespace echoline::overlay {

struct StoredChunk {
  Slice head;  // frame header and chunk head, forwarded as they came
  Slice data;  // empty while it is only on disk
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
  bool complete = false;            // closed by its manifest, and all there
  bool contested = false;           // an older publication of the same key was refused for this one

  const PublicationKey& key() const { return announcement.key; }
  std::optional<std::uint32_t> chunk_count() const {
    if (!manifest) return std::nullopt;
    return manifest->chunk_count(announcement.chunk_bytes);
  }
};

// Once the disk has failed to take a chunk, memory holds what arrives, and what is needed from disk to hand over a
// publication comes on top of `memory_max`.
struct StoreLimits {
  Bytes memory_max{256ull << 20};
  Bytes disk_max{64ull << 30};
  bool disk = false;                                    // there is one
  bool memory_is_fixed = false, disk_is_fixed = false;  // by the user: they do not follow the policy's size
  // Each publication takes some kB beside its chunks, and is looked at whenever one comes. A child says what it has of
  // as many.
  std::size_t publications_max = kHaveItemsMax;
};

class PublicationStore {
 public:
  // Both references must outlive the store; `actions` receives what is to be written to disk and read from it.
  PublicationStore(const StoreLimits& limits, const Checker& checker, std::vector<Action>& actions)
      : limits_(limits), checker_(checker), actions_(actions) {}

  // Makes room for a policy of this size.
  void fit(Bytes policy);
  // kExhausted: a snapshot of it has no room here.
  Status check_fits(Bytes policy) const;
  // While on, what is put in comes from this node's disk and is not written there again.
  void set_recovering(bool on) { recovering_ = on; }
  // A publication opens. Under a key that is known: nothing happens when it is the same one, a later announcement
  // replaces one that is not complete, and kStale otherwise. Beyond publications_max the oldest below `keep_from` go.
  Status begin(const Announcement& announcement, const SignedAnnouncement& as_signed, Version keep_from = {});
  // The publication closes. kNotFound: not announced. kCorrupt: another manifest closed it before, or what is here
  // does not match (it is then dropped).
  Result<bool> close(const Manifest& manifest, const SignedManifest& as_signed);  // true: it is complete

  enum class Put { kAdded, kCompleted, kDuplicate };
  // Proves the chunk and keeps it. kNotFound: not announced. kCorrupt: the proof fails (nothing changes), or the whole
  // is not what the manifest says (the publication is then dropped). kExhausted: no room even after dropping
  // publications below `keep_from`, oldest first, and deltas above this one, newest first. Where `at_once` says that it
  // can be installed as soon as it is whole: also deltas above its base, and snapshots up to it that are not whole.
  Result<Put> put(const Frame& chunk, Version keep_from, bool at_once = false);
  // A chunk of the learner's own making, with what seal() gave.
  Status add_own(const PublicationId& id, const ChunkHead& head, const trust::Hash& hash, Slice data,
                 Version keep_from);

  // The chunk's bytes, if they are in memory; otherwise they are read back, with those behind it, and on_unspooled()
  // says when to ask again.
  const StoredChunk* fetch(StoredPublication& publication, std::uint32_t index);
  void on_spooled(const PublicationId& id, std::uint32_t index, bool written);
  // False: the disk gave back something else, or nothing; the publication has been dropped.
  bool on_unspooled(const PublicationId& id, std::uint32_t index, Slice data);

  const StoredPublication* find(const PublicationKey& key) const;
  const StoredPublication* find(const PublicationId& id) const;
  StoredPublication* find(const PublicationKey& key);
  const std::map<PublicationKey, StoredPublication>& entries() const { return entries_; }
  std::optional<Version> newest() const;
  // Size of the newest whole full snapshot that was ever here.
  std::optional<std::uint64_t> full_bytes_hint() const { return full_bytes_; }
  void erase(const PublicationKey& key);
  // Drops what is not whole and not above `version`: nobody will finish it.
  void erase_partial_up_to(Version version);
  // The bytes of a complete publication for the application: in memory, or the spool that holds them. Nothing while
  // what the disk could not take meets what it took: then the rest is read back, and on_unspooled() says when to ask
  // again.
  std::optional<act::Deliver> delivery(StoredPublication& publication);

  // Drops what nobody would take any more. True: something went.
  bool erase_expired(std::uint64_t unix_ms, Version keep_from);
  // Drops what was announced some time before `issue_time`, is not whole, and is newer than what the learner called the
  // newest at that time: it has taken that back. True: something went.
  bool erase_abandoned(std::optional<Version> newest, std::uint64_t issue_time);
  // Drops what is not whole and stands in the way of an older publication of the same key: the others may have that one
  // whole, from before the learner restarted. True: something went.
  bool erase_contested();

  Bytes memory() const { return {memory_}; }
  Bytes memory_peak() const { return {memory_peak_}; }
  Bytes disk() const { return {disk_}; }
  // Chunks listed as in memory and on disk; those of dropped publications are at most half of them, and a few.
  std::size_t residents_listed() const { return resident_.size(); }
  // More chunks are in memory than allowed because the disk is behind: take no more for now.
  bool congested() const { return limits_.disk && !disk_failed_ && memory_ > limits_.memory_max.count; }
  // A chunk could not be written: everything stays in memory until the disk takes some again and was offered all.
  bool disk_failed() const { return disk_failed_; }

 private:
  struct Seal {
    std::uint16_t count;
    trust::Hash root;
  };
  Status prove(const StoredPublication& publication, const Frame& chunk, trust::Hash& hash);
  Status make_room(std::uint64_t bytes, const PublicationKey& for_key, Version keep_from, bool later_may_go,
                   bool at_once);
  void keep(StoredPublication& publication, std::uint32_t index, StoredChunk chunk);
  Result<bool> finish(StoredPublication& publication);
  void evict();
  void sweep_resident();
  void try_disk_again();
  void spool(const StoredPublication& publication, Slice record);
  void spool(const StoredPublication& publication, std::uint32_t index);

  StoreLimits limits_;
  const Checker& checker_;
  std::vector<Action>& actions_;
  std::map<PublicationKey, StoredPublication> entries_;
  std::map<PublicationId, PublicationKey> keys_;
  std::map<PublicationId, std::map<std::uint32_t, Seal>> seals_;  // that hold, of what is arriving, by first chunk
  // In memory and on disk, in order of arrival; those of dropped publications go when they are more than half.
  std::deque<std::pair<PublicationId, std::uint32_t>> resident_;
  std::size_t resident_dropped_ = 0;  // at most so many of them
  std::set<std::pair<PublicationId, std::uint32_t>> reading_;
  // Writes of a chunk that are under way. Only the last one says that it is on disk: between two of them the
  // publication may have been dropped, and begun anew.
  std::map<std::pair<PublicationId, std::uint32_t>, std::size_t> writing_;
  std::set<std::pair<PublicationId, std::uint32_t>> unwritten_;  // that the disk did not take
  bool disk_failed_ = false, recovering_ = false;
  std::uint64_t memory_ = 0, memory_peak_ = 0, disk_ = 0;
  std::optional<Version> full_version_;
  std::optional<std::uint64_t> full_bytes_;
};

}  // namespace echoline::overlay
