// Delivers parts of publications that still arrive. Called by MemberCore for every chunk.
#include "overlay/member/parts_feed.hpp"

#include <algorithm>

namespace echoline::overlay {

// At a time, parts of one delta and of one snapshot are delivered: of each kind, the one that began first.
void PartsFeed::deliver(const PublicationId& id, const InstallState& install_state, PublicationStore& store,
                        std::vector<Action>& actions) {
  if (unread_bytes_max_ == 0) return;
  if (install_state.staged()) return;  // a delta on a staged version would reach the application before its base
  const StoredPublication* requested = store.find(id);
  if (!requested || !install_state.is_next(*requested)) return;
  const PublicationKey key = requested->key();
  Feed& feed = key.full() ? snapshot_ : delta_;
  if (feed.id != id) {
    const StoredPublication* begun_first = store.find(feed.id);
    if (begun_first && !begun_first->complete && install_state.is_next(*begun_first)) return;
    feed = {.id = id, .chunks_delivered = 0};
  }
  StoredPublication& stored = *store.find(key);
  for (; unread_bytes_ < unread_bytes_max_ && stored.have.contains(feed.chunks_delivered); ++feed.chunks_delivered) {
    const StoredChunk* chunk = store.fetch(stored, feed.chunks_delivered);
    if (!chunk) return;  // it is being read from disk
    const std::uint64_t offset = std::uint64_t{feed.chunks_delivered} * stored.announcement.chunk_bytes;
    actions.push_back(
        act::DeliverPart{{.id = id, .version = key.version, .base = key.base, .offset = offset, .bytes = chunk->data}});
    unread_bytes_ += chunk->data.size();
  }
}

void PartsFeed::on_consumed(std::uint64_t bytes, const InstallState& install_state, PublicationStore& store,
                            std::vector<Action>& actions) {
  unread_bytes_ -= std::min(unread_bytes_, bytes);
  for (const PublicationId id : {delta_.id, snapshot_.id}) deliver(id, install_state, store, actions);
}

}  // namespace echoline::overlay
