// Errors as JSON objects, for programs that call echoline with --json.
#pragma once
#include "base/result.hpp"

namespace echoline::cli {

// Called once, before any verb runs: `enabled` if the user gave --json.
void set_json_errors(bool enabled);
// If JSON errors are enabled, prints the error as an object to stdout (docs/plan.md). report_error() calls it.
void print_error_if_json(const Error& error);

}  // namespace echoline::cli
