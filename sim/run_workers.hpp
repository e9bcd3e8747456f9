// The workers of a simulated run: their states, current work, and the queue for work. Private to sim/.
#pragma once
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "provisioner/provider.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::sim {

// A leased group.
struct Work {
  LeaseId lease;
  Version version;
  double granted_s = 0;
  std::uint32_t tokens = 0, longest = 0;
};

// The transfer of the newest publication to one worker.
struct Arrival {
  std::uint64_t version = 0;
  double since_s = 0, left = 0, takes_s = 0;  // `left`: remaining share at since_s; takes_s: duration of the whole
  bool here = true;                           // completely received
  double ends_s() const { return since_s + left * takes_s; }
};

enum class WorkerState : std::uint8_t {
  kBooting,
  kSyncing,  // it has joined and waits for its first policy
  kWorking,
  kDead,  // or hung, or returned
};
std::string_view to_string(WorkerState state);

struct SimWorker {
  provisioner::Ticket ticket = 0;
  std::size_t offer = 0;
  double tokens_per_s = 0, promised = 0;
  double tokens_left = 1, links_left = 1;  // remaining shares while it is slow
  std::uint64_t slowed_by = 0;             // index of the slowdown, from 1; 0: none
  Arrival arrival;
  WorkerState state = WorkerState::kBooting;
  enum class Drain : std::uint8_t { kNo, kAsked, kDone } drain = Drain::kNo;
  std::uint64_t version = 0, delivered = 0;  // newest version installed; newest version received
  std::uint64_t not_before = 0;              // first publication sent to it
  bool of_the_first = false;                 // the first publication was sent to it too
  bool installing = false, install_waits = false, serving = false;
  double ends_s = 0, began_s = 0;  // of the current work
  std::uint32_t turn = 0;          // of kServed events; events of other turns are ignored
  std::deque<Work> queue;          // the first is being generated
  std::size_t tails = 0;           // groups that lack only their longest response
  std::map<LeaseId, Work> handing_in;
  std::uint64_t idle_since = 0;  // place in the queue for work; 0: not queued
  double joined_s = 0, busy_s = 0;
  double received = 0, forwarded = 0;

  bool is(WorkerState s) const { return state == s; }
  bool dead() const { return state == WorkerState::kDead; }
  double rate() const { return promised * tokens_left; }
  // Whether a publication was sent to it.
  bool was_there(std::uint64_t of) const { return of >= not_before || (of == 0 && of_the_first); }
  bool holds_work() const { return !queue.empty() || !handing_in.empty(); }
  // Ends its current work.
  void settle_busy(double now);
};

class RunWorkers {
 public:
  // Adds a booting worker. Returns its index, which is its WorkerId minus 1.
  std::size_t add(SimWorker worker);
  // Changes the state; a state that may not follow is a bug.
  void move(std::size_t w, WorkerState to);
  // Sets the remaining share of its tokens/s.
  void slow(std::size_t w, double tokens);
  // The provider no longer has anything for this ticket.
  void forget(provisioner::Ticket ticket) { by_ticket_.erase(ticket); }
  void wait_for_work(std::size_t w);
  void wait_no_longer(std::size_t w);

  static WorkerId id_of(std::size_t w) { return WorkerId{w + 1}; }
  SimWorker& operator[](std::size_t w) { return workers_[w]; }
  const SimWorker& operator[](std::size_t w) const { return workers_[w]; }
  SimWorker& of(WorkerId id) { return workers_[id.value - 1]; }
  std::optional<std::size_t> of(provisioner::Ticket ticket) const;
  std::size_t size() const { return workers_.size(); }  // including dead ones
  // All workers before this index are dead.
  std::size_t first_alive();
  std::size_t working() const { return working_; }
  double rate() const { return rate_; }  // promised rollouts/s of working ones
  // Workers in the queue for work, longest wait first.
  const std::map<std::uint64_t, std::size_t>& idle() const { return idle_; }
  // Aborts if sums or queue disagree with the workers.
  void check() const;

 private:
  std::vector<SimWorker> workers_;
  std::map<provisioner::Ticket, std::size_t> by_ticket_;
  std::size_t working_ = 0, first_alive_ = 0;
  double rate_ = 0;
  std::map<std::uint64_t, std::size_t> idle_;  // by idle_since
  std::uint64_t idle_places_ = 0;
};

}  // namespace echoline::sim
