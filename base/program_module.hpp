// Parts of the program that are shared objects and are loaded on first use.
#pragma once
#include <filesystem>
#include <optional>
#include <string_view>
#include <vector>

namespace echoline {

// The parts that need libtorch: the built-in trainer and engine.
inline constexpr std::string_view kTorchModule = "torch";

// The possible paths of the module `name` of the program at `program`, in search order. The module is beside the
// program in a build folder or on a host to which it was copied; otherwise in lib/echoline (installed) or lib (bundle).
std::vector<std::filesystem::path> module_paths(const std::filesystem::path& program, std::string_view name);

// The first of these files that exists.
std::optional<std::filesystem::path> find_module(const std::filesystem::path& program, std::string_view name);

}  // namespace echoline
