// Names, exit codes and messages of errors.
#include "base/result.hpp"

#include <cstdio>

namespace echoline {

std::string_view to_string(Code code) {
  switch (code) {
    case Code::kInvalid:
      return "invalid";
    case Code::kInfeasible:
      return "infeasible";
    case Code::kNotFound:
      return "not found";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kIo:
      return "i/o";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kExhausted:
      return "limit reached";
    case Code::kStale:
      return "stale";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInternal:
      return "internal";
  }
  return "unknown";
}

int exit_code(Code code) {
  switch (code) {
    case Code::kInvalid:
      return 2;
    case Code::kInfeasible:
      return 3;
    default:
      return 1;
  }
}

std::string Error::message() const { return operation.empty() ? detail : operation + ": " + detail; }

Error as_user_error(Error error) {
  if (error.code == Code::kNotFound) error.code = Code::kInvalid;
  return error;
}

void assertion_failed(const char* expression, const char* file, int line, const std::string& why) {
  std::fprintf(stderr, "%s:%d: bug: '%s' does not hold%s%s\n", file, line, expression, why.empty() ? "" : ": ",
               why.c_str());
  std::abort();
}

}  // namespace echoline
