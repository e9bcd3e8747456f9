// The SQL behind JobLedger: loads the core and writes each kind of change.
#include "replay_buffer/lease_journal.hpp"

#include <map>
#include <tuple>
#include <variant>

namespace echoline::replay_buffer {
namespace {

constexpr const char* kSelectLiveLeases =
    "SELECT lease_id, group_id, worker, version, policy_digest, rollouts, granted_unix_s, expires_unix_s, state, "
    "lease_s, due_unix_s, progress FROM lease WHERE state = 0";
constexpr const char* kSelectEndedLease =
    "SELECT lease_id, group_id, worker, version, policy_digest, rollouts, granted_unix_s, expires_unix_s, state, "
    "lease_s FROM lease WHERE lease_id = ?1 AND state <> 0";

// Reads the columns with which both queries begin.
LeaseRecord lease_record(const Row& row) {
  return {.id = LeaseId{row.integer(0)},
          .group = GroupId{row.integer(1)},
          .worker = WorkerId{row.integer(2)},
          .version = Version{row.integer(3)},
          .policy_digest = std::string(row.bytes(4)),
          .rollouts = static_cast<std::uint32_t>(row.integer(5)),
          .granted_unix_s = row.real(6),
          .expires_unix_s = row.real(7),
          .state = static_cast<LeaseState>(row.integer(8)),
          .lease_s = row.real(9)};
}

constexpr std::size_t kTotalsCount = 5;  // rows of table meta that load() reads and write_totals() writes

std::uint32_t to_uint32(const Row& row, int column) { return static_cast<std::uint32_t>(row.integer(column)); }

}  // namespace

Status LeaseJournal::load(LeaseCore& core) {
  ECHO_TRY(db_.each("SELECT group_id, worker, failures, lost FROM failure", [&](const Row& row) {
    core.load_failure(GroupId{row.integer(0)}, WorkerId{row.integer(1)}, to_uint32(row, 2), row.integer(3) > 0);
  }));
  ECHO_TRY(db_.each("SELECT group_id FROM pool", [&](const Row& row) { core.load_pooled(GroupId{row.integer(0)}); }));
  ECHO_TRY(db_.each("SELECT worker, lapses, batches FROM worker WHERE lapses > 0", [&](const Row& row) {
    core.load_lapses(WorkerId{row.integer(0)}, {.weight = to_uint32(row, 1), .batches = to_uint32(row, 2)});
  }));
  ECHO_TRY(db_.each(kSelectLiveLeases, [&](const Row& row) {
    core.load({.record = lease_record(row), .due_s = row.real(10), .progress = row.integer(11), .overdue = false});
  }));
  LeaseTotals totals;
  std::size_t totals_found = 0;
  ECHO_TRY(db_.each("SELECT key, value FROM meta", [&](const Row& row) {
    const std::map<std::string_view, std::uint64_t*> keys = {{"next_lease", &totals.next_lease},
                                                             {"next_group", &totals.next_group},
                                                             {"leases_settled", &totals.settled},
                                                             {"leases_expired", &totals.expired},
                                                             {"leases_released", &totals.released}};
    const auto key = keys.find(row.bytes(0));
    if (key == keys.end()) return;
    *key->second = row.integer(1);
    ++totals_found;
  }));
  if (totals_found != kTotalsCount)
    return fail(Code::kCorrupt, "job ledger", "{}: expected {} totals in table meta, found {}", db_.path().string(),
                kTotalsCount, totals_found);
  core.load_totals(totals);
  return ok();
}

Status LeaseJournal::write(std::span<const LeaseChange> changes) {
  for (const LeaseChange& change : changes)
    ECHO_TRY(std::visit([this](const auto& kind) { return write(kind); }, change));
  return ok();
}

Status LeaseJournal::write_totals(const LeaseCore& core) {
  const LeaseTotals& current = core.totals();
  const LeaseTotals& earlier = core.totals_before();
  const std::tuple<std::string_view, std::uint64_t, std::uint64_t> totals[] = {
      {"next_lease", current.next_lease, earlier.next_lease},
      {"next_group", current.next_group, earlier.next_group},
      {"leases_settled", current.settled, earlier.settled},
      {"leases_expired", current.expired, earlier.expired},
      {"leases_released", current.released, earlier.released}};
  for (const auto& [key, value, value_before] : totals)
    if (value != value_before) ECHO_TRY(db_.run("UPDATE meta SET value = ?2 WHERE key = ?1", key, value));
  return ok();
}

Status LeaseJournal::write(const change::Leased& change) {
  const LeaseRecord& record = change.lease.record;
  // The last three columns: no progress, not settled, live.
  return db_.run("INSERT INTO lease VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, 0, NULL, 0)", record.id.value,
                 record.group.value, record.worker.value, record.version.value, Blob{record.policy_digest},
                 record.rollouts, record.granted_unix_s, record.expires_unix_s, record.lease_s, change.lease.due_s);
}

Status LeaseJournal::write(const change::Ended& change) {
  ECHO_TRY(db_.run("UPDATE lease SET state = ?2, settled_unix_s = ?3 WHERE lease_id = ?1 AND state = 0",
                   change.lease.value, static_cast<int>(change.state), change.settled_s));
  ECHO_CHECK(db_.changes() == 1, "lease {} was not live in the file", change.lease);
  return ok();
}

Status LeaseJournal::write(const change::Renewed& change) {
  return db_.run("UPDATE lease SET progress = ?2, expires_unix_s = ?3 WHERE lease_id = ?1", change.lease.value,
                 change.progress, change.expires_s);
}

Status LeaseJournal::write(const change::WaitsShortened& change) {
  return db_.run("UPDATE lease SET due_unix_s = min(due_unix_s, granted_unix_s + ?2) WHERE state = 0 AND worker = ?1",
                 change.worker.value, change.patience_s);
}

Status LeaseJournal::write(const change::AllExtended& change) {
  return db_.run("UPDATE lease SET due_unix_s = due_unix_s + ?1, expires_unix_s = expires_unix_s + ?1 WHERE state = 0",
                 change.extend_by_s);
}

Status LeaseJournal::write(const change::Pooled& change) {
  return db_.run("INSERT OR IGNORE INTO pool VALUES(?1)", change.group.value);
}

Status LeaseJournal::write(const change::Unpooled& change) {
  return db_.run("DELETE FROM pool WHERE group_id = ?1", change.group.value);
}

Status LeaseJournal::write(const change::FailuresCounted& change) {
  return db_.run("INSERT OR REPLACE INTO failure VALUES(?1, ?2, ?3, ?4)", change.group.value, change.worker.value,
                 change.failures, change.worker_lost ? 1 : 0);
}

Status LeaseJournal::write(const change::FailuresForgotten& change) {
  return db_.run("DELETE FROM failure WHERE group_id = ?1", change.group.value);
}

Status LeaseJournal::write(const change::GroupSetAside& change) {
  return db_.run("INSERT INTO set_aside VALUES(?1, ?2, ?3)", change.aside.group.value, change.aside.reason,
                 change.aside.detail);
}

Status LeaseJournal::write(const change::Lapsed& change) {
  // The last two columns: no misconduct, if the row is new.
  ECHO_TRY(
      db_.run("INSERT INTO worker VALUES(?1, ?2, ?3, 0, 0) ON CONFLICT(worker) DO UPDATE SET lapses = excluded.lapses, "
              "batches = excluded.batches",
              change.worker.value, change.lapses.weight, change.lapses.batches));
  return delete_worker_if_faultless(change.worker);
}

Status LeaseJournal::write_misconduct(WorkerId worker, const Misconduct& misconduct) {
  // The zeros: no lapses, if the row is new.
  ECHO_TRY(
      db_.run("INSERT INTO worker VALUES(?1, 0, 0, ?2, ?3) ON CONFLICT(worker) DO UPDATE SET malformed = "
              "excluded.malformed, failures = excluded.failures",
              worker.value, misconduct.malformed, misconduct.failures));
  return delete_worker_if_faultless(worker);
}

Status LeaseJournal::delete_worker_if_faultless(WorkerId worker) {
  return db_.run("DELETE FROM worker WHERE worker = ?1 AND lapses = 0 AND malformed = 0 AND failures = 0",
                 worker.value);
}

Result<std::optional<LeaseRecord>> LeaseJournal::find_ended(LeaseId id) {
  std::optional<LeaseRecord> lease;
  ECHO_TRY(db_.each(
      kSelectEndedLease, [&](const Row& row) { lease = lease_record(row); }, id.value));
  return lease;
}

}  // namespace echoline::replay_buffer
