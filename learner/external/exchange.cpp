#include "learner/external/exchange.hpp"

#include <algorithm>
#include <random>
#include <utility>

namespace echoline::learner {
namespace {

constexpr std::size_t kEvaluationsMax = 64;  // evaluations waiting for the service

std::string new_lease() {
  std::random_device unforeseeable;
  return fmt::format("{:08x}{:08x}", unforeseeable(), unforeseeable());
}

}  // namespace

Exchange::Exchange(const ExchangeOptions& options, const Clock& clock, std::uint64_t steps_done,
                   std::optional<delta::Digest> digest)
    : options_(options), clock_(clock), steps_(steps_done), published_(Version{steps_done}) {
  if (digest) accepted_.emplace(Version{steps_done}, *digest);
  if (steps_done == 0) to_evaluate_ = Version{0};
}

void Exchange::offer(std::uint64_t step, std::shared_ptr<const std::string> batch, std::size_t tokens) {
  const std::lock_guard lock(mutex_);
  ECHO_CHECK(step == steps_ + 1, "step {} is offered after {}", step, steps_);
  batch_ = Batch{step, std::move(batch), tokens};
  changed_.notify_all();
}

std::optional<Consumed> Exchange::wait_consumed(Duration wait) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, wait, [&] { return stopped_ || (batch_ && batch_->figures); });
  if (!batch_ || !batch_->figures) return std::nullopt;
  Batch batch = *std::exchange(batch_, std::nullopt);
  return Consumed{std::move(*batch.figures), std::move(batch.scores)};
}

std::optional<delta::OwnedState> Exchange::wait_policy(Version version, Duration wait) {
  std::unique_lock lock(mutex_);
  wanted_ = version;
  changed_.notify_all();
  changed_.wait_for(lock, wait, [&] { return stopped_ || (policy_ && policy_->first == version); });
  if (!policy_ || policy_->first != version) return std::nullopt;
  wanted_.reset();
  published_ = version;
  delta::OwnedState state = std::move(policy_->second);
  policy_.reset();
  changed_.notify_all();
  return state;
}

std::vector<PolicyEvaluation> Exchange::wait_evaluations(Duration wait) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, wait, [&] { return stopped_ || !evaluations_.empty(); });
  return std::exchange(evaluations_, {});
}

bool Exchange::evaluation_comes(Duration patience) const {
  const std::lock_guard lock(mutex_);
  return !stopped_ && evaluates_ && to_evaluate_ == Version{steps_} && clock_.now() - heard_ < patience;
}

void Exchange::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

Result<std::optional<TakenBatch>> Exchange::take(Duration wait, Duration lease, bool takeover) {
  std::unique_lock lock(mutex_);
  const auto there = [&] { return batch_ && !batch_->figures; };
  changed_.wait_for(lock, wait, [&] { return stopped_ || there(); });
  if (stopped_ || !there()) return std::optional<TakenBatch>();
  const TimePoint now = clock_.now();
  if (taken(now) && !takeover)
    return fail(Code::kUnavailable, "take batch",
                "another trainer has the batch of step {} for {} more; if it has crashed, take it over (takeover)",
                batch_->step, to_text(batch_->until - now));
  batch_->lease = new_lease();
  batch_->until = now + lease;
  return std::optional(TakenBatch{batch_->lease, batch_->step, batch_->bytes});
}

std::optional<TakenBatch> Exchange::taken_as(const std::string& lease) const {
  const std::lock_guard lock(mutex_);
  if (!holds(lease)) return std::nullopt;
  return TakenBatch{lease, batch_->step, batch_->bytes};
}

Status Exchange::holds(const std::string& lease) const {
  if (!lease.empty() && batch_ && !batch_->figures && batch_->lease == lease) return ok();
  return fail(
      Code::kStale, "find batch",
      "no batch is leased as '{}': it was consumed, given back, or taken over by another trainer; take the next one",
      lease);
}

