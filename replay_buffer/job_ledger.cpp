#include "replay_buffer/job_ledger.hpp"

#include <algorithm>
#include <deque>
#include <map>

#include "replay_buffer/store.hpp"

namespace echoline::replay_buffer {
namespace {

constexpr std::size_t kCompletionsKept = 256;  // the median is over the latest ones
constexpr double kMeasureSeconds = 1;          // throughput is measured over at least this long

// What the ledger knows about a worker's speed; in memory only, a restart measures anew.
struct Speed {
  std::optional<double> tokens_per_s;
  double window_begin_unix_s = 0;
  std::uint64_t window_tokens = 0;
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
  Impl(Store& store, const LedgerOptions& options) : store_(store), db_(*store.database), options_(options) {}

  Status load_completions() {
    return db_.each(
        "SELECT settled_unix_s - granted_unix_s FROM lease WHERE settled_unix_s IS NOT NULL "
        "ORDER BY lease_id DESC LIMIT ?1",
        [&](const Row& row) { completions_s_.push_front(row.real(0)); }, kCompletionsKept);
  }

  Result<std::vector<LeaseRecord>> grant(const GrantRequest& request, std::uint64_t step, double now) {
    if (request.policy_digest.empty())
      return fail(Code::kInvalid, "grant", "worker {}: no policy digest", request.worker);
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    ECHO_ASSIGN(const std::uint64_t expired, end_overdue(now));
    const std::uint64_t group_size = store_.options.group_size;
    std::uint64_t live = 0, live_of_worker = 0, ahead = 0;
    ECHO_TRY(db_.each(
        "SELECT count(*), coalesce(sum(rollouts), 0), coalesce(sum(worker = ?1), 0) FROM lease WHERE state = 0",
        [&](const Row& row) { live = row.integer(0), ahead = row.integer(1), live_of_worker = row.integer(2); },
        request.worker.value));
    ECHO_ASSIGN(const auto waiting, db_.one("SELECT sum(members) FROM groups WHERE consumed_step IS NULL AND "
                                            "dropped_step IS NULL AND version >= ?1",
                                            store_.version_min(step)));
    ahead += waiting.value_or(0);
    const std::uint64_t wanted =
        std::min({std::uint64_t{request.groups_max}, std::uint64_t{options_.leases_per_grant_max},
                  options_.leases_live_max - std::min<std::uint64_t>(live, options_.leases_live_max),
                  room(options_.pacing, step, request.version, ahead) / group_size});
    std::vector<LeaseRecord> leases;
    if (wanted > 0) {
      ECHO_ASSIGN(const std::vector<GroupId> groups, take_groups(wanted));
      ECHO_ASSIGN(const std::uint64_t first_lease, advance("next_lease", wanted));
      const double expires = now + length_s();
      for (const GroupId group : groups) {
        leases.push_back({LeaseId{first_lease + leases.size()}, group, request.worker, request.version,
                          request.policy_digest, store_.options.group_size, now, expires, LeaseState::kLive});
        const LeaseRecord& l = leases.back();
        ECHO_TRY(db_.run("INSERT INTO lease VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, NULL, 0)", l.id.value, l.group.value,
                         l.worker.value, l.version.value, Blob{l.policy_digest}, l.rollouts, l.granted_unix_s,
                         l.expires_unix_s));
      }
    }
    if (wanted > 0 || expired > 0) ECHO_TRY(transaction.commit());
    if (!leases.empty() && live_of_worker == 0) {  // an idle worker starts to be timed
      Speed& speed = speeds_[request.worker];
      speed.window_begin_unix_s = now;
      speed.window_tokens = 0;
    }
    return leases;
  }

  Result<std::vector<Verdict>> submit(std::span<const Delivery> deliveries, std::uint64_t step, double now) {
    std::vector<Verdict> verdicts;
    std::vector<Settled> settled;
    const Store::Totals before = store_.totals;
    if (Status status = submit_all(deliveries, step, now, verdicts, settled); !status) {
      store_.totals = before;
      return std::move(status).error();
    }
    for (const Settled& s : settled) measure(s, now);
    return verdicts;
  }

