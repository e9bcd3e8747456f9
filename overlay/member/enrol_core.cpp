// Enrols a machine. The driver runs this core before MemberCore if the machine has no valid certificate.
#include "overlay/member/enrol_core.hpp"

#include "overlay/member/identity.hpp"

namespace echoline::overlay {
namespace {

constexpr std::string_view kOperation = "enrol";
constexpr Duration kRedial = std::chrono::milliseconds(250);

}  // namespace

void EnrolCore::start(TimePoint now) {
  deadline_ = now + config_.timeout;
  conn_ = dial(config_.learner, act::Service::kEnrol, kLearnerId);
}

void EnrolCore::on_connected(ConnId conn, TimePoint now) {
  actions_.push_back(act::Admit{conn});
  // A machine that has enrolled before shows its key, any other one its token.
  if (is_returning_)
    if (const auto known_authority = trust::read_authority(config_.authority))
      return send_control(conn, certificate_request(config_.key, known_authority->key), now);
  Enrol enrol;
  enrol.token = std::string(config_.token.reveal());
  enrol.instance = config_.instance;
  enrol.key = config_.key.public_key();
  // "enrol 2" names the purpose of the signature, as "return 4" does in certificate_request().
  enrol.proof = config_.key.sign("enrol 2", std::as_bytes(std::span(enrol.token)));
  send_control(conn, enrol, now);
  trust::wipe(enrol.token);
}

// The learner may not be up yet, so this core dials again. A refusal would come as a message.
void EnrolCore::on_closed(ConnId, const std::string& reason, TimePoint now) {
  if (deadline_ == kNever) return;
  result_ = fail(Code::kUnavailable, kOperation, "the learner at {}: {}", to_text(config_.learner), reason);
  redial_at_ = now + kRedial;
}

void EnrolCore::on_frame(ConnId conn, Frame frame, TimePoint now) {
  const auto message = decode_control(frame.body.bytes());
  if (!message) return end(message.error());
  if (is_returning_ && std::holds_alternative<Goodbye>(*message) && !config_.token.empty()) {
    is_returning_ = false;  // the learner does not know the key any more, but there is a token as well
    close(conn);
    conn_ = dial(config_.learner, act::Service::kEnrol, kLearnerId);
    return;
  }
  if (const auto* goodbye = std::get_if<Goodbye>(&*message))
    return end(fail(Code::kInvalid, kOperation, "the learner refuses: {}", goodbye->reason));
  const auto* enrolled = std::get_if<Enrolled>(&*message);
  if (!enrolled) return end(fail(Code::kCorrupt, kOperation, "the learner answers with something else"));
  const auto authority = trust::read_authority(enrolled->authority);
  if (!authority) return end(authority.error());
  // A returning machine knows the run's authority; any other one knows its fingerprint from the token.
  bool is_authority_of_run = false;
  if (is_returning_) {
    is_authority_of_run = enrolled->authority == config_.authority;
  } else {
    const auto token = trust::read_token(config_.token);
    is_authority_of_run = token && trust::fingerprint(authority->key) == token->authority;
  }
  if (!is_authority_of_run)
    return end(fail(Code::kCorrupt, kOperation, "the learner shows another authority than the token names"));
  WorkerState state;
  state.run_id = authority->run_id;
  state.authority = enrolled->authority;
  state.certificate = enrolled->certificate;
  state.worker = enrolled->worker;
  state.clock_offset_ms = static_cast<std::int64_t>(enrolled->unix_ms) - static_cast<std::int64_t>(unix_ms(now));
  end(std::move(state));
}

void EnrolCore::on_timer(TimePoint now) {
  if (now >= deadline_) {
    if (result_.error().detail == kNotYet)
      return end(
          fail(Code::kUnavailable, kOperation, "the learner at {} did not answer in time", to_text(config_.learner)));
    return end(result_);
  }
  if (now < redial_at_) return;
  redial_at_ = kNever;
  conn_ = dial(config_.learner, act::Service::kEnrol, kLearnerId);
}

void EnrolCore::end(Result<WorkerState> result) {
  if (deadline_ == kNever) return;
  result_ = std::move(result);
  deadline_ = redial_at_ = kNever;
  close(conn_);
  actions_.push_back(act::ReportEnd{result_ ? "enrolled" : result_.error().message()});
}

}  // namespace echoline::overlay
