#include "learner/discipline.hpp"

#include "base/log.hpp"

namespace echoline::learner {
namespace {

constexpr std::uint32_t kMalformedMax = 5;
constexpr std::uint32_t kForgivenAfter = 20;  // submissions accepted
constexpr std::uint32_t kFailuresInARowMax = 8;
constexpr Allowance kTalk{2000, 100};  // a worker without work asks 25 times a second

}  // namespace

void Conduct::restore(WorkerId worker, const replay_buffer::Misconduct& kept) {
  Record& record = records_[worker];
  record.malformed = kept.malformed;
  record.failures = kept.failures;
}

replay_buffer::Misconduct Conduct::of(WorkerId worker) const {
  const auto it = records_.find(worker);
  if (it == records_.end()) return {};
  return {it->second.malformed, it->second.failures};
}

bool Conduct::malformed(WorkerId worker) {
  Record& record = records_[worker];
  record.good_since = 0;
  return ++record.malformed >= kMalformedMax;
}

bool Conduct::failed(WorkerId worker) {
  Record& record = records_[worker];
  if (record.failures++ == 0) record.successes_at_first = successes_;
  return record.failures >= kFailuresInARowMax && successes_ > record.successes_at_first;
}

void Conduct::accepted(WorkerId worker) {
  ++successes_;
  const auto it = records_.find(worker);
  if (it == records_.end()) return;
  Record& record = it->second;
  record.failures = 0;
  if (record.malformed > 0 && ++record.good_since >= kForgivenAfter) record.good_since = 0, --record.malformed;
  if (record.malformed == 0) records_.erase(it);
}

bool Conduct::talked(WorkerId worker, TimePoint now) {
  return !talk_.try_emplace(worker, kTalk).first->second.take(now);
}

void Conduct::check() const {
  for (const auto& [worker, record] : records_)
    ECHO_CHECK(record.good_since < kForgivenAfter && record.successes_at_first <= successes_,
               "worker {}: {} good submissions are not forgiven", worker, record.good_since);
}

Discipline::Discipline(DeskContext& desk) : desk_(desk) {
  for (const auto& [worker, kept] : desk_.ledger->misconduct()) conduct_.restore(worker, kept);
}

void Discipline::store_conduct(WorkerId worker) {
  // After a failure the file lacks this until the next change; memory has it.
  if (const Status kept = desk_.database.checked(desk_.ledger->keep(worker, conduct_.of(worker))); !kept)
    log::error("{}", kept.error().message());
}

void Discipline::expel_idle_workers() {
  for (const replay_buffer::Idler& idler : desk_.ledger->newly_idle()) desk_.expel(idler.worker, idler.reason);
}

void Discipline::count_malformed(WorkerId worker, const std::string& what, bool forged) {
  log::warn("worker {}: {}", worker, what);
  if (forged || conduct_.malformed(worker)) desk_.expel(worker, what);
  store_conduct(worker);
}

void Discipline::count_failure(WorkerId worker, const std::string& what) {
  if (conduct_.failed(worker)) desk_.expel(worker, what);
  store_conduct(worker);
}

void Discipline::count_accepted(WorkerId worker) {
  const replay_buffer::Misconduct before = conduct_.of(worker);
  conduct_.accepted(worker);
  if (conduct_.of(worker) != before) store_conduct(worker);
}

bool Discipline::may_talk(WorkerId worker) {
  if (!conduct_.talked(worker, desk_.clock.now())) return true;
  desk_.expel(worker, "it sends more messages than any worker needs");
  return false;
}

}  // namespace echoline::learner
