// Grades a run's rollouts again, by the run's own task, or by another task for the same problems.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data_plane/adapters/adapter.hpp"
#include "model/phrasing.hpp"
#include "replay_buffer/stored.hpp"

namespace echoline::learner {

struct RescoreTask {
  std::uint64_t seed = 1;                         // the run's; seeds of episodes follow from it
  const data_plane::Adapter* task = nullptr;      // the task that grades
  const data_plane::Adapter* problems = nullptr;  // the run's own task, for problems that `task` lacks; may be null
  // The run's phrasing, for rollouts of several turns; its first call may read files.
  std::function<Result<const model::Phrasing*>()> phrasing;
};

// A rollout's second grade.
struct SecondGrade {
  data_plane::Score score;
  std::size_t turns = 1;     // turns that the task graded
  bool ended_early = false;  // the task ended before the rollout's last turn, as only another task than the run's can
};

// An error is the reason for no grade: an unknown problem, tokens that do not decode to turns, or a failed task.
Result<SecondGrade> grade_again(const RescoreTask& grader, const schema::Trajectory& trajectory);

// The figures of many rollouts.
struct RescoreResult {
  std::uint64_t graded = 0, agree = 0;            // `agree`: with the same reward and verdict
  std::uint64_t components_differ = 0;            // in rollouts that agree
  std::map<std::string, std::uint64_t> ungraded;  // by reason, at most 16; further reasons count as "others"
  double reward_old = 0, reward_new = 0, correct_old = 0, correct_new = 0;  // means over the graded rollouts
  struct Part {                                                             // a component of the reward
    std::uint64_t rollouts_old = 0, rollouts_new = 0;                       // rollouts that have the component
    double mean_old = 0, mean_new = 0;  // over all graded rollouts; 0 where it is missing
  };
  std::map<std::string, Part> parts;
};

// Adds up rollouts one by one.
class RescoreTally {
 public:
  // Returns whether both grades agree; absent: there is no second grade.
  std::optional<bool> add(const schema::Trajectory& trajectory, const Result<SecondGrade>& second_grade);
  RescoreResult result() const;

 private:
  RescoreResult sums_;  // with sums in the place of means
};

}  // namespace echoline::learner
