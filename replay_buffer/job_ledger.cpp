// The job ledger: LeaseCore with its journal in the replay buffer's file. The rollout desk calls it.
#include "replay_buffer/job_ledger.hpp"

#include <algorithm>
#include <functional>
#include <map>

#include "replay_buffer/lease_journal.hpp"
#include "replay_buffer/store.hpp"

namespace echoline::replay_buffer {
namespace {

// SQLite's integers are signed, so no number in the file is greater.
constexpr std::uint64_t kSqliteIntegerMax = INT64_MAX;

}  // namespace

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
                      misconduct_[WorkerId{row.integer(0)}] = {.malformed = static_cast<std::uint32_t>(row.integer(1)),
                                                               .failures = static_cast<std::uint32_t>(row.integer(2))};
                    });
  }

  Result<std::vector<LeaseRecord>> grant(const GrantRequest& request, std::uint64_t step, double now_unix_s) {
    if (request.policy_digest.empty())
      return fail(Code::kInvalid, "grant", "worker {}: no policy digest", request.worker);
    return decide_and_persist([&] {
      std::vector<LeaseRecord> records;
      for (LiveLease& lease : core_.grant(request, step, now_unix_s)) records.push_back(std::move(lease.record));
      return records;
    });
  }

  Result<std::vector<Verdict>> submit(std::span<const Delivery> deliveries, std::uint64_t step, double now_unix_s) {
    ECHO_CHECK(!in_transaction_, "submit() uses its own transaction");
    const Store::Totals totals_before = store_.totals;
    core_.begin();
    auto verdicts = submit_all(deliveries, step, now_unix_s);
    if (verdicts) {
      core_.commit();
      return verdicts;
    }
    core_.rollback();
    store_.totals = totals_before;
    return verdicts;
  }

  LeaseCore& core() { return core_; }
  const std::map<WorkerId, Misconduct>& misconduct() const { return misconduct_; }

  // Runs a decision of the core, and returns its result once the file has the changes. Within run_in_transaction(), the
  // file gets them at the end of that.
  // On an error the file and the core are unchanged, so that a failing disk does not count against a worker and the
  // call may be repeated.
  template <class Decide>
  auto decide_and_persist(Decide&& decide) -> Result<decltype(decide())> {
    if (in_transaction_) return decide();
    core_.begin();
    auto outcome = decide();
    ECHO_TRY(write_or_roll_back());
    return outcome;
  }

  Status run_in_transaction(const std::function<void()>& calls) {
    core_.begin();
    in_transaction_ = true;
    calls();
    in_transaction_ = false;
    return write_or_roll_back();
  }

  Status store_misconduct(WorkerId worker, const Misconduct& misconduct) {
    const auto is_persisted = decide_and_persist([&] {
      unwritten_misconduct_[worker] = misconduct;
      return true;  // any value, for a Result
    });
    return is_persisted ? ok() : Status(is_persisted.error());
  }

  Result<LedgerCounts> counts() {
    const LeaseTotals& totals = core_.totals();
    LedgerCounts counts{.live = core_.live(),
                        .pooled = core_.pooled(),
                        .settled = totals.settled,
                        .expired = totals.expired,
                        .released = totals.released,
                        .set_aside = {},
                        .limited_steps = core_.limited_steps()};
    ECHO_TRY(db_.each("SELECT reason, count(*) FROM set_aside GROUP BY reason",
                      [&](const Row& row) { counts.set_aside[std::string(row.bytes(0))] = row.integer(1); }));
    return counts;
  }

  void check_thread() { store_.check_thread(); }

 private:
  // Writes the changes since begin() to the file, or rolls them back.
  Status write_or_roll_back() {
    Status status = core_.has_changes() || !unwritten_misconduct_.empty() ? write() : ok();
    if (status) {
      core_.commit();
      for (const auto& [worker, misconduct] : unwritten_misconduct_) {
        misconduct_[worker] = misconduct;
        if (misconduct == Misconduct{}) misconduct_.erase(worker);
      }
    } else {
      core_.rollback();
    }
    unwritten_misconduct_.clear();
    return status;
  }

  Status write() {
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    ECHO_TRY(journal_.write(core_.changes()));
    ECHO_TRY(journal_.write_totals(core_));
    for (const auto& [worker, misconduct] : unwritten_misconduct_)
      ECHO_TRY(journal_.write_misconduct(worker, misconduct));
    return transaction.commit();
  }

  // A live lease, or an ended one that is still in the file.
  Result<std::optional<LeaseRecord>> find(LeaseId id) {
    if (const LiveLease* live = core_.find(id)) return std::optional(live->record);
    return journal_.find_ended(id);
  }

  Result<std::vector<Verdict>> submit_all(std::span<const Delivery> deliveries, std::uint64_t step, double now_unix_s) {
    std::vector<Verdict> verdicts;
    std::size_t changes_written = 0;
    ECHO_ASSIGN(Transaction transaction, Transaction::begin(db_));
    for (const Delivery& delivery : deliveries) {
      ECHO_CHECK(delivery.submission != nullptr);
      const Store::Totals totals_before = store_.totals;
      ECHO_TRY(db_.run("SAVEPOINT delivery"));  // undoes the writes of a delivery that is refused in the end
      ECHO_ASSIGN(Verdict verdict, try_to_settle(delivery, step, now_unix_s));
      if (!verdict.accepted) {
        ECHO_TRY(db_.run("ROLLBACK TO delivery"));
        store_.totals = totals_before;
        ECHO_TRY(record_refusal(delivery, verdict, now_unix_s));
      }
      ECHO_TRY(db_.run("RELEASE delivery"));
      verdicts.push_back(std::move(verdict));
      // Writes the changes at once, because the next delivery may be for the same lease.
      ECHO_TRY(journal_.write(std::span(core_.changes()).subspan(changes_written)));
      changes_written = core_.changes().size();
    }
    ECHO_TRY(journal_.write_totals(core_));
    ECHO_TRY(transaction.commit());
    return verdicts;
  }

  // Stores the delivery's trajectories and settles its lease, or returns a verdict that refuses it. Then the caller
  // rolls back the writes.
  Result<Verdict> try_to_settle(const Delivery& delivery, std::uint64_t step, double now_unix_s) {
    const schema::Submission& submission = *delivery.submission;
    Verdict verdict;
    verdict.lease = LeaseId{submission.lease()};
    const auto refused_verdict = [&](std::string_view reason, std::string detail = {}) {
      verdict.reason = reason;
      verdict.detail = std::move(detail);
      return verdict;
    };
    if (submission.lease() > kSqliteIntegerMax) return refused_verdict("unknown lease");
    ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(verdict.lease));
    // A worker repeats a submission if it has lost the answer: the same trajectories are accepted again.
    if (lease && lease->worker == delivery.worker && lease->state == LeaseState::kSettled) {
      ECHO_ASSIGN(const bool is_repeated, all_are_stored(submission));
      if (!is_repeated) return refused_verdict("lease already settled", "by other trajectories");
      verdict.accepted = verdict.duplicate = true;
      return verdict;
    }
    if (!lease) return refused_verdict("unknown lease");
    if (lease->worker == delivery.worker && lease->state == LeaseState::kLive && !delivery.refusal_reason.empty())
      return refused_verdict(delivery.refusal_reason, delivery.detail);
    if (submission.trajectories_size() == 0) return refused_verdict("malformed", "no trajectories");
    for (const Trajectory& trajectory : submission.trajectories()) {
      const Claim claim{.worker = delivery.worker,
                        .version = data_plane::oldest_version(trajectory),
                        .policy_digest = trajectory.policy_digest()};
      if (const auto reason = refusal(lease, claim, now_unix_s))
        return refused_verdict(*reason, fmt::format("version {}, trajectory '{}'", claim.version, trajectory.id()));
      if (trajectory.lease() != lease->id.value || trajectory.group() != lease->group.value ||
          trajectory.worker() != lease->worker.value)
        return refused_verdict("malformed",
                               fmt::format("trajectory '{}' is of lease {}, group {}, worker {}; expected {}, {}, {}",
                                           trajectory.id(), trajectory.lease(), trajectory.group(), trajectory.worker(),
                                           lease->id, lease->group, lease->worker));
    }
    if (static_cast<std::uint32_t>(submission.trajectories_size()) != lease->rollouts)
      return refused_verdict("malformed", fmt::format("{} trajectories, expected all {} of the group",
                                                      submission.trajectories_size(), lease->rollouts));
    if (!admissible(step, lease->version, store_.options.staleness_budget))
      return refused_verdict("stale", fmt::format("version {} at learner step {}", lease->version, step));

    for (const Trajectory& trajectory : submission.trajectories()) {
      const Result<bool> is_new = store_.insert(trajectory);
      if (!is_new && is_new.error().code == Code::kInvalid) return refused_verdict("malformed", is_new.error().detail);
      if (!is_new) return is_new.error();
      if (!*is_new) return refused_verdict("malformed", fmt::format("trajectory '{}' occurs twice", trajectory.id()));
    }
    if (delivery.unscored) ECHO_TRY(db_.run("UPDATE groups SET unscored = 1 WHERE group_id = ?1", lease->group.value));
    StoredResult result{.version = data_plane::oldest_version(submission.trajectories(0)),
                        .tokens_longest = longest_response_tokens(submission),
                        .scored = !delivery.unscored};
    for (const Trajectory& trajectory : submission.trajectories())
      result.version = std::min(result.version, data_plane::oldest_version(trajectory));
    verdict.lease_seconds = core_.settle(lease->id, result, now_unix_s);
    verdict.accepted = true;
    return verdict;
  }

  // Counts the refusal and ends this worker's live lease, because the result will not be submitted again.
  Status record_refusal(const Delivery& delivery, const Verdict& verdict, double now_unix_s) {
    ECHO_TRY(
        store_.count_rejected(verdict.reason, static_cast<std::uint64_t>(delivery.submission->trajectories_size())));
    if (delivery.submission->lease() > kSqliteIntegerMax) return ok();
    ECHO_ASSIGN(const std::optional<LeaseRecord> lease, find(verdict.lease));
    if (!lease || lease->worker != delivery.worker) return ok();
    if (lease->state == LeaseState::kLive)
      core_.refuse(lease->id, longest_response_tokens(*delivery.submission), now_unix_s);
    else if (verdict.reason == "lease expired")
      core_.record_late_result(lease->worker, lease->granted_unix_s, longest_response_tokens(*delivery.submission),
                               now_unix_s);
    return ok();
  }

  // Whether all these trajectories are in the file. A group number is cut to what SQLite can store; a worker may send
  // any.
  Result<bool> all_are_stored(const schema::Submission& submission) {
    if (submission.trajectories_size() == 0) return false;
    for (const Trajectory& trajectory : submission.trajectories()) {
      ECHO_ASSIGN(const auto stored,
                  db_.first_integer("SELECT 1 FROM trajectory WHERE id = ?1 AND group_id = ?2 AND member = ?3",
                                    trajectory.id(), trajectory.group() & kSqliteIntegerMax, trajectory.member()));
      if (!stored) return false;
    }
    return true;
  }

  static std::uint64_t longest_response_tokens(const schema::Submission& submission) {
    int tokens = 0;
    for (const Trajectory& trajectory : submission.trajectories())
      tokens = std::max(tokens, trajectory.response_tokens_size());
    return static_cast<std::uint64_t>(tokens);
  }

  Store& store_;
  Database& db_;
  LeaseJournal journal_;
  LeaseCore core_;
  std::map<WorkerId, Misconduct> misconduct_;  // only workers with misconduct
  // Changes that the file does not have yet. A value without misconduct removes the worker's entry.
  std::map<WorkerId, Misconduct> unwritten_misconduct_;
  bool in_transaction_ = false;
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
  LedgerOptions complete_options = options;
  complete_options.pacing.group_size = buffer.options().group_size;
  auto impl = std::make_unique<Impl>(buffer.store(), complete_options);
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

