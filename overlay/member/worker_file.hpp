// A worker's state file: its identity and certificate, its floor, and what is known of the learner's clock and beacons.
// Pure.
#pragma once
#include <optional>
#include <vector>

#include "overlay/action.hpp"
#include "overlay/saver.hpp"
#include "overlay/state.hpp"

namespace echoline::overlay {

class WorkerFile {
 public:
  // `durable`: act::SaveState is carried out; otherwise nothing is ever written. `actions` must outlive the file.
  WorkerFile(WorkerState state, bool durable, std::vector<Action>& actions)
      : state_(std::move(state)), durable_(durable), actions_(actions) {}

  const WorkerState& state() const { return state_; }
  WorkerState& state() { return state_; }  // save() follows
  bool durable() const { return durable_; }

  // Writes it now, or after the write in flight. `staged`: the floor from now on, if there is one.
  void save(const std::optional<Installed>& staged) {
    if (!saver_.begin()) return;
    if (staged) state_.floor = staged;
    floor_saving_ = state_.floor;
    actions_.push_back(act::SaveState{encode(state_)});
  }
  void failed(TimePoint now) { saver_.failed(now); }
  // Returns whether it has changed meanwhile, so that save() is to be called again.
  bool succeeded() {
    floor_on_disk_ = floor_saving_;
    return saver_.succeeded();
  }
  // Whether a version that has become the floor may be activated: nothing older comes back after a restart.
  bool protects(const Installed& floor) const { return !durable_ || floor_on_disk_ == floor; }
  bool is_saving(const Installed& floor) const { return saver_.saving() && floor_saving_ == floor; }
  bool take_retry(TimePoint now) { return saver_.take_retry(now); }
  TimePoint next_deadline() const { return saver_.next_deadline(); }

 private:
  WorkerState state_;
  bool durable_;
  Saver saver_;
  std::optional<Installed> floor_saving_, floor_on_disk_;  // in the write in flight, and in the last that succeeded
  std::vector<Action>& actions_;
};

}  // namespace echoline::overlay
