// The ledger's tables: every change is a transaction. The fleet and `echoline ledger` call it.
#include "provisioner/ledger.hpp"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "provisioner/ledger_database.hpp"

namespace echoline::provisioner {
namespace {

using ledger::execute;
using ledger::Statement;
using ledger::transaction;

constexpr std::string_view kOperation = "ledger";
constexpr std::size_t kFoldersMax = 1000;  // in which known_hosts() looks for a ledger
constexpr double kSecondsPerHour = 3600;

// row_of() reads these columns by their index.
constexpr const char* kColumns =
    "id, run, offer, provider, instances.instance, state, usd_per_hour, upload_usd_per_gb, download_usd_per_gb, "
    "uploaded_bytes, downloaded_bytes, intended_unix_s, running_unix_s, ended_unix_s, note, alive_unix_s, price_known, "
    "label, host, gpu, gpu_count, promised_rollouts_per_s, measured.rollouts_per_s, measured.up_bits_per_s, "
    "measured.down_bits_per_s, measured.unix_s, stop_asked_unix_s";
// The column after kColumns.
constexpr const char* kEngineColumn =
    "CASE WHEN json_valid(offer_document) THEN json_extract(offer_document, '$.engine') END";
constexpr const char* kTables = "instances LEFT JOIN measured ON measured.instance = instances.id";
constexpr int kMeasuredTimeColumn = 25;  // index of measured.unix_s

constexpr std::array kStates{InstanceState::kIntended, InstanceState::kRunning, InstanceState::kEnded,
                             InstanceState::kFailed};

// Returns the last state, kFailed, for an unknown text.
InstanceState state_of(const std::string& text) {
  return *std::find_if(kStates.begin(), kStates.end() - 1, [&](auto state) { return to_string(state) == text; });
}

std::optional<BitRate> rate_of(const std::optional<double>& bits_per_s) {
  return bits_per_s ? std::optional(BitRate{*bits_per_s}) : std::nullopt;
}

// A query for row_of(); an ORDER BY may follow the condition.
std::string select_rows(std::string_view condition) {
  return fmt::format("SELECT {}, {} FROM {} WHERE {}", kColumns, kEngineColumn, kTables, condition);
}

// Reads a row of select_rows().
LedgerRow row_of(const Statement& s) {
  LedgerRow r;
  r.id = s.integer(0);
  r.run = s.text(1);
  r.offer = s.text(2);
  r.provider = s.text(3);
  r.instance = s.text(4);
  r.state = state_of(s.text(5));
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
  r.label = s.text(17);
  r.host = s.text(18);
  r.gpu = s.text(19);
  r.gpu_count = static_cast<int>(s.integer(20));
  r.promised_rollouts_per_s = s.optional_real(21);
  r.measured_rollouts_per_s = s.optional_real(22);
  r.measured_up = rate_of(s.optional_real(23));
  r.measured_down = rate_of(s.optional_real(24));
  r.stop_asked_unix_s = s.optional_real(26);
  r.engine = s.text(27);
  return r;
}

// Reads the rows that meet the condition, with their prices. `condition` begins with a column of the table `instances`.
// It may contain one question mark, which is bound to `text`.
Result<std::vector<LedgerRow>> rows_where(sqlite3* db, const std::string& condition, const std::string& text = "") {
  const auto bind_text = [&](Statement& s) {
    if (condition.find('?') != std::string::npos) s.bind(text);
  };
  ECHO_ASSIGN(Statement s, Statement::prepare(db, select_rows(condition + " ORDER BY id")));
  bind_text(s);
  std::vector<LedgerRow> rows;
  while (true) {
    ECHO_ASSIGN(const bool has_row, s.step());
    if (!has_row) break;
    rows.push_back(row_of(s));
  }
  ECHO_ASSIGN(Statement price_query,
              Statement::prepare(db, fmt::format("SELECT prices.instance, from_unix_s, prices.usd_per_hour FROM "
                                                 "prices JOIN instances ON instances.id = prices.instance "
                                                 "WHERE instances.{} ORDER BY prices.instance, prices.id",
                                                 condition)));
  bind_text(price_query);
  // Both queries are ordered by row, so one pass gives each row its prices.
  for (auto row = rows.begin();;) {
    ECHO_ASSIGN(const bool has_row, price_query.step());
    if (!has_row) return rows;
    const std::int64_t id_of_price = price_query.integer(0);
    while (row != rows.end() && row->id < id_of_price) ++row;
    if (row != rows.end() && row->id == id_of_price)
      row->prices.push_back({.from_unix_s = price_query.real(1), .usd_per_hour = price_query.real(2)});
  }
}

// The ledger's copy of an offer, as JSON; kEngineColumn reads it.
std::string document_of(const Offer& offer) {
  nlohmann::json j = {{"id", offer.id},
                      {"provider", offer.provider},
                      {"host", offer.host},
                      {"gpu", offer.gpu},
                      {"gpu_count", offer.gpu_count},
                      {"place", offer.place},
                      {"rollouts_per_s", offer.rollouts_per_s},
                      {"rollouts_source", to_string(offer.rollouts_source)}};
  const auto add = [&](const char* name, const std::optional<double>& value) {
    if (value) j[name] = *value;
  };
  if (!offer.engine.empty()) j["engine"] = offer.engine;
  if (offer.up) j["up_mbit_per_s"] = offer.up->mbit_per_s();
  if (offer.down) j["down_mbit_per_s"] = offer.down->mbit_per_s();
  add("gpu_usd_per_hour", offer.gpu_usd_per_hour);
  add("vram_gb", offer.vram_gb);
  add("reliability", offer.reliability);
  add("storage_usd_per_hour", offer.storage_usd_per_hour);
  add("upload_usd_per_gb", offer.upload_usd_per_gb);
  add("download_usd_per_gb", offer.download_usd_per_gb);
  if (offer.duration_max) j["duration_max_s"] = seconds(*offer.duration_max);
  return j.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace);
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

double LedgerRow::usd_rent(double now_unix_s) const {
  if (state == InstanceState::kFailed && !running_unix_s) return 0;
  const double end_unix_s = ended_unix_s.value_or(now_unix_s);
  double usd = 0;
  for (std::size_t i = 0; i < prices.size(); ++i) {
    const bool is_last = i + 1 == prices.size();
    const double price_end = is_last ? end_unix_s : std::min(prices[i + 1].from_unix_s, end_unix_s);
    usd += std::max(0.0, price_end - prices[i].from_unix_s) / kSecondsPerHour * prices[i].usd_per_hour;
  }
  return usd;
}

double LedgerRow::usd_traffic() const {
  constexpr double kBytesPerGb = 1e9;
  return static_cast<double>(uploaded.count) / kBytesPerGb * upload_usd_per_gb.value_or(0) +
         static_cast<double>(downloaded.count) / kBytesPerGb * download_usd_per_gb.value_or(0);
}

struct Ledger::Impl {
  ledger::Database db;
  std::string run, label_prefix;
  std::vector<LedgerRow> orphans;

