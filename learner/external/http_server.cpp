// The connections of the trainer API. TrainerServer uses it as an httplib server.
#include "learner/external/http_server.hpp"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "learner/external/arriving_body.hpp"

namespace echoline::learner {
namespace {

// Bytes of each request that do not count towards receiving_max, so that small requests are accepted while large ones
// fill it.
constexpr std::uint64_t kUncountedBytes = 1 << 20;
constexpr std::size_t kBufferBytes = 64 << 10;
constexpr std::int64_t kPollMsMax = 1'000'000;  // fits into an int; a longer wait calls poll() again
constexpr int kStatusTimeout = 408, kStatusBusy = 503, kStatusNoSpace = 507;
// A sending thread checks this often whether the server ends.
constexpr Duration kEndPollInterval = std::chrono::milliseconds(200);
constexpr Duration kLastAnswerTimeout = std::chrono::seconds(1);
// Time for which a connection that ends early still reads, because a reset would destroy the answer to a client that is
// still sending.
constexpr Duration kLinger = std::chrono::seconds(2);

// One thread per connection. HttpServer bounds their number.
class ThreadPerConnection final : public httplib::TaskQueue {
 public:
  void enqueue(std::function<void()> task) override {
    {
      const std::lock_guard lock(mutex_);
      ++running_;
    }
    auto run = [this, task = std::move(task)] {
      task();
      const std::lock_guard lock(mutex_);
      --running_;
      ended_.notify_all();
    };
    try {
      std::thread(run).detach();
    } catch (const std::system_error&) {
      run();  // no thread left: the accepting thread serves the connection itself
    }
  }
  void shutdown() override {
    std::unique_lock lock(mutex_);
    ended_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::size_t running_ = 0;  // guarded by mutex_
};

}  // namespace

class HttpServer::Connection final : public httplib::Stream {
 public:
  Connection(HttpServer& server, socket_t socket) : server_(server), socket_(socket) {}
  ~Connection() override {
    received_bytes_ = 0;
    update_counted_bytes();
  }

  // Returns false if the client closed the connection or was idle for too long, or if the server ends.
  bool wait_for_request() {
    received_bytes_ = 0;
    update_counted_bytes();
    // The buffer may already hold the next request, if the client did not wait for the answer.
    if (begin_ == end_ && !wait_ready(POLLIN, server_.clock_.now() + server_.limits_.idle_max)) return false;
    is_answering_ = false;
    began_at_ = server_.clock_.now();
    return server_.end_by_.load() == kNever;
  }

  // Returns the number of bytes read, 0 at the end of the connection, or -1 on failure.
  ssize_t read(char* to, std::size_t size) override {
    if (begin_ == end_) {
      const TimePoint give_up_at = deadline(received_bytes_);
      if (!wait_ready(POLLIN, give_up_at)) {
        if (server_.clock_.now() >= give_up_at)
          request_failure_ = {
              kStatusTimeout,
              fmt::format("the request was not complete after {}; the limit is {} plus a second for "
                          "every {:.0f} bytes: send it again",
                          to_text(server_.clock_.now() - began_at_), to_text(server_.limits_.transfer_time_base),
                          server_.limits_.bytes_per_s_min)};
        return -1;
      }
      const ssize_t bytes_received = ::recv(socket_, buffer_->data(), buffer_->size(), MSG_DONTWAIT);
      if (bytes_received <= 0) {
        request_failure_ = {kStatusTimeout, "the connection ended before the request was complete; send it again"};
        return bytes_received;
      }
      begin_ = 0;
      end_ = static_cast<std::size_t>(bytes_received);
      received_bytes_ += end_;
      if (update_counted_bytes() > server_.limits_.receiving_max.count) {
        request_failure_ = {kStatusBusy,
                            fmt::format("requests of more than {} are arriving at once; send it again later",
                                        to_text(server_.limits_.receiving_max))};
        return -1;
      }
    }
    const std::size_t bytes_copied = std::min(size, end_ - begin_);
    std::memcpy(to, buffer_->data() + begin_, bytes_copied);
    begin_ += bytes_copied;
    return static_cast<ssize_t>(bytes_copied);
  }

