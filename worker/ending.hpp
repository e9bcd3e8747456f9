// The end of a worker: why, and how long it may take. Pure. Private to worker/.
#pragma once
#include <string>

#include "base/clock.hpp"
#include "base/state_table.hpp"

namespace echoline::worker {

class Ending {
 public:
  static constexpr Duration kFinishMax = std::chrono::seconds(8);  // for leased work after a stop request

  // A stop request. True the first time: the learner has to be told.
  bool begin_finishing(TimePoint now) {
    if (stage_ != Stage::kWorking) return false;
    move(Stage::kFinishing);
    finish_by_ = now + kFinishMax;
    return true;
  }
  // Whether the time for leased work after the request is over.
  bool is_late(TimePoint now) const { return now >= finish_by_; }
  // The run has ended. The learner's reason replaces any other.
  void on_run_ended(std::string reason) {
    move(Stage::kEnded);
    reason_ = std::move(reason);
  }
  // The node has left. `in_order`: it did not lose its learner.
  void on_disconnected(const std::string& reason, bool in_order) {
    move(Stage::kEnded);
    in_order_ = in_order;
    if (reason_.empty()) reason_ = reason;
  }
  bool has_ended() const { return stage_ == Stage::kEnded; }  // nothing more is sent or received
  const std::string& reason() const { return reason_; }
  bool in_order() const { return in_order_; }
  void check() const {
    ECHO_CHECK(in_order_ || has_ended(), "the learner is lost for good, and the worker works on");
    ECHO_CHECK(finish_by_ != kNever || stage_ != Stage::kFinishing, "no limit on the time to finish");
  }

 private:
  enum class Stage : std::uint8_t { kWorking, kFinishing, kEnded };
  void move(Stage to) {
    constexpr StateRow kNext[] = {{"working", states(Stage::kFinishing, Stage::kEnded)},
                                  {"finishing", states(Stage::kEnded)},
                                  {"at its end", states(Stage::kEnded)}};
    change_state(stage_, to, kNext, "a worker");
  }

  Stage stage_ = Stage::kWorking;
  TimePoint finish_by_ = kNever;
  std::string reason_;
  bool in_order_ = true;
};

}  // namespace echoline::worker
