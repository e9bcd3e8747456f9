// A worker's publications: what it accepts, keeps, forwards and delivers. It never goes back below its floor.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/member/member_core.hpp"

namespace echoline::overlay {

bool MemberCore::recover(Frame frame, TimePoint now) {
  ECHO_CHECK(is_idle(), "recovered after the start");
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

void MemberCore::on_upstream_frame(Upstream& up, ConnId conn, const Frame& frame, TimePoint now) {
  up.on_frame(now);
  if (frame.type == FrameType::kChunk) return on_chunk(&up, conn, frame, now);
  const auto message = decode_control(frame.body.bytes());
  if (!message) return parents_.fail(up, EdgeTroubleKind::kRefused, message.error().message(), now);
  if (const auto* announcement = std::get_if<SignedAnnouncement>(&*message))
    return on_announcement(&up, *announcement, now);
  if (const auto* manifest = std::get_if<SignedManifest>(&*message)) return on_manifest(&up, *manifest, now);
  const auto* status = std::get_if<EdgeStatus>(&*message);
  if (!status) return parents_.on_message(up, *message, now);
  up.on_status(status->progress, now);
  if (status->beacon) on_beacon(*status->beacon, now, false);
}

void MemberCore::on_forgery(Upstream* up, const PublicationId& id, std::uint32_t index, const std::string& what,
                            TimePoint now) {
  ++counters_.chunks_corrupt;
  if (up) parents_.on_forgery(*up, id, index, what, now);
}

// The learner went back to before something it had published. All of the older epoch is void.
void MemberCore::begin_epoch(std::uint64_t epoch, TimePoint now) {
  if (epoch <= standing_.epoch()) return;
  log::warn("worker {}: the learner has begun epoch {}: what it published before is void", self(), epoch);
  standing_.begin_epoch(epoch);
  while (!store_.entries().empty()) store_.erase(PublicationKey(store_.entries().begin()->first));
  stall_.begin_epoch();
  parents_.end_help(now);
  parents_.send_have(now);
  children_.on_store_changed(now);
}

void MemberCore::on_announcement(Upstream* up, const SignedAnnouncement& as_signed, TimePoint now) {
  if (store_.find(id_of(as_signed))) return;
  const auto announcement = config_.checker->open(as_signed);
  if (!announcement) return on_forgery(up, {}, 0, announcement.error().message(), now);
  const PublicationKey& key = announcement->key;
  if (announcement->epoch > standing_.epoch()) begin_epoch(announcement->epoch, now);
  if (standing_.has(key.version)) return;
  // A publication below the floor is taken: it may lead back there. No version below the floor is activated.
  const bool expired = up && announcement->expires_unix_ms < identity_.learner_unix_ms(now);
  if (announcement->epoch < standing_.epoch() || expired)
    return log::warn("worker {}: {} is refused: it is {}", self(), to_text(key),
                     expired ? "expired" : "of an epoch that is over");
  const Version keep_from = standing_.keep_from(standing_.next_version());
  if (const Status begun = store_.begin(*announcement, as_signed, keep_from); !begun)
    return log::debug("worker {}: {}", self(), begun.error().message());
  if (standing_.announced(key.version)) stall_.wait(now);
  children_.on_store_changed(now);
}

void MemberCore::on_manifest(Upstream* up, const SignedManifest& as_signed, TimePoint now) {
  const auto manifest = config_.checker->open(as_signed);
  if (!manifest) return on_forgery(up, {}, 0, manifest.error().message(), now);
  const auto closed = store_.close(*manifest, as_signed);
  if (!closed) {
    if (closed.error().code != Code::kCorrupt) return;
    log::error("worker {}: {}", self(), closed.error().message());
    return children_.on_store_changed(now);
  }
  children_.on_store_changed(now);
  if (*closed)
    deliver(now);
  else
    raise_floor(manifest->publication);
}

void MemberCore::on_chunk(Upstream* up, ConnId conn, const Frame& frame, TimePoint now) {
  const std::size_t bytes = frame.body.size();
  if (up) {
    counters_.chunk_bytes_in += bytes;
    up->on_chunk(bytes);
  }
  const StoredPublication* stored = store_.find(frame.chunk.publication);
  const auto begins = stored ? standing_.leads_on_from(stored->key(), store_) : std::nullopt;
  const bool leads_on = begins.has_value();
  // The staged publications, which wait for the disk, are still needed.
  const Version keep_from = standing_.keep_from(stored && stored->key().full() ? stored->key().version
                                                : begins                       ? *begins
                                                                               : standing_.next_version());
  const auto put = store_.put(frame, keep_from, leads_on && !standing_.staged());
  if (!put) {
    switch (put.error().code) {
      case Code::kCorrupt:
        on_forgery(up, frame.chunk.publication, frame.chunk.index, put.error().message(), now);
        if (!store_.find(frame.chunk.publication)) return children_.on_store_changed(now);
        if (parents_.find(conn)) transport_.send(conn, ChunkRequest{frame.chunk.publication, frame.chunk.index}, now);
        return;
      case Code::kExhausted:
        if (!up) {  // from a time with more room
          if (stored) store_.erase(PublicationKey(stored->key()));
          return;
        }
        if (leads_on) {
          stall_.store_refused();
          learner_.report_trouble(put.error().message() + "; left out for now", now);
        }
        if (stored) store_.erase(PublicationKey(stored->key()));
        stall_.wait(now);
        return children_.on_store_changed(now);
      default:
        ++counters_.chunks_duplicate;  // dropped here meanwhile, or overtaken by a full snapshot
        return;
    }
  }
  if (up) up->on_proven_chunk();
  if (*put == PublicationStore::Put::kDuplicate) {
    ++counters_.chunks_duplicate;
    return;
  }
  // Progress is what can be installed in the end. Parents that take lost chunks for sent end no publication.
  const bool can_end = !stall_.is_lost_here() || (up && up->helps());
  if (leads_on) stall_.progressed(stored->key(), stored->have.count(), can_end, now);
  children_.on_chunk_arrived(now);
  parts_.deliver(stored->id, standing_, store_, actions_);
  if (*put == PublicationStore::Put::kCompleted) {
    children_.on_store_changed(now);
    deliver(now);
  }
  parents_.hold_reading(store_.congested());
}

// ---- to the application ----

// A delta on the present position is closed, so its digest is known. It becomes the floor while its last chunks arrive:
// the worker need not wait for the disk later.
void MemberCore::raise_floor(const PublicationId& id) {
  const StoredPublication* stored = store_.find(id);
  if (!file_.durable() || standing_.staged() || is_idle() || !stored) return;
  if (!stored->key().base || !standing_.comes_next(*stored)) return;
  const Installed next{stored->key().version, stored->manifest->policy_digest, standing_.epoch()};
  auto& floor = file_.state().floor;
  if (floor && floor->epoch == standing_.epoch() && floor->version >= next.version) return;
  floor = next;
  file_.save();
}

// Verify, persist, activate: the staged version is the floor on disk before it goes to the application.
void MemberCore::deliver(TimePoint now) {
  if (standing_.staged() || is_idle()) return;
  PublicationKey foreign;
  switch (standing_.stage(store_, file_.state().floor, now, foreign)) {
    case Standing::Stage::kNothing:
      return;
    case Standing::Stage::kForeign:
      log::warn("worker {}: {} is refused: it is for another version {} than the one here", self(), to_text(foreign),
                *foreign.base);
      store_.erase(foreign);
      parents_.ask_for_help(*standing_.repair(), now);
      return children_.on_store_changed(now);
    case Standing::Stage::kOtherThanFloor:
      log::error("worker {}: version {} has another digest than before the restart; it is not activated", self(),
                 foreign.version);
      return;
    case Standing::Stage::kStaged:
      break;
  }
  const Installed& floor = standing_.staged()->last;
  if (file_.protects(floor))
    activate(now);
  else if (!file_.is_saving(floor))
    file_.save();
}

void MemberCore::activate(TimePoint now) {
  const Standing::Staged& staged = *standing_.staged();
  if (std::any_of(staged.deliveries.begin(), staged.deliveries.end(),
                  [&](const act::Deliver& d) { return d.spooled && !store_.find(*d.spooled); })) {
    standing_.unstage();  // the disk lost it while the floor was being saved
    stall_.lost_here();
    stall_.begin_anew(now);
    deliver(now);  // what came meanwhile, if that goes without it
    if (!standing_.staged()) parents_.ask_for_help(*standing_.newest(), now);
    return;
  }
  file_.state().floor = staged.last;
  for (act::Deliver& delivery : standing_.take_staged(now)) actions_.push_back(std::move(delivery));
  stall_.activated(!standing_.behind(), now);
  store_.erase_partial_up_to(*standing_.version());
  children_.on_store_changed(now);
  parents_.end_help_if_done(now);
  deliver(now);  // what came meanwhile
}

// ---- disk ----

void MemberCore::on_spooled(const PublicationId& id, std::uint32_t chunk, const Status& status, TimePoint now) {
  if (!status && !store_.disk_failed())
    learner_.report_trouble(
        fmt::format("chunks stay in memory, the disk does not take them: {}", status.error().message()), now);
  store_.on_spooled(id, chunk, status.has_value());
  parents_.hold_reading(store_.congested());
}

void MemberCore::on_unspooled(const PublicationId& id, std::uint32_t chunk, Result<Slice> data, TimePoint now) {
  if (has_ended()) return;
  if (!store_.on_unspooled(id, chunk, data ? *std::move(data) : Slice())) {
    log::error("worker {}: the disk gave back other bytes than it was given; the publication is dropped", self());
    stall_.lost_here();
    parents_.send_have(now);
    children_.on_store_changed(now);
  }
  children_.on_chunk_arrived(now);
  if (parts_.feeds(id)) parts_.deliver(id, standing_, store_, actions_);
  deliver(now);
}

void MemberCore::on_saved(const Status& status, TimePoint now) {
  if (has_ended()) return;
  if (!status) {
    log::error("worker {}: its state cannot be saved, so nothing newer is activated: {}", self(),
               status.error().message());
    return file_.failed(now);
  }
  const bool again = file_.succeeded();
  if (standing_.staged() && file_.protects(standing_.staged()->last)) activate(now);
  if (again) file_.save();
}

}  // namespace echoline::overlay
