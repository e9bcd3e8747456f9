// Where the service and an external trainer meet: one batch at a time is offered, taken under a lease, and consumed or
// given back; policies, and how good they are, come the other way.
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
#include "learner/by_task.hpp"
#include "learner/external/scores.hpp"

namespace echoline::learner {

struct ExchangeOptions {
  std::uint64_t publish_every = 1;  // κ
  std::uint64_t steps_total = 1;
  std::uint64_t evaluate_every = 0;  // steps; 0: only before the first and after the last
};

// What a trainer said of a batch that it has consumed.
struct Consumed {
  nlohmann::json figures;             // numbers by name
  std::optional<TokenScores> scores;  // of the batch's tokens
};

// How good the policy of a version is on the held-out problems, as the trainer's answers or its word have it.
struct PolicyEvaluation {
  Version version;
  double accuracy = 0;
  std::optional<double> reward_mean;
  std::uint64_t problems = 0;
  ByTask by_task = {};  // of answers to several tasks
};

struct TakenBatch {
  std::string lease;       // names this taking of it
  std::uint64_t step = 0;  // that consuming it will have done
  std::shared_ptr<const std::string> bytes;
};

// Thread-safe: the service's thread offers and waits, those of the API do the rest. Waits end with stop().
class Exchange {
 public:
  // The policy after `steps_done` steps is known and need not be published. `digest` is its digest, where it may have
  // been published to an earlier process, whose answer was lost.
  Exchange(const ExchangeOptions& options, const Clock& clock, std::uint64_t steps_done,
           std::optional<delta::Digest> digest = {});

  // ---- the service's thread ----

  // The batch of learner step `step`, counted from 1; its responses have `tokens` tokens in all.
  void offer(std::uint64_t step, std::shared_ptr<const std::string> batch, std::size_t tokens);
  // What the trainer said of it once it has consumed it; nothing when `wait` is over first.
  std::optional<Consumed> wait_consumed(Duration wait);
  // The policy of a version that is to be published; nothing when `wait` is over first.
  std::optional<delta::OwnedState> wait_policy(Version version, Duration wait);
  // What has been said since the last call; nothing yet: waits at most so long for it.
  std::vector<PolicyEvaluation> wait_evaluations(Duration wait);
  // Whether the trainer evaluates, and the evaluation of the newest policy is still to come from one that was heard of
  // within `patience`.
  bool evaluation_comes(Duration patience) const;
  void stop();

  // ---- the API's threads ----

  // The trainer lives: to be told of every call.
  void heard();
  // Nothing when there is no batch after `wait`. It is this trainer's until `lease` is over, then anybody's.
  // kUnavailable: another one has it, unless `takeover` is wanted: that one's lease ends.
  Result<std::optional<TakenBatch>> take(Duration wait, Duration lease, bool takeover);
  // The batch that was taken under this lease, if the lease still holds.
  std::optional<TakenBatch> taken_as(const std::string& lease) const;
  // The lease holds for `lease` from now.
  Status renew(const std::string& lease, Duration time);
  // It was trained on; returns the learner steps done. `figures`: numbers by name. kStale: the lease is not the batch's
  // any more.
  Result<std::uint64_t> consume(const std::string& lease, nlohmann::json figures);
  // Before consuming it: what the trainer's model says of its tokens. Said again, the last word counts.
  Status score(const std::string& lease, TokenScores scores);
  // How many tokens its responses have.
  Result<std::size_t> tokens(const std::string& lease) const;
  // Somebody else may have it.
  Status give_back(const std::string& lease);
  // The policy after `version` learner steps, of the step done or the one under way. The same bytes again are accepted
  // and change nothing. kStale: the version has other bytes already, or is passed by; kInvalid: it is not that far, or
  // a version that is not published (κ).
  Status publish(Version version, delta::OwnedState policy);

  // The trainer has asked for the held-out problems: from now on its evaluations are waited for.
  void evaluates();
  // kInvalid: the policy of this version is not made yet; kExhausted: too many at a time.
  Status evaluated(const PolicyEvaluation& evaluation);

  // steps, batch (none, waiting, taken) with its step, the version waited for or null, the newest published or null,
  // the version that is to be evaluated or null.
  nlohmann::json status() const;

 private:
  struct Batch {
    std::uint64_t step = 0;
    std::shared_ptr<const std::string> bytes;
    std::size_t tokens = 0;
    std::string lease = {};  // empty: nobody has it
    TimePoint until{};
    std::optional<nlohmann::json> figures = {};  // it is consumed
    std::optional<TokenScores> scores = {};
  };
  bool taken(TimePoint now) const { return batch_ && !batch_->lease.empty() && now < batch_->until; }
  Status holds(const std::string& lease) const;
  bool publishes(std::uint64_t version) const {
    return version % options_.publish_every == 0 || version == options_.steps_total;
  }
  bool evaluates(std::uint64_t version) const {
    return version == options_.steps_total || (options_.evaluate_every > 0 && version % options_.evaluate_every == 0);
  }

  const ExchangeOptions options_;
  const Clock& clock_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::uint64_t steps_;  // done
  std::optional<Batch> batch_;
  std::optional<std::pair<Version, delta::OwnedState>> policy_;  // waits for the service
  std::optional<std::pair<Version, delta::Digest>> accepted_;    // the newest policy that publish() took
  std::optional<Version> wanted_, published_;
  std::optional<Version> to_evaluate_;
  std::vector<PolicyEvaluation> evaluations_;  // for the service
  bool evaluates_ = false, stopped_ = false;
  TimePoint heard_{};  // of the trainer
};

}  // namespace echoline::learner
