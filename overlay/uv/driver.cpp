#include "overlay/uv/driver.hpp"

#include <fcntl.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <future>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/priority.hpp"
#include "overlay/uv/hosts.hpp"
#include "overlay/uv/stall.hpp"

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
    constexpr std::string_view kMapped = "::ffff:";  // an IPv4 peer on a dual-stack socket
    const std::string_view text(host);
    if (text.starts_with(kMapped) && text.find('.') != text.npos)
      return {std::string(text.substr(kMapped.size())), ntohs(v6->sin6_port)};
    return {host, ntohs(v6->sin6_port)};
  }
  const auto* v4 = reinterpret_cast<const sockaddr_in*>(&address);
  uv_ip4_name(v4, host, sizeof host);
  return {host, ntohs(v4->sin_port)};
}

uv_stream_t* stream(uv_tcp_t& tcp) { return reinterpret_cast<uv_stream_t*>(&tcp); }
uv_handle_t* handle(uv_tcp_t& tcp) { return reinterpret_cast<uv_handle_t*>(&tcp); }

// Most bytes that the system buffers for a connection beyond those in flight. Small, so that a chunk does not wait on
// one stream while another has room, nor a message behind chunks.
constexpr int kUnsentBytes = 128 * 1024;

bool use_congestion_control(uv_os_fd_t fd, std::string_view name) {
  return ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

// Call before connecting, or on a listener before accepting. If the system's default is BBR, a timer paces the
// connection for its whole life. On a short path, this costs more than copying the bytes.
void begin_unpaced(int fd) { (void)(use_congestion_control(fd, "cubic") || use_congestion_control(fd, "reno")); }

// On long paths, BBR is best for bulk data, if the system allows it. On short paths its model starves: twice rate times
// minimum delay is less than the queue of any traffic shaper.
constexpr std::uint32_t kLongPathMicroseconds = 1000;

void tune(uv_tcp_t& tcp, bool bulk) {
  uv_tcp_nodelay(&tcp, 1);
  uv_os_fd_t fd = -1;
  if (uv_fileno(handle(tcp), &fd) != 0) return;
  tcp_info info{};
  socklen_t size = sizeof info;
  const bool known = ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0;
  if (bulk && known && info.tcpi_rtt >= kLongPathMicroseconds) (void)use_congestion_control(fd, "bbr");
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsentBytes, sizeof kUnsentBytes);
}

constexpr int kBacklog = 1024;