Status JobLedger::run_in_transaction(const std::function<void()>& calls) {
  impl_->check_thread();
  return impl_->run_in_transaction(calls);
}

std::vector<UnproductiveWorker> JobLedger::newly_unproductive() { return impl_->core().newly_unproductive(); }

const std::map<WorkerId, Misconduct>& JobLedger::misconduct() const { return impl_->misconduct(); }

Status JobLedger::store_misconduct(WorkerId worker, const Misconduct& misconduct) {
  impl_->check_thread();
  return impl_->store_misconduct(worker, misconduct);
}

Status JobLedger::on_result_unscorable(GroupId group, WorkerId worker, std::string_view reason,
                                       const std::string& detail) {
  impl_->check_thread();
  const auto is_persisted = impl_->decide_and_persist([&] {
    impl_->core().on_result_unscorable(group, worker, reason, detail);
    return true;  // any value, for a Result
  });
  return is_persisted ? ok() : Status(is_persisted.error());
}

Result<std::uint64_t> JobLedger::release_worker(WorkerId worker, double now_unix_s) {
  impl_->check_thread();
  return impl_->decide_and_persist([&] { return impl_->core().release_worker(worker, now_unix_s); });
}

Result<std::uint64_t> JobLedger::release_all() {
  impl_->check_thread();
  return impl_->decide_and_persist([&] { return impl_->core().release_all(); });
}

