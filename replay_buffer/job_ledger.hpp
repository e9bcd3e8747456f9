// The job ledger: which worker may generate which group until when. Its leases live in the replay buffer's file, so a
// restarted learner neither loses nor doubles a group.
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "replay_buffer/buffer.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::replay_buffer {

struct LedgerOptions {
  Pacing pacing;  // its staleness budget must be the buffer's
  LeaseLength lease;
  std::uint32_t leases_per_grant_max = 256;
  std::uint32_t leases_live_max = 65'536;
};

// A worker asks for work. `policy_digest` is the learner's own digest of `version`; the caller has checked that the
// worker's agrees.
struct GrantRequest {
  WorkerId worker;
  Version version;
  std::string policy_digest;
  std::uint32_t groups_max = 1;
};

// A worker hands in the trajectories of one lease.
struct Delivery {
  WorkerId worker;  // who the connection belongs to, not what the message says
  const schema::Submission* submission = nullptr;
};

struct Verdict {
  LeaseId lease;
  bool accepted = false;   // durable, counted once
  bool duplicate = false;  // accepted earlier; this copy changed nothing
  std::string reason;      // why not, one of the stable texts of rules.hpp, "malformed" or "stale"; empty when accepted
  std::string detail;      // more for the log: what was expected and what was found
};

struct LedgerCounts {
  std::uint64_t live = 0;     // outstanding leases
  std::uint64_t pooled = 0;   // groups waiting to be leased again
  std::uint64_t settled = 0;  // since the file was made
  std::uint64_t expired = 0;
  std::uint64_t released = 0;
};

// Times are seconds since 1970 (leases outlive a process). Thread: the buffer's owner thread. The buffer must outlive
// the ledger. Group g is training problem g of the adapter: one cursor numbers both.
class JobLedger {
 public:
  static Result<std::unique_ptr<JobLedger>> open(ReplayBuffer& buffer, const LedgerOptions& options);
  ~JobLedger();

  // Leases up to groups_max groups for learner step t, as pacing allows (rules.hpp); returned groups first, then new
  // problems from the cursor. Empty when nothing may be generated now. Expires overdue leases on the way.
  Result<std::vector<LeaseRecord>> grant(const GrantRequest& request, std::uint64_t step, double now_unix_s);

  // Accepts, checks, stores and settles all deliveries in ONE transaction: when it returns, every accepted verdict is
  // durable. The same submission again is acknowledged without being counted twice. A refusal concerns its delivery
  // only; its live lease ends and the group goes back to the pool. An Error (disk, buffer full) means nothing was
  // stored and the workers should send again. `step` is the learner's: what is too stale for it already is refused.
  Result<std::vector<Verdict>> submit(std::span<const Delivery> deliveries, std::uint64_t step, double now_unix_s);

  // The worker is lost: its groups go back to the pool. Returns how many.
  Result<std::uint64_t> release_worker(WorkerId worker);
  // After a restart whose workers ended with the learner: every live lease ends and its group goes back to the pool.
  Result<std::uint64_t> release_all();
  // Overdue leases end and their groups go back to the pool. Returns how many.
  Result<std::uint64_t> expire(double now_unix_s);

  // After a restart that its workers outlived: they could not hand in meanwhile, and nobody else has their groups, so
  // every live lease gets a full term from now. Call before the first grant() or expire(). Returns how many.
  Result<std::uint64_t> resume(double now_unix_s);

  // Trajectories of live leases that would come too late for every later batch if the learner trained on what
  // sample(step) gives now (rules.hpp, stranded). A learner that waits while it is above zero, at most until those
  // leases expire, never throws generated work away.
  Result<std::uint64_t> stranded_by_next_step(std::uint64_t step, double now_unix_s);

  Result<LedgerCounts> counts();

  // Splits `groups` over the workers by measured throughput (rules.hpp, allocate); remembers the decay.
  std::vector<WorkerShare> shares(std::uint64_t groups, std::span<const WorkerId> eligible);
  // Length the next lease would get.
  double lease_seconds_now() const;

 private:
  class Impl;
  explicit JobLedger(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace echoline::replay_buffer
