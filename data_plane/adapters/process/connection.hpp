// Keeps a task's program running. Calls wait in a queue and go to the program in batches, one batch at a time. The
// program starts on first use, and again after it ends, hangs or sends an invalid answer. Private to data_plane/.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.hpp"
#include "data_plane/adapters/process/protocol.hpp"
#include "data_plane/sandbox/sandbox.hpp"

namespace echoline::data_plane::process {

struct ConnectionOptions {
  sandbox::Command command;
  std::uint64_t seed = 0;
  std::string settings_json = "{}";
  Duration start_deadline = std::chrono::seconds(30);  // from start to hello
  Duration deadline = std::chrono::seconds(30);        // per request
  std::size_t batch_max = 64;                          // items per request
  std::size_t waiting_max = 65'536;                    // calls
};

// Thread-safe. A call's `done` runs on the connection's thread and must not block.
class Connection {
 public:
  using Done = std::function<void(Result<nlohmann::json>)>;

  // `pool` must outlive it.
  Connection(sandbox::Pool& pool, ConnectionOptions options);
  ~Connection();  // ends the program; waiting calls get kCancelled
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Starts the program if necessary and returns its hello.
  Result<Hello> hello();

  // `done` is called once, with an item of the answer or an error. kExhausted: too many calls wait; kStale: no answer
  // by the deadline; kUnavailable: the program ended or reported an error; kCorrupt: the answer is invalid. A
  // repeatable call is retried once, alone, if its batch failed. `life`: the call is valid only for this start of the
  // program (the number passed to `told_life`), because a restarted program has no memory of earlier ones.
  struct Call {
    Method method = Method::kScore;
    std::string item;  // JSON
    Done done;
    bool repeatable = true;
    std::optional<std::uint64_t> life;
    std::function<void(std::uint64_t)> told_life = {};  // before `done`
    bool alone = false;
  };
  void ask(Call call);
  Result<nlohmann::json> ask_and_wait(Method method, std::string item);
  // Lets the program of that life forget an episode.
  void close(std::uint64_t episode, std::uint64_t life);

 private:
  void work();
  void serve(std::vector<Call> batch);
  Status start();
  void give_up(std::vector<Call> batch, const Error& error, bool all_to_blame);
  void tell_closed();
  Result<std::string> exchange(const std::string& line, Duration deadline);
  void end(const std::string& why);

  sandbox::Pool& pool_;
  const ConnectionOptions options_;
  const SystemClock clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Call> waiting_;                                         // guarded by mutex_
  std::vector<std::pair<std::uint64_t, std::uint64_t>> closed_;      // episode and life; guarded by mutex_
  std::vector<std::function<void(Result<Hello>)>> asked_for_hello_;  // guarded by mutex_
  bool stopping_ = false;                                            // guarded by mutex_

  // Used by the thread only.
  std::optional<sandbox::Process> process_;
  Hello hello_;
  std::uint64_t life_ = 0, next_id_ = 1;
  std::uint32_t failures_ = 0;  // consecutive failed starts
  TimePoint not_before_{};
  Error last_error_;
  std::thread thread_;
};

}  // namespace echoline::data_plane::process