Result<std::uint64_t> JobLedger::expire(double now_unix_s) {
  impl_->check_thread();
  return impl_->decide_and_persist([&] { return impl_->core().expire(now_unix_s); });
}

Result<std::uint64_t> JobLedger::extend_all_leases(double extend_by_s, double now_unix_s) {
  impl_->check_thread();
  return impl_->decide_and_persist([&] { return impl_->core().extend_all_leases(extend_by_s, now_unix_s); });
}

Result<std::uint64_t> JobLedger::stranded_by_next_step(std::uint64_t step, double now_unix_s) {
  impl_->check_thread();
  return impl_->core().stranded_by_next_step(step, now_unix_s);
}

Result<LedgerCounts> JobLedger::counts() {
  impl_->check_thread();
  return impl_->counts();
}

std::uint64_t JobLedger::leases_held(WorkerId worker) {
  impl_->check_thread();
  return impl_->core().leases_held(worker);
}

Result<std::uint64_t> JobLedger::renew(WorkerId worker, std::span<const LeaseId> leases, std::uint64_t progress,
                                       double now_unix_s) {
  impl_->check_thread();
  return impl_->decide_and_persist(
      [&] { return impl_->core().renew(worker, leases, progress & kSqliteIntegerMax, now_unix_s); });  // as stored
}

