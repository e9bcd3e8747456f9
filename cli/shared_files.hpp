// Which shared libraries a program needs, by the symbols that they take from each other: a library can name others
// (DT_NEEDED) of which it uses nothing. Private to cli/.
#pragma once
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "base/result.hpp"

namespace echoline::cli {

// The files among `loaded` that no symbol leads to from `roots` (files of `loaded` as well). Libraries of libtorch and
// CUDA are roots too, because they register themselves when they are loaded. A file without symbols needs all that it
// names.
Result<std::set<std::filesystem::path>> unneeded(const std::vector<std::filesystem::path>& loaded,
                                                 const std::vector<std::filesystem::path>& roots);

// Removes the libraries of these names from what the ELF file needs at load time. Returns how many it named.
Result<int> forget_needed(const std::filesystem::path& file, const std::set<std::string>& names);

// Names in DT_NEEDED; empty for a file that is not ELF.
Result<std::vector<std::string>> needed_names(const std::filesystem::path& file);

}  // namespace echoline::cli
