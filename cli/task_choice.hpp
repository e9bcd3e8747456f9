// Finds the task that a subcommand of `echoline adapter` is about. The user names a run file or run, a built-in adapter
// with options, or a program. Private to cli/.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "cli/verb.hpp"
#include "learner/run_config.hpp"

namespace echoline::cli {

// The arguments of the command line that name the task.
struct TaskArguments {
  std::string task;                  // a run file, the folder of a run, or an adapter's name
  std::vector<std::string> command;  // the words behind --: a program for the adapter `process`
  std::string options;
  std::vector<std::string> overrides;
  std::optional<std::string> seed;

  void add_options(Verb& verb);
};

struct TaskChoice {
  data_plane::TaskSettings task;
  model::PromptStyle prompts;  // from the run file; empty for an adapter without one
  std::uint64_t seed = 1;
  std::string label;  // printed to the user: "process (tasks/sums.py)"
};

// kInvalid lists everything that is wrong; mistakes in a run file start with `file:line:col: `.
Result<TaskChoice> choose_task(const TaskArguments& args);

}  // namespace echoline::cli
