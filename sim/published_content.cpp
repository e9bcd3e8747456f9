// The learner's real publications, for Fleet and Invariants.
#include "sim/published_content.hpp"

#include <algorithm>
#include <cstring>

namespace echoline::sim {

using namespace overlay;

void PublishedContent::begin(const PublicationId& id, const Announcement& announcement) {
  Publication& p = publications_[id];
  p.key = announcement.key;
  p.epoch = announcement.epoch;
  p.chunk_bytes = announcement.chunk_bytes;
}

void PublishedContent::add(const PublicationId& id, const std::vector<SealedChunk>& chunks) {
  Publication& p = publications_.at(id);
  for (const SealedChunk& chunk : chunks) {
    ECHO_CHECK(chunk.head.index == p.chunks.size(), "chunks must be made in order");
    p.chunks.push_back(chunk);
    p.bytes += chunk.data.size();
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
  const Publication* p = find(id);
  if (!p || index >= p->chunks.size()) return false;
  const Slice& data = p->chunks[index].data;
  if (data.size() != bytes.size()) return false;
  return data.data() == bytes.data() || std::memcmp(data.data(), bytes.data(), data.size()) == 0;
}

bool PublishedContent::matches(const PublicationKey& key, const Digest& policy_digest,
                               std::span<const Slice> pieces) const {
  for (const auto& [id, p] : publications_) {
    if (p.key != key || p.policy_digest != policy_digest || p.chunks.size() != pieces.size()) continue;
    bool same = true;
    for (std::uint32_t i = 0; same && i < pieces.size(); ++i) same = matches(id, i, pieces[i]);
    if (same) return true;
  }
  return false;
}

std::set<std::uint64_t> PublishedContent::epochs_of(const Digest& policy_digest) const {
  std::set<std::uint64_t> epochs;
  for (const auto& [id, p] : publications_)
    if (p.policy_digest == policy_digest) epochs.insert(p.epoch);
  return epochs;
}

const trust::Hash* PublishedContent::hash_of(const Slice& bytes) const {
  const auto it = chunk_by_address_.find(bytes.data());
  return it == chunk_by_address_.end() || it->second.length != bytes.size() ? nullptr : &it->second.hash;
}

trust::Hash RememberingChecker::chunk_hash(const Slice& bytes) const {
  if (const trust::Hash* known = published_content_.hash_of(bytes)) return *known;
  return Checker::chunk_hash(bytes);
}

bool RememberingChecker::verify(std::string_view context, std::span<const std::byte> bytes,
                                const trust::Signature& signature) const {
  const trust::Hash question =
      trust::Hasher().update(std::as_bytes(std::span(context))).update(signature.bytes).update(bytes).finish();
  const auto [it, asked_first] = verified_.try_emplace(question, false);
  if (asked_first) it->second = key_.sign(context, bytes) == signature;
  return it->second;
}

std::size_t RememberingChecker::KeyHash::operator()(const trust::Hash& hash) const {
  std::size_t h;
  std::memcpy(&h, hash.data(), sizeof h);
  return h;
}

}  // namespace echoline::sim
