// Passes events to a worker's components. Called by the driver; member_publications.cpp has the publications.
#include "overlay/member/member_core.hpp"

#include <algorithm>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

constexpr Version kLatestVersion{~std::uint64_t{0}};  // above all versions
constexpr std::size_t kHoldingsReportedMax = 64;      // whole publications listed in a heartbeat, the newest ones

}  // namespace

MemberCore::MemberCore(MemberConfig config)
    : Core(config.core),
      config_(std::move(config)),
      install_state_(config_.state.floor ? config_.state.floor->epoch : 0),
      file_(config_.state, config_.durable, install_state_, actions_),
      identity_(config_, file_, actions_),
      learner_(config_, identity_, transport_, uplink_, actions_),
      store_(config_.store, *config_.checker, actions_),
      parents_(config_, install_state_, store_, stall_watch_, learner_, transport_),
      children_(config_, identity_, learner_, parents_, store_, transport_, uplink_),
      parts_feed_(config_.parts_unread_max) {}

void MemberCore::start(TimePoint now) {
  store_.set_recovering(false);
  identity_.use_certificate();
  file_.save();
  learner_.start(now);
  deliver(now);  // what an earlier process had received
}

// ---- the application ----

void MemberCore::installed(Version version, const Digest& policy_digest, TimePoint now) {
  if (has_ended()) return;
  if (const auto report = install_state_.on_installed(version, policy_digest, now)) learner_.send(*report, now);
}

void MemberCore::install_failed(Version version, const std::string& why, TimePoint now) {
  if (has_ended()) return;
  const InstallState::Failure failure = install_state_.on_install_failed(version);
  if (failure == InstallState::Failure::kVoid) return;
  log::warn("worker {}: version {} could not be installed: {}", self(), version, why);
  if (failure == InstallState::Failure::kGiveUp) {
    const std::string reason = fmt::format("version {} could not be installed after {} attempts: {}", version,
                                           install_state_.install_failures(), why);
    learner_.send(Goodbye{reason}, now);
    return end(reason);
  }
  stall_watch_.on_position_void(now);
  deliver(now);  // a full snapshot may already be here
  if (!install_state_.position()) parents_.request_help(*install_state_.repair_version_min(), now);
}

void MemberCore::drain(TimePoint now) {
  if (!has_ended() && !learner_.membership().is_draining()) learner_.drain(now);
}

void MemberCore::leave(const std::string& reason, TimePoint now) {
  if (has_ended()) return;
  learner_.send(Goodbye{reason}, now);
  end(reason, /*in_order=*/true);
}

void MemberCore::end(const std::string& reason, bool in_order) {
  if (has_ended()) return;
  learner_.end();
  parents_.close_all();
  children_.close_all();
  actions_.push_back(act::ReportEnd{reason, in_order});
}

WorkerStats MemberCore::stats() const {
  WorkerStats stats;
  stats.id = self();
  stats.parents = parents_.ids();
  if (install_state_.installed()) stats.installed = install_state_.installed()->version;
  stats.chunk_bytes_in = {counters_.chunk_bytes_in};
  stats.chunk_bytes_forwarded = {children_.edges().chunk_bytes_sent()};
  stats.bytes_in = bytes_received();
  stats.bytes_out = bytes_sent();
  stats.chunks_duplicate = counters_.chunks_duplicate;
  stats.chunks_corrupt = counters_.chunks_corrupt;
  stats.memory = store_.memory();
  stats.memory_peak = store_.memory_peak();
  stats.known_publications = children_.edges().known_publications();
  return stats;
}

void MemberCore::check() const {
  learner_.check();
  file_.check();
  stall_watch_.check();
  install_state_.check();
  parents_.check();
  children_.check();
  ECHO_CHECK(!has_ended() || (parents_.ids().empty() && children_.edges().connections() == 0), "ended with edges");
}

// ---- the learner ----

