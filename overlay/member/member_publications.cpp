// A worker's publications: which ones it accepts, keeps, forwards and delivers. It never delivers one below its floor,
// the last version verified for activation. Called by the other part of MemberCore and by the driver.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/member/member_core.hpp"

namespace echoline::overlay {

bool MemberCore::recover(Frame frame, TimePoint now) {
  ECHO_CHECK(is_idle(), "recovered after the start");
  store_.set_recovering(true);
  if (frame.type == FrameType::kChunk) {
    on_chunk(/*upstream=*/nullptr, /*conn=*/{}, frame, now);
    const StoredPublication* stored = store_.find(frame.chunk.publication);
    return stored && stored->have.contains(frame.chunk.index);
  }
  const auto message = decode_control(frame.body.bytes());
  if (!message) return false;
  if (const auto* announcement = std::get_if<SignedAnnouncement>(&*message)) {
    on_announcement(/*upstream=*/nullptr, *announcement, now);
    return store_.find(id_of(*announcement)) != nullptr;
  }
  if (const auto* manifest = std::get_if<SignedManifest>(&*message)) on_manifest(/*upstream=*/nullptr, *manifest, now);
  return true;
}

void MemberCore::on_upstream_frame(Upstream& upstream, ConnId conn, const Frame& frame, TimePoint now) {
  upstream.on_frame(now);
  if (frame.type == FrameType::kChunk) return on_chunk(&upstream, conn, frame, now);
  const auto message = decode_control(frame.body.bytes());
  if (!message) return parents_.fail_edge(upstream, EdgeTroubleKind::kRefused, message.error().message(), now);
  if (const auto* announcement = std::get_if<SignedAnnouncement>(&*message))
    return on_announcement(&upstream, *announcement, now);
  if (const auto* manifest = std::get_if<SignedManifest>(&*message)) return on_manifest(&upstream, *manifest, now);
  const auto* status = std::get_if<EdgeStatus>(&*message);
  if (!status) return parents_.on_message(upstream, *message, now);
  upstream.on_status(status->progress, now);
  if (status->beacon) on_beacon(*status->beacon, now, /*first_hand=*/false);
}

void MemberCore::on_forgery(Upstream* upstream, const PublicationId& id, std::uint32_t index, const std::string& what,
                            TimePoint now) {
  ++counters_.chunks_corrupt;
  if (upstream) parents_.on_forgery(*upstream, id, index, what, now);
}

// The learner has resumed from an older version. All publications of the older epoch are void.
void MemberCore::begin_epoch(std::uint64_t epoch, TimePoint now) {
  if (epoch <= install_state_.epoch()) return;
  log::warn("worker {}: the learner has begun epoch {}: what it published before is void", self(), epoch);
  install_state_.begin_epoch(epoch);
  while (!store_.entries().empty()) store_.erase(PublicationKey(store_.entries().begin()->first));
  stall_watch_.begin_epoch();
  parents_.end_help(now);
  parents_.send_have(now);
  children_.on_store_changed(now);
}

void MemberCore::on_announcement(Upstream* upstream, const SignedAnnouncement& as_signed, TimePoint now) {
  if (store_.find(id_of(as_signed))) return;
  const auto announcement = config_.checker->open(as_signed);
  if (!announcement) return on_forgery(upstream, /*id=*/{}, /*index=*/0, announcement.error().message(), now);
  const PublicationKey& key = announcement->key;
  if (announcement->epoch > install_state_.epoch()) begin_epoch(announcement->epoch, now);
  if (install_state_.has_reached(key.version)) return;
  // A publication below the floor is accepted, because deltas on it may lead to the floor. It is never activated.
  const bool is_expired = upstream && announcement->expires_unix_ms < identity_.learner_unix_ms(now);
  if (announcement->epoch < install_state_.epoch() || is_expired)
    return log::warn("worker {}: {} is refused: it is {}", self(), to_text(key),
                     is_expired ? "expired" : "of an epoch that is over");
  const Version keep_from = install_state_.oldest_needed(install_state_.next_version());
  if (const Status begun = store_.begin(*announcement, as_signed, keep_from); !begun)
    return log::debug("worker {}: {}", self(), begun.error().message());
  if (install_state_.on_announced(key.version)) stall_watch_.begin_wait(now);
  children_.on_store_changed(now);
}

void MemberCore::on_manifest(Upstream* upstream, const SignedManifest& as_signed, TimePoint now) {
  const auto manifest = config_.checker->open(as_signed);
  if (!manifest) return on_forgery(upstream, /*id=*/{}, /*index=*/0, manifest.error().message(), now);
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
    save_next_floor(manifest->publication);
}

void MemberCore::on_chunk(Upstream* upstream, ConnId conn, const Frame& frame, TimePoint now) {
  const std::size_t bytes = frame.body.size();
  if (upstream) {
    counters_.chunk_bytes_in += bytes;
    upstream->on_chunk(bytes);
  }
  const StoredPublication* stored = store_.find(frame.chunk.publication);
  const auto needed = stored ? install_state_.oldest_needed_for(stored->key(), store_) : std::nullopt;
  const bool can_be_installed = needed.has_value();
  // To make room for this chunk, the store may drop publications of older versions than these need.
  Version first_needed = needed.value_or(install_state_.next_version());
  if (stored && stored->key().full()) first_needed = stored->key().version;  // a snapshot needs no older publication
  const Version keep_from = install_state_.oldest_needed(first_needed);      // staged publications are still needed
  const auto put = store_.put(frame, keep_from, /*installable_now=*/can_be_installed && !install_state_.staged());
  if (!put) {
    switch (put.error().code) {
      case Code::kCorrupt:
        on_forgery(upstream, frame.chunk.publication, frame.chunk.index, put.error().message(), now);
        // The whole publication differed from its manifest, so the store has dropped it.
        if (!store_.find(frame.chunk.publication)) return children_.on_store_changed(now);
        if (parents_.find(conn))  // on_forgery() may have given the edge up
          transport_.send(conn, ChunkRequest{frame.chunk.publication, frame.chunk.index}, now);
        return;
      case Code::kExhausted:
        if (!upstream) {  // from disk: it was stored when the limit was higher
          if (stored) store_.erase(PublicationKey(stored->key()));
          return;
        }
        if (can_be_installed) {
          stall_watch_.on_store_refused();
          learner_.report_trouble(put.error().message() + "; left out for now", now);
        }
        if (stored) store_.erase(PublicationKey(stored->key()));
        stall_watch_.begin_wait(now);
        return children_.on_store_changed(now);
      default:
        ++counters_.chunks_duplicate;  // its publication was dropped, or a full snapshot has made it superfluous
        return;
    }
  }
  if (upstream) upstream->on_proven_chunk();
  if (*put == PublicationStore::Put::kDuplicate) {
    ++counters_.chunks_duplicate;
    return;
  }
  // Only chunks of a publication that can be completed are progress. Parents count lost chunks as sent, so they
  // complete none.
  const bool can_be_completed = !stall_watch_.has_lost_chunks() || (upstream && upstream->is_helper());
  if (can_be_installed) stall_watch_.record_progress(stored->key(), stored->have.count(), can_be_completed, now);
  children_.on_chunk_arrived(now);
  parts_feed_.deliver(stored->id, install_state_, store_, actions_);
  if (*put == PublicationStore::Put::kCompleted) {
    children_.on_store_changed(now);
    deliver(now);
  }
  parents_.pause_reading(store_.is_congested());
}

// ---- to the application ----

// Called for a publication whose manifest has come. If it is a delta on the present position, its version becomes the
// floor while its last chunks arrive, so that its delivery need not wait for the disk later.
void MemberCore::save_next_floor(const PublicationId& id) {
  const StoredPublication* stored = store_.find(id);
  if (!file_.durable() || install_state_.staged() || is_idle() || !stored) return;
  if (!stored->key().base || !install_state_.is_next(*stored)) return;
  const Installed next{stored->key().version, stored->manifest->policy_digest, install_state_.epoch()};
  auto& floor = file_.state().floor;
  if (floor && floor->epoch == install_state_.epoch() && floor->version >= next.version) return;
  floor = next;
  file_.save();
}

// Stages the next version. It goes to the application only once it is the floor on disk.
void MemberCore::deliver(TimePoint now) {
  if (install_state_.staged() || is_idle()) return;
  PublicationKey mismatched;
  switch (install_state_.stage(store_, file_.state().floor, now, mismatched)) {
    case InstallState::Stage::kNothing:
      return;
    case InstallState::Stage::kBaseMismatch:
      log::warn("worker {}: {} is refused: its base, version {}, has another digest than the version installed here",
                self(), to_text(mismatched), *mismatched.base);
      store_.erase(mismatched);
      parents_.request_help(*install_state_.repair_version_min(), now);
      return children_.on_store_changed(now);
    case InstallState::Stage::kFloorMismatch:
      log::error("worker {}: version {} has another digest than before the restart; it is not activated", self(),
                 mismatched.version);
      return;
    case InstallState::Stage::kStaged:
      break;
  }
  const Installed& floor = install_state_.staged()->last;
  if (file_.has_on_disk(floor))
    activate_staged(now);
  else if (!file_.is_saving(floor))
    file_.save();
}

void MemberCore::activate_staged(TimePoint now) {
  const InstallState::Staged& staged = *install_state_.staged();
  if (std::any_of(staged.deliveries.begin(), staged.deliveries.end(),
                  [&](const act::DeliverPublication& staged_delivery) {
                    return staged_delivery.spooled && !store_.find(*staged_delivery.spooled);
                  })) {
    install_state_.unstage();  // a publication was dropped from the disk while the floor was being saved
    stall_watch_.on_chunks_lost();
    stall_watch_.on_position_void(now);
    deliver(now);  // publications that came meanwhile and do not need the lost one
    if (!install_state_.staged()) parents_.request_help(*install_state_.newest(), now);
    return;
  }
  file_.state().floor = staged.last;
  for (act::DeliverPublication& delivery : install_state_.take_staged(now)) actions_.push_back(std::move(delivery));
  stall_watch_.on_activated(!install_state_.is_behind(), now);
  store_.erase_partial_up_to(*install_state_.position_version());
  children_.on_store_changed(now);
  parents_.end_help_if_done(now);
  deliver(now);  // publications that came meanwhile
}

// ---- disk ----

void MemberCore::on_spooled(const PublicationId& id, std::uint32_t chunk, const Status& status, TimePoint now) {
  if (!status && !store_.has_disk_failed())
    learner_.report_trouble(
        fmt::format("chunks stay in memory, the disk does not take them: {}", status.error().message()), now);
  store_.on_spooled(id, chunk, status.has_value());
  parents_.pause_reading(store_.is_congested());
}

void MemberCore::on_chunk_read(const PublicationId& id, std::uint32_t chunk, Result<Slice> data, TimePoint now) {
  if (has_ended()) return;
  if (!store_.on_chunk_read(id, chunk, data ? *std::move(data) : Slice())) {
    log::error("worker {}: the disk returned other bytes than were written, or none; the publication is dropped",
               self());
    stall_watch_.on_chunks_lost();
    parents_.send_have(now);
    children_.on_store_changed(now);
  }
  children_.on_chunk_arrived(now);
  if (parts_feed_.feeds(id)) parts_feed_.deliver(id, install_state_, store_, actions_);
  deliver(now);
}

void MemberCore::on_saved(const Status& status, TimePoint now) {
  if (has_ended()) return;
  if (!status) {
    log::error("worker {}: its state cannot be saved, so nothing newer is activated: {}", self(),
               status.error().message());
    return file_.on_failed(now);
  }
  const bool changed_meanwhile = file_.on_succeeded();
  if (install_state_.staged() && file_.has_on_disk(install_state_.staged()->last)) activate_staged(now);
  if (changed_meanwhile) file_.save();
}

}  // namespace echoline::overlay
