// Makes API calls idempotent: a call that a client repeats because its answer was lost is executed once and gets the
// same answer. Private to learner/external/.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/result.hpp"

namespace echoline::learner {

// Thread-safe. Remembers the results of the newest calls, by the client's request id.
class RecentCalls {
 public:
  static constexpr std::size_t kIdBytesMax = 64;
  explicit RecentCalls(std::size_t results_max) : results_max_(results_max) {}

  // One call in progress. If it ends without finish(), it has changed nothing, and a repetition is executed.
  class Turn {
   public:
    Turn(Turn&& other) noexcept
        : calls_(std::exchange(other.calls_, nullptr)),
          id_(std::move(other.id_)),
          earlier_result_(std::move(other.earlier_result_)) {}
    ~Turn();
    // The result of the call that this one repeats; absent: execute the call.
    const std::optional<std::string>& earlier_result() const { return earlier_result_; }
    // The call was executed. Remembers its result.
    void finish(std::string result);

   private:
    friend class RecentCalls;
    Turn(RecentCalls* calls, std::string id, std::optional<std::string> earlier_result)
        : calls_(calls), id_(std::move(id)), earlier_result_(std::move(earlier_result)) {}
    RecentCalls* calls_;  // null: a call without an id, or moved from
    std::string id_;
    std::optional<std::string> earlier_result_;
  };

  // Waits while another thread executes the same call. `description` tells calls apart. Without an id, every call is
  // new. kInvalid: the id is too long, or belongs to a different call.
  Result<Turn> begin(const std::string& id, const std::string& description);

 private:
  struct Call {
    std::string description;
    std::optional<std::string> result = {};
  };
  const std::size_t results_max_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::map<std::string, Call> calls_;     // by id; guarded by mutex_
  std::deque<std::string> finished_ids_;  // of calls with results, oldest first; guarded by mutex_
};

}  // namespace echoline::learner
