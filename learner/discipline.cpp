// Counts workers' offences and expels them, for the parts of the rollout desk.
#include "learner/discipline.hpp"

#include "base/log.hpp"

namespace echoline::learner {
namespace {

constexpr std::uint32_t kMalformedMax = 5;
constexpr std::uint32_t kForgivenAfter = 20;  // submissions accepted
constexpr std::uint32_t kFailuresInARowMax = 8;
constexpr Allowance kMessageRate{2000, 100};  // a worker without work asks 25 times a second

}  // namespace

void MisconductTracker::restore(WorkerId worker, const replay_buffer::Misconduct& kept) {
  Record& record = records_[worker];
  record.malformed = kept.malformed;
  record.failures = kept.failures;
}

replay_buffer::Misconduct MisconductTracker::misconduct_of(WorkerId worker) const {
  const auto it = records_.find(worker);
  if (it == records_.end()) return {};
  return {it->second.malformed, it->second.failures};
}

bool MisconductTracker::record_malformed(WorkerId worker) {
  Record& record = records_[worker];
  record.good_since = 0;
  return ++record.malformed >= kMalformedMax;
}

bool MisconductTracker::record_failure(WorkerId worker) {
  Record& record = records_[worker];
  if (record.failures++ == 0) record.successes_at_first = successes_;
  return record.failures >= kFailuresInARowMax && successes_ > record.successes_at_first;
}

void MisconductTracker::record_accepted(WorkerId worker) {
  ++successes_;
  const auto it = records_.find(worker);
  if (it == records_.end()) return;
  Record& record = it->second;
  record.failures = 0;
  if (record.malformed > 0 && ++record.good_since >= kForgivenAfter) record.good_since = 0, --record.malformed;
  if (record.malformed == 0) records_.erase(it);
}

bool MisconductTracker::exceeds_message_rate(WorkerId worker, TimePoint now) {
  return !message_buckets_.try_emplace(worker, kMessageRate).first->second.take(now);
}

void MisconductTracker::check() const {
  for (const auto& [worker, record] : records_)
    ECHO_CHECK(record.good_since < kForgivenAfter && record.successes_at_first <= successes_,
               "worker {}: {} good submissions are not forgiven", worker, record.good_since);
}

Discipline::Discipline(DeskContext& desk) : desk_(desk) {
  for (const auto& [worker, kept] : desk_.ledger->misconduct()) misconduct_.restore(worker, kept);
}

void Discipline::store_misconduct(WorkerId worker) {
  // After a failure the file lacks this until the next change; memory has it.
  if (const Status kept =
          desk_.database.stall_on_error(desk_.ledger->store_misconduct(worker, misconduct_.misconduct_of(worker)));
      !kept)
    log::error("{}", kept.error().message());
}

void Discipline::expel_idle_workers() {
  for (const replay_buffer::UnproductiveWorker& idler : desk_.ledger->newly_unproductive())
    desk_.expel(idler.worker, idler.reason);
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
