#include "replay_buffer/job_ledger.hpp"

#include <algorithm>
#include <functional>
#include <map>

#include "replay_buffer/lease_journal.hpp"
#include "replay_buffer/store.hpp"

namespace echoline::replay_buffer {

class JobLedger::Impl {
 public:
  Impl(Store& store, const LedgerOptions& options)
      : store_(store), db_(*store.database), journal_(db_), core_(options, store.waiting) {
    store_.on_discard = [this](GroupId group) { core_.regenerate(group); };
  }
  ~Impl() {
    store_.on_discard = [](GroupId) {};
  }

  Status open() {
    ECHO_TRY(journal_.load(core_));
    return db_.each("SELECT worker, malformed, failures FROM worker WHERE malformed > 0 OR failures > 0",
                    [&](const Row& row) {
                      misconduct_[WorkerId{row.integer(0)}] = {static_cast<std::uint32_t>(row.integer(1)),
                                                               static_cast<std::uint32_t>(row.integer(2))};
                    });
  }

  Result<std::vector<LeaseRecord>> grant(const GrantRequest& request, std::uint64_t step, double now) {
    if (request.policy_digest.empty())
      return fail(Code::kInvalid, "grant", "worker {}: no policy digest", request.worker);
    return decided([&] {
      std::vector<LeaseRecord> records;
      for (LiveLease& lease : core_.grant(request, step, now)) records.push_back(std::move(lease.record));
      return records;
    });
  }

  Result<std::vector<Verdict>> submit(std::span<const Delivery> deliveries, std::uint64_t step, double now) {
    ECHO_CHECK(!is_together_, "submit() uses its own transaction");
    const Store::Totals totals = store_.totals;
    core_.begin();
    auto verdicts = submit_all(deliveries, step, now);
    if (verdicts) return core_.commit(), std::move(verdicts);
    core_.rollback();
    store_.totals = totals;
    return verdicts;
  }

  LeaseCore& core() { return core_; }
  const std::map<WorkerId, Misconduct>& misconduct() const { return misconduct_; }

  // Runs a decision of the core and returns once the file has it. On an error the file and the core are unchanged, so
  // that a failing disk does not count against a worker and the call may be repeated.
  template <class Decide>
  auto decided(Decide&& decide) -> Result<decltype(decide())> {
    if (is_together_) return decide();
    core_.begin();
    auto outcome = decide();
    ECHO_TRY(written());
    return outcome;
  }

  Status together(const std::function<void()>& calls) {
    core_.begin();
    is_together_ = true;
    calls();
    is_together_ = false;
    return written();
  }

  Status keep(WorkerId worker, const Misconduct& misconduct) {
    const auto done = decided([&] { return kept_[worker] = misconduct, true; });
    return done ? ok() : Status(done.error());
  }

  Result<LedgerCounts> counts() {
    const LeaseTotals& totals = core_.totals();
    LedgerCounts counts{core_.live(), core_.pooled(), totals.settled, totals.expired, totals.released,
                        {},           core_.bound()};
    ECHO_TRY(db_.each("SELECT reason, count(*) FROM set_aside GROUP BY reason",
                      [&](const Row& row) { counts.set_aside[std::string(row.bytes(0))] = row.integer(1); }));
    return counts;
  }

  void check_thread() { store_.check_thread(); }

 private:
  // Writes the changes since begin() to the file, or rolls them back.
  Status written() {
    Status written = core_.changed() || !kept_.empty() ? write() : ok();
    if (written) {
      core_.commit();
      for (const auto& [worker, misconduct] : kept_) {
        misconduct_[worker] = misconduct;
        if (misconduct == Misconduct{}) misconduct_.erase(worker);
      }
    } else {
      core_.rollback();
    }
    kept_.clear();
    return written;
  }

  Status write() {
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    ECHO_TRY(journal_.write(core_.changes()));
    ECHO_TRY(journal_.write_totals(core_));
    for (const auto& [worker, misconduct] : kept_) ECHO_TRY(journal_.keep(worker, misconduct));
    return transaction.commit();
  }

  // A live lease, or an ended one that is still in the file.
  Result<std::optional<LeaseRecord>> find(LeaseId id) {
    if (const LiveLease* live = core_.find(id)) return std::optional(live->record);
    return journal_.ended(id);
  }

