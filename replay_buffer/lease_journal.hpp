// Keeps the job ledger's leases in the replay buffer's file: loads a LeaseCore, and writes the core's changes. Private
// to this folder.
#pragma once
#include <optional>

#include "replay_buffer/job_ledger.hpp"
#include "replay_buffer/lease_core.hpp"
#include "replay_buffer/sqlite.hpp"

namespace echoline::replay_buffer {

// Writing methods need the caller's transaction.
class LeaseJournal {
 public:
  explicit LeaseJournal(Database& db) : db_(db) {}

  // Loads an empty core with the leases, groups and counts of the file. The file has no measured speeds, so the core
  // measures the workers again.
  Status load(LeaseCore& core);
  Status write(std::span<const LeaseChange> changes);
  // Writes the totals that changed since begin().
  Status write_totals(const LeaseCore& core);
  // A lease that has ended; absent if the file has no ended lease of this number.
  Result<std::optional<LeaseRecord>> find_ended(LeaseId id);
  Status write_misconduct(WorkerId worker, const Misconduct& misconduct);

 private:
  Status write(const change::Leased& change);
  Status write(const change::Ended& change);
  Status write(const change::Renewed& change);
  Status write(const change::WaitsShortened& change);
  Status write(const change::AllExtended& change);
  Status write(const change::Pooled& change);
  Status write(const change::Unpooled& change);
  Status write(const change::FailuresCounted& change);
  Status write(const change::FailuresForgotten& change);
  Status write(const change::GroupSetAside& change);
  Status write(const change::Lapsed& change);
  Status delete_worker_if_faultless(WorkerId worker);  // a row without lapses and misconduct says nothing

  Database& db_;
};

}  // namespace echoline::replay_buffer
