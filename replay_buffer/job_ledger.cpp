#include "replay_buffer/job_ledger.hpp"

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <set>

#include "replay_buffer/pace.hpp"
#include "replay_buffer/records.hpp"
#include "replay_buffer/store.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::uint32_t kSuspectLosses = 2;  // a group that so many workers were lost with is leased alone
constexpr std::size_t kPausesKept = 64;
constexpr std::size_t kDetailBytesMax = 512;   // of a failure, as kept

// What the ledger knows about a worker that is there; in memory only, a restart measures anew.
struct Known {
  WorkerPace pace;
  bool too_slow = false, turned_away = false;  // at its last request
  std::uint64_t trusted = 0;         // groups that it may hold by what it has handed in
  double accounted_until_unix_s = 0;  // of the time in which it had leases
};

// What is usual among the workers that were measured.
struct Usual {
  std::optional<double> batch_s, seconds_per_token, groups_per_s;
};

const char* tally_of(LeaseState state) {
  switch (state) {
    case LeaseState::kSettled:
      return "leases_settled";
    case LeaseState::kExpired:
      return "leases_expired";
    case LeaseState::kReleased:
      return "leases_released";
    case LeaseState::kLive:
      break;
  }
  assertion_failed("state != kLive", __FILE__, __LINE__, "a live lease has no tally");
}

}  // namespace

class JobLedger::Impl {
 public:
  Impl(Store& store, const LedgerOptions& options)
      : store_(store), db_(*store.database), options_(options), records_(db_) {}

  Status open() { return records_.load(); }

  Result<std::vector<LeaseRecord>> grant(const GrantRequest& request, std::uint64_t step, double now) {
    if (request.policy_digest.empty())
      return fail(Code::kInvalid, "grant", "worker {}: no policy digest", request.worker);
    return in_transaction<std::vector<LeaseRecord>>([&] { return grant_in_transaction(request, step, now); });
  }

  Result<std::vector<Verdict>> submit(std::span<const Delivery> deliveries, std::uint64_t step, double now) {
    std::vector<Settled> settled;
    ECHO_ASSIGN(auto verdicts, in_transaction<std::vector<Verdict>>([&]() -> Result<Outcome<std::vector<Verdict>>> {
                  std::vector<Verdict> decided;
                  ECHO_TRY(submit_all(deliveries, step, now, decided, settled));
                  return Outcome<std::vector<Verdict>>{std::move(decided)};
                }));
    const bool first = !usual_now().batch_s;
    for (const Settled& s : settled) {
      Known& known = known_of(s.worker);
      verdicts[s.verdict].held_s = std::max(0.0, now - std::max(s.granted_unix_s, known.accounted_until_unix_s));
      known.accounted_until_unix_s = now;
      known.pace.handed_in(s.granted_unix_s, worked_until(s.granted_unix_s, now), s.tokens);
      known.trusted = groups_trusted(known.trusted, 1);
    }
    // What was handed in is durable whatever becomes of this: the learner only waits longer for newcomers without it.
    if (first) (void)wait_less_for_newcomers().has_value();
    return verdicts;
  }

