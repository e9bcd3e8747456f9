// Rows of a JSON Lines file of any size. open() reads and checks every row but keeps only its position (about 60 bytes
// per row while reading, 24 afterwards); row() reads it again. Private to data_plane/adapters/.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/files.hpp"
#include "base/policy_input.hpp"
#include "base/result.hpp"

namespace echoline::data_plane::maths {

inline constexpr std::size_t kRowBytesMax = 4u << 20;  // limit of a line
inline constexpr std::size_t kRowsMax = 20'000'000;    // different rows per file

// One row as a problem.
struct Row {
  PolicyInput prompt;
  std::string reference;
  std::string demonstration = {};  // a worked solution; empty if the data set has none
};

// Turns a JSON object into a row; kInvalid with what was expected. Here and in the functions below, the error has no
// operation and no line number; the caller adds both. May be called from several threads at once.
using RowReader = std::function<Result<Row>(const nlohmann::json& row)>;

// Reads one line as a row. kInvalid, also for a prompt or reference longer than a problem may have (schema.proto).
Result<Row> read_row(std::string_view line, const RowReader& reader);

// The string at `key`, which is a key of the row or a path of keys with dots.
Result<std::string> text_at(const nlohmann::json& row, std::string_view key);
// Like text_at(), but also accepts a whole number and returns its digits.
Result<std::string> text_or_number_at(const nlohmann::json& row, std::string_view key);
// Like text_at(), but for a prompt: a string or a list of messages.
Result<PolicyInput> prompt_at(const nlohmann::json& row, std::string_view key);

// Immutable, except for move_out().
class RowFile {
 public:
  // Leaves out rows that repeat an earlier row's prompt and reference. kNotFound, kIo: the file cannot be read.
  // kInvalid: a row is wrong; the message is `path:line: what was expected`. kExhausted: more than kRowsMax rows.
  static Result<RowFile> open(const std::filesystem::path& path, RowReader reader);

  std::size_t size() const { return places_.size(); }
  std::uint64_t repeated() const { return repeated_; }  // rows left out
  const std::filesystem::path& path() const { return path_; }

  // Reads row `index` < size(). kCorrupt if the file has changed. May be called from several threads at once.
  Result<Row> row(std::size_t index) const;
  std::uint32_t line(std::size_t index) const { return places_[index].line; }  // line number, from 1
  std::uint64_t prompt_hash(std::size_t index) const { return places_[index].prompt_hash; }
  std::optional<std::size_t> index_of_line(std::uint32_t line) const;

  // Moves the rows whose prompt hash `is_chosen` accepts to a new RowFile of the same file, and returns that.
  RowFile move_out(const std::function<bool(std::uint64_t prompt_hash)>& is_chosen);

 private:
  // A line in the file.
  struct RowPlace {
    std::uint64_t offset, prompt_hash;
    std::uint32_t bytes, line;
  };
  RowFile(std::filesystem::path path, std::shared_ptr<const Descriptor> file, RowReader reader)
      : path_(std::move(path)), file_(std::move(file)), reader_(std::move(reader)) {}

  std::filesystem::path path_;
  std::shared_ptr<const Descriptor> file_;
  RowReader reader_;
  std::vector<RowPlace> places_;  // sorted by line number
  std::uint64_t repeated_ = 0;
};

}  // namespace echoline::data_plane::maths
