// A program that is a task, kept running: calls wait in a queue and go to it in batches, one at a time. It is started
// when first needed, and anew when it ends, hangs or talks nonsense. Private to data_plane/.
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
  Duration start_deadline = std::chrono::seconds(30);  // from its start to its hello
  Duration deadline = std::chrono::seconds(30);        // of a request
  std::size_t batch_max = 64;                          // items of a request
  std::size_t waiting_max = 65'536;                    // calls
};

// Thread-safe. What a call's `done` does must not block: it runs on the connection's thread.
class Connection {
 public:
  using Done = std::function<void(Result<nlohmann::json>)>;

  // The pool must outlive it.
  Connection(sandbox::Pool& pool, ConnectionOptions options);
  ~Connection();  // ends the program; calls that wait get kCancelled
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // What the program says of itself; it is started for that.
  Result<Hello> hello();

  // `done` is called once: with an item of the answer, or with why there is none. kExhausted: too many wait; kStale: no
  // answer came by the deadline; kUnavailable: the program ended, or says that it cannot; kCorrupt: it talks nonsense.
  // A call that may be repeated is tried once more, alone, where its batch came to nothing. `life`: the start of the
  // program that it needs, as told by `told_life`; another one knows nothing of it.
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
  // It need not be remembered any more, in that life.
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

  // The thread's own.
  std::optional<sandbox::Process> process_;
  Hello hello_;
  std::uint64_t life_ = 0, next_id_ = 1;
  std::uint32_t failures_ = 0;  // starts in a row that came to nothing
  TimePoint not_before_{};
  Error last_error_;
  std::thread thread_;
};

}  // namespace echoline::data_plane::process