  // Writes all bytes; -1 on failure.
  ssize_t write(const char* from, std::size_t size) override {
    if (!std::exchange(is_answering_, true)) {
      began_at_ = server_.clock_.now();
      sent_bytes_ = 0;
    }
    for (std::size_t bytes_done = 0; bytes_done < size;) {
      if (!is_writable()) return -1;
      const ssize_t bytes_sent = ::send(socket_, from + bytes_done, size - bytes_done, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (bytes_sent < 0 && (errno == EAGAIN || errno == EINTR)) continue;
      if (bytes_sent <= 0) return -1;
      bytes_done += static_cast<std::size_t>(bytes_sent);
      sent_bytes_ += static_cast<std::uint64_t>(bytes_sent);
    }
    return static_cast<ssize_t>(size);
  }

  bool is_readable() const override { return begin_ < end_ || wait_ready(POLLIN, server_.clock_.now()); }
  // Waits until the socket takes more bytes. False if the answer's deadline or the server's end comes first.
  bool is_writable() const override {
    for (;;) {
      const TimePoint give_up_at = std::min(deadline(sent_bytes_), server_.end_by_.load());
      if (wait_ready(POLLOUT, std::min(give_up_at, server_.clock_.now() + kEndPollInterval))) return true;
      if (server_.clock_.now() >= give_up_at) return false;
    }
  }
  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  socket_t socket() const override { return socket_; }

  const std::optional<RequestFailure>& request_failure() const { return request_failure_; }
  bool must_close() const { return closes_after_answer_ || request_failure_; }
  void close_after_answer() { closes_after_answer_ = true; }
  void refuse_for_lack_of_space(std::string message) { request_failure_ = {kStatusNoSpace, std::move(message)}; }

  // Reads and discards further bytes for a moment, so that the client receives the answer (see kLinger).
  void linger() {
    ::shutdown(socket_, SHUT_WR);
    const TimePoint give_up_at = server_.clock_.now() + kLinger;
    while (wait_ready(POLLIN, give_up_at) && ::recv(socket_, buffer_->data(), buffer_->size(), MSG_DONTWAIT) > 0) {
    }
  }

 private:
  TimePoint deadline(std::uint64_t bytes_moved) const {
    return began_at_ + server_.limits_.transfer_time_base +
           from_seconds(static_cast<double>(bytes_moved) / server_.limits_.bytes_per_s_min);
  }
  bool wait_ready(short events, TimePoint give_up_at) const {
    for (;;) {
      const Duration time_left = std::max(Duration{}, give_up_at - server_.clock_.now());
      const auto time_left_ms = std::chrono::ceil<std::chrono::milliseconds>(time_left).count();
      pollfd poll_entry{socket_, events, 0};
      const int ready_count =
          ::poll(&poll_entry, 1, static_cast<int>(std::min<std::int64_t>(time_left_ms, kPollMsMax)));
      if (ready_count > 0) return true;
      if (ready_count < 0 && errno != EINTR) return false;
      if (server_.clock_.now() >= give_up_at) return false;
    }
  }
  // Updates and returns the counted bytes of all arriving requests.
  std::uint64_t update_counted_bytes() {
    const std::uint64_t counted_now = received_bytes_ > kUncountedBytes ? received_bytes_ - kUncountedBytes : 0;
    const std::uint64_t counted_before = std::exchange(counted_bytes_, counted_now);
    return server_.receiving_ += counted_now - counted_before;  // modulo 2^64, so that it may also fall
  }

  HttpServer& server_;
  const socket_t socket_;
  const std::unique_ptr<std::array<char, kBufferBytes>> buffer_ = std::make_unique<std::array<char, kBufferBytes>>();
  std::size_t begin_ = 0, end_ = 0;  // the unread part of the buffer
  TimePoint began_at_{};             // start of the request, or of its answer
  bool is_answering_ = false, closes_after_answer_ = false;
  std::uint64_t received_bytes_ = 0, sent_bytes_ = 0;  // of the request, and of its answer
  std::uint64_t counted_bytes_ = 0;                    // this connection's part of HttpServer::receiving_
  std::optional<RequestFailure> request_failure_;
};

thread_local HttpServer::Connection* HttpServer::thread_connection_ = nullptr;

HttpServer::HttpServer(const HttpLimits& limits) : limits_(limits) {
  new_task_queue = [] { return new ThreadPerConnection(); };
  // Sets only the Keep-Alive header of answers; wait_for_request() enforces idle_max.
  set_keep_alive_timeout(std::chrono::ceil<std::chrono::seconds>(limits.idle_max).count());
  set_keep_alive_max_count(1'000'000'000);  // no limit on the requests of a connection
}

// httplib listens with a short backlog. A second listen() only changes its length.
std::optional<int> HttpServer::bind(const std::string& host, int port) {
  if (port != 0) return bind_to_port(host.c_str(), port) ? std::optional(port) : std::nullopt;
  const int free_port = bind_to_any_port(host.c_str());
  return free_port > 0 ? std::optional(free_port) : std::nullopt;
}

std::thread HttpServer::start() {
  ::listen(svr_sock_, static_cast<int>(limits_.connections_max));  // httplib's backlog holds 5 unaccepted connections
  std::thread thread([this] {
    listen_after_bind();
    has_ended_ = true;
  });
  // Before the server runs, its stop() has no effect.
  while (!is_running() && !has_ended_) std::this_thread::yield();
  return thread;
}

std::optional<HttpServer::RequestFailure> HttpServer::request_failure() {
  return thread_connection_ ? thread_connection_->request_failure() : std::nullopt;
}

std::optional<overlay::Slice> HttpServer::read_body(const httplib::Request& request, httplib::Response& response,
                                                    const httplib::ContentReader& read, Bytes bytes_max,
                                                    const std::filesystem::path& folder) {
  std::uint64_t body_max = bytes_max.count;
  if (request.has_header("Content-Length"))
    body_max = std::min(body_max, request.get_header_value<std::uint64_t>("Content-Length"));
  ArrivingBody body(body_max, folder);
  Status received = ok();
  const bool is_complete = read([&](const char* bytes, std::size_t size) {
    received = body.append({bytes, size});
    return received.has_value();
  });
  if (is_complete) return body.finish();
  if (!received) {
    response.status = kStatusNoSpace;
    if (thread_connection_) thread_connection_->refuse_for_lack_of_space(received.error().message());
  }
  if (response.status < 400) response.status = 400;
  return std::nullopt;
}

void HttpServer::close_after_answer(httplib::Response& response) {
  response.set_header("Connection", "close");
  if (thread_connection_) thread_connection_->close_after_answer();
}

// Serves one connection until it ends, on its own thread.
bool HttpServer::process_and_close_socket(socket_t socket) {
  bool is_admitted = false;
  {
    const std::lock_guard lock(mutex_);
    is_admitted = end_by_.load() == kNever && open_sockets_.size() < limits_.connections_max;
    if (is_admitted) open_sockets_.insert(socket);
  }
  {
    Connection connection(*this, socket);
    thread_connection_ = &connection;
    if (!is_admitted && end_by_.load() == kNever) {
      const std::string body =
          fmt::format(R"({{"error":{{"code":"busy","message":"{} connections are open, which is the limit: )"
                      R"(close those not in use, and come back later"}}}})"
                      "\n",
                      limits_.connections_max);
      const std::string answer = fmt::format(
          "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: "
          "{}\r\n\r\n{}",
          body.size(), body);
      if (connection.write(answer.data(), answer.size()) > 0) connection.linger();
    }
    while (is_admitted && connection.wait_for_request()) {
      bool is_closed = false;
      const auto leave_request_as_is = [](httplib::Request&) {};
      if (!process_request(connection, /*close_connection=*/false, is_closed, leave_request_as_is) || is_closed) break;
      if (!connection.must_close()) continue;
      connection.linger();
      break;
    }
    thread_connection_ = nullptr;
  }
  const std::lock_guard lock(mutex_);
  open_sockets_.erase(socket);
  return ::close(socket) == 0;
}

void HttpServer::end_connections() {
  const std::lock_guard lock(mutex_);
  end_by_ = clock_.now() + kLastAnswerTimeout;
  for (const socket_t socket : open_sockets_) ::shutdown(socket, SHUT_RD);
}

}  // namespace echoline::learner
