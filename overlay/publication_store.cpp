// Stores, evicts and reads back publications. Called by both cores and EdgeSender.
#include "overlay/publication_store.hpp"

#include "overlay/sizes.hpp"

namespace echoline::overlay {
namespace {

constexpr std::uint32_t kReadAheadChunks = 16;  // chunks read from disk at a time
constexpr std::size_t kResidentSlack = 64;      // resident_ is swept only if dropped entries exceed half of it and this
// The learner's beacons list a publication within this time of its announcement, unless the learner abandoned it.
constexpr std::uint64_t kAbandonedAfterMs = 2000;
constexpr int kOfferedPerWrite = 2;  // unwritten chunks offered to the disk again after each successful write

}  // namespace

void PublicationStore::set_policy_size(Bytes policy) {
  if (policy.count == 0) return;
  if (!limits_.memory_is_fixed) limits_.memory_max = worker_memory_bytes(policy, limits_.disk);
  if (!limits_.disk_is_fixed) limits_.disk_max = worker_disk_bytes(policy);
}

Status PublicationStore::check_fits(Bytes policy) const {
  const Bytes needed = publication_bytes_max(policy);
  const Bytes available = limits_.disk ? limits_.disk_max : limits_.memory_max;
  if (policy.count == 0 || needed.count <= available.count) return ok();
  return fail(Code::kExhausted, "store publication",
              "a snapshot of the policy may have {} bytes, {} may hold {}: raise {}", needed.count,
              limits_.disk ? "the folder" : "memory", available.count,
              limits_.disk ? "--disk-max" : "--memory-max, or give this worker a --folder");
}

Status PublicationStore::begin(const Announcement& announcement, const SignedAnnouncement& as_signed,
                               Version keep_from) {
  const PublicationId id = id_of(as_signed);
  if (StoredPublication* known = find(announcement.key)) {
    if (known->id == id) return ok();
    // The later announcement of the same key wins, unless the known publication is complete.
    known->contested = !known->complete && announcement.issued <= known->announcement.issued;
    if (known->complete || known->contested)
      return fail(Code::kStale, "announce publication", "{} was announced before", to_text(announcement.key));
    erase(PublicationKey(announcement.key));  // a copy of the key, here and below: erase() destroys the entry with it
  }
  StoredPublication& entry = entries_[announcement.key];
  entry.id = id;
  entry.announcement = announcement;
  entry.signed_announcement = as_signed;
  key_by_id_[id] = announcement.key;
  for (auto it = entries_.begin(); it != entries_.end() && entries_.size() > limits_.publications_max;) {
    const PublicationKey key = (it++)->first;
    if (key.version >= keep_from) break;
    if (key != announcement.key) erase(key);
  }
  spool_record(entry, Slice(encode_control(as_signed)));
  return ok();
}

Result<bool> PublicationStore::close(const Manifest& manifest, const SignedManifest& as_signed) {
  const auto key = key_by_id_.find(manifest.publication);
  if (key == key_by_id_.end())
    return fail(Code::kNotFound, "close publication", "the manifest's publication was not announced");
  StoredPublication& entry = entries_.at(key->second);
  if (entry.manifest) {
    if (entry.manifest == manifest) return false;
    return fail(Code::kCorrupt, "close publication", "{} was closed before with another size or digest",
                to_text(entry.key()));
  }
  if (manifest.payload_bytes > std::uint64_t{kChunksMax} * entry.announcement.chunk_bytes)
    return fail(Code::kCorrupt, "close publication", "{}: {} bytes in chunks of {} are more than {} chunks",
                to_text(entry.key()), manifest.payload_bytes, entry.announcement.chunk_bytes, kChunksMax);
  entry.manifest = manifest;
  entry.signed_manifest = as_signed;
  spool_record(entry, Slice(encode_control(as_signed)));
  return complete_if_whole(entry);
}

Status PublicationStore::prove(const StoredPublication& publication, const Frame& frame, trust::Hash& hash) {
  constexpr std::string_view kOperation = "receive chunk";
  const ChunkHead& head = frame.chunk;
  const std::uint32_t chunk_bytes = publication.announcement.chunk_bytes;
  const bool is_beyond_end = publication.manifest && head.index >= *publication.chunk_count();
  if (is_beyond_end || head.length != frame.body.size() || head.length > chunk_bytes)
    return fail(Code::kCorrupt, kOperation, "{}: chunk {} of {} bytes does not belong to it",
                to_text(publication.key()), head.index, frame.body.size());
  hash = checker_.chunk_hash(frame.body);
  const trust::Hash root = SignatureChecker::root_of(head, hash);
  auto& seals = seals_[publication.id];
  // The signature of a seal is verified once, for the first of its chunks that arrives.
  const auto known = seals.find(head.seal_first);
  if (known != seals.end() && known->second.chunk_count == head.seal_count && known->second.root == root) return ok();
  if (!checker_.seal_holds(head, root))
    return fail(Code::kCorrupt, kOperation, "{} chunk {}: its proof fails, the learner did not send this",
                to_text(publication.key()), head.index);
  seals[head.seal_first] = {head.seal_count, root};
  return ok();
}

Result<PublicationStore::Put> PublicationStore::put(const Frame& frame, Version keep_from, bool installable_now) {
  const ChunkHead& head = frame.chunk;
  const auto key = key_by_id_.find(head.publication);
  if (key == key_by_id_.end())
    return fail(Code::kNotFound, "receive chunk", "chunk {} of a publication that was not announced", head.index);
  StoredPublication& entry = entries_.at(key->second);
  if (entry.have.contains(head.index)) return Put::kDuplicate;
  StoredChunk chunk{.head = frame.head, .data = frame.body, .length = head.length, .hash = {}, .on_disk = false};
  ECHO_TRY(prove(entry, frame, chunk.hash));
  ECHO_TRY(make_room(head.length, entry.key(), keep_from, /*may_drop_later=*/true, installable_now));
  store_chunk(entry, head.index, std::move(chunk));
  ECHO_ASSIGN(const bool complete, complete_if_whole(entry));
  return complete ? Put::kCompleted : Put::kAdded;
}

Status PublicationStore::add_own(const PublicationId& id, const ChunkHead& head, const trust::Hash& hash, Slice data,
                                 Version keep_from) {
  StoredPublication& entry = entries_.at(key_by_id_.at(id));
  ECHO_TRY(make_room(head.length, entry.key(), keep_from, /*may_drop_later=*/false, /*installable_now=*/false));
  store_chunk(entry, head.index,
              {.head = Slice(encode_chunk_head(head)),
               .data = std::move(data),
               .length = head.length,
               .hash = hash,
               .on_disk = false});
  return ok();
}

void PublicationStore::store_chunk(StoredPublication& entry, std::uint32_t index, StoredChunk chunk) {
  if (entry.chunks.size() <= index) entry.chunks.resize(index + 1);
  entry.have.insert(index);
  entry.bytes += chunk.length;
  memory_bytes_ += chunk.length;
  memory_peak_bytes_ = std::max(memory_peak_bytes_, memory_bytes_);
  if (limits_.disk) {
    disk_bytes_ += chunk.length;
    chunk.on_disk = is_recovering_;
    if (is_recovering_) resident_.emplace_back(entry.id, index);
  }
  entry.chunks[index] = std::move(chunk);
  if (limits_.disk && !is_recovering_) spool_chunk(entry, index);
}

void PublicationStore::spool_record(const StoredPublication& entry, Slice record) {
  if (limits_.disk && !is_recovering_)
    actions_.push_back(
        act::Spool{.publication = entry.id, .record = std::move(record), .chunk = {}, .offset = 0, .data = {}});
}

void PublicationStore::spool_chunk(const StoredPublication& entry, std::uint32_t index) {
  const StoredChunk& chunk = entry.chunks[index];
  ++writes_in_progress_[{entry.id, index}];
  actions_.push_back(act::Spool{.publication = entry.id,
                                .record = chunk.head,
                                .chunk = index,
                                .offset = std::uint64_t{index} * entry.announcement.chunk_bytes,
                                .data = chunk.data});
}

// Unwritten chunks are still in memory. After each successful write, a few of them are offered to the disk again.
// Offering all at once would keep a full disk busy with failing writes.
void PublicationStore::try_disk_again() {
  for (int offered = 0; offered < kOfferedPerWrite && !unwritten_.empty();) {
    const auto [id, index] = unwritten_.extract(unwritten_.begin()).value();
    const StoredPublication& entry = entries_.at(key_by_id_.at(id));  // erase() removes chunks of dropped ones
    if (!entry.have.contains(index) || entry.chunks[index].on_disk || writes_in_progress_.contains({id, index}))
      continue;
    spool_chunk(entry, index);
    ++offered;
  }
  if (unwritten_.empty()) has_disk_failed_ = false;
}

// A publication is complete once its manifest and all chunks are here. Each chunk is proven alone; the manifest proves
// the whole.
Result<bool> PublicationStore::complete_if_whole(StoredPublication& entry) {
  if (entry.complete || !entry.manifest) return false;
  const std::uint32_t count = *entry.chunk_count();
  if (entry.have.count() < count) return false;
  trust::Hasher content;
  for (const StoredChunk& chunk : entry.chunks) content.update(chunk.hash);
  if (entry.have.end() != count || entry.bytes != entry.manifest->payload_bytes ||
      content.finish() != entry.manifest->content) {
    const Error error = fail(Code::kCorrupt, "close publication", "{}: its {} chunks are not what its manifest says",
                             to_text(entry.key()), entry.have.count());
    erase(PublicationKey(entry.key()));
    return error;
  }
  entry.complete = true;
  seals_.erase(entry.id);
  if (entry.key().full() && (!full_version_ || *full_version_ <= entry.key().version)) {
    full_version_ = entry.key().version;
    full_bytes_ = entry.bytes;
  }
  return true;
}

// Drops whole publications, oldest first, until the limit leaves room for `bytes`. The limit is the disk's; without a
// disk, memory's; after a failed write, both. Then drops publications that `for_key` makes superfluous. If
// `may_drop_later`, finally drops those that can only be installed after it, newest first.
Status PublicationStore::make_room(std::uint64_t bytes, const PublicationKey& for_key, Version keep_from,
                                   bool may_drop_later, bool installable_now) {
  const bool limits_memory = !limits_.disk || has_disk_failed_;
  if (!limits_memory) evict();
  const auto is_memory_full = [&] { return limits_memory && memory_bytes_ + bytes > limits_.memory_max.count; };
  const auto is_full = [&] {
    return is_memory_full() || (limits_.disk && disk_bytes_ + bytes > limits_.disk_max.count);
  };
  for (auto it = entries_.begin(); it != entries_.end() && is_full();) {
    const PublicationKey key = (it++)->first;
    if (key.version >= keep_from) break;
    if (key != for_key) erase(key);
  }
  // A publication that can be installed at once makes other paths to its version superfluous, such as incomplete
  // snapshots.
  for (auto it = entries_.begin(); installable_now && it != entries_.end() && is_full();) {
    const auto& [key, stored] = *it++;
    if (key.version > for_key.version) break;
    if (key.full() && key != for_key && !stored.complete) erase(PublicationKey(key));
  }
  // A delta that can be installed at once also makes the versions between its base and its own version superfluous.
  const Version kept_up_to = installable_now && for_key.base ? *for_key.base : for_key.version;
  for (auto it = entries_.end(); may_drop_later && is_full() && it != entries_.begin();) {
    const PublicationKey newest_key = std::prev(it)->first;
    // A snapshot can be installed without `for_key`, and so can the deltas on it, which are older than any newer entry.
    if (newest_key.full() || newest_key.version <= kept_up_to) break;
    if (newest_key == for_key)
      --it;
    else
      erase(newest_key);
  }
  if (!is_full()) return ok();
  return fail(Code::kExhausted, "store publication", "{}: {} bytes are stored and still needed, the limit is {}: {}",
              to_text(for_key), is_memory_full() ? memory_bytes_ : disk_bytes_,
              is_memory_full() ? limits_.memory_max.count : limits_.disk_max.count,
              is_memory_full() ? "raise the memory budget or give the node a state folder" : "raise the disk budget");
}

// Goes down to half the limit, so that the next chunks find room at once.
void PublicationStore::evict() {
  while (!has_disk_failed_ && memory_bytes_ > limits_.memory_max.count / 2 && !resident_.empty()) {
    const auto [id, index] = resident_.front();
    resident_.pop_front();
    const auto key = key_by_id_.find(id);
    if (key == key_by_id_.end()) continue;
    StoredPublication& entry = entries_.at(key->second);
    if (!entry.have.contains(index)) continue;  // dropped and opened again
    StoredChunk& chunk = entry.chunks[index];
    if (!chunk.on_disk || chunk.data.empty()) continue;
    memory_bytes_ -= chunk.length;
    chunk.data = {};
  }
}

const StoredChunk* PublicationStore::fetch(StoredPublication& entry, std::uint32_t index) {
  if (!entry.chunks[index].data.empty()) return &entry.chunks[index];
  for (std::uint32_t i = index; i < entry.chunks.size() && i < index + kReadAheadChunks; ++i) {
    const StoredChunk& chunk = entry.chunks[i];
    if (!entry.have.contains(i) || !chunk.data.empty() || !reads_in_progress_.insert({entry.id, i}).second) continue;
    actions_.push_back(act::ReadChunk{.publication = entry.id,
                                      .chunk = i,
                                      .offset = std::uint64_t{i} * entry.announcement.chunk_bytes,
                                      .length = chunk.length});
  }
  return nullptr;
}

void PublicationStore::on_spooled(const PublicationId& id, std::uint32_t index, bool written) {
  if (!written) has_disk_failed_ = true;
  // Only the last write in progress counts (see writes_in_progress_).
  const auto writing = writes_in_progress_.find({id, index});
  if (writing != writes_in_progress_.end() && --writing->second > 0) return;
  if (writing != writes_in_progress_.end()) writes_in_progress_.erase(writing);
  const auto key = key_by_id_.find(id);
  StoredPublication* const entry = key == key_by_id_.end() ? nullptr : &entries_.at(key->second);
  const bool still_stored = entry && entry->have.contains(index);
  if (!written) {
    if (still_stored) unwritten_.insert({id, index});
    return;
  }
  if (still_stored) {
    entry->chunks[index].on_disk = true;
    resident_.emplace_back(id, index);
  }
  if (has_disk_failed_) try_disk_again();  // the disk accepts writes again
  evict();
}

bool PublicationStore::on_chunk_read(const PublicationId& id, std::uint32_t index, Slice data) {
  reads_in_progress_.erase({id, index});
  const auto key = key_by_id_.find(id);
  if (key == key_by_id_.end()) return true;
  StoredPublication& entry = entries_.at(key->second);
  // The publication was dropped and opened again, or the chunk is already here.
  if (!entry.have.contains(index) || !entry.chunks[index].data.empty()) return true;
  StoredChunk& chunk = entry.chunks[index];
  if (data.size() != chunk.length || checker_.chunk_hash(data) != chunk.hash) {
    erase(PublicationKey(key->second));
    return false;
  }
  chunk.data = std::move(data);
  memory_bytes_ += chunk.length;
  memory_peak_bytes_ = std::max(memory_peak_bytes_, memory_bytes_);
  resident_.emplace_back(id, index);
  evict();
  return true;
}

std::optional<act::DeliverPublication> PublicationStore::delivery(StoredPublication& entry) {
  act::DeliverPublication deliver;
  deliver.publication.id = entry.id;
  deliver.publication.version = entry.key().version;
  deliver.publication.base = entry.key().base;
  deliver.publication.policy_digest = entry.manifest->policy_digest;
  deliver.publication.note = entry.manifest->note;
  deliver.bytes = entry.bytes;
  std::vector<Slice> pieces;
  bool all_on_disk = true;
  std::optional<std::uint32_t> first_not_in_memory;
  for (std::uint32_t i = 0; i < entry.chunks.size(); ++i) {
    pieces.push_back(entry.chunks[i].data);
    all_on_disk = all_on_disk && entry.chunks[i].on_disk;
    if (pieces.back().empty() && !first_not_in_memory) first_not_in_memory = i;
  }
  if (!first_not_in_memory) {
    deliver.publication.payload = Payload(std::move(pieces));
  } else if (all_on_disk) {
    deliver.spooled = entry.id;
  } else {
    fetch(entry, *first_not_in_memory);
    return std::nullopt;
  }
  return deliver;
}

const StoredPublication* PublicationStore::find(const PublicationKey& key) const {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

StoredPublication* PublicationStore::find(const PublicationKey& key) {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

const StoredPublication* PublicationStore::find(const PublicationId& id) const {
  const auto key = key_by_id_.find(id);
  return key == key_by_id_.end() ? nullptr : &entries_.at(key->second);
}

std::optional<Version> PublicationStore::newest() const {
  if (entries_.empty()) return std::nullopt;
  return entries_.rbegin()->first.version;
}

void PublicationStore::erase(const PublicationKey& key) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  for (const StoredChunk& chunk : it->second.chunks) {
    if (chunk.data.empty()) continue;
    memory_bytes_ -= chunk.length;
    if (chunk.on_disk) ++resident_dropped_;
  }
  if (limits_.disk) {
    disk_bytes_ -= it->second.bytes;
    actions_.push_back(act::DropSpool{it->second.id});
  }
  unwritten_.erase(unwritten_.lower_bound({it->second.id, 0}),
                   unwritten_.upper_bound({it->second.id, ~std::uint32_t{0}}));
  key_by_id_.erase(it->second.id);
  seals_.erase(it->second.id);
  entries_.erase(it);
  if (2 * resident_dropped_ > resident_.size() + kResidentSlack) sweep_resident();
}

void PublicationStore::sweep_resident() {
  std::erase_if(resident_, [&](const auto& resident) {
    const auto key = key_by_id_.find(resident.first);
    if (key == key_by_id_.end()) return true;
    const StoredPublication& entry = entries_.at(key->second);
    return !entry.have.contains(resident.second) || !entry.chunks[resident.second].on_disk ||
           entry.chunks[resident.second].data.empty();
  });
  resident_dropped_ = 0;
}

bool PublicationStore::erase_expired(std::uint64_t unix_ms, Version keep_from) {
  bool erased = false;
  for (auto it = entries_.begin(); it != entries_.end() && it->first.version < keep_from;) {
    const auto next = std::next(it);
    if (it->second.announcement.expires_unix_ms < unix_ms) {
      erase(PublicationKey(it->first));
      erased = true;
    }
    it = next;
  }
  return erased;
}

bool PublicationStore::erase_abandoned(std::optional<Version> newest, std::uint64_t issue_time) {
  bool erased = false;
  while (!entries_.empty()) {
    const StoredPublication& latest = entries_.rbegin()->second;
    if (newest && latest.key().version <= *newest) break;
    if (latest.complete || latest.announcement.issued + kAbandonedAfterMs > issue_time) break;
    erase(PublicationKey(latest.key()));
    erased = true;
  }
  return erased;
}

bool PublicationStore::erase_contested() {
  std::vector<PublicationKey> contested;
  for (const auto& [key, stored] : entries_)
    if (stored.contested && !stored.complete) contested.push_back(key);
  for (const PublicationKey& key : contested) erase(key);
  return !contested.empty();
}

void PublicationStore::erase_partial_up_to(Version version) {
  for (auto it = entries_.begin(); it != entries_.end() && it->first.version <= version;) {
    const auto next = std::next(it);
    if (!it->second.complete) erase(PublicationKey(it->first));
    it = next;
  }
}

}  // namespace echoline::overlay
