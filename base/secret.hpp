// Reads keys of services.
#pragma once
#include <filesystem>
#include <string>

#include "base/result.hpp"

namespace echoline {

// A secret of one plain word: from an environment variable, else the first line of `file`; empty if neither is given.
// kInvalid: other users can read the file, or it holds no such word. Errors of read_file().
Result<std::string> read_secret(const char* variable, const std::filesystem::path& file);

}  // namespace echoline
