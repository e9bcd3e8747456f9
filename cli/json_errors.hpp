// Errors as JSON objects, for programs that call echoline with --json.
#pragma once
#include "base/result.hpp"

namespace echoline::cli {

// Whether the user gave --json. Set once, before any verb runs.
void errors_as_json(bool wanted);
// Under --json, prints the error as an object to stdout (docs/plan.md); complain() calls it.
void print_json_error(const Error& error);

}  // namespace echoline::cli
