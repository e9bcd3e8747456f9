// Figures by task, for a run of several tasks. Private to learner/.
#pragma once
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "data_plane/adapters/adapter.hpp"

namespace echoline::learner {

// Sums over scored responses (answers), by task.
class TaskFigures {
 public:
  void add(std::string_view problem_id, bool correct, double reward) {
    Sums& sums = sums_[std::string(data_plane::task_of(problem_id))];
    ++sums.answers;
    sums.correct += correct ? 1 : 0;
    sums.reward += reward;
  }
  bool empty() const { return sums_.empty(); }
  // {task: {<count_key>: number of answers, accuracy, reward_mean}}
  nlohmann::json figures(const char* count_key) const {
    nlohmann::json by_task = nlohmann::json::object();
    for (const auto& [task, sums] : sums_)
      by_task[task] = {{count_key, sums.answers},
                       {"accuracy", static_cast<double>(sums.correct) / static_cast<double>(sums.answers)},
                       {"reward_mean", sums.reward / static_cast<double>(sums.answers)}};
    return by_task;
  }

 private:
  struct Sums {
    std::uint64_t answers = 0, correct = 0;
    double reward = 0;
  };
  std::map<std::string, Sums> sums_;
};

}  // namespace echoline::learner
