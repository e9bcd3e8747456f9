// SQLite access of the ledger: statements, transactions, and migrations of older files. Private to provisioner/.
#pragma once
#include <sqlite3.h>

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/result.hpp"

namespace echoline::provisioner::ledger {

struct CloseDatabase {
  void operator()(sqlite3* db) const { sqlite3_close(db); }
};
using Database = std::unique_ptr<sqlite3, CloseDatabase>;

// Opens or creates the file and migrates it. kIo if it cannot be opened; kCorrupt if it is not a ledger or is newer.
Result<Database> open(const std::filesystem::path& path);

Error sqlite_error(sqlite3* db, std::string_view what);
Status execute(sqlite3* db, const char* sql);

class Statement {
 public:
  static Result<Statement> prepare(sqlite3* db, const std::string& sql);
  explicit Statement(sqlite3* db) : db_(db) {}
  Statement(Statement&& o) noexcept
      : db_(o.db_), statement_(std::exchange(o.statement_, nullptr)), next_parameter_(o.next_parameter_) {}
  Statement& operator=(Statement&&) = delete;
  ~Statement() { sqlite3_finalize(statement_); }

  // Each call binds the next parameter, from left to right.
  Statement& bind(const std::string& text);
  Statement& bind(std::int64_t number);
  Statement& bind(double number);
  Statement& bind(const std::optional<double>& number);
  // Moves to the next row, or executes a statement without rows. False if there is no row.
  Result<bool> step();
  // Values of the current row; columns count from 0, parameters from 1.
  std::string text(int column) const;
  std::int64_t integer(int column) const { return sqlite3_column_int64(statement_, column); }
  double real(int column) const { return sqlite3_column_double(statement_, column); }
  std::optional<double> optional_real(int column) const;

 private:
  sqlite3* db_;
  sqlite3_stmt* statement_ = nullptr;
  int next_parameter_ = 1;
};

// Commits all writes of `body`, or none if it fails.
template <class Body>
Status transaction(sqlite3* db, Body&& body) {
  ECHO_TRY(execute(db, "BEGIN IMMEDIATE"));
  Status status = body();
  if (status) status = execute(db, "COMMIT");
  if (!status) (void)sqlite3_exec(db, "ROLLBACK", nullptr, nullptr, nullptr);
  return status;
}

}  // namespace echoline::provisioner::ledger
