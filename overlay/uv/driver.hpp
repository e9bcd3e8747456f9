// Runs one protocol core over libuv: one loop, one thread, TCP. Internal to overlay/uv.
#pragma once
#include <uv.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "overlay/core.hpp"

namespace echoline::overlay {

class Driver {
 public:
  // Binds and listens; nothing runs yet. kInvalid when the port is in use or the host is not a numeric address.
  static Result<std::unique_ptr<Driver>> listen(const std::string& host, std::uint16_t port);
  ~Driver();  // stop() must have been called when run() was
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  Endpoint endpoint() const { return endpoint_; }
  // Starts the loop thread. `to_application` gets every action that is not about connections; `start` runs first.
  void run(Core& core, std::function<void(const Action&)> to_application, std::function<void(TimePoint)> start);
  // Runs `work` on the loop thread, in order; false once the loop has ended or is not running.
  bool post(std::function<void(TimePoint)> work);
  // Like post(), and waits for it; runs at once when called on the loop thread.
  bool post_and_wait(const std::function<void(TimePoint)>& work);
  // Runs `leave`, lets what was sent leave (for at most kFlushMax) and joins the thread. Not from the loop thread.
  void stop(std::function<void(TimePoint)> leave);

 private:
  static constexpr Duration kFlushMax = std::chrono::seconds(2);
  static constexpr std::size_t kReadBytes = 1024 * 1024;

  struct Connection {
    Driver* driver = nullptr;
    ConnId id;
    uv_tcp_t tcp{};
    uv_connect_t connect{};
    uv_shutdown_t shutdown{};
    FrameDecoder decoder;
    std::size_t queued = 0;  // bytes in uv_write requests
    bool reading = false;    // connected and not at its end
    bool leaving = false;    // the core is done with it; flushed, then closed
    TimePoint close_at = kNever;
  };
  struct Write;

  Driver() = default;
  TimePoint now() const { return clock_.now(); }
  void drain();
  void perform(Action&& action);
  void send(act::Send&& send);
  void dial(const act::Dial& dial);
  void accept();
  void leave(Connection& c);
  void destroy(Connection& c);
  void lost(Connection& c, const std::string& reason);
  void set_reading(Connection& c);
  void on_read(Connection& c, ssize_t n, const uv_buf_t* buffer);
  void arm_timer();
  void on_timer();
  void on_async();
  void end_if_stopped();
  Connection* find(ConnId id);
  Connection& add(ConnId id);

  SystemClock clock_;
  Endpoint endpoint_;
  uv_loop_t loop_{};
  uv_tcp_t listener_{};
  uv_timer_t timer_{};
  uv_async_t async_{};
  std::thread thread_;
  std::atomic<std::thread::id> loop_thread_{};
  std::vector<char> read_buffer_;

  // Loop thread only.
  Core* core_ = nullptr;
  std::function<void(const Action&)> to_application_;
  std::map<ConnId, std::unique_ptr<Connection>> connections_;
  std::vector<std::function<void()>> later_;  // events found while actions were performed
  bool draining_ = false, reading_ = true, stopping_ = false;
  TimePoint stop_at_ = kNever;
  std::uint64_t next_accepted_ = 2;

  std::mutex mutex_;
  std::vector<std::function<void(TimePoint)>> posted_;  // under mutex_
  bool running_ = false;                                // under mutex_
};

}  // namespace echoline::overlay
