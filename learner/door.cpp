#include "learner/door.hpp"

#include <algorithm>

#include "data_plane/told.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::learner {
namespace {

constexpr std::size_t kQuestionsMax = 65'536;  // remembered at once

bool same_tokens(const google::protobuf::RepeatedField<std::uint32_t>& found, std::span<const model::Token> expected) {
  return std::equal(found.begin(), found.end(), expected.begin(), expected.end(),
                    [](std::uint32_t a, model::Token b) { return static_cast<std::int64_t>(a) == b; });
}

}  // namespace

Door::Door(DoorOptions options, const data_plane::Adapter& adapter, model::Phrasing phrasing)
    : options_(std::move(options)),
      look_(std::make_shared<SecondLook>(adapter, std::move(phrasing), options_.seed, options_.response_tokens_max)) {}

Result<const Question*> Door::question(GroupId group) {
  constexpr std::string_view kOperation = "problem";
  if (const auto known = questions_.find(group); known != questions_.end()) return known->second.get();
  Question question;
  ECHO_ASSIGN(question.problem, problem(group));
  auto prompt = look_->phrasing().prompt(data_plane::prompt_of(question.problem));
  if (!prompt)
    return fail(Code::kInvalid, kOperation, "'{}': its prompt has no tokens: {}", question.problem.id(),
                prompt.error().detail);
  question.prompt = std::move(*prompt);
  const std::int64_t room = options_.positions_max - options_.response_tokens_max;
  if (question.prompt.empty() || std::ssize(question.prompt) > room)
    return fail(Code::kInvalid, kOperation,
                "'{}': its prompt has {} tokens, expected 1 to {}: the model's {} positions less "
                "rollout.response_tokens_max {}",
                question.problem.id(), question.prompt.size(), room, options_.positions_max,
                options_.response_tokens_max);
  if (questions_.size() >= kQuestionsMax) questions_.clear();  // dropped questions are made again on demand
  return questions_.emplace(group, std::make_unique<Question>(std::move(question))).first->second.get();
}

Bytes worker_message_max(std::int64_t positions_max, std::int64_t response_tokens_max, std::uint32_t group_size,
                         Bytes metadata_max) {
  constexpr std::uint64_t kNames = 64 * 1024;  // bytes of names, and of the reward's components
  constexpr std::uint64_t kPerToken = 16, kTextPerToken = 256;
  const auto positions = static_cast<std::uint64_t>(positions_max);
  const auto response = static_cast<std::uint64_t>(response_tokens_max);
  const std::uint64_t each =
      kNames + metadata_max.count + kPerToken * positions + (kPerToken + kTextPerToken) * response;
  return Bytes{std::min(data_plane::TrajectoryLimits{}.message_max.count, group_size * each)};
}

schema::Problem Door::shown(const schema::Problem& problem) const {
  if (!unscored(problem)) return problem;
  schema::Problem shown;
  shown.set_id(problem.id());
  shown.set_prompt(problem.prompt());
  *shown.mutable_messages() = problem.messages();
  return shown;
}

std::optional<Refusal> Door::refusal(const schema::Submission& submission) {
  data_plane::TrajectoryLimits limits;
  limits.metadata_max = options_.metadata_max;
  for (const schema::Trajectory& t : submission.trajectories()) {
    if (const Status form = data_plane::check(t, limits); !form)
      return because("malformed", false, "{}", form.error().detail);
    const auto asked = question(GroupId{t.group()});
    if (!asked) return because("malformed", false, "{}", asked.error().detail);
    if (auto refused = refusal(t, **asked)) return refused;
  }
  return std::nullopt;
}

// Requires that the trajectory has passed data_plane::check.
std::optional<Refusal> Door::refusal(const schema::Trajectory& t, const Question& question) const {
  const std::string expected_id = fmt::format("{}/{}", t.lease(), t.member());
  if (t.id() != expected_id) return because("malformed", false, "id '{}', expected '{}'", t.id(), expected_id);
  if (t.problem_id() != question.problem.id())
    return because("wrong prompt", true, "problem '{}', expected '{}'", t.problem_id(), question.problem.id());
  if (!same_tokens(t.prompt_tokens(), question.prompt))
    return because("wrong prompt", true, "its {} prompt tokens are not the {} of problem '{}'", t.prompt_tokens_size(),
                   question.prompt.size(), question.problem.id());
  if (t.response_tokens_size() > options_.response_tokens_max)
    return because("malformed", false, "{} response tokens, at most {} were asked for", t.response_tokens_size(),
                   options_.response_tokens_max);
  for (const std::uint32_t token : t.response_tokens())
    if (token >= static_cast<std::uint64_t>(options_.vocab_size))
      return because("malformed", false, "token {}, the vocabulary ends at {}", token, options_.vocab_size - 1);
  if (options_.trainable)
    if (const Status status = options_.trainable(t); !status)
      return because("malformed", false, "{}", status.error().detail);

  const std::vector<model::Token> response = response_of(t);
  const auto turns = turns_of(t, response);
  if (turns.empty() || turns.size() > data_plane::kTurnsMax)
    return because("malformed", false,
                   "its loss mask does not begin and end with the policy's tokens, in 1 to {} turns",
                   data_plane::kTurnsMax);
  if (auto refused = wrong_end(t, turns)) return refused;
  if (unscored(question.problem)) {
    if (turns.size() != 1) return because("malformed", false, "{} turns, its task has one", turns.size());
    if (t.finished() != look_->phrasing().end(response).has_value())
      return because("malformed", false, "finished is {}, its last token says {}", t.finished(), !t.finished());
    if (t.reward() != 0 || t.correct() || t.late() || !t.components().empty())
      return because("malformed", false, "it has a score, although the learner scores this problem");
    if (t.text() != look_->text(response, 1))
      return because("wrong score", true, "its text differs from the text of its tokens");
    return std::nullopt;
  }
  std::optional<data_plane::Score> expected;
  if (look_->adapter().repeatable(question.problem) == data_plane::Repeatable::kCheaply) {
    auto found = look_->find(t, question.problem);
    if (!found) return because("malformed", false, "its task cannot be asked: {}", found.error().message());
    if (found->refusal) return std::move(found->refusal);
    expected = std::move(found->score);
  }
  if (t.text() != look_->text(response, turns.size()))
    return because("wrong score", true, "its text differs from the text of its tokens");
  return expected ? SecondLook::difference(t, *expected) : std::nullopt;
}

// Whether every turn ends validly: by itself, or at its length limit.
std::optional<Refusal> Door::wrong_end(const schema::Trajectory& t,
                                       std::span<const std::span<const model::Token>> turns) const {
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const auto turn = turns[i];
    const bool last = i + 1 == turns.size();
    const auto end = look_->phrasing().end(turn);
    if (end && *end != turn.size())
      return because("malformed", false, "it goes on after token {}, which ends a response", turn[*end - 1]);
    const bool full = (last && t.response_tokens_size() == options_.response_tokens_max) ||
                      (options_.turn_tokens_max > 0 && std::ssize(turn) == options_.turn_tokens_max);
    if (!end && !full)
      return because("malformed", false, "it is cut after {} tokens, expected an end or {} tokens", turn.size(),
                     last ? options_.response_tokens_max : options_.turn_tokens_max);
    if (last && t.finished() && !end) return because("malformed", false, "finished is true, its last token says false");
  }
  return std::nullopt;
}

Status Door::trainable(std::span<const schema::Trajectory> group) const {
  if (options_.trainable)
    for (const schema::Trajectory& t : group) ECHO_TRY(options_.trainable(t));
  return ok();
}

}  // namespace echoline::learner
