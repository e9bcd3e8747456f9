// Reads keys of services from the environment or a file.
#include "base/secret.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>

#include "base/files.hpp"

namespace echoline {

Result<std::string> read_secret(const char* variable, const std::filesystem::path& file) {
  constexpr std::string_view kOperation = "read key";
  constexpr mode_t kOthersMask = 077;  // all rights of the group and of other users
  constexpr std::uint64_t kFileBytesMax = 4096;
  std::string secret, place = variable;
  if (const char* value = std::getenv(variable); value != nullptr) {
    secret = value;
  } else if (!file.empty()) {
    place = file.string();
    struct stat info {};
    if (::stat(file.c_str(), &info) != 0) return os_error(kOperation, file);
    if ((info.st_mode & kOthersMask) != 0)
      return fail(Code::kInvalid, kOperation, "{}: others can read this key; chmod 600 it", place);
    ECHO_ASSIGN(secret, read_file(file, kFileBytesMax));
    secret = secret.substr(0, secret.find_first_of("\r\n"));
  } else {
    return std::string();
  }
  const bool is_plain_word =
      std::all_of(secret.begin(), secret.end(), [](unsigned char c) { return c > ' ' && c < 127; });
  if (secret.empty() || !is_plain_word)
    return fail(Code::kInvalid, kOperation, "{} holds no key: expected one plain word", place);
  return secret;
}

}  // namespace echoline
