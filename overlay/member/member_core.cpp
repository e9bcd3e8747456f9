#include "overlay/member/member_core.hpp"

#include <algorithm>
#include <cstring>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr std::size_t kTroublesKept = 16;

// A stream of its own for every worker: those who lost the learner together do not all come back at once.
std::uint64_t seed_of(const trust::PublicKey& key) {
  std::uint64_t seed = 0;
  std::memcpy(&seed, key.bytes.data(), sizeof seed);
  return seed;
}

}  // namespace

MemberCore::MemberCore(MemberConfig config)
    : Core(config.core),
      config_(std::move(config)),
      id_(config_.state.worker),
      membership_(seed_of(config_.key.public_key())),
      file_(std::move(config_.state), config_.durable, actions_),
      store_(config_.store, *config_.checker, actions_),
      edges_(store_, uplink_, false),
      strangers_(config_.core.connections),
      grants_(*config_.checker, id_),
      clock_offset_ms_(file_.state().clock_offset_ms),
      standing_(file_.state().floor ? file_.state().floor->epoch : 0),
      parts_(config_.parts_unread_max) {}

void MemberCore::start(TimePoint now) {
  membership_.start(now, config_.join_timeout);
  store_.set_recovering(false);
  actions_.push_back(act::UseCertificate{file_.state().certificate, file_.state().authority});
  if (file_.durable()) save();
  dial_learner(now);
  deliver(now);  // what an earlier process had received
}

// ---- the application ----

void MemberCore::installed(Version version, const Digest& policy_digest, TimePoint now) {
  if (membership_.ended()) return;
  if (const auto report = standing_.installed(version, policy_digest, now)) tell_learner(*report, now);
}

void MemberCore::install_failed(Version version, const std::string& why, TimePoint now) {
  if (membership_.ended()) return;
  const Standing::Failure failure = standing_.install_failed(version);
  if (failure == Standing::Failure::kVoid) return;
  log::warn("worker {}: version {} could not be installed: {}", id_, version, why);
  if (failure == Standing::Failure::kGiveUp) {
    const std::string reason = fmt::format("version {} could not be installed after {} attempts: {}", version,
                                           standing_.install_failures(), why);
    tell_learner(Goodbye{reason}, now);
    return gone(reason);
  }
  stall_.begin_anew(now);
  deliver(now);  // a full snapshot may already be here
  if (!standing_.position()) need_help(*standing_.repair(), now);
}

void MemberCore::send_message(Slice bytes, TimePoint now) {
  if (!membership_.joined()) return;
  messages_.push(std::move(bytes));
  if (messages_.bytes() > kUnsentBytesMax) {
    close(membership_.conn());
    return lost_learner(fmt::format("it does not take its messages: {} bytes are waiting", messages_.bytes()), now);
  }
  uplink_.wake(messages_);
  uplink_.pump(now);
}

void MemberCore::drain(TimePoint now) {
  if (membership_.ended() || membership_.draining()) return;
  membership_.drain(now);
  tell_learner(Draining{}, now);
}

void MemberCore::leave(const std::string& reason, TimePoint now) {
  if (membership_.ended()) return;
  tell_learner(Goodbye{reason}, now);
  gone(reason, true);
}

void MemberCore::gone(const std::string& reason, bool in_order) {
  if (membership_.ended()) return;
  membership_.end();
  assigned_ = false;
  uplink_.close(membership_.conn());
  close(membership_.conn());
  for (auto& [id, up] : parents_) close_upstream(up);
  if (helper_) close_upstream(*helper_);
  parents_.clear();
  helper_.reset();
  for (const ConnId conn : edges_.all_connections()) {
    edges_.close(conn);
    close(conn);
  }
  for (const ConnId conn : strangers_.take_all()) close(conn);
  actions_.push_back(act::Disconnected{reason, in_order});
}

WorkerStats MemberCore::stats() const {
  WorkerStats s;
  s.id = id_;
  for (const auto& [id, up] : parents_) s.parents.push_back(id);
  if (standing_.installed()) s.installed = standing_.installed()->version;
  s.chunk_bytes_in = {chunk_bytes_in_};
  s.chunk_bytes_forwarded = {edges_.chunk_bytes_sent()};
  s.bytes_in = bytes_received();
  s.bytes_out = bytes_sent();
  s.chunks_duplicate = duplicates_;
  s.chunks_corrupt = corrupt_;
  s.memory = store_.memory();
  s.memory_peak = store_.memory_peak();
  s.known_publications = edges_.known_publications();
  return s;
}