Status Exchange::renew(const std::string& lease, Duration time) {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(holds(lease));
  batch_->until = clock_.now() + time;
  return ok();
}

Result<std::uint64_t> Exchange::consume(const std::string& lease, nlohmann::json figures) {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(holds(lease));
  batch_->figures = std::move(figures);
  steps_ = batch_->step;
  if (publishes(steps_)) wanted_ = Version{steps_};
  to_evaluate_ = evaluates(steps_) ? std::optional(Version{steps_}) : std::nullopt;
  changed_.notify_all();
  return steps_;
}

Status Exchange::score(const std::string& lease, TokenScores scores) {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(holds(lease));
  batch_->scores = std::move(scores);
  return ok();
}

Result<std::size_t> Exchange::tokens(const std::string& lease) const {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(holds(lease));
  return batch_->tokens;
}

Status Exchange::give_back(const std::string& lease) {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(holds(lease));
  batch_->lease.clear();
  changed_.notify_all();
  return ok();
}

Status Exchange::publish(Version version, delta::OwnedState policy) {
  const delta::Digest digest = policy.digest();
  const std::lock_guard lock(mutex_);
  const std::uint64_t v = version.value;
  if (accepted_ && accepted_->first == version) {
    if (accepted_->second == digest) return ok();
    return fail(Code::kStale, "publish",
                "version {} was accepted with other bytes (digest {}, found {}), and a version never changes", v,
                accepted_->second.hex(), digest.hex());
  }
  if (v < steps_ || published_ == version)
    return fail(Code::kStale, "publish", "version {} is published or passed by: {} learner steps are done", v, steps_);
  if (const std::uint64_t most = steps_ + (batch_ && !batch_->figures ? 1 : 0); v > most)
    return fail(Code::kInvalid, "publish",
                "version {} is the policy after {} learner steps, and {} are done: consume a batch for each step first",
                v, v, steps_);
  if (!publishes(v))
    return fail(Code::kInvalid, "publish",
                "version {} is not published: every {} steps one is (staleness.publish_every)", v,
                options_.publish_every);
  policy_.emplace(version, std::move(policy));
  accepted_.emplace(version, digest);
  changed_.notify_all();
  return ok();
}

void Exchange::heard() {
  const std::lock_guard lock(mutex_);
  heard_ = clock_.now();
}

void Exchange::evaluates() {
  const std::lock_guard lock(mutex_);
  evaluates_ = true;
}

Status Exchange::evaluated(const PolicyEvaluation& evaluation) {
  const std::lock_guard lock(mutex_);
  if (evaluation.version.value > steps_)
    return fail(Code::kInvalid, "evaluate", "version {} is the policy after as many learner steps, and {} are done",
                evaluation.version.value, steps_);
  if (evaluations_.size() >= kEvaluationsMax)
    return fail(Code::kExhausted, "evaluate", "{} evaluations wait for the service; retry later", evaluations_.size());
  evaluates_ = true;
  evaluations_.push_back(evaluation);
  if (to_evaluate_ == evaluation.version) to_evaluate_.reset();
  changed_.notify_all();
  return ok();
}

nlohmann::json Exchange::status() const {
  const std::lock_guard lock(mutex_);
  const TimePoint now = clock_.now();
  const bool there = batch_ && !batch_->figures;
  nlohmann::json status = {
      {"steps", steps_},
      {"batch", !there       ? "none"
                : taken(now) ? "taken"
                             : "waiting"},
      {"batch_step", there ? nlohmann::json(batch_->step) : nlohmann::json(nullptr)},
      {"version_wanted", wanted_ && !policy_ ? nlohmann::json(wanted_->value) : nlohmann::json(nullptr)},
      {"version_published", published_ ? nlohmann::json(published_->value) : nlohmann::json(nullptr)},
      {"evaluation_wanted", to_evaluate_ ? nlohmann::json(to_evaluate_->value) : nlohmann::json(nullptr)}};
  return status;
}

}  // namespace echoline::learner
