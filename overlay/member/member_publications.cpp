// A worker's publications: what it believes, keeps, hands over, and never goes back behind.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/member/member_core.hpp"

namespace echoline::overlay {

bool MemberCore::recover(Frame frame, TimePoint now) {
  ECHO_CHECK(state_ == State::kIdle, "recovered after the start");
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
  if (epoch <= epoch_) return;
  log::warn("worker {}: the learner has begun epoch {}: what it published before is void", id_, epoch);
  epoch_ = epoch;
  for (const auto& [version, given] : std::exchange(given_, {})) void_.insert(version);
  while (!store_.entries().empty()) store_.erase(PublicationKey(store_.entries().begin()->first));
  position_.reset();
  installed_.reset();
  staged_.reset();
  repair_.reset();
  newest_.reset();
  most_chunks_.clear();
  lost_here_ = false;
  if (helper_) end_help(now);
  for (auto& [id, up] : parents_) tell_have(up, now);
  store_changed(now);
}

void MemberCore::on_announcement(Upstream* up, const SignedAnnouncement& as_signed, TimePoint now) {
  if (store_.find(id_of(as_signed))) return;
  const auto announcement = config_.checker->open(as_signed);
  if (!announcement) return forged(up, {}, 0, announcement.error().message(), now);
  const PublicationKey& key = announcement->key;
  if (announcement->epoch > epoch_) begin_epoch(announcement->epoch, now);
  if (position_ && key.version <= position_->version) return;
  // What is older than the floor may be part of the way back to it: nothing below it is ever activated.
  const bool expired = up && announcement->expires_unix_ms < learner_unix_ms(now);
  if (announcement->epoch < epoch_ || expired) {
    ++refused_;
    return log::warn("worker {}: {} is refused: it is {}", id_, to_text(key),
                     expired ? "expired" : "of an epoch that is over");
  }
  Version keep_from{position_ ? position_->version.value + 1 : 0};
  if (staged_) keep_from = std::min(keep_from, staged_->deliveries.front().publication.version);
  if (const Status begun = store_.begin(*announcement, as_signed, keep_from); !begun)
    return log::debug("worker {}: {}", id_, begun.error().message());
  if (!newest_ || key.version >= *newest_) {
    newest_ = key.version;
    if (stalled_since_ == kNever) stalled_since_ = now;
  }
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
    raise_floor(manifest->publication, now);
}

// Whether it starts from where this worker stands, or will stand when it is as far again as it has been: then, the
// least version that is still needed for it.
std::optional<Version> MemberCore::leads_on_from(const PublicationKey& key) const {
  if (position_) {
    if (key.full()) return key.version;
    return key.base == position_->version ? std::optional(Version{position_->version.value + 1}) : std::nullopt;
  }
  const auto starts = [&](const PublicationKey& each) { return each.full() && (!repair_ || each.version >= *repair_); };
  if (key.full()) return starts(key) ? std::optional(key.version) : std::nullopt;
  std::map<Version, Version> begins;  // of what can be reached with what is here: with which snapshot, the newest
  for (const auto& [each, stored] : store_.entries()) {
    const auto before = each.base ? begins.find(*each.base) : begins.end();
    if (!stored.complete || (!starts(each) && before == begins.end())) continue;
    const Version from = starts(each) ? each.version : before->second;
    Version& begin = begins.try_emplace(each.version, from).first->second;
    begin = std::max(begin, from);
  }
  const auto begin = begins.find(*key.base);
  return begin == begins.end() ? std::nullopt : std::optional(begin->second);
}

// Whether more of it is here than of any publication with its key since something was activated, or dropped here, or
// help was asked for; of the first few that began since then.
bool MemberCore::farther(const StoredPublication& stored) {
  if (most_chunks_.size() >= kBegunMax && !most_chunks_.contains(stored.key())) return false;
  std::uint32_t& most = most_chunks_[stored.key()];
  if (stored.have.count() <= most) return false;
  most = stored.have.count();
  return true;
}

void MemberCore::on_chunk(Upstream* up, ConnId conn, const Frame& frame, TimePoint now) {
  const std::size_t bytes = frame.body.size();
  if (up) {
    chunk_bytes_in_ += bytes;
    up->chunk_bytes += bytes;
  }
  const StoredPublication* stored = store_.find(frame.chunk.publication);
  const auto begins = stored ? leads_on_from(stored->key()) : std::nullopt;
  const bool leads_on = begins.has_value();
  Version keep_from{stored && stored->key().full() ? stored->key().version.value
                    : begins                       ? begins->value
                    : position_                    ? position_->version.value + 1
                                                   : 0};
  // What waits for the floor to be saved is still needed.
  if (staged_) keep_from = std::min(keep_from, staged_->deliveries.front().publication.version);
  const auto put = store_.put(frame, keep_from, leads_on && !staged_);
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
          ++refusals_;
          lost_here_ = true;
          most_chunks_.clear();
          complain(put.error().message() + "; left out for now", now);
        }
        if (stored) store_.erase(PublicationKey(stored->key()));
        if (stalled_since_ == kNever) stalled_since_ = now;
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
  const bool can_end = !lost_here_ || (up && up->catch_up_to);
  if (stalled_since_ != kNever && leads_on && farther(*stored) && can_end) {
    stalled_since_ = now;
    parents_got_time_ = false;
    calls_ = 0;
  }
  edges_.on_chunk_arrived(now);
  deliver_parts(stored->id);
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

// A delta from here, or a snapshot ahead.
bool MemberCore::comes_next(const StoredPublication& stored) const {
  const PublicationKey key = stored.key();
  if (key.full()) return position_ ? key.version > position_->version : !repair_ || key.version >= *repair_;
  return position_ && key.base == position_->version && stored.announcement.base_digest == position_->policy_digest;
}

// What has come of it, without gaps, so that the application need not begin with it when all has come; no more than it
// can follow. Deltas may go on while a snapshot arrives beside them; where several of either do, of the first.
void MemberCore::deliver_parts(const PublicationId& id) {
  if (config_.parts_unread_max.count == 0 || staged_) return;
  const StoredPublication* named = store_.find(id);
  if (!named || !comes_next(*named)) return;
  const PublicationKey key = named->key();
  Parts& parts = key.full() ? snapshot_parts_ : delta_parts_;
  if (parts.id != id) {
    const StoredPublication* first = store_.find(parts.id);
    if (first && !first->complete && comes_next(*first)) return;
    parts = {id, 0};
  }
  StoredPublication& stored = *store_.find(key);
  for (; parts_unread_ < config_.parts_unread_max.count && stored.have.contains(parts.chunks); ++parts.chunks) {
    const StoredChunk* chunk = store_.fetch(stored, parts.chunks);
    if (!chunk) return;  // it comes from disk
    const std::uint64_t offset = std::uint64_t{parts.chunks} * stored.announcement.chunk_bytes;
    actions_.push_back(act::DeliverPart{{id, key.version, key.base, offset, chunk->data}});
    parts_unread_ += chunk->data.size();
  }
}

void MemberCore::parts_read(std::uint64_t bytes) {
  parts_unread_ -= std::min(parts_unread_, bytes);
  for (const PublicationId id : {delta_parts_.id, snapshot_parts_.id}) deliver_parts(id);
}

// A delta on the present position is closed, so its version is published and its digest known. Raises the floor to it
// while its last chunks arrive: once they are here, the worker need not wait for the disk.
void MemberCore::raise_floor(const PublicationId& id, TimePoint now) {
  const StoredPublication* stored = store_.find(id);
  if (!config_.durable || staged_ || state_ == State::kIdle || !stored || !stored->key().base || !comes_next(*stored))
    return;
  const Installed next{stored->key().version, stored->manifest->policy_digest, epoch_};
  auto& floor = config_.state.floor;
  if (floor && floor->epoch == epoch_ && floor->version >= next.version) return;
  floor = next;
  save(now);
}

// Stages everything that can now be installed: the newest full snapshot ahead, then deltas from there. What is staged
// becomes the floor, on disk first, and only then goes to the application: verify, persist, activate.
void MemberCore::deliver(TimePoint now) {
  if (staged_ || state_ == State::kIdle) return;
  Staged staged;
  std::optional<Installed> at = position_;
  for (;;) {
    const StoredPublication* next = nullptr;
    for (const auto& [key, stored] : store_.entries()) {
      if (!stored.complete || (at && key.version <= at->version)) continue;
      if (!at && repair_ && key.version < *repair_) continue;
      if (key.full() || (at && key.base == at->version)) next = &stored;
    }
    if (!next) break;
    const PublicationKey key = next->key();
    if (key.base && next->announcement.base_digest != at->policy_digest) {
      log::warn("worker {}: {} is refused: it is for another version {} than the one here", id_, to_text(key),
                *key.base);
      ++refused_;
      store_.erase(key);
      repair_ = std::max(key.version, newest_.value_or(key.version));
      position_.reset();
      need_help(*repair_, now);
      return store_changed(now);
    }
    auto delivery = store_.delivery(*store_.find(key));
    if (!delivery) return;  // parts of it come from disk
    delivery->publication.activate = false;
    at = Installed{key.version, delivery->publication.policy_digest, epoch_};
    staged.deliveries.push_back(std::move(*delivery));
  }
  if (staged.deliveries.empty()) return;
  const auto& floor = config_.state.floor;
  const bool same_epoch = floor && floor->epoch == epoch_;
  if (same_epoch && at->version < floor->version) return;  // not yet as far as this worker has been
  if (same_epoch && at->version == floor->version && at->policy_digest != floor->policy_digest) {
    log::error("worker {}: version {} has another digest than before the restart; it is not activated", id_,
               at->version);
    ++refused_;
    return;
  }
  staged.deliveries.back().publication.activate = true;
  staged.last = *at;
  staged.before = position_;
  staged.at = now;
  position_ = at;
  staged_ = std::move(staged);
  if (!config_.durable || floor_on_disk_ == staged_->last)
    activate(now);
  else if (!saving_ || floor_saving_ != staged_->last)
    save(now);
}

void MemberCore::activate(TimePoint now) {
  if (std::any_of(staged_->deliveries.begin(), staged_->deliveries.end(),
                  [&](const act::Deliver& d) { return d.spooled && !store_.find(*d.spooled); })) {
    position_ = staged_->before;  // the disk lost it while the floor was being saved
    staged_.reset();
    most_chunks_.clear();
    lost_here_ = true;
    stalled_since_ = now;
    deliver(now);  // what came meanwhile, if that goes without it
    if (!staged_) need_help(*newest_, now);
    return;
  }
  config_.state.floor = staged_->last;
  for (act::Deliver& delivery : staged_->deliveries) {
    given_.insert_or_assign(delivery.publication.version, Given{now, now - staged_->at});
    actions_.push_back(std::move(delivery));
  }
  staged_.reset();
  repair_.reset();
  refusals_ = calls_ = 0;
  lost_here_ = false;
  most_chunks_.clear();
  stalled_since_ = newest_ && position_->version < *newest_ ? now : kNever;
  store_.erase_partial_up_to(position_->version);
  store_changed(now);
  if (helper_ && position_->version >= *helper_->catch_up_to) end_help(now);
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
  if (state_ == State::kGone) return;
  if (!store_.on_unspooled(id, chunk, data ? *std::move(data) : Slice())) {
    log::error("worker {}: the disk gave back other bytes than it was given; the publication is dropped", id_);
    most_chunks_.clear();
    lost_here_ = true;
    for (auto& [parent, up] : parents_) tell_have(up, now);
    store_changed(now);
  }
  edges_.on_chunk_arrived(now);
  if (id == delta_parts_.id || id == snapshot_parts_.id) deliver_parts(id);
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
