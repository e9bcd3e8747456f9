#include "replay_buffer/stored.hpp"

#include <stdlib.h>

#include <array>
#include <fstream>
#include <optional>

#include "replay_buffer/store.hpp"

namespace echoline::replay_buffer {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kOpen = "read replay buffer";
constexpr int kTries = 50;
constexpr std::size_t kLogHeader = 32;  // of SQLite's write-ahead log; its salts change each time the log restarts

std::string log_header(const fs::path& log) {
  std::array<char, kLogHeader> bytes{};
  std::ifstream in(log, std::ios::binary);
  in.read(bytes.data(), bytes.size());
  return {bytes.data(), static_cast<std::size_t>(in.gcount())};
}

fs::path log_of(const fs::path& file) { return file.string() + "-wal"; }

// While the log does not restart, it has every page of the file that may have changed. So the copied file, even with
// torn pages, and the log copied after it are the state of the last complete transaction in the log.
Result<bool> copied(const fs::path& file, const fs::path& to) {
  const auto copy = [](const fs::path& from, const fs::path& into) -> Status {
    std::error_code ec;
    fs::remove(into, ec);
    if (!fs::copy_file(from, into, ec)) {
      if (ec == std::errc::no_such_file_or_directory)
        return fail(Code::kNotFound, kOpen, "{}: {}", from.string(), ec.message());
      return fail(ec == std::errc::no_space_on_device ? Code::kExhausted : Code::kIo, kOpen,
                  "{}: cannot be copied to {}: {}", from.string(), into.string(), ec.message());
    }
    return ok();
  };
  const std::string before = log_header(log_of(file));
  ECHO_TRY(copy(file, to));
  const Status log = copy(log_of(file), log_of(to));
  if (!log && log.error().code != Code::kNotFound) return log.error();
  return log_header(log_of(file)) == before && log_header(log_of(to)) == before;
}

Status enough_room(const fs::path& file, const fs::path& scratch) {
  std::error_code ec;
  const std::uint64_t size = fs::file_size(file, ec);
  const fs::space_info room = fs::space(scratch, ec);
  if (!ec && room.available < size + size / 8)
    return fail(Code::kExhausted, kOpen, "{}: a copy to read takes {}, {} has {}; set TMPDIR to another place",
                file.string(), to_text(Bytes{size + size / 8}), scratch.string(), to_text(Bytes{room.available}));
  return ok();
}

}  // namespace

Result<std::unique_ptr<Stored>> Stored::open(const fs::path& file, const fs::path& scratch) {
  std::error_code ec;
  if (!fs::is_regular_file(file, ec)) return fail(Code::kNotFound, kOpen, "{}: no such file", file.string());
  ECHO_TRY(enough_room(file, scratch));
  std::unique_ptr<Stored> stored(new Stored);
  std::string folder = (scratch / "echoline-replay-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr)
    return fail(Code::kIo, kOpen, "{}: no folder can be created there", scratch.string());
  stored->folder_ = folder;
  const fs::path copy = stored->folder_ / "replay.sqlite";
  bool whole = false;
  for (int tried = 0; tried < kTries && !whole; ++tried) {
    ECHO_ASSIGN(whole, copied(file, copy));
  }
  if (!whole)
    return fail(Code::kUnavailable, kOpen,
                "{}: its learner writes faster than it can be copied; try again, or wait for the end of the run",
                file.string());
  ECHO_ASSIGN(stored->database_, Database::open(copy));
  ECHO_ASSIGN(const auto application, stored->database_->one("PRAGMA application_id"));
  ECHO_ASSIGN(const auto version, stored->database_->one("PRAGMA user_version"));
  if (application != kApplicationId)
    return fail(Code::kInvalid, kOpen, "{}: an SQLite file of another program", file.string());
  if (version != kSchemaVersion)
    return fail(Code::kInvalid, kOpen, "{}: written with schema version {}, this release reads {}", file.string(),
                version.value_or(0), kSchemaVersion);
  fs::remove_all(stored->folder_, ec);  // both files are open, so nothing remains, however this process ends
  return stored;
}

Stored::~Stored() {
  database_.reset();
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

Result<StoredCounts> Stored::counts() {
  StoredCounts counts;
  ECHO_TRY(database_->each(
      "SELECT (SELECT count(*) FROM trajectory), (SELECT count(*) FROM groups), (SELECT count(*) FROM set_aside)",
      [&](const Row& row) {
        counts.trajectories = row.integer(0), counts.groups = row.integer(1), counts.set_aside = row.integer(2);
      }));
  ECHO_TRY(database_->each(
      "SELECT key, value FROM meta WHERE key IN ('group_size', 'pruned_consumed')",
      [&](const Row& row) { (row.bytes(0) == "group_size" ? counts.group_size : counts.pruned) = row.integer(1); }));
  ECHO_TRY(database_->each("SELECT reason, trajectories FROM rejected",
                           [&](const Row& row) { counts.rejected[std::string(row.bytes(0))] = row.integer(1); }));
  return counts;
}

Result<std::uint64_t> Stored::each(std::uint64_t most, const std::function<Status(StoredTrajectory)>& each) {
  std::uint64_t unreadable = 0;
  Status told = ok();
  ECHO_TRY(database_->each(
      "SELECT t.body, g.consumed_step, g.dropped_step FROM trajectory t JOIN groups g USING(group_id) "
      "WHERE ?1 = 0 OR t.rowid > (SELECT max(rowid) FROM trajectory) - ?1 ORDER BY t.group_id, t.member",
      [&](const Row& row) {
        if (!told) return;
        StoredTrajectory stored;
        const std::string_view body = row.bytes(0);
        if (!stored.trajectory.ParseFromArray(body.data(), static_cast<int>(body.size())) ||
            !data_plane::check(stored.trajectory)) {
          ++unreadable;
          return;
        }
        if (!row.is_null(1)) stored.consumed_step = row.integer(1);
        stored.stale = !row.is_null(2);
        told = each(std::move(stored));
      },
      most));
  if (!told) return std::move(told).error();
  return unreadable;
}

}  // namespace echoline::replay_buffer