  // Executes an update of one row. The error explains why no row was changed: it "cannot become" `changed`.
  Status update_row(Statement& update, std::int64_t row, std::string_view changed) {
    ECHO_TRY(update.step());
    if (sqlite3_changes(db.get()) == 1) return ok();
    ECHO_ASSIGN(Statement s, Statement::prepare(db.get(), "SELECT state FROM instances WHERE id = ?"));
    ECHO_ASSIGN(const bool has_row, s.bind(row).step());
    if (!has_row) return fail(Code::kNotFound, kOperation, "there is no row {}", row);
    return fail(Code::kInvalid, kOperation, "row {} is {} and cannot become {}", row, s.text(0), changed);
  }

  Status set_label(std::int64_t row, const std::string& label) {
    ECHO_ASSIGN(Statement s, Statement::prepare(db.get(), "UPDATE instances SET label = ? WHERE id = ?"));
    ECHO_TRY(s.bind(label).bind(row).step());
    return ok();
  }

  Status append_state(std::int64_t row, InstanceState state, const std::string& note, double now_unix_s) {
    ECHO_ASSIGN(Statement s,
                Statement::prepare(db.get(), "INSERT INTO states (instance, state, unix_s, note) VALUES (?, ?, ?, ?)"));
    s.bind(row).bind(std::string(to_string(state))).bind(now_unix_s).bind(note);
    ECHO_TRY(s.step());
    return ok();
  }

