// A tiny run that rents three machines of the test's vast.ai.
#pragma once
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace echoline::testing {

inline constexpr double kVastRolloutsPerSecond = 8;  // of each machine

// Writes the offers, whose ids begin with `first_ask`, to `folder`. Returns a run file "night" whose runs are below
// `folder`, and which ends only when it is told to.
nlohmann::json vast_run(const std::filesystem::path& folder, const std::string& url, std::uint64_t first_ask);
void write_json(const std::filesystem::path& file, const nlohmann::json& object);

}  // namespace echoline::testing
