// Pages of metrics.jsonl for the API call /v1/metrics.
#include "learner/external/row_pages.hpp"

#include <algorithm>
#include <deque>

namespace echoline::learner {
namespace {

constexpr std::uint64_t kRowsPerMark = 4096;  // a mark is the known place of a row

}  // namespace

RowPlace RowPages::mark_before(std::uint64_t row) const {
  const std::lock_guard lock(mutex_);
  const auto next_mark =
      std::upper_bound(marks_.begin(), marks_.end(), row,
                       [](std::uint64_t wanted_row, const RowPlace& mark) { return wanted_row < *mark.row; });
  return next_mark == marks_.begin() ? RowPlace{} : *std::prev(next_mark);
}

void RowPages::add_mark(const RowPlace& place) {
  const std::lock_guard lock(mutex_);
  if (marks_.empty() || *marks_.back().row < *place.row) marks_.push_back(place);
}

Result<RowPage> RowPages::after(std::uint64_t rows_before, std::uint64_t rows_max) {
  ECHO_ASSIGN(RowFile file, RowFile::open(path_, mark_before(rows_before)));
  while (*file.place().row < rows_before) {
    ECHO_ASSIGN(const auto skipped, file.next());
    if (!skipped) break;
    if (*file.place().row % kRowsPerMark == 0) add_mark(file.place());
  }
  RowPage page{.rows = "[", .next = {}, .more = false};
  // Rows are parsed only to report a damaged file. The page contains them unchanged.
  for (std::uint64_t row_count = 0; row_count < std::min(rows_max, kPageRowsMax) && page.rows.size() < kPageBytesMax;
       ++row_count) {
    ECHO_ASSIGN(const auto text, file.next_checked());
    if (!text) break;
    if (row_count > 0) page.rows += ',';
    page.rows += *text;
  }
  page.rows += ']';
  page.next = file.place().row;
  const auto next_row = file.next();
  page.more = !next_row || next_row->has_value();  // an error shows in the next page
  return page;
}

Result<RowPage> RowPages::last(std::uint64_t rows_max) {
  ECHO_ASSIGN(const RowPlace begin, last_rows(path_, std::min(rows_max, kPageRowsMax)));
  ECHO_ASSIGN(RowFile file, RowFile::open(path_, begin));
  std::deque<std::string> rows;
  std::size_t bytes = 0;
  for (;;) {
    ECHO_ASSIGN(const auto text, file.next_checked());
    if (!text) break;
    rows.emplace_back(*text);
    bytes += text->size() + 1;
    for (; rows.size() > 1 && (bytes > kPageBytesMax || rows.size() > rows_max); rows.pop_front())
      bytes -= rows.front().size() + 1;
  }
  if (rows_max == 0) rows.clear();  // the loop above keeps at least one row
  RowPage page{.rows = "[", .next = {}, .more = false};
  for (const std::string& row : rows) page.rows += (page.rows.size() > 1 ? "," : "") + row;
  page.rows += ']';
  return page;
}

}  // namespace echoline::learner
