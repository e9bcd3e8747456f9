// Checks submissions. DeskSubmissions calls it for every one.
#include "learner/submission_checker.hpp"

#include <algorithm>

#include "data_plane/policy_input.hpp"
#include "data_plane/routed_experts.hpp"
#include "data_plane/trajectory.hpp"
#include "learner/message_threads.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kQuestionsMax = 65'536;  // kept in memory

bool same_tokens(const google::protobuf::RepeatedField<std::uint32_t>& tokens, std::span<const model::Token> expected) {
  return std::equal(tokens.begin(), tokens.end(), expected.begin(), expected.end(),
                    [](std::uint32_t a, model::Token b) { return static_cast<std::int64_t>(a) == b; });
}

}  // namespace

SubmissionChecker::SubmissionChecker(SubmissionCheckerOptions options, const data_plane::Adapter& adapter,
                                     model::Phrasing phrasing)
    : options_(std::move(options)),
      verifier_(
          std::make_shared<ScoreVerifier>(adapter, std::move(phrasing), options_.seed, options_.response_tokens_max)) {}

Result<const Question*> SubmissionChecker::question(GroupId group) {
  ECHO_ASSIGN(const auto question, shared_question(group));
  return question.get();  // `questions_` keeps it
}

Result<std::shared_ptr<const Question>> SubmissionChecker::shared_question(GroupId group) {
  constexpr std::string_view kOperation = "problem";
  const std::lock_guard lock(*mutex_);
  if (const auto cached = questions_.find(group); cached != questions_.end()) return cached->second;
  Question question;
  ECHO_ASSIGN(question.problem, problem(group));
  auto prompt = verifier_->phrasing().prompt(data_plane::prompt_of(question.problem));
  if (!prompt)
    return fail(Code::kInvalid, kOperation, "'{}': its prompt has no tokens: {}", question.problem.id(),
                prompt.error().detail);
  question.prompt = std::move(*prompt);
  const std::int64_t prompt_tokens_max = options_.positions_max - options_.response_tokens_max;
  if (question.prompt.empty() || std::ssize(question.prompt) > prompt_tokens_max)
    return fail(Code::kInvalid, kOperation,
                "'{}': its prompt has {} tokens, expected 1 to {}: the model's {} positions less "
                "rollout.response_tokens_max {}",
                question.problem.id(), question.prompt.size(), prompt_tokens_max, options_.positions_max,
                options_.response_tokens_max);
  if (questions_.size() >= kQuestionsMax) questions_.clear();  // dropped questions are made again on demand
  return questions_.emplace(group, std::make_shared<const Question>(std::move(question))).first->second;
}

Bytes worker_message_max(std::int64_t positions_max, std::int64_t response_tokens_max, std::uint32_t group_size,
                         Bytes metadata_max, std::int64_t expert_choices) {
  // Generous estimates: the limit must never refuse an honest worker.
  constexpr std::uint64_t kNamesBytes = 64 * 1024;   // names, and the reward's components
  constexpr std::uint64_t kTokenBytes = 16;          // a token with its log-probability and loss weight
  constexpr std::uint64_t kTextBytesPerToken = 256;  // of a response
  const auto positions = static_cast<std::uint64_t>(positions_max);
  const auto response_tokens = static_cast<std::uint64_t>(response_tokens_max);
  // Packed experts are far below two bytes each.
  const std::uint64_t expert_bytes = std::min<std::uint64_t>(
      data_plane::kRoutedExpertsBytesMax, 2 * static_cast<std::uint64_t>(expert_choices) * positions);
  const std::uint64_t trajectory_bytes = kNamesBytes + metadata_max.count + kTokenBytes * positions +
                                         (kTokenBytes + kTextBytesPerToken) * response_tokens + expert_bytes;
  return Bytes{std::min(data_plane::TrajectoryLimits{}.message_max.count, group_size * trajectory_bytes)};
}

schema::Problem SubmissionChecker::worker_view(const schema::Problem& problem) const {
  if (!is_scored_by_learner(problem)) return problem;
  schema::Problem visible;
  visible.set_id(problem.id());
  visible.set_prompt(problem.prompt());
  *visible.mutable_messages() = problem.messages();
  return visible;
}

std::optional<Refusal> SubmissionChecker::refusal(const schema::Submission& submission) {
  data_plane::TrajectoryLimits limits;
  limits.metadata_max = options_.metadata_max;
  for (const schema::Trajectory& trajectory : submission.trajectories()) {
    if (const Status well_formed = data_plane::check(trajectory, limits); !well_formed)
      return make_refusal("malformed", kNotForged, "{}", well_formed.error().detail);
    const auto group_question = shared_question(GroupId{trajectory.group()});
    if (!group_question) return make_refusal("malformed", kNotForged, "{}", group_question.error().detail);
    if (auto refused = refusal(trajectory, **group_question)) return refused;
  }
  return std::nullopt;
}

std::vector<std::optional<Refusal>> SubmissionChecker::refusals(
    std::span<const std::pair<WorkerId, schema::Submission>> submissions) {
  std::size_t bytes = 0;
  for (const auto& [worker, submission] : submissions) bytes += submission.ByteSizeLong();
  std::vector<std::optional<Refusal>> refusals(submissions.size());
  for_each_parallel(submissions.size(), message_threads(bytes),
                    [&](unsigned, std::size_t i) { refusals[i] = refusal(submissions[i].second); });
  return refusals;
}