void MemberCore::on_learner_frame(const Frame& frame, TimePoint now) {
  const LearnerLink::Event event = learner_.on_frame(frame, now);
  if (const auto* ended = std::get_if<LearnerLink::Ended>(&event)) return end(ended->reason, ended->in_order);
  if (const auto* message = std::get_if<ControlMessage>(&event)) on_learner_message(*message, now);
}

void MemberCore::on_learner_message(const ControlMessage& message, TimePoint now) {
  if (const auto* welcome = std::get_if<Welcome>(&message)) return on_welcome(*welcome, now);
  if (const auto* assign = std::get_if<Assign>(&message)) return parents_.assign(*assign, now);
  if (const auto* beacon = std::get_if<SignedBeacon>(&message)) return on_beacon(*beacon, now, /*first_hand=*/true);
  if (const auto* release = std::get_if<Release>(&message)) return children_.release(*release, now);
  if (const auto* child = std::get_if<DialChild>(&message)) return children_.dial(*child);
  if (const auto* help = std::get_if<Help>(&message)) return parents_.on_help(*help, now);
  end("the learner sent a message that is not for a worker");
}

void MemberCore::on_welcome(const Welcome& welcome, TimePoint now) {
  stall_watch_.set_heartbeat(welcome.heartbeat);
  stall_watch_.on_help();
  store_.set_policy_size(welcome.policy);
  if (const Status fits = store_.check_fits(welcome.policy); !fits)
    learner_.report_trouble(fits.error().message(), now);
  if (learner_.membership().is_draining()) learner_.send(Draining{}, now);
}

// `first_hand`: from the learner itself, not forwarded by a parent. Its signature makes it valid either way.
void MemberCore::on_beacon(const Signed& as_signed, TimePoint now, bool first_hand) {
  if (beacon_ == as_signed) return;
  const auto beacon = config_.checker->open(as_signed);
  if (!beacon) return log::warn("worker {}: {}", self(), beacon.error().message());
  if (beacon->sequence <= file_.state().beacon_sequence) return;  // a replay
  if (beacon->expires_unix_ms < identity_.learner_unix_ms(now))
    return log::warn("worker {}: ignores a beacon that has expired", self());
  if (beacon->epoch < install_state_.epoch()) return;
  // The clock was set by the welcome, which may have been read hours late. If the learner's own beacon is from the
  // future by this clock, the clock is behind.
  if (first_hand && beacon->issued_unix_ms > identity_.learner_unix_ms(now))
    identity_.set_clock(beacon->issued_unix_ms, now);
  beacon_ = as_signed;
  file_.state().beacon_sequence = beacon->sequence;
  children_.on_beacon(*beacon);
  begin_epoch(beacon->epoch, now);
  if (store_.erase_abandoned(beacon->newest, beacon->sequence)) children_.on_store_changed(now);
  install_state_.on_published(std::max(beacon->newest, store_.newest()));  // an absent version is the lowest
  if (install_state_.is_behind())
    stall_watch_.begin_wait(now);
  else
    stall_watch_.on_newest_arrived();
  if (beacon->revoked.contains(self())) return end("the learner has revoked this worker's certificate");
  children_.revoke(beacon->revoked);
  parents_.revoke(beacon->revoked);
}

void MemberCore::send_heartbeat(TimePoint now) {
  const Version needed = install_state_.oldest_needed(kLatestVersion);  // only staged publications are needed
  if (store_.erase_expired(identity_.learner_unix_ms(now), needed)) children_.on_store_changed(now);
  Heartbeat beat;
  beat.installed = install_state_.installed();
  beat.chunk_bytes_in = counters_.chunk_bytes_in;
  beat.chunk_bytes_forwarded = children_.edges().chunk_bytes_sent();
  beat.chunks_duplicate = counters_.chunks_duplicate;
  beat.chunks_corrupt = counters_.chunks_corrupt;
  beat.forwarding_rate = uplink_.measured_rate();
  beat.progress = parents_.progress();
  beat.edges = children_.edges().reports(now);
  for (auto it = store_.entries().rbegin();
       it != store_.entries().rend() && beat.holdings.size() < kHoldingsReportedMax; ++it)
    if (it->second.complete) beat.holdings.push_back({it->first, it->second.bytes});
  beat.application = heartbeat_payload_;
  learner_.send(beat, now);
  children_.close_ungranted(now);
  children_.send_status(EdgeStatus{beacon_, std::move(beat.progress)}, now);
}

