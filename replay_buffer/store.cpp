// Opens the file of ReplayBuffer and JobLedger, creates its schema, and inserts trajectories.
#include "replay_buffer/store.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint64_t kCheckedFileBytesMax = 256ull << 20;  // a check of larger files at open would take too long
constexpr std::string_view kOpen = "open replay buffer";

// FORMAT.md describes the columns.
constexpr const char* kSchema[] = {
    "CREATE TABLE meta(key TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE rejected(reason TEXT PRIMARY KEY, trajectories INTEGER NOT NULL) STRICT, WITHOUT ROWID",
    "CREATE TABLE groups(group_id INTEGER PRIMARY KEY, version INTEGER NOT NULL, members INTEGER NOT NULL, "
    "consumed_step INTEGER, dropped_step INTEGER, unscored INTEGER NOT NULL DEFAULT 0) STRICT",
    "CREATE INDEX groups_unscored ON groups(version, group_id) WHERE unscored = 1",
    "CREATE INDEX groups_waiting ON groups(version, group_id) WHERE consumed_step IS NULL AND dropped_step IS NULL",
    "CREATE INDEX groups_consumed ON groups(consumed_step) WHERE consumed_step IS NOT NULL",
    "CREATE INDEX groups_dropped ON groups(dropped_step) WHERE dropped_step IS NOT NULL",
    "CREATE TABLE trajectory(id TEXT NOT NULL UNIQUE, group_id INTEGER NOT NULL, member INTEGER NOT NULL, "
    "body BLOB NOT NULL, UNIQUE(group_id, member)) STRICT",
    "CREATE TABLE lease(lease_id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, worker INTEGER NOT NULL, "
    "version INTEGER NOT NULL, policy_digest BLOB NOT NULL, rollouts INTEGER NOT NULL, granted_unix_s REAL NOT NULL, "
    "expires_unix_s REAL NOT NULL, lease_s REAL NOT NULL, due_unix_s REAL NOT NULL, progress INTEGER NOT NULL, "
    "settled_unix_s REAL, state INTEGER NOT NULL) STRICT",
    "CREATE INDEX lease_live ON lease(worker) WHERE state = 0",
    "CREATE INDEX lease_group ON lease(group_id)",
    "CREATE TABLE pool(group_id INTEGER PRIMARY KEY) STRICT",
    "CREATE TABLE failure(group_id INTEGER NOT NULL, worker INTEGER NOT NULL, failures INTEGER NOT NULL, "
    "lost INTEGER NOT NULL, PRIMARY KEY(group_id, worker)) STRICT, WITHOUT ROWID",
    "CREATE TABLE worker(worker INTEGER PRIMARY KEY, lapses INTEGER NOT NULL, batches INTEGER NOT NULL, "
    "malformed INTEGER NOT NULL, failures INTEGER NOT NULL) STRICT",
    "CREATE TABLE set_aside(group_id INTEGER PRIMARY KEY, reason TEXT NOT NULL, detail TEXT NOT NULL) STRICT",
    "INSERT INTO meta VALUES('next_group', 0), ('next_lease', 1), ('pruned_consumed', 0), ('leases_settled', 0), "
    "('leases_expired', 0), ('leases_released', 0)",
    "PRAGMA application_id = 1162037327",
    "PRAGMA user_version = 4",
};
static_assert(kApplicationId == 1162037327 && kSchemaVersion == 4);

}  // namespace

Result<std::unique_ptr<Store>> Store::open(const std::filesystem::path& path, const BufferOptions& options) {
  if (options.group_size == 0) return fail(Code::kInvalid, kOpen, "group_size is 0, expected 1 or more");
  ECHO_ASSIGN(auto database, Database::open(path));
  std::unique_ptr<Store> store(new Store);
  store->database = std::move(database);
  store->options = options;
  ECHO_TRY(store->create_or_check());
  ECHO_TRY(store->load_totals());
  ECHO_TRY(store->load_waiting());
  return store;
}

Status Store::create_or_check() {
  Database& db = *database;
  const std::string path = db.path().string();
  ECHO_ASSIGN(const auto schema_entries, db.first_integer("SELECT count(*) FROM sqlite_schema"));
  ECHO_ASSIGN(const auto application_id, db.first_integer("PRAGMA application_id"));
  ECHO_ASSIGN(const auto version, db.first_integer("PRAGMA user_version"));
  if (schema_entries == 0u) {  // a new file
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db));
    for (const char* sql : kSchema) ECHO_TRY(db.run(sql));
    ECHO_TRY(db.run("INSERT INTO meta VALUES('group_size', ?1)", options.group_size));
    return transaction.commit();
  }
  if (application_id != kApplicationId)
    return fail(Code::kInvalid, kOpen, "{}: an SQLite file of another program; choose another path", path);
  if (version != kSchemaVersion)
    return fail(Code::kInvalid, kOpen,
                "{}: written with schema version {}, this release reads {}; finish the run with the release that "
                "started it, or start again with an empty file",
                path, version.value_or(0), kSchemaVersion);
  std::error_code ignored;
  if (std::filesystem::file_size(db.path(), ignored) <= kCheckedFileBytesMax) {
    std::string first_damage;  // "ok" if there is none
    ECHO_TRY(db.each("PRAGMA quick_check(1)", [&](const Row& row) { first_damage = row.bytes(0); }));
    if (first_damage != "ok") return db.error(SQLITE_CORRUPT);  // its text tells what to do; the damage would not help
  }
  ECHO_ASSIGN(const auto group_size, db.first_integer("SELECT value FROM meta WHERE key = 'group_size'"));
  if (group_size != options.group_size)
    return fail(Code::kInvalid, kOpen, "{}: holds groups of {}, the run asks for {}; a run keeps its group size", path,
                group_size.value_or(0), options.group_size);
  return ok();
}

