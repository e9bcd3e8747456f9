// The files that a simulated run can name: lengths of responses, and machines that were taken away or became slow.
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

// Rows of cells between commas; '#' begins a remark, the first row may be a title. `name` stands for the file in
// messages. A bad file is one kInvalid error whose detail says `file:line: ...` for each of the first problems.

// tokens,weight
Result<Histogram> parse_lengths(std::string_view text, std::string_view name);
// seconds,share[,region]: at this time of the run that share of the machines that work (there) is taken away.
// Ascending.
Result<std::vector<Preemption>> parse_preemptions(std::string_view text, std::string_view name,
                                                  std::span<const std::string> regions);
// seconds,share,tokens,links,lasts[,region]: at this time that share of the machines that work (there) has so much left
// of its tokens/s and of its links, for so many seconds; 0: for good. Ascending.
Result<std::vector<Slowdown>> parse_slowdowns(std::string_view text, std::string_view name,
                                              std::span<const std::string> regions);

}  // namespace echoline::sim
