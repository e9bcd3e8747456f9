// Counts workers' offences and expels them, for the parts of the rollout desk.
#include "learner/discipline.hpp"

#include "base/log.hpp"

namespace echoline::learner {
namespace {

constexpr std::uint32_t kMalformedMax = 5;       // with so many malformed messages, a worker is expelled
constexpr std::uint32_t kForgivenAfter = 20;     // accepted submissions, after which one malformed message is forgiven
constexpr std::uint32_t kFailuresInARowMax = 8;  // groups
// In messages. An idle worker asks 25 times a second.
constexpr Allowance kMessageRate{.burst = 2000, .per_s = 100};

}  // namespace

void MisconductTracker::restore(WorkerId worker, const replay_buffer::Misconduct& stored) {
  Record& record = records_[worker];
  record.malformed = stored.malformed;
  record.failures_in_a_row = stored.failures;
}

replay_buffer::Misconduct MisconductTracker::misconduct_of(WorkerId worker) const {
  const auto it = records_.find(worker);
  if (it == records_.end()) return {};
  return {.malformed = it->second.malformed, .failures = it->second.failures_in_a_row};
}

bool MisconductTracker::record_malformed(WorkerId worker) {
  Record& record = records_[worker];
  record.accepted_since = 0;
  return ++record.malformed >= kMalformedMax;
}

bool MisconductTracker::record_failure(WorkerId worker) {
  Record& record = records_[worker];
  if (record.failures_in_a_row++ == 0) record.successes_before = successes_;
  // If no other worker succeeded meanwhile, the fault may be the run's.
  return record.failures_in_a_row >= kFailuresInARowMax && successes_ > record.successes_before;
}

void MisconductTracker::record_accepted(WorkerId worker) {
  ++successes_;
  const auto it = records_.find(worker);
  if (it == records_.end()) return;
  Record& record = it->second;
  record.failures_in_a_row = 0;
  if (record.malformed > 0 && ++record.accepted_since >= kForgivenAfter) {
    record.accepted_since = 0;
    --record.malformed;
  }
  if (record.malformed == 0) records_.erase(it);
}

bool MisconductTracker::exceeds_message_rate(WorkerId worker, TimePoint now) {
  return !message_buckets_.try_emplace(worker, kMessageRate).first->second.take(now);
}

void MisconductTracker::check() const {
  for (const auto& [worker, record] : records_)
    ECHO_CHECK(record.accepted_since < kForgivenAfter && record.successes_before <= successes_,
               "worker {}: {} submissions were accepted, and no malformed message was forgiven", worker,
               record.accepted_since);
}

Discipline::Discipline(DeskContext& desk) : desk_(desk) {
  for (const auto& [worker, stored] : desk_.ledger->misconduct()) misconduct_.restore(worker, stored);
}

void Discipline::store_misconduct(WorkerId worker) {
  // If this fails, the counts are only in memory until they change again.
  if (const Status stored =
          desk_.database.stall_on_error(desk_.ledger->store_misconduct(worker, misconduct_.misconduct_of(worker)));
      !stored)
    log::error("{}", stored.error().message());
}

void Discipline::expel_unproductive_workers() {
  for (const replay_buffer::UnproductiveWorker& unproductive : desk_.ledger->newly_unproductive())
    desk_.expel(unproductive.worker, unproductive.reason);
}

void Discipline::count_malformed(WorkerId worker, const std::string& what, bool forged) {
  log::warn("worker {}: {}", worker, what);
  if (forged || misconduct_.record_malformed(worker)) desk_.expel(worker, what);
  store_misconduct(worker);
}

void Discipline::count_failure(WorkerId worker, const std::string& what) {
  if (misconduct_.record_failure(worker)) desk_.expel(worker, what);
  store_misconduct(worker);
}

void Discipline::count_accepted(WorkerId worker) {
  const replay_buffer::Misconduct before = misconduct_.misconduct_of(worker);
  misconduct_.record_accepted(worker);
  if (misconduct_.misconduct_of(worker) != before) store_misconduct(worker);
}

bool Discipline::count_idle_message(WorkerId worker) {
  if (!misconduct_.exceeds_message_rate(worker, desk_.clock.now())) return true;
  desk_.expel(worker, "it sends more messages than any worker needs");
  return false;
}

}  // namespace echoline::learner
