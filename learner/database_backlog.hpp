// Tracks whether the replay buffer's database can store now, and keeps the backlog: work that waits until it can.
// Private to learner/.
#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "learner/disk_patience.hpp"
#include "learner/lease_clock.hpp"

namespace echoline::learner {

// A message of a worker, not parsed yet.
struct Incoming {
  WorkerId worker;
  std::string bytes;
  bool skips_rate_check = false;  // the worker's message rate was checked already, or the message came during a stall
};
// A change of the database that is repeated until the database stores it.
struct DatabaseWrite {
  std::function<Status()> work;
};
using Deferred = std::variant<Incoming, DatabaseWrite>;

// Used by the thread of RolloutDesk (rollout_desk.hpp), which leases work and takes results; state() and can_store()
// may be called from any thread.
class DatabaseBacklog {
 public:
  enum class State : std::uint8_t {
    kStoring,
    kStalled,     // an attempt failed: the backlog waits for a retry that succeeds
    kCatchingUp,  // it stores again, and the backlog of the stall is not empty yet
    kGivenUp,     // final: the file is damaged, or failed for longer than the patience
  };

  // `report` may be empty. It gets the error when the database stops storing, and null when it stores again and the
  // backlog is empty. `clock` must outlive the object.
  DatabaseBacklog(const LeaseClock& clock, Duration retry_every, Duration patience,
                  std::function<void(const Error*)> report);

  State state() const { return state_; }
  bool can_store() const;
  // The error of a database that is given up; ok before.
  const Status& status() const { return status_; }

  // Returns whether the error is the database's. If so, nothing is stored until on_retry_succeeded(), and the caller
  // must put its work into the backlog.
  bool stall_if_database_error(const Error& error);
  // Calls stall_if_database_error() with the error of `status`, if any. Returns `status`.
  Status stall_on_error(Status status);
  bool is_retry_due() const;
  void on_retry_succeeded();
  // The database counts as storing again if the backlog of the stall is empty.
  void finish_catching_up();

  // The backlog, in the order of arrival.
  void push_back(Deferred work);
  void push_front(Incoming message) { backlog_.emplace_front(std::move(message)); }
  std::size_t backlog_size() const { return backlog_.size(); }
  // Handles the backlog until the database cannot store. `handle` gets up to `messages_max` messages at a time, and
  // pushes those that must wait to the front.
  void process_backlog(std::size_t messages_max, const std::function<void(std::vector<Incoming>)>& handle);

  void check() const;  // aborts if its parts disagree

 private:
  void move_to(State next);  // aborts if `next` cannot follow the current state

  const LeaseClock& clock_;
  const Duration retry_every_;
  const std::function<void(const Error*)> report_;
  std::atomic<State> state_ = State::kStoring;
  DiskPatience patience_;
  TimePoint retry_at_ = kNever;  // kNever while the database can store
  Status status_;                // an error once the database is given up
  std::deque<Deferred> backlog_;
};

}  // namespace echoline::learner
