#include "overlay/member_core.hpp"

#include <algorithm>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr Duration kRedialFirst = std::chrono::milliseconds(50);
constexpr Duration kRedialMax = std::chrono::seconds(2);

}  // namespace

MemberCore::MemberCore(MemberConfig config)
    : Core(config.limits),
      config_(std::move(config)),
      store_(config_.store_bytes_max),
      edges_(store_, up_, actions_, false) {}

void MemberCore::start(TimePoint now) {
  ECHO_CHECK(state_ == State::kIdle, "started twice");
  state_ = State::kJoining;
  join_deadline_ = now + config_.join_timeout;
  control_ = dial(config_.learner);
}

// ---- application ----

void MemberCore::installed(Version version, const Digest& policy_digest, TimePoint now) {
  if (state_ != State::kJoined || !position_ || version > *position_) return;  // of a delivery that was taken back
  install_failures_ = 0;
  if (acked_ && version < *acked_) return;  // the learner never sees a version go backwards
  installed_ = acked_ = version;
  send_control(control_, Ack{version, policy_digest}, now);
}

void MemberCore::install_failed(Version version, const std::string& why, TimePoint now) {
  if (state_ != State::kJoined || !position_ || version > *position_) return;
  log::warn("worker {}: version {} could not be installed: {}", id_->value, version, why);
  if (++install_failures_ >= kInstallFailuresMax)
    return leave(
        fmt::format("version {} could not be installed after {} attempts: {}", version, install_failures_, why), now);
  floor_ = std::max({version, *position_, newest_.value_or(version)});
  position_ = installed_ = std::nullopt;
  deliver(now);  // a full snapshot may already be here
  if (!position_) catch_up(*floor_, now);
}

void MemberCore::send_message(std::span<const std::byte> bytes, TimePoint now) {
  if (state_ != State::kJoined) return;
  unsent_ += bytes.size() + kFrameHeaderBytes;
  if (unsent_ > kUnsentBytesMax)
    return gone(fmt::format("the learner does not take its messages: {} bytes are waiting", unsent_));
  send_frame(control_, encode_frame(FrameType::kApplication, bytes), now);
}

void MemberCore::leave(const std::string& reason, TimePoint now) {
  if (state_ == State::kGone) return;
  if (state_ == State::kJoined) send_control(control_, Goodbye{reason}, now);
  gone(reason);
}

void MemberCore::gone(const std::string& reason) {
  if (state_ == State::kGone) return;
  state_ = State::kGone;
  close(control_);
  for (auto* up : {&parent_, &helper_})
    if (*up && (*up)->conn) close(*(*up)->conn);
  parent_ = helper_ = std::nullopt;
  for (const ConnId conn : edges_.connections()) {
    edges_.close(conn);
    close(conn);
  }
  for (const auto& [conn, until] : strangers_) close(conn);
  strangers_.clear();
  actions_.push_back(act::Disconnected{reason});
}

WorkerStats MemberCore::stats() const {
  WorkerStats s;
  s.id = id_;
  if (parent_) s.parent = parent_->parent;
  s.installed = installed_;
  s.chunk_bytes_in = {chunk_bytes_in_};
  s.chunk_bytes_forwarded = {edges_.chunk_bytes_sent()};
  s.bytes_in = bytes_received();
  s.bytes_out = {bytes_sent_ + edges_.wire_bytes_sent()};
  s.chunks_duplicate = duplicates_;
  s.chunks_corrupt = corrupt_;
  return s;
}

// ---- connections ----

MemberCore::Upstream* MemberCore::upstream_of(ConnId conn) {
  for (auto* up : {&parent_, &helper_})
    if (*up && (*up)->conn == conn) return &**up;
  return nullptr;
}

void MemberCore::on_accepted(ConnId conn, const std::string&, TimePoint now) {
  if (state_ == State::kGone || strangers_.size() + edges_.size() >= kConnectionsMax) return close(conn);
  strangers_[conn] = now + kHandshakeTimeout;
}

void MemberCore::on_connected(ConnId conn, TimePoint now) {
  if (state_ == State::kGone) return;
  actions_.push_back(act::Admit{conn});  // this side chose whom to call
  if (conn == control_)
    return send_control(conn, Hello{config_.run_id, config_.name, config_.data, up_.rate(), config_.limits.down}, now);
  if (const Upstream* up = upstream_of(conn))
    send_control(
        conn, PeerHello{config_.run_id, *id_, up->catch_up_to, up->catch_up_to && floor_ && !position_, have()}, now);
}

