// Which task a verb below `echoline adapter` is about: that of a run file or run, a built-in adapter with options, or a
// program. Private to cli/.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "cli/verb.hpp"
#include "learner/run_config.hpp"

namespace echoline::cli {

// What the user says.
struct TaskWords {
  std::string task;                  // a run file, the folder of a run, or an adapter's name
  std::vector<std::string> command;  // behind --: of the adapter `process`
  std::string options;
  std::vector<std::string> overrides;
  std::optional<std::string> seed;

  void add_options(Verb& verb);
};

// What is meant.
struct TaskChoice {
  data_plane::TaskSettings task;
  model::PromptStyle prompts;  // of an adapter named alone: nothing around its problems
  std::uint64_t seed = 1;
  std::string label;  // for people: "process (tasks/sums.py)"
};

// kInvalid with all that is wrong, `file:line:col: ` before what is wrong in a run file.
Result<TaskChoice> choose_task(const TaskWords& words);

// For --help: the three ways to name one.
std::string task_examples(std::string_view verb);

}  // namespace echoline::cli