  Result<std::uint64_t> renew(WorkerId worker, std::span<const LeaseId> ids, std::uint64_t progress, double now) {
    return in_transaction<std::uint64_t>([&]() -> Result<Outcome<std::uint64_t>> {
      std::uint64_t renewals = 0;
      for (const LeaseId id : ids) {
        ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(id));
        if (!lease || lease->worker != worker || lease->state != LeaseState::kLive || now > lease->expires_unix_s)
          continue;
        ECHO_TRY(
            db_.run("UPDATE lease SET progress = ?2, expires_unix_s = max(expires_unix_s, ?3) WHERE lease_id = ?1 AND "
                    "progress < ?2",
                    id.value, progress & static_cast<std::uint64_t>(INT64_MAX),
                    renewed(options_.lease, lease->granted_unix_s, now, lease->lease_s)));
        renewals += db_.changes();
      }
      return Outcome<std::uint64_t>{renewals, renewals > 0};
    });
  }

  Result<bool> failed(const FailedWork& failure) {
    return in_transaction<bool>([&]() -> Result<Outcome<bool>> {
      ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(failure.lease));
      if (!lease || lease->worker != failure.worker || lease->state != LeaseState::kLive)
        return Outcome<bool>{false, false};
      ECHO_TRY(end(*lease, LeaseState::kReleased));
      ECHO_TRY(note_failure(lease->group, failure.worker, 1, 0));
      ECHO_TRY(judge(lease->group, failure.reason, failure.detail));
      return Outcome<bool>{true};
    });
  }

  Status unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail) {
    return write([&]() -> Status {
      ECHO_TRY(note_failure(group, worker, 1, 0));
      return judge(group, reason, detail);
    });
  }

  Result<std::uint64_t> give_back(WorkerId worker, std::span<const LeaseId> ids) {
    return in_transaction<std::uint64_t>([&]() -> Result<Outcome<std::uint64_t>> {
      std::uint64_t returned = 0;
      for (const LeaseId id : ids) {
        ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(id));
        if (!lease || lease->worker != worker || lease->state != LeaseState::kLive) continue;
        ECHO_TRY(end(*lease, LeaseState::kReleased));
        ++returned;
      }
      return Outcome<std::uint64_t>{returned, returned > 0};
    });
  }

  Result<std::uint64_t> give_back_all(WorkerId worker) {
    std::vector<LeaseId> held;
    ECHO_TRY(db_.each("SELECT lease_id FROM lease WHERE state = 0 AND worker = ?1",
                      [&](const Row& row) { held.push_back(LeaseId{row.integer(0)}); }, worker.value));
    return give_back(worker, held);
  }

  Status set_aside(LeaseId id, std::string_view reason, std::string detail) {
    return write([&]() -> Status {
      ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(id));
      if (!lease || lease->state != LeaseState::kLive)
        return fail(Code::kNotFound, "set aside", "lease {} is not live", id);
      ECHO_TRY(end(*lease, LeaseState::kReleased));
      return put_aside(lease->group, reason, detail);
    });
  }

  std::vector<SetAside> newly_set_aside() { return std::exchange(newly_set_aside_, {}); }

  std::optional<double> too_slow(WorkerId worker) const {
    const auto known = known_.find(worker);
    return known != known_.end() && known->second.too_slow ? known->second.pace.batch_seconds() : std::nullopt;
  }

  bool turned_away(WorkerId worker) const {
    const auto known = known_.find(worker);
    return known != known_.end() && known->second.turned_away;
  }

  std::vector<Idler> newly_idle() { return std::exchange(newly_idle_, {}); }
  const Records& records() const { return records_; }
  Status keep(WorkerId worker, const Misconduct& misconduct) {
    return write([&] { return records_.keep(worker, misconduct); });
  }

  Result<std::uint64_t> release_worker(WorkerId worker, double now) {
    auto released = in_transaction<std::uint64_t>([&]() -> Result<Outcome<std::uint64_t>> {
      std::vector<LeaseRecord> leases;
      ECHO_TRY(db_.each(
          "SELECT lease_id, group_id, granted_unix_s FROM lease WHERE state = 0 AND worker = ?1",
          [&](const Row& row) {
            leases.push_back(id_and_group(row));
            leases.back().granted_unix_s = row.real(2);
          },
          worker.value));
      if (!leases.empty()) {
        ECHO_TRY(note_lapse(worker, LapseKind::kLost));
        records_.kept_waiting(worker, std::max(0.0, now - leases.front().granted_unix_s), now);
      }
      for (const LeaseRecord& lease : leases) {
        ECHO_TRY(end(lease, LeaseState::kReleased));
        ECHO_TRY(note_failure(lease.group, worker, 0, 1));
        ECHO_TRY(judge(lease.group, "worker lost", "the connection of every worker that had it broke"));
      }
      return Outcome<std::uint64_t>{leases.size(), !leases.empty()};
    });
    if (released) known_.erase(worker);
    return released;
  }

  Result<std::uint64_t> release_all() {
    return in_transaction<std::uint64_t>([&]() -> Result<Outcome<std::uint64_t>> {
      std::vector<LeaseRecord> leases;
      ECHO_TRY(db_.each("SELECT lease_id, group_id FROM lease WHERE state = 0",
                        [&](const Row& row) { leases.push_back(id_and_group(row)); }));
      for (const LeaseRecord& lease : leases) ECHO_TRY(end(lease, LeaseState::kReleased));
      return Outcome<std::uint64_t>{leases.size(), !leases.empty()};
    });
  }

  Result<std::uint64_t> expire(double now) {
    return in_transaction<std::uint64_t>([&]() -> Result<Outcome<std::uint64_t>> {
      ECHO_ASSIGN(const std::uint64_t expired, end_overdue(now));
      return Outcome<std::uint64_t>{expired, expired > 0};
    });
  }

  Result<std::uint64_t> excuse(double late_s, double now) {
    auto excused = in_transaction<std::uint64_t>([&]() -> Result<Outcome<std::uint64_t>> {
      ECHO_TRY(db_.run("UPDATE lease SET due_unix_s = due_unix_s + ?1, expires_unix_s = expires_unix_s + ?1 WHERE state = 0", late_s));
      const std::uint64_t leases = db_.changes();
      // Skips a number, so that something is written and shows whether there is room even if no lease is live.
      ECHO_ASSIGN([[maybe_unused]] const std::uint64_t skipped, advance("next_lease", 1));
      return Outcome<std::uint64_t>{leases};
    });
    if (!excused) return excused;
    for (auto& [worker, known] : known_) known.accounted_until_unix_s = now;  // no worker has had work for that long
    if (pauses_.size() == kPausesKept) pauses_.pop_front();
    pauses_.emplace_back(now, late_s);
    return excused;
  }

  Result<std::uint64_t> stranded_by_next_step(std::uint64_t step, double now) {
    std::map<Version, VersionStock> stock;
    ECHO_TRY(db_.each(
        "SELECT version, sum(members) FROM groups WHERE consumed_step IS NULL AND dropped_step IS NULL AND "
        "members = ?1 AND version >= ?2 GROUP BY version",
        [&](const Row& row) { stock[Version{row.integer(0)}].waiting = row.integer(1); }, store_.options.group_size,
        store_.version_min(step)));
    ECHO_TRY(db_.each(
        "SELECT version, worker, sum(rollouts) FROM lease WHERE state = 0 AND min(expires_unix_s, due_unix_s) >= ?1 AND "
        "version >= ?2 GROUP BY version, worker",
        [&](const Row& row) {
          if (records_.waited_for(WorkerId{row.integer(1)}, now)) stock[Version{row.integer(0)}].live += row.integer(2);
        },
        now, store_.version_min(step)));
    std::vector<VersionStock> ascending;
    for (auto& [version, entry] : stock) {
      entry.version = version;
      ascending.push_back(entry);
    }
    return stranded(options_.pacing, step, ascending);
  }

  Result<std::uint64_t> held(WorkerId worker) {
    ECHO_ASSIGN(const auto leases, db_.one("SELECT count(*) FROM lease WHERE state = 0 AND worker = ?1", worker.value));
    return leases.value_or(0);
  }

  Result<LedgerCounts> counts() {
    LedgerCounts counts;
    ECHO_TRY(
        db_.each("SELECT (SELECT count(*) FROM lease WHERE state = 0), (SELECT count(*) FROM pool), "
                 "(SELECT value FROM meta WHERE key = 'leases_settled'), "
                 "(SELECT value FROM meta WHERE key = 'leases_expired'), "
                 "(SELECT value FROM meta WHERE key = 'leases_released')",
                 [&](const Row& row) {
                   counts = {row.integer(0), row.integer(1), row.integer(2), row.integer(3), row.integer(4), {}, {}};
                 }));
    ECHO_TRY(db_.each("SELECT reason, count(*) FROM set_aside GROUP BY reason",
                      [&](const Row& row) { counts.set_aside[std::string(row.bytes(0))] = row.integer(1); }));
    counts.bound = bound_;
    return counts;
  }

  void check_thread() { store_.check_thread(); }

 private:
  struct Settled {
    WorkerId worker;
    double granted_unix_s;
    std::uint64_t tokens;  // of the longest response
    std::size_t verdict;   // which one
  };

  static LeaseRecord id_and_group(const Row& row) {
    LeaseRecord lease;
    lease.id = LeaseId{row.integer(0)};
    lease.group = GroupId{row.integer(1)};
    return lease;
  }

  Status write(const std::function<Status()>& work) {
    const auto done = in_transaction<bool>([&]() -> Result<Outcome<bool>> {
      ECHO_TRY(work());
      return Outcome<bool>{true};
    });
    return done ? ok() : Status(done.error());
  }

  // What the work of a transaction comes to, and whether it changed anything: without a change there is nothing to
  // commit.
  template <class T>
  struct Outcome {
    T value{};
    bool changed = true;
  };

  // Runs `work` in a transaction of its own. On an error nothing has happened, in the file or in memory: a disk that
  // refuses is not counted against a worker, and the work may be done again.
  template <class T>
  Result<T> in_transaction(const std::function<Result<Outcome<T>>()>& work) {
    const std::size_t idle = newly_idle_.size(), aside = newly_set_aside_.size();
    const Store::Totals totals = store_.totals;
    undo_.clear();
    const auto run = [&]() -> Result<T> {
      ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
      ECHO_ASSIGN(Outcome<T> outcome, work());
      if (outcome.changed) ECHO_TRY(transaction.commit());
      return std::move(outcome.value);
    };
    Result<T> done = run();
    if (done) return done;
    for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo) (*undo)();
    newly_idle_.resize(idle);
    newly_set_aside_.resize(aside);
    store_.totals = totals;
    if (const Status loaded = records_.load(); !loaded)
      return fail(done.error().code, done.error().operation, "{}; and {}", done.error().detail, loaded.error().detail);
    return done;
  }

  Result<Outcome<std::vector<LeaseRecord>>> grant_in_transaction(const GrantRequest& request, std::uint64_t step,
                                                                 double now) {
    ECHO_ASSIGN(const std::uint64_t expired, end_overdue(now));
    const std::uint64_t group_size = store_.options.group_size;
    std::uint64_t live = 0, live_of_worker = 0, ahead = 0;
    // What nobody waits for any more is no stock: others may generate in its place.
    ECHO_TRY(db_.each(
        "SELECT count(*), coalesce(sum(CASE WHEN due_unix_s >= ?2 THEN rollouts ELSE 0 END), 0), "
        "coalesce(sum(worker = ?1), 0) FROM lease WHERE state = 0",
        [&](const Row& row) { live = row.integer(0), ahead = row.integer(1), live_of_worker = row.integer(2); },
        request.worker.value, now));
    ECHO_ASSIGN(const auto waiting, db_.one("SELECT sum(members) FROM groups WHERE consumed_step IS NULL AND "
                                            "dropped_step IS NULL AND version >= ?1",
                                            store_.version_min(step)));
    ahead += waiting.value_or(0);
    Known& known = known_of(request.worker);
    if (request.step_seconds) fresh_s_ = (options_.pacing.staleness_budget + 1.0) * *request.step_seconds;
    const Usual usual = usual_now();
    const std::optional<double> batch_s = known.pace.batch_seconds();
    known.too_slow = ahead >= options_.pacing.trajectories_per_step && request.step_seconds && batch_s &&
                     !in_time(options_.pacing, step, request.version, *batch_s, *request.step_seconds);
    const std::uint64_t held_max = std::min(known.trusted, held_by(known, usual));
    const std::uint64_t could_take =
        std::min({std::uint64_t{request.groups_max}, std::uint64_t{options_.leases_per_grant_max},
                  options_.leases_live_max - std::min<std::uint64_t>(live, options_.leases_live_max),
                  held_max - std::min(live_of_worker, held_max)});
    const std::uint64_t allowed = room(options_.pacing, step, request.version, ahead) / group_size;
    if (allowed < could_take && !known.too_slow)
      if (const auto bound = binding(options_.pacing, step, request.version)) bound_.note(*bound, step);
    std::uint64_t wanted = known.too_slow ? 0 : std::min(could_take, allowed);
    known.turned_away = request.groups_max > 0 && live_of_worker == 0 &&
                        room(options_.pacing, step, request.newest.value_or(request.version), ahead) < group_size;
    std::vector<LeaseRecord> leases;
    if (wanted > 0) {
      ECHO_ASSIGN(const std::vector<GroupId> groups, take_groups(wanted, request.worker, live_of_worker == 0));
      wanted = groups.size();
      ECHO_ASSIGN(const std::uint64_t first_lease, advance("next_lease", wanted));
      const double lease_s = lease_seconds(options_.lease, known.pace.seconds_per_token(), usual.seconds_per_token);
      const double due = now + patience_seconds(options_.lease, batch_s, usual.batch_s, fresh_s_);
      for (const GroupId group : groups) {
        leases.push_back({LeaseId{first_lease + leases.size()}, group, request.worker, request.version,
                          request.policy_digest, store_.options.group_size, now, now + lease_s, LeaseState::kLive,
                          lease_s});
        const LeaseRecord& l = leases.back();
        ECHO_TRY(db_.run("INSERT INTO lease VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, 0, NULL, 0)", l.id.value,
                         l.group.value, l.worker.value, l.version.value, Blob{l.policy_digest}, l.rollouts,
                         l.granted_unix_s, l.expires_unix_s, l.lease_s, due));
      }
    }
    return Outcome<std::vector<LeaseRecord>>{std::move(leases), wanted > 0 || expired > 0};
  }

  // When work that was granted then would have been handed in without the pauses of the learner since.
  double worked_until(double granted, double now) const {
    for (const auto& [ended, late_s] : pauses_)
      if (ended > granted) now -= late_s;
    return std::max(now, granted);
  }

  // Returns the counter and moves it on.
  Result<std::uint64_t> advance(std::string_view key, std::uint64_t by) {
    ECHO_ASSIGN(const auto value, db_.one("SELECT value FROM meta WHERE key = ?1", key));
    if (!value) return fail(Code::kCorrupt, "job ledger", "{}: no '{}' in table meta", db_.path().string(), key);
    ECHO_TRY(db_.run("UPDATE meta SET value = value + ?2 WHERE key = ?1", key, by));
    return *value;
  }

  Known& known_of(WorkerId worker) {
    const auto [entry, is_new] = known_.try_emplace(worker);
    if (is_new) entry->second.trusted = first_groups(options_.lease, options_.pacing, store_.options.group_size);
    return entry->second;
  }

  Usual usual_now() const {
    std::vector<double> batches, tokens, rates;
    for (const auto& [worker, known] : known_) {
      if (const auto batch_s = known.pace.batch_seconds()) batches.push_back(*batch_s);
      if (const auto per_token = known.pace.seconds_per_token()) tokens.push_back(*per_token);
      if (const auto rate = known.pace.groups_per_s()) rates.push_back(*rate);
    }
    return {median(std::move(batches)), median(std::move(tokens)), median(std::move(rates))};
  }

  // How many groups this worker may hold by its speed. One that was not measured yet counts as the average of those
  // that were.
  std::uint64_t held_by(const Known& known, const Usual& usual) const {
    double measured = 0, sum = 0;
    for (const auto& [worker, other] : known_)
      if (const auto rate = other.pace.groups_per_s()) ++measured, sum += rate_that_counts(*rate, usual.groups_per_s);
    const double average = measured > 0 ? sum / measured : 1;
    const double all = sum + (static_cast<double>(known_.size()) - measured) * average;
    const std::uint64_t groups = (std::uint64_t{options_.pacing.lookahead_steps} + 1) *
                                 options_.pacing.trajectories_per_step / store_.options.group_size;
    const double own = rate_that_counts(known.pace.groups_per_s().value_or(average), usual.groups_per_s);
    return groups_held_max(groups, own, all);
  }

  // Somebody has shown how long the work takes: who has shown nothing yet is not waited for much longer.
  Status wait_less_for_newcomers() {
    const Usual usual = usual_now();
    if (!usual.batch_s) return ok();
    const double patience = patience_seconds(options_.lease, std::nullopt, usual.batch_s, fresh_s_);
    for (const auto& [worker, known] : known_)
      if (!known.pace.batch_seconds())
        ECHO_TRY(
            db_.run("UPDATE lease SET due_unix_s = min(due_unix_s, granted_unix_s + ?2) WHERE state = 0 AND "
                    "worker = ?1",
                    worker.value, patience));
    return ok();
  }

  Status note_lapse(WorkerId worker, LapseKind kind) {
    ECHO_ASSIGN(const std::optional<std::string> idle, records_.lapsed(worker, kind));
    if (idle) newly_idle_.push_back({worker, *idle});
    return ok();
  }

  // Who keeps the learner waiting beyond its patience is not waited for again for a while.
  Status note_overdue(double now) {
    return db_.each(
        "SELECT worker, max(due_unix_s - granted_unix_s) FROM lease WHERE state = 0 AND due_unix_s < ?1 GROUP BY worker",
        [&](const Row& row) { records_.kept_waiting(WorkerId{row.integer(0)}, row.real(1), now); }, now);
  }

  // Returned groups first, lowest id first, then new ones; or one group alone that workers were lost with.
  Result<std::vector<GroupId>> take_groups(std::uint64_t count, WorkerId worker, bool idle) {
    std::vector<GroupId> groups;
    const auto take = [&](const Row& row) { groups.push_back(GroupId{row.integer(0)}); };
    if (idle)
      ECHO_TRY(db_.each("SELECT group_id FROM pool WHERE (SELECT sum(lost) FROM failure WHERE failure.group_id = "
                        "pool.group_id) >= ?1 ORDER BY group_id LIMIT 1",
                        take, kSuspectLosses));
    const bool suspect = !groups.empty();
    // Without anybody else to try it, a worker gets a group again that it failed on.
    if (!suspect)
      ECHO_TRY(db_.each(
          "SELECT group_id FROM pool WHERE NOT EXISTS (SELECT 1 FROM failure WHERE failure.group_id = pool.group_id "
          "AND worker = ?2 AND failures > ?3) AND coalesce((SELECT sum(lost) FROM failure WHERE failure.group_id = "
          "pool.group_id), 0) < ?4 ORDER BY group_id LIMIT ?1",
          take, count, worker.value, known_.size() > 1 ? 0 : kFailuresMax, kSuspectLosses));
    for (const GroupId group : groups) ECHO_TRY(db_.run("DELETE FROM pool WHERE group_id = ?1", group.value));
    if (suspect) return groups;
    ECHO_ASSIGN(std::uint64_t next, advance("next_group", count - groups.size()));
    while (groups.size() < count) groups.push_back(GroupId{next++});
    return groups;
  }

  Status note_failure(GroupId group, WorkerId worker, int failures, int lost) {
    return db_.run(
        "INSERT INTO failure VALUES(?1, ?2, ?3, ?4) ON CONFLICT(group_id, worker) DO UPDATE SET "
        "failures = failures + excluded.failures, lost = max(lost, excluded.lost)",
        group.value, worker.value, failures, lost);
  }

  // Sets a group aside that failed too often; it is in the pool now.
  Status judge(GroupId group, std::string_view reason, const std::string& detail) {
    std::uint64_t failures = 0, lost = 0;
    ECHO_TRY(db_.each(
        "SELECT sum(failures), sum(lost) FROM failure WHERE group_id = ?1",
        [&](const Row& row) { failures = row.integer(0), lost = row.integer(1); }, group.value));
    const bool hopeless = set_aside_after(static_cast<std::uint32_t>(failures), static_cast<std::uint32_t>(lost));
    return hopeless ? put_aside(group, reason, detail) : ok();
  }

  // Out of the pool for good.
  Status put_aside(GroupId group, std::string_view reason, const std::string& detail) {
    const std::string kept = detail.substr(0, kDetailBytesMax);
    ECHO_TRY(db_.run("DELETE FROM pool WHERE group_id = ?1", group.value));
    ECHO_TRY(db_.run("DELETE FROM failure WHERE group_id = ?1", group.value));
    ECHO_TRY(db_.run("INSERT INTO set_aside VALUES(?1, ?2, ?3)", group.value, reason, kept));
    newly_set_aside_.push_back({group, std::string(reason), kept});
    return ok();
  }

  // Ends a live lease; its group goes back to the pool unless it was settled.
  Status end(const LeaseRecord& lease, LeaseState state) {
    ECHO_TRY(db_.run("UPDATE lease SET state = ?2 WHERE lease_id = ?1 AND state = 0", lease.id.value,
                     static_cast<int>(state)));
    ECHO_CHECK(db_.changes() == 1, "lease {} was not live", lease.id);
    if (state != LeaseState::kSettled) ECHO_TRY(db_.run("INSERT INTO pool VALUES(?1)", lease.group.value));
    ECHO_ASSIGN([[maybe_unused]] const std::uint64_t before, advance(tally_of(state), 1));
    return ok();
  }

  Result<std::uint64_t> end_overdue(double now) {
    ECHO_TRY(note_overdue(now));
    std::vector<LeaseRecord> leases;
    std::map<std::pair<WorkerId, double>, std::uint64_t> batches;  // worker, time of grant -> leases that end now
    ECHO_TRY(db_.each(
        "SELECT lease_id, group_id, worker, granted_unix_s FROM lease WHERE state = 0 AND expires_unix_s < ?1 "
        "ORDER BY lease_id",
        [&](const Row& row) {
          leases.push_back(id_and_group(row));
          leases.back().worker = WorkerId{row.integer(2)};
          leases.back().granted_unix_s = row.real(3);
        },
        now));
    for (const LeaseRecord& lease : leases) {
      ECHO_TRY(end(lease, LeaseState::kExpired));
      ++batches[{lease.worker, lease.granted_unix_s}];
      if (const auto known = known_.find(lease.worker); known != known_.end())
        known->second.pace.handed_in(lease.granted_unix_s, worked_until(lease.granted_unix_s, now), 0);
    }
    for (const auto& [batch, ended] : batches) {
      const auto known = known_.find(batch.first);
      if (known != known_.end()) {
        std::uint64_t& trusted = known->second.trusted;
        if (known->second.pace.handed_in_of(batch.second) >= ended) continue;  // most of it came
        undo_.push_back([&trusted, before = trusted] { trusted = before; });
        trusted = groups_trusted_after_lapse(trusted);
      }
      ECHO_TRY(note_lapse(batch.first, LapseKind::kExpired));
    }
    return std::uint64_t{leases.size()};
  }

  Result<std::optional<LeaseRecord>> find(LeaseId id) {
    std::optional<LeaseRecord> lease;
    ECHO_TRY(db_.each(
        "SELECT lease_id, group_id, worker, version, policy_digest, rollouts, granted_unix_s, "
        "expires_unix_s, state, lease_s FROM lease WHERE lease_id = ?1",
        [&](const Row& row) {
          lease = LeaseRecord{LeaseId{row.integer(0)},
                              GroupId{row.integer(1)},
                              WorkerId{row.integer(2)},
                              Version{row.integer(3)},
                              std::string(row.bytes(4)),
                              static_cast<std::uint32_t>(row.integer(5)),
                              row.real(6),
                              row.real(7),
                              static_cast<LeaseState>(row.integer(8)),
                              row.real(9)};
        },
        id.value));
    return lease;
  }

  Status submit_all(std::span<const Delivery> deliveries, std::uint64_t step, double now,
                    std::vector<Verdict>& verdicts, std::vector<Settled>& settled) {
    for (const Delivery& delivery : deliveries) {
      ECHO_CHECK(delivery.submission != nullptr);
      const Store::Totals before = store_.totals;
      ECHO_TRY(db_.run("SAVEPOINT delivery"));
      ECHO_ASSIGN(Verdict verdict, decide(delivery, step, now, verdicts.size(), settled));
      if (!verdict.accepted) {
        ECHO_TRY(db_.run("ROLLBACK TO delivery"));
        store_.totals = before;
        ECHO_TRY(refuse(delivery, verdict, now));
      }
      ECHO_TRY(db_.run("RELEASE delivery"));
      verdicts.push_back(std::move(verdict));
    }
    std::set<std::pair<WorkerId, double>> begun;  // batches of which something comes for the first time
    for (const Settled& s : settled)
      if (known_of(s.worker).pace.handed_in_of(s.granted_unix_s) == 0 &&
          begun.emplace(s.worker, s.granted_unix_s).second)
        ECHO_TRY(records_.returned(s.worker));
    return ok();
  }

  // Stores and settles the delivery, or says why not; what it wrote is rolled back in that case.
  Result<Verdict> decide(const Delivery& delivery, std::uint64_t step, double now, std::size_t verdict_index,
                         std::vector<Settled>& settled) {
    const schema::Submission& submission = *delivery.submission;
    Verdict verdict{LeaseId{submission.lease()}, false, false, {}, {}};
    const auto refused = [&](std::string_view reason, std::string detail = {}) {
      verdict.reason = reason;
      verdict.detail = std::move(detail);
      return verdict;
    };
    if (submission.lease() > static_cast<std::uint64_t>(INT64_MAX)) return refused("unknown lease");
    ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(verdict.lease));
    if (lease && lease->worker == delivery.worker && lease->state == LeaseState::kSettled) {
      ECHO_ASSIGN(const bool same, all_stored(submission));
      if (!same) return refused("lease already settled", "by other trajectories");
      verdict.accepted = verdict.duplicate = true;
      return verdict;
    }
    if (!lease) return refused("unknown lease");
    if (lease->worker == delivery.worker && lease->state == LeaseState::kLive && !delivery.refused.empty())
      return refused(delivery.refused, delivery.detail);
    if (submission.trajectories_size() == 0) return refused("malformed", "no trajectories");
    for (const Trajectory& trajectory : submission.trajectories()) {
      if (Status status = data_plane::check(trajectory, store_.options.limits); !status)
        return refused("malformed", status.error().detail);
      const Claim claim{delivery.worker, data_plane::oldest_version(trajectory), trajectory.policy_digest()};
      if (const auto reason = refusal(lease, claim, now))
        return refused(*reason, fmt::format("version {}, trajectory '{}'", claim.version, trajectory.id()));
      if (trajectory.lease() != lease->id.value || trajectory.group() != lease->group.value ||
          trajectory.worker() != lease->worker.value)
        return refused("malformed",
                       fmt::format("trajectory '{}' is of lease {}, group {}, worker {}; expected {}, {}, {}",
                                   trajectory.id(), trajectory.lease(), trajectory.group(), trajectory.worker(),
                                   lease->id, lease->group, lease->worker));
    }
    if (static_cast<std::uint32_t>(submission.trajectories_size()) != lease->rollouts)
      return refused("malformed", fmt::format("{} trajectories, expected all {} of the group",
                                              submission.trajectories_size(), lease->rollouts));
    if (!admissible(step, lease->version, store_.options.staleness_budget))
      return refused("stale", fmt::format("version {} at learner step {}", lease->version, step));

    for (const Trajectory& trajectory : submission.trajectories()) {
      const auto stored = store_.insert(trajectory);
      if (!stored && stored.error().code == Code::kInvalid) return refused("malformed", stored.error().detail);
      if (!stored) return stored.error();
      if (!*stored) return refused("malformed", fmt::format("trajectory '{}' stands twice", trajectory.id()));
    }
    ECHO_TRY(end(*lease, LeaseState::kSettled));
    if (delivery.unscored)
      ECHO_TRY(db_.run("UPDATE groups SET unscored = 1 WHERE group_id = ?1", lease->group.value));
    else
      ECHO_TRY(db_.run("DELETE FROM failure WHERE group_id = ?1", lease->group.value));
    ECHO_TRY(db_.run("UPDATE lease SET settled_unix_s = ?2 WHERE lease_id = ?1", lease->id.value, now));
    settled.push_back({lease->worker, lease->granted_unix_s, longest(submission), verdict_index});
    verdict.accepted = true;
    return verdict;
  }

  // Counts the refusal and ends the lease when it was this worker's live one: nobody will hand it in again.
  Status refuse(const Delivery& delivery, const Verdict& verdict, double now) {
    ECHO_TRY(
        store_.count_rejected(verdict.reason, static_cast<std::uint64_t>(delivery.submission->trajectories_size())));
    if (delivery.submission->lease() > static_cast<std::uint64_t>(INT64_MAX)) return ok();
    ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(verdict.lease));
    if (!lease || lease->worker != delivery.worker) return ok();
    if (lease->state == LeaseState::kLive)
      ECHO_TRY(end(*lease, now > lease->expires_unix_s ? LeaseState::kExpired : LeaseState::kReleased));
    // A late result still tells how long the work takes, or a slow worker's next lease would be as short.
    if (verdict.reason == "lease expired")
      known_of(lease->worker).pace.handed_in(lease->granted_unix_s, worked_until(lease->granted_unix_s, now), longest(*delivery.submission));
    return ok();
  }

  Result<bool> all_stored(const schema::Submission& submission) {
    if (submission.trajectories_size() == 0) return false;
    for (const Trajectory& trajectory : submission.trajectories()) {
      ECHO_ASSIGN(const auto found,
                  db_.one("SELECT 1 FROM trajectory WHERE id = ?1 AND group_id = ?2 AND member = ?3", trajectory.id(),
                          trajectory.group() & static_cast<std::uint64_t>(INT64_MAX), trajectory.member()));
      if (!found) return false;
    }
    return true;
  }

  static std::uint64_t longest(const schema::Submission& submission) {
    int tokens = 0;
    for (const Trajectory& trajectory : submission.trajectories())
      tokens = std::max(tokens, trajectory.response_tokens_size());
    return static_cast<std::uint64_t>(tokens);
  }

  Store& store_;
  Database& db_;
  LedgerOptions options_;
  Records records_;
  std::map<WorkerId, Known> known_;  // workers that asked for work and were not lost
  std::optional<double> fresh_s_;    // in which the learner does all the steps that may use what is granted now
  BoundSteps bound_;
  std::deque<std::pair<double, double>> pauses_;  // of excuse(): when they ended, and how long they were
  std::vector<Idler> newly_idle_;
  std::vector<SetAside> newly_set_aside_;
  std::vector<std::function<void()>> undo_;  // puts back what the transaction under way has changed in known_
};

