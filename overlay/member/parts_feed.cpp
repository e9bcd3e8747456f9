#include "overlay/member/parts_feed.hpp"

#include <algorithm>

namespace echoline::overlay {

// Deltas may go on while a snapshot arrives beside them; where several of either do, of the first.
void PartsFeed::deliver(const PublicationId& id, const Standing& standing, PublicationStore& store,
                        std::vector<Action>& actions) {
  if (unread_max_ == 0 || standing.staged()) return;
  const StoredPublication* named = store.find(id);
  if (!named || !standing.comes_next(*named)) return;
  const PublicationKey key = named->key();
  Parts& parts = key.full() ? snapshot_ : delta_;
  if (parts.id != id) {
    const StoredPublication* first = store.find(parts.id);
    if (first && !first->complete && standing.comes_next(*first)) return;
    parts = {id, 0};
  }
  StoredPublication& stored = *store.find(key);
  for (; unread_ < unread_max_ && stored.have.contains(parts.chunks); ++parts.chunks) {
    const StoredChunk* chunk = store.fetch(stored, parts.chunks);
    if (!chunk) return;  // it comes from disk
    const std::uint64_t offset = std::uint64_t{parts.chunks} * stored.announcement.chunk_bytes;
    actions.push_back(act::DeliverPart{{id, key.version, key.base, offset, chunk->data}});
    unread_ += chunk->data.size();
  }
}

void PartsFeed::read(std::uint64_t bytes, const Standing& standing, PublicationStore& store,
                     std::vector<Action>& actions) {
  unread_ -= std::min(unread_, bytes);
  for (const PublicationId id : {delta_.id, snapshot_.id}) deliver(id, standing, store, actions);
}

}  // namespace echoline::overlay
