// Opens the ledger's SQLite file and migrates older ones; ledger.cpp calls it.
#include "provisioner/ledger_database.hpp"

#include <array>

#include "base/files.hpp"

namespace echoline::provisioner::ledger {
namespace {

constexpr std::string_view kOperation = "ledger";
constexpr int kApplicationId = 0x4563684c;  // "EchL"
constexpr int kBusyMs = 5000;               // how long a call waits for another process's transaction

// Migration i leads from version i to i + 1. All are applied to a new file.
constexpr std::array kMigrations{
    // 0 to 1
    R"sql(
  CREATE TABLE instances (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    offer TEXT NOT NULL,
    provider TEXT NOT NULL,
    instance TEXT NOT NULL DEFAULT '',
    state TEXT NOT NULL CHECK (state IN ('intended', 'running', 'ended', 'failed')),
    usd_per_hour REAL NOT NULL,
    upload_usd_per_gb REAL,
    download_usd_per_gb REAL,
    uploaded_bytes INTEGER NOT NULL DEFAULT 0,
    downloaded_bytes INTEGER NOT NULL DEFAULT 0,
    intended_unix_s REAL NOT NULL,
    running_unix_s REAL,
    ended_unix_s REAL,
    note TEXT NOT NULL DEFAULT ''
  );
  CREATE INDEX instances_by_run ON instances (run, id);
)sql",
    // 1 to 2: when the instance was last known to run, and whether all prices were known
    R"sql(
  ALTER TABLE instances ADD COLUMN alive_unix_s REAL;
  ALTER TABLE instances ADD COLUMN price_known INTEGER NOT NULL DEFAULT 1;
)sql",
    // 2 to 3: known machines, the history of states, prices over time, and decisions
    R"sql(
  CREATE TABLE runs (
    name TEXT PRIMARY KEY,
    mark TEXT NOT NULL  -- random, part of every label: runs of the same name do not adopt each other's machines
  ) WITHOUT ROWID;
  ALTER TABLE instances ADD COLUMN label TEXT NOT NULL DEFAULT '';
  ALTER TABLE instances ADD COLUMN host TEXT NOT NULL DEFAULT '';
  ALTER TABLE instances ADD COLUMN gpu TEXT NOT NULL DEFAULT '';
  ALTER TABLE instances ADD COLUMN gpu_count INTEGER NOT NULL DEFAULT 1;
  ALTER TABLE instances ADD COLUMN promised_rollouts_per_s REAL;
  ALTER TABLE instances ADD COLUMN offer_document TEXT NOT NULL DEFAULT '';
  ALTER TABLE instances ADD COLUMN bid_usd_per_hour REAL;
  UPDATE instances SET label = run || '/' || id;
  CREATE INDEX instances_by_state ON instances (state, id);
  CREATE TABLE states (
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL REFERENCES instances (id),
    state TEXT NOT NULL,
    unix_s REAL NOT NULL,
    note TEXT NOT NULL DEFAULT ''
  );
  CREATE INDEX states_by_instance ON states (instance, id);
  INSERT INTO states (instance, state, unix_s) SELECT id, 'intended', intended_unix_s FROM instances ORDER BY id;
  INSERT INTO states (instance, state, unix_s) SELECT id, 'running', running_unix_s FROM instances
    WHERE running_unix_s IS NOT NULL ORDER BY id;
  INSERT INTO states (instance, state, unix_s, note) SELECT id, state, ended_unix_s, note FROM instances
    WHERE ended_unix_s IS NOT NULL ORDER BY id;
  CREATE TABLE prices (  -- a price holds until the instance's next price or its end
    id INTEGER PRIMARY KEY,
    instance INTEGER NOT NULL REFERENCES instances (id),
    from_unix_s REAL NOT NULL,
    usd_per_hour REAL NOT NULL
  );
  CREATE INDEX prices_by_instance ON prices (instance, id);
  INSERT INTO prices (instance, from_unix_s, usd_per_hour) SELECT id, intended_unix_s, usd_per_hour FROM instances;
  CREATE TABLE measured (
    instance INTEGER PRIMARY KEY REFERENCES instances (id),
    unix_s REAL NOT NULL,
    rollouts_per_s REAL,
    up_bits_per_s REAL,
    down_bits_per_s REAL
  );
  CREATE TABLE decisions (
    id INTEGER PRIMARY KEY,
    run TEXT NOT NULL,
    unix_s REAL NOT NULL,
    what TEXT NOT NULL,
    why TEXT NOT NULL,
    numbers TEXT NOT NULL DEFAULT '{}'
  );
  CREATE INDEX decisions_by_run ON decisions (run, id);
)sql",
    // 3 to 4: the time of a stop request; an instance that is missing later was stopped, not lost
    R"sql(
  ALTER TABLE instances ADD COLUMN stop_asked_unix_s REAL;
)sql",
    // 4 to 5: what providers charge per instance and day, and the credit left at each
    R"sql(
  CREATE TABLE charges (
    instance INTEGER NOT NULL REFERENCES instances (id),
    day_unix_s REAL NOT NULL,
    usd REAL NOT NULL,
    usd_rent REAL NOT NULL,
    usd_traffic REAL NOT NULL,
    read_unix_s REAL NOT NULL,
    PRIMARY KEY (instance, day_unix_s)
  ) WITHOUT ROWID;
  CREATE TABLE credits (
    provider TEXT PRIMARY KEY,
    usd REAL NOT NULL,
    unix_s REAL NOT NULL
  ) WITHOUT ROWID;
)sql"};