void MemberCore::on_closed(ConnId conn, const std::string& reason, TimePoint now) {
  if (state_ == State::kGone) return;
  if (conn == control_) {
    return gone(state_ == State::kJoining
                    ? fmt::format("cannot join the learner at {}: {}", to_text(config_.learner), reason)
                    : fmt::format("the connection to the learner was lost: {}", reason));
  }
  strangers_.erase(conn);
  edges_.close(conn);
  if (Upstream* up = upstream_of(conn)) {
    up->conn.reset();
    upstream_failed(*up, reason, now);
  }
}

void MemberCore::dial_upstream(Upstream& up) {
  up.redial_at = kNever;
  up.corrupt_in_row = 0;
  up.conn = dial(up.parent == kLearnerId ? config_.learner : up.endpoint);
}

// The edge broke while this worker lives: tell the learner, who knows whether the parent does, and try again.
void MemberCore::upstream_failed(Upstream& up, const std::string& reason, TimePoint now) {
  if (up.conn) close(*std::exchange(up.conn, std::nullopt));
  up.redial_at = now + std::min<Duration>(kRedialMax, kRedialFirst * (1 << std::min(up.failures, 10)));
  ++up.failures;
  if (up.parent != kLearnerId) send_control(control_, EdgeFailed{up.parent, reason}, now);
}

void MemberCore::on_frame(ConnId conn, const FrameView& frame, TimePoint now) {
  if (state_ == State::kGone) return;
  if (conn == control_) {
    learner_heard_ = now;
    if (frame.type == FrameType::kApplication && state_ == State::kJoined) {
      actions_.push_back(
          act::Message{std::string(reinterpret_cast<const char*>(frame.body.data()), frame.body.size())});
      return;
    }
    if (frame.type == FrameType::kChunk) return gone("the learner sent a chunk on the control connection");
    const auto message = decode_control(frame.body);
    if (!message) return gone("the learner sent an unreadable message: " + message.error().message());
    return on_control(*message, now);
  }
  if (Upstream* up = upstream_of(conn)) return on_upstream(*up, frame, now);
  on_child(conn, frame, now);
}

void MemberCore::on_sent(ConnId conn, std::size_t bytes, TimePoint now) {
  if (conn == control_)
    unsent_ -= std::min(bytes, unsent_);
  else if (edges_.contains(conn))
    edges_.on_sent(conn, bytes, now);
}

// ---- from the learner ----

void MemberCore::on_control(const ControlMessage& message, TimePoint now) {
  if (const auto* goodbye = std::get_if<Goodbye>(&message)) return gone(goodbye->reason);
  if (const auto* welcome = std::get_if<Welcome>(&message); welcome && state_ == State::kJoining) {
    state_ = State::kJoined;
    id_ = welcome->worker;
    heartbeat_ = welcome->heartbeat;
    learner_timeout_ = welcome->learner_timeout;
    beat_at_ = now + heartbeat_;
    join_deadline_ = kNever;
    actions_.push_back(act::Welcomed{*id_, welcome->application});
    return;
  }
  if (state_ != State::kJoined) return gone("the learner sent something before its welcome");
  if (const auto* assign = std::get_if<Assign>(&message)) return on_assign(*assign, now);
  if (const auto* beat = std::get_if<Heartbeat>(&message)) {
    if (beat->version && (!newest_ || *beat->version > *newest_)) {
      newest_ = beat->version;
      if (unannounced_since_ == kNever) unannounced_since_ = now;
    }
    return;
  }
  gone("the learner sent a message that is not for a worker");
}

void MemberCore::on_assign(const Assign& assign, TimePoint now) {
  if (parent_ && parent_->parent == assign.parent && parent_->endpoint == assign.endpoint) {
    if (!parent_->conn) dial_upstream(*parent_);
    return;
  }
  if (parent_ && parent_->conn) close(*parent_->conn);
  parent_ = Upstream{assign.parent, assign.endpoint, {}, {}, 0, 0, kNever};
  if (unannounced_since_ != kNever) unannounced_since_ = now;
  dial_upstream(*parent_);
}

// ---- from parents ----

void MemberCore::on_upstream(Upstream& up, const FrameView& frame, TimePoint now) {
  if (frame.type == FrameType::kChunk) return on_chunk(up, frame, now);
  const auto message = decode_control(frame.body);
  if (!message) return upstream_failed(up, message.error().message(), now);
  if (const auto* manifest = std::get_if<Manifest>(&*message)) return on_manifest(up, *manifest, now);
  if (const auto* cannot = std::get_if<CannotServe>(&*message)) {
    if (!position_ || *position_ < cannot->target) catch_up(cannot->target, now);
    return;
  }
  upstream_failed(up, "the parent sent a message that is not for a child", now);
}