Status Store::load_totals() {
  return database->each("SELECT count(*), coalesce(sum(length(body)), 0) FROM trajectory",
                        [&](const Row& row) { totals = {.rows = row.integer(0), .bytes = row.integer(1)}; });
}

namespace {

// Returns the group of a row (group_id, version, members, unscored).
WaitingGroup waiting_group(const Row& row) {
  return {.version = Version{row.integer(1)},
          .members = static_cast<std::uint32_t>(row.integer(2)),
          .scored = row.integer(3) == 0};
}

}  // namespace

Status Store::load_waiting() {
  WaitingGroups loaded(options.group_size);
  ECHO_TRY(database->each(
      "SELECT group_id, version, members, unscored FROM groups WHERE consumed_step IS NULL AND dropped_step IS NULL",
      [&](const Row& row) { loaded.put(GroupId{row.integer(0)}, waiting_group(row)); }));
  waiting = std::move(loaded);
  return ok();
}

Status Store::reload_waiting(GroupId group) {
  std::optional<WaitingGroup> loaded;
  ECHO_TRY(database->each(
      "SELECT group_id, version, members, unscored FROM groups WHERE consumed_step IS NULL AND dropped_step IS NULL "
      "AND group_id = ?1",
      [&](const Row& row) { loaded = waiting_group(row); }, group.value));
  waiting.remove(group);
  if (loaded) waiting.put(group, *loaded);
  return ok();
}

Result<bool> Store::insert(const Trajectory& trajectory) {
  constexpr std::string_view kInsert = "add trajectory";
  Database& db = *database;
  if (trajectory.member() >= options.group_size)
    return fail(Code::kInvalid, kInsert, "'{}' is member {} of a group of {}", trajectory.id(), trajectory.member(),
                options.group_size);
  std::optional<std::string> collision;  // the stored trajectory with the same id, or at the same place
  bool is_duplicate = false;
  ECHO_TRY(db.each(
      "SELECT id, group_id, member FROM trajectory WHERE id = ?1 OR (group_id = ?2 AND member = ?3)",
      [&](const Row& row) {
        if (row.bytes(0) == trajectory.id() && row.integer(1) == trajectory.group() &&
            row.integer(2) == trajectory.member())
          is_duplicate = true;
        else
          collision = fmt::format("'{}' (group {}, member {})", row.bytes(0), row.integer(1), row.integer(2));
      },
      trajectory.id(), trajectory.group(), trajectory.member()));
  if (collision)
    return fail(Code::kInvalid, kInsert, "'{}' (group {}, member {}) collides with {} stored earlier", trajectory.id(),
                trajectory.group(), trajectory.member(), *collision);
  if (is_duplicate) return false;

  const std::string body = trajectory.SerializeAsString();
  if (totals.rows + 1 > options.rows_max || totals.bytes + body.size() > options.bytes_max.count)
    return fail(Code::kExhausted, kInsert,
                "the buffer holds {} of {} trajectories and {} of {}; prune more often or raise the limit", totals.rows,
                options.rows_max, to_text(Bytes{totals.bytes}), to_text(options.bytes_max));
  ECHO_TRY(db.run("INSERT INTO trajectory(id, group_id, member, body) VALUES(?1, ?2, ?3, ?4)", trajectory.id(),
                  trajectory.group(), trajectory.member(), Blob{body}));
  ECHO_TRY(
      db.run("INSERT INTO groups(group_id, version, members) VALUES(?1, ?2, 1) ON CONFLICT(group_id) DO UPDATE SET "
             "version = min(version, excluded.version), members = members + 1",
             trajectory.group(), data_plane::oldest_version(trajectory).value));
  ++totals.rows;
  totals.bytes += body.size();
  return true;
}

Status Store::count_rejected(std::string_view reason, std::uint64_t trajectories) {
  return database->run(
      "INSERT INTO rejected VALUES(?1, ?2) ON CONFLICT(reason) DO UPDATE SET trajectories = trajectories + "
      "excluded.trajectories",
      reason, trajectories);
}

void Store::check_thread() {
  if (owner_ == std::thread::id()) owner_ = std::this_thread::get_id();
  ECHO_CHECK(owner_ == std::this_thread::get_id(), "the replay buffer belongs to one thread");
}

}  // namespace echoline::replay_buffer
