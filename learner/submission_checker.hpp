// Checks every submission of a worker before it is stored or used for training.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/score_verifier.hpp"
#include "model/phrasing.hpp"

namespace echoline::learner {

struct SubmissionCheckerOptions {
  std::int64_t vocab_size = 0;
  std::int64_t positions_max = 0;
  std::int64_t response_tokens_max = 0;
  std::int64_t turn_tokens_max = 0;                        // of one turn; 0: the rest of response_tokens_max
  std::uint64_t seed = 0;                                  // of the run
  Bytes metadata_max = data_plane::kMetadataLimitDefault;  // of a trajectory
  std::int64_t expert_choices = 0;                         // of a token, at most; 0: workers send no experts
  std::function<bool(const schema::Problem&)> unscored;    // whether workers submit text without a score; empty: never
  // Trajectories that training would refuse are refused here, so that they cannot end the run later. Called on several
  // threads at the same time, as `unscored` is.
  std::function<Status(const schema::Trajectory&)> trainable;
};

// The longest message that a worker of such a run needs to send.
Bytes worker_message_max(std::int64_t positions_max, std::int64_t response_tokens_max, std::uint32_t group_size,
                         Bytes metadata_max, std::int64_t expert_choices);

// The problem of a group, and the prompt that its worker must have used.
struct Question {
  schema::Problem problem;
  std::vector<model::Token> prompt;  // the problem's prompt in the learner's own tokens
};

// One thread, the desk's; refusals() uses more threads itself. Checking a trajectory of three tokens takes 0.5 µs, one
// of 1000 tokens 15 µs. Decoding takes most of the time, which is linear in the length.
class SubmissionChecker {
 public:
  // The adapter must outlive the checker.
  SubmissionChecker(SubmissionCheckerOptions options, const data_plane::Adapter& adapter, model::Phrasing phrasing);

  // kInvalid if no worker could generate the group: its prompt has no tokens, or leaves no room for a response.
  Result<const Question*> question(GroupId group);
  Result<schema::Problem> problem(GroupId group) const { return verifier_->adapter().problem(group.value); }
  // Drops the group's question. Call it once the group is stored or set aside.
  void forget(GroupId group) { questions_.erase(group); }

  Bytes message_max(std::uint32_t group_size) const {
    return worker_message_max(options_.positions_max, options_.response_tokens_max, group_size, options_.metadata_max,
                              options_.expert_choices);
  }

  // Whether only the learner scores this problem's responses.
  bool is_scored_by_learner(const schema::Problem& problem) const {
    return options_.unscored && options_.unscored(problem);
  }
  // Returns the part of the problem that workers may see: without the reference if the learner scores it.
  schema::Problem worker_view(const schema::Problem& problem) const;

  // Returns the reason to refuse the submission; absent if it is sound.
  std::optional<Refusal> refusal(const schema::Submission& submission);
  // The same for each submission, on several threads if they are long.
  std::vector<std::optional<Refusal>> refusals(std::span<const std::pair<WorkerId, schema::Submission>> submissions);

  // Shared with the scorers, which call it on their own threads.
  std::shared_ptr<const ScoreVerifier> score_verifier() const { return verifier_; }

  // ok if stored trajectories can be trained on; otherwise the reason.
  Status trainable(std::span<const schema::Trajectory> group) const;

 private:
  std::optional<Refusal> refusal(const schema::Trajectory& trajectory, const Question& question) const;
  std::optional<Refusal> refusal_of_turn_ends(const schema::Trajectory& trajectory,
                                              std::span<const std::span<const model::Token>> turns) const;

  // The question of question(). Stays valid when another thread drops it from `questions_`.
  Result<std::shared_ptr<const Question>> shared_question(GroupId group);

  SubmissionCheckerOptions options_;
  std::shared_ptr<const ScoreVerifier> verifier_;
  // Guards `questions_` in refusals(). On the heap, so that a checker can be moved.
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
  std::map<GroupId, std::shared_ptr<const Question>> questions_;  // of groups in generation; at most kQuestionsMax
};

}  // namespace echoline::learner
