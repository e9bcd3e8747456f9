// The cells of a sweep: every combination of the values that its keys are given, with ranges and expressions worked
// out.
#pragma once
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace echoline::study {

inline constexpr std::size_t kSweptKeysMax = 16;
inline constexpr std::size_t kSweepCellsMax = 10'000;

// Keys with their values as a run file writes them, each key once.
using KeyValues = std::vector<std::pair<std::string, std::string>>;

// What changes together. A list of values for one key, or a list of settings of several.
struct SweepAxis {
  std::string said;               // where, for messages: "--over S=1,2", "x.yaml: sweep.cells"
  std::vector<KeyValues> points;  // values are texts as they were given: "3", "24 Mbit/s", "1..5", "S-1"
};

// "S" and "kappa" are words for staleness.budget and staleness.publish_every, "G" for rollout.group_size.
std::string full_key(std::string_view key);
// The other way: what a table calls the key.
std::string short_key(std::string_view key);

// "KEY=V1,V2,...": commas in brackets and quotes belong to a value.
Result<SweepAxis> parse_over(std::string_view text);
// The values of one key as they stand behind "KEY=".
Result<std::vector<std::string>> split_values(std::string_view text);

// All keys, in the order in which the axes name them.
std::vector<std::string> swept_keys(const std::vector<SweepAxis>& axes);

// A combination. Several ways of writing may come to it: with S = 2, kappa is 1 as "1" and as "S-1".
struct GridCell {
  KeyValues values;
  std::vector<KeyValues> given;  // texts as they were given, but numbers of a range one by one
};

// The combinations, in order, each once. `fixed` gives the number that a key has which is not swept, where it has one.
// kInvalid for values that cannot be worked out, with the axis and the text that says so.
Result<std::vector<GridCell>> expand(const std::vector<SweepAxis>& axes,
                                     const std::function<std::optional<double>(const std::string& key)>& fixed);

}  // namespace echoline::study
