// Parts of the program that are shared objects and are loaded on first use.
#pragma once
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

namespace echoline {

// The parts that need libtorch: the built-in trainer and engine.
inline constexpr std::string_view kTorchModule = "torch";

// Where the module `name` of the program at `program` may be, in search order: beside the program (in a build folder,
// or on a host to which it was copied), in lib/echoline of an installed program, in lib of a bundle.
std::vector<std::filesystem::path> module_places(const std::filesystem::path& program, std::string_view name);

// The first of these files that exists.
std::optional<std::filesystem::path> find_module(const std::filesystem::path& program, std::string_view name);

}  // namespace echoline
