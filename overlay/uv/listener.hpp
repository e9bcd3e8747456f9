// The socket on which a node accepts connections. Internal to overlay/uv; loop thread only.
#pragma once
#include <uv.h>

#include <functional>

#include "base/clock.hpp"
#include "base/state_table.hpp"
#include "overlay/types.hpp"

namespace echoline::overlay {

// If the process has no free file, libuv would retry accepting forever. So the listener pauses: it removes its handle
// from the loop but keeps the socket, in whose backlog connections wait.
class Listener {
 public:
  static constexpr Duration kPause = std::chrono::seconds(1);

  // `on_waiting` is called when a connection waits (status 0: pass stream() to uv_accept), or with libuv's error.
  Listener(uv_loop_t& loop, std::function<void(int status)> on_waiting)
      : loop_(loop), on_waiting_(std::move(on_waiting)) {}
  ~Listener();
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Binds and listens. A port 0 becomes `preferred_port`, unless that is 0 or in use. kInvalid if the port is in use or
  // the host has no address.
  Status open(const Endpoint& bind, std::uint16_t preferred_port);
  const Endpoint& endpoint() const { return endpoint_; }
  uv_stream_t* stream() { return reinterpret_cast<uv_stream_t*>(handle_); }

  void pause(TimePoint now);
  // Listens again once the pause is over, or pauses again if there is still no free file.
  void resume(TimePoint now);
  TimePoint resumes_at() const { return resumes_at_; }  // kNever: not paused
  // Accepts no more connections.
  void stop();
  void check() const;

 private:
  enum class Stage : std::uint8_t { kUnbound, kListening, kPaused, kStopped };
  void move_to(Stage to, TimePoint resumes_at = kNever);
  Status attach();
  void detach();

  uv_loop_t& loop_;
  std::function<void(int)> on_waiting_;
  int socket_ = -1;
  Endpoint endpoint_;
  Stage stage_ = Stage::kUnbound;
  uv_tcp_t* handle_ = nullptr;  // of a copy of the socket; freed by its close callback
  TimePoint resumes_at_ = kNever;
};

}  // namespace echoline::overlay