void MemberCore::on_manifest(Upstream& up, const Manifest& manifest, TimePoint now) {
  if (position_ && manifest.key.version <= *position_) return;
  // A full snapshot makes everything before it superfluous; a delta needs all that has not been delivered.
  const auto superfluous = manifest.key.full() ? manifest.key.version : position_;
  const Version keep_from = superfluous ? Version{superfluous->value + 1} : Version{0};
  if (const Status begun = store_.begin(manifest, keep_from); !begun) {
    if (begun.error().code != Code::kExhausted) return upstream_failed(up, begun.error().message(), now);
    if (manifest.payload_bytes > config_.store_bytes_max.count) return leave(begun.error().message(), now);
    log::warn("worker {}: {}; left out for now", id_->value, begun.error().message());
    if (unannounced_since_ == kNever) unannounced_since_ = now;  // the learner will be asked
    return;
  }
  if (!newest_ || manifest.key.version >= *newest_) {
    newest_ = manifest.key.version;
    unannounced_since_ = kNever;
  }
  deliver(now);  // it may be empty
  edges_.on_store_changed(now);
  tell_troubles();
}

void MemberCore::on_chunk(Upstream& up, const FrameView& frame, TimePoint now) {
  const ChunkHeader& header = frame.chunk;
  chunk_bytes_in_ += frame.body.size();
  const auto put = store_.put(header, frame.body);
  if (!put) {
    if (put.error().code == Code::kNotFound) {
      ++duplicates_;  // dropped here meanwhile, or overtaken by a full snapshot
      return;
    }
    log::warn("worker {}: from {}: {}", id_->value, up.parent, put.error().message());
    if (put.error().code == Code::kCorrupt) ++corrupt_;
    const StoredPublication* stored = store_.find(header.key);
    if (put.error().code == Code::kCorrupt && stored && header.index < stored->have.size() &&
        ++up.corrupt_in_row < kCorruptChunksMax)
      return send_control(*up.conn, ChunkRequest{header.key, header.index}, now);
    upstream_failed(up, put.error().message(), now);
    if (!stored) edges_.on_store_changed(now);  // dropped: its digest was wrong
    return;
  }
  up.failures = up.corrupt_in_row = 0;
  if (*put == PublicationStore::Put::kDuplicate) {
    ++duplicates_;
    return;
  }
  edges_.on_chunk_arrived(now);
  if (*put == PublicationStore::Put::kCompleted) deliver(now);
}

// Hands over everything that can now be installed: the newest full snapshot ahead, then deltas from there.
void MemberCore::deliver(TimePoint now) {
  const auto before = position_;
  for (;;) {
    const StoredPublication* next = nullptr;
    for (const auto& [key, stored] : store_.entries()) {
      if (!stored.complete() || (position_ && key.version <= *position_)) continue;
      if (!position_ && floor_ && key.version < *floor_) continue;
      if (key.full() || key.base == position_) next = &stored;
    }
    if (!next) break;
    position_ = next->manifest.key.version;
    actions_.push_back(act::Deliver{next->publication()});
  }
  if (position_ == before) return;
  floor_.reset();
  const std::size_t held = store_.entries().size();
  store_.erase_partial_up_to(*position_);
  if (store_.entries().size() != held) edges_.on_store_changed(now);
  if (helper_ && *position_ >= *helper_->catch_up_to) end_catch_up(now);
}

// ---- catching up with the learner's direct help ----

void MemberCore::catch_up(Version target, TimePoint) {
  if (helper_) return;
  log::info("worker {}: asking the learner for version {}", id_->value, target);
  helper_ = Upstream{kLearnerId, config_.learner, {}, target, 0, 0, kNever};
  dial_upstream(*helper_);
}

void MemberCore::end_catch_up(TimePoint now) {
  if (helper_->conn) close(*helper_->conn);
  helper_.reset();
  // The parent need not send what came from elsewhere.
  if (parent_ && parent_->conn) send_control(*parent_->conn, have(), now);
}

