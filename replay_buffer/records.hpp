// What is held against each worker, by identity: a new connection or a restarted learner does not wipe it. Private to this
// folder.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "replay_buffer/job_ledger.hpp"
#include "replay_buffer/sqlite.hpp"

namespace echoline::replay_buffer {

// Owned by the ledger; every method that writes belongs into its transaction. When that is not committed, load() makes the records
// in memory agree with the file again.
class Records {
 public:
  explicit Records(Database& db) : db_(db) {}
  // Replaces the records in memory by the file's; changes nothing on an error.
  Status load();

  // A batch of leases ended without any result, or its worker was lost with it. What to say of the worker when that
  // was once too often.
  Result<std::optional<std::string>> lapsed(WorkerId worker, LapseKind kind);
  // Some of a batch was handed in.
  Status returned(WorkerId worker);

  // The learner waited for it in vain, or would have: for a while nobody waits for it again.
  void kept_waiting(WorkerId worker, double waited_s, double now_unix_s);
  bool waited_for(WorkerId worker, double now_unix_s) const;

  const std::map<WorkerId, Misconduct>& misconduct() const { return misconduct_; }
  Status keep(WorkerId worker, const Misconduct& misconduct);

 private:
  struct Lapses {
    std::uint32_t weight = 0, batches = 0;
  };
  Status write(WorkerId worker);

  Database& db_;
  std::map<WorkerId, Lapses> lapses_;               // of workers that have any
  std::map<WorkerId, Misconduct> misconduct_;       // likewise
  std::map<WorkerId, double> not_waited_for_until_;  // seconds since 1970
};

}  // namespace echoline::replay_buffer
