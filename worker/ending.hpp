// How a worker ends: the reason, and the time for its last work. Pure (no clock, no I/O). Private to worker/.
#pragma once
#include <string>

#include "base/clock.hpp"
#include "base/state_table.hpp"

namespace echoline::worker {

class Ending {
 public:
  static constexpr Duration kFinishMax = std::chrono::seconds(8);  // for leased work after a stop request

  // Called on a stop request. Returns true the first time: the caller then tells the learner.
  bool begin_finishing(TimePoint now) {
    if (stage_ != Stage::kWorking) return false;
    move_to(Stage::kFinishing);
    finish_by_ = now + kFinishMax;
    return true;
  }
  // Whether kFinishMax has passed since the stop request.
  bool is_late(TimePoint now) const { return now >= finish_by_; }
  // The run has ended. The learner's reason replaces any other.
  void on_run_ended(std::string reason) {
    move_to(Stage::kEnded);
    reason_ = std::move(reason);
  }
  // The worker's node has left the overlay. `cleanly`: on purpose, or because the run has ended; false: it lost its
  // learner.
  void on_disconnected(const std::string& reason, bool cleanly) {
    move_to(Stage::kEnded);
    ended_cleanly_ = cleanly;
    if (reason_.empty()) reason_ = reason;
  }
  bool has_ended() const { return stage_ == Stage::kEnded; }  // nothing more is sent or received
  const std::string& reason() const { return reason_; }
  bool ended_cleanly() const { return ended_cleanly_; }
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
  TimePoint finish_by_ = kNever;
  std::string reason_;
  bool ended_cleanly_ = true;
};

}  // namespace echoline::worker
