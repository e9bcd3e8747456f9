// The cells of a sweep. A cell is one combination of values of the swept keys, with ranges and expressions evaluated.
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

// Keys with values as a run file writes them; each key occurs once.
using KeyValues = std::vector<std::pair<std::string, std::string>>;

// Keys that change together: a list of values for one key, or a list of settings of several keys.
struct SweepAxis {
  std::string source;             // where the user gave it: "--over S=1,2", "x.yaml: sweep.cells"
  std::vector<KeyValues> points;  // values as written: "3", "24 Mbit/s", "1..5", "S-1"
};

// "S" is short for staleness.budget, "kappa" for staleness.publish_every, "G" for rollout.group_size.
std::string full_key(std::string_view key);
// The short name if the key has one, for tables.
std::string short_key(std::string_view key);

// "KEY=V1,V2,...": commas in brackets and quotes belong to a value.
Result<SweepAxis> parse_over(std::string_view text);
// Splits the part of such a text after "KEY=" at its commas.
Result<std::vector<std::string>> split_values(std::string_view text);

// All keys, in the order in which the axes name them.
std::vector<std::string> swept_keys(const std::vector<SweepAxis>& axes);

// One combination. Its values can be written in several ways: with S = 2, kappa 1 is both "1" and "S-1".
struct GridCell {
  KeyValues values;
  std::vector<KeyValues> written;  // values as written; a range is replaced by its numbers
};

// All combinations of the axes' points in order, each once. `number_in_run_file` returns the run file's number for a
// key that is not swept; absent if the file has none. kInvalid names the axis and the value that cannot be evaluated.
Result<std::vector<GridCell>> expand(
    const std::vector<SweepAxis>& axes,
    const std::function<std::optional<double>(const std::string& key)>& number_in_run_file);

}  // namespace echoline::study
