#include "overlay/uv/driver.hpp"

#include <csignal>
#include <future>

#include "base/log.hpp"

namespace echoline::overlay {
namespace {

// Fills in a numeric IPv4 or IPv6 address.
int to_address(const std::string& host, int port, sockaddr_storage& address) {
  const int v4 = uv_ip4_addr(host.c_str(), port, reinterpret_cast<sockaddr_in*>(&address));
  return v4 == 0 ? 0 : uv_ip6_addr(host.c_str(), port, reinterpret_cast<sockaddr_in6*>(&address));
}

Endpoint to_endpoint(const sockaddr_storage& address) {
  char host[64] = "";
  if (address.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&address);
    uv_ip6_name(v6, host, sizeof host);
    return {host, ntohs(v6->sin6_port)};
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
  uv_ip4_name(v4, host, sizeof host);
  return {host, ntohs(v4->sin_port)};
}

uv_stream_t* stream(uv_tcp_t& tcp) { return reinterpret_cast<uv_stream_t*>(&tcp); }
uv_handle_t* handle(uv_tcp_t& tcp) { return reinterpret_cast<uv_handle_t*>(&tcp); }

}  // namespace

// A write the kernel did not take at once; holds its bytes until it has.
struct Driver::Write {
  uv_write_t request{};
  Connection* connection = nullptr;
  act::Send send;
  std::size_t bytes = 0;
};

Result<std::unique_ptr<Driver>> Driver::listen(const std::string& host, std::uint16_t port) {
  constexpr std::string_view op = "listen";
  sockaddr_storage address{};
  if (to_address(host, port, address) != 0)
    return fail(Code::kInvalid, op, "expected a numeric address such as 127.0.0.1, found '{}'", host);
  std::unique_ptr<Driver> driver(new Driver);
  ECHO_CHECK(uv_loop_init(&driver->loop_) == 0, "no event loop");
  driver->loop_.data = driver.get();
  uv_tcp_init(&driver->loop_, &driver->listener_);
  uv_timer_init(&driver->loop_, &driver->timer_);
  uv_async_init(&driver->loop_, &driver->async_, [](uv_async_t* a) { static_cast<Driver*>(a->data)->on_async(); });
  driver->listener_.data = driver->timer_.data = driver->async_.data = driver.get();
  int e = uv_tcp_bind(&driver->listener_, reinterpret_cast<const sockaddr*>(&address), 0);
  if (e == 0)
    e = uv_listen(stream(driver->listener_), 128, [](uv_stream_t* s, int status) {
      if (status == 0)
        static_cast<Driver*>(s->data)->accept();
      else
        log::warn("accept: {}", uv_strerror(status));
    });
  if (e == UV_EADDRINUSE)
    return fail(Code::kInvalid, op,
                "port {} on {} is in use: stop the program that uses it, or choose another port (0 picks a free one)",
                port, host);
  if (e != 0)
    return fail(e == UV_EACCES || e == UV_EADDRNOTAVAIL ? Code::kInvalid : Code::kIo, op, "{}:{}: {}", host, port,
                uv_strerror(e));
  int length = sizeof address;
  uv_tcp_getsockname(&driver->listener_, reinterpret_cast<sockaddr*>(&address), &length);
  driver->endpoint_ = to_endpoint(address);
  if (host.rfind("127.", 0) != 0 && host != "::1")
    log::warn("listening on {}: connections are neither encrypted nor authenticated yet; use trusted networks only",
              to_text(driver->endpoint_));
  return driver;
}

Driver::~Driver() {
  ECHO_CHECK(!thread_.joinable(), "destroyed while running");
  uv_walk(
      &loop_,
      [](uv_handle_t* h, void*) {
        if (!uv_is_closing(h)) uv_close(h, nullptr);
      },
      nullptr);
  while (uv_run(&loop_, UV_RUN_DEFAULT) != 0) {
  }
  uv_loop_close(&loop_);
}

void Driver::run(Core& core, std::function<void(const Action&)> to_application, std::function<void(TimePoint)> start) {
  core_ = &core;
  to_application_ = std::move(to_application);
  read_buffer_.resize(kReadBytes);
  running_ = true;
  posted_.push_back(std::move(start));
  uv_async_send(&async_);
  thread_ = std::thread([this] {
    loop_thread_ = std::this_thread::get_id();
    sigset_t pipe;  // a write to a closed connection is an error code here, not a signal
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
    uv_run(&loop_, UV_RUN_DEFAULT);
  });
}

bool Driver::post(std::function<void(TimePoint)> work) {
  const std::lock_guard lock(mutex_);
  if (!running_) return false;
  posted_.push_back(std::move(work));
  uv_async_send(&async_);
  return true;
}

bool Driver::post_and_wait(const std::function<void(TimePoint)>& work) {
  if (std::this_thread::get_id() == loop_thread_.load()) {
    work(now());
    return true;
  }
  std::promise<void> done;
  if (!post([&](TimePoint t) {
        work(t);
        done.set_value();
      }))
    return false;
  done.get_future().wait();
  return true;
}

void Driver::stop(std::function<void(TimePoint)> leave) {
  if (!thread_.joinable()) return;
  ECHO_CHECK(std::this_thread::get_id() != loop_thread_.load(), "stop() called from a callback");
  post([this, leave = std::move(leave)](TimePoint t) {
    leave(t);
    stopping_ = true;
    stop_at_ = t + kFlushMax;
    uv_close(handle(listener_), nullptr);
  });
  thread_.join();
}

// ---- events ----

void Driver::on_async() {
  std::vector<std::function<void(TimePoint)>> work;
  {
    const std::lock_guard lock(mutex_);
    work.swap(posted_);
  }
  for (const auto& w : work) {
    w(now());
    drain();
  }
  end_if_stopped();
}

void Driver::on_timer() {
  const TimePoint t = now();
  std::vector<Connection*> due;
  for (const auto& [id, c] : connections_)
    if (c->leaving && c->close_at <= t) due.push_back(c.get());
  for (Connection* c : due) destroy(*c);
  core_->on_timer(t);
  drain();
  end_if_stopped();
}

void Driver::end_if_stopped() {
  if (!stopping_) return;
  if (now() < stop_at_)
    for (const auto& [id, c] : connections_)
      if (c->leaving) return;  // still flushing
  {
    const std::lock_guard lock(mutex_);
    if (!posted_.empty()) return;  // on_async comes again
    running_ = false;
  }
  while (!connections_.empty()) destroy(*connections_.begin()->second);
  for (uv_handle_t* h : {reinterpret_cast<uv_handle_t*>(&timer_), reinterpret_cast<uv_handle_t*>(&async_)})
    if (!uv_is_closing(h)) uv_close(h, nullptr);
}

void Driver::accept() {
  Connection& c = add(ConnId{next_accepted_});
  next_accepted_ += 2;
  sockaddr_storage address{};
  int length = sizeof address;
  if (uv_accept(stream(listener_), stream(c.tcp)) != 0 ||
      uv_tcp_getpeername(&c.tcp, reinterpret_cast<sockaddr*>(&address), &length) != 0)
    return destroy(c);
  uv_tcp_nodelay(&c.tcp, 1);
  c.reading = true;
  set_reading(c);
  core_->on_accepted(c.id, to_endpoint(address).host, now());
  drain();
}

void Driver::on_read(Connection& c, ssize_t n, const uv_buf_t* buffer) {
  if (n == 0) return;
  if (n < 0) {
    c.reading = false;
    if (c.leaving)
      destroy(c);
    else
      lost(c, n == UV_EOF ? "closed by the peer" : uv_strerror(static_cast<int>(n)));
    drain();
    return end_if_stopped();
  }
  core_->on_received(static_cast<std::size_t>(n), now());
  if (!c.leaving) c.decoder.feed(std::as_bytes(std::span(buffer->base, static_cast<std::size_t>(n))));
  while (!c.leaving) {
    const auto frame = c.decoder.next();
    if (!frame) {
      const std::string reason = frame.error().message();
      lost(c, reason);
      break;
    }
    if (!*frame) break;
    core_->on_frame(c.id, **frame, now());
    drain();
  }
  drain();
}

// The connection broke or its bytes make no sense: the core is told, and it is closed without a flush.
void Driver::lost(Connection& c, const std::string& reason) {
  const ConnId id = c.id;
  destroy(c);
  core_->on_closed(id, reason, now());
}

// ---- actions ----

void Driver::drain() {
  if (draining_) return;
  draining_ = true;
  for (;;) {
    for (Action& action : core_->take_actions()) perform(std::move(action));
    if (later_.empty()) break;
    for (const auto& event : std::exchange(later_, {})) event();
  }
  draining_ = false;
  arm_timer();
}

void Driver::perform(Action&& action) {
  if (auto* s = std::get_if<act::Send>(&action)) return send(std::move(*s));
  if (const auto* d = std::get_if<act::Dial>(&action)) return dial(*d);
  if (const auto* close = std::get_if<act::Close>(&action)) {
    if (Connection* c = find(close->conn)) leave(*c);
    return;
  }
  if (const auto* admit = std::get_if<act::Admit>(&action)) {
    if (Connection* c = find(admit->conn)) c->decoder.admit();
    return;
  }
  if (const auto* reading = std::get_if<act::SetReading>(&action)) {
    reading_ = reading->on;
    for (const auto& [id, c] : connections_) set_reading(*c);
    return;
  }
  to_application_(action);
}

void Driver::send(act::Send&& send) {
  Connection* c = find(send.conn);
  if (!c) return;
  const std::span<const std::byte> tail = send.tail.bytes();
  const std::size_t total = send.head.size() + tail.size();
  uv_buf_t buffers[2];
  unsigned count = 0;
  std::size_t written = 0;
  const auto fill = [&] {  // what is left of head and tail
    count = 0;
    const auto put = [&](const std::byte* from, std::size_t n) {
      if (n)
        buffers[count++] = uv_buf_init(reinterpret_cast<char*>(const_cast<std::byte*>(from)), static_cast<unsigned>(n));
    };
    const std::size_t from_head = std::min(written, send.head.size());
    put(send.head.data() + from_head, send.head.size() - from_head);
    put(tail.data() + (written - from_head), tail.size() - (written - from_head));
  };
  if (c->queued == 0) {
    fill();
    if (const int n = uv_try_write(stream(c->tcp), buffers, count); n > 0) written = static_cast<std::size_t>(n);
    // An error shows again in uv_write or in the read.
  }
  if (written > 0) later_.push_back([this, id = c->id, written] { core_->on_sent(id, written, now()); });
  if (written == total) return;
  fill();
  auto write = std::make_unique<Write>();
  write->connection = c;
  write->bytes = total - written;
  write->send = std::move(send);  // the buffers point into its vector's memory, which stays where it is
  write->request.data = write.get();
  c->queued += write->bytes;
  const int e = uv_write(&write->request, stream(c->tcp), buffers, count, [](uv_write_t* request, int status) {
    const std::unique_ptr<Write> w(static_cast<Write*>(request->data));
    Connection& connection = *w->connection;
    connection.queued -= w->bytes;
    if (status != 0 || connection.leaving) return;  // the read side reports the loss
    connection.driver->core_->on_sent(connection.id, w->bytes, connection.driver->now());
    connection.driver->drain();
  });
  if (e == 0) {
    (void)write.release();
  } else {
    c->queued -= write->bytes;
    later_.push_back([this, id = c->id, e] {
      if (Connection* lost_one = find(id)) lost(*lost_one, uv_strerror(e));
    });
  }
}

void Driver::dial(const act::Dial& dial) {
  Connection& c = add(dial.conn);
  sockaddr_storage address{};
  c.connect.data = &c;
  int e = to_address(dial.to.host, dial.to.port, address);
  if (e == 0)
    e = uv_tcp_connect(&c.connect, &c.tcp, reinterpret_cast<const sockaddr*>(&address),
                       [](uv_connect_t* request, int status) {
                         Connection& connection = *static_cast<Connection*>(request->data);
                         if (status == UV_ECANCELED || connection.leaving) return;  // being closed
                         Driver& d = *connection.driver;
                         if (status != 0) {
                           d.lost(connection, uv_strerror(status));
                         } else {
                           uv_tcp_nodelay(&connection.tcp, 1);
                           connection.reading = true;
                           d.set_reading(connection);
                           d.core_->on_connected(connection.id, d.now());
                         }
                         d.drain();
                       });
  if (e != 0)
    later_.push_back([this, id = dial.conn, why = fmt::format("{}: {}", to_text(dial.to), uv_strerror(e))] {
      if (Connection* failed = find(id)) lost(*failed, why);
    });
}

// Flush, say the end, and wait for the peer's end: closing at once could destroy bytes that are still on their way.
void Driver::leave(Connection& c) {
  if (c.leaving) return;
  c.leaving = true;
  c.close_at = now() + kFlushMax;
  set_reading(c);
  c.shutdown.data = &c;
  if (!c.reading || uv_shutdown(&c.shutdown, stream(c.tcp), [](uv_shutdown_t*, int) {}) != 0) destroy(c);
}

void Driver::destroy(Connection& c) {
  const auto it = connections_.find(c.id);
  if (it == connections_.end() || it->second.get() != &c) return;
  c.leaving = true;
  (void)it->second.release();  // freed by its close callback
  connections_.erase(it);
  uv_close(handle(c.tcp), [](uv_handle_t* h) { delete static_cast<Connection*>(h->data); });
}

void Driver::set_reading(Connection& c) {
  if (!c.reading) return;
  if (!reading_ && !c.leaving) {
    uv_read_stop(stream(c.tcp));
    return;
  }
  uv_read_start(  // starting twice does no harm
      stream(c.tcp),
      [](uv_handle_t* h, std::size_t, uv_buf_t* buffer) {
        Driver& d = *static_cast<Connection*>(h->data)->driver;
        *buffer =
            uv_buf_init(d.read_buffer_.data(), static_cast<unsigned>(d.core_->read_bytes_max(d.read_buffer_.size())));
      },
      [](uv_stream_t* s, ssize_t n, const uv_buf_t* buffer) {
        Connection& connection = *static_cast<Connection*>(s->data);
        connection.driver->on_read(connection, n, buffer);
      });
}

Driver::Connection* Driver::find(ConnId id) {
  const auto it = connections_.find(id);
  return it == connections_.end() || it->second->leaving ? nullptr : it->second.get();
}

Driver::Connection& Driver::add(ConnId id) {
  auto c = std::make_unique<Connection>();
  c->driver = this;
  c->id = id;
  uv_tcp_init(&loop_, &c->tcp);
  c->tcp.data = c.get();
  return *(connections_[id] = std::move(c));
}

void Driver::arm_timer() {
  if (uv_is_closing(reinterpret_cast<uv_handle_t*>(&timer_))) return;
  TimePoint at = std::min(core_->next_deadline(), stop_at_);
  for (const auto& [id, c] : connections_) at = std::min(at, c->close_at);
  if (at == kNever) {
    uv_timer_stop(&timer_);
    return;
  }
  const auto wait = std::max(Duration{}, at - now());
  const auto wait_ms = std::chrono::ceil<std::chrono::milliseconds>(std::min<Duration>(wait, std::chrono::hours(1)));
  uv_update_time(&loop_);
  uv_timer_start(
      &timer_, [](uv_timer_t* t) { static_cast<Driver*>(t->data)->on_timer(); },
      static_cast<std::uint64_t>(wait_ms.count()), 0);
}

}  // namespace echoline::overlay
