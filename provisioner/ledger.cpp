#include "provisioner/ledger.hpp"

#include <sqlite3.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/files.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::string_view kOperation = "ledger";
constexpr int kApplicationId = 0x4563684c;  // "EchL"
constexpr int kSchemaVersion = 2;
constexpr int kBusyMs = 5000;

constexpr const char* kSchema = R"sql(
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
    note TEXT NOT NULL DEFAULT '',
    alive_unix_s REAL,
    price_known INTEGER NOT NULL DEFAULT 1
  );
  CREATE INDEX instances_by_run ON instances (run, id);
)sql";

// What version 2 added.
constexpr const char* kFromVersion1 =
    "ALTER TABLE instances ADD COLUMN alive_unix_s REAL;"
    "ALTER TABLE instances ADD COLUMN price_known INTEGER NOT NULL DEFAULT 1;"
    "PRAGMA user_version = 2";

constexpr const char* kColumns =
    "id, run, offer, provider, instance, state, usd_per_hour, upload_usd_per_gb, download_usd_per_gb, uploaded_bytes, "
    "downloaded_bytes, intended_unix_s, running_unix_s, ended_unix_s, note, alive_unix_s, price_known";

constexpr std::array kStates{InstanceState::kIntended, InstanceState::kRunning, InstanceState::kEnded,
                             InstanceState::kFailed};

Error sqlite_error(sqlite3* db, std::string_view what) {
  const int code = sqlite3_errcode(db) & 0xff;
  const bool corrupt = code == SQLITE_CORRUPT || code == SQLITE_NOTADB;
  return fail(corrupt ? Code::kCorrupt : Code::kIo, kOperation, "{}: {}", what, sqlite3_errmsg(db));
}

class Statement {
 public:
  static Result<Statement> prepare(sqlite3* db, const std::string& sql) {
    Statement s(db);
    if (sqlite3_prepare_v2(db, sql.c_str(), -1, &s.statement_, nullptr) != SQLITE_OK)
      return sqlite_error(db, "prepare");
    return s;
  }
  explicit Statement(sqlite3* db) : db_(db) {}
  Statement(Statement&& o) noexcept : db_(o.db_), statement_(std::exchange(o.statement_, nullptr)), next_(o.next_) {}
  Statement& operator=(Statement&&) = delete;
  ~Statement() { sqlite3_finalize(statement_); }

  Statement& bind(const std::string& text) {
    sqlite3_bind_text(statement_, next_++, text.c_str(), static_cast<int>(text.size()), SQLITE_TRANSIENT);
    return *this;
  }
  Statement& bind(std::int64_t number) {
    sqlite3_bind_int64(statement_, next_++, number);
    return *this;
  }
  Statement& bind(double number) {
    sqlite3_bind_double(statement_, next_++, number);
    return *this;
  }
  Statement& bind(const std::optional<double>& number) {
    if (number) return bind(*number);
    sqlite3_bind_null(statement_, next_++);
    return *this;
  }
  // True while there is a row.
  Result<bool> step() {
    const int rc = sqlite3_step(statement_);
    if (rc == SQLITE_ROW) return true;
    if (rc == SQLITE_DONE) return false;
    return sqlite_error(db_, "write or read");
  }
  std::string text(int column) const {
    const auto* data = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
    return data ? std::string(data, static_cast<std::size_t>(sqlite3_column_bytes(statement_, column))) : std::string();
  }
  std::int64_t integer(int column) const { return sqlite3_column_int64(statement_, column); }
  double real(int column) const { return sqlite3_column_double(statement_, column); }
  std::optional<double> optional_real(int column) const {
    if (sqlite3_column_type(statement_, column) == SQLITE_NULL) return std::nullopt;
    return real(column);
  }

 private:
  sqlite3* db_;
  sqlite3_stmt* statement_ = nullptr;
  int next_ = 1;
};

Status execute(sqlite3* db, const char* sql) {
  if (sqlite3_exec(db, sql, nullptr, nullptr, nullptr) != SQLITE_OK) return sqlite_error(db, "execute");
  return ok();
}

Result<std::int64_t> pragma(sqlite3* db, const std::string& name) {
  ECHO_ASSIGN(Statement s, Statement::prepare(db, "PRAGMA " + name));
  ECHO_ASSIGN(const bool row, s.step());
  return row ? s.integer(0) : 0;
}

LedgerRow row_of(const Statement& s) {
  LedgerRow r;
  r.id = s.integer(0);
  r.run = s.text(1);
  r.label = fmt::format("{}/{}", r.run, r.id);
  r.offer = s.text(2);
  r.provider = s.text(3);
  r.instance = s.text(4);
  const std::string state = s.text(5);
  r.state = *std::find_if(kStates.begin(), kStates.end() - 1, [&](auto st) { return to_string(st) == state; });
  r.usd_per_hour = s.real(6);
  r.upload_usd_per_gb = s.optional_real(7);
  r.download_usd_per_gb = s.optional_real(8);
  r.uploaded = {static_cast<std::uint64_t>(s.integer(9))};
  r.downloaded = {static_cast<std::uint64_t>(s.integer(10))};
  r.intended_unix_s = s.real(11);
  r.running_unix_s = s.optional_real(12);
  r.ended_unix_s = s.optional_real(13);
  r.note = s.text(14);
  r.alive_unix_s = s.optional_real(15);
  r.price_known = s.integer(16) != 0;
  return r;
}