void MemberCore::check() const {
  membership_.check();
  stall_.check();
  standing_.check();
  ECHO_CHECK(parents_.empty() || !membership_.ended(), "ended with {} parents", parents_.size());
  ECHO_CHECK(!assigned_ || membership_.joined(), "assigned while {}", to_string(membership_.state()));
  ECHO_CHECK(!helper_ || helper_->catch_up_to, "helped to no version");
}

// ---- the learner ----

void MemberCore::tell_learner(const ControlMessage& message, TimePoint now) {
  if (membership_.greeted()) send_control(membership_.conn(), message, now);
}

// The control connection broke or fell silent. Publications go on along the edges while the worker tries to come back.
void MemberCore::lost_learner(const std::string& reason, TimePoint now) {
  assigned_ = false;
  uplink_.close(membership_.conn());
  messages_.clear();
  incoming_ = {};
  if (membership_.lost(now)) actions_.push_back(act::Away{reason});
  if (!membership_.away()) return;
  log::warn("worker {}: the learner is out of reach: {}; attempt {} to come back in {}, {} left", id_, reason,
            membership_.redials(), echoline::to_text(membership_.redial_at() - now),
            echoline::to_text(membership_.away_until() - now));
}

// Who has a certificate that counts joins with it; the other asks for a new one first, which its key is enough for.
void MemberCore::dial_learner(TimePoint now) {
  const bool asks = membership_.asks_next(certificate_ended(now));
  const auto service = asks ? act::Service::kEnrol : act::Service::kControl;
  membership_.dialled(dial(config_.learner, service, kLearnerId), asks);
}

bool MemberCore::certificate_ended(TimePoint now) const {
  const auto identity = trust::check_certificate(file_.state().certificate, config_.checker->run_key(),
                                                 file_.state().run_id, run_unix_s(now));
  return !identity && identity.error().code == Code::kStale;
}

void MemberCore::on_return(const Frame& frame, TimePoint now) {
  const auto message = decode_control(frame.body.bytes());
  if (!message) return gone("the learner sent an unreadable message: " + message.error().message());
  if (const auto* goodbye = std::get_if<Goodbye>(&*message)) {
    if (membership_.refused())
      return gone("this machine's certificate has ended and the learner gives it no other: " + goodbye->reason);
    close(membership_.conn());
    return lost_learner(goodbye->reason, now);
  }
  const auto* enrolled = std::get_if<Enrolled>(&*message);
  if (!enrolled || enrolled->worker != id_) return gone("the learner takes this machine for another");
  close(membership_.conn());
  clock_offset_ms_ = static_cast<std::int64_t>(enrolled->unix_ms) - static_cast<std::int64_t>(unix_ms(now));
  use_certificate(enrolled->certificate, now);
  log::info("worker {}: its certificate had ended, the learner has given it another", id_);
  membership_.certified();
  dial_learner(now);
}

// For so long this node did not run: what the others said meanwhile is still to be read. Before anything else is done
// with what comes first after it, which begins times of its own.
void MemberCore::excuse_pause(TimePoint now) {
  if (beat_at_ == kNever || now - beat_at_ <= pulse_.heartbeat()) return;
  const Duration late = now - std::exchange(beat_at_, now);
  pulse_.excuse(late, now);
  membership_.excuse(late);
  stall_.excuse(late);
  const auto excuse_edge = [&](Upstream& up) {
    up.silence.excuse(late, now);
    if (up.opens_by != kNever) up.opens_by += late;
  };
  for (auto& [id, up] : parents_) excuse_edge(up);
  if (helper_) excuse_edge(*helper_);
  strangers_.excuse(late);
}

// Said where it happens, and to the learner, whose run it is.
void MemberCore::complain(const std::string& what, TimePoint now) {
  const auto told = troubles_.find(what);
  if (told != troubles_.end() && now < told->second + kTroublePause) return;
  if (told == troubles_.end() && troubles_.size() >= kTroublesKept) troubles_.clear();
  troubles_[what] = now;
  log::error("worker {}: {}", id_, what);
  tell_learner(Trouble{what}, now);
}

