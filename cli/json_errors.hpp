// Errors of a program that was asked for --json.
#pragma once
#include "base/result.hpp"

namespace echoline::cli {

// Whether the user asked for --json. Set once, before any verb runs.
void errors_as_json(bool wanted);
// Under --json, prints the error as an object to stdout (docs/plan.md); complain() does so as well.
void print_json_error(const Error& error);

}  // namespace echoline::cli
