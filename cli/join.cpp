// Reads the address and the token of a join.
#include "cli/join.hpp"

#include <unistd.h>

#include <cstdlib>

#include "base/files.hpp"
#include "learner/launch.hpp"

namespace echoline::cli {

Result<overlay::trust::Secret> find_token(const std::string& token, const std::string& token_file) {
  std::string text = token;
  if (text.empty() && !token_file.empty()) {
    constexpr std::size_t kTokenFileBytesMax = 4096;
    ECHO_ASSIGN(text, read_file(token_file, kTokenFileBytesMax));
    while (!text.empty() && (text.back() == '\n' || text.back() == '\r' || text.back() == ' ')) text.pop_back();
  }
  if (const char* value = std::getenv(learner::kTokenVariable); text.empty() && value) text = value;
  ::unsetenv(learner::kTokenVariable);
  return overlay::trust::Secret(std::move(text));
}

}  // namespace echoline::cli
