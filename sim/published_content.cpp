// The learner's real publications, for Fleet and Invariants.
#include "sim/published_content.hpp"

#include <algorithm>
#include <cstring>

namespace echoline::sim {

using namespace overlay;

void PublishedContent::begin(const PublicationId& id, const Announcement& announcement) {
  Publication& publication = publications_[id];
  publication.key = announcement.key;
  publication.epoch = announcement.epoch;
  publication.chunk_bytes = announcement.chunk_bytes;
}

void PublishedContent::add(const PublicationId& id, const std::vector<SealedChunk>& chunks) {
  Publication& publication = publications_.at(id);
  for (const SealedChunk& chunk : chunks) {
    ECHO_CHECK(chunk.head.index == publication.chunks.size(), "chunks must be made in order");
    publication.chunks.push_back(chunk);
    publication.bytes += chunk.data.size();
    chunk_by_address_[chunk.data.data()] = {chunk.data.size(), chunk.hash};
  }
}

void PublishedContent::close(const PublicationId& id, const Digest& policy_digest) {
  publications_.at(id).policy_digest = policy_digest;
}

const PublishedContent::Publication* PublishedContent::find(const PublicationId& id) const {
  const auto it = publications_.find(id);
  return it == publications_.end() ? nullptr : &it->second;
}

bool PublishedContent::matches(const PublicationId& id, std::uint32_t index, const Slice& bytes) const {
  const Publication* publication = find(id);
  if (!publication || index >= publication->chunks.size()) return false;
  const Slice& data = publication->chunks[index].data;
  if (data.size() != bytes.size()) return false;
  return data.data() == bytes.data() || std::memcmp(data.data(), bytes.data(), data.size()) == 0;
}

bool PublishedContent::matches(const PublicationKey& key, const Digest& policy_digest,
                               std::span<const Slice> pieces) const {
  for (const auto& [id, publication] : publications_) {
    if (publication.key != key || publication.policy_digest != policy_digest ||
        publication.chunks.size() != pieces.size())
      continue;
    bool all_match = true;
    for (std::uint32_t i = 0; all_match && i < pieces.size(); ++i) all_match = matches(id, i, pieces[i]);
    if (all_match) return true;
  }
  return false;
}

std::set<std::uint64_t> PublishedContent::epochs_of(const Digest& policy_digest) const {
  std::set<std::uint64_t> epochs;
  for (const auto& [id, publication] : publications_)
    if (publication.policy_digest == policy_digest) epochs.insert(publication.epoch);
  return epochs;
}

const trust::Hash* PublishedContent::hash_of(const Slice& bytes) const {
  const auto it = chunk_by_address_.find(bytes.data());
  return it == chunk_by_address_.end() || it->second.length != bytes.size() ? nullptr : &it->second.hash;
}

trust::Hash CachingChecker::chunk_hash(const Slice& bytes) const {
  if (const trust::Hash* known = published_content_.hash_of(bytes)) return *known;
  return SignatureChecker::chunk_hash(bytes);
}

bool CachingChecker::verify(std::string_view context, std::span<const std::byte> bytes,
                            const trust::Signature& signature) const {
  const trust::Hash inputs_hash =
      trust::Hasher().update(std::as_bytes(std::span(context))).update(signature.bytes).update(bytes).finish();
  const auto [it, is_new] = verified_.try_emplace(inputs_hash, false);
  // The simulator has the private key, and Ed25519 signs deterministically: only an equal signature is valid.
  if (is_new) it->second = key_.sign(context, bytes) == signature;
  return it->second;
}

std::size_t CachingChecker::KeyHash::operator()(const trust::Hash& hash) const {
  std::size_t prefix;
  std::memcpy(&prefix, hash.data(), sizeof prefix);
  return prefix;
}

}  // namespace echoline::sim
