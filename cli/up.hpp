// Starts a run and shows its progress, for `up` and `apply`.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace echoline::cli {

struct UpArguments {
  std::string config;
  std::vector<std::string> overrides;  // key=value
  std::string plan;                    // the plan.json with which to rent; empty: make a new plan
  bool resume = false, json = false;
  // The command that starts the run from its beginning. Empty: `echoline up` with the values above.
  std::string restart_command = {};
};

// Advice for a run that has ended early: "go on with: echoline up ... --resume". A run without a checkpoint must be
// started again: with `restart_command`, or with `echoline up` if that is empty.
std::string next_step_advice(const std::filesystem::path& folder, const std::string& config,
                             const std::vector<std::string>& overrides, const std::string& restart_command = "");

// Runs the learner until its end. Returns the exit code.
int run_up(const UpArguments& args);

}  // namespace echoline::cli
