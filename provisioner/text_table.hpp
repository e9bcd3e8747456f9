// Formats tables and lines of text to a screen's width. Private to provisioner/.
#pragma once
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace echoline::provisioner {

struct Column {
  std::string title;
  bool right = false;
  int drop = 0;  // columns are dropped in descending order if the screen is too narrow; 0: never
};

// A table with columns as wide as their widest cell; numbers are right-aligned.
class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)), rows_(1) {
    for (const Column& column : columns_) rows_.front().push_back(column.title);
  }
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string text(std::size_t most) const {
    std::vector<std::size_t> width(columns_.size(), 0);
    for (const auto& row : rows_)
      for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size() + 1);
    while (std::accumulate(width.begin(), width.end(), std::size_t{0}) > most + 1) {
      std::size_t worst = 0;
      for (std::size_t c = 0; c < columns_.size(); ++c)
        if (width[c] > 0 && columns_[c].drop > (width[worst] > 0 ? columns_[worst].drop : -1)) worst = c;
      if (columns_[worst].drop == 0) break;
      width[worst] = 0;
    }
    std::string out;
    for (const auto& row : rows_) {
      std::string line;
      for (std::size_t c = 0; c < row.size(); ++c) {
        if (width[c] == 0) continue;
        if (!line.empty()) line += ' ';
        line += columns_[c].right ? fmt::format("{:>{}}", row[c], width[c] - 1)
                                  : fmt::format("{:<{}}", row[c], width[c] - 1);
      }
      while (!line.empty() && line.back() == ' ') line.pop_back();
      out += line + '\n';
    }
    return out;
  }

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Breaks lines between words and indents the rest; unchanged if the screen's width is unknown.
inline std::string folded(std::string_view text, std::optional<std::size_t> screen) {
  if (!screen) return std::string(text);
  std::size_t columns = std::max<std::size_t>(*screen, 40);
  std::string out;
  bool first = true;
  while (text.size() > columns) {
    const std::size_t at = text.rfind(' ', columns);
    if (at == std::string_view::npos || text.find_first_not_of(' ') >= at) break;
    out += std::string(text.substr(0, at)) + "\n  ";
    text.remove_prefix(at + 1);
    if (std::exchange(first, false)) columns -= 2;
  }
  return out + std::string(text);
}

}  // namespace echoline::provisioner
