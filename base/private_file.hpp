// Files with secrets.
#pragma once
#include <filesystem>
#include <string_view>

#include "base/result.hpp"

namespace echoline {

// write_file_atomic() for a file that only its owner may read, at any time.
Status write_private_file_atomic(const std::filesystem::path& path, std::string_view content);

}  // namespace echoline
