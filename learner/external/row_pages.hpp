// Pages of a growing JSON Lines file, for callers that have its first rows already. Private to learner/external.
#pragma once
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "learner/row_file.hpp"

namespace echoline::learner {

inline constexpr std::uint64_t kPageRowsMax = 10'000;
inline constexpr std::size_t kPageBytesMax = 1 << 20;  // a page ends with the row that reaches it

struct RowPage {
  std::string rows = "[]";            // a JSON array, at most kPageBytesMax + kRowBytesMax
  std::optional<std::uint64_t> next;  // number of file rows up to the page's end; absent in a page of the last rows
  bool more = false;                  // complete rows follow
};

// Thread-safe. Memory: 16 bytes for every 4,096 rows.
class RowPages {
 public:
  explicit RowPages(std::filesystem::path path) : path_(std::move(path)) {}

  // The rows after the first `rows_before`: at most `rows_max`, and at most one page. kCorrupt, kIo, kNotFound:
  // learner/row_file.hpp.
  Result<RowPage> after(std::uint64_t rows_before, std::uint64_t rows_max);
  // The last `rows_max` rows: at most kPageRowsMax, and at most one page, counted from the end.
  Result<RowPage> last(std::uint64_t rows_max);

 private:
  RowPlace mark_before(std::uint64_t row) const;  // the last mark at or before row `row`, counted from 0
  void add_mark(const RowPlace& place);

  std::filesystem::path path_;
  mutable std::mutex mutex_;
  std::vector<RowPlace> marks_;  // known places of every 4,096th row, ascending; guarded by mutex_
};

}  // namespace echoline::learner