Result<std::vector<LedgerRow>> rows_where(sqlite3* db, const std::string& condition, const std::string& run) {
  ECHO_ASSIGN(Statement s, Statement::prepare(
                               db, fmt::format("SELECT {} FROM instances WHERE {} ORDER BY id", kColumns, condition)));
  if (!run.empty()) s.bind(run);
  std::vector<LedgerRow> rows;
  while (true) {
    ECHO_ASSIGN(const bool more, s.step());
    if (!more) return rows;
    rows.push_back(row_of(s));
  }
}

// Makes an empty database a ledger; refuses one that belongs to something else or to a later version.
Status prepare_schema(sqlite3* db, const std::string& path) {
  ECHO_TRY(execute(db, "BEGIN IMMEDIATE"));
  ECHO_ASSIGN(const std::int64_t application, pragma(db, "application_id"));
  ECHO_ASSIGN(const std::int64_t version, pragma(db, "user_version"));
  ECHO_ASSIGN(const std::int64_t pages, pragma(db, "schema_version"));
  if (application == 0 && version == 0 && pages == 0) {
    ECHO_TRY(execute(db, kSchema));
    ECHO_TRY(execute(
        db,
        fmt::format("PRAGMA application_id = {}; PRAGMA user_version = {}", kApplicationId, kSchemaVersion).c_str()));
  } else if (application != kApplicationId) {
    return fail(Code::kCorrupt, kOperation, "{}: a SQLite file that is not a ledger; choose another path", path);
  } else if (version == 1) {
    ECHO_TRY(execute(db, kFromVersion1));
  } else if (version != kSchemaVersion) {
    return fail(Code::kCorrupt, kOperation, "{}: ledger version {}, this program reads version {}", path, version,
                kSchemaVersion);
  }
  return execute(db, "COMMIT");
}

}  // namespace

std::string_view to_string(InstanceState state) {
  switch (state) {
    case InstanceState::kIntended:
      return "intended";
    case InstanceState::kRunning:
      return "running";
    case InstanceState::kEnded:
      return "ended";
    case InstanceState::kFailed:
      return "failed";
  }
  return "?";
}

double LedgerRow::usd(double now_unix_s) const {
  constexpr double kBytesPerGb = 1e9;
  const bool never_ran = state == InstanceState::kFailed && !running_unix_s;
  const double seconds = never_ran ? 0 : std::max(0.0, ended_unix_s.value_or(now_unix_s) - intended_unix_s);
  return seconds / 3600 * usd_per_hour +
         static_cast<double>(uploaded.count) / kBytesPerGb * upload_usd_per_gb.value_or(0) +
         static_cast<double>(downloaded.count) / kBytesPerGb * download_usd_per_gb.value_or(0);
}

struct Ledger::Impl {
  sqlite3* db = nullptr;
  std::string run;
  std::vector<LedgerRow> orphans;
  ~Impl() { sqlite3_close(db); }

  // Runs an update of one row and says why when it changed nothing.
  Status change(Statement& update, std::int64_t row, std::string_view step) {
    ECHO_TRY(update.step());
    if (sqlite3_changes(db) == 1) return ok();
    ECHO_ASSIGN(Statement s, Statement::prepare(db, "SELECT state FROM instances WHERE id = ?"));
    ECHO_ASSIGN(const bool found, s.bind(row).step());
    if (!found) return fail(Code::kNotFound, kOperation, "there is no row {}", row);
    return fail(Code::kInvalid, kOperation, "row {} is {} and cannot become {}", row, s.text(0), step);
  }
};