void MemberCore::on_control(const ControlMessage& message, TimePoint now) {
  pulse_.heard(now);
  if (const auto* goodbye = std::get_if<Goodbye>(&message)) return gone(goodbye->reason, goodbye->run_ended);
  if (const auto* welcome = std::get_if<Welcome>(&message)) return on_welcome(*welcome, now);
  if (!membership_.joined()) return gone("the learner sent something before its welcome");
  if (const auto* assign = std::get_if<Assign>(&message)) return on_assign(*assign, now);
  if (const auto* beacon = std::get_if<SignedBeacon>(&message)) {
    pulse_.beacon(now);
    return on_beacon(*beacon, now, true);
  }
  if (const auto* renewed = std::get_if<Renewed>(&message)) return on_renewed(*renewed, now);
  if (const auto* release = std::get_if<Release>(&message)) {
    grants_.release(release->child, release->issued, learner_unix_ms(now) + grant_lifetime_ms(membership_.away_max()));
    return drop_ungranted(now);
  }
  if (const auto* notice = std::get_if<Notice>(&message))
    return log::warn("worker {}: the learner says: {}", id_, notice->text);
  if (const auto* child = std::get_if<DialChild>(&message)) {
    if (child->worker == id_ || edges_.connections() >= config_.core.connections.members) return;
    dialled_children_.insert_or_assign(dial(child->endpoint, act::Service::kData, child->worker), *child);
    return;
  }
  if (const auto* help = std::get_if<Help>(&message)) {
    stall_.help_came();
    if (helper_ || standing_.has(help->target)) return;
    // Its parent for everything can help, but thinks that it has sent all: they begin anew. One from before it came
    // back may not be its parent any more.
    const auto parent = parents_.find(help->from.worker);
    if (assigned_ && parent != parents_.end() && parents_.size() == 1 && !help->full_only && parent->second.up()) {
      stall_.parents_begin_anew();
      close_upstream(parent->second);
      return open_upstream(parent->second, now);
    }
    stall_.restart(now);  // it gets its time, whatever was said while it was being looked for
    helper_.emplace();
    helper_->parent = help->from;
    helper_->grant = help->grant;
    helper_->catch_up_to = help->target;
    helper_->full_only = help->full_only;
    helper_->silences = std::exchange(helper_silences_, 0);
    for (auto& [id, up] : parents_) tell_have(up, now);  // they need not send it as well
    return open_upstream(*helper_, now);
  }
  gone("the learner sent a message that is not for a worker");
}

void MemberCore::on_welcome(const Welcome& welcome, TimePoint now) {
  if (membership_.joined()) return gone("the learner sent a second welcome");
  if (welcome.worker != id_) return gone(fmt::format("the learner takes this worker for worker {}", welcome.worker));
  membership_.welcomed(config_.away_max.value_or(welcome.away_max));
  pulse_.begin(welcome.heartbeat, welcome.patience, now);
  stall_.set_heartbeat(welcome.heartbeat);
  stall_.help_came();
  store_.fit(welcome.policy);
  beat_at_ = now + pulse_.heartbeat();
  clock_offset_ms_ = static_cast<std::int64_t>(welcome.unix_ms) - static_cast<std::int64_t>(unix_ms(now));
  const Duration wrong = std::chrono::milliseconds(clock_offset_ms_);
  if (std::abs(clock_offset_ms_ - file_.state().clock_offset_ms) > 1000) {
    file_.state().clock_offset_ms = clock_offset_ms_;
    if (file_.durable()) save();
  }
  uplink_.open(membership_.conn(), messages_);
  renew_at_half_life(now);
  actions_.push_back(act::Welcomed{id_, welcome.application});
  if (wrong > kClockTold || wrong < -kClockTold)
    complain(
        fmt::format("the clock of this machine is {} {} the learner's, by which certificates are judged: it works, "
                    "but set it",
                    echoline::to_text(std::max(wrong, -wrong)), wrong > Duration{} ? "behind" : "ahead of"),
        now);
  if (const Status fits = store_.check_fits(welcome.policy); !fits) complain(fits.error().message(), now);
  if (membership_.draining()) tell_learner(Draining{}, now);
}

void MemberCore::renew_at_half_life(TimePoint now) {
  const auto identity = trust::check_certificate(file_.state().certificate, config_.checker->run_key(),
                                                 file_.state().run_id, std::nullopt);
  if (!identity) return;
  const double left_s = identity->expires_unix_s - static_cast<double>(learner_unix_ms(now)) / 1e3;
  renew_at_ = now + from_seconds(std::max(0.0, left_s / 2));
}

