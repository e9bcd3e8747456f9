// Rows of a JSON Lines file of any size: every row is read and checked when the file is opened, only where it begins is
// kept (about 60 bytes a row meanwhile and 24 afterwards), and a row is read again when it is asked for. Private to
// data_plane/adapters/.
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
#include "base/result.hpp"
#include "base/told.hpp"

namespace echoline::data_plane::maths {

inline constexpr std::size_t kRowBytesMax = 4u << 20;  // a line
inline constexpr std::size_t kRowsMax = 20'000'000;    // different ones in a file

// A problem as a data set has it.
struct Row {
  Told prompt;
  std::string reference;
  std::string demonstration = {};  // a worked answer; empty where the set has none
};

// What a JSON object says; kInvalid with what was expected. May be called from several threads at once.
using RowReader = std::function<Result<Row>(const nlohmann::json& row)>;

// One line as a row; kInvalid, also for a prompt or reference that a problem has no room for (schema.proto).
Result<Row> read_row(std::string_view line, const RowReader& reader);

// The string at `key`, which may be a key of the row or a path of keys with dots.
Result<std::string> text_at(const nlohmann::json& row, std::string_view key);
// The same where a whole number will do as well: its digits.
Result<std::string> text_or_number_at(const nlohmann::json& row, std::string_view key);
// The same for a prompt: a string, or a list of messages.
Result<Told> prompt_at(const nlohmann::json& row, std::string_view key);

class RowFile {
 public:
  // Rows that repeat an earlier one's prompt and reference are left out. kNotFound and kIo about the file; kInvalid as
  // `path:line: what was expected`; kExhausted beyond kRowsMax.
  static Result<RowFile> open(const std::filesystem::path& path, RowReader reader);

  std::size_t size() const { return places_.size(); }
  std::uint64_t repeated() const { return repeated_; }  // rows left out
  const std::filesystem::path& path() const { return path_; }

  // Row `index` < size(). kCorrupt when the file no longer says what it said. May be called from several threads at
  // once.
  Result<Row> row(std::size_t index) const;
  std::uint32_t line(std::size_t index) const { return places_[index].line; }      // from 1
  std::uint64_t prompt(std::size_t index) const { return places_[index].prompt; }  // a hash of its prompt
  // The index of the row in this line, if there is one.
  std::optional<std::size_t> at_line(std::uint32_t line) const;

  // Moves the rows whose prompt `chosen` picks, by its hash, to another object for the same file.
  RowFile split(const std::function<bool(std::uint64_t prompt)>& chosen);

 private:
  struct Place {
    std::uint64_t offset, prompt;
    std::uint32_t bytes, line;
  };
  RowFile(std::filesystem::path path, std::shared_ptr<const Descriptor> file, RowReader reader)
      : path_(std::move(path)), file_(std::move(file)), reader_(std::move(reader)) {}

  std::filesystem::path path_;
  std::shared_ptr<const Descriptor> file_;
  RowReader reader_;
  std::vector<Place> places_;  // in the order of lines
  std::uint64_t repeated_ = 0;
};

}  // namespace echoline::data_plane::maths