Ledger::Ledger(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Ledger::Ledger(Ledger&&) noexcept = default;
Ledger& Ledger::operator=(Ledger&&) noexcept = default;
Ledger::~Ledger() = default;

Result<Ledger> Ledger::open(const std::filesystem::path& path, const std::string& run) {
  if (run.empty()) return fail(Code::kInvalid, kOperation, "the run's name is empty");
  if (path.has_parent_path()) ECHO_TRY(make_folders(path.parent_path()));
  auto impl = std::make_unique<Impl>();
  impl->run = run;
  if (sqlite3_open_v2(path.c_str(), &impl->db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr) != SQLITE_OK)
    return fail(Code::kIo, kOperation, "{}: {}", path.string(), impl->db ? sqlite3_errmsg(impl->db) : "out of memory");
  sqlite3_busy_timeout(impl->db, kBusyMs);
  const auto located = [&](const Status& status) -> Status {
    if (status) return ok();
    Error error = status.error();
    if (error.detail.find(path.string()) == std::string::npos) error.detail = path.string() + ": " + error.detail;
    return error;
  };
  ECHO_TRY(located(execute(impl->db, "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")));
  ECHO_TRY(located(prepare_schema(impl->db, path.string())));
  ECHO_ASSIGN(impl->orphans, rows_where(impl->db, "state IN ('intended', 'running')", ""));
  return Ledger(std::move(impl));
}

const std::vector<LedgerRow>& Ledger::orphans() const { return impl_->orphans; }

Result<LedgerRow> Ledger::intend(const Offer& offer, double now_unix_s) {
  ECHO_ASSIGN(Statement s,
              Statement::prepare(impl_->db,
                                 "INSERT INTO instances (run, offer, provider, state, usd_per_hour, upload_usd_per_gb, "
                                 "download_usd_per_gb, intended_unix_s, price_known) VALUES (?, ?, ?, 'intended', ?, ?, ?, "
                                 "?, ?)"));
  s.bind(impl_->run).bind(offer.id).bind(offer.provider);
  s.bind(offer.gpu_usd_per_hour + offer.storage_usd_per_hour.value_or(0));
  s.bind(offer.upload_usd_per_gb).bind(offer.download_usd_per_gb).bind(now_unix_s);
  s.bind(std::int64_t{offer.usd_per_hour() && offer.upload_usd_per_gb && offer.download_usd_per_gb ? 1 : 0});
  ECHO_TRY(s.step());
  const std::int64_t id = sqlite3_last_insert_rowid(impl_->db);
  ECHO_ASSIGN(const std::vector<LedgerRow> rows, rows_where(impl_->db, fmt::format("id = {}", id), ""));
  ECHO_CHECK(rows.size() == 1);
  return rows.front();
}

Status Ledger::running(std::int64_t row, const std::string& instance, double now_unix_s) {
  ECHO_ASSIGN(Statement s,
              Statement::prepare(impl_->db,
                                 "UPDATE instances SET state = 'running', instance = ?, running_unix_s = ? "
                                 "WHERE id = ? AND state = 'intended'"));
  s.bind(instance).bind(now_unix_s).bind(row);
  return impl_->change(s, row, "running");
}

Status Ledger::ended(std::int64_t row, const std::string& note, double now_unix_s) {
  ECHO_ASSIGN(Statement s, Statement::prepare(impl_->db,
                                              "UPDATE instances SET state = 'ended', note = ?, ended_unix_s = ? "
                                              "WHERE id = ? AND state IN ('intended', 'running')"));
  s.bind(note).bind(now_unix_s).bind(row);
  return impl_->change(s, row, "ended");
}

Status Ledger::failed(std::int64_t row, const std::string& note, double now_unix_s) {
  ECHO_ASSIGN(Statement s, Statement::prepare(impl_->db,
                                              "UPDATE instances SET state = 'failed', note = ?, ended_unix_s = ? "
                                              "WHERE id = ? AND state IN ('intended', 'running')"));
  s.bind(note).bind(now_unix_s).bind(row);
  return impl_->change(s, row, "failed");
}

Status Ledger::alive(std::span<const LedgerSign> signs, double now_unix_s) {
  if (signs.empty()) return ok();
  ECHO_TRY(execute(impl_->db, "BEGIN IMMEDIATE"));
  const auto book = [&]() -> Status {
    for (const LedgerSign& sign : signs) {
      ECHO_ASSIGN(Statement s, Statement::prepare(impl_->db,
                                                  "UPDATE instances SET uploaded_bytes = uploaded_bytes + ?, "
                                                  "downloaded_bytes = downloaded_bytes + ?, alive_unix_s = ? "
                                                  "WHERE id = ?"));
      s.bind(static_cast<std::int64_t>(sign.uploaded.count)).bind(static_cast<std::int64_t>(sign.downloaded.count));
      s.bind(now_unix_s).bind(sign.row);
      ECHO_TRY(impl_->change(s, sign.row, "charged"));
    }
    return execute(impl_->db, "COMMIT");
  };
  Status booked = book();
  if (!booked) (void)sqlite3_exec(impl_->db, "ROLLBACK", nullptr, nullptr, nullptr);
  return booked;
}

Result<std::vector<LedgerRow>> Ledger::rows() const { return rows_where(impl_->db, "run = ?", impl_->run); }

Result<LedgerTotals> Ledger::totals(double now_unix_s) const {
  ECHO_ASSIGN(const std::vector<LedgerRow> all, rows());
  LedgerTotals t;
  for (const LedgerRow& row : all) {
    t.usd += row.usd(now_unix_s);
    const bool never_ran = row.state == InstanceState::kFailed && !row.running_unix_s;
    t.prices_known = t.prices_known && (row.price_known || never_ran);
    switch (row.state) {
      case InstanceState::kIntended:
        ++t.intended;
        break;
      case InstanceState::kRunning:
        ++t.running;
        break;
      case InstanceState::kEnded:
        ++t.ended;
        break;
      case InstanceState::kFailed:
        ++t.failed;
        break;
    }
    if (row.state == InstanceState::kIntended || row.state == InstanceState::kRunning)
      t.usd_per_hour += row.usd_per_hour;
  }
  return t;
}

}  // namespace echoline::provisioner