std::uint64_t MemberCore::learner_unix_ms(TimePoint now) const {
  return static_cast<std::uint64_t>(static_cast<std::int64_t>(unix_ms(now)) + clock_offset_ms_);
}

// Parents that stay keep their connections; what changes is which stripes come from whom.
void MemberCore::on_assign(const Assign& assign, TimePoint now) {
  assigned_ = true;
  const bool count_changed = assign.stripes != stripes_;
  bool served_otherwise = count_changed;
  stripes_ = assign.stripes;
  std::set<WorkerId> named;
  const auto show = [&](Upstream& up) {  // ahead of what the child says it wants from now on
    up.grant = assign.grant;
    const auto stream = std::find_if(up.streams.begin(), up.streams.end(), [](const auto& s) { return s.up; });
    if (up.grant && stream != up.streams.end()) send_control(stream->conn, *up.grant, now);
  };
  for (const Parent& parent : assign.parents) {
    named.insert(parent.worker);
    const auto it = parents_.find(parent.worker);
    if (it != parents_.end() && it->second.parent.endpoint == parent.endpoint &&
        it->second.parent.dials == parent.dials) {
      const bool changed = count_changed || it->second.parent.stripes != parent.stripes;
      served_otherwise |= changed;
      it->second.parent = parent;
      it->second.corrupt = 0;
      show(it->second);
      if (changed) tell_have(it->second, now);
      if (it->second.streams.empty() && !parent.dials) {
        it->second.failures = 0;
        open_upstream(it->second, now);
      }
      continue;
    }
    served_otherwise = true;
    if (it != parents_.end()) close_upstream(it->second);
    Upstream& up = parents_[parent.worker] = Upstream{};
    up.parent = parent;
    up.grant = assign.grant;
    open_upstream(up, now);
  }
  for (auto it = parents_.begin(); it != parents_.end();) {
    if (!named.contains(it->first)) {
      served_otherwise = true;
      close_upstream(it->second);
      it = parents_.erase(it);
    } else {
      ++it;
    }
  }
  // A grant alone brings nothing.
  if (served_otherwise) stall_.restart_for_parents(now);
}

// From the learner, or passed on by a parent: believed for its signature, not for who sent it.
void MemberCore::on_beacon(const Signed& as_signed, TimePoint now, bool first_hand) {
  if (beacon_ == as_signed) return;
  const auto beacon = config_.checker->open(as_signed);
  if (!beacon) {
    ++refused_;
    return log::warn("worker {}: {}", id_, beacon.error().message());
  }
  if (beacon->sequence <= file_.state().beacon_sequence) return;  // heard before
  if (beacon->expires_unix_ms < learner_unix_ms(now)) {
    ++refused_;
    return log::warn("worker {}: a beacon that has expired is not believed", id_);
  }
  if (beacon->epoch < standing_.epoch()) return;
  // Its welcome may have lain here for hours; what the learner itself says does not come from its future.
  if (const std::uint64_t before = learner_unix_ms(now); first_hand && beacon->issued_unix_ms > before) {
    clock_offset_ms_ += static_cast<std::int64_t>(beacon->issued_unix_ms - before);
    renew_at_half_life(now);
  }
  beacon_ = as_signed;
  file_.state().beacon_sequence = beacon->sequence;
  grants_.heard(beacon->sequence, grant_lifetime_ms(membership_.away_max()));
  begin_epoch(beacon->epoch, now);
  if (store_.erase_abandoned(beacon->newest, beacon->sequence)) store_changed(now);
  standing_.published(std::max(beacon->newest, store_.newest()));  // an absent one is the least
  if (standing_.behind())
    stall_.wait(now);
  else
    stall_.arrived();
  revoked_ = beacon->revoked;
  if (revoked_.contains(id_)) return gone("the learner has revoked this worker's certificate");
  drop_revoked();
}

void MemberCore::on_renewed(const Renewed& renewed, TimePoint now) { use_certificate(renewed.certificate, now); }

void MemberCore::use_certificate(std::vector<std::byte> certificate, TimePoint now) {
  const auto identity =
      trust::check_certificate(certificate, config_.checker->run_key(), file_.state().run_id, std::nullopt);
  if (!identity || identity->worker != id_ || identity->key != config_.key.public_key())
    return log::warn("worker {}: the renewed certificate is not for it", id_);
  file_.state().certificate = std::move(certificate);
  actions_.push_back(act::UseCertificate{file_.state().certificate, file_.state().authority});
  renew_at_half_life(now);
  if (file_.durable()) save();
}

