// The SQL behind JobLedger: loads the core and writes each kind of change.
#include "replay_buffer/lease_journal.hpp"

#include <map>
#include <tuple>
#include <variant>

namespace echoline::replay_buffer {
namespace {

constexpr const char* kLiveLeases =
    "SELECT lease_id, group_id, worker, version, policy_digest, rollouts, granted_unix_s, expires_unix_s, state, "
    "lease_s, due_unix_s, progress "
    "FROM lease WHERE state = 0";
constexpr const char* kEndedLease =
    "SELECT lease_id, group_id, worker, version, policy_digest, rollouts, granted_unix_s, expires_unix_s, state, "
    "lease_s FROM lease "
    "WHERE lease_id = ?1 AND state <> 0";

LeaseRecord lease_record(const Row& row) {
  return {LeaseId{row.integer(0)},
          GroupId{row.integer(1)},
          WorkerId{row.integer(2)},
          Version{row.integer(3)},
          std::string(row.bytes(4)),
          static_cast<std::uint32_t>(row.integer(5)),
          row.real(6),
          row.real(7),
          static_cast<LeaseState>(row.integer(8)),
          row.real(9)};
}

std::uint32_t to_uint32(const Row& row, int column) { return static_cast<std::uint32_t>(row.integer(column)); }

}  // namespace

Status LeaseJournal::load(LeaseCore& core) {
  ECHO_TRY(db_.each("SELECT group_id, worker, failures, lost FROM failure", [&](const Row& row) {
    core.load_failure(GroupId{row.integer(0)}, WorkerId{row.integer(1)}, to_uint32(row, 2), row.integer(3) > 0);
  }));
  ECHO_TRY(db_.each("SELECT group_id FROM pool", [&](const Row& row) { core.load_pooled(GroupId{row.integer(0)}); }));
  ECHO_TRY(db_.each("SELECT worker, lapses, batches FROM worker WHERE lapses > 0", [&](const Row& row) {
    core.load_lapses(WorkerId{row.integer(0)}, {to_uint32(row, 1), to_uint32(row, 2)});
  }));
  ECHO_TRY(db_.each(kLiveLeases, [&](const Row& row) {
    core.load({lease_record(row), row.real(10), row.integer(11)});
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
  if (totals_found != 5)
    return fail(Code::kCorrupt, "job ledger", "{}: expected 5 totals in table meta, found {}", db_.path().string(),
                totals_found);
  core.load_totals(totals);
  return ok();
}

Status LeaseJournal::write(std::span<const LeaseChange> changes) {
  for (const LeaseChange& change : changes) ECHO_TRY(std::visit([this](const auto& c) { return write(c); }, change));
  return ok();
}

Status LeaseJournal::write_totals(const LeaseCore& core) {
  const LeaseTotals& now = core.totals();
  const std::tuple<std::string_view, std::uint64_t, std::uint64_t> totals[] = {
      {"next_lease", now.next_lease, core.totals_before().next_lease},
      {"next_group", now.next_group, core.totals_before().next_group},
      {"leases_settled", now.settled, core.totals_before().settled},
      {"leases_expired", now.expired, core.totals_before().expired},
      {"leases_released", now.released, core.totals_before().released}};
  for (const auto& [key, value, before] : totals)
    if (value != before) ECHO_TRY(db_.run("UPDATE meta SET value = ?2 WHERE key = ?1", key, value));
  return ok();
}

Status LeaseJournal::write(const change::Leased& c) {
  const LeaseRecord& l = c.lease.record;
  return db_.run("INSERT INTO lease VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, 0, NULL, 0)", l.id.value,
                 l.group.value, l.worker.value, l.version.value, Blob{l.policy_digest}, l.rollouts, l.granted_unix_s,
                 l.expires_unix_s, l.lease_s, c.lease.due_s);
}

Status LeaseJournal::write(const change::Ended& c) {
  ECHO_TRY(db_.run("UPDATE lease SET state = ?2, settled_unix_s = ?3 WHERE lease_id = ?1 AND state = 0", c.lease.value,
                   static_cast<int>(c.state), c.settled_s));
  ECHO_CHECK(db_.changes() == 1, "lease {} was not live in the file", c.lease);
  return ok();
}

Status LeaseJournal::write(const change::Renewed& c) {
  return db_.run("UPDATE lease SET progress = ?2, expires_unix_s = ?3 WHERE lease_id = ?1", c.lease.value, c.progress,
                 c.expires_s);
}

Status LeaseJournal::write(const change::WaitsShortened& c) {
  return db_.run("UPDATE lease SET due_unix_s = min(due_unix_s, granted_unix_s + ?2) WHERE state = 0 AND worker = ?1",
                 c.worker.value, c.patience_s);
}

Status LeaseJournal::write(const change::AllExtended& c) {
  return db_.run("UPDATE lease SET due_unix_s = due_unix_s + ?1, expires_unix_s = expires_unix_s + ?1 WHERE state = 0",
                 c.late_s);
}

Status LeaseJournal::write(const change::Pooled& c) {
  return db_.run("INSERT OR IGNORE INTO pool VALUES(?1)", c.group.value);
}

Status LeaseJournal::write(const change::Unpooled& c) {
  return db_.run("DELETE FROM pool WHERE group_id = ?1", c.group.value);
}

Status LeaseJournal::write(const change::Failed& c) {
  return db_.run("INSERT OR REPLACE INTO failure VALUES(?1, ?2, ?3, ?4)", c.group.value, c.worker.value, c.failures,
                 c.worker_lost ? 1 : 0);
}

Status LeaseJournal::write(const change::FailuresForgotten& c) {
  return db_.run("DELETE FROM failure WHERE group_id = ?1", c.group.value);
}

Status LeaseJournal::write(const change::GroupSetAside& c) {
  return db_.run("INSERT INTO set_aside VALUES(?1, ?2, ?3)", c.aside.group.value, c.aside.reason, c.aside.detail);
}

Status LeaseJournal::write(const change::Lapsed& c) {
  ECHO_TRY(
      db_.run("INSERT INTO worker VALUES(?1, ?2, ?3, 0, 0) ON CONFLICT(worker) DO UPDATE SET lapses = excluded.lapses, "
              "batches = excluded.batches",
              c.worker.value, c.lapses.weight, c.lapses.batches));
  return forget_if_clean(c.worker);
}

Status LeaseJournal::write_misconduct(WorkerId worker, const Misconduct& misconduct) {
  ECHO_TRY(
      db_.run("INSERT INTO worker VALUES(?1, 0, 0, ?2, ?3) ON CONFLICT(worker) DO UPDATE SET malformed = "
              "excluded.malformed, failures = excluded.failures",
              worker.value, misconduct.malformed, misconduct.failures));
  return forget_if_clean(worker);
}

Status LeaseJournal::forget_if_clean(WorkerId worker) {
  return db_.run("DELETE FROM worker WHERE worker = ?1 AND lapses = 0 AND malformed = 0 AND failures = 0",
                 worker.value);
}

Result<std::optional<LeaseRecord>> LeaseJournal::find_ended(LeaseId id) {
  std::optional<LeaseRecord> lease;
  ECHO_TRY(db_.each(
      kEndedLease, [&](const Row& row) { lease = lease_record(row); }, id.value));
  return lease;
}

}  // namespace echoline::replay_buffer
