// Reads a run's JSON Lines files (events.jsonl, metrics.jsonl) in blocks. It needs memory for one block and one row,
// however long the file is. A crash may leave an incomplete last row, which readers ignore.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "base/files.hpp"
#include "base/result.hpp"

namespace echoline::learner {

inline constexpr std::size_t kRowBytesMax = 1 << 20;      // without the newline; RunRecord writes no longer rows
inline constexpr std::size_t kRowBlockBytes = 256 << 10;  // bytes per read

// The beginning of a row.
struct RowPlace {
  std::uint64_t offset = 0;              // bytes
  std::optional<std::uint64_t> row = 0;  // rows before it; absent: unknown, because the place was found from the end
};

// One thread. Another process may append to the file meanwhile.
class RowFile {
 public:
  // kNotFound, kIo.
  static Result<RowFile> open(const std::filesystem::path& path, RowPlace from = {});

  // The next row without its newline, valid until the next call; absent after the last complete row. kCorrupt, with
  // file and line, for a row of more than kRowBytesMax. kIo.
  Result<std::optional<std::string_view>> next();
  // The same, and kCorrupt, with file and line, for a row that is not a JSON object.
  Result<std::optional<std::string_view>> next_checked();
  Result<std::optional<nlohmann::json>> next_object();

  // The beginning of the next row.
  const RowPlace& place() const { return place_; }
  // Bytes of the buffer, at most kRowBytesMax + 2 * kRowBlockBytes.
  std::size_t buffer_bytes() const { return buffer_.capacity(); }

 private:
  RowFile(std::filesystem::path path, int fd, RowPlace from);
  Error corrupt(std::string_view found) const;
  Result<bool> read_block();

  std::filesystem::path path_;
  std::unique_ptr<Descriptor> fd_;
  RowPlace place_;
  std::string buffer_;
  // Places in the buffer: the start of the next row, the end of the bytes searched for its newline, and the end of the
  // data.
  std::size_t begin_ = 0, scanned_ = 0, end_ = 0;
  std::uint64_t skipped_bytes_ = 0;  // bytes already dropped from the buffer of a next row that is too long
  std::uint64_t row_begin_ = 0;      // of the last row that next() returned or reported
};

// Calls `visit` with every row in order. Ends with the first error of `visit` or of the file.
Status each_row(const std::filesystem::path& path, const std::function<Status(nlohmann::json)>& visit);

// The beginning of the last `rows` rows, found by reading blocks from the file's end.
Result<RowPlace> last_rows(const std::filesystem::path& path, std::uint64_t rows);

// Cuts off an incomplete last row, found by reading blocks from the file's end. No error if there is no file.
Status cut_torn_row(const std::filesystem::path& path);

}  // namespace echoline::learner
