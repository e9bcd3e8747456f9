// How a worker ends: the reason, and how long it may still work after a stop request. Pure (no clock, no I/O). Private
// to worker/.
#pragma once
#include <string>

#include "base/clock.hpp"
#include "base/state_table.hpp"

namespace echoline::worker {

class Ending {
 public:
  static constexpr Duration kFinishMax = std::chrono::seconds(8);  // for leased work after a stop request

  // Called after a stop request, any number of times. The first call returns true, unless the worker has ended. The
  // caller then tells the learner that the worker leaves.
  bool begin_finishing(TimePoint now) {
    if (stage_ != Stage::kWorking) return false;
    move_to(Stage::kFinishing);
    finish_by_ = now + kFinishMax;
    return true;
  }
  // Whether kFinishMax has passed since the stop request.
  bool finish_time_is_over(TimePoint now) const { return now >= finish_by_; }
  // The run has ended. `reason` comes from the learner. It takes precedence over that of on_disconnected(), which only
  // knows of the lost connection.
  void on_run_ended(std::string reason) {
    move_to(Stage::kEnded);
    reason_ = std::move(reason);
  }
  // The worker's node has left the overlay. `cleanly`: the node left on purpose, or because the run ended; false: the
  // node lost its learner.
  void on_disconnected(const std::string& reason, bool cleanly) {
    move_to(Stage::kEnded);
    ended_cleanly_ = cleanly;
    if (reason_.empty()) reason_ = reason;  // else the learner has given its reason
  }
  // Whether the connection to the learner is over: nothing more is sent or received.
  bool has_ended() const { return stage_ == Stage::kEnded; }
  const std::string& reason() const { return reason_; }
  bool ended_cleanly() const { return ended_cleanly_; }  // false only after the node has lost its learner
  // Ends the process if the state contradicts itself. The texts name the contradictions.
  void check() const {
    ECHO_CHECK(ended_cleanly_ || has_ended(), "the learner is lost for good, and the worker works on");
    ECHO_CHECK(finish_by_ != kNever || stage_ != Stage::kFinishing, "no limit on the time to finish");
  }

 private:
  enum class Stage : std::uint8_t { kWorking, kFinishing, kEnded };
  void move_to(Stage next) {
    constexpr StateRow kNext[] = {{"working", states(Stage::kFinishing, Stage::kEnded)},
                                  {"finishing", states(Stage::kEnded)},
                                  {"at its end", states(Stage::kEnded)}};
    change_state(stage_, next, kNext, "a worker");
  }

  Stage stage_ = Stage::kWorking;
  TimePoint finish_by_ = kNever;  // kNever: there was no stop request
  std::string reason_;
  bool ended_cleanly_ = true;
};

}  // namespace echoline::worker
