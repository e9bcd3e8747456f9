// Starts a run and shows it: what `up` and `apply` do.
#pragma once
#include <string>
#include <vector>

namespace echoline::cli {

struct UpArguments {
  std::string config;
  std::vector<std::string> overrides;  // key=value
  std::string plan;                    // a plan.json to rent by; "": a new plan
  bool resume = false, json = false;
};

// Returns the exit code.
int run_up(const UpArguments& arguments);

}  // namespace echoline::cli
