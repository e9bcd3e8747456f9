// The replay buffer's operations as SQL transactions on the Store. The rollout desk calls it.
#include "replay_buffer/buffer.hpp"

#include <algorithm>

#include "replay_buffer/store.hpp"

namespace echoline::replay_buffer {

// Groups neither consumed nor dropped. The text must equal the condition of the index groups_waiting (store.cpp), so
// that SQLite uses that index.
#define ECHO_WAITING "consumed_step IS NULL AND dropped_step IS NULL"

std::vector<GroupId> Batch::ids() const {
  std::vector<GroupId> ids;
  for (const Group& group : groups) ids.push_back(group.id);
  return ids;
}

ReplayBuffer::ReplayBuffer(std::unique_ptr<Store> store) : store_(std::move(store)) {}
ReplayBuffer::~ReplayBuffer() = default;
const BufferOptions& ReplayBuffer::options() const { return store_->options; }

Result<std::unique_ptr<ReplayBuffer>> ReplayBuffer::open(const std::filesystem::path& path,
                                                         const BufferOptions& options) {
  ECHO_ASSIGN(auto store, Store::open(path, options));
  return std::unique_ptr<ReplayBuffer>(new ReplayBuffer(std::move(store)));
}

Result<AddOutcome> ReplayBuffer::add(std::span<const Trajectory> trajectories) {
  store_->check_thread();
  for (const Trajectory& trajectory : trajectories) ECHO_TRY(data_plane::check(trajectory, store_->options.limits));
  AddOutcome outcome;
  const Store::Totals totals_before = store_->totals;
  const auto insert_all = [&]() -> Status {
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(*store_->database));
    for (const Trajectory& trajectory : trajectories) {
      ECHO_ASSIGN(const bool is_new, store_->insert(trajectory));
      if (is_new)
        ++outcome.stored;
      else
        ++outcome.duplicates;
    }
    return transaction.commit();
  };
  if (Status status = insert_all(); !status) {
    store_->totals = totals_before;  // the transaction was rolled back, but insert() has counted
    return std::move(status).error();
  }
  std::set<GroupId> groups;
  for (const Trajectory& trajectory : trajectories) groups.insert(GroupId{trajectory.group()});
  for (const GroupId group : groups) ECHO_TRY(store_->reload_waiting(group));
  return outcome;
}

Result<std::optional<Batch>> ReplayBuffer::sample(std::uint64_t step, std::uint32_t group_count) {
  store_->check_thread();
  if (group_count == 0) return fail(Code::kInvalid, "sample", "0 groups asked for, expected 1 or more");
  for (;;) {
    const auto chosen = store_->waiting.next_batch(Version{store_->version_min(step)}, group_count);
    if (!chosen) return std::optional<Batch>();
    Batch batch{step, {}};
    for (const GroupId group : *chosen) batch.groups.push_back({group, store_->waiting.find(group)->version, {}});
    ECHO_ASSIGN(const std::optional<GroupId> unreadable, read_groups_until_unreadable(batch));
    if (!unreadable) return std::optional<Batch>(std::move(batch));
    ECHO_TRY(discard(*unreadable, "unreadable"));
  }
}

// Reads the trajectories of the batch's groups until one group cannot be read, and returns that one; absent if all can.
Result<std::optional<GroupId>> ReplayBuffer::read_groups_until_unreadable(Batch& batch) {
  for (Group& group : batch.groups) {
    bool is_readable = true;
    ECHO_TRY(store_->database->each(
        "SELECT body FROM trajectory WHERE group_id = ?1 ORDER BY member",
        [&](const Row& row) {
          auto trajectory = data_plane::parse_trajectory(row.bytes(0), store_->options.limits);
          is_readable = is_readable && trajectory && trajectory->group() == group.id.value;
          if (trajectory) group.trajectories.push_back(std::move(*trajectory));
        },
        group.id.value));
    if (!is_readable || group.trajectories.size() != store_->options.group_size) return std::optional(group.id);
  }
  return std::optional<GroupId>();
}

