// Enrolment, certificates and revocation at the learner. Called by LearnerCore.
#include "overlay/learner/identities.hpp"

#include <algorithm>

#include "base/log.hpp"
#include "overlay/trainer_node.hpp"

namespace echoline::overlay {
namespace {

constexpr std::size_t kUsedTokensMax = 100'000;
constexpr std::size_t kKnownMax = 100'000;  // known machines
constexpr std::size_t kRecentAnswersMax = 4096;
constexpr double kTokenMarginSeconds = 60;  // a used token is remembered for this long after its expiry
// A machine may come back for this long after its certificate has expired.
constexpr double kReturnSecondsMax = 24 * 3600;
constexpr Duration kForgetPause = std::chrono::minutes(1);
constexpr std::uint64_t kIssueReservedMs = 3'600'000;  // issue times are reserved an hour ahead

}  // namespace

Identities::Identities(LearnerState& state, std::shared_ptr<const trust::Authority> authority)
    : state_(state), authority_(std::move(authority)) {
  for (const auto& [id, known] : state_.known) id_by_key_[known.key] = id;
  id_by_key_.erase(trust::PublicKey{});  // all zeros stands for an unknown key
}

void Identities::start(std::uint64_t now_unix_ms) {
  issue_lead_ms_ = std::max(state_.issue_reserved, now_unix_ms) - now_unix_ms;
}

Identities::Refusal Identities::enrol(ConnId conn, const Enrol& request, double now_unix_s) {
  const auto token =
      trust::check_token(trust::Secret(std::string(request.token)), *authority_, now_unix_s, request.instance);
  if (!token) return token.error().message();
  if (!trust::verify(request.key, "enrol 2", std::as_bytes(std::span(request.token)), request.proof))
    return "it does not hold the key it shows";
  if (id_by_key_.contains(request.key))
    return certify(conn, request.key, now_unix_s);  // this machine has enrolled before, so no further token is used up
  std::erase_if(state_.used_tokens, [&](const auto& nonce_and_expiry) {
    return static_cast<double>(nonce_and_expiry.second) < now_unix_s - kTokenMarginSeconds;
  });
  if (state_.used_tokens.size() >= kUsedTokensMax) return "too many tokens were used just now";
  if (!state_.used_tokens.emplace(token->nonce, token->expires_unix_s).second)
    return fmt::format("the join token for '{}' was used before: issue another one", token->instance);
  const WorkerId id{state_.next_worker++};
  state_.known[id] = {.name = request.instance, .key = request.key, .until_unix_s = 0, .host = token->host};
  id_by_key_[request.key] = id;
  return certify(conn, request.key, now_unix_s);
}

Identities::Refusal Identities::reissue(ConnId conn, const Return& request, double now_unix_s) {
  if (!trust::verify(request.key, "return 4", authority_->fingerprint(), request.proof))
    return "it does not hold the key it shows";
  if (!id_by_key_.contains(request.key))
    return "it has not enrolled in this run, or has been away for too long: a join token is needed";
  return certify(conn, request.key, now_unix_s);
}

// Queues the answer to a known machine. A recent answer may have been lost on its way, so it is sent again while at
// least half of its certificate's lifetime remains.
Identities::Refusal Identities::certify(ConnId conn, const trust::PublicKey& key, double now_unix_s) {
  const WorkerId id = id_by_key_.at(key);
  if (state_.revoked.contains(id)) return "the certificate of this worker was revoked";
  const double half_lifetime_s = seconds(trust::kWorkerLifetimeMax) / 2;
  auto recent = recent_answers_.find(key);
  if (recent == recent_answers_.end() || recent->second.certificate_until_unix_s < now_unix_s + half_lifetime_s) {
    auto certificate = issue(id, key, now_unix_s);
    if (!certificate) return certificate.error().message();
    if (recent_answers_.size() >= kRecentAnswersMax) recent_answers_.erase(recent_answers_.begin());  // any one
    const Enrolled enrolled{
        .worker = id, .certificate = std::move(*certificate), .authority = authority_->certificate(), .unix_ms = 0};
    const auto until_unix_s = static_cast<double>(state_.known[id].until_unix_s);
    recent = recent_answers_.insert_or_assign(key, RecentAnswer{enrolled, until_unix_s}).first;
  }
  pending_answers_.push_back({conn, recent->second.answer});
  return std::nullopt;
}

void Identities::drop_answer(ConnId conn) {
  std::erase_if(pending_answers_, [&](const PendingAnswer& answer) { return answer.conn == conn; });
}

Result<std::vector<std::byte>> Identities::issue(WorkerId id, const trust::PublicKey& key, double now_unix_s) {
  trust::CertificateRequest request;
  request.subject = key;
  request.kind = trust::PeerIdentity::Kind::kWorker;
  request.worker = id;
  request.serial = state_.next_serial++;
  request.now_unix_s = now_unix_s;
  ECHO_ASSIGN(auto certificate, authority_->issue(request));
  const double until = now_unix_s + seconds(request.lifetime);
  if (const auto known = state_.known.find(id); known != state_.known.end())
    known->second.until_unix_s = static_cast<std::uint64_t>(until);
  return certificate;
}

std::optional<std::string> Identities::remember(const trust::PeerIdentity& identity, const std::string& stated_name) {
  if (!state_.known.contains(identity.worker) && is_trainer_node(stated_name))
    return fmt::format("this learner has no record that a join token made it the node '{}': join with another token",
                       stated_name);
  const auto [it, added] = state_.known.try_emplace(identity.worker);
  KnownWorker& known = it->second;
  if (added) known.name = stated_name;
  known.until_unix_s = std::max(known.until_unix_s, static_cast<std::uint64_t>(std::max(0.0, identity.expires_unix_s)));
  if (known.key == identity.key || identity.key == trust::PublicKey{}) return std::nullopt;
  if (const auto old = id_by_key_.find(known.key); old != id_by_key_.end() && old->second == identity.worker)
    id_by_key_.erase(old);
  known.key = identity.key;
  id_by_key_[identity.key] = identity.worker;
  return std::nullopt;
}

Endpoint Identities::endpoint_of(WorkerId id, const Endpoint& stated, const std::string& source_host) const {
  const auto known = state_.known.find(id);
  if (known != state_.known.end() && !known->second.host.empty()) return {known->second.host, stated.port};
  return {source_host, stated.port};
}

void Identities::revoke(WorkerId id, double now_unix_s) {
  // A certificate of an earlier process may be unknown here, so at least a whole lifetime is covered.
  const double until_min_s = now_unix_s + seconds(trust::kWorkerLifetimeMax);
  const auto known = state_.known.find(id);
  const double known_until_s = known == state_.known.end() ? 0 : static_cast<double>(known->second.until_unix_s);
  state_.revoked[id] =
      static_cast<std::uint64_t>(std::max(until_min_s, known_until_s) + seconds(trust::kClockTolerance));
}

WorkerSet Identities::revoked_workers(const std::function<std::vector<WorkerId>()>& live_workers) const {
  WorkerSet revoked;
  for (const auto& [id, until] : state_.revoked) revoked.append(id.value, id.value);
  if (revoked.ranges().size() <= kRevokedMax) return revoked;
  std::vector<WorkerId> spared = live_workers();
  std::sort(spared.begin(), spared.end());
  revoked.widen(kRevokedMax, spared);
  if (revoked.ranges().size() <= kRevokedMax) return revoked;
  log::error(
      "{} ranges of workers are revoked, but workers are told only the first {}: to keep the others out, begin a "
      "new run",
      revoked.ranges().size(), kRevokedMax);
  WorkerSet first_ranges;
  for (std::size_t i = 0; i < kRevokedMax; ++i)
    first_ranges.append(revoked.ranges()[i].first, revoked.ranges()[i].last);
  return first_ranges;
}

void Identities::forget(WorkerId id) {
  const auto known = state_.known.find(id);
  if (known == state_.known.end()) return;
  if (const auto by_key = id_by_key_.find(known->second.key); by_key != id_by_key_.end() && by_key->second == id)
    id_by_key_.erase(by_key);
  state_.known.erase(known);
}

void Identities::forget_expired(const std::function<bool(WorkerId)>& is_present, TimePoint now, double now_unix_s) {
  if (now < forget_at_) return;
  forget_at_ = now + kForgetPause;
  std::vector<WorkerId> no_longer_revoked;  // all their certificates have expired
  for (const auto& [id, until] : state_.revoked)
    if (static_cast<double>(until) < now_unix_s) no_longer_revoked.push_back(id);
  for (const WorkerId id : no_longer_revoked) {
    state_.revoked.erase(id);
    forget(id);
  }
  // Forgets absent machines whose time to return is over, and the surplus above kKnownMax. Those whose certificates
  // ended first come first.
  std::vector<std::pair<std::uint64_t, WorkerId>> absent;
  for (const auto& [id, known] : state_.known)
    if (!is_present(id) && !state_.revoked.contains(id)) absent.emplace_back(known.until_unix_s, id);
  std::sort(absent.begin(), absent.end());
  std::size_t surplus_count = state_.known.size() - std::min(state_.known.size(), kKnownMax);
  for (const auto& [until, id] : absent) {
    const bool may_not_return = static_cast<double>(until) + kReturnSecondsMax < now_unix_s;
    if (!may_not_return && surplus_count == 0) break;
    if (surplus_count > 0) --surplus_count;
    forget(id);
  }
}

// Issue times are reserved on disk long before they are used, so a restart never repeats one.
bool Identities::advance_issue_time(std::uint64_t now_unix_ms) {
  last_issue_time_ms_ = std::max(last_issue_time_ms_ + 1, now_unix_ms + issue_lead_ms_);
  // Reserves more when half is used, so that the write to disk has time.
  if (last_issue_time_ms_ + kIssueReservedMs / 2 < state_.issue_reserved) return false;
  state_.issue_reserved = last_issue_time_ms_ + kIssueReservedMs;
  return true;
}

void Identities::check() const {
  ECHO_CHECK(last_issue_time_ms_ < state_.issue_reserved || last_issue_time_ms_ == 0,  // 0: none was made yet
             "issue time {} is beyond the reserved {}", last_issue_time_ms_, state_.issue_reserved);
  ECHO_CHECK(id_by_key_.size() <= state_.known.size() && recent_answers_.size() <= kRecentAnswersMax);
}

}  // namespace echoline::overlay
