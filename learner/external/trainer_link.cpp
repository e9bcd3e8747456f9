// The batch and the policies between the service and the API's threads.
#include "learner/external/trainer_link.hpp"

#include <algorithm>
#include <utility>

#include "base/random_bits.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kEvaluationsMax = 64;  // evaluations waiting for the service
constexpr int kLeaseNameWords = 2;

}  // namespace

TrainerLink::TrainerLink(const TrainerLinkOptions& options, const Clock& clock, std::uint64_t steps_done,
                         std::optional<delta::Digest> digest)
    : options_(options), clock_(clock), steps_(steps_done), published_version_(Version{steps_done}) {
  if (digest) accepted_.emplace(Version{steps_done}, *digest);
  if (steps_done == 0) version_to_evaluate_ = Version{0};  // the accuracy before the first step
}

void TrainerLink::offer(std::uint64_t step, std::shared_ptr<const std::string> batch, std::size_t tokens) {
  const std::lock_guard lock(mutex_);
  ECHO_CHECK(step == steps_ + 1, "step {} is offered after {}", step, steps_);
  batch_ = Batch{.step = step, .bytes = std::move(batch), .tokens = tokens};
  changed_.notify_all();
}

std::optional<ConsumedBatch> TrainerLink::wait_consumed(Duration wait) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, wait, [&] { return stopped_ || (batch_ && batch_->figures); });
  if (!batch_ || !batch_->figures) return std::nullopt;
  Batch batch = *std::exchange(batch_, std::nullopt);
  return ConsumedBatch{.figures = std::move(*batch.figures), .scores = std::move(batch.scores)};
}

std::optional<delta::OwnedState> TrainerLink::wait_policy(Version version, Duration wait) {
  std::unique_lock lock(mutex_);
  awaited_version_ = version;
  changed_.notify_all();
  changed_.wait_for(lock, wait, [&] { return stopped_ || (pending_policy_ && pending_policy_->first == version); });
  if (!pending_policy_ || pending_policy_->first != version) return std::nullopt;
  awaited_version_.reset();
  published_version_ = version;
  delta::OwnedState state = std::move(pending_policy_->second);
  pending_policy_.reset();
  changed_.notify_all();
  return state;
}

std::vector<PolicyEvaluation> TrainerLink::wait_evaluations(Duration wait) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, wait, [&] { return stopped_ || !evaluations_.empty(); });
  return std::exchange(evaluations_, {});
}

bool TrainerLink::is_evaluation_expected(Duration patience) const {
  const std::lock_guard lock(mutex_);
  return !stopped_ && trainer_evaluates_ && version_to_evaluate_ == Version{steps_} &&
         clock_.now() - last_call_at_ < patience;
}

void TrainerLink::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

Result<std::optional<LeasedBatch>> TrainerLink::take(Duration wait, Duration lease_time, bool takeover) {
  std::unique_lock lock(mutex_);
  const auto has_open_batch = [&] { return batch_ && !batch_->figures; };
  changed_.wait_for(lock, wait, [&] { return stopped_ || has_open_batch(); });
  if (stopped_ || !has_open_batch()) return std::optional<LeasedBatch>();
  const TimePoint now = clock_.now();
  if (is_taken(now) && !takeover)
    return fail(Code::kUnavailable, "take batch",
                "another trainer has the batch of step {} for {} more; if it has crashed, take it over (takeover)",
                batch_->step, to_text(batch_->lease_end - now));
  batch_->lease = random_hex(kLeaseNameWords);
  batch_->lease_end = now + lease_time;
  return std::optional(LeasedBatch{.lease = batch_->lease, .step = batch_->step, .bytes = batch_->bytes});
}

std::optional<LeasedBatch> TrainerLink::find_batch(const std::string& lease) const {
  const std::lock_guard lock(mutex_);
  if (!check_lease(lease)) return std::nullopt;
  return LeasedBatch{.lease = lease, .step = batch_->step, .bytes = batch_->bytes};
}

Status TrainerLink::check_lease(const std::string& lease) const {
  if (!lease.empty() && batch_ && !batch_->figures && batch_->lease == lease) return ok();
  return fail(
      Code::kStale, "find batch",
      "no batch is leased as '{}': it was consumed, given back, or taken over by another trainer; take the next one",
      lease);
}

Status TrainerLink::renew(const std::string& lease, Duration lease_time) {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(check_lease(lease));
  batch_->lease_end = clock_.now() + lease_time;
  return ok();
}