Status ReplayBuffer::discard(GroupId group, std::string_view reason) {
  store_->check_thread();
  Database& db = *store_->database;
  ECHO_ASSIGN(Transaction transaction, Transaction::begin(db));
  ECHO_ASSIGN(const auto bytes,
              db.first_integer("SELECT sum(length(body)) FROM trajectory WHERE group_id = ?1", group.value));
  ECHO_TRY(db.run("DELETE FROM trajectory WHERE group_id = ?1", group.value));
  const std::uint64_t deleted = db.changes();
  ECHO_TRY(db.run("DELETE FROM groups WHERE group_id = ?1", group.value));
  ECHO_TRY(store_->count_rejected(reason, deleted));
  // A group whose id a lease assigned (below next_group) returns to the pool, from which it is leased again. Other
  // groups never had a lease, so no worker may generate them.
  ECHO_TRY(
      db.run("INSERT OR IGNORE INTO pool SELECT ?1 WHERE EXISTS (SELECT 1 FROM meta WHERE key = 'next_group' AND "
             "value > ?1)",
             group.value));
  ECHO_TRY(transaction.commit());
  store_->waiting.remove(group);
  store_->on_discard(group);
  store_->totals.rows -= deleted;
  store_->totals.bytes -= bytes.value_or(0);
  return ok();
}

Result<std::vector<Group>> ReplayBuffer::unscored_groups(std::size_t groups_max, const std::set<GroupId>& known) {
  store_->check_thread();
  Batch batch;
  // The query's limit counts the groups in `known` too, because they are skipped below.
  ECHO_TRY(store_->database->each(
      "SELECT group_id, version FROM groups WHERE unscored = 1 AND " ECHO_WAITING
      " AND members = ?1 ORDER BY version, group_id LIMIT ?2",
      [&](const Row& row) {
        const GroupId id{row.integer(0)};
        if (!known.contains(id) && batch.groups.size() < groups_max)
          batch.groups.push_back({id, Version{row.integer(1)}, {}});
      },
      store_->options.group_size, groups_max + known.size()));
  for (;;) {
    for (Group& group : batch.groups)
      group.trajectories.clear();  // a previous round, which found an unreadable group, may have read them
    ECHO_ASSIGN(const std::optional<GroupId> unreadable, read_groups_until_unreadable(batch));
    if (!unreadable) return std::move(batch.groups);
    ECHO_TRY(discard(*unreadable, "unreadable"));
    std::erase_if(batch.groups, [&](const Group& group) { return group.id == *unreadable; });
  }
}

Result<bool> ReplayBuffer::awaits_scores(const Group& group) {
  store_->check_thread();
  Database& db = *store_->database;
  ECHO_ASSIGN(
      const auto waiting,
      db.first_integer("SELECT 1 FROM groups WHERE group_id = ?1 AND unscored = 1 AND " ECHO_WAITING, group.id.value));
  if (!waiting) return false;
  for (const Trajectory& trajectory : group.trajectories) {
    ECHO_ASSIGN(const auto stored, db.first_integer("SELECT 1 FROM trajectory WHERE id = ?1 AND group_id = ?2",
                                                    trajectory.id(), group.id.value));
    if (!stored) return false;  // the group was discarded and generated again, so it has other trajectories
  }
  return true;
}

Result<bool> ReplayBuffer::store_scores(const Group& group) {
  store_->check_thread();
  Database& db = *store_->database;
  for (const Trajectory& trajectory : group.trajectories)
    ECHO_TRY(data_plane::check(trajectory, store_->options.limits));
  ECHO_ASSIGN(Transaction transaction, Transaction::begin(db));
  ECHO_ASSIGN(const bool awaited, awaits_scores(group));
  if (!awaited) return false;
  constexpr const char* kBodyBytes = "SELECT sum(length(body)) FROM trajectory WHERE group_id = ?1";
  ECHO_ASSIGN(const auto bytes_before, db.first_integer(kBodyBytes, group.id.value));
  for (const Trajectory& trajectory : group.trajectories)
    ECHO_TRY(
        db.run("UPDATE trajectory SET body = ?2 WHERE id = ?1", trajectory.id(), Blob{trajectory.SerializeAsString()}));
  ECHO_ASSIGN(const auto bytes_after, db.first_integer(kBodyBytes, group.id.value));
  ECHO_TRY(db.run("UPDATE groups SET unscored = 0 WHERE group_id = ?1", group.id.value));
  // The group has succeeded, so earlier failures of workers on it no longer count.
  ECHO_TRY(db.run("DELETE FROM failure WHERE group_id = ?1", group.id.value));
  ECHO_TRY(transaction.commit());
  store_->totals.bytes += bytes_after.value_or(0) - bytes_before.value_or(0);  // may wrap around: the sum is right
  ECHO_TRY(store_->reload_waiting(group.id));
  return true;
}

