#include "overlay/publication_store.hpp"

#include <xxhash.h>

#include <cstring>

namespace echoline::overlay {

Digest payload_digest(std::span<const std::byte> payload) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(payload.data(), payload.size()));
  Digest digest;
  static_assert(sizeof canonical.digest == sizeof digest);
  std::memcpy(digest.data(), canonical.digest, sizeof digest);
  return digest;
}

std::uint64_t chunk_hash(std::span<const std::byte> chunk) { return XXH3_64bits(chunk.data(), chunk.size()); }

Result<PreparedPublication> prepare(const Publication& publication, Bytes chunk) {
  constexpr std::string_view op = "publish";
  const PublicationKey key{publication.version, publication.base};
  if (!publication.payload) return fail(Code::kInvalid, op, "{} has no payload", to_text(key));
  if (key.base && *key.base >= key.version) return fail(Code::kInvalid, op, "{}: the base must be older", to_text(key));
  if (chunk.count < kChunkBytesMin || chunk.count > kChunkBytesMax)
    return fail(Code::kInvalid, op, "expected a chunk of {} to {} bytes, found {}", kChunkBytesMin, kChunkBytesMax,
                chunk.count);
  PreparedPublication p;
  p.payload = publication.payload;
  const std::span<const std::byte> bytes(*p.payload);
  if (bytes.size() > std::uint64_t{kChunksMax} * chunk.count)
    return fail(Code::kInvalid, op, "{}: {} bytes in chunks of {} are more than {} chunks; use larger chunks",
                to_text(key), bytes.size(), chunk.count, kChunksMax);
  p.manifest = {key, publication.policy_digest, payload_digest(bytes), bytes.size(),
                static_cast<std::uint32_t>(chunk.count)};
  p.chunk_hashes.reserve(p.manifest.chunk_count());
  for (std::uint32_t i = 0; i < p.manifest.chunk_count(); ++i)
    p.chunk_hashes.push_back(chunk_hash(bytes.subspan(std::size_t{i} * chunk.count, p.manifest.length_of(i))));
  return p;
}

Status PublicationStore::make_room(const Manifest& manifest, Version keep_from) {
  for (auto it = entries_.begin(); it != entries_.end() && bytes_ + manifest.payload_bytes > bytes_max_.count;) {
    if (it->first.version >= keep_from) break;
    const PublicationKey key = (it++)->first;
    erase(key);
  }
  if (bytes_ + manifest.payload_bytes > bytes_max_.count)
    return fail(Code::kExhausted, "store publication",
                "{} has {} bytes; the store holds {} bytes still needed of at most {}: raise store_bytes_max",
                to_text(manifest.key), manifest.payload_bytes, bytes_, bytes_max_.count);
  return ok();
}

void PublicationStore::note_full(const Manifest& manifest) {
  if (!manifest.key.full() || (full_version_ && *full_version_ > manifest.key.version)) return;
  full_version_ = manifest.key.version;
  full_bytes_ = manifest.payload_bytes;
}

Status PublicationStore::begin(const Manifest& manifest, Version keep_from) {
  if (const StoredPublication* known = find(manifest.key)) {
    if (known->manifest == manifest) return ok();
    return fail(Code::kCorrupt, "announce publication",
                "{} was announced before with another digest, size or chunk size", to_text(manifest.key));
  }
  ECHO_TRY(make_room(manifest, keep_from));
  auto memory = std::make_shared<std::vector<std::byte>>(manifest.payload_bytes);
  const std::uint32_t chunks = manifest.chunk_count();
  StoredPublication entry{manifest, memory, ChunkSet(chunks), std::vector<std::uint64_t>(chunks), false};
  if (chunks == 0) {
    entry.verified = manifest.payload_digest == payload_digest({});
    if (!entry.verified)
      return fail(Code::kCorrupt, "announce publication", "{} is empty but its digest is not", to_text(manifest.key));
  } else {
    arriving_[manifest.key] = std::move(memory);
  }
  note_full(manifest);
  bytes_ += manifest.payload_bytes;
  entries_.emplace(manifest.key, std::move(entry));
  return ok();
}

Status PublicationStore::add(PreparedPublication p, Version keep_from) {
  if (find(p.manifest.key)) return ok();
  ECHO_TRY(make_room(p.manifest, keep_from));
  note_full(p.manifest);
  bytes_ += p.manifest.payload_bytes;
  entries_.emplace(p.manifest.key,
                   StoredPublication{p.manifest, std::move(p.payload), ChunkSet::all(p.manifest.chunk_count()),
                                     std::move(p.chunk_hashes), true});
  return ok();
}

Result<PublicationStore::Put> PublicationStore::put(const ChunkHeader& header, std::span<const std::byte> bytes) {
  constexpr std::string_view op = "receive chunk";
  const auto it = entries_.find(header.key);
  if (it == entries_.end())
    return fail(Code::kNotFound, op, "{} chunk {} was not announced", to_text(header.key), header.index);
  StoredPublication& entry = it->second;
  const Manifest& m = entry.manifest;
  if (header.index >= m.chunk_count() || bytes.size() != m.length_of(header.index))
    return fail(Code::kCorrupt, op, "{}: chunk {} of {} bytes does not belong to {} chunks of {} bytes ({} in all)",
                to_text(m.key), header.index, bytes.size(), m.chunk_count(), m.chunk_bytes, m.payload_bytes);
  if (entry.have.contains(header.index)) return Put::kDuplicate;
  if (const std::uint64_t found = chunk_hash(bytes); found != header.xxh3_64)
    return fail(Code::kCorrupt, op, "{} chunk {}: expected XXH3-64 {:016x}, found {:016x}", to_text(m.key),
                header.index, header.xxh3_64, found);
  std::vector<std::byte>& memory = *arriving_.at(header.key);
  std::memcpy(memory.data() + std::size_t{header.index} * m.chunk_bytes, bytes.data(), bytes.size());
  entry.have.insert(header.index);
  entry.chunk_hashes[header.index] = header.xxh3_64;
  if (!entry.have.complete()) return Put::kAdded;
  if (const Digest found = payload_digest(memory); found != m.payload_digest) {
    const Error error = fail(Code::kCorrupt, op, "{}: expected payload digest {}, found {}", to_text(m.key),
                             to_hex(m.payload_digest), to_hex(found));
    erase(PublicationKey(header.key));
    return error;
  }
  entry.verified = true;
  arriving_.erase(header.key);
  return Put::kCompleted;
}

const StoredPublication* PublicationStore::find(const PublicationKey& key) const {
  const auto it = entries_.find(key);
  return it == entries_.end() ? nullptr : &it->second;
}

std::optional<Version> PublicationStore::newest() const {
  if (entries_.empty()) return std::nullopt;
  return entries_.rbegin()->first.version;
}

void PublicationStore::erase(const PublicationKey& key) {
  const auto it = entries_.find(key);
  if (it == entries_.end()) return;
  bytes_ -= it->second.manifest.payload_bytes;
  arriving_.erase(key);
  entries_.erase(it);
}

void PublicationStore::erase_partial_up_to(Version version) {
  for (auto it = entries_.begin(); it != entries_.end() && it->first.version <= version;) {
    const auto next = std::next(it);
    if (!it->second.verified) erase(PublicationKey(it->first));
    it = next;
  }
}

}  // namespace echoline::overlay