Result<std::uint64_t> TrainerLink::consume(const std::string& lease, nlohmann::json figures) {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(check_lease(lease));
  batch_->figures = std::move(figures);
  steps_ = batch_->step;
  if (is_publication_due(steps_)) awaited_version_ = Version{steps_};
  version_to_evaluate_ = is_evaluation_due(steps_) ? std::optional(Version{steps_}) : std::nullopt;
  changed_.notify_all();
  return steps_;
}

Status TrainerLink::submit_scores(const std::string& lease, TokenScores scores) {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(check_lease(lease));
  batch_->scores = std::move(scores);
  return ok();
}

Result<std::size_t> TrainerLink::response_tokens(const std::string& lease) const {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(check_lease(lease));
  return batch_->tokens;
}

Status TrainerLink::return_batch(const std::string& lease) {
  const std::lock_guard lock(mutex_);
  ECHO_TRY(check_lease(lease));
  batch_->lease.clear();
  changed_.notify_all();
  return ok();
}

Status TrainerLink::publish(Version version, delta::OwnedState policy) {
  const delta::Digest digest = policy.digest();
  const std::lock_guard lock(mutex_);
  const std::uint64_t version_number = version.value;
  if (accepted_ && accepted_->first == version) {
    if (accepted_->second == digest) return ok();
    return fail(Code::kStale, "publish",
                "version {} was accepted with other bytes (digest {}, found {}), and a version never changes",
                version_number, accepted_->second.hex(), digest.hex());
  }
  if (version_number < steps_ || published_version_ == version)
    return fail(Code::kStale, "publish", "version {} is published or passed by: {} learner steps are done",
                version_number, steps_);
  // A trainer may publish the policy of a step before it consumes the step's batch.
  if (const std::uint64_t version_max = steps_ + (batch_ && !batch_->figures ? 1 : 0); version_number > version_max)
    return fail(Code::kInvalid, "publish",
                "version {} is the policy after {} learner steps, and {} are done: consume a batch for each step first",
                version_number, version_number, steps_);
  if (!is_publication_due(version_number))
    return fail(Code::kInvalid, "publish",
                "version {} is not published: every {} steps one is (staleness.publish_every)", version_number,
                options_.publish_every);
  pending_policy_.emplace(version, std::move(policy));
  accepted_.emplace(version, digest);
  changed_.notify_all();
  return ok();
}

void TrainerLink::on_trainer_call() {
  const std::lock_guard lock(mutex_);
  last_call_at_ = clock_.now();
}

void TrainerLink::on_evaluation_request() {
  const std::lock_guard lock(mutex_);
  trainer_evaluates_ = true;
}

Status TrainerLink::submit_evaluation(const PolicyEvaluation& evaluation) {
  const std::lock_guard lock(mutex_);
  if (evaluation.version.value > steps_)
    return fail(Code::kInvalid, "evaluate", "version {} is the policy after as many learner steps, and {} are done",
                evaluation.version.value, steps_);
  if (evaluations_.size() >= kEvaluationsMax)
    return fail(Code::kExhausted, "evaluate", "{} evaluations wait for the service; retry later", evaluations_.size());
  trainer_evaluates_ = true;
  evaluations_.push_back(evaluation);
  if (version_to_evaluate_ == evaluation.version) version_to_evaluate_.reset();
  changed_.notify_all();
  return ok();
}

nlohmann::json TrainerLink::status() const {
  const std::lock_guard lock(mutex_);
  const TimePoint now = clock_.now();
  const bool has_open_batch = batch_ && !batch_->figures;
  nlohmann::json status = {
      {"steps", steps_},
      {"batch", !has_open_batch ? "none"
                : is_taken(now) ? "taken"
                                : "waiting"},
      {"batch_step", has_open_batch ? nlohmann::json(batch_->step) : nlohmann::json(nullptr)},
      {"version_wanted",
       awaited_version_ && !pending_policy_ ? nlohmann::json(awaited_version_->value) : nlohmann::json(nullptr)},
      {"version_published", published_version_ ? nlohmann::json(published_version_->value) : nlohmann::json(nullptr)},
      {"evaluation_wanted",
       version_to_evaluate_ ? nlohmann::json(version_to_evaluate_->value) : nlohmann::json(nullptr)}};
  return status;
}

}  // namespace echoline::learner