JobLedger::JobLedger(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
JobLedger::~JobLedger() = default;

Result<std::unique_ptr<JobLedger>> JobLedger::open(ReplayBuffer& buffer, const LedgerOptions& options) {
  constexpr std::string_view kOpen = "open job ledger";
  const Pacing& pacing = options.pacing;
  if (pacing.staleness_budget != buffer.options().staleness_budget)
    return fail(Code::kInvalid, kOpen, "staleness budget {}, the buffer has {}", pacing.staleness_budget,
                buffer.options().staleness_budget);
  if (pacing.lookahead_steps > pacing.staleness_budget)
    return fail(Code::kInvalid, kOpen, "lookahead_steps is {}, expected at most the staleness budget {}",
                pacing.lookahead_steps, pacing.staleness_budget);
  if (pacing.trajectories_per_step < buffer.options().group_size ||
      pacing.trajectories_per_step % buffer.options().group_size != 0)
    return fail(Code::kInvalid, kOpen, "{} trajectories per step, expected a multiple of the group size {}",
                pacing.trajectories_per_step, buffer.options().group_size);
  const LeaseLength& lease = options.lease;
  if (!(lease.min_s > 0) || !(lease.first_s >= lease.min_s) || !(lease.max_s >= lease.first_s))
    return fail(Code::kInvalid, kOpen, "leases of {} s at first, {} .. {} s later, expected 0 < min <= first <= max",
                lease.first_s, lease.min_s, lease.max_s);
  auto impl = std::make_unique<Impl>(buffer.store(), options);
  ECHO_TRY(impl->open());
  return std::unique_ptr<JobLedger>(new JobLedger(std::move(impl)));
}

Result<std::vector<LeaseRecord>> JobLedger::grant(const GrantRequest& request, std::uint64_t step, double now_unix_s) {
  impl_->check_thread();
  return impl_->grant(request, step, now_unix_s);
}

Result<std::vector<Verdict>> JobLedger::submit(std::span<const Delivery> deliveries, std::uint64_t step,
                                               double now_unix_s) {
  impl_->check_thread();
  return impl_->submit(deliveries, step, now_unix_s);
}

std::vector<Idler> JobLedger::newly_idle() { return impl_->newly_idle(); }

const std::map<WorkerId, Misconduct>& JobLedger::misconduct() const { return impl_->records().misconduct(); }

Status JobLedger::keep(WorkerId worker, const Misconduct& misconduct) {
  impl_->check_thread();
  return impl_->keep(worker, misconduct);
}

Status JobLedger::unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail) {
  impl_->check_thread();
  return impl_->unscorable(group, worker, reason, detail);
}

