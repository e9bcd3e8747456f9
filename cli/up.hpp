// Starts a run and shows its progress, for `up` and `apply`.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace echoline::cli {

struct UpArguments {
  std::string config;
  std::vector<std::string> overrides;  // key=value
  std::string plan;                    // a plan.json to rent by; empty: make a new plan
  bool resume = false, json = false;
  // The command that starts the run from its beginning; empty: `echoline up` with the values above.
  std::string restart_command = {};
};

// Advice for a run that has ended early: "go on with: echoline up ... --resume". For a run without a checkpoint, the
// command that starts it again: `restart_command` if that is given.
std::string next_step_advice(const std::filesystem::path& folder, const std::string& config,
                             const std::vector<std::string>& overrides, const std::string& restart_command = "");

int run_up(const UpArguments& arguments);

}  // namespace echoline::cli
