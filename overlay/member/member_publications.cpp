// A worker's publications: what it believes, keeps, hands over, and never goes back behind.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/member/member_core.hpp"

namespace echoline::overlay {

bool MemberCore::recover(Frame frame, TimePoint now) {
  ECHO_CHECK(membership_.state() == Membership::State::kIdle, "recovered after the start");
  store_.set_recovering(true);
  if (frame.type == FrameType::kChunk) {
    on_chunk(nullptr, {}, frame, now);
    const StoredPublication* stored = store_.find(frame.chunk.publication);
    return stored && stored->have.contains(frame.chunk.index);
  }
  const auto message = decode_control(frame.body.bytes());
  if (!message) return false;
  if (const auto* announcement = std::get_if<SignedAnnouncement>(&*message)) {
    on_announcement(nullptr, *announcement, now);
    return store_.find(id_of(*announcement)) != nullptr;
  }
  if (const auto* manifest = std::get_if<SignedManifest>(&*message)) on_manifest(nullptr, *manifest, now);
  return true;
}

// Something that the learner cannot have sent came over this edge: the edge is to blame, for the parent should have
// checked it. The learner is told; after the second time the parent is not listened to any more.
void MemberCore::forged(Upstream* up, const PublicationId& id, std::uint32_t index, const std::string& what,
                        TimePoint now) {
  ++corrupt_;
  if (!up) return;  // from this worker's own disk
  log::warn("worker {}: from {}: {}", id_, up->parent.worker, what);
  if (assigned_ || up->catch_up_to) tell_learner(Poisoned{up->parent.worker, id, index}, now);
  if (++up->corrupt < kCorruptChunksMax) return;
  if (!up->catch_up_to) return upstream_failed(*up, EdgeTroubleKind::kRefused, what, now);
  const Version target = *up->catch_up_to;  // somebody else can help as well
  end_help(now);
  need_help(target, now);
}

// The learner went back to before something it had published, and says so under its signature: everything of the older
// epoch is void.
void MemberCore::begin_epoch(std::uint64_t epoch, TimePoint now) {
  if (epoch <= standing_.epoch()) return;
  log::warn("worker {}: the learner has begun epoch {}: what it published before is void", id_, epoch);
  standing_.begin_epoch(epoch);
  while (!store_.entries().empty()) store_.erase(PublicationKey(store_.entries().begin()->first));
  stall_.begin_epoch();
  if (helper_) end_help(now);
  for (auto& [id, up] : parents_) tell_have(up, now);
  store_changed(now);
}

void MemberCore::on_announcement(Upstream* up, const SignedAnnouncement& as_signed, TimePoint now) {
  if (store_.find(id_of(as_signed))) return;
  const auto announcement = config_.checker->open(as_signed);
  if (!announcement) return forged(up, {}, 0, announcement.error().message(), now);
  const PublicationKey& key = announcement->key;
  if (announcement->epoch > standing_.epoch()) begin_epoch(announcement->epoch, now);
  if (standing_.has(key.version)) return;
  // What is older than the floor may be part of the way back to it: nothing below it is ever activated.
  const bool expired = up && announcement->expires_unix_ms < learner_unix_ms(now);
  if (announcement->epoch < standing_.epoch() || expired) {
    ++refused_;
    return log::warn("worker {}: {} is refused: it is {}", id_, to_text(key),
                     expired ? "expired" : "of an epoch that is over");
  }
  const Version keep_from = standing_.keep_from(standing_.next_version());
  if (const Status begun = store_.begin(*announcement, as_signed, keep_from); !begun)
    return log::debug("worker {}: {}", id_, begun.error().message());
  if (standing_.announced(key.version)) stall_.wait(now);
  store_changed(now);
}

void MemberCore::on_manifest(Upstream* up, const SignedManifest& as_signed, TimePoint now) {
  const auto manifest = config_.checker->open(as_signed);
  if (!manifest) return forged(up, {}, 0, manifest.error().message(), now);
  const auto closed = store_.close(*manifest, as_signed);
  if (!closed) {
    if (closed.error().code == Code::kCorrupt) log::error("worker {}: {}", id_, closed.error().message());
    if (closed.error().code == Code::kCorrupt) store_changed(now);
    return;
  }
  store_changed(now);
  if (*closed)
    deliver(now);
  else
    raise_floor(manifest->publication);
}

void MemberCore::on_chunk(Upstream* up, ConnId conn, const Frame& frame, TimePoint now) {
  const std::size_t bytes = frame.body.size();
  if (up) {
    chunk_bytes_in_ += bytes;
    up->chunk_bytes += bytes;
  }
  const StoredPublication* stored = store_.find(frame.chunk.publication);
  const auto begins = stored ? standing_.leads_on_from(stored->key(), store_) : std::nullopt;
  const bool leads_on = begins.has_value();
  // What waits for the floor to be saved is still needed.
  const Version keep_from = standing_.keep_from(stored && stored->key().full() ? stored->key().version
                                                : begins                       ? *begins
                                                                               : standing_.next_version());
  const auto put = store_.put(frame, keep_from, leads_on && !standing_.staged());
  if (!put) {
    switch (put.error().code) {
      case Code::kCorrupt:
        forged(up, frame.chunk.publication, frame.chunk.index, put.error().message(), now);
        if (!store_.find(frame.chunk.publication)) return store_changed(now);
        if (up && up->stream_of(conn))
          send_control(conn, ChunkRequest{frame.chunk.publication, frame.chunk.index}, now);
        return;
      case Code::kExhausted:
        if (!up) {  // from a time with more room
          if (stored) store_.erase(PublicationKey(stored->key()));
          return;
        }
        if (leads_on) {
          stall_.store_refused();
          complain(put.error().message() + "; left out for now", now);
        }
        if (stored) store_.erase(PublicationKey(stored->key()));
        stall_.wait(now);
        return store_changed(now);
      default:
        ++duplicates_;  // dropped here meanwhile, or overtaken by a full snapshot
        return;
    }
  }
  if (up) up->failures = up->silences = 0;
  if (*put == PublicationStore::Put::kDuplicate) {
    ++duplicates_;
    return;
  }
  // What comes later is of no use without it. A publication that ended, and comes again, is none the further for it;
  // nor do parents bring anything to its end who take what was lost here for sent.
  const bool can_end = !stall_.is_lost_here() || (up && up->catch_up_to);
  if (leads_on) stall_.progressed(stored->key(), stored->have.count(), can_end, now);
  edges_.on_chunk_arrived(now);
  parts_.deliver(stored->id, standing_, store_, actions_);
  if (*put == PublicationStore::Put::kCompleted) {
    store_changed(now);
    deliver(now);
  }
  hold_or_resume_reading();
}

void MemberCore::store_changed(TimePoint now) {
  edges_.on_store_changed(now);
  for (const EdgeTrouble& t : edges_.take_troubles())
    log::info("worker {}: worker {} is told to ask for help to reach version {}", id_, t.child, t.what.target);
}

// ---- to the application ----

void MemberCore::parts_read(std::uint64_t bytes) { parts_.read(bytes, standing_, store_, actions_); }

// A delta on the present position is closed, so its version is published and its digest known. Raises the floor to it
// while its last chunks arrive: once they are here, the worker need not wait for the disk.
void MemberCore::raise_floor(const PublicationId& id) {
  const StoredPublication* stored = store_.find(id);
  if (!file_.durable() || standing_.staged() || membership_.state() == Membership::State::kIdle || !stored) return;
  if (!stored->key().base || !standing_.comes_next(*stored)) return;
  const Installed next{stored->key().version, stored->manifest->policy_digest, standing_.epoch()};
  auto& floor = file_.state().floor;
  if (floor && floor->epoch == standing_.epoch() && floor->version >= next.version) return;
  floor = next;
  save();
}

// What is staged becomes the floor, on disk first, and only then goes to the application: verify, persist, activate.
void MemberCore::deliver(TimePoint now) {
  if (standing_.staged() || membership_.state() == Membership::State::kIdle) return;
  PublicationKey foreign;
  switch (standing_.stage(store_, file_.state().floor, now, foreign)) {
    case Standing::Stage::kNothing:
      return;
    case Standing::Stage::kForeign:
      log::warn("worker {}: {} is refused: it is for another version {} than the one here", id_, to_text(foreign),
                *foreign.base);
      ++refused_;
      store_.erase(foreign);
      need_help(*standing_.repair(), now);
      return store_changed(now);
    case Standing::Stage::kOtherThanFloor:
      log::error("worker {}: version {} has another digest than before the restart; it is not activated", id_,
                 foreign.version);
      ++refused_;
      return;
    case Standing::Stage::kStaged:
      break;
  }
  const Installed& floor = standing_.staged()->last;
  if (file_.protects(floor))
    activate(now);
  else if (!file_.is_saving(floor))
    save();
}

void MemberCore::activate(TimePoint now) {
  const Standing::Staged& staged = *standing_.staged();
  if (std::any_of(staged.deliveries.begin(), staged.deliveries.end(),
                  [&](const act::Deliver& d) { return d.spooled && !store_.find(*d.spooled); })) {
    standing_.unstage();  // the disk lost it while the floor was being saved
    stall_.lost_here();
    stall_.begin_anew(now);
    deliver(now);  // what came meanwhile, if that goes without it
    if (!standing_.staged()) need_help(*standing_.newest(), now);
    return;
  }
  file_.state().floor = staged.last;
  for (act::Deliver& delivery : standing_.take_staged(now)) actions_.push_back(std::move(delivery));
  stall_.activated(!standing_.behind(), now);
  store_.erase_partial_up_to(*standing_.version());
  store_changed(now);
  if (helper_ && standing_.has(*helper_->catch_up_to)) end_help(now);
  deliver(now);  // what came meanwhile
}

// ---- disk ----

void MemberCore::on_spooled(const PublicationId& id, std::uint32_t chunk, const Status& status, TimePoint now) {
  if (!status && !store_.disk_failed())
    complain(fmt::format("chunks stay in memory, the disk does not take them: {}", status.error().message()), now);
  store_.on_spooled(id, chunk, status.has_value());
  hold_or_resume_reading();
}

void MemberCore::on_unspooled(const PublicationId& id, std::uint32_t chunk, Result<Slice> data, TimePoint now) {
  if (membership_.ended()) return;
  if (!store_.on_unspooled(id, chunk, data ? *std::move(data) : Slice())) {
    log::error("worker {}: the disk gave back other bytes than it was given; the publication is dropped", id_);
    stall_.lost_here();
    for (auto& [parent, up] : parents_) tell_have(up, now);
    store_changed(now);
  }
  edges_.on_chunk_arrived(now);
  if (parts_.feeds(id)) parts_.deliver(id, standing_, store_, actions_);
  deliver(now);
}

// Takes no more chunks than the disk can follow.
void MemberCore::hold_or_resume_reading() {
  if (store_.congested() == reading_held_) return;
  reading_held_ = !reading_held_;
  for (auto& [id, up] : parents_)
    for (const Upstream::Stream& stream : up.streams) actions_.push_back(act::SetReading{stream.conn, !reading_held_});
  if (helper_)
    for (const Upstream::Stream& stream : helper_->streams)
      actions_.push_back(act::SetReading{stream.conn, !reading_held_});
}

}  // namespace echoline::overlay
