// Who may be a worker of this run: enrolment, the return of machines whose certificates have ended, revocation.
#include <algorithm>

#include "base/log.hpp"
#include "overlay/learner/learner_core.hpp"

namespace echoline::overlay {
namespace {

constexpr std::size_t kUsedTokensMax = 100'000;
constexpr std::size_t kKnownMax = 100'000;
constexpr std::size_t kAnswersKept = 4096;
constexpr double kReturnMax_s = 24 * 3600;  // after its certificate has ended, a machine may still come back
constexpr Duration kForgetPause = std::chrono::minutes(1);
constexpr std::uint64_t kIssueReserved = 3'600'000;  // an hour ahead

}  // namespace

// The token's nonce and the new id are on disk before the certificate leaves, so no token is ever used twice.
void LearnerCore::enrol(ConnId conn, const Enrol& wish, TimePoint now) {
  const auto token =
      trust::check_token(trust::Secret(std::string(wish.token)), *config_.authority, unix_s(now), wish.instance);
  if (!token) return refuse(conn, token.error().message(), now);
  if (!trust::verify(wish.key, "enrol 2", std::as_bytes(std::span(wish.token)), wish.proof))
    return refuse(conn, "it does not hold the key it shows", now);
  if (ids_.contains(wish.key)) return certify(conn, wish.key, now);  // the token has been used, or need not be
  std::erase_if(state_.used_tokens, [&](const auto& t) { return static_cast<double>(t.second) < unix_s(now) - 60; });
  if (state_.used_tokens.size() >= kUsedTokensMax) return refuse(conn, "too many tokens were used just now", now);
  if (!state_.used_tokens.emplace(token->nonce, token->expires_unix_s).second)
    return refuse(conn, fmt::format("the join token for '{}' was used before: issue another one", token->instance),
                  now);
  const WorkerId id{state_.next_worker++};
  state_.known[id] = {wish.instance, wish.key, 0, token->host};
  ids_[wish.key] = id;
  certify(conn, wish.key, now);
}

// Its certificate has ended while it was away for long, or while nobody could renew it.
void LearnerCore::come_back(ConnId conn, const Return& wish, TimePoint now) {
  if (!trust::verify(wish.key, "return 4", config_.authority->fingerprint(), wish.proof))
    return refuse(conn, "it does not hold the key it shows", now);
  if (!ids_.contains(wish.key))
    return refuse(conn, "it has not enrolled in this run, or has been away for too long: a join token is needed", now);
  certify(conn, wish.key, now);
}

// An answer to a machine that is known. One that was just given is given again: it may have been lost on its way.
void LearnerCore::certify(ConnId conn, const trust::PublicKey& key, TimePoint now) {
  const WorkerId id = ids_.at(key);
  if (state_.revoked.contains(id)) return refuse(conn, "the certificate of this worker was revoked", now);
  const double half = seconds(trust::kWorkerLifetimeMax) / 2;
  auto answer = answers_.find(key);
  if (answer == answers_.end() || answer->second.second < unix_s(now) + half) {
    auto certificate = issue(id, key, now);
    if (!certificate) return refuse(conn, certificate.error().message(), now);
    if (answers_.size() >= kAnswersKept) answers_.erase(answers_.begin());
    const Enrolled enrolled{id, std::move(*certificate), config_.authority->certificate(), 0};
    answer =
        answers_.insert_or_assign(key, std::pair(enrolled, static_cast<double>(state_.known[id].until_unix_s))).first;
  }
  enrolling_.push_back({conn, answer->second.first});
  save(now);
}

Result<std::vector<std::byte>> LearnerCore::issue(WorkerId id, const trust::PublicKey& key, TimePoint now) {
  trust::CertificateRequest request;
  request.subject = key;
  request.kind = trust::PeerIdentity::Kind::kWorker;
  request.worker = id;
  request.serial = state_.next_serial++;
  request.now_unix_s = unix_s(now);
  ECHO_ASSIGN(auto certificate, config_.authority->issue(request));
  const double until = unix_s(now) + seconds(request.lifetime);
  if (const auto known = state_.known.find(id); known != state_.known.end())
    known->second.until_unix_s = static_cast<std::uint64_t>(until);
  return certificate;
}

// Whoever shows a certificate of this run is known from then on, also to a learner that has lost its state.
void LearnerCore::remember(const trust::PeerIdentity& identity, const std::string& name) {
  const auto [it, added] = state_.known.try_emplace(identity.worker);
  KnownWorker& known = it->second;
  if (added) known.name = name;
  known.until_unix_s = std::max(known.until_unix_s, static_cast<std::uint64_t>(std::max(0.0, identity.expires_unix_s)));
  if (known.key == identity.key || identity.key == trust::PublicKey{}) return;
  if (const auto old = ids_.find(known.key); old != ids_.end() && old->second == identity.worker) ids_.erase(old);
  known.key = identity.key;
  ids_[identity.key] = identity.worker;
}

// Its certificates count no more, for as long as one of them may be valid.
void LearnerCore::revoke(WorkerId id, TimePoint now) {
  const double least = unix_s(now) + seconds(trust::kWorkerLifetimeMax);
  const auto known = state_.known.find(id);
  const double last = known == state_.known.end() ? 0 : static_cast<double>(known->second.until_unix_s);
  state_.revoked[id] = static_cast<std::uint64_t>(std::max(least, last) + seconds(trust::kClockTolerance));
}

WorkerSet LearnerCore::revoked_workers() const {
  WorkerSet set;
  for (const auto& [id, until] : state_.revoked) set.append(id.value, id.value);
  if (set.ranges().size() <= kRevokedMax) return set;
  std::vector<WorkerId> live;
  for (const auto* workers : {&workers_, &away_})
    for (const auto& [id, worker] : *workers) live.push_back(id);
  std::sort(live.begin(), live.end());
  set.widen(kRevokedMax, live);
  if (set.ranges().size() <= kRevokedMax) return set;
  log::error("{} ranges of workers are revoked, workers hear of the first {}: keep the others out by a new run",
             set.ranges().size(), kRevokedMax);
  WorkerSet first;
  for (std::size_t i = 0; i < kRevokedMax; ++i) first.append(set.ranges()[i].first, set.ranges()[i].last);
  return first;
}

// What no certificate stands behind any more is forgotten.
void LearnerCore::forget_ended(TimePoint now) {
  if (now < forget_at_) return;
  forget_at_ = now + kForgetPause;
  const double now_s = unix_s(now);
  const auto forget = [&](WorkerId id) {
    const auto known = state_.known.find(id);
    if (known == state_.known.end()) return;
    if (const auto by_key = ids_.find(known->second.key); by_key != ids_.end() && by_key->second == id)
      ids_.erase(by_key);
    state_.known.erase(known);
  };
  std::vector<WorkerId> ended;
  for (const auto& [id, until] : state_.revoked)
    if (static_cast<double>(until) < now_s) ended.push_back(id);
  for (const WorkerId id : ended) {
    state_.revoked.erase(id);
    forget(id);
  }
  std::vector<std::pair<std::uint64_t, WorkerId>> absent;
  for (const auto& [id, known] : state_.known)
    if (!workers_.contains(id) && !away_.contains(id) && !state_.revoked.contains(id))
      absent.emplace_back(known.until_unix_s, id);
  std::sort(absent.begin(), absent.end());
  std::size_t too_many = state_.known.size() - std::min(state_.known.size(), kKnownMax);
  for (const auto& [until, id] : absent) {
    const bool late = static_cast<double>(until) + kReturnMax_s < now_s;
    if (!late && too_many == 0) break;
    too_many -= too_many > 0;
    forget(id);
  }
}

// What comes is reserved on disk long before it is used.
std::uint64_t LearnerCore::issue_time(TimePoint now) {
  issued_ = std::max(issued_ + 1, unix_ms(now) + issue_ahead_);
  if (issued_ + kIssueReserved / 2 >= state_.issue_reserved) {
    state_.issue_reserved = issued_ + kIssueReserved;
    save(now);
  }
  return issued_;
}

}  // namespace echoline::overlay
