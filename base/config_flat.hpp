// The values of a run file by dotted key, for comparing two run files.
#pragma once
#include <map>
#include <string>
#include <string_view>

#include "base/result.hpp"

namespace echoline {

// "learner.optimizer.weight_decay" -> "0.1". Sections in a list are numbered from 0: "tasks[1].weight". A list of plain
// values is one value, as JSON; an absent value is "null". kInvalid for text that is not YAML.
Result<std::map<std::string, std::string>> flat_config(std::string_view yaml);

}  // namespace echoline
