// The learner's state and the requests to save it in its state file. No I/O and no clock.
#pragma once
#include "overlay/action.hpp"
#include "overlay/saver.hpp"
#include "overlay/state.hpp"

namespace echoline::overlay {

class LearnerFile {
 public:
  // `durable`: act::SaveState is carried out; otherwise nothing is ever written. `actions` must outlive the file.
  LearnerFile(LearnerState state, bool durable, std::vector<Action>& actions)
      : state_(std::move(state)), durable_(durable), actions_(actions) {}

  const LearnerState& state() const { return state_; }
  LearnerState& state() { return state_; }  // the caller calls save() after a change
  // Whether the epoch and the next issue times are on disk. Until then the learner accepts no connection.
  bool was_saved() const { return saved_; }
  bool is_settled() const { return saver_.is_settled(); }

  // Returns whether the state counts as saved at once. Otherwise a write begins, or follows the one in flight.
  bool save() {
    saved_ |= !durable_;
    if (durable_ && saver_.begin()) actions_.push_back(act::SaveState{encode(state_)});
    return !durable_;
  }
  void on_failed(TimePoint now) { saver_.on_failed(now); }
  // Returns whether the state has changed meanwhile: the caller then calls save() again.
  bool on_succeeded() {
    const bool again = saver_.on_succeeded();
    saved_ |= !again;
    return again;
  }
  bool take_retry(TimePoint now) { return saver_.take_retry(now); }
  void stop() { saver_.stop(); }
  TimePoint next_deadline() const { return saver_.next_deadline(); }

 private:
  LearnerState state_;
  bool durable_;
  bool saved_ = false;
  Saver saver_;
  std::vector<Action>& actions_;
};

}  // namespace echoline::overlay