  Status append_price(std::int64_t row, double usd_per_hour, double now_unix_s) {
    ECHO_ASSIGN(
        Statement s,
        Statement::prepare(db.get(), "INSERT INTO prices (instance, from_unix_s, usd_per_hour) VALUES (?, ?, ?)"));
    ECHO_TRY(s.bind(row).bind(now_unix_s).bind(usd_per_hour).step());
    return ok();
  }

  Status close_row(std::int64_t row, InstanceState state, const std::string& note, double now_unix_s) {
    return transaction(db.get(), [&]() -> Status {
      ECHO_ASSIGN(Statement s, Statement::prepare(db.get(),
                                                  "UPDATE instances SET state = ?, note = ?, ended_unix_s = ? "
                                                  "WHERE id = ? AND state IN ('intended', 'running')"));
      s.bind(std::string(to_string(state))).bind(note).bind(now_unix_s).bind(row);
      ECHO_TRY(update_row(s, row, to_string(state)));
      return append_state(row, state, note, now_unix_s);
    });
  }

  Result<LedgerRow> read_row(std::int64_t id) const {
    ECHO_ASSIGN(std::vector<LedgerRow> rows, rows_where(db.get(), fmt::format("id = {}", id)));
    if (rows.empty()) return fail(Code::kNotFound, kOperation, "there is no row {}", id);
    return std::move(rows.front());
  }