// ---- connections ----

void MemberCore::on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) {
  postpone_after_pause(now);
  if (has_ended()) return close(conn);
  children_.on_accepted(conn, peer, now);
}

void MemberCore::on_connected(ConnId conn, TimePoint now) {
  postpone_after_pause(now);
  if (has_ended() || children_.on_connected(conn, now)) return;
  transport_.admit(conn);  // this side has chosen the peer
  if (learner_.membership().is_connection(conn)) {
    if (learner_.on_connected(now))
      learner_.send(Hello{.run_id = config_.state.run_id,
                          .name = config_.name,
                          .data = config_.data,
                          .up = up_pacer_.rate(),
                          .down = config_.core.limits.down,
                          .installed = install_state_.installed(),
                          .place = config_.place},
                    now);
    return;
  }
  if (Upstream* upstream = parents_.find(conn)) parents_.on_connected(*upstream, conn, now);
}

void MemberCore::on_closed(ConnId conn, const std::string& reason, TimePoint now) {
  postpone_after_pause(now);
  if (has_ended()) return;
  if (learner_.membership().is_connection(conn)) return learner_.on_closed(reason, now);
  children_.on_closed(conn);
  if (Upstream* upstream = parents_.find(conn)) parents_.on_closed(*upstream, conn, reason, now);
}

void MemberCore::on_frame(ConnId conn, Frame frame, TimePoint now) {
  postpone_after_pause(now);
  if (has_ended()) return;
  if (learner_.membership().is_connection(conn)) return on_learner_frame(frame, now);
  if (Upstream* upstream = parents_.find(conn)) return on_upstream_frame(*upstream, conn, frame, now);
  children_.on_frame(conn, frame, now);
}

// ---- time ----

// If this process was suspended, messages from that time are still unread, so all deadlines are postponed by the pause.
// Every event calls this first, because it may set new deadlines.
void MemberCore::postpone_after_pause(TimePoint now) {
  const auto pause = learner_.take_pause(now);
  if (!pause) return;
  stall_watch_.postpone(*pause);
  parents_.postpone(*pause, now);
  children_.postpone(*pause);
}

void MemberCore::on_timer(TimePoint now) {
  if (has_ended()) return;
  postpone_after_pause(now);
  resume_reading(now);
  if (const auto reason = learner_.check_deadlines(now)) return end(*reason);
  file_.retry_if_due(now);
  if (learner_.membership().is_joined()) {
    learner_.check_pulse(now);
    if (install_state_.newest() && stall_watch_.take_stall(now) && install_state_.is_behind()) on_stall(now);
  }
  if (learner_.take_beat(now)) send_heartbeat(now);
  parents_.on_timer(children_.non_parent_connections(), now);
  if (learner_.membership().may_leave(children_.edges().connections() > 0, learner_.heartbeat(), now))
    return leave("drained", now);
  children_.on_timer(now);
  uplink_.on_timer(now);
}

void MemberCore::on_stall(TimePoint now) {
  parents_.on_stall(now);
  if (store_.erase_contested()) children_.on_store_changed(now);
  parents_.request_help(*install_state_.newest(), now, /*stalled=*/!stall_watch_.has_lost_chunks());
}

TimePoint MemberCore::next_deadline() const {
  if (has_ended()) return kNever;
  return std::min({uplink_.next_deadline(), reading_deadline(), learner_.next_deadline(), file_.next_deadline(),
                   parents_.next_deadline(), children_.next_deadline(),
                   learner_.membership().is_joined() && install_state_.newest() ? stall_watch_.deadline() : kNever});
}

}  // namespace echoline::overlay
