// What in a run's measurements says that training goes wrong, and what to do about it. Pure: it hears the rows of
// metrics.jsonl, so that a report and a resumed run find what the learner found.
//
// The last ten steps are compared with the first ten; nothing is said before both are there. docs/losses.md has the
// rules.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace echoline::learner {

struct Alarm {
  std::string kind;
  std::uint64_t step = 0;
  std::string detail;  // the numbers
  std::string advice;  // what to do
};

class Alarms {
 public:
  // A row of metrics.jsonl; other kinds than steps and evaluations, and a step that was heard of before, say nothing.
  // What begins with it: an alarm is given again only after it was over.
  std::vector<Alarm> hear(const nlohmann::json& row);
  // The kinds of those that go on.
  std::vector<std::string> active() const;

 private:
  struct Step {
    double reward = 0, accuracy = 0, length = 0, truncated = 0, informative = 0;
    std::optional<double> entropy, effective;  // absent: no token was trained on
    bool skipped = false;                      // an update was, because its gradient was not finite
  };
  using Steps = std::deque<Step>;
  static std::optional<double> mean(const Steps& steps, std::optional<double> (*value)(const Step&));
  void judge(std::uint64_t step, std::vector<Alarm>& begun);

  Steps first_, last_;
  std::uint64_t heard_ = 0;                               // the newest step
  std::optional<double> held_out_first_, held_out_last_;  // accuracy
  std::map<std::string, bool> active_;
};

}  // namespace echoline::learner
