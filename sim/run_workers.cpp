// State changes of a simulated run's workers, for the events in run_simulation.cpp.
#include "sim/run_workers.hpp"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/result.hpp"

namespace echoline::sim {
namespace {

// States follow in the order of the enumeration, and a worker may die in each.
bool is_allowed(WorkerState from, WorkerState next) {
  return next == WorkerState::kDead ? from != WorkerState::kDead : static_cast<int>(next) == static_cast<int>(from) + 1;
}

}  // namespace

std::string_view to_string(WorkerState state) {
  constexpr std::array<std::string_view, 4> kNames{"booting", "syncing", "working", "dead"};
  return kNames.at(static_cast<std::size_t>(state));
}

void SimWorker::stop_generating(double now_s) {
  if (!generating) return;
  busy_s = busy_seconds(now_s);
  generating = false;
}

std::size_t RunWorkers::add(SimWorker worker) {
  by_ticket_[worker.ticket] = workers_.size();
  workers_.push_back(std::move(worker));
  return workers_.size() - 1;
}

void RunWorkers::set_state(std::size_t worker_index, WorkerState next) {
  SimWorker& worker = workers_[worker_index];
  ECHO_CHECK(is_allowed(worker.state, next), "worker {}: from {} to {}", id_of(worker_index), to_string(worker.state),
             to_string(next));
  if (next == WorkerState::kWorking) {
    ++working_;
    rollouts_per_s_ += worker.rollouts_per_s();
  }
  if (worker.is(WorkerState::kWorking)) {
    --working_;
    rollouts_per_s_ -= worker.rollouts_per_s();
  }
  worker.state = next;
  if (next != WorkerState::kDead) return;
  ++worker.generation_number;  // the event at the end of its work is ignored
  leave_idle_queue(worker_index);
  worker.queue.clear();
  worker.queue.shrink_to_fit();
  worker.awaiting_longest.clear();
}

void RunWorkers::set_token_rate_fraction(std::size_t worker_index, double fraction) {
  SimWorker& worker = workers_[worker_index];
  if (worker.is(WorkerState::kWorking))
    rollouts_per_s_ += worker.promised_rollouts_per_s * (fraction - worker.token_rate_fraction);
  worker.token_rate_fraction = fraction;
}

void RunWorkers::enter_idle_queue(std::size_t worker_index) {
  SimWorker& worker = workers_[worker_index];
  if (worker.idle_queue_place != 0) return;
  worker.idle_queue_place = ++last_idle_queue_place_;
  idle_[worker.idle_queue_place] = worker_index;
}

void RunWorkers::leave_idle_queue(std::size_t worker_index) {
  SimWorker& worker = workers_[worker_index];
  if (worker.idle_queue_place != 0) idle_.erase(std::exchange(worker.idle_queue_place, 0));
}

std::optional<std::size_t> RunWorkers::find(provisioner::Ticket ticket) const {
  const auto it = by_ticket_.find(ticket);
  return it == by_ticket_.end() ? std::nullopt : std::optional(it->second);
}

std::size_t RunWorkers::first_alive() {
  while (first_alive_ < workers_.size() && workers_[first_alive_].is_dead()) ++first_alive_;
  return first_alive_;
}

void RunWorkers::end_drain(std::size_t worker_index) {
  SimWorker& worker = workers_[worker_index];
  if (worker.drain != SimWorker::Drain::kAsked || worker.is_dead() || worker.holds_work()) return;
  worker.drain = SimWorker::Drain::kDone;
  drained_.push_back(id_of(worker_index));
}

std::optional<WorkerId> RunWorkers::next_drained() {
  if (drained_.empty()) return std::nullopt;
  const WorkerId id = drained_.front();
  drained_.pop_front();
  return id;
}

void RunWorkers::check() const {
  std::size_t working = 0, idle = 0;
  double rate = 0;
  for (std::size_t worker_index = 0; worker_index < workers_.size(); ++worker_index) {
    const SimWorker& worker = workers_[worker_index];
    if (worker.is(WorkerState::kWorking)) {
      ++working;
      rate += worker.rollouts_per_s();
    }
    if (worker.idle_queue_place != 0) ++idle;
    ECHO_CHECK(
        worker.idle_queue_place == 0 || (idle_.contains(worker.idle_queue_place) && worker.is(WorkerState::kWorking)),
        "worker {} has an idle place, but is not queued or does not work", id_of(worker_index));
    ECHO_CHECK(worker.is(WorkerState::kWorking) || (!worker.generating && !worker.holds_work()),
               "worker {} is {} but has work", id_of(worker_index), to_string(worker.state));
    ECHO_CHECK(!worker.generating || !worker.queue.empty(), "worker {} generates nothing", id_of(worker_index));
    ECHO_CHECK(worker.drain != SimWorker::Drain::kDone || !worker.holds_work(), "worker {} is drained but has work",
               id_of(worker_index));
    ECHO_CHECK(worker_index >= first_alive_ || worker.is_dead(), "worker {} lives before first_alive_",
               id_of(worker_index));
  }
  ECHO_CHECK(working == working_ && idle == idle_.size(), "counted {} working, found {}; queued {} idle, found {}",
             working_, working, idle_.size(), idle);
  // rollouts_per_s_ is a sum of changes, so rounding errors remain.
  ECHO_CHECK(std::abs(rate - rollouts_per_s_) <= 1e-6 * std::max(1.0, rate), "counted {} rollouts/s, found {}",
             rollouts_per_s_, rate);
}

}  // namespace echoline::sim
