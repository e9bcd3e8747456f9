// How much of each worker waits to be read by the rollout desk, and which workers are read no more. Private to
// learner/.
#pragma once
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "base/ids.hpp"
#include "base/units.hpp"

namespace echoline::learner {

// Thread-safe. It counts messages; the desk's queue holds them.
class DeskInbox {
 public:
  static constexpr std::size_t kMessagesMax = 4096;  // of one worker

  // `message_max`: the longest message that a worker has a reason to send.
  explicit DeskInbox(Bytes message_max);

  struct Admission {
    bool taken = false;
    std::string expel;  // why the sender is to be expelled; empty: it is not
  };
  // A message of a worker came. Counted where it is taken. A worker of which too much waits is to be expelled; not
  // while the desk is held up, which is the learner's fault: then its messages are left out, and take_overflowed()
  // names it.
  Admission admit(WorkerId worker, std::size_t bytes, bool held_up);
  // A message that was taken was read, or dropped.
  void read(WorkerId worker, std::size_t bytes);
  std::set<WorkerId> take_overflowed();

  // What still waits of it is not looked at any more. The first reason stays.
  void bar(WorkerId worker, const std::string& reason);
  bool is_barred(WorkerId worker) const;

  void check() const;  // aborts where its parts disagree

 private:
  struct Waiting {
    std::size_t messages = 0, bytes = 0;
  };
  const std::size_t bytes_max_;  // of one worker
  mutable std::mutex mutex_;     // guards what follows
  std::map<WorkerId, Waiting> waiting_;
  std::map<WorkerId, std::string> barred_;
  std::set<WorkerId> overflowed_;
};

}  // namespace echoline::learner
