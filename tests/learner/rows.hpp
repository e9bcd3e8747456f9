// All rows of a small file of a run, for tests to look at.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "learner/row_file.hpp"

namespace echoline::learner {

inline Result<std::vector<nlohmann::json>> read_json_lines(const std::filesystem::path& path) {
  std::vector<nlohmann::json> rows;
  ECHO_TRY(each_row(path, [&](nlohmann::json row) { return rows.push_back(std::move(row)), ok(); }));
  return rows;
}

}  // namespace echoline::learner