  // Sets label_prefix to "<run>.<mark>/". The mark is a random number, so that another run with the same name has other
  // labels. A run that is new to this file gets a new mark.
  Status read_label_prefix() {
    return transaction(db.get(), [&]() -> Status {
      ECHO_ASSIGN(Statement insert, Statement::prepare(db.get(),
                                                       "INSERT OR IGNORE INTO runs (name, mark) VALUES (?, "
                                                       "lower(hex(randomblob(4))))"));
      ECHO_TRY(insert.bind(run).step());
      ECHO_ASSIGN(Statement mark, Statement::prepare(db.get(), "SELECT mark FROM runs WHERE name = ?"));
      ECHO_TRY(mark.bind(run).step());
      label_prefix = fmt::format("{}.{}/", run, mark.text(0));
      return ok();
    });
  }
};

Ledger::Ledger(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Ledger::Ledger(Ledger&&) noexcept = default;
Ledger& Ledger::operator=(Ledger&&) noexcept = default;
Ledger::~Ledger() = default;

Result<Ledger> Ledger::open(const std::filesystem::path& path, const std::string& run) {
  if (run.empty()) return fail(Code::kInvalid, kOperation, "the run's name is empty");
  auto impl = std::make_unique<Impl>();
  impl->run = run;
  auto database = ledger::open(path);
  if (!database) {
    Error error = std::move(database).error();
    if (error.code == Code::kCorrupt)
      error.detail += fmt::format(
          "; `echoline down {} --by-label` releases what the run has rented, without the ledger. Without this file, "
          "the run begins a new ledger",
          run);
    return error;
  }
  impl->db = std::move(*database);
  ECHO_TRY(impl->read_label_prefix());
  ECHO_ASSIGN(impl->orphans, rows_where(impl->db.get(), "state IN ('intended', 'running')"));
  return Ledger(std::move(impl));
}

const std::string& Ledger::label_prefix() const { return impl_->label_prefix; }

const std::vector<LedgerRow>& Ledger::orphans() const { return impl_->orphans; }

Result<LedgerRow> Ledger::record_intent(const Offer& offer, double now_unix_s, std::optional<double> bid_usd_per_hour) {
  const double usd_per_hour =
      bid_usd_per_hour.value_or(offer.rent_usd_per_hour().value_or(0)) + offer.storage_usd_per_hour.value_or(0);
  const bool price_known = offer.usd_per_hour() && offer.upload_usd_per_gb && offer.download_usd_per_gb;
  std::int64_t id = 0;
  ECHO_TRY(transaction(impl_->db.get(), [&]() -> Status {
    ECHO_ASSIGN(Statement s, Statement::prepare(
                                 impl_->db.get(),
                                 "INSERT INTO instances (run, offer, provider, state, usd_per_hour, upload_usd_per_gb, "
                                 "download_usd_per_gb, intended_unix_s, price_known, host, gpu, gpu_count, "
                                 "promised_rollouts_per_s, offer_document, bid_usd_per_hour) "
                                 "VALUES (?, ?, ?, 'intended', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"));
    s.bind(impl_->run).bind(offer.id).bind(offer.provider).bind(usd_per_hour);
    s.bind(offer.upload_usd_per_gb).bind(offer.download_usd_per_gb).bind(now_unix_s);
    s.bind(std::int64_t{price_known ? 1 : 0});
    s.bind(offer.host).bind(offer.gpu).bind(std::int64_t{offer.gpu_count}).bind(offer.rollouts_per_s);
    s.bind(document_of(offer)).bind(bid_usd_per_hour);
    ECHO_TRY(s.step());
    id = sqlite3_last_insert_rowid(impl_->db.get());
    ECHO_TRY(impl_->set_label(id, fmt::format("{}{}", impl_->label_prefix, id)));
    ECHO_TRY(impl_->append_state(id, InstanceState::kIntended, "", now_unix_s));
    return impl_->append_price(id, usd_per_hour, now_unix_s);
  }));
  return impl_->read_row(id);
}

Result<LedgerRow> Ledger::record_found_instance(const std::string& provider, const std::string& instance,
                                                const std::string& label, std::optional<double> usd_per_hour,
                                                double now_unix_s) {
  ECHO_ASSIGN(const std::vector<LedgerRow> known, rows_where(impl_->db.get(), "label = ?", label));
  for (const LedgerRow& row : known) {
    if (row.state == InstanceState::kRunning && row.instance == instance) return row;
    if (row.state != InstanceState::kIntended) continue;
    ECHO_TRY(record_start(row.id, instance, now_unix_s));
    if (usd_per_hour) ECHO_TRY(record_price(row.id, *usd_per_hour, now_unix_s));
    return impl_->read_row(row.id);
  }
  // If a row has the label, it is recorded as failed or belongs to another instance. The found instance was requested
  // at that row's intended_unix_s at the earliest, so it is charged from that time.
  const LedgerRow* const labelled = known.empty() ? nullptr : &known.front();
  Offer offer;
  offer.provider = provider;
  offer.id = labelled ? labelled->offer : "";
  offer.host = labelled ? labelled->host : "";
  offer.gpu = labelled ? labelled->gpu : "";
  offer.gpu_usd_per_hour = usd_per_hour.value_or(labelled ? labelled->usd_per_hour : 0);
  ECHO_ASSIGN(const LedgerRow row, record_intent(offer, labelled ? labelled->intended_unix_s : now_unix_s));
  ECHO_TRY(impl_->set_label(row.id, label));
  ECHO_TRY(record_start(row.id, instance, now_unix_s));
  return impl_->read_row(row.id);
}

Status Ledger::record_start(std::int64_t row, const std::string& instance, double now_unix_s) {
  return transaction(impl_->db.get(), [&]() -> Status {
    ECHO_ASSIGN(Statement s,
                Statement::prepare(impl_->db.get(),
                                   "UPDATE instances SET state = 'running', instance = ?, running_unix_s = ? "
                                   "WHERE id = ? AND state = 'intended'"));
    s.bind(instance).bind(now_unix_s).bind(row);
    ECHO_TRY(impl_->update_row(s, row, "running"));
    return impl_->append_state(row, InstanceState::kRunning, instance, now_unix_s);
  });
}

Status Ledger::record_end(std::int64_t row, const std::string& note, double now_unix_s) {
  return impl_->close_row(row, InstanceState::kEnded, note, now_unix_s);
}

Status Ledger::record_failure(std::int64_t row, const std::string& note, double now_unix_s) {
  return impl_->close_row(row, InstanceState::kFailed, note, now_unix_s);
}

Status Ledger::record_stop_request(std::int64_t row, double now_unix_s) {
  ECHO_ASSIGN(Statement s, Statement::prepare(impl_->db.get(),
                                              "UPDATE instances SET stop_asked_unix_s = "
                                              "coalesce(stop_asked_unix_s, ?) WHERE id = ?"));
  return impl_->update_row(s.bind(now_unix_s).bind(row), row, "stopped");
}

Status Ledger::record_price(std::int64_t row, double usd_per_hour, double now_unix_s) {
  return transaction(impl_->db.get(), [&]() -> Status {
    ECHO_ASSIGN(Statement s, Statement::prepare(impl_->db.get(),
                                                "UPDATE instances SET usd_per_hour = ? WHERE id = ? AND "
                                                "state IN ('intended', 'running')"));
    s.bind(usd_per_hour).bind(row);
    ECHO_TRY(impl_->update_row(s, row, "priced"));
    return impl_->append_price(row, usd_per_hour, now_unix_s);
  });
}

Status Ledger::record_measurement(std::int64_t row, const LedgerMeasurement& measure, double now_unix_s) {
  ECHO_ASSIGN(
      Statement s,
      Statement::prepare(impl_->db.get(),
                         "INSERT INTO measured (instance, unix_s, rollouts_per_s, up_bits_per_s, down_bits_per_s) "
                         "SELECT id, ?, ?, ?, ? FROM instances WHERE id = ? ON CONFLICT (instance) DO UPDATE SET "
                         "unix_s = excluded.unix_s, "
                         "rollouts_per_s = coalesce(excluded.rollouts_per_s, rollouts_per_s), "
                         "up_bits_per_s = coalesce(excluded.up_bits_per_s, up_bits_per_s), "
                         "down_bits_per_s = coalesce(excluded.down_bits_per_s, down_bits_per_s)"));
  const auto bits = [](const std::optional<BitRate>& rate) {
    return rate ? std::optional(rate->bits_per_s) : std::nullopt;
  };
  s.bind(now_unix_s).bind(measure.rollouts_per_s).bind(bits(measure.up)).bind(bits(measure.down)).bind(row);
  return impl_->update_row(s, row, "measured");
}

Status Ledger::record_signs_of_life(std::span<const LedgerSignOfLife> signs, double now_unix_s) {
  if (signs.empty()) return ok();
  return transaction(impl_->db.get(), [&]() -> Status {
    for (const LedgerSignOfLife& sign : signs) {
      ECHO_ASSIGN(Statement s, Statement::prepare(impl_->db.get(),
                                                  "UPDATE instances SET uploaded_bytes = uploaded_bytes + ?, "
                                                  "downloaded_bytes = downloaded_bytes + ?, alive_unix_s = ? "
                                                  "WHERE id = ?"));
      s.bind(static_cast<std::int64_t>(sign.uploaded.count)).bind(static_cast<std::int64_t>(sign.downloaded.count));
      s.bind(now_unix_s).bind(sign.row);
      ECHO_TRY(impl_->update_row(s, sign.row, "charged"));
    }
    return ok();
  });
}

Status Ledger::record_decision(const LedgerDecision& decision) {
  ECHO_ASSIGN(Statement s,
              Statement::prepare(impl_->db.get(),
                                 "INSERT INTO decisions (run, unix_s, what, why, numbers) VALUES (?, ?, ?, ?, ?)"));
  s.bind(impl_->run).bind(decision.unix_s).bind(decision.what).bind(decision.why).bind(decision.numbers);
  ECHO_TRY(s.step());
  return ok();
}

Status Ledger::record_charges(std::span<const LedgerCharge> charges, const std::optional<LedgerCredit>& credit,
                              double now_unix_s) {
  return transaction(impl_->db.get(), [&]() -> Status {
    for (const LedgerCharge& c : charges) {
      ECHO_ASSIGN(Statement s,
                  Statement::prepare(impl_->db.get(),
                                     "INSERT OR REPLACE INTO charges (instance, day_unix_s, usd, usd_rent, "
                                     "usd_traffic, read_unix_s) SELECT id, ?, ?, ?, ?, ? FROM instances WHERE id = ?"));
      s.bind(c.day_unix_s).bind(c.usd).bind(c.usd_rent).bind(c.usd_traffic).bind(now_unix_s).bind(c.row);
      ECHO_TRY(impl_->update_row(s, c.row, "charged"));
    }
    if (!credit) return ok();
    ECHO_ASSIGN(
        Statement s,
        Statement::prepare(impl_->db.get(), "INSERT OR REPLACE INTO credits (provider, usd, unix_s) VALUES (?, ?, ?)"));
    ECHO_TRY(s.bind(credit->provider).bind(credit->usd).bind(credit->unix_s).step());
    return ok();
  });
}

Result<std::vector<LedgerCharge>> Ledger::charges() const {
  ECHO_ASSIGN(Statement s,
              Statement::prepare(impl_->db.get(),
                                 "SELECT charges.instance, day_unix_s, usd, usd_rent, usd_traffic FROM charges JOIN "
                                 "instances ON instances.id = charges.instance WHERE run = ? ORDER BY 1, 2"));
  s.bind(impl_->run);
  std::vector<LedgerCharge> charges;
  while (true) {
    ECHO_ASSIGN(const bool has_row, s.step());
    if (!has_row) return charges;
    charges.push_back({.row = s.integer(0),
                       .day_unix_s = s.real(1),
                       .usd = s.real(2),
                       .usd_rent = s.real(3),
                       .usd_traffic = s.real(4)});
  }
}

Result<std::vector<LedgerCredit>> Ledger::credits() const {
  ECHO_ASSIGN(Statement s,
              Statement::prepare(impl_->db.get(), "SELECT provider, usd, unix_s FROM credits ORDER BY provider"));
  std::vector<LedgerCredit> credits;
  while (true) {
    ECHO_ASSIGN(const bool has_row, s.step());
    if (!has_row) return credits;
    credits.push_back({.provider = s.text(0), .usd = s.real(1), .unix_s = s.real(2)});
  }
}

Result<std::vector<LedgerRow>> Ledger::rows() const { return rows_where(impl_->db.get(), "run = ?", impl_->run); }

Result<std::vector<LedgerStateChange>> Ledger::states() const {
  ECHO_ASSIGN(Statement s,
              Statement::prepare(impl_->db.get(),
                                 "SELECT states.instance, states.state, unix_s, states.note FROM states JOIN "
                                 "instances ON instances.id = states.instance WHERE run = ? ORDER BY "
                                 "states.id"));
  s.bind(impl_->run);
  std::vector<LedgerStateChange> states;
  while (true) {
    ECHO_ASSIGN(const bool has_row, s.step());
    if (!has_row) return states;
    states.push_back({.row = s.integer(0), .state = state_of(s.text(1)), .unix_s = s.real(2), .note = s.text(3)});
  }
}

Result<std::vector<LedgerDecision>> Ledger::decisions() const {
  ECHO_ASSIGN(Statement s,
              Statement::prepare(impl_->db.get(),
                                 "SELECT unix_s, what, why, numbers FROM decisions WHERE run = ? ORDER BY id"));
  s.bind(impl_->run);
  std::vector<LedgerDecision> decisions;
  while (true) {
    ECHO_ASSIGN(const bool has_row, s.step());
    if (!has_row) return decisions;
    decisions.push_back({.unix_s = s.real(0), .what = s.text(1), .why = s.text(2), .numbers = s.text(3)});
  }
}

Result<std::vector<LedgerHost>> Ledger::hosts() const {
  ECHO_ASSIGN(Statement loss_query,
              Statement::prepare(impl_->db.get(),
                                 // Older versions wrote decisions without `joined`; only their text says it.
                                 "SELECT run, json_extract(numbers, '$.row') FROM decisions WHERE what = 'lost' AND "
                                 "coalesce(json_extract(numbers, '$.joined'), why NOT LIKE '%not joined%')"));
  std::set<std::pair<std::string, std::int64_t>> losses;  // run and row
  while (true) {
    ECHO_ASSIGN(const bool has_row, loss_query.step());
    if (!has_row) break;
    losses.emplace(loss_query.text(0), loss_query.integer(1));
  }
  ECHO_ASSIGN(Statement s, Statement::prepare(impl_->db.get(), select_rows("host != '' ORDER BY id DESC")));
  std::vector<LedgerHost> hosts;
  while (true) {
    ECHO_ASSIGN(const bool has_row, s.step());
    if (!has_row) return hosts;
    const LedgerRow row = row_of(s);
    const double last_unix_s = row.ended_unix_s.value_or(row.last_known_unix_s());
    hosts.push_back(
        {.run = row.run,
         .provider = row.provider,
         .host = row.host,
         .gpu = row.gpu,
         .gpu_count = row.gpu_count,
         .engine = row.engine,
         .promised_rollouts_per_s = row.promised_rollouts_per_s,
         .measured_rollouts_per_s = row.measured_rollouts_per_s,
         .up = row.measured_up,
         .down = row.measured_down,
         .unix_s = s.optional_real(kMeasuredTimeColumn).value_or(last_unix_s),
         .hours = row.running_unix_s ? std::max(0.0, last_unix_s - *row.running_unix_s) / kSecondsPerHour : 0,
         .lost = losses.contains({row.run, row.id})});
  }
}

Result<LedgerTotals> Ledger::totals(double now_unix_s) const {
  ECHO_ASSIGN(const std::vector<LedgerRow> rows_of_run, rows());
  LedgerTotals totals;
  for (const LedgerRow& row : rows_of_run) {
    totals.usd += row.usd(now_unix_s);
    const bool never_ran = row.state == InstanceState::kFailed && !row.running_unix_s;
    totals.prices_known = totals.prices_known && (row.price_known || never_ran);
    switch (row.state) {
      case InstanceState::kIntended:
        ++totals.intended;
        break;
      case InstanceState::kRunning:
        ++totals.running;
        break;
      case InstanceState::kEnded:
        ++totals.ended;
        break;
      case InstanceState::kFailed:
        ++totals.failed;
        break;
    }
    if (row.is_open()) totals.usd_per_hour += row.usd_per_hour;
  }
  return totals;
}

std::vector<LedgerHost> known_hosts(const std::filesystem::path& folder) {
  std::vector<LedgerHost> hosts;
  std::error_code error;
  std::size_t folder_count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (++folder_count > kFoldersMax) break;
    std::error_code unreadable;
    if (!std::filesystem::is_regular_file(entry.path() / "ledger.sqlite", unreadable)) continue;
    // The folder has the run's name, so open() adds no run to the ledger.
    const auto ledger = Ledger::open(entry.path() / "ledger.sqlite", entry.path().filename());
    if (!ledger) continue;
    if (const auto more_hosts = ledger->hosts()) hosts.insert(hosts.end(), more_hosts->begin(), more_hosts->end());
  }
  std::stable_sort(hosts.begin(), hosts.end(), [](const auto& a, const auto& b) { return a.unix_s > b.unix_s; });
  return hosts;
}

}  // namespace echoline::provisioner