  Result<std::vector<Verdict>> submit_all(std::span<const Delivery> deliveries, std::uint64_t step, double now) {
    std::vector<Verdict> verdicts;
    std::size_t written = 0;
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    for (const Delivery& delivery : deliveries) {
      ECHO_CHECK(delivery.submission != nullptr);
      const Store::Totals before = store_.totals;
      ECHO_TRY(db_.run("SAVEPOINT delivery"));
      ECHO_ASSIGN(Verdict verdict, decide(delivery, step, now));
      if (!verdict.accepted) {
        ECHO_TRY(db_.run("ROLLBACK TO delivery"));
        store_.totals = before;
        ECHO_TRY(refuse(delivery, verdict, now));
      }
      ECHO_TRY(db_.run("RELEASE delivery"));
      verdicts.push_back(std::move(verdict));
      // Written at once, because the next delivery may be for the same lease.
      ECHO_TRY(journal_.write(std::span(core_.changes()).subspan(written)));
      written = core_.changes().size();
    }
    ECHO_TRY(journal_.write_totals(core_));
    ECHO_TRY(transaction.commit());
    return verdicts;
  }

  // Stores and settles the delivery, or refuses it; its writes are rolled back in that case.
  Result<Verdict> decide(const Delivery& delivery, std::uint64_t step, double now) {
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
      if (!*stored) return refused("malformed", fmt::format("trajectory '{}' occurs twice", trajectory.id()));
    }
    if (delivery.unscored) ECHO_TRY(db_.run("UPDATE groups SET unscored = 1 WHERE group_id = ?1", lease->group.value));
    StoredResult result{data_plane::oldest_version(submission.trajectories(0)), longest(submission),
                        !delivery.unscored};
    for (const Trajectory& trajectory : submission.trajectories())
      result.version = std::min(result.version, data_plane::oldest_version(trajectory));
    verdict.held_s = core_.settle(lease->id, result, now);
    verdict.accepted = true;
    return verdict;
  }

  // Counts the refusal and ends this worker's live lease, because the result will not be submitted again.
  Status refuse(const Delivery& delivery, const Verdict& verdict, double now) {
    ECHO_TRY(
        store_.count_rejected(verdict.reason, static_cast<std::uint64_t>(delivery.submission->trajectories_size())));
    if (delivery.submission->lease() > static_cast<std::uint64_t>(INT64_MAX)) return ok();
    ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(verdict.lease));
    if (!lease || lease->worker != delivery.worker) return ok();
    if (lease->state == LeaseState::kLive)
      core_.refuse(lease->id, longest(*delivery.submission), now);
    else if (verdict.reason == "lease expired")
      core_.came_late(lease->worker, lease->granted_unix_s, longest(*delivery.submission), now);
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
  LeaseJournal journal_;
  LeaseCore core_;
  std::map<WorkerId, Misconduct> misconduct_;  // workers with any
  std::map<WorkerId, Misconduct> kept_;        // workers with any, not in the file yet
  bool is_together_ = false;
};

