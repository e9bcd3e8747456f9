// Rows of a JSON Lines file of a run (events.jsonl, metrics.jsonl), read in blocks. Memory is that of one block and one
// row, however long the file is. A last row without its end, as a crash leaves it, is no row; a reader leaves it out.
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

inline constexpr std::size_t kRowBytesMax = 1 << 20;      // of a row without its end; RunRecord writes no longer ones
inline constexpr std::size_t kRowBlockBytes = 256 << 10;  // read at a time

// Where a row begins.
struct RowPlace {
  std::uint64_t offset = 0;              // bytes
  std::optional<std::uint64_t> row = 0;  // rows before it; absent: not known, because the place was found from the end
};

// One thread. The file may grow meanwhile.
class RowFile {
 public:
  // kNotFound, kIo: as the system says.
  static Result<RowFile> open(const std::filesystem::path& path, RowPlace from = {});

  // The text of the next row without its end, valid until the next call; nothing after the last whole row. kCorrupt,
  // with file and line, for a row of more than kRowBytesMax. kIo.
  Result<std::optional<std::string_view>> next();
  // The same; kCorrupt, with file and line, for a row that is no JSON object.
  Result<std::optional<std::string_view>> next_checked();
  Result<std::optional<nlohmann::json>> next_object();

  // Where the next row begins.
  const RowPlace& place() const { return place_; }
  // Bytes of the buffer: at most kRowBytesMax + 2 * kRowBlockBytes.
  std::size_t buffer_bytes() const { return buffer_.capacity(); }

 private:
  RowFile(std::filesystem::path path, int fd, RowPlace from);
  Error corrupt(std::string_view found) const;
  Result<bool> read_block();

  std::filesystem::path path_;
  std::unique_ptr<Descriptor> fd_;
  RowPlace place_;
  std::string buffer_;
  std::size_t begin_ = 0, scanned_ = 0,
              end_ = 0;          // of what is in the buffer: the next row, what holds no row's end, all
  std::uint64_t left_out_ = 0;   // bytes of a row that is too long
  std::uint64_t row_begin_ = 0;  // of the row that next() returned last, or complains of
};

// Calls `visit` with every row in turn. An error of `visit` ends it and is returned; so is one of the file.
Status each_row(const std::filesystem::path& path, const std::function<Status(nlohmann::json)>& visit);

// Where the last `rows` rows begin, found from the file's end in blocks.
Result<RowPlace> last_rows(const std::filesystem::path& path, std::uint64_t rows);

// Cuts off a last row without its end, found from the file's end in blocks. No error when there is no file.
Status cut_torn_row(const std::filesystem::path& path);

}  // namespace echoline::learner
