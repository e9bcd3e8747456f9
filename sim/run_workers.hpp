// The workers of a simulated run: their states, current work, and the queue for work. Private to sim/.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "provisioner/provider.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::sim {

// A leased group of rollouts.
struct Work {
  LeaseId lease;
  Version version;
  double granted_s = 0;
  std::uint32_t tokens = 0, longest = 0;  // tokens of all its responses; of the longest one
};

// The transfer of the newest publication to one worker.
struct Arrival {
  std::uint64_t version = 0;
  double since_s = 0, remaining_share = 0;  // the share of the payload that is missing at since_s
  double transfer_s = 0;                    // duration of the whole transfer
  bool complete = true;                     // nothing is in transfer
  double ends_s() const { return since_s + remaining_share * transfer_s; }
};

enum class WorkerState : std::uint8_t {
  kBooting,
  kSyncing,  // it has joined and waits for its first policy
  kWorking,
  kDead,  // crashed, hung or returned to the provider
};
std::string_view to_string(WorkerState state);

struct SimWorker {
  provisioner::Ticket ticket = 0;
  std::size_t offer = 0;
  double tokens_per_s = 0;  // true speed
  double promised_rollouts_per_s = 0;
  double token_rate_fraction = 1, link_rate_fraction = 1;  // of its own rates; less than 1 while it is slow
  std::uint64_t slowed_by = 0;                             // index of the slowdown, from 1; 0: none
  Arrival arrival;
  WorkerState state = WorkerState::kBooting;
  // kAsked: takes no new work. kDone: holds no work any more.
  enum class Drain : std::uint8_t { kNo, kAsked, kDone } drain = Drain::kNo;
  std::uint64_t version = 0, delivered = 0;  // newest version installed; newest version received
  // Publications from this version on were sent to it. Grows while it is kSyncing, because it then gets publications
  // only after its first policy.
  std::uint64_t sent_from_version = 0;
  bool was_sent_version_0 = false;  // version 0 was its first policy, sent by the learner to all workers
  bool installing = false, install_is_pending = false;  // pending: it starts once the queue is empty
  bool generating = false;
  double generation_ends_s = 0, generation_began_s = 0;  // of the current work
  std::uint32_t generation_number = 0;  // number of the last kGenerated event; earlier ones that still come are ignored
  std::deque<Work> queue;               // the first is being generated
  std::map<LeaseId, Work> awaiting_longest;              // groups that lack only their longest response
  std::uint64_t idle_queue_place = 0;                    // place in the queue for work; 0: not queued
  double joined_s = 0, busy_s = 0, reported_busy_s = 0;  // reported_busy_s: the part that the learner knows
  double received_bytes = 0, forwarded_bytes = 0;        // of policies

  bool is(WorkerState expected) const { return state == expected; }
  bool is_dead() const { return state == WorkerState::kDead; }
  double rollouts_per_s() const { return promised_rollouts_per_s * token_rate_fraction; }  // at its present speed
  bool was_sent(std::uint64_t publication) const {
    return publication >= sent_from_version || (publication == 0 && was_sent_version_0);
  }
  bool holds_work() const { return !queue.empty() || !awaiting_longest.empty(); }
  // Seconds of generating until now.
  double busy_seconds(double now_s) const {
    return busy_s + (generating ? std::max(0.0, std::min(now_s, generation_ends_s) - generation_began_s) : 0);
  }
  // Ends the current generation and adds its time to busy_s.
  void stop_generating(double now_s);
};

// The workers of a simulated run, numbered from 0: worker_index is a worker's id minus one.
class RunWorkers {
 public:
  // Adds a booting worker. Returns its index.
  std::size_t add(SimWorker worker);
  // Aborts if the state may not follow the current one.
  void set_state(std::size_t worker_index, WorkerState next);
  void set_token_rate_fraction(std::size_t worker_index, double fraction);
  // Drops the ticket of a machine that has ended; find() no longer returns its worker.
  void forget(provisioner::Ticket ticket) { by_ticket_.erase(ticket); }
  void enter_idle_queue(std::size_t worker_index);
  void leave_idle_queue(std::size_t worker_index);
  // Ends the drain of a worker that was asked to drain, if it holds no work: next_drained() will return it.
  void end_drain(std::size_t worker_index);
  std::optional<WorkerId> next_drained();  // each once, in order

  static WorkerId id_of(std::size_t worker_index) { return WorkerId{worker_index + 1}; }
  SimWorker& operator[](std::size_t worker_index) { return workers_[worker_index]; }
  const SimWorker& operator[](std::size_t worker_index) const { return workers_[worker_index]; }
  SimWorker& by_id(WorkerId id) { return workers_[id.value - 1]; }
  std::optional<std::size_t> find(provisioner::Ticket ticket) const;  // by the ticket with which its machine was rented
  std::size_t size() const { return workers_.size(); }                // including dead ones
  // Index of the first worker that is not dead.
  std::size_t first_alive();
  std::size_t working() const { return working_; }
  double rollouts_per_s() const { return rollouts_per_s_; }  // of the working ones together, as promised
  // Workers in the queue for work, longest wait first.
  const std::map<std::uint64_t, std::size_t>& idle() const { return idle_; }
  // Aborts if sums or queue disagree with the workers.
  void check() const;

 private:
  std::vector<SimWorker> workers_;
  std::map<provisioner::Ticket, std::size_t> by_ticket_;
  std::size_t working_ = 0, first_alive_ = 0;
  double rollouts_per_s_ = 0;
  std::map<std::uint64_t, std::size_t> idle_;  // by idle_queue_place
  std::uint64_t last_idle_queue_place_ = 0;
  std::deque<WorkerId> drained_;
};

}  // namespace echoline::sim
