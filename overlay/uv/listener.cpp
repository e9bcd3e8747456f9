// Binds, listens, and pauses while the process has no free file. Called by the driver.
#include "overlay/uv/listener.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/files.hpp"
#include "overlay/uv/address.hpp"
#include "overlay/uv/hosts.hpp"
#include "overlay/uv/socket.hpp"

namespace echoline::overlay {
namespace {

constexpr int kBacklog = 1024;  // connections that wait to be accepted

bool bind_to(int fd, const sockaddr_storage& address) {
  const int on = 1;
  return fd >= 0 && ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
         ::bind(fd, reinterpret_cast<const sockaddr*>(&address), address_bytes(address)) == 0;
}

// Whether no process listens on this address now.
bool is_free(const sockaddr_storage& address) {
  const Descriptor probe(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  return bind_to(probe.get(), address) && ::listen(probe.get(), 1) == 0;
}

}  // namespace

Listener::~Listener() {
  detach();
  if (socket_ >= 0) ::close(socket_);
}

void Listener::move_to(Stage to, TimePoint resumes_at) {
  constexpr StateRow kNext[] = {
      {"unbound", states(Stage::kListening, Stage::kStopped)},
      {"listening", states(Stage::kPaused, Stage::kStopped)},
      {"paused", states(Stage::kListening, Stage::kPaused, Stage::kStopped)},
      {"stopped", 0},
  };
  change_state(stage_, to, kNext, "a listener");
  resumes_at_ = resumes_at;
}

Status Listener::open(const Endpoint& bind, std::uint16_t preferred_port) {
  constexpr std::string_view kOperation = "listen";
  const auto& [name, port] = bind;
  ECHO_ASSIGN(const std::string host, resolve(name));
  sockaddr_storage address{};
  const bool uses_preferred_port =
      port == 0 && preferred_port != 0 && to_address(host, preferred_port, address) && is_free(address);
  if (!uses_preferred_port) ECHO_CHECK(to_address(host, port, address), "'{}'", host);
  socket_ = ::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int error = bind_to(socket_, address) ? 0 : uv_translate_sys_error(errno);
  if (error == 0) disable_pacing(socket_);
  if (error == 0 && ::listen(socket_, kBacklog) != 0) error = uv_translate_sys_error(errno);
  if (error == UV_EADDRINUSE)
    return fail(Code::kInvalid, kOperation,
                "port {} on {} is in use: stop the program that uses it, or choose another port (0 picks a free one)",
                port, host);
  if (error != 0)
    return fail(error == UV_EACCES || error == UV_EADDRNOTAVAIL ? Code::kInvalid : Code::kIo, kOperation, "{}:{}: {}",
                host, port, uv_strerror(error));
  socklen_t length = sizeof address;
  ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
  endpoint_ = to_endpoint(address);
  ECHO_TRY(attach());
  move_to(Stage::kListening);
  return ok();
}

// Adds a handle to the loop. It owns a copy of the socket, because detach() closes the handle's descriptor.
Status Listener::attach() {
  const int fd = ::fcntl(socket_, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return fail(Code::kIo, "listen", "{}", std::strerror(errno));
  handle_ = new uv_tcp_t;
  uv_tcp_init(&loop_, handle_);
  handle_->data = this;
  int error = uv_tcp_open(handle_, fd);
  if (error != 0) ::close(fd);
  if (error == 0)
    error = uv_listen(stream(), kBacklog, [](uv_stream_t* handle, int status) {
      static_cast<Listener*>(handle->data)->on_waiting_(status);
    });
  if (error != 0) return fail(Code::kIo, "listen", "{}: {}", to_text(endpoint_), uv_strerror(error));
  return ok();
}

void Listener::detach() {
  if (handle_)
    uv_close(reinterpret_cast<uv_handle_t*>(std::exchange(handle_, nullptr)),
             [](uv_handle_t* handle) { delete reinterpret_cast<uv_tcp_t*>(handle); });
}

void Listener::pause(TimePoint now) {
  detach();
  move_to(Stage::kPaused, now + kPause);
}

void Listener::resume(TimePoint now) {
  if (now < resumes_at_) return;
  if (attach())
    move_to(Stage::kListening);
  else
    pause(now);
}

void Listener::stop() {
  detach();
  move_to(Stage::kStopped);
}

void Listener::check() const {
  ECHO_CHECK((handle_ != nullptr) == (stage_ == Stage::kListening), "a handle of a listener that does not listen");
  ECHO_CHECK((resumes_at_ != kNever) == (stage_ == Stage::kPaused), "a pause of a listener that does not pause");
  ECHO_CHECK(stage_ == Stage::kUnbound || stage_ == Stage::kStopped || socket_ >= 0, "a listener without a socket");
}

}  // namespace echoline::overlay
