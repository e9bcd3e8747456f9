// Limits the unread messages of each worker at the RolloutDesk, and keeps the workers whose messages are ignored.
// Private to learner/.
#pragma once
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "base/ids.hpp"
#include "base/units.hpp"

namespace echoline::learner {

// Thread-safe. Counts messages; the desk's queue holds them.
class DeskInbox {
 public:
  static constexpr std::size_t kMessagesMax = 4096;  // of one worker

  // `message_max`: the longest message that a worker has a reason to send.
  explicit DeskInbox(Bytes message_max);

  struct Admission {
    bool is_accepted = false;
    std::string expel_reason;  // empty: the sender need not be expelled
  };
  // Counts an arrived message if it is accepted. A worker with too many unread messages must be expelled. But while the
  // database is stalled, they are unread by the learner's fault. Then the message is dropped, and take_overflowed()
  // names the worker.
  Admission admit(WorkerId worker, std::size_t bytes, bool database_stalled);
  // An accepted message was read or dropped: it no longer counts.
  void release(WorkerId worker, std::size_t bytes);
  // Returns the workers whose messages were dropped since the last call.
  std::set<WorkerId> take_overflowed();

  // From now on the desk ignores the worker's messages, waiting ones included. The first reason stays.
  void block(WorkerId worker, const std::string& reason);
  bool is_blocked(WorkerId worker) const;

  void check() const;  // aborts if its parts disagree

 private:
  struct Waiting {
    std::size_t messages = 0, bytes = 0;
  };
  const std::size_t bytes_max_;              // of one worker
  mutable std::mutex mutex_;                 // guards the members below
  std::map<WorkerId, Waiting> waiting_;      // unread messages; no empty entries
  std::map<WorkerId, std::string> blocked_;  // with the reason
  std::set<WorkerId> overflowed_;            // see take_overflowed()
};

}  // namespace echoline::learner
