// An HTTP server in which a slow client delays no other client. Every connection has its own thread, and every request
// and answer has a time limit. Private to learner/external/.
#pragma once
#include <httplib.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "base/clock.hpp"
#include "base/units.hpp"
#include "overlay/slice.hpp"

namespace echoline::learner {

struct HttpLimits {
  std::size_t connections_max = 64;
  Duration idle_max = std::chrono::minutes(10);  // of a connection, between an answer and the next request
  // A request, header and body together, must arrive within transfer_time_base and one second more for every
  // bytes_per_s_min bytes received so far. The same holds for sending an answer.
  Duration transfer_time_base = std::chrono::seconds(60);
  double bytes_per_s_min = 10e6;
  // Bytes of all requests that are still arriving; the first MiB of each does not count.
  Bytes receiving_max{1ull << 40};
};

class HttpServer final : public httplib::Server {
 public:
  explicit HttpServer(const HttpLimits& limits);

  // The status and text for this thread's request, if it broke a limit before it was complete. The connection ends
  // after the answer.
  struct RequestFailure {
    // 503: too many requests are arriving; 507: the disk has no space for it; 408: it arrived too slowly or
    // incompletely
    int status;
    std::string message;
    const char* code() const { return status == 503 ? "busy" : status == 507 ? "exhausted" : "slow"; }  // for programs
  };
  static std::optional<RequestFailure> request_failure();
  // Reads a body of up to `bytes_max`; a large one into a file below `folder` (arriving_body.hpp). Absent: it did not
  // arrive, and the error handler gives the reason.
  static std::optional<overlay::Slice> read_body(const httplib::Request& request, httplib::Response& response,
                                                 const httplib::ContentReader& read, Bytes bytes_max,
                                                 const std::filesystem::path& folder);
  // Ends the connection after the answer; the rest of this thread's request is not read.
  static void close_after_answer(httplib::Response& response);

  // Listens at the port, or at any free one if it is 0. Returns the port; absent if that fails.
  std::optional<int> bind(const std::string& host, int port);
  // Serves on a thread of its own until stop(). Returns once stop() has an effect. Call after binding.
  std::thread start();

  // Ends idle connections and arriving requests now. Answers in transfer get one second. Call before stop().
  void end_connections();

 private:
  class Connection;
  bool process_and_close_socket(socket_t socket) override;

  const HttpLimits limits_;
  const SystemClock clock_;
  std::atomic<TimePoint> end_by_ = kNever;    // deadline of answers; kNever: the server goes on
  std::atomic<bool> has_ended_ = false;       // the thread of start()
  std::atomic<std::uint64_t> receiving_ = 0;  // bytes, as receiving_max counts them
  std::mutex mutex_;
  std::set<socket_t> open_sockets_;                    // guarded by mutex_
  static thread_local Connection* thread_connection_;  // the connection of this thread
};

}  // namespace echoline::learner