  Result<std::uint64_t> release_worker(WorkerId worker) {
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    std::vector<LeaseRecord> leases;
    ECHO_TRY(db_.each(
        "SELECT lease_id, group_id FROM lease WHERE state = 0 AND worker = ?1",
        [&](const Row& row) { leases.push_back(id_and_group(row)); }, worker.value));
    for (const LeaseRecord& lease : leases) ECHO_TRY(end(lease, LeaseState::kReleased));
    ECHO_TRY(transaction.commit());
    speeds_.erase(worker);
    return std::uint64_t{leases.size()};
  }

  Result<std::uint64_t> release_all() {
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    std::vector<LeaseRecord> leases;
    ECHO_TRY(db_.each("SELECT lease_id, group_id FROM lease WHERE state = 0",
                      [&](const Row& row) { leases.push_back(id_and_group(row)); }));
    for (const LeaseRecord& lease : leases) ECHO_TRY(end(lease, LeaseState::kReleased));
    ECHO_TRY(transaction.commit());
    return std::uint64_t{leases.size()};
  }

  Result<std::uint64_t> expire(double now) {
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    ECHO_ASSIGN(const std::uint64_t expired, end_overdue(now));
    if (expired > 0) ECHO_TRY(transaction.commit());
    return expired;
  }

  Result<std::uint64_t> resume(double now) {
    ECHO_TRY(db_.run("UPDATE lease SET expires_unix_s = max(expires_unix_s, ?1) WHERE state = 0", now + length_s()));
    return db_.changes();
  }

  Result<std::uint64_t> stranded_by_next_step(std::uint64_t step, double now) {
    std::map<Version, VersionStock> stock;
    ECHO_TRY(db_.each(
        "SELECT version, sum(members) FROM groups WHERE consumed_step IS NULL AND dropped_step IS NULL AND "
        "members = ?1 AND version >= ?2 GROUP BY version",
        [&](const Row& row) { stock[Version{row.integer(0)}].waiting = row.integer(1); }, store_.options.group_size,
        store_.version_min(step)));
    ECHO_TRY(db_.each(
        "SELECT version, sum(rollouts) FROM lease WHERE state = 0 AND expires_unix_s >= ?1 AND version >= ?2 "
        "GROUP BY version",
        [&](const Row& row) { stock[Version{row.integer(0)}].live = row.integer(1); }, now, store_.version_min(step)));
    std::vector<VersionStock> ascending;
    for (auto& [version, entry] : stock) {
      entry.version = version;
      ascending.push_back(entry);
    }
    return stranded(options_.pacing, step, ascending);
  }

  Result<LedgerCounts> counts() {
    LedgerCounts counts;
    ECHO_TRY(
        db_.each("SELECT (SELECT count(*) FROM lease WHERE state = 0), (SELECT count(*) FROM pool), "
                 "(SELECT value FROM meta WHERE key = 'leases_settled'), "
                 "(SELECT value FROM meta WHERE key = 'leases_expired'), "
                 "(SELECT value FROM meta WHERE key = 'leases_released')",
                 [&](const Row& row) {
                   counts = {row.integer(0), row.integer(1), row.integer(2), row.integer(3), row.integer(4)};
                 }));
    return counts;
  }

  std::vector<WorkerShare> shares(std::uint64_t groups, std::span<const WorkerId> eligible) {
    std::map<WorkerId, WorkerShare> by_worker;
    for (const auto& [worker, speed] : speeds_) by_worker[worker] = {worker, speed.tokens_per_s.value_or(0), false, 0};
    for (const WorkerId worker : eligible) {
      WorkerShare& share = by_worker[worker];
      share.worker = worker;
      share.eligible = true;
    }
    std::vector<WorkerShare> shares;
    for (const auto& [worker, share] : by_worker) shares.push_back(share);
    allocate(groups, shares);
    for (const WorkerShare& share : shares)
      if (!share.eligible && speeds_[share.worker].tokens_per_s)
        speeds_[share.worker].tokens_per_s = share.tokens_per_s;
    return shares;
  }

