// Parts of the program that are shared objects, opened when they are first needed.
#pragma once
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

namespace echoline {

inline constexpr std::string_view kTorchModule = "torch";  // what needs libtorch: the built-in trainer and engine

// Where the module `name` of the program at `program` can be, in search order: beside a program in its build folder or
// on a host that it was copied to, in lib/echoline of an installed program, in lib of a bundle.
std::vector<std::filesystem::path> module_places(const std::filesystem::path& program, std::string_view name);

// The first place that holds a file.
std::optional<std::filesystem::path> find_module(const std::filesystem::path& program, std::string_view name);

}  // namespace echoline
