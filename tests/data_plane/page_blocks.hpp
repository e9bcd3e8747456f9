// Files that a page of the documentation holds: code blocks whose first line names them, as in ```python sort.py
#pragma once
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

namespace echoline::testing {

inline std::map<std::string, std::string> page_blocks(const std::filesystem::path& page) {
  std::map<std::string, std::string> files;
  std::ifstream in(page);
  std::string name;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("```")) {
      inside = !inside;
      const auto blank = line.find(' ');
      name = inside && blank != std::string::npos ? line.substr(blank + 1) : "";
    } else if (inside && !name.empty()) {
      files[name] += line + "\n";
    }
  }
  return files;
}

}  // namespace echoline::testing