Result<std::int64_t> pragma(sqlite3* db, const std::string& name) {
  ECHO_ASSIGN(Statement s, Statement::prepare(db, "PRAGMA " + name));
  ECHO_ASSIGN(const bool has_row, s.step());
  return has_row ? s.integer(0) : 0;
}

// Creates the tables in an empty database, or migrates an older one. Fails on a foreign or newer file.
Status bring_up_to_date(sqlite3* db) {
  ECHO_ASSIGN(const std::int64_t application_id, pragma(db, "application_id"));
  ECHO_ASSIGN(std::int64_t version, pragma(db, "user_version"));
  ECHO_ASSIGN(const std::int64_t schema_changes, pragma(db, "schema_version"));  // SQLite counts them
  const bool is_empty = application_id == 0 && version == 0 && schema_changes == 0;
  if (!is_empty && application_id != kApplicationId)
    return fail(Code::kCorrupt, kOperation, "an SQLite file that is not a ledger; choose another path");
  if (version < 0 || version > static_cast<std::int64_t>(kMigrations.size()) || (version == 0 && !is_empty))
    return fail(Code::kCorrupt, kOperation, "ledger version {}, this program reads versions 1 to {}", version,
                kMigrations.size());
  for (; version < static_cast<std::int64_t>(kMigrations.size()); ++version)
    ECHO_TRY(execute(db, kMigrations[static_cast<std::size_t>(version)]));
  return execute(
      db,
      fmt::format("PRAGMA application_id = {}; PRAGMA user_version = {}", kApplicationId, kMigrations.size()).c_str());
}

}  // namespace

Error sqlite_error(sqlite3* db, std::string_view what) {
  const int code = sqlite3_errcode(db) & 0xff;  // the low byte, without the bits of extended codes
  const bool is_corrupt = code == SQLITE_CORRUPT || code == SQLITE_NOTADB;
  return fail(is_corrupt ? Code::kCorrupt : Code::kIo, kOperation, "{}: {}", what, sqlite3_errmsg(db));
}

Status execute(sqlite3* db, const char* sql) {
  if (sqlite3_exec(db, sql, nullptr, nullptr, nullptr) != SQLITE_OK) return sqlite_error(db, "execute");
  return ok();
}

Result<Database> open(const std::filesystem::path& path) {
  if (path.has_parent_path()) ECHO_TRY(make_folders(path.parent_path()));
  sqlite3* handle = nullptr;
  const int rc = sqlite3_open_v2(path.c_str(), &handle, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr);
  Database db(handle);  // also after an error, because SQLite may return a handle that must be closed
  if (rc != SQLITE_OK)
    return fail(Code::kIo, kOperation, "{}: {}", path.string(), db ? sqlite3_errmsg(db.get()) : "out of memory");
  sqlite3_busy_timeout(db.get(), kBusyMs);
  const auto with_path = [&](Status status) -> Status {  // adds the file's path to an error
    if (status) return ok();
    Error error = std::move(status).error();
    error.detail = path.string() + ": " + error.detail;
    return error;
  };
  ECHO_TRY(with_path(execute(db.get(), "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")));
  ECHO_TRY(with_path(transaction(db.get(), [&] { return bring_up_to_date(db.get()); })));
  return db;
}

Result<Statement> Statement::prepare(sqlite3* db, const std::string& sql) {
  Statement s(db);
  if (sqlite3_prepare_v2(db, sql.c_str(), -1, &s.statement_, nullptr) != SQLITE_OK) return sqlite_error(db, "prepare");
  return s;
}

Statement& Statement::bind(const std::string& text) {
  // SQLITE_TRANSIENT: SQLite copies the text. SQLite's limit of a text, 10^9 bytes, fits into an int.
  sqlite3_bind_text(statement_, next_parameter_++, text.c_str(), static_cast<int>(text.size()), SQLITE_TRANSIENT);
  return *this;
}

Statement& Statement::bind(std::int64_t number) {
  sqlite3_bind_int64(statement_, next_parameter_++, number);
  return *this;
}

Statement& Statement::bind(double number) {
  sqlite3_bind_double(statement_, next_parameter_++, number);
  return *this;
}

Statement& Statement::bind(const std::optional<double>& number) {
  if (number) return bind(*number);
  sqlite3_bind_null(statement_, next_parameter_++);
  return *this;
}

Result<bool> Statement::step() {
  const int rc = sqlite3_step(statement_);
  if (rc == SQLITE_ROW) return true;
  if (rc == SQLITE_DONE) return false;
  return sqlite_error(db_, "write or read");
}

std::string Statement::text(int column) const {
  const auto* data = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
  return data ? std::string(data, static_cast<std::size_t>(sqlite3_column_bytes(statement_, column))) : std::string();
}

std::optional<double> Statement::optional_real(int column) const {
  if (sqlite3_column_type(statement_, column) == SQLITE_NULL) return std::nullopt;
  return real(column);
}

}  // namespace echoline::provisioner::ledger