Have MemberCore::have() const {
  Have have{position_, {}};
  std::uint64_t bits = 0;
  for (auto it = store_.entries().rbegin(); it != store_.entries().rend() && have.chunks.size() < kHaveItemsMax; ++it) {
    const ChunkSet& chunks = it->second.have;
    bits += chunks.size();
    if (bits > kChunksMax) break;
    if (position_ && it->first.version <= *position_) break;  // the position says it all
    have.chunks.emplace(it->first, chunks);
  }
  return have;
}

// ---- children ----

void MemberCore::on_child(ConnId conn, const FrameView& frame, TimePoint now) {
  const auto refuse = [&](const std::string& why) {
    log::warn("worker {}: closing a child's connection: {}", id_ ? id_->value : 0, why);
    strangers_.erase(conn);
    edges_.close(conn);
    close(conn);
  };
  if (frame.type != FrameType::kControl) return refuse("a child sent something other than control messages");
  auto message = decode_control(frame.body);
  if (!message) return refuse(message.error().message());
  if (auto* hello = std::get_if<PeerHello>(&*message); hello && strangers_.contains(conn)) {
    if (hello->run_id != config_.run_id) return refuse(fmt::format("it belongs to run '{}'", hello->run_id));
    if (hello->worker == kLearnerId || hello->worker == id_ || hello->catch_up_to)
      return refuse("its introduction makes no sense");
    strangers_.erase(conn);
    if (const auto old = edges_.edge_of(hello->worker)) {
      edges_.close(*old);
      close(*old);
    }
    actions_.push_back(act::Admit{conn});
    edges_.open(conn, std::move(*hello), now);
    return tell_troubles();
  }
  if (!edges_.contains(conn)) return refuse("it did not introduce itself");
  if (auto* have = std::get_if<Have>(&*message))
    edges_.update(conn, std::move(*have), now);
  else if (const auto* request = std::get_if<ChunkRequest>(&*message))
    edges_.send_again(conn, *request, now);
  else
    return refuse("a child sent a message that is not for a parent");
  tell_troubles();
}

void MemberCore::tell_troubles() {
  for (const EdgeTrouble& t : edges_.take_troubles())
    log::info("worker {}: worker {} is referred to the learner for version {}", id_ ? id_->value : 0, t.child,
              t.what.target);
}

// ---- time ----

void MemberCore::beat(TimePoint now) {
  Heartbeat beat;
  beat.version = installed_;
  beat.chunk_bytes_in = chunk_bytes_in_;
  beat.chunk_bytes_forwarded = edges_.chunk_bytes_sent();
  beat.chunks_duplicate = duplicates_;
  beat.chunks_corrupt = corrupt_;
  beat.forwarding_rate = edges_.measured_rate();
  beat.application = application_;
  send_control(control_, beat, now);
  beat_at_ = now + heartbeat_;
}

void MemberCore::on_timer(TimePoint now) {
  if (state_ == State::kGone) return;
  resume_reading(now);
  if (now >= join_deadline_)
    return gone(fmt::format("the learner at {} did not answer within {}", to_text(config_.learner),
                            echoline::to_text(config_.join_timeout)));
  if (state_ == State::kJoined) {
    if (now - learner_heard_ >= learner_timeout_)
      return gone(fmt::format("nothing heard from the learner for {}", echoline::to_text(learner_timeout_)));
    if (now >= beat_at_) beat(now);
    if (unannounced_since_ != kNever && newest_ && now - unannounced_since_ >= heartbeat_ * kStallHeartbeats) {
      unannounced_since_ = kNever;
      if (!position_ || *position_ < *newest_) catch_up(*newest_, now);
    }
  }
  for (auto* up : {&parent_, &helper_})
    if (*up && now >= (*up)->redial_at) dial_upstream(**up);
  std::erase_if(strangers_, [&](const auto& s) {
    if (s.second > now) return false;
    close(s.first);
    return true;
  });
  edges_.on_timer(now);
}

TimePoint MemberCore::next_deadline() const {
  if (state_ == State::kGone) return kNever;
  TimePoint at = std::min({edges_.next_deadline(), reading_deadline(), join_deadline_});
  if (state_ == State::kJoined) {
    at = std::min({at, beat_at_, learner_heard_ + learner_timeout_});
    if (unannounced_since_ != kNever && newest_) at = std::min(at, unannounced_since_ + heartbeat_ * kStallHeartbeats);
  }
  for (const auto* up : {&parent_, &helper_})
    if (*up) at = std::min(at, (*up)->redial_at);
  for (const auto& [conn, until] : strangers_) at = std::min(at, until);
  return at;
}

}  // namespace echoline::overlay
