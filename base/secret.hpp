// Keys of services, from where their owners keep them.
#pragma once
#include <filesystem>
#include <string>

#include "base/result.hpp"

namespace echoline {

// A secret of one plain word: that of an environment variable, else the first line of `file`; empty where neither is
// given. kInvalid: others than its owner can read the file, or it holds no such word; errors of read_file().
Result<std::string> read_secret(const char* variable, const std::filesystem::path& file);

}  // namespace echoline
