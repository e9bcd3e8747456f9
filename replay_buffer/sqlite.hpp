// A thin wrapper of SQLite, private to this folder: bound parameters, errors as Result, transactions that roll back.
// Must not be included in public headers.
#pragma once
#include <sqlite3.h>

#include <cerrno>
#include <concepts>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>

#include "base/result.hpp"

namespace echoline::replay_buffer {

// Binds bytes as a BLOB; a plain string_view binds as TEXT.
struct Blob {
  std::string_view bytes;
};

// The current row of a running query; valid inside the callback only.
class Row {
 public:
  explicit Row(sqlite3_stmt* statement) : statement_(statement) {}
  std::uint64_t integer(int column) const {
    return static_cast<std::uint64_t>(sqlite3_column_int64(statement_, column));
  }
  double real(int column) const { return sqlite3_column_double(statement_, column); }
  bool is_null(int column) const { return sqlite3_column_type(statement_, column) == SQLITE_NULL; }
  // TEXT or BLOB.
  std::string_view bytes(int column) const {
    const void* data = sqlite3_column_blob(statement_, column);
    return data == nullptr ? std::string_view{}
                           : std::string_view(static_cast<const char*>(data),
                                              static_cast<std::size_t>(sqlite3_column_bytes(statement_, column)));
  }

 private:
  sqlite3_stmt* statement_;
};

// An open SQLite file. Use from one thread at a time.
class Database {
 public:
  // Opens or creates the file with a write-ahead log (WAL) and synchronous=FULL. No other process can open it until it
  // is closed.
  static Result<std::unique_ptr<Database>> open(const std::filesystem::path& path);
  Database(const Database&) = delete;
  Database& operator=(const Database&) = delete;

  // Runs one statement and ignores rows. Arguments bind to ?1, ?2, ... `sql` must be a string literal, because prepared
  // statements are cached by its address.
  template <class... Args>
  Status run(const char* sql, const Args&... args) {
    return each(
        sql, [](const Row&) {}, args...);
  }

  // Runs one statement and calls `on_row` for each row. As run() otherwise.
  template <class F, class... Args>
  Status each(const char* sql, F&& on_row, const Args&... args) {
    ECHO_ASSIGN(sqlite3_stmt* const statement, prepare(sql));
    const std::unique_ptr<sqlite3_stmt, int (*)(sqlite3_stmt*)> reset_after(statement, &sqlite3_reset);
    int index = 0;
    (bind(statement, ++index, args), ...);
    int code = SQLITE_ROW;
    errno = 0;  // error() reads errno after a failed call
    while ((code = sqlite3_step(statement)) == SQLITE_ROW) on_row(Row(statement));
    if (code != SQLITE_DONE) return error(code);
    return ok();
  }

  // The first column of the first row as an integer. Absent if there is no row or the value is NULL.
  template <class... Args>
  Result<std::optional<std::uint64_t>> first_integer(const char* sql, const Args&... args) {
    std::optional<std::uint64_t> value;
    ECHO_TRY(each(
        sql,
        [&](const Row& row) {
          if (!value && !row.is_null(0)) value = row.integer(0);
        },
        args...));
    return value;
  }

  // Rows changed by the last statement.
  std::uint64_t changes() const { return static_cast<std::uint64_t>(sqlite3_changes64(handle_.get())); }
  const std::filesystem::path& path() const { return path_; }
  // Translates a result code: kCorrupt, kExhausted (disk full), kUnavailable (in use) or kIo.
  Error error(int code) const;

 private:
  using Handle = std::unique_ptr<sqlite3, int (*)(sqlite3*)>;
  using Statement = std::unique_ptr<sqlite3_stmt, int (*)(sqlite3_stmt*)>;
  Database(std::filesystem::path path, Handle handle) : path_(std::move(path)), handle_(std::move(handle)) {}
  Result<sqlite3_stmt*> prepare(const char* sql);  // cached by the address of `sql`

  template <std::integral T>
  static void bind(sqlite3_stmt* statement, int index, T value) {
    sqlite3_bind_int64(statement, index, static_cast<sqlite3_int64>(value));
  }
  template <std::floating_point T>
  static void bind(sqlite3_stmt* statement, int index, T value) {
    sqlite3_bind_double(statement, index, value);
  }
  static void bind(sqlite3_stmt* statement, int index, std::string_view text) {
    sqlite3_bind_text64(statement, index, text.data(), text.size(), SQLITE_STATIC, SQLITE_UTF8);
  }
  template <class T>
  static void bind(sqlite3_stmt* statement, int index, const std::optional<T>& value) {
    if (value)
      bind(statement, index, *value);
    else
      sqlite3_bind_null(statement, index);
  }
  static void bind(sqlite3_stmt* statement, int index, const std::string& text) {
    bind(statement, index, std::string_view(text));
  }
  static void bind(sqlite3_stmt* statement, int index, Blob blob) {
    // A null pointer would bind NULL instead of an empty BLOB.
    sqlite3_bind_blob64(statement, index, blob.bytes.empty() ? "" : blob.bytes.data(), blob.bytes.size(),
                        SQLITE_STATIC);
  }

  std::filesystem::path path_;
  Handle handle_;
  std::map<const char*, Statement> statements_;  // declared last: SQLite wants them ended before the handle closes
};

// begin() runs BEGIN IMMEDIATE and commit() runs COMMIT. The destructor rolls back if commit() has not succeeded.
class Transaction {
 public:
  static Result<Transaction> begin(Database& database) {
    ECHO_TRY(database.run("BEGIN IMMEDIATE"));
    return Transaction(database);
  }
  Transaction(Transaction&& other) noexcept : database_(std::exchange(other.database_, nullptr)) {}
  Transaction& operator=(Transaction&&) = delete;
  ~Transaction() {
    if (database_ != nullptr) (void)database_->run("ROLLBACK").has_value();
  }
  Status commit() {
    ECHO_TRY(database_->run("COMMIT"));
    database_ = nullptr;
    return ok();
  }

 private:
  explicit Transaction(Database& database) : database_(&database) {}
  Database* database_;  // null after commit() or a move
};

}  // namespace echoline::replay_buffer