JobLedger::JobLedger(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
JobLedger::~JobLedger() = default;

Result<std::unique_ptr<JobLedger>> JobLedger::open(ReplayBuffer& buffer, const LedgerOptions& options) {
  constexpr std::string_view kOpen = "open job ledger";
  const Pacing& pacing = options.pacing;
  if (pacing.staleness.budget != buffer.options().staleness_budget)
    return fail(Code::kInvalid, kOpen, "staleness budget {}, the buffer has {}", pacing.staleness.budget,
                buffer.options().staleness_budget);
  if (pacing.staleness.lookahead_steps() > pacing.staleness.budget)
    return fail(Code::kInvalid, kOpen, "lookahead_steps is {}, expected at most the staleness budget {}",
                pacing.staleness.lookahead_steps(), pacing.staleness.budget);
  if (pacing.trajectories_per_step < buffer.options().group_size ||
      pacing.trajectories_per_step % buffer.options().group_size != 0)
    return fail(Code::kInvalid, kOpen, "{} trajectories per step, expected a multiple of the group size {}",
                pacing.trajectories_per_step, buffer.options().group_size);
  const LeaseSettings& lease = options.lease.limits;
  if (lease.min <= Duration(0) || lease.first < lease.min || lease.max < lease.first)
    return fail(Code::kInvalid, kOpen, "leases of {} s at first, {} .. {} s later, expected 0 < min <= first <= max",
                seconds(lease.first), seconds(lease.min), seconds(lease.max));
  LedgerOptions of_buffer = options;
  of_buffer.pacing.group_size = buffer.options().group_size;
  auto impl = std::make_unique<Impl>(buffer.store(), of_buffer);
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

Status JobLedger::together(const std::function<void()>& calls) {
  impl_->check_thread();
  return impl_->together(calls);
}

std::vector<Idler> JobLedger::newly_idle() { return impl_->core().newly_idle(); }

const std::map<WorkerId, Misconduct>& JobLedger::misconduct() const { return impl_->misconduct(); }

Status JobLedger::keep(WorkerId worker, const Misconduct& misconduct) {
  impl_->check_thread();
  return impl_->keep(worker, misconduct);
}

Status JobLedger::unscorable(GroupId group, WorkerId worker, std::string_view reason, const std::string& detail) {
  impl_->check_thread();
  const auto done = impl_->decided([&] { return impl_->core().unscorable(group, worker, reason, detail), true; });
  return done ? ok() : Status(done.error());
}

Result<std::uint64_t> JobLedger::release_worker(WorkerId worker, double now_unix_s) {
  impl_->check_thread();
  return impl_->decided([&] { return impl_->core().release_worker(worker, now_unix_s); });
}

Result<std::uint64_t> JobLedger::release_all() {
  impl_->check_thread();
  return impl_->decided([&] { return impl_->core().release_all(); });
}

Result<std::uint64_t> JobLedger::expire(double now_unix_s) {
  impl_->check_thread();
  return impl_->decided([&] { return impl_->core().expire(now_unix_s); });
}

Result<std::uint64_t> JobLedger::excuse(double late_s, double now_unix_s) {
  impl_->check_thread();
  return impl_->decided([&] { return impl_->core().excuse(late_s, now_unix_s); });
}

Result<std::uint64_t> JobLedger::stranded_by_next_step(std::uint64_t step, double now_unix_s) {
  impl_->check_thread();
  return impl_->core().stranded_by_next_step(step, now_unix_s);
}

Result<LedgerCounts> JobLedger::counts() {
  impl_->check_thread();
  return impl_->counts();
}

std::uint64_t JobLedger::held(WorkerId worker) {
  impl_->check_thread();
  return impl_->core().held(worker);
}

Result<std::uint64_t> JobLedger::renew(WorkerId worker, std::span<const LeaseId> leases, std::uint64_t progress,
                                       double now_unix_s) {
  impl_->check_thread();
  return impl_->decided([&] {
    return impl_->core().renew(worker, leases, progress & static_cast<std::uint64_t>(INT64_MAX), now_unix_s);
  });
}

Result<std::uint64_t> JobLedger::give_back(WorkerId worker, std::span<const LeaseId> leases) {
  impl_->check_thread();
  return impl_->decided([&] { return impl_->core().give_back(worker, leases); });
}

Result<std::uint64_t> JobLedger::give_back_all(WorkerId worker) {
  impl_->check_thread();
  return impl_->decided([&] { return impl_->core().give_back_all(worker); });
}

Result<bool> JobLedger::failed(const FailedWork& failure) {
  impl_->check_thread();
  return impl_->decided(
      [&] { return impl_->core().failed(failure.worker, failure.lease, failure.reason, failure.detail); });
}

Status JobLedger::set_aside(LeaseId lease, std::string_view reason, std::string detail) {
  impl_->check_thread();
  ECHO_ASSIGN(const bool was_live, impl_->decided([&] { return impl_->core().set_aside(lease, reason, detail); }));
  return was_live ? ok() : fail(Code::kNotFound, "set aside", "lease {} is not live", lease);
}

std::vector<SetAside> JobLedger::newly_set_aside() { return impl_->core().newly_set_aside(); }

std::optional<double> JobLedger::too_slow(WorkerId worker) const { return impl_->core().too_slow(worker); }
bool JobLedger::turned_away(WorkerId worker) const { return impl_->core().turned_away(worker); }

}  // namespace echoline::replay_buffer
