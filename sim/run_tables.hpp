// Parses table files of a simulated run: response lengths, and losses and slowdowns of machines.
#pragma once
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "sim/run_scenario.hpp"

namespace echoline::sim {

inline constexpr std::size_t kTableRowsMax = 1'000'000;
inline constexpr std::uint64_t kTableBytesMax = 64u << 20;

// A file has rows of cells separated by commas. '#' begins a comment, and the first row may be a header. A bad file
// gives one kInvalid error with a line `name:line: ...` for each of the first problems.

// tokens,weight
Result<Histogram> parse_lengths(std::string_view text, std::string_view name);
// seconds,share[,region]: at this time, this share of the working machines (in the region) is taken away. In order of
// time.
Result<std::vector<Preemption>> parse_preemptions(std::string_view text, std::string_view name,
                                                  std::span<const std::string> regions);
// seconds,share,tokens,links,lasts[,region]: at this time, this share of the working machines (in the region) keeps
// these shares of its tokens/s and links for `lasts` seconds; 0: for good. In order of time.
Result<std::vector<Slowdown>> parse_slowdowns(std::string_view text, std::string_view name,
                                              std::span<const std::string> regions);

}  // namespace echoline::sim
