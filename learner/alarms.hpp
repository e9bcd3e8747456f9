// Alarms: signs in a run's measurements that training goes wrong, with advice. No I/O and no clock: they depend only on
// the rows of metrics.jsonl, so a report and a resumed run find the same alarms as the learner.
//
// The last ten steps are compared with the first ten. Except for updates_skipped, there are no alarms before both
// exist. docs/losses.md has the rules.
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
  std::string detail;  // the figures
  std::string advice;  // the remedy
};

class Alarms {
 public:
  // Adds a row of metrics.jsonl. Ignores a step that was added before, and rows that are neither steps nor evaluations.
  // Returns the alarms that begin with this row; a lasting alarm is returned once.
  std::vector<Alarm> add_row(const nlohmann::json& row);
  // The kinds of the current alarms.
  std::vector<std::string> active_kinds() const;

 private:
  struct Step {
    double reward = 0, accuracy = 0, length_tokens = 0;  // means
    double truncated_share = 0;                          // of the responses
    double informative_share = 0;                        // of the groups: those with different rewards
    // `effective_share`: the effective sample size of the importance weights, as a share of the tokens. Both are absent
    // if no token was trained on.
    std::optional<double> entropy, effective_share;
    bool skipped_update = false;  // the gradient was not finite, so the weights did not change
  };
  using Steps = std::deque<Step>;
  // The mean over the steps for which `value` is present; absent if there is none.
  static std::optional<double> mean(const Steps& steps, std::optional<double> (*value)(const Step&));
  void find_new_alarms(std::uint64_t step, std::vector<Alarm>& new_alarms);

  Steps first_steps_, last_steps_;  // ten steps each
  std::uint64_t newest_step_ = 0;
  std::optional<double> held_out_first_, held_out_last_;  // accuracy of the first and the last evaluation
  std::map<std::string, bool> active_;                    // kind -> whether the alarm lasts
};

}  // namespace echoline::learner
