// Finds the shared libraries that a program needs by the symbols they take from each other. DT_NEEDED, a library's list
// of other libraries that the loader must load, is not enough: it can name libraries that are not used. Private to
// cli/.
#pragma once
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "base/result.hpp"

namespace echoline::cli {

// The files among `loaded` that `roots` do not reach by symbols; `roots` are files of `loaded`. Libraries of libtorch
// and CUDA count as roots, because they register themselves when they are loaded. A file without symbols needs
// everything it names.
Result<std::set<std::filesystem::path>> find_unneeded(const std::vector<std::filesystem::path>& loaded,
                                                      const std::vector<std::filesystem::path>& roots);

// Removes these libraries from DT_NEEDED of the ELF file. Returns how many were there.
Result<int> remove_needed(const std::filesystem::path& file, const std::set<std::string>& names);

// The names in DT_NEEDED; empty for a file that is not ELF.
Result<std::vector<std::string>> needed_libraries(const std::filesystem::path& file);

}  // namespace echoline::cli