  double length_s() const {
    std::vector<double> completions(completions_s_.begin(), completions_s_.end());
    return lease_seconds(options_.lease, completions);
  }

  void check_thread() { store_.check_thread(); }

 private:
  struct Settled {
    WorkerId worker;
    double granted_unix_s;
    std::uint64_t tokens;
  };

  static LeaseRecord id_and_group(const Row& row) {
    LeaseRecord lease;
    lease.id = LeaseId{row.integer(0)};
    lease.group = GroupId{row.integer(1)};
    return lease;
  }

  // Returns the counter and moves it on.
  Result<std::uint64_t> advance(std::string_view key, std::uint64_t by) {
    ECHO_ASSIGN(const auto value, db_.one("SELECT value FROM meta WHERE key = ?1", key));
    if (!value) return fail(Code::kCorrupt, "job ledger", "{}: no '{}' in table meta", db_.path().string(), key);
    ECHO_TRY(db_.run("UPDATE meta SET value = value + ?2 WHERE key = ?1", key, by));
    return *value;
  }

  // Returned groups first, lowest id first, then new ones.
  Result<std::vector<GroupId>> take_groups(std::uint64_t count) {
    std::vector<GroupId> groups;
    ECHO_TRY(db_.each(
        "SELECT group_id FROM pool ORDER BY group_id LIMIT ?1",
        [&](const Row& row) { groups.push_back(GroupId{row.integer(0)}); }, count));
    for (const GroupId group : groups) ECHO_TRY(db_.run("DELETE FROM pool WHERE group_id = ?1", group.value));
    ECHO_ASSIGN(std::uint64_t next, advance("next_group", count - groups.size()));
    while (groups.size() < count) groups.push_back(GroupId{next++});
    return groups;
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
    std::vector<LeaseRecord> leases;
    ECHO_TRY(db_.each(
        "SELECT lease_id, group_id FROM lease WHERE state = 0 AND expires_unix_s < ?1 ORDER BY lease_id",
        [&](const Row& row) { leases.push_back(id_and_group(row)); }, now));
    for (const LeaseRecord& lease : leases) ECHO_TRY(end(lease, LeaseState::kExpired));
    return std::uint64_t{leases.size()};
  }

  Result<std::optional<LeaseRecord>> find(LeaseId id) {
    std::optional<LeaseRecord> lease;
    ECHO_TRY(db_.each(
        "SELECT lease_id, group_id, worker, version, policy_digest, rollouts, granted_unix_s, "
        "expires_unix_s, state FROM lease WHERE lease_id = ?1",
        [&](const Row& row) {
          lease = LeaseRecord{LeaseId{row.integer(0)},
                              GroupId{row.integer(1)},
                              WorkerId{row.integer(2)},
                              Version{row.integer(3)},
                              std::string(row.bytes(4)),
                              static_cast<std::uint32_t>(row.integer(5)),
                              row.real(6),
                              row.real(7),
                              static_cast<LeaseState>(row.integer(8))};
        },
        id.value));
    return lease;
  }

  Status submit_all(std::span<const Delivery> deliveries, std::uint64_t step, double now,
                    std::vector<Verdict>& verdicts, std::vector<Settled>& settled) {
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    for (const Delivery& delivery : deliveries) {
      ECHO_CHECK(delivery.submission != nullptr);
      const Store::Totals before = store_.totals;
      ECHO_TRY(db_.run("SAVEPOINT delivery"));
      ECHO_ASSIGN(Verdict verdict, decide(delivery, step, now, settled));
      if (!verdict.accepted) {
        ECHO_TRY(db_.run("ROLLBACK TO delivery"));
        store_.totals = before;
        ECHO_TRY(refuse(delivery, verdict, now));
      }
      ECHO_TRY(db_.run("RELEASE delivery"));
      verdicts.push_back(std::move(verdict));
    }
    return transaction.commit();
  }

