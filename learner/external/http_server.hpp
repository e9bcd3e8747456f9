// An HTTP server in which a slow client delays no other client: every connection has a thread of its own, and every
// request and answer a time limit as a whole. Private to learner/external/.
#pragma once
#include <httplib.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "base/clock.hpp"
#include "base/units.hpp"

namespace echoline::learner {

struct HttpLimits {
  std::size_t connections_max = 64;
  Duration idle_max = std::chrono::minutes(10);  // of a connection, between an answer and the next request
  // A request, header and body together, arrives within stall_max and one second more for every bytes_per_s_min
  // received so far. The same holds for an answer.
  Duration stall_max = std::chrono::seconds(60);
  double bytes_per_s_min = 10e6;
  Bytes receiving_max{
      1ull << 40};  // requests that are still arriving, of all connections together; the first MiB of each is free
};

class HttpServer final : public httplib::Server {
 public:
  explicit HttpServer(const HttpLimits& limits);

  // The code and the text for a client whose request, the one this thread handles, broke a limit before it was
  // complete. The connection ends after the answer.
  struct Broken {
    int status;
    std::string message;
  };
  static std::optional<Broken> broken();
  // The rest of the request that this thread handles is not read: the connection ends after the answer.
  static void close_after_answer(httplib::Response& response);

  // Call after binding: httplib's own backlog has room for 5 connections that are not accepted yet.
  void widen_backlog();

  // Idle connections and requests that are still arriving end now. Answers on their way get a second. Call before
  // stop().
  void end_connections();

 private:
  class Connection;
  bool process_and_close_socket(socket_t socket) override;

  const HttpLimits limits_;
  const SystemClock clock_;
  std::atomic<TimePoint> end_by_ = kNever;    // answers; kNever: the server goes on
  std::atomic<std::uint64_t> receiving_ = 0;  // bytes, as receiving_max counts them
  std::mutex mutex_;
  std::set<socket_t> open_;               // guarded by mutex_
  static thread_local Connection* here_;  // whose request this thread handles
};

}  // namespace echoline::learner
