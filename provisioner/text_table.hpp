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
  bool right_aligned = false;
  int drop_rank = 0;  // if the screen is too narrow, the column with the highest number is dropped first; 0: never
};

// A table whose columns are as wide as their widest cells.
class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)), rows_(1) {
    for (const Column& column : columns_) rows_.front().push_back(column.title);
  }
  void add_row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  std::string to_text(std::size_t columns_max) const {
    // The width of each column, with the space before it; 0: the column is dropped.
    std::vector<std::size_t> width(columns_.size(), 0);
    for (const auto& row : rows_)
      for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size() + 1);
    // + 1, because no space stands before the first column.
    while (std::accumulate(width.begin(), width.end(), std::size_t{0}) > columns_max + 1) {
      std::optional<std::size_t> next_dropped;
      for (std::size_t c = 0; c < columns_.size(); ++c) {
        const bool is_dropped = width[c] == 0;
        if (is_dropped || columns_[c].drop_rank == 0) continue;
        if (!next_dropped || columns_[c].drop_rank > columns_[*next_dropped].drop_rank) next_dropped = c;
      }
      if (!next_dropped) break;
      width[*next_dropped] = 0;
    }
    std::string out;
    for (const auto& row : rows_) {
      std::string line;
      for (std::size_t c = 0; c < row.size(); ++c) {
        if (width[c] == 0) continue;
        if (!line.empty()) line += ' ';
        line += columns_[c].right_aligned ? fmt::format("{:>{}}", row[c], width[c] - 1)
                                          : fmt::format("{:<{}}", row[c], width[c] - 1);
      }
      while (!line.empty() && line.back() == ' ') line.pop_back();
      out += line + '\n';
    }
    return out;
  }

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;  // the titles first
};

// Breaks a line between words, and indents all lines but the first. Returns it unchanged if the screen's width is
// unknown.
inline std::string folded(std::string_view text, std::optional<std::size_t> screen_columns) {
  if (!screen_columns) return std::string(text);
  constexpr std::string_view kBreak = "\n  ";
  constexpr std::size_t kColumnsMin = 40, kIndent = 2;
  std::size_t columns = std::max(*screen_columns, kColumnsMin);
  std::string out;
  bool is_first_line = true;
  while (text.size() > columns) {
    const std::size_t space = text.rfind(' ', columns);
    const bool has_word_before = space != std::string_view::npos && text.find_first_not_of(' ') < space;
    if (!has_word_before) break;
    out.append(text.substr(0, space)).append(kBreak);
    text.remove_prefix(space + 1);
    if (std::exchange(is_first_line, false)) columns -= kIndent;
  }
  return out + std::string(text);
}

}  // namespace echoline::provisioner
