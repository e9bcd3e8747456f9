// A worker's state and the requests to save it in its state file: identity, certificate, floor (the last version
// verified for activation), the learner's clock and the newest beacon. No I/O and no clock.
#pragma once
#include "overlay/member/install_state.hpp"
#include "overlay/saver.hpp"
#include "overlay/state.hpp"

namespace echoline::overlay {

class WorkerFile {
 public:
  // `durable`: act::SaveState is carried out; otherwise nothing is ever written. References must outlive the file.
  WorkerFile(WorkerState state, bool durable, const InstallState& install_state, std::vector<Action>& actions)
      : state_(std::move(state)), durable_(durable), install_state_(install_state), actions_(actions) {}

  const WorkerState& state() const { return state_; }
  WorkerState& state() { return state_; }  // the caller calls save() after a change
  bool durable() const { return durable_; }

  // Requests a write, now or after the one in flight. The staged version becomes the floor.
  void save() {
    if (!durable_ || !saver_.begin()) return;
    if (install_state_.staged()) state_.floor = install_state_.staged()->last;
    floor_in_flight_ = state_.floor;
    actions_.push_back(act::SaveState{encode(state_)});
  }
  void on_failed(TimePoint now) { saver_.on_failed(now); }
  // Returns whether the state has changed meanwhile, so that the caller must call save() again.
  bool on_succeeded() {
    floor_on_disk_ = floor_in_flight_;
    return saver_.on_succeeded();
  }
  void retry_if_due(TimePoint now) {
    if (saver_.take_retry(now)) save();
  }
  // Whether this floor is on disk, so that no older version is activated after a restart.
  bool has_on_disk(const Installed& floor) const { return !durable_ || floor_on_disk_ == floor; }
  bool is_saving(const Installed& floor) const { return saver_.is_saving() && floor_in_flight_ == floor; }
  TimePoint next_deadline() const { return saver_.next_deadline(); }
  void check() const { ECHO_CHECK(durable_ || saver_.is_settled(), "a write without a disk"); }

 private:
  WorkerState state_;
  bool durable_;
  const InstallState& install_state_;
  Saver saver_;
  std::optional<Installed> floor_in_flight_, floor_on_disk_;  // of the write in flight, and of the last that succeeded
  std::vector<Action>& actions_;
};

}  // namespace echoline::overlay