Result<std::uint64_t> JobLedger::return_leases(WorkerId worker, std::span<const LeaseId> leases) {
  impl_->check_thread();
  return impl_->decide_and_persist([&] { return impl_->core().return_leases(worker, leases); });
}

Result<std::uint64_t> JobLedger::return_all_leases(WorkerId worker) {
  impl_->check_thread();
  return impl_->decide_and_persist([&] { return impl_->core().return_all_leases(worker); });
}

Result<bool> JobLedger::on_group_failed(const FailedWork& failure) {
  impl_->check_thread();
  return impl_->decide_and_persist(
      [&] { return impl_->core().on_group_failed(failure.worker, failure.lease, failure.reason, failure.detail); });
}

Status JobLedger::set_aside(LeaseId lease, std::string_view reason, std::string detail) {
  impl_->check_thread();
  ECHO_ASSIGN(const bool was_live,
              impl_->decide_and_persist([&] { return impl_->core().set_aside(lease, reason, detail); }));
  return was_live ? ok() : fail(Code::kNotFound, "set aside", "lease {} is not live", lease);
}

std::vector<SetAsideGroup> JobLedger::newly_set_aside() { return impl_->core().newly_set_aside(); }

std::optional<double> JobLedger::too_slow_batch_seconds(WorkerId worker) const {
  return impl_->core().too_slow_batch_seconds(worker);
}
bool JobLedger::was_turned_away(WorkerId worker) const { return impl_->core().was_turned_away(worker); }
double JobLedger::take_seconds_without_work(WorkerId worker, double now_unix_s) {
  return impl_->core().take_seconds_without_work(worker, now_unix_s);
}

}  // namespace echoline::replay_buffer