void MemberCore::beat(TimePoint now) {
  beat_at_ = now + pulse_.heartbeat();
  const Version needed = standing_.keep_from({~std::uint64_t{0}});
  if (store_.erase_expired(learner_unix_ms(now), needed)) store_changed(now);
  Heartbeat beat;
  beat.installed = standing_.installed();
  beat.chunk_bytes_in = chunk_bytes_in_;
  beat.chunk_bytes_forwarded = edges_.chunk_bytes_sent();
  beat.chunks_duplicate = duplicates_;
  beat.chunks_corrupt = corrupt_;
  beat.forwarding_rate = uplink_.measured_rate();
  beat.progress = progress();
  beat.edges = edges_.reports(now);
  for (auto it = store_.entries().rbegin(); it != store_.entries().rend() && beat.holdings.size() < 64; ++it)
    if (it->second.complete) beat.holdings.push_back({it->first, it->second.bytes});
  beat.application = application_;
  tell_learner(beat, now);
  drop_ungranted(now);
  edges_.tell_all(EdgeStatus{beacon_, std::move(beat.progress)}, now);
}

// ---- state ----

void MemberCore::save() {
  const auto& staged = standing_.staged();
  file_.save(staged ? std::optional(staged->last) : std::nullopt);
}

void MemberCore::on_saved(const Status& status, TimePoint now) {
  if (membership_.ended()) return;
  if (!status) {
    log::error("worker {}: its state cannot be saved, so nothing newer is activated: {}", id_,
               status.error().message());
    return file_.failed(now);
  }
  const bool again = file_.succeeded();
  if (standing_.staged() && file_.protects(standing_.staged()->last)) activate(now);
  if (again) save();
}

// ---- connections ----

void MemberCore::on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) {
  excuse_pause(now);
  const bool known = peer.identity.kind != trust::PeerIdentity::Kind::kNobody;
  const WorkerId who = peer.identity.worker;
  if (membership_.ended() || !known || revoked_.contains(who) || askers_.is_barred(who, now)) return close(conn);
  meet(conn, peer, now);
}

void MemberCore::on_connected(ConnId conn, TimePoint now) {
  excuse_pause(now);
  if (membership_.ended()) return;
  if (const auto child = dialled_children_.find(conn); child != dialled_children_.end()) {
    meet(conn, {child->second.endpoint.host, {trust::PeerIdentity::Kind::kWorker, child->second.worker}}, now);
    return send_control(conn, EdgeStatus{{}, progress()}, now);  // no more than a stranger may say
  }
  actions_.push_back(act::Admit{conn});  // this side chose whom to call
  if (membership_.is(conn)) {
    membership_.connected(now);
    if (membership_.asking())
      return send_control(conn,
                          Return{config_.key.public_key(),
                                 config_.key.sign("return 4", trust::fingerprint(config_.checker->run_key()))},
                          now);
    pulse_.heard(now);
    return send_control(conn,
                        Hello{file_.state().run_id, config_.name, config_.data, up_.rate(), config_.core.limits.down,
                              standing_.installed(), config_.place},
                        now);
  }
  if (Upstream* up = upstream_of(conn)) upstream_opened(*up, *up->stream_of(conn), now);
}

void MemberCore::on_closed(ConnId conn, const std::string& reason, TimePoint now) {
  excuse_pause(now);
  if (membership_.ended()) return;
  if (membership_.is(conn)) {
    if (membership_.state() == Membership::State::kJoining && now < membership_.join_deadline())
      log::debug("joining {}: {}", to_text(config_.learner), reason);
    membership_.broken();
    return lost_learner(reason, now);
  }
  strangers_.erase(conn);
  dialled_children_.erase(conn);
  edges_.close(conn);
  Upstream* up = upstream_of(conn);
  if (!up) return;
  const bool was_up = up->stream_of(conn)->up;
  std::erase_if(up->streams, [&](const Upstream::Stream& s) { return s.conn == conn; });
  if (up->up() && !was_up)
    up->probe.settle(up->streams.size());
  else if (up->up())
    tell_have(*up, now);  // what was on its way there is lost
  else
    upstream_failed(*up, was_up ? EdgeTroubleKind::kLost : EdgeTroubleKind::kUnreachable, reason, now);
}

