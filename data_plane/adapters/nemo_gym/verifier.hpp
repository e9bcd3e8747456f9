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
  bool sessions = true;                          // call /seed_session before /verify
  std::size_t in_flight_max = 16;                // requests
  std::uint32_t tries = 5;                       // requests per response, at most
  Duration deadline = std::chrono::seconds(60);  // time-out of each request
  // Between tries: the pause doubles from the first to the longest.
  Duration pause_first = std::chrono::milliseconds(500), pause_max = std::chrono::seconds(30);
};

// Thread-safe. Retries temporary errors (no connection, timeout, 408, 409, 425, 429, 5xx) from /seed_session on, with
// growing pauses and not before the server's Retry-After.
class Verifier {
 public:
  static constexpr std::size_t kUnansweredMax = 65'536;  // calls of verify()

  // The answer of /verify. kUnavailable: all tries failed; kInvalid: the server refuses the request, with its words;
  // kExhausted: kUnansweredMax calls have no answer yet; kCancelled: the verifier is being destroyed.
  using AnswerHandler = std::function<void(Result<std::string>)>;

  explicit Verifier(VerifierOptions options);
  ~Verifier();
  Verifier(const Verifier&) = delete;
  Verifier& operator=(const Verifier&) = delete;
  // Sends the bodies to /seed_session (if options.sessions), which prepares the server for one response, and then to
  // /verify. `handler` is called once, on the verifier's thread, and must not block.
  void verify(std::string seed_body, std::string verify_body, AnswerHandler handler);

 private:
  struct PendingRequest {
    std::string seed_body, verify_body;
    std::string cookies;  // from the answer of /seed_session; they name the session
    AnswerHandler handler;
    bool has_session = false;  // /seed_session has answered
    std::uint32_t tries = 0;   // that have failed
    TimePoint not_before{};    // after a failed try: the end of the pause
  };
  void run_thread();
  void send(PendingRequest pending);
  void on_answer(HttpAnswer answer);
  // `retry_after`: the pause that the server asks for; zero if it asks for none.
  void retry_or_fail(PendingRequest pending, std::string reason, Duration retry_after);

  const VerifierOptions options_;
  const SystemClock clock_;
  std::mutex mutex_;
  std::condition_variable wake_thread_;
  std::deque<PendingRequest> new_requests_;  // by verify(), for the thread; guarded by mutex_
  std::size_t unanswered_count_ = 0;         // guarded by mutex_
  bool stopping_ = false;                    // guarded by mutex_

  // Used by thread_ only.
  HttpClient http_;
  std::deque<PendingRequest> unsent_;             // to be sent, or to be sent again
  std::map<std::uint64_t, PendingRequest> sent_;  // by the id of the HTTP request
  std::thread thread_;
};

}  // namespace echoline::data_plane::nemo_gym