Result<std::uint64_t> ReplayBuffer::discard_groups_of(WorkerId worker, std::string_view reason,
                                                      std::span<const GroupId> kept) {
  store_->check_thread();
  std::vector<GroupId> groups;
  // A group may have had several leases; the latest settled one (state 1) names the worker whose result is stored.
  ECHO_TRY(store_->database->each(
      "SELECT group_id FROM groups WHERE " ECHO_WAITING
      " AND (SELECT worker FROM lease WHERE lease.group_id = groups.group_id "
      "AND state = 1 ORDER BY lease_id DESC LIMIT 1) = ?1",
      [&](const Row& row) { groups.push_back(GroupId{row.integer(0)}); }, worker.value));
  std::erase_if(groups, [&](GroupId group) { return std::ranges::find(kept, group) != kept.end(); });
  for (const GroupId group : groups) ECHO_TRY(discard(group, reason));
  return std::uint64_t{groups.size()};
}

Status ReplayBuffer::consume(std::uint64_t step, std::span<const GroupId> groups) {
  store_->check_thread();
  Database& db = *store_->database;
  ECHO_ASSIGN(Transaction transaction, Transaction::begin(db));
  for (const GroupId group : groups) {
    // A resumed run may repeat a step's call, so a group may be consumed again at the same step.
    ECHO_TRY(
        db.run("UPDATE groups SET consumed_step = ?1 WHERE group_id = ?2 AND members = ?3 AND version >= ?4 AND "
               "dropped_step IS NULL AND (consumed_step IS NULL OR consumed_step = ?1)",
               step, group.value, store_->options.group_size, store_->version_min(step)));
    if (db.changes() == 1) continue;
    std::string reason = "it is unknown";
    ECHO_TRY(db.each(
        "SELECT version, members, consumed_step, dropped_step FROM groups WHERE group_id = ?1",
        [&](const Row& row) {
          if (!row.is_null(2))
            reason = fmt::format("it was consumed at step {}", row.integer(2));
          else if (!row.is_null(3))
            reason = fmt::format("it was dropped as stale at step {}", row.integer(3));
          else if (row.integer(1) != store_->options.group_size)
            reason = fmt::format("it has {} of {} members", row.integer(1), store_->options.group_size);
          else
            reason = fmt::format("its version {} is more than {} steps old", row.integer(0),
                                 store_->options.staleness_budget);
        },
        group.value));
    return fail(Code::kInvalid, "consume", "group {} cannot be consumed at step {}: {}", group, step, reason);
  }
  ECHO_TRY(transaction.commit());
  for (const GroupId group : groups) store_->waiting.remove(group);
  return ok();
}

Status ReplayBuffer::rewind(std::uint64_t step) {
  store_->check_thread();
  Database& db = *store_->database;
  ECHO_ASSIGN(Transaction transaction, Transaction::begin(db));
  ECHO_TRY(db.run("UPDATE groups SET consumed_step = NULL WHERE consumed_step >= ?1", step));
  ECHO_TRY(db.run("UPDATE groups SET dropped_step = NULL WHERE dropped_step >= ?1", step));
  ECHO_TRY(transaction.commit());
  return store_->load_waiting();
}

Result<std::uint64_t> ReplayBuffer::drop_stale(std::uint64_t step) {
  store_->check_thread();
  Database& db = *store_->database;
  const std::uint64_t version_min = store_->version_min(step);
  ECHO_ASSIGN(const auto trajectories,
              db.first_integer("SELECT sum(members) FROM groups WHERE " ECHO_WAITING " AND version < ?1", version_min));
  if (!trajectories) return std::uint64_t{0};
  ECHO_TRY(db.run("UPDATE groups SET dropped_step = ?1 WHERE " ECHO_WAITING " AND version < ?2", step, version_min));
  for (const GroupId group : store_->waiting.older_than(Version{version_min})) store_->waiting.remove(group);
  return *trajectories;
}