void MemberCore::on_frame(ConnId conn, Frame frame, TimePoint now) {
  excuse_pause(now);
  if (membership_.ended()) return;
  if (membership_.is(conn)) {
    membership_.answered();
    pulse_.heard(now);
    if (membership_.asking()) return on_return(frame, now);
    if (frame.type == FrameType::kApplication && membership_.joined()) {
      auto message = incoming_.add(frame);
      if (!message) return gone("of the learner: " + message.error().message());
      if (*message) actions_.push_back(act::Message{std::move(**message)});
      return;
    }
    if (frame.type == FrameType::kChunk) return gone("the learner sent a chunk on the control connection");
    const auto message = decode_control(frame.body.bytes());
    if (!message) return gone("the learner sent an unreadable message: " + message.error().message());
    return on_control(*message, now);
  }
  if (Upstream* up = upstream_of(conn)) return on_upstream(*up, conn, std::move(frame), now);
  if (const Stranger* stranger = strangers_.find(conn)) return on_stranger(conn, Stranger(*stranger), frame, now);
  on_child(conn, frame, now);
}

void MemberCore::on_sent(ConnId conn, std::size_t bytes, TimePoint now) { uplink_.on_sent(conn, bytes, now); }

// ---- time ----

void MemberCore::on_timer(TimePoint now) {
  if (membership_.ended()) return;
  excuse_pause(now);
  resume_reading(now);
  if (now >= membership_.join_deadline())
    return gone(fmt::format("the learner at {} did not answer within {}", to_text(config_.learner),
                            echoline::to_text(config_.join_timeout)));
  if (now >= membership_.away_until())
    return gone(fmt::format("the learner at {} was out of reach for {}", to_text(config_.learner),
                            echoline::to_text(membership_.away_max())));
  if (membership_.take_redial(now)) dial_learner(now);
  if (membership_.unanswered(now)) {
    close(membership_.conn());
    lost_learner("it does not answer", now);
  }
  if (file_.take_retry(now)) save();
  if (membership_.joined()) {
    if (now >= pulse_.deadline()) {
      close(membership_.conn());
      lost_learner(fmt::format("nothing heard for {}", echoline::to_text(pulse_.silent_for(now))), now);
    } else if (now >= renew_at_) {
      renew_at_ = now + std::chrono::minutes(1);  // should the answer stay away
      tell_learner(Renew{config_.key.public_key()}, now);
    }
    if (standing_.newest() && stall_.take_stall(now) && standing_.behind()) on_stalled(now);
  }
  if (beat_at_ != kNever && now >= beat_at_) beat(now);
  watch_edges(now);
  if (membership_.drained(edges_.connections() > 0, pulse_.heartbeat(), now)) return leave("drained", now);
  for (const ConnId conn : strangers_.take_late(now)) {
    dialled_children_.erase(conn);
    close(conn);
  }
  uplink_.on_timer(now);
}

// Nothing has come nearer to the newest version for too long.
void MemberCore::on_stalled(TimePoint now) {
  // The path may be that long: what is dialled anew comes behind all that is on it.
  const auto unheard = [](const Upstream& up) { return up.up() && !up.heard; };
  if (helper_ ? unheard(*helper_) : std::any_of(parents_.begin(), parents_.end(), [&](const auto& parent) {
        return unheard(parent.second);
      }))
    stall_.nothing_heard();
  if (helper_) {  // it lives and brings nothing
    helper_silences_ = helper_->silences;
    end_help(now);
  }
  if (store_.erase_contested()) store_changed(now);
  need_help(*standing_.newest(), now, !stall_.is_lost_here());
}

TimePoint MemberCore::next_deadline() const {
  if (membership_.ended()) return kNever;
  TimePoint at = std::min(
      {uplink_.next_deadline(), reading_deadline(), membership_.next_deadline(), file_.next_deadline(), beat_at_});
  if (membership_.joined())
    at = std::min({at, pulse_.deadline(), renew_at_, standing_.newest() ? stall_.deadline() : kNever});
  const auto of = [](const Upstream& up) {
    return std::min({up.redial_at, up.opens_by, up.up() ? up.silence.deadline() : kNever});
  };
  for (const auto& [id, up] : parents_) at = std::min(at, of(up));
  if (helper_) at = std::min(at, of(*helper_));
  return std::min(at, strangers_.next_deadline());
}

}  // namespace echoline::overlay