Result<std::uint64_t> JobLedger::release_worker(WorkerId worker, double now_unix_s) {
  impl_->check_thread();
  return impl_->release_worker(worker, now_unix_s);
}

Result<std::uint64_t> JobLedger::release_all() {
  impl_->check_thread();
  return impl_->release_all();
}

Result<std::uint64_t> JobLedger::expire(double now_unix_s) {
  impl_->check_thread();
  return impl_->expire(now_unix_s);
}

Result<std::uint64_t> JobLedger::excuse(double late_s, double now_unix_s) {
  impl_->check_thread();
  return impl_->excuse(late_s, now_unix_s);
}

Result<std::uint64_t> JobLedger::stranded_by_next_step(std::uint64_t step, double now_unix_s) {
  impl_->check_thread();
  return impl_->stranded_by_next_step(step, now_unix_s);
}

Result<LedgerCounts> JobLedger::counts() {
  impl_->check_thread();
  return impl_->counts();
}

Result<std::uint64_t> JobLedger::held(WorkerId worker) {
  impl_->check_thread();
  return impl_->held(worker);
}

Result<std::uint64_t> JobLedger::renew(WorkerId worker, std::span<const LeaseId> leases, std::uint64_t progress,
                                       double now_unix_s) {
  impl_->check_thread();
  return impl_->renew(worker, leases, progress, now_unix_s);
}

Result<std::uint64_t> JobLedger::give_back(WorkerId worker, std::span<const LeaseId> leases) {
  impl_->check_thread();
  return impl_->give_back(worker, leases);
}

Result<std::uint64_t> JobLedger::give_back_all(WorkerId worker) {
  impl_->check_thread();
  return impl_->give_back_all(worker);
}

Result<bool> JobLedger::failed(const FailedWork& failure) {
  impl_->check_thread();
  return impl_->failed(failure);
}

Status JobLedger::set_aside(LeaseId lease, std::string_view reason, std::string detail) {
  impl_->check_thread();
  return impl_->set_aside(lease, reason, std::move(detail));
}

std::vector<SetAside> JobLedger::newly_set_aside() { return impl_->newly_set_aside(); }

std::optional<double> JobLedger::too_slow(WorkerId worker) const { return impl_->too_slow(worker); }
bool JobLedger::turned_away(WorkerId worker) const { return impl_->turned_away(worker); }

}  // namespace echoline::replay_buffer