Result<Counts> ReplayBuffer::counts(std::uint64_t step) {
  store_->check_thread();
  Database& db = *store_->database;
  Counts counts;
  counts.stored = store_->totals.rows;
  ECHO_TRY(db.each(
      // The first column: 0 incomplete, 1 complete, 2 complete without scores.
      "SELECT (members = ?1) + (members = ?1 AND unscored), count(*), sum(members) FROM groups WHERE " ECHO_WAITING
      " AND version >= ?2 GROUP BY 1",
      [&](const Row& row) {
        if (row.integer(0) == 1) {
          counts.admissible_groups = row.integer(1);
          counts.admissible_trajectories = row.integer(2);
        } else if (row.integer(0) == 2) {
          counts.unscored_groups = row.integer(1);
        } else {
          counts.incomplete_groups = row.integer(1);
        }
      },
      store_->options.group_size, store_->version_min(step)));
  ECHO_ASSIGN(const auto consumed,
              db.first_integer("SELECT (SELECT value FROM meta WHERE key = 'pruned_consumed') + "
                               "(SELECT coalesce(sum(members), 0) FROM groups WHERE consumed_step IS NOT NULL)"));
  counts.consumed = consumed.value_or(0);
  ECHO_TRY(db.each("SELECT reason, trajectories FROM rejected",
                   [&](const Row& row) { counts.rejected[std::string(row.bytes(0))] = row.integer(1); }));
  ECHO_ASSIGN(const auto dropped, db.first_integer("SELECT sum(members) FROM groups WHERE dropped_step IS NOT NULL"));
  if (dropped) counts.rejected["stale"] += *dropped;
  return counts;
}

Result<std::uint64_t> ReplayBuffer::prune(std::uint64_t before_step) {
  store_->check_thread();
  Database& db = *store_->database;
  ECHO_ASSIGN(Transaction transaction, Transaction::begin(db));
  ECHO_ASSIGN(const auto consumed,
              db.first_integer("SELECT sum(members) FROM groups WHERE consumed_step < ?1", before_step));
  ECHO_ASSIGN(const auto dropped,
              db.first_integer("SELECT sum(members) FROM groups WHERE dropped_step < ?1", before_step));
  if (!consumed && !dropped) return std::uint64_t{0};
  // The rows are deleted, so their numbers are kept for reports.
  ECHO_TRY(db.run("UPDATE meta SET value = value + ?1 WHERE key = 'pruned_consumed'", consumed.value_or(0)));
  if (dropped) ECHO_TRY(store_->count_rejected("stale", *dropped));
  ECHO_TRY(db.run("CREATE TEMP TABLE IF NOT EXISTS pruned(group_id INTEGER PRIMARY KEY)"));
  ECHO_TRY(
      db.run("INSERT INTO pruned SELECT group_id FROM groups WHERE consumed_step < ?1 "
             "UNION SELECT group_id FROM groups WHERE dropped_step < ?1",
             before_step));
  ECHO_ASSIGN(const auto bytes, db.first_integer("SELECT sum(length(body)) FROM trajectory WHERE group_id IN "
                                                 "(SELECT group_id FROM pruned)"));
  ECHO_TRY(db.run("DELETE FROM trajectory WHERE group_id IN (SELECT group_id FROM pruned)"));
  const std::uint64_t deleted = db.changes();
  // State 0 is a live lease.
  ECHO_TRY(db.run("DELETE FROM lease WHERE state <> 0 AND group_id IN (SELECT group_id FROM pruned)"));
  ECHO_TRY(db.run("DELETE FROM groups WHERE group_id IN (SELECT group_id FROM pruned)"));
  ECHO_TRY(db.run("DELETE FROM pruned"));
  ECHO_TRY(transaction.commit());
  store_->totals.rows -= deleted;
  store_->totals.bytes -= bytes.value_or(0);
  return deleted;
}

#undef ECHO_WAITING

}  // namespace echoline::replay_buffer
