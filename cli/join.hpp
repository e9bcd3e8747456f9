// How a process joins a run: the learner's address and the join token. For the verbs worker and node.
#pragma once
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "overlay/trust/secret.hpp"
#include "overlay/types.hpp"

namespace echoline::cli {

// HOST:PORT, such as 127.0.0.1:7070 or [::1]:7070. `option`: named in the error.
Result<overlay::Endpoint> parse_endpoint(std::string_view option, const std::string& text);

// The token from the command line, a file or the environment, in this order. The variable is removed from the
// environment, so that child processes do not inherit it.
Result<overlay::trust::Secret> find_token(const std::string& token, const std::string& token_file);

}  // namespace echoline::cli
