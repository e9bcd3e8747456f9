// Sends requests to a resources server of NeMo Gym, many at a time and with retries, on its own thread. Private to
// data_plane/.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "base/http.hpp"

namespace echoline::data_plane::nemo_gym {

struct VerifierOptions {
  std::string url;
  bool sessions = true;  // call /seed_session before /verify
  std::size_t at_once = 16;
  std::uint32_t tries = 5;
  Duration deadline = std::chrono::seconds(60);  // per request
  Duration pause_first = std::chrono::milliseconds(500), pause_max = std::chrono::seconds(30);
};

// Thread-safe. Retries temporary errors (no connection, timeout, 408, 409, 425, 429, 5xx) from /seed_session on, with
// growing pauses and not before the server's Retry-After.
class Verifier {
 public:
  static constexpr std::size_t kInFlightMax = 65'536;

  // The answer of /verify. kUnavailable: all tries failed; kInvalid: the server refuses the request, with its words;
  // kExhausted: kInFlightMax requests are in flight; kCancelled: the verifier is being destroyed.
  using Done = std::function<void(Result<std::string>)>;

  explicit Verifier(VerifierOptions options);
  ~Verifier();
  Verifier(const Verifier&) = delete;
  Verifier& operator=(const Verifier&) = delete;
  // `done` is called once, on the verifier's thread, and must not block.
  void ask(std::string seed_body, std::string verify_body, Done done);

 private:
  struct PendingRequest {
    std::string seed_body, verify_body, cookies;
    Done done;
    bool seeded = false;
    std::uint32_t tries = 0;
    TimePoint not_before{};
  };
  void run_thread();
  void send(PendingRequest pending);
  void on_answer(HttpAnswer answer);
  void retry_or_fail(PendingRequest pending, std::string why, Duration at_least);

  const VerifierOptions options_;
  const SystemClock clock_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<PendingRequest> added_;  // guarded by mutex_
  std::size_t in_flight_ = 0;         // guarded by mutex_
  bool stopping_ = false;             // guarded by mutex_

  // Used by the thread only.
  HttpClient http_;
  std::deque<PendingRequest> waiting_;
  std::map<std::uint64_t, PendingRequest> sent_;  // by request id
  std::thread thread_;
};

}  // namespace echoline::data_plane::nemo_gym
