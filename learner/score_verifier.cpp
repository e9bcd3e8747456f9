// Runs a task again on a trajectory, for SubmissionChecker, Regrader and Scorer.
#include "learner/score_verifier.hpp"

#include <algorithm>
#include <cmath>

namespace echoline::learner {
namespace {

constexpr double kScoreTolerance = 1e-9;  // relative; a sum depends on the order of its terms

bool is_equal(double a, double b) {
  return std::abs(a - b) <= kScoreTolerance * std::max({1.0, std::abs(a), std::abs(b)});
}

const char* verdict_text(bool is_correct) { return is_correct ? "correct" : "wrong"; }

}  // namespace

std::vector<model::Token> response_of(const schema::Trajectory& trajectory) {
  std::vector<model::Token> response;
  response.reserve(static_cast<std::size_t>(trajectory.response_tokens_size()));
  for (const std::uint32_t token : trajectory.response_tokens()) response.push_back(static_cast<model::Token>(token));
  return response;
}

std::vector<std::span<const model::Token>> turns_of(const schema::Trajectory& trajectory,
                                                    std::span<const model::Token> response) {
  if (trajectory.loss_mask_size() == 0) return {response};  // one turn
  std::vector<std::span<const model::Token>> turns;
  const auto is_of_policy = [&](std::size_t i) { return trajectory.loss_mask(static_cast<int>(i)) != 0; };
  if (response.empty() || !is_of_policy(0) || !is_of_policy(response.size() - 1)) return {};
  for (std::size_t begin = 0, end = 0; begin < response.size(); begin = end) {
    while (end < response.size() && is_of_policy(end) == is_of_policy(begin)) ++end;
    if (is_of_policy(begin)) turns.push_back(response.subspan(begin, end - begin));
  }
  return turns;
}

bool has_same_verdict(const schema::Trajectory& trajectory, const data_plane::Score& score) {
  return is_equal(trajectory.reward(), score.reward) && trajectory.correct() == score.correct;
}

bool has_same_components(const schema::Trajectory& trajectory, const data_plane::Score& score) {
  if (static_cast<std::size_t>(trajectory.components_size()) != score.components.size()) return false;
  return std::ranges::all_of(score.components, [&](const auto& part) {
    const auto component = trajectory.components().find(part.first);
    return component != trajectory.components().end() && is_equal(component->second, part.second);
  });
}

Result<ScoreVerifier::ComputedScore> ScoreVerifier::compute_score(const schema::Trajectory& trajectory,
                                                                  const schema::Problem& problem,
                                                                  const std::atomic<bool>* stop) const {
  try {
    return run_turns(trajectory, problem, stop);
  } catch (const std::exception& error) {
    return fail(Code::kUnavailable, "task", "{}", error.what());
  }
}

Result<ScoreVerifier::ComputedScore> ScoreVerifier::run_turns(const schema::Trajectory& trajectory,
                                                              const schema::Problem& problem,
                                                              const std::atomic<bool>* stop) const {
  const std::vector<model::Token> response = response_of(trajectory);
  const auto turns = turns_of(trajectory, response);
  const auto refuse = [](Refusal refusal) { return ComputedScore{.score = {}, .refusal = std::move(refusal)}; };
  ECHO_ASSIGN(const auto episode,
              adapter_.begin(problem, data_plane::episode_seed(run_seed_, trajectory.group(), trajectory.member())));
  ComputedScore computed;
  bool has_finished = false;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const auto turn = turns[i];
    const bool is_last_turn = i + 1 == turns.size();
    ECHO_ASSIGN(const data_plane::Step step, data_plane::step_and_wait(*episode, phrasing_.answer(turn), stop));
    if (step.side_prompt) return data_plane::side_prompt_error();
    data_plane::add(computed.score, step.score);
    if (step.done) {
      if (!is_last_turn) return refuse(make_refusal("wrong score", kForged, "it goes on after its task was done"));
      has_finished = phrasing_.response_end(turn).has_value();  // the turn ended by itself, not at a length limit
      break;
    }
    ECHO_ASSIGN(const auto observation_tokens, phrasing_.follow_up(turn, step.observation));
    const auto turn_end = static_cast<std::size_t>(turn.data() + turn.size() - response.data());
    const std::int64_t tokens_left =
        response_tokens_max_ - static_cast<std::int64_t>(turn_end) - std::ssize(observation_tokens);
    if (is_last_turn && tokens_left > 0 && turns.size() < data_plane::kTurnsMax)
      return refuse(make_refusal("malformed", kNotForged,
                                 "it stops after {} turns with room for {} tokens, its task goes on", turns.size(),
                                 tokens_left));
    if (is_last_turn) {
      data_plane::add(computed.score, episode->cut());  // the task's score for a response that ends before the task
      break;
    }
    // The tokens between this turn and the next must be the task's observation.
    const std::size_t observed_tokens = static_cast<std::size_t>(turns[i + 1].data() - response.data()) - turn_end;
    if (!std::ranges::equal(std::span(response).subspan(turn_end, observed_tokens), observation_tokens))
      return refuse(make_refusal("wrong score", kForged,
                                 "its {} tokens of observation after turn {} are not the {} of its task",
                                 observed_tokens, i + 1, observation_tokens.size()));
  }
  if (trajectory.finished() != has_finished)
    return refuse(make_refusal("malformed", kNotForged, "finished is {}, its last token says {}", trajectory.finished(),
                               has_finished));
  return computed;
}

std::optional<Refusal> ScoreVerifier::difference(const schema::Trajectory& trajectory, const data_plane::Score& score) {
  if (!has_same_verdict(trajectory, score))
    return make_refusal("wrong score", kForged, "reward {} ({}), expected {} ({})", trajectory.reward(),
                        verdict_text(trajectory.correct()), score.reward, verdict_text(score.correct));
  if (!has_same_components(trajectory, score))
    return make_refusal("wrong score", kForged, "the parts of its reward are not those of this task");
  return std::nullopt;
}

bool ScoreVerifier::is_same(const data_plane::Score& a, const data_plane::Score& b) {
  return is_equal(a.reward, b.reward) && a.correct == b.correct &&
         std::ranges::equal(a.components, b.components, [](const auto& part_a, const auto& part_b) {
           return part_a.first == part_b.first && is_equal(part_a.second, part_b.second);
         });
}

}  // namespace echoline::learner
