// Reads the address and the token of a join.
#include "cli/join.hpp"

#include <unistd.h>

#include <cstdlib>

#include "base/files.hpp"
#include "learner/launch.hpp"

namespace echoline::cli {

Result<overlay::Endpoint> parse_endpoint(std::string_view option, const std::string& text) {
  constexpr unsigned kPortMax = 65535, kInvalidPort = kPortMax + 1;
  const std::size_t colon = text.rfind(':');
  unsigned port = 0;  // kInvalidPort after a wrong character or a number above kPortMax
  if (colon != std::string::npos && colon > 0)
    for (const char c : text.substr(colon + 1)) {
      const bool is_digit = c >= '0' && c <= '9';
      port = is_digit && port <= kPortMax ? port * 10 + unsigned(c - '0') : kInvalidPort;
    }
  if (port == 0 || port > kPortMax)
    return fail(Code::kInvalid, option, "expected HOST:PORT such as 127.0.0.1:7070 or [::1]:7070, found '{}'", text);
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return overlay::Endpoint{std::move(host), static_cast<std::uint16_t>(port)};
}

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