  // Stores and settles the delivery, or says why not; what it wrote is rolled back in that case.
  Result<Verdict> decide(const Delivery& delivery, std::uint64_t step, double now, std::vector<Settled>& settled) {
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

    std::uint64_t tokens = 0;
    for (const Trajectory& trajectory : submission.trajectories()) {
      const auto stored = store_.insert(trajectory);
      if (!stored && stored.error().code == Code::kInvalid) return refused("malformed", stored.error().detail);
      if (!stored) return stored.error();
      if (!*stored) return refused("malformed", fmt::format("trajectory '{}' stands twice", trajectory.id()));
      tokens += static_cast<std::uint64_t>(trajectory.response_tokens_size());
    }
    ECHO_TRY(end(*lease, LeaseState::kSettled));
    ECHO_TRY(db_.run("UPDATE lease SET settled_unix_s = ?2 WHERE lease_id = ?1", lease->id.value, now));
    settled.push_back({lease->worker, lease->granted_unix_s, tokens});
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
    // A late result still tells how long the work takes, or slow workers would never move the median.
    if (verdict.reason == "lease expired") remember_completion(now - lease->granted_unix_s);
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

  void remember_completion(double completion_s) {
    completions_s_.push_back(std::max(completion_s, 0.0));
    if (completions_s_.size() > kCompletionsKept) completions_s_.pop_front();
  }

  void measure(const Settled& settled, double now) {
    remember_completion(now - settled.granted_unix_s);
    Speed& speed = speeds_[settled.worker];
    if (speed.window_begin_unix_s == 0) speed.window_begin_unix_s = settled.granted_unix_s;
    speed.window_tokens += settled.tokens;
    const double elapsed_s = now - speed.window_begin_unix_s;
    if (elapsed_s < kMeasureSeconds) return;
    speed.tokens_per_s = updated_throughput(speed.tokens_per_s, speed.window_tokens, elapsed_s);
    speed.window_begin_unix_s = now;
    speed.window_tokens = 0;
  }

  Store& store_;
  Database& db_;
  LedgerOptions options_;
  std::deque<double> completions_s_;
  std::map<WorkerId, Speed> speeds_;
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
  if (!(options.lease.lease_s_min > 0) || !(options.lease.lease_s_max >= options.lease.lease_s_min))
    return fail(Code::kInvalid, kOpen, "lease of {}..{} s, expected 0 < min <= max", options.lease.lease_s_min,
                options.lease.lease_s_max);
  auto impl = std::make_unique<Impl>(buffer.store(), options);
  ECHO_TRY(impl->load_completions());
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

Result<std::uint64_t> JobLedger::release_worker(WorkerId worker) {
  impl_->check_thread();
  return impl_->release_worker(worker);
}

Result<std::uint64_t> JobLedger::release_all() {
  impl_->check_thread();
  return impl_->release_all();
}

Result<std::uint64_t> JobLedger::expire(double now_unix_s) {
  impl_->check_thread();
  return impl_->expire(now_unix_s);
}

Result<std::uint64_t> JobLedger::resume(double now_unix_s) {
  impl_->check_thread();
  return impl_->resume(now_unix_s);
}

Result<std::uint64_t> JobLedger::stranded_by_next_step(std::uint64_t step, double now_unix_s) {
  impl_->check_thread();
  return impl_->stranded_by_next_step(step, now_unix_s);
}

Result<LedgerCounts> JobLedger::counts() {
  impl_->check_thread();
  return impl_->counts();
}

std::vector<WorkerShare> JobLedger::shares(std::uint64_t groups, std::span<const WorkerId> eligible) {
  return impl_->shares(groups, eligible);
}

double JobLedger::lease_seconds_now() const { return impl_->length_s(); }

}  // namespace echoline::replay_buffer
