// Opens SQLite files, prepares statements and translates errors, for the classes of this folder.
#include "replay_buffer/sqlite.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "base/os_code.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr int kBusyTimeoutMs = 1000;  // wait for another process that has the file open
constexpr std::string_view kOperation = "replay buffer";
// The log is copied into the file at 8,000 pages of 4 kB. SQLite's default of 1,000 copies the pages of indexes more
// often, and syncs twice each time.
constexpr const char* kLogPagesPragma = "PRAGMA wal_autocheckpoint=8000";

// A new file survives power loss only after its folder's entry is on disk.
Status sync_folder(const std::filesystem::path& path) {
  const auto folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool is_synced = fd >= 0 && ::fsync(fd) == 0;
  if (fd >= 0) ::close(fd);
  if (!is_synced) return fail(Code::kIo, kOperation, "{}: cannot fsync the folder", folder.string());
  return ok();
}

}  // namespace

Result<std::unique_ptr<Database>> Database::open(const std::filesystem::path& path) {
  sqlite3* handle = nullptr;
  const int code =
      sqlite3_open_v2(path.c_str(), &handle, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  std::unique_ptr<Database> database(new Database(path, Handle(handle, &sqlite3_close)));
  if (code != SQLITE_OK) return database->error(code);
  sqlite3_extended_result_codes(handle, 1);
  sqlite3_busy_timeout(handle, kBusyTimeoutMs);
  // Locked exclusively, because two learners must never share a buffer. SQLite then keeps the
  // index of its write-ahead log in the heap, not in shared memory.
  for (const char* pragma :
       {"PRAGMA locking_mode=EXCLUSIVE", "PRAGMA journal_mode=WAL", "PRAGMA synchronous=FULL", kLogPagesPragma})
    ECHO_TRY(database->run(pragma));
  ECHO_TRY(sync_folder(path));
  return database;
}

Result<sqlite3_stmt*> Database::prepare(const char* sql) {
  const auto cached = statements_.find(sql);  // by address, because `sql` is a literal
  if (cached != statements_.end()) return cached->second.get();
  sqlite3_stmt* statement = nullptr;
  const int code = sqlite3_prepare_v3(handle_.get(), sql, -1, SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
  if (code != SQLITE_OK) return error(code);
  statements_.emplace(sql, Statement(statement, &sqlite3_finalize));
  return statement;
}

Error Database::error(int code) const {
  const char* message = handle_ ? sqlite3_errmsg(handle_.get()) : sqlite3_errstr(code);
  int primary_code = code & 0xff;  // the lowest byte is the primary code, the others extend it
  // SQLite reports an exhausted quota, or a sync without space, as an I/O error.
  if (primary_code == SQLITE_IOERR && os_code(errno) == Code::kExhausted) primary_code = SQLITE_FULL;
  switch (primary_code) {
    case SQLITE_CORRUPT:
    case SQLITE_NOTADB:
      return fail(Code::kCorrupt, kOperation,
                  "{}: not a valid SQLite file ({}); move it and its -wal file away and resume from the last "
                  "checkpoint: its rollouts are lost, the policy is not",
                  path_.string(), message);
    case SQLITE_FULL:
      return fail(Code::kExhausted, kOperation, "{}: the disk is full", path_.string());
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return fail(Code::kUnavailable, kOperation, "{}: another process has opened it; stop that learner first",
                  path_.string());
    default:
      return fail(Code::kIo, kOperation, "{}: {} (SQLite code {})", path_.string(), message, code);
  }
}

}  // namespace echoline::replay_buffer
