// Copies a replay buffer's SQLite file, which a learner may be writing, and reads the copy. For cli/rescore.
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
constexpr int kCopyAttemptsMax = 50;  // attempts to copy the file while its learner does not write
// Header of SQLite's write-ahead log. It holds random salts, which change each time the log restarts.
constexpr std::size_t kWalHeaderBytes = 32;

std::string log_header(const fs::path& log) {
  std::array<char, kWalHeaderBytes> bytes{};
  std::ifstream log_stream(log, std::ios::binary);
  log_stream.read(bytes.data(), bytes.size());
  return {bytes.data(), static_cast<std::size_t>(log_stream.gcount())};
}

fs::path log_of(const fs::path& file) { return file.string() + "-wal"; }

// Copies the file and its log. Returns whether the copy is consistent, that is, whether the log did not restart
// meanwhile. Until the log restarts, it holds every page of the file that may have changed. So the copied file, even
// with torn pages, and the log copied after it contain the state after the last complete transaction in the log.
Result<bool> copy_file_and_log(const fs::path& file, const fs::path& to) {
  const auto copy = [](const fs::path& from, const fs::path& into) -> Status {
    std::error_code error;
    fs::remove(into, error);
    if (!fs::copy_file(from, into, error)) {
      if (error == std::errc::no_such_file_or_directory)
        return fail(Code::kNotFound, kOpen, "{}: {}", from.string(), error.message());
      return fail(error == std::errc::no_space_on_device ? Code::kExhausted : Code::kIo, kOpen,
                  "{}: cannot be copied to {}: {}", from.string(), into.string(), error.message());
    }
    return ok();
  };
  const std::string header_before = log_header(log_of(file));
  ECHO_TRY(copy(file, to));
  const Status log_copied = copy(log_of(file), log_of(to));
  if (!log_copied && log_copied.error().code != Code::kNotFound) return log_copied.error();
  return log_header(log_of(file)) == header_before && log_header(log_of(to)) == header_before;
}

Status check_free_space(const fs::path& file, const fs::path& scratch) {
  std::error_code error;
  const std::uint64_t file_bytes = fs::file_size(file, error);
  const fs::space_info space = fs::space(scratch, error);
  const std::uint64_t needed_bytes = file_bytes + file_bytes / 8;  // an eighth more for the log
  // If a size cannot be read, copying the file reports the error.
  if (!error && space.available < needed_bytes)
    return fail(Code::kExhausted, kOpen,
                "{}: a copy must be read, which needs {}, but {} has only {} free; set TMPDIR to another folder",
                file.string(), to_text(Bytes{needed_bytes}), scratch.string(), to_text(Bytes{space.available}));
  return ok();
}

}  // namespace

Result<std::unique_ptr<StoredBuffer>> StoredBuffer::open(const fs::path& file, const fs::path& scratch) {
  std::error_code ignored;
  if (!fs::is_regular_file(file, ignored)) return fail(Code::kNotFound, kOpen, "{}: no such file", file.string());
  ECHO_TRY(check_free_space(file, scratch));
  std::unique_ptr<StoredBuffer> stored(new StoredBuffer);
  std::string folder = (scratch / "echoline-replay-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr)
    return fail(Code::kIo, kOpen, "{}: no folder can be created there", scratch.string());
  stored->folder_ = folder;
  const fs::path copy = stored->folder_ / "replay.sqlite";
  bool is_consistent = false;
  for (int attempt = 0; attempt < kCopyAttemptsMax && !is_consistent; ++attempt) {
    ECHO_ASSIGN(is_consistent, copy_file_and_log(file, copy));
  }
  if (!is_consistent)
    return fail(Code::kUnavailable, kOpen,
                "{}: its learner writes faster than it can be copied; try again, or wait for the end of the run",
                file.string());
  ECHO_ASSIGN(stored->database_, Database::open(copy));
  ECHO_ASSIGN(const auto application_id, stored->database_->first_integer("PRAGMA application_id"));
  ECHO_ASSIGN(const auto version, stored->database_->first_integer("PRAGMA user_version"));
  if (application_id != kApplicationId)
    return fail(Code::kInvalid, kOpen, "{}: an SQLite file of another program", file.string());
  if (version != kSchemaVersion)
    return fail(Code::kInvalid, kOpen, "{}: written with schema version {}, this release reads {}", file.string(),
                version.value_or(0), kSchemaVersion);
  // Removed at once, so that no file is left behind, however this process ends. Both files are open and stay readable.
  fs::remove_all(stored->folder_, ignored);
  return stored;
}

StoredBuffer::~StoredBuffer() {
  database_.reset();
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

Result<StoredCounts> StoredBuffer::counts() {
  StoredCounts counts;
  ECHO_TRY(database_->each(
      "SELECT (SELECT count(*) FROM trajectory), (SELECT count(*) FROM groups), (SELECT count(*) FROM set_aside)",
      [&](const Row& row) {
        counts.trajectories = row.integer(0);
        counts.groups = row.integer(1);
        counts.set_aside = row.integer(2);
      }));
  ECHO_TRY(database_->each("SELECT key, value FROM meta WHERE key IN ('group_size', 'pruned_consumed')",
                           [&](const Row& row) {
                             if (row.bytes(0) == "group_size")
                               counts.group_size = row.integer(1);
                             else
                               counts.pruned = row.integer(1);
                           }));
  ECHO_TRY(database_->each("SELECT reason, trajectories FROM rejected",
                           [&](const Row& row) { counts.rejected[std::string(row.bytes(0))] = row.integer(1); }));
  return counts;
}

Result<std::uint64_t> StoredBuffer::each(std::uint64_t newest_max,
                                         const std::function<Status(StoredTrajectory)>& visit) {
  std::uint64_t unreadable = 0;
  Status visit_status = ok();
  ECHO_TRY(database_->each(
      "SELECT t.body, g.consumed_step, g.dropped_step FROM trajectory t JOIN groups g USING(group_id) "
      "WHERE ?1 = 0 OR t.rowid > (SELECT max(rowid) FROM trajectory) - ?1 ORDER BY t.group_id, t.member",
      [&](const Row& row) {
        if (!visit_status) return;
        StoredTrajectory stored;
        const std::string_view body = row.bytes(0);
        if (!stored.trajectory.ParseFromArray(body.data(), static_cast<int>(body.size())) ||
            !data_plane::check(stored.trajectory)) {
          ++unreadable;
          return;
        }
        if (!row.is_null(1)) stored.consumed_step = row.integer(1);
        stored.stale = !row.is_null(2);
        visit_status = visit(std::move(stored));
      },
      newest_max));
  if (!visit_status) return std::move(visit_status).error();
  return unreadable;
}

}  // namespace echoline::replay_buffer
