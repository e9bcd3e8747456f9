// Grades stored rollouts again, for `echoline rescore`.
#include "learner/rescore.hpp"

#include <algorithm>
#include <cmath>

#include "learner/score_verifier.hpp"

namespace echoline::learner {
namespace {

constexpr std::string_view kOperation = "rescore";
constexpr std::size_t kReasonsMax = 16, kReasonBytesMax = 160, kPartsMax = 256;  // they bound the size of the result

// The problem from the grading task, or else from the run's own task. A group's id is the index of its problem. The
// problem's id is compared as well, because the task may have other problems than when the run began.
Result<schema::Problem> problem_of(const RescoreTask& grader, const schema::Trajectory& trajectory) {
  std::string problem_at_its_place = "none";
  for (const data_plane::Adapter* adapter : {grader.task, grader.problems}) {
    if (adapter == nullptr) continue;
    auto problem = adapter->problem(/*index=*/trajectory.group());
    if (problem && problem->id() == trajectory.problem_id()) return problem;
    if (problem) problem_at_its_place = "another one";
  }
  return fail(Code::kNotFound, kOperation, "its problem is not known: the task has {} at its place",
              problem_at_its_place);
}

}  // namespace

Result<SecondGrade> grade_again(const RescoreTask& grader, const schema::Trajectory& trajectory) {
  ECHO_ASSIGN(const schema::Problem problem, problem_of(grader, trajectory));
  std::vector<std::string> responses;
  if (trajectory.loss_mask_size() == 0) {  // one turn
    responses.push_back(trajectory.text());
  } else {
    ECHO_ASSIGN(const model::Phrasing* phrasing, grader.phrasing());
    const std::vector<model::Token> tokens = response_of(trajectory);
    for (const auto turn : turns_of(trajectory, tokens)) responses.push_back(phrasing->answer(turn));
    if (responses.empty())
      return fail(Code::kCorrupt, kOperation, "its loss mask does not begin and end with the policy's tokens");
  }
  ECHO_ASSIGN(const auto episode, grader.task->begin(problem, data_plane::episode_seed(grader.seed, trajectory.group(),
                                                                                       trajectory.member())));
  SecondGrade grade;
  bool is_done = false;
  for (grade.turns = 0; grade.turns < responses.size() && !is_done; ++grade.turns) {
    ECHO_ASSIGN(const data_plane::Step step, data_plane::step_and_wait(*episode, responses[grade.turns]));
    if (step.side_prompt) return data_plane::side_prompt_error();
    data_plane::add(grade.score, step.score);
    is_done = step.done;
  }
  grade.ended_early = is_done && grade.turns < responses.size();
  if (!is_done) data_plane::add(grade.score, episode->cut());
  if (!std::isfinite(grade.score.reward))
    return fail(Code::kCorrupt, kOperation, "its reward is now {}", grade.score.reward);
  return grade;
}

std::optional<bool> RescoreTally::add(const schema::Trajectory& trajectory, const Result<SecondGrade>& second_grade) {
  if (!second_grade) {
    const std::string reason = second_grade.error().message().substr(0, kReasonBytesMax);
    const bool has_room = sums_.ungraded.size() < kReasonsMax || sums_.ungraded.contains(reason);
    ++sums_.ungraded[has_room ? reason : "others"];
    return std::nullopt;
  }
  const data_plane::Score& score = second_grade->score;
  ++sums_.graded;
  sums_.reward_old += trajectory.reward();
  sums_.reward_new += score.reward;
  sums_.correct_old += trajectory.correct() ? 1 : 0;
  sums_.correct_new += score.correct ? 1 : 0;
  // Null if there are too many components already.
  const auto find_or_add_part = [&](const std::string& name) -> RescoreResult::Part* {
    if (sums_.parts.size() >= kPartsMax && !sums_.parts.contains(name)) return nullptr;
    return &sums_.parts[name];
  };
  for (const auto& [name, value] : trajectory.components())
    if (auto* part = find_or_add_part(name)) {
      ++part->rollouts_old;
      part->mean_old += value;
    }
  for (const auto& [name, value] : score.components)
    if (auto* part = find_or_add_part(name)) {
      ++part->rollouts_new;
      part->mean_new += value;
    }
  if (!has_same_verdict(trajectory, score)) return false;
  ++sums_.agree;
  if (!has_same_components(trajectory, score)) ++sums_.components_differ;
  return true;
}

RescoreResult RescoreTally::result() const {
  RescoreResult result = sums_;
  const double rollouts = static_cast<double>(std::max<std::uint64_t>(result.graded, 1));
  for (double* value : {&result.reward_old, &result.reward_new, &result.correct_old, &result.correct_new})
    *value /= rollouts;
  for (auto& [name, part] : result.parts) {
    part.mean_old /= rollouts;
    part.mean_new /= rollouts;
  }
  return result;
}

}  // namespace echoline::learner
