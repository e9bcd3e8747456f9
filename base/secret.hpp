// Reads API keys.
#pragma once
#include <filesystem>
#include <string>

#include "base/result.hpp"

namespace echoline {

// Reads a secret of one plain word: an environment variable, else the first line of `file`. Empty if neither is given.
// kInvalid if other users can read the file or it holds no such word; otherwise the errors of read_file().
Result<std::string> read_secret(const char* variable, const std::filesystem::path& file);

}  // namespace echoline
