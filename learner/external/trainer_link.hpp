// Transfers between the learner's service and an external trainer. The service offers one batch at a time. The trainer
// takes the batch under a lease, a claim for a limited time, then consumes it or returns it untrained. The trainer
// sends policies and evaluations.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "delta/tensor.hpp"
#include "learner/external/scores.hpp"
#include "learner/task_figures.hpp"

namespace echoline::learner {

struct TrainerLinkOptions {
  std::uint64_t publish_every = 1;  // steps from one published policy to the next (κ)
  std::uint64_t steps_total = 1;
  std::uint64_t evaluate_every = 0;  // steps; 0: only before the first and after the last step
};

// A trainer's report on a consumed batch.
struct ConsumedBatch {
  nlohmann::json figures;             // numbers by name
  std::optional<TokenScores> scores;  // of the batch's tokens
};

// A policy's result on the held-out problems: graded from the trainer's responses, or the trainer's own figures.
struct PolicyEvaluation {
  Version version;
  double accuracy = 0;
  std::optional<double> reward_mean;
  std::uint64_t problems = 0;
  TaskFigures by_task = {};  // if responses are to several tasks
};

struct LeasedBatch {
  std::string lease;       // identifies this lease of the batch
  std::uint64_t step = 0;  // the learner step that the batch is for
  std::shared_ptr<const std::string> bytes;
};

// Thread-safe: the service's thread offers and waits; the API's threads make all other calls. stop() ends all waits.
class TrainerLink {
 public:
  // The policy after `steps_done` steps exists and need not be published. `digest`: its digest, if the run is resumed.
  // Then the trainer may send that policy again, because the earlier process's answer did not reach it.
  TrainerLink(const TrainerLinkOptions& options, const Clock& clock, std::uint64_t steps_done,
              std::optional<delta::Digest> digest = {});

  // ---- the service's thread ----

  // Offers the batch of learner step `step`, counted from 1. Its responses have `tokens` tokens in all.
  void offer(std::uint64_t step, std::shared_ptr<const std::string> batch, std::size_t tokens);
  // Returns the trainer's report once it has consumed the batch; absent after `wait`.
  std::optional<ConsumedBatch> wait_consumed(Duration wait);
  // Returns the policy of `version`, to be published by the service; absent after `wait`.
  std::optional<delta::OwnedState> wait_policy(Version version, Duration wait);
  // Returns the evaluations since the last call. If there are none, waits up to `wait` for one.
  std::vector<PolicyEvaluation> wait_evaluations(Duration wait);
  // Whether the evaluation of the newest policy is still to come: the trainer evaluates, has not sent it, and has made
  // a call within `patience`.
  bool is_evaluation_expected(Duration patience) const;
  void stop();

  // ---- the API's threads ----

  // Called for every API call: the trainer is alive.
  void on_trainer_call();
  // Takes the batch under a lease; absent if no batch is offered within `wait`. When the lease expires, any trainer may
  // take the batch. kUnavailable: another trainer holds it. `takeover` ends that trainer's lease instead.
  Result<std::optional<LeasedBatch>> take(Duration wait, Duration lease_time, bool takeover);
  // Returns the batch taken under this lease, if the lease still holds.
  std::optional<LeasedBatch> find_batch(const std::string& lease) const;
  // Extends the lease, which then ends `lease_time` from now.
  Status renew(const std::string& lease, Duration lease_time);
  // The batch was trained on. Returns the number of learner steps done. `figures`: numbers by name. kStale: the lease
  // no longer holds the batch.
  Result<std::uint64_t> consume(const std::string& lease, nlohmann::json figures);
  // Reports the trainer's log-probabilities of the batch's tokens, before consuming it. The last call counts.
  Status submit_scores(const std::string& lease, TokenScores scores);
  // Returns the number of response tokens in the batch.
  Result<std::size_t> response_tokens(const std::string& lease) const;
  // Returns the batch untrained. Ends the lease: any trainer may take the batch.
  Status return_batch(const std::string& lease);
  // Publishes the policy after `version` learner steps, for the last step done or the current one. Equal bytes are
  // accepted again without effect. kStale: the version has other bytes, or a later one exists. kInvalid: the step is
  // not reached yet, or the version is not a multiple of publish_every.
  Status publish(Version version, delta::OwnedState policy);

  // The trainer has asked for the held-out problems: from now on, the service waits for its evaluations.
  void on_evaluation_request();
  // kInvalid: the policy of this version does not exist yet. kExhausted: too many evaluations wait.
  Status submit_evaluation(const PolicyEvaluation& evaluation);

  // JSON fields: steps; batch (none, waiting, taken) with its step; and three versions, each null if absent: the one
  // the service waits for, the newest published, and the one to evaluate.
  nlohmann::json status() const;

 private:
  struct Batch {
    std::uint64_t step = 0;
    std::shared_ptr<const std::string> bytes;
    std::size_t tokens = 0;  // of all responses
    std::string lease = {};  // empty: not taken
    TimePoint lease_end{};
    std::optional<nlohmann::json> figures = {};  // set once it is consumed
    std::optional<TokenScores> scores = {};
  };
  bool is_taken(TimePoint now) const { return batch_ && !batch_->lease.empty() && now < batch_->lease_end; }
  // kStale unless the batch is leased as `lease`. An expired lease holds until another trainer takes the batch.
  Status check_lease(const std::string& lease) const;
  bool is_publication_due(std::uint64_t version) const {
    return version % options_.publish_every == 0 || version == options_.steps_total;
  }
  bool is_evaluation_due(std::uint64_t version) const {
    return version == options_.steps_total || (options_.evaluate_every > 0 && version % options_.evaluate_every == 0);
  }

  const TrainerLinkOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::uint64_t steps_;  // steps done
  std::optional<Batch> batch_;
  std::optional<std::pair<Version, delta::OwnedState>> pending_policy_;  // waits for the service
  std::optional<std::pair<Version, delta::Digest>> accepted_;            // the newest policy accepted by publish()
  std::optional<Version> awaited_version_, published_version_;
  std::optional<Version> version_to_evaluate_;
  std::vector<PolicyEvaluation> evaluations_;  // wait for the service
  bool trainer_evaluates_ = false, stopped_ = false;
  TimePoint last_call_at_{};  // of the trainer
};

}  // namespace echoline::learner
