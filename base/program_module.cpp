// Finds the shared objects of the program, for the command line and remote hosts.
#include "base/program_module.hpp"

#include <fmt/format.h>

namespace echoline {

namespace fs = std::filesystem;

std::vector<fs::path> module_paths(const fs::path& program, std::string_view name) {
  const std::string installed = fmt::format("echoline_{}.so", name);
  const fs::path prefix = program.parent_path().parent_path();
  return {fmt::format("{}_{}.so", program.string(), name), prefix / "lib/echoline" / installed,
          prefix / "lib" / installed};
}

std::optional<fs::path> find_module(const fs::path& program, std::string_view name) {
  std::error_code ec;
  for (const fs::path& place : module_paths(program, name))
    if (fs::is_regular_file(place, ec)) return place;
  return std::nullopt;
}

}  // namespace echoline
