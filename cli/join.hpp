// How a process joins a run: the learner's address and the join token. For the verbs worker and node.
#pragma once
#include <string>

#include "base/result.hpp"
#include "overlay/trust/secret.hpp"

namespace echoline::cli {

// The token from the command line, a file or the environment, in this order. The variable is removed from the
// environment, so that child processes do not inherit it.
Result<overlay::trust::Secret> find_token(const std::string& token, const std::string& token_file);

}  // namespace echoline::cli
