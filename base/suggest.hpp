// "Did you mean": the known word nearest to a mistyped one.
#pragma once
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace echoline {

// The candidate with the fewest edits (insert, delete, replace, swap two neighbours; ignoring case), absent if
// none is near enough. The first of equals wins.
std::optional<std::string> suggest(std::string_view word, std::span<const std::string> candidates);

// "; did you mean 'staleness'?", or "" if there is no suggestion; for the end of a message.
std::string did_you_mean(std::string_view word, std::span<const std::string> candidates);

}  // namespace echoline