socklen_t address_bytes(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

// Whether no process listens on this address now.
bool is_free(const sockaddr_storage& address) {
  const Descriptor probe(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(probe.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  return ::bind(probe.get(), reinterpret_cast<const sockaddr*>(&address), address_bytes(address)) == 0 &&
         ::listen(probe.get(), 1) == 0;
}

}  // namespace

// Encrypted bytes that the kernel did not take at once; held until it has.
struct Driver::Write {
  uv_write_t request{};
  Connection* connection = nullptr;
  std::vector<std::byte> block;
  std::size_t plain = 0;
};

Result<std::unique_ptr<Driver>> Driver::open(DriverOptions options) {
  std::unique_ptr<Driver> driver(new Driver(std::move(options)));
  ECHO_CHECK(uv_loop_init(&driver->loop_) == 0, "no event loop");
  driver->loop_.data = driver.get();
  driver->timer_.open(driver->loop_, [raw = driver.get()] { raw->on_timer(); });
  uv_async_init(&driver->loop_, &driver->async_, [](uv_async_t* a) { static_cast<Driver*>(a->data)->on_async(); });
  driver->async_.data = driver.get();
  Credentials nameless{std::nullopt, driver->options_.authority, driver->options_.run_id};
  ECHO_ASSIGN(driver->anonymous_, TlsContext::create(nameless));
  if (driver->options_.bind) ECHO_TRY(driver->listen());
  return driver;
}

Status Driver::listen() {
  constexpr std::string_view op = "listen";
  const auto& [name, port] = *options_.bind;
  ECHO_ASSIGN(const std::string host, resolve(name));
  sockaddr_storage address{};
  const bool preferred = port == 0 && options_.preferred_port != 0 &&
                         to_address(host, options_.preferred_port, address) == 0 && is_free(address);
  if (!preferred) ECHO_CHECK(to_address(host, port, address) == 0, "'{}'", host);
  listener_.fd = ::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int on = 1;
  const bool bound = listener_.fd >= 0 && ::setsockopt(listener_.fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0 &&
                     ::bind(listener_.fd, reinterpret_cast<const sockaddr*>(&address), address_bytes(address)) == 0;
  int e = bound ? 0 : uv_translate_sys_error(errno);
  if (bound) begin_unpaced(listener_.fd);
  if (bound && ::listen(listener_.fd, kBacklog) != 0) e = uv_translate_sys_error(errno);
  if (e == UV_EADDRINUSE)
    return fail(Code::kInvalid, op,
                "port {} on {} is in use: stop the program that uses it, or choose another port (0 picks a free one)",
                port, host);
  if (e != 0)
    return fail(e == UV_EACCES || e == UV_EADDRNOTAVAIL ? Code::kInvalid : Code::kIo, op, "{}:{}: {}", host, port,
                uv_strerror(e));
  socklen_t length = sizeof address;
  ::getsockname(listener_.fd, reinterpret_cast<sockaddr*>(&address), &length);
  endpoint_ = to_endpoint(address);
  return start_listening();
}

// Without a free file, libuv would retry accepting forever. So the loop must not know the listener then. The socket
// stays, and connections wait in its backlog.
Status Driver::start_listening() {
  const int fd = ::fcntl(listener_.fd, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return fail(Code::kIo, "listen", "{}", std::strerror(errno));
  auto listener = std::make_unique<uv_tcp_t>();
  uv_tcp_init(&loop_, listener.get());
  listener->data = this;
  listener_.handle = listener.release();  // freed by its close callback
  int e = uv_tcp_open(listener_.handle, fd);
  if (e != 0) ::close(fd);
  if (e == 0)
    e = uv_listen(stream(*listener_.handle), kBacklog,
                  [](uv_stream_t* s, int status) { static_cast<Driver*>(s->data)->accept(status); });
  if (e != 0) return fail(Code::kIo, "listen", "{}: {}", to_text(endpoint_), uv_strerror(e));
  return ok();
}

void Driver::stop_listening() {
  if (listener_.handle)
    uv_close(handle(*std::exchange(listener_.handle, nullptr)),
             [](uv_handle_t* h) { delete reinterpret_cast<uv_tcp_t*>(h); });
}

Driver::~Driver() {
  ECHO_CHECK(!thread_.joinable(), "destroyed while running");
  options_.disk.reset();  // before the members that its thread posts to
  stop_listening();
  if (listener_.fd >= 0) ::close(listener_.fd);
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

double Driver::unix_origin_s() const { return clock_.unix_seconds() - seconds(clock_.now().time_since_epoch()); }

void Driver::run(Core& core, std::function<void(const Action&)> to_application, std::function<void(TimePoint)> start) {
  core_ = &core;
  to_application_ = std::move(to_application);
  read_buffer_.resize(kReadBytes);
  posted_.open(std::move(start));
  if (options_.disk) {
    Disk::Events events;
    events.saved = [this](Status s) { post([this, s = std::move(s)](TimePoint t) { core_->on_saved(s, t); }); };
    events.spooled = [this](PublicationId id, std::uint32_t chunk, Status s) {
      post([this, id, chunk, s = std::move(s)](TimePoint t) { core_->on_spooled(id, chunk, s, t); });
    };
    events.unspooled = [this](PublicationId id, std::uint32_t chunk, Result<Slice> data) {
      post([this, id, chunk, data = std::move(data)](TimePoint t) { core_->on_unspooled(id, chunk, data, t); });
    };
    options_.disk->start(std::move(events));
  }
  uv_async_send(&async_);
  thread_ = std::thread([this] {
    loop_thread_ = std::this_thread::get_id();
    sigset_t pipe;  // makes a write to a closed connection fail with an error code
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
    take_short_turns();
    uv_run(&loop_, UV_RUN_DEFAULT);
  });
}

bool Driver::post(std::function<void(TimePoint)> work) {
  return posted_.add(std::move(work), [this] { uv_async_send(&async_); });
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
    stop_at_ = t + kFlushMax;
    stop_listening();
    listener_.again_at = kNever;
  });
  thread_.join();
}

// ---- events ----

void Driver::on_async() {
  for (const auto& w : posted_.take()) {
    w(now());
    drain();
  }
  end_if_stopped();
}

void Driver::on_timer() {
  const TimePoint t = now();
  // If this process was stopped, messages that came meanwhile are read before any timeout is applied: the loop polls
  // once before its next look at the timers.
  if (t - armed_for_ > kLate && !std::exchange(read_first_, true)) {
    const Duration late = t - armed_for_;
    for (const auto& [id, c] : connections_)
      if (c->deadline != kNever) set_deadline(*c, c->deadline + late);
    timer_.arm(t + std::chrono::milliseconds(1));
    return;
  }
  read_first_ = false;
  while (deadlines_.first() <= t) {
    Connection& c = *connections_.at(deadlines_.all().begin()->second);
    if (c.leaving() || !c.dialled) {
      destroy(c);  // a stranger without a handshake in time, or a flush that takes too long
    } else {
      uv_os_fd_t fd = -1;
      if (c.tls && uv_fileno(handle(c.tcp), &fd) == 0) narrow_.stalled(c.dialled_at, c.small_segments, stall_of(fd));
      lost(c, fmt::format("no answer within {}", echoline::to_text(Core::kHandshakeTimeout)));
    }
  }
  if (t >= listener_.again_at) {
    listener_.again_at = kNever;
    if (const Status listening = start_listening(); !listening) {
      stop_listening();
      listener_.again_at = t + kNoFilesPause;
    }
  }
  resume_bundles(t);
  core_->on_timer(t);
  drain();
  end_if_stopped();
}

void Driver::end_if_stopped() {
  if (stop_at_ == kNever) return;
  if (now() < stop_at_)
    for (const auto& [id, c] : connections_)
      if (c->leaving()) return;  // still flushing
  if (!posted_.close()) return;  // work was posted meanwhile: on_async() runs again
  while (!connections_.empty()) destroy(*connections_.begin()->second);
  timer_.close();
  if (auto* const async = reinterpret_cast<uv_handle_t*>(&async_); !uv_is_closing(async)) uv_close(async, nullptr);
}

void Driver::accept(int status) {
  if (status != 0) {
    if ((status == UV_EMFILE || status == UV_ENFILE) && make_room()) return;
    log::warn("no connection is accepted for {}: {}", echoline::to_text(kNoFilesPause), uv_strerror(status));
    stop_listening();
    listener_.again_at = now() + kNoFilesPause;
    return arm_timer();
  }
  const bool full = connections_.size() >= options_.limits.total && !make_room();
  Connection& c = add(ConnId{next_accepted_});
  next_accepted_ += 2;
  sockaddr_storage address{};
  int length = sizeof address;
  if (uv_accept(stream(*listener_.handle), stream(c.tcp)) != 0 || full ||
      uv_tcp_getpeername(&c.tcp, reinterpret_cast<sockaddr*>(&address), &length) != 0 || !tls_)
    return destroy(c);
  c.unproven_from = network_of(to_endpoint(address).host);
  unproven_.add(c.id, c.unproven_from);
  if (unproven_.size() > options_.limits.unproven) make_room();
  tune(c.tcp, true);
  c.host = to_endpoint(address).host;
  auto session = TlsSession::server(
      *tls_, options_.admit_anonymous ? TlsSession::PeerCertificate::kOptional : TlsSession::PeerCertificate::kRequired,
      core_->run_unix_s(now()));
  if (!session) {
    log::error("{}", session.error().message());
    return destroy(c);
  }
  c.tls.emplace(std::move(*session));
  c.readable = true;
  set_deadline(c, now() + Core::kHandshakeTimeout);
  set_reading(c);
  arm_timer();
}

// Ends the least valuable connection: one that is closing anyway, or the oldest unproven one of the network with the
// most. False: there is none.
bool Driver::make_room() {
  for (const auto& [at, id] : deadlines_.all()) {
    Connection& c = *connections_.at(id);
    if (!c.leaving()) continue;
    destroy(c);
    return true;
  }
  const auto least = unproven_.least();
  if (least) destroy(*connections_.at(*least));
  return least.has_value();
}

// The handshake is done: the connection no longer counts as unproven.
void Driver::proven(Connection& c) { unproven_.remove(c.id, std::exchange(c.unproven_from, {})); }

// TCP is connected: start TLS.
void Driver::opened(Connection& c) {
  tune(c.tcp, c.service == act::Service::kData);
  const auto& context = c.service == act::Service::kEnrol ? anonymous_ : tls_;
  if (!context) return lost(c, "this node has no certificate yet");
  // The expiry of the learner's certificate is not checked: its run key proves as much, and a worker does not know the
  // learner's clock before the welcome.
  const auto judged_at = c.expected == kLearnerId ? std::nullopt : std::optional(core_->run_unix_s(now()));
  c.tls.emplace(TlsSession::client(*context, c.expected, judged_at));
  c.readable = true;
  set_reading(c);
  flush(c);
}

void Driver::on_read(Connection& c, ssize_t n, const uv_buf_t* buffer) {
  if (n == 0 || n == UV_ENOBUFS) return;  // no data, or another connection's turn
  if (n < 0) {
    c.readable = false;
    if (c.leaving())
      destroy(c);
    else
      lost(c, n == UV_EOF ? "closed by the peer" : uv_strerror(static_cast<int>(n)));
    drain();
    return end_if_stopped();
  }
  if (c.leaving()) return;
  c.had_its_turn = static_cast<std::size_t>(n) == buffer->len;
  last_read_ = c.id;
  if (c.stage == Connection::Stage::kOpen) core_->on_received(static_cast<std::size_t>(n), now());
  const ConnId id = c.id;
  c.tls->feed(std::as_bytes(std::span(buffer->base, static_cast<std::size_t>(n))));
  while (on_plaintext(c)) {
  }
  if (Connection* still = find(id); still && still->tls->has_output()) flush(*still);
  drain();
  end_if_stopped();
}

// Decrypts the next piece directly to its destination. False if there is none, or the connection is over.
bool Driver::on_plaintext(Connection& c) {
  const std::span<std::byte> room = c.decoder.room();
  const auto n = c.tls->read(room);
  if (!n) {
    flush(c);  // tells the peer the reason
    const std::string reason = n.error().message();
    if (c.stage == Connection::Stage::kOpening && !c.dialled) log::debug("{}: {}", c.host, reason);
    lost(c, reason);
    return false;
  }
  if (c.stage == Connection::Stage::kOpening && c.tls->established()) {
    c.move(Connection::Stage::kOpen);
    set_deadline(c, kNever);
    if (c.tls->has_output()) flush(c);
    if (c.dialled) {
      const WorkerId peer = c.expected;
      const auto found = narrow_.passed(c.dialled_at, c.small_segments);
      core_->on_connected(c.id, now());
      if (found) core_->on_narrow_path(peer, *found, now());
    } else {
      proven(c);
      core_->on_accepted(c.id, {c.host, c.tls->identity()}, now());
    }
    drain();
    if (c.leaving()) return false;
  }
  if (*n == 0) {
    if (!c.tls->peer_closed()) return false;
    lost(c, "closed by the peer");
    return false;
  }
  if (c.download) return true;  // it has asked already
  if (!std::exchange(c.heard, true) && gate_ && !c.dialled && BundleGate::is_request(room.front())) {
    begin_request(c, std::string(reinterpret_cast<const char*>(room.data()), *n));
    return false;
  }
  if (const Status advanced = c.decoder.advance(*n); !advanced) {
    lost(c, advanced.error().message(), true);
    return false;
  }
  if (auto frame = c.decoder.take()) {
    const ConnId id = c.id;
    core_->on_frame(id, std::move(*frame), now());
    drain();
    return find(id) != nullptr;
  }
  return true;
}

// The connection broke or its bytes are invalid: reports it to the core and closes it without a flush.
void Driver::lost(Connection& c, const std::string& reason, bool corrupt) {
  const ConnId id = c.id;
  const bool opening = c.stage == Connection::Stage::kOpening, tell = (!opening || c.dialled) && !c.download;
  if (const auto turn = turns_.find(c.host); c.dialled && opening && turn != turns_.end() && turn->second == c.turn)
    ++turn->second;
  destroy(c);
  if (!tell) return;
  if (corrupt)
    core_->on_corrupt(id, reason, now());
  else
    core_->on_closed(id, reason, now());
}

// Like lost(), for a loss found while an action is performed: the core is told afterwards.
void Driver::lost_later(ConnId id, std::string reason) {
  later_.push_back([this, id, why = std::move(reason)] {
    if (Connection* c = find(id)) lost(*c, why);
  });
}

// ---- actions ----

void Driver::drain() {
  if (draining_) return;
  draining_ = true;
  for (;;) {
    for (Action& action : core_->take_actions()) perform(std::move(action));
    for (const ConnId id : std::exchange(dirty_, {}))
      if (const auto it = connections_.find(id); it != connections_.end()) flush(*it->second);
    if (later_.empty()) break;
    for (const auto& event : std::exchange(later_, {})) event();
  }
  draining_ = false;
  arm_timer();
}

void Driver::perform(Action&& action) {
  if (const auto* s = std::get_if<act::Send>(&action)) return send(*s);
  if (const auto* d = std::get_if<act::Dial>(&action)) return dial(*d);
  if (const auto* close = std::get_if<act::Close>(&action)) {
    if (Connection* c = find(close->conn)) leave(*c);
    return;
  }
  if (const auto* admit = std::get_if<act::Admit>(&action)) {
    if (Connection* c = find(admit->conn)) {
      c->decoder.admit();
      c->tls->keep_buffers();
    }
    return;
  }
  if (const auto* reading = std::get_if<act::SetReading>(&action)) {
    if (reading->conn) {
      if (Connection* c = find(*reading->conn)) {
        c->held = !reading->on;
        set_reading(*c);
      }
      return;
    }
    reading_ = reading->on;
    // Round robin: otherwise the first connection could use up the read limit every time.
    const auto next = connections_.upper_bound(last_read_);
    for (auto it = next; it != connections_.end(); ++it) set_reading(*it->second);
    for (auto it = connections_.begin(); it != next; ++it) set_reading(*it->second);
    return;
  }
  if (const auto* use = std::get_if<act::UseCertificate>(&action)) return use_certificate(*use);
  if (auto* save = std::get_if<act::SaveState>(&action)) return options_.disk->save(std::move(*save));
  if (auto* spool = std::get_if<act::Spool>(&action)) return options_.disk->spool(std::move(*spool));
  if (const auto* unspool = std::get_if<act::Unspool>(&action)) return options_.disk->unspool(*unspool);
  if (const auto* drop = std::get_if<act::DropSpool>(&action)) return options_.disk->drop(*drop);
  if (auto* deliver = std::get_if<act::Deliver>(&action); deliver && deliver->spooled) {
    auto file = options_.disk->payload(*deliver->spooled);
    if (!file) {
      post([this, version = deliver->publication.version, why = file.error().message()](TimePoint t) {
        core_->on_undelivered(version, why, t);
      });
      return;
    }
    deliver->publication.payload = Payload(*std::move(file), deliver->bytes);
  }
  to_application_(action);
}

void Driver::use_certificate(const act::UseCertificate& use) {
  Credentials credentials{Credentials::Own{use.certificate, options_.key}, use.authority, options_.run_id};
  auto context = TlsContext::create(credentials);
  if (!context) return log::error("a certificate cannot be used: {}", context.error().message());
  tls_ = std::move(*context);
}

void Driver::send(const act::Send& send) {
  Connection* c = find(send.conn);
  if (!c || !c->tls) return;
  for (const Slice& part : {send.head, send.tail})
    if (!part.empty())
      if (const Status written = c->tls->write(part.bytes(), c->block); !written)
        return log::debug("{}", written.error().message());
  c->block_plain += send.head.size() + send.tail.size();
  if (!std::exchange(c->dirty, true)) dirty_.push_back(c->id);
}

// Passes the block to the kernel. A write error shows again when reading.
void Driver::flush(Connection& c) {
  c.dirty = false;
  if (c.tls && c.tls->has_output()) {
    const std::vector<std::byte> own = c.tls->take_output();
    c.block.insert(c.block.end(), own.begin(), own.end());
  }
  if (c.block.empty()) return;
  std::size_t done = 0;
  uv_buf_t buffer = uv_buf_init(reinterpret_cast<char*>(c.block.data()), static_cast<unsigned>(c.block.size()));
  if (c.writing == 0)
    if (const int n = uv_try_write(stream(c.tcp), &buffer, 1); n > 0) done = static_cast<std::size_t>(n);
  const std::size_t plain = std::exchange(c.block_plain, 0);
  if (done == c.block.size()) {
    c.block.clear();
    if (plain)
      later_.push_back([this, id = c.id, plain] {
        if (find(id)) core_->on_sent(id, plain, now());
      });
    if (!draining_) drain();
    return;
  }
  if (const std::size_t waiting = c.tcp.write_queue_size + c.block.size() - done; waiting > kUnreadBytesMax) {
    c.block = {};
    return lost_later(c.id, fmt::format("the peer does not read: {} bytes wait for it", waiting));
  }
  auto write = std::make_unique<Write>();
  write->connection = &c;
  write->plain = plain;
  write->block = std::exchange(c.block, {});
  write->request.data = write.get();
  buffer = uv_buf_init(reinterpret_cast<char*>(write->block.data() + done),
                       static_cast<unsigned>(write->block.size() - done));
  ++c.writing;
  const int e = uv_write(&write->request, stream(c.tcp), &buffer, 1, [](uv_write_t* request, int status) {
    const std::unique_ptr<Write> w(static_cast<Write*>(request->data));
    Connection& connection = *w->connection;
    --connection.writing;
    if (connection.block.capacity() == 0) {  // its memory is used again
      w->block.clear();
      connection.block = std::move(w->block);
    }
    if (status != 0 || connection.leaving()) return;  // the read side reports the loss
    Driver& d = *connection.driver;
    if (w->plain) d.core_->on_sent(connection.id, w->plain, d.now());
    if (connection.download) d.read_bundle(connection);
    d.drain();
  });
  if (e == 0) {
    (void)write.release();
    return;
  }
  --c.writing;
  lost_later(c.id, uv_strerror(e));
}

// A pending lookup of a host name.
struct Driver::Lookup {
  uv_getaddrinfo_t request{};
  Driver* driver = nullptr;
  act::Dial dial;
};

void Driver::dial(const act::Dial& dial) {
  sockaddr_storage address{};
  const bool numeric = to_address(dial.to.host, dial.to.port, address) == 0;
  Connection& c = add(dial.conn);
  c.dialled = true;
  c.service = dial.service;
  c.expected = dial.expected;
  c.host = dial.to.host;
  set_deadline(c, now() + Core::kHandshakeTimeout);
  c.connect.data = &c;
  if (numeric) return connect(c, dial.to, address);
  auto lookup = std::make_unique<Lookup>();
  lookup->driver = this;
  lookup->dial = dial;
  lookup->request.data = lookup.get();
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  const int e = uv_getaddrinfo(
      &loop_, &lookup->request,
      [](uv_getaddrinfo_t* request, int status, addrinfo* found) {
        const std::unique_ptr<Lookup> l(static_cast<Lookup*>(request->data));
        l->driver->looked_up(l->dial, status, found);
        uv_freeaddrinfo(found);
      },
      dial.to.host.c_str(), nullptr, &hints);
  if (e == 0)
    (void)lookup.release();
  else
    lost_later(dial.conn, fmt::format("{}: {}", dial.to.host, uv_strerror(e)));
}

// If a name has several addresses, the driver keeps using one until it does not lead to the expected peer. Then it
// tries the next.
void Driver::looked_up(const act::Dial& dial, int status, const addrinfo* found) {
  Connection* c = find(dial.conn);
  if (!c) return;
  std::vector<sockaddr_storage> addresses;
  if (turns_.size() >= kNamesMax) turns_.clear();
  for (const addrinfo* a = found; a && addresses.size() < kAddressesMax; a = a->ai_next) {
    if (a->ai_family != AF_INET && a->ai_family != AF_INET6) continue;
    sockaddr_storage address{};
    std::memcpy(&address, a->ai_addr, a->ai_addrlen);
    (a->ai_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&address)->sin6_port
                              : reinterpret_cast<sockaddr_in*>(&address)->sin_port) = htons(dial.to.port);
    addresses.push_back(address);
  }
  if (addresses.empty())
    lost_later(dial.conn, fmt::format("{}: {}", dial.to.host, status != 0 ? uv_strerror(status) : "it has no address"));
  else
    connect(*c, dial.to, addresses[(c->turn = turns_[dial.to.host]) % addresses.size()]);
  drain();
}

void Driver::connect(Connection& c, const Endpoint& to, const sockaddr_storage& address) {
  const int fd = ::socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  int e = fd < 0 ? uv_translate_sys_error(errno) : uv_tcp_open(&c.tcp, fd);
  if (e != 0 && fd >= 0) ::close(fd);
  if (e == 0) begin_unpaced(fd);
  c.dialled_at = to_endpoint(address).host;
  c.small_segments = narrow_.small(c.dialled_at);
  if (e == 0 && c.small_segments) {
    constexpr int kSegment = NarrowPaths::kSegmentBytes;
    (void)::setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &kSegment, sizeof kSegment);
  }
  if (e == 0)
    e = uv_tcp_connect(&c.connect, &c.tcp, reinterpret_cast<const sockaddr*>(&address),
                       [](uv_connect_t* request, int status) {
                         Connection& connection = *static_cast<Connection*>(request->data);
                         if (status == UV_ECANCELED || connection.leaving()) return;  // being closed
                         Driver& d = *connection.driver;
                         if (status != 0)
                           d.lost(connection, uv_strerror(status));
                         else
                           d.opened(connection);
                         d.drain();
                       });
  if (e != 0) lost_later(c.id, fmt::format("{}: {}", to_text(to), uv_strerror(e)));
}

// Flushes, ends the output, and waits for the peer's end. Closing at once could destroy bytes in flight.
void Driver::leave(Connection& c) {
  if (c.leaving()) return;
  if (c.tls && c.tls->established()) c.tls->close_notify();
  if (c.readable) flush(c);
  c.move(Connection::Stage::kLeaving);
  proven(c);
  set_deadline(c, now() + kFlushMax);
  set_reading(c);
  c.shutdown.data = &c;
  if (!c.readable || uv_shutdown(&c.shutdown, stream(c.tcp), [](uv_shutdown_t*, int) {}) != 0) destroy(c);
}

void Driver::destroy(Connection& c) {
  const auto it = connections_.find(c.id);
  if (it == connections_.end() || it->second.get() != &c) return;
  c.move(Connection::Stage::kLeaving);
  proven(c);
  if (c.download) {
    gate_->over(c.id);
    later_.push_back([this] { take_bundle_turns(); });
  }
  set_deadline(c, kNever);
  (void)it->second.release();  // freed by its close callback
  connections_.erase(it);
  uv_close(handle(c.tcp), [](uv_handle_t* h) { delete static_cast<Connection*>(h->data); });
}

void Driver::set_deadline(Connection& c, TimePoint at) { deadlines_.move(c.id, c.deadline, at); }

void Driver::set_reading(Connection& c) {
  if (!c.readable) return;
  if ((!reading_ || c.held) && !c.leaving()) {
    uv_read_stop(stream(c.tcp));
    return;
  }
  uv_read_start(  // idempotent
      stream(c.tcp),
      [](uv_handle_t* h, std::size_t, uv_buf_t* buffer) {
        // libuv fills one buffer after another while more data waits. The driver takes one per turn, so that received
        // data does not delay outgoing data.
        Connection& connection = *static_cast<Connection*>(h->data);
        Driver& d = *connection.driver;
        const std::size_t most =
            std::exchange(connection.had_its_turn, false) ? 0 : d.core_->read_bytes_max(d.read_buffer_.size());
        *buffer = uv_buf_init(d.read_buffer_.data(), static_cast<unsigned>(most));
      },
      [](uv_stream_t* s, ssize_t n, const uv_buf_t* buffer) {
        Connection& connection = *static_cast<Connection*>(s->data);
        connection.driver->on_read(connection, n, buffer);
      });
}

Driver::Connection* Driver::find(ConnId id) {
  const auto it = connections_.find(id);
  return it == connections_.end() || it->second->leaving() ? nullptr : it->second.get();
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
  const TimePoint at =
      std::min({core_->next_deadline(), stop_at_, listener_.again_at, downloads_due_, deadlines_.first()});
  armed_for_ = at == kNever ? kNever : std::max(at, now());
  timer_.arm(at);
}

}  // namespace echoline::overlay