// Requires that the trajectory has passed data_plane::check.
std::optional<Refusal> SubmissionChecker::refusal(const schema::Trajectory& trajectory,
                                                  const Question& question) const {
  const std::string expected_id = fmt::format("{}/{}", trajectory.lease(), trajectory.member());
  if (trajectory.id() != expected_id)
    return make_refusal("malformed", kNotForged, "id '{}', expected '{}'", trajectory.id(), expected_id);
  if (trajectory.problem_id() != question.problem.id())
    return make_refusal("wrong prompt", kForged, "problem '{}', expected '{}'", trajectory.problem_id(),
                        question.problem.id());
  if (!same_tokens(trajectory.prompt_tokens(), question.prompt))
    return make_refusal("wrong prompt", kForged, "its {} prompt tokens are not the {} of problem '{}'",
                        trajectory.prompt_tokens_size(), question.prompt.size(), question.problem.id());
  if (trajectory.response_tokens_size() > options_.response_tokens_max)
    return make_refusal("malformed", kNotForged, "{} response tokens, at most {} were asked for",
                        trajectory.response_tokens_size(), options_.response_tokens_max);
  for (const std::uint32_t token : trajectory.response_tokens())
    if (token >= static_cast<std::uint64_t>(options_.vocab_size))
      return make_refusal("malformed", kNotForged, "token {}, the vocabulary ends at {}", token,
                          options_.vocab_size - 1);
  if (options_.trainable)
    if (const Status status = options_.trainable(trajectory); !status)
      return make_refusal("malformed", kNotForged, "{}", status.error().detail);

  const std::vector<model::Token> response = response_of(trajectory);
  const auto turns = turns_of(trajectory, response);
  if (turns.empty() || turns.size() > data_plane::kTurnsMax)
    return make_refusal("malformed", kNotForged,
                        "its loss mask does not begin and end with the policy's tokens, in 1 to {} turns",
                        data_plane::kTurnsMax);
  if (auto refused = refusal_of_turn_ends(trajectory, turns)) return refused;
  if (is_scored_by_learner(question.problem)) {
    if (turns.size() != 1) return make_refusal("malformed", kNotForged, "{} turns, its task has one", turns.size());
    if (trajectory.finished() != verifier_->phrasing().response_end(response).has_value())
      return make_refusal("malformed", kNotForged, "finished is {}, its last token says {}", trajectory.finished(),
                          !trajectory.finished());
    if (trajectory.reward() != 0 || trajectory.correct() || trajectory.late() || !trajectory.components().empty())
      return make_refusal("malformed", kNotForged, "it has a score, although the learner scores this problem");
    if (trajectory.text() != verifier_->text(response, /*turns=*/1))
      return make_refusal("wrong score", kForged, "its text differs from the text of its tokens");
    return std::nullopt;
  }
  // Scores that are costly to compute are checked by the Regrader instead, on another thread.
  std::optional<data_plane::Score> expected;
  if (verifier_->adapter().repeatable(question.problem) == data_plane::Repeatable::kCheaply) {
    auto computed = verifier_->compute_score(trajectory, question.problem);
    if (!computed)
      return make_refusal("malformed", kNotForged, "its task cannot be asked: {}", computed.error().message());
    if (computed->refusal) return std::move(computed->refusal);
    expected = std::move(computed->score);
  }
  if (trajectory.text() != verifier_->text(response, turns.size()))
    return make_refusal("wrong score", kForged, "its text differs from the text of its tokens");
  return expected ? ScoreVerifier::difference(trajectory, *expected) : std::nullopt;
}

// Refuses a trajectory with a turn that neither ends by itself nor stops at its length limit.
std::optional<Refusal> SubmissionChecker::refusal_of_turn_ends(
    const schema::Trajectory& trajectory, std::span<const std::span<const model::Token>> turns) const {
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const auto turn = turns[i];
    const bool is_last_turn = i + 1 == turns.size();
    const auto end = verifier_->phrasing().response_end(turn);  // tokens up to an end within the turn
    if (end && *end != turn.size())
      return make_refusal("malformed", kNotForged, "it goes on after token {}, which ends a response", turn[*end - 1]);
    const bool is_at_limit = (is_last_turn && trajectory.response_tokens_size() == options_.response_tokens_max) ||
                             (options_.turn_tokens_max > 0 && std::ssize(turn) == options_.turn_tokens_max);
    if (!end && !is_at_limit)
      return make_refusal("malformed", kNotForged, "it is cut after {} tokens, expected an end or {} tokens",
                          turn.size(), is_last_turn ? options_.response_tokens_max : options_.turn_tokens_max);
    if (is_last_turn && trajectory.finished() && !end)
      return make_refusal("malformed", kNotForged, "finished is true, its last token says false");
  }
  return std::nullopt;
}

Status SubmissionChecker::trainable(std::span<const schema::Trajectory> group) const {
  if (options_.trainable)
    for (const schema::Trajectory& trajectory : group) ECHO_TRY(options_.trainable(trajectory));
  return ok();
}

}  // namespace echoline::learner
