// Delivers parts of publications that still arrive. Called by MemberCore for every chunk.
#include "overlay/member/parts_feed.hpp"

#include <algorithm>

namespace echoline::overlay {

// At a time, parts of one delta and of one snapshot are delivered: of each kind, the one that began first.
void PartsFeed::deliver(const PublicationId& id, const InstallState& install_state, PublicationStore& store,
                        std::vector<Action>& actions) {
  if (unread_max_ == 0 || install_state.staged()) return;
  const StoredPublication* named = store.find(id);
  if (!named || !install_state.is_next(*named)) return;
  const PublicationKey key = named->key();
  Parts& parts = key.full() ? snapshot_ : delta_;
  if (parts.id != id) {
    const StoredPublication* first = store.find(parts.id);
    if (first && !first->complete && install_state.is_next(*first)) return;
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

void PartsFeed::on_consumed(std::uint64_t bytes, const InstallState& install_state, PublicationStore& store,
                            std::vector<Action>& actions) {
  unread_ -= std::min(unread_, bytes);
  for (const PublicationId id : {delta_.id, snapshot_.id}) deliver(id, install_state, store, actions);
}

}  // namespace echoline::overlay
