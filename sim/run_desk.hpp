// Leases and the buffer of a simulated run: replay_buffer's rules and worker paces over plain memory, as
// replay_buffer/job_ledger and buffer apply them over a database. Private to sim/.
#pragma once
#include <deque>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "replay_buffer/pace.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::sim {

struct DeskOptions {
  replay_buffer::Pacing pacing;
  replay_buffer::LeaseLength lease;
  std::uint32_t group_size = 8;
  bool equal_shares = false;  // of every batch each worker makes as much as every other, however fast it is
  bool any_age = false;       // work is handed out, and trained on without waiting, whatever becomes too stale of it
};

struct DeskLease {
  std::uint64_t id = 0, group = 0, worker = 0, version = 0;
  double granted_s = 0, due_s = 0, expires_s = 0, lease_s = 0;
  bool overdue = false;
};

struct DeskGroup {
  std::uint64_t id = 0, worker = 0, version = 0;
  std::uint32_t tokens = 0;  // of all its responses
  bool mixed = false;        // a newer policy has finished it
};

class RunDesk {
 public:
  explicit RunDesk(const DeskOptions& options) : options_(options), minded_(options.pacing) {
    if (options.any_age) minded_.staleness_budget = kAnyAge;
  }

  // As JobLedger::grant.
  std::vector<DeskLease> grant(std::uint64_t worker, std::uint64_t version, std::uint64_t groups_max, double now);
  // Nobody can be given anything for a policy of this version now, whatever their speed.
  bool closed(std::uint64_t version) const;
  // The group of a live lease, accepted into the buffer; absent where the lease had ended or the group is too stale.
  // held_s: as Verdict::held_s.
  struct Taken {
    double held_s = 0;
  };
  std::optional<Taken> submit(std::uint64_t lease, const DeskGroup& group, std::uint32_t tokens_longest, double now);
  void give_back(std::uint64_t lease);
  void release_worker(std::uint64_t worker);
  // Whoever is there makes progress, so leases are renewed, until they have lasted as long as any may.
  void expire(double now);

  // The batch of the step, oldest first; absent while there is none, or where training now would strand work under way.
  std::optional<std::vector<DeskGroup>> batch(std::uint64_t groups, double now);
  // The batch was taken: what is asked for now is for the step after. Returns what became too stale.
  std::uint64_t consumed(double now);

  std::uint64_t step() const { return step_; }
  std::uint64_t waiting() const;    // rollouts
  std::uint64_t in_flight() const { return live_.size() * options_.group_size; }
  // Rollouts by age at the step.
  std::map<std::uint64_t, std::uint64_t> waiting_by_age() const, in_flight_by_age() const;
  std::uint64_t set_aside() const { return set_aside_; }
  // Rollouts by reason: generated and not trained on; of leases that ended without a result.
  const std::map<std::string, std::uint64_t>& rejected() const { return rejected_; }
  // Of these, what was too stale, by its age when that was found.
  const std::map<std::uint64_t, std::uint64_t>& stale_by_age() const { return stale_by_age_; }
  const std::map<std::string, std::uint64_t>& unfinished() const { return unfinished_; }
  const replay_buffer::BoundSteps& bound() const { return bound_; }
  bool too_slow(std::uint64_t worker) const;

 private:
  static constexpr std::uint32_t kAnyAge = 1u << 30;
  struct Known {
    replay_buffer::WorkerPace pace;
    std::uint64_t trusted = 0, live = 0;
    std::uint64_t given = 0;  // groups, since the last batch was taken
    double accounted_until_s = 0;
    bool too_slow = false;
    std::vector<std::uint64_t> leases;  // live
  };
  struct Stock {
    std::deque<DeskGroup> waiting;
    std::uint64_t live = 0;  // leases, overdue ones not counted
    std::uint64_t live_all = 0;
  };
  struct Usual {
    std::optional<double> batch_s, seconds_per_token, groups_per_s;
    double measured = 0, sum = 0;  // workers, and their groups/s as they count
    double at_s = -1;
    bool stale = true;
  };
  Known& known_of(std::uint64_t worker);
  const Usual& usual(double now);
  std::uint64_t version_min() const;
  std::uint64_t ahead() const;
  void end(const DeskLease& lease, bool to_pool);
  void note_overdue(double now);
  std::uint64_t take_group();
  std::uint64_t share_left(const Known& known) const;
  void reject_stale(std::uint64_t version, std::uint64_t groups);

  using Deadline = std::pair<double, std::uint64_t>;
  using Deadlines = std::priority_queue<Deadline, std::vector<Deadline>, std::greater<>>;

  DeskOptions options_;
  replay_buffer::Pacing minded_;  // by what is handed out and waited for; options_.pacing says what may be trained on
  std::uint64_t step_ = 0;
  std::optional<double> step_s_, consumed_at_s_, fresh_s_;
  double stranded_since_s_ = 0, stranded_s_ = 0, look_again_s_ = 0;
  std::unordered_map<std::uint64_t, DeskLease> live_;  // only ever looked up: nobody sees its order
  std::map<std::uint64_t, Known> known_;
  std::map<std::uint64_t, Stock> stock_;  // by version
  std::uint64_t waiting_fresh_ = 0, live_due_ = 0;  // groups
  Deadlines due_, expiry_;
  std::map<std::uint64_t, double> not_waited_for_until_s_;
  std::set<std::uint64_t> pool_;
  std::map<std::uint64_t, std::uint32_t> lost_with_;  // group -> workers that were lost with it
  std::uint64_t next_lease_ = 1, next_group_ = 0, set_aside_ = 0;
  Usual usual_;
  std::map<std::string, std::uint64_t> rejected_, unfinished_;
  std::map<std::uint64_t, std::uint64_t> stale_by_age_;
  replay_buffer::BoundSteps bound_;
};

}  // namespace echoline::sim
