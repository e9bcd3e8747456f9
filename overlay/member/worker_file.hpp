// A worker's state file: its identity and certificate, its floor, and what it knows of the learner's clock and beacons.
// Pure.
#pragma once
#include "overlay/member/standing.hpp"
#include "overlay/saver.hpp"
#include "overlay/state.hpp"

namespace echoline::overlay {

class WorkerFile {
 public:
  // `durable`: act::SaveState is carried out; otherwise nothing is ever written. References must outlive the file.
  WorkerFile(WorkerState state, bool durable, const Standing& standing, std::vector<Action>& actions)
      : state_(std::move(state)), durable_(durable), standing_(standing), actions_(actions) {}

  const WorkerState& state() const { return state_; }
  WorkerState& state() { return state_; }  // save() follows
  bool durable() const { return durable_; }

  // Writes it now, or after the write in flight. The version that is staged becomes the floor.
  void save() {
    if (!durable_ || !saver_.begin()) return;
    if (standing_.staged()) state_.floor = standing_.staged()->last;
    floor_saving_ = state_.floor;
    actions_.push_back(act::SaveState{encode(state_)});
  }
  void failed(TimePoint now) { saver_.failed(now); }
  // Returns whether it has changed meanwhile, so that save() follows.
  bool succeeded() {
    floor_on_disk_ = floor_saving_;
    return saver_.succeeded();
  }
  void retry_if_due(TimePoint now) {
    if (saver_.take_retry(now)) save();
  }
  // Whether a version that has become the floor may be activated: nothing older comes back after a restart.
  bool protects(const Installed& floor) const { return !durable_ || floor_on_disk_ == floor; }
  bool is_saving(const Installed& floor) const { return saver_.saving() && floor_saving_ == floor; }
  TimePoint next_deadline() const { return saver_.next_deadline(); }
  void check() const { ECHO_CHECK(durable_ || saver_.settled(), "a write without a disk"); }

 private:
  WorkerState state_;
  bool durable_;
  const Standing& standing_;
  Saver saver_;
  std::optional<Installed> floor_saving_, floor_on_disk_;  // in the write in flight, and in the last that succeeded
  std::vector<Action>& actions_;
};

}  // namespace echoline::overlay
