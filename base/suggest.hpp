// "Did you mean": the known word nearest to a mistyped one.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace echoline {

// The candidate with the fewest edits (insert, delete, replace, swap two neighbours; upper and lower case are
// alike), or nothing when none is near enough to be what was meant. The first of equals wins.
std::optional<std::string> suggest(std::string_view word, std::span<const std::string> candidates);

// "; did you mean 'staleness'?", or "" when there is no suggestion: ready to end a message with.
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

}  // namespace echoline
