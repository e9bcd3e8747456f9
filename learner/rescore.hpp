// Rollouts of a run graded again: by the run's own task, or by another one, for the same problems.
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
  std::uint64_t seed = 1;                         // of the run
  const data_plane::Adapter* task = nullptr;      // grades
  const data_plane::Adapter* problems = nullptr;  // the run's own: where `task` has none, or others; may be absent
  // The run's, for what has several turns: its first use may read files.
  std::function<Result<const model::Phrasing*>()> phrasing;
};

// A rollout's second grade. `ended`: another task was done before its last turn.
struct Rescored {
  data_plane::Score score;
  std::size_t turns = 1;
  bool ended_early = false;
};

// An error says why there is no grade: the problem is not known, its tokens do not read as turns, or the task fails.
Result<Rescored> grade_again(const RescoreTask& grader, const schema::Trajectory& t);

// What comes of many.
struct RescoreSum {
  std::uint64_t graded = 0, agree = 0;            // with the same reward and verdict
  std::uint64_t components_differ = 0;            // although they agree
  std::map<std::string, std::uint64_t> ungraded;  // by reason, at most 16 of them; further ones under "others"
  double reward_old = 0, reward_new = 0, correct_old = 0, correct_new = 0;  // means over what was graded
  struct Part {
    std::uint64_t rollouts_old = 0, rollouts_new = 0;  // that have it
    double mean_old = 0, mean_new = 0;                 // over all that was graded, 0 where it is not there
  };
  std::map<std::string, Part> parts;
};

// Adds one after the other up.
class RescoreSums {
 public:
  // Whether both grades agree; absent: there is no second one.
  std::optional<bool> add(const schema::Trajectory& t, const Result<Rescored>& again);
  RescoreSum sum() const;

 private:
  RescoreSum sums_;  // sums instead of means
};

}  // namespace echoline::learner
