// A worker's connection to its learner. Called by MemberCore.
#include "overlay/member/learner_link.hpp"

#include <cstring>

#include "base/log.hpp"
#include "overlay/trainer_node.hpp"

namespace echoline::overlay {
namespace {

// Every worker has another key, so workers that lost the learner together do not all dial it at once.
std::uint64_t seed_of(const trust::PublicKey& key) {
  std::uint64_t seed = 0;
  std::memcpy(&seed, key.bytes.data(), sizeof seed);
  return seed;
}

}  // namespace

LearnerLink::LearnerLink(const MemberConfig& config, Identity& identity, Transport& transport, Uplink& uplink,
                         std::vector<Action>& actions)
    : config_(config),
      identity_(identity),
      transport_(transport),
      uplink_(uplink),
      actions_(actions),
      membership_(seed_of(config.key.public_key())) {
  unsent_.set_local(is_trainer_node(config.name));
}

void LearnerLink::start(TimePoint now) {
  membership_.start(now, config_.join_timeout);
  dial(now);
}

void LearnerLink::dial(TimePoint now) {
  // Without a valid certificate the worker asks for another one, on an anonymous connection.
  const bool asks_for_certificate = membership_.next_connection_asks(identity_.has_expired(now));
  const auto service = asks_for_certificate ? act::Service::kEnrol : act::Service::kControl;
  membership_.on_dialled(transport_.dial(config_.learner, service, kLearnerId), asks_for_certificate);
}

void LearnerLink::drain(TimePoint now) {
  membership_.drain(now);
  send(Draining{}, now);
}

void LearnerLink::end() {
  membership_.end();
  uplink_.close(membership_.conn());
  transport_.close(membership_.conn());
  unsent_.clear();
}

void LearnerLink::send(const ControlMessage& message, TimePoint now) {
  if (membership_.is_greeted()) transport_.send(membership_.conn(), message, now);
}

void LearnerLink::send_application(Slice bytes, TimePoint now) {
  if (!membership_.is_joined()) return;
  unsent_.push(std::move(bytes));
  if (unsent_.bytes() > kUnsentBytesMax)
    return close_and_redial(fmt::format("it does not take its messages: {} bytes wait for it", unsent_.bytes()), now);
  uplink_.wake(unsent_);
  uplink_.pump(now);
}

void LearnerLink::report_trouble(const std::string& what, TimePoint now) {
  const auto reported = trouble_reported_at_.find(what);
  if (reported != trouble_reported_at_.end() && now < reported->second + kTroublePause) return;
  if (reported == trouble_reported_at_.end() && trouble_reported_at_.size() >= kTroublesMax)
    trouble_reported_at_.clear();  // bounds the memory; old troubles may then be reported again early
  trouble_reported_at_[what] = now;
  log::error("worker {}: {}", config_.state.worker, what);
  send(Trouble{what}, now);
}

void LearnerLink::close_and_redial(const std::string& reason, TimePoint now) {
  transport_.close(membership_.conn());
  on_lost(reason, now);
}

void LearnerLink::on_lost(const std::string& reason, TimePoint now) {
  uplink_.close(membership_.conn());
  unsent_.clear();
  incoming_ = {};
  if (membership_.on_lost(now)) actions_.push_back(act::ReportLearnerAway{reason});
  if (!membership_.is_away()) return;
  log::warn("worker {}: the learner is out of reach: {}; attempt {} to reconnect follows in {}; gives up in {}",
            config_.state.worker, reason, membership_.redials(), echoline::to_text(membership_.redial_at() - now),
            echoline::to_text(membership_.away_until() - now));
}

bool LearnerLink::on_connected(TimePoint now) {
  membership_.on_connected(now);
  if (membership_.is_asking()) {
    transport_.send(membership_.conn(), certificate_request(config_.key, config_.checker->run_key()), now);
    return false;
  }
  pulse_.on_frame(now);
  return true;
}

void LearnerLink::on_closed(const std::string& reason, TimePoint now) {
  if (membership_.state() == Membership::State::kJoining && now < membership_.join_deadline())
    log::debug("joining {}: {}", to_text(config_.learner), reason);
  membership_.on_disconnected();
  on_lost(reason, now);
}

LearnerLink::Event LearnerLink::on_frame(const Frame& frame, TimePoint now) {
  membership_.on_answered();
  pulse_.on_frame(now);
  const bool asks_for_certificate = membership_.is_asking();
  if (!asks_for_certificate && frame.type == FrameType::kApplication && membership_.is_joined()) {
    auto message = incoming_.add(frame);
    if (!message) return Ended{"of the learner: " + message.error().message()};
    if (*message) actions_.push_back(act::DeliverLearnerMessage{std::move(**message)});
    return {};
  }
  if (!asks_for_certificate && frame.type == FrameType::kChunk)
    return Ended{"the learner sent a chunk on the control connection"};
  auto message = decode_control(frame.body.bytes());
  if (!message) return Ended{"the learner sent an unreadable message: " + message.error().message()};
  return asks_for_certificate ? on_certificate_answer(*message, now) : on_message(std::move(*message), now);
}

// The learner gives this machine another certificate, or refuses to.
LearnerLink::Event LearnerLink::on_certificate_answer(const ControlMessage& message, TimePoint now) {
  if (const auto* goodbye = std::get_if<Goodbye>(&message)) {
    if (membership_.on_refused())
      return Ended{"this machine's certificate has expired and the learner issues no other: " + goodbye->reason};
    close_and_redial(goodbye->reason, now);
    return {};
  }
  const auto* enrolled = std::get_if<Enrolled>(&message);
  if (!enrolled || enrolled->worker != config_.state.worker) return Ended{"the learner takes this machine for another"};
  transport_.close(membership_.conn());
  identity_.set_clock(enrolled->unix_ms, now);
  identity_.accept(enrolled->certificate, now);
  log::info("worker {}: its certificate had expired, the learner has issued another", config_.state.worker);
  membership_.on_certified();
  dial(now);
  return {};
}

LearnerLink::Event LearnerLink::on_message(ControlMessage message, TimePoint now) {
  if (const auto* goodbye = std::get_if<Goodbye>(&message)) return Ended{goodbye->reason, goodbye->run_ended};
  if (const auto* welcome = std::get_if<Welcome>(&message)) {
    if (auto ended = on_welcome(*welcome, now)) return *ended;
  } else if (!membership_.is_joined()) {
    return Ended{"the learner sent something before its welcome"};
  }
  if (const auto* renewed = std::get_if<Renewed>(&message)) {
    identity_.accept(renewed->certificate, now);
    return {};
  }
  if (const auto* notice = std::get_if<Notice>(&message)) {
    log::warn("worker {}: the learner says: {}", config_.state.worker, notice->text);
    return {};
  }
  if (std::holds_alternative<SignedBeacon>(message)) pulse_.on_beacon(now);
  if (std::holds_alternative<Assign>(message)) membership_.on_assigned();
  return message;
}

std::optional<LearnerLink::Ended> LearnerLink::on_welcome(const Welcome& welcome, TimePoint now) {
  if (membership_.is_joined()) return Ended{"the learner sent a second welcome"};
  if (welcome.worker != config_.state.worker)
    return Ended{fmt::format("the learner takes this worker for worker {}", welcome.worker)};
  membership_.on_welcomed(config_.away_max.value_or(welcome.away_max));
  pulse_.begin(welcome.heartbeat, welcome.patience, now);
  identity_.set_clock(welcome.unix_ms, now);
  identity_.save_clock();
  uplink_.open(membership_.conn(), unsent_);
  actions_.push_back(act::ReportWelcome{config_.state.worker, welcome.application});
  const Duration clock_lag = identity_.clock_offset();  // positive: this machine's clock is behind
  if (clock_lag > kClockTolerance || clock_lag < -kClockTolerance)
    report_trouble(
        fmt::format("the clock of this machine is {} {} the learner's, by which certificates expire: the worker allows "
                    "for that, but the clock should be set",
                    echoline::to_text(std::max(clock_lag, -clock_lag)), clock_lag > Duration{} ? "behind" : "ahead of"),
        now);
  return std::nullopt;
}

std::optional<std::string> LearnerLink::check_deadlines(TimePoint now) {
  if (now >= membership_.join_deadline())
    return fmt::format("the learner at {} did not answer within {}", to_text(config_.learner),
                       echoline::to_text(config_.join_timeout));
  if (now >= membership_.away_until())
    return fmt::format("the learner at {} was out of reach for {}", to_text(config_.learner),
                       echoline::to_text(membership_.away_max()));
  if (membership_.take_redial(now)) dial(now);
  if (membership_.is_unanswered(now)) close_and_redial("it does not answer", now);
  return std::nullopt;
}

void LearnerLink::check_pulse(TimePoint now) {
  if (!membership_.is_joined()) return;
  if (now >= pulse_.deadline())
    close_and_redial(fmt::format("nothing heard for {}", echoline::to_text(pulse_.silent_for(now))), now);
  else if (identity_.take_renewal(now))
    send(Renew{config_.key.public_key()}, now);
}

std::optional<Duration> LearnerLink::take_pause(TimePoint now) {
  const auto pause = pulse_.take_pause(now);
  if (pause) membership_.postpone(*pause);
  return pause;
}

TimePoint LearnerLink::next_deadline() const {
  const TimePoint earliest = std::min(membership_.next_deadline(), pulse_.next_beat_at());
  return membership_.is_joined() ? std::min({earliest, pulse_.deadline(), identity_.renew_at()}) : earliest;
}

void LearnerLink::check() const {
  membership_.check();
  pulse_.check();
  ECHO_CHECK(membership_.is_joined() || unsent_.bytes() == 0, "{} bytes unsent by no member", unsent_.bytes());
  ECHO_CHECK(unsent_.bytes() <= kUnsentBytesMax && trouble_reported_at_.size() <= kTroublesMax);
}

}  // namespace echoline::overlay
