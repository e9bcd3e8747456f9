// Starts a run and shows it: what `up` and `apply` do.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

namespace echoline::cli {

struct UpArguments {
  std::string config;
  std::vector<std::string> overrides;  // key=value
  std::string plan;                    // a plan.json to rent by; "": a new plan
  bool resume = false, json = false;
  std::string again = {};  // the command that starts the run from its beginning; "": `echoline up` with what is above
};

// What to do about a run that has ended early: "go on with: echoline up ... --resume", or where it has no checkpoint
// the command that starts it again, which is `again` if that is given.
std::string next_command(const std::filesystem::path& folder, const std::string& config,
                         const std::vector<std::string>& overrides, const std::string& again = "");

// Returns the exit code.
int run_up(const UpArguments& arguments);

}  // namespace echoline::cli
