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
  Duration start_deadline = std::chrono::seconds(30);  // time-out from the start to the hello
  Duration deadline = std::chrono::seconds(30);        // time-out of each request
  std::size_t batch_max = 64;                          // items per request, at most
  std::size_t waiting_max = 65'536;                    // calls in the queue, at most
};

// Thread-safe. A call's `on_answer` runs on the connection's thread and must not block.
class Connection {
 public:
  using AnswerHandler = std::function<void(Result<nlohmann::json>)>;

  // `pool` must outlive it.
  Connection(sandbox::Pool& pool, ConnectionOptions options);
  ~Connection();  // ends the program; waiting calls get kCancelled
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Starts the program if necessary and returns its hello. Blocks.
  Result<Hello> hello();

  // `on_answer` is called once, with an item of the answer or an error. kExhausted: too many calls wait; kStale: no
  // answer by the deadline; kUnavailable: the program ended or reported an error; kCorrupt: the answer is invalid.
  struct Call {
    Method method = Method::kScore;
    std::string item;  // JSON
    AnswerHandler on_answer;
    bool repeatable = true;  // if its batch fails, it is retried once, as a batch of its own
    // If set, the call fails if the program was started again since, because it has then lost its episodes. The first
    // start has number 1.
    std::optional<std::uint64_t> start_number;
    // Called before `on_answer` if the program answers the batch, with the program's start number.
    std::function<void(std::uint64_t)> on_start_number = {};
    bool send_alone = false;  // the call is a batch of its own
  };
  void ask(Call call);
  // Returns what ask() would give to `on_answer`.
  Result<nlohmann::json> ask_and_wait(Method method, std::string item);
  // Tells the program before its next batch that the episode is over, if it still has this start number; a program
  // started later never had the episode. Drops the notice if too many are kept; the program then holds the episode
  // until the program ends.
  void close(std::uint64_t episode, std::uint64_t start_number);

 private:
  void run_thread();
  void send_batch(std::vector<Call> batch);
  Status ensure_started();
  void retry_or_fail(std::vector<Call> batch, const Error& error, bool fail_all);
  void send_close_notice();
  Result<std::string> send_and_read_line(const std::string& line, Duration deadline);
  void on_program_failure(const std::string& reason);

  sandbox::Pool& pool_;
  const ConnectionOptions options_;
  const SystemClock clock_;
  std::mutex mutex_;
  std::condition_variable wake_thread_;
  std::deque<Call> waiting_calls_;  // guarded by mutex_
  // Episodes for the next close notice, each with its start number; guarded by mutex_.
  std::vector<std::pair<std::uint64_t, std::uint64_t>> closed_episodes_;
  std::vector<std::function<void(Result<Hello>)>> hello_callbacks_;  // guarded by mutex_
  bool stopping_ = false;                                            // guarded by mutex_

  // Used by thread_ only.
  std::optional<sandbox::Process> process_;
  Hello hello_;
  std::uint64_t start_number_ = 0;       // how often the program was started
  std::uint64_t next_id_ = 1;            // id of the next request
  std::uint32_t failures_in_a_row_ = 0;  // of starts and batches
  TimePoint next_start_at_{};            // the program is not started before
  Error last_error_;                     // empty after a batch that succeeded
  std::thread thread_;                   // last, because it uses the members above as soon as it is constructed
};

}  // namespace echoline::data_plane::process
