#include "overlay/uv/driver.hpp"

#include "base/log.hpp"
#include "overlay/uv/address.hpp"
#include "overlay/uv/hosts.hpp"
#include "overlay/uv/stall.hpp"

namespace echoline::overlay {

Driver::Driver(DriverOptions options, Sessions sessions)
    : loop_({[this](TimePoint t) { on_timer(t); }, [this](Duration late) { connections_.postpone_deadlines(late); },
             [this] { drain(); }, [this] { end_if_stopped(); }}),
      disk_(std::move(options.disk)),
      bundle_(std::move(options.bundle)),
      sessions_(std::move(sessions)),
      listener_(loop_.loop(), [this](int status) { accept(status); }),
      dialler_(loop_.loop()),
      connections_(options.limits) {
  if (options.gate) downloads_.emplace(*std::move(options.gate), bundle_->size);
}

Result<std::unique_ptr<Driver>> Driver::open(DriverOptions options) {
  const auto bind = std::move(options.bind);
  const std::uint16_t preferred_port = options.preferred_port;
  ECHO_ASSIGN(Sessions sessions,
              Sessions::create(options.key, options.authority, options.run_id, options.admit_anonymous));
  std::unique_ptr<Driver> driver(new Driver(std::move(options), std::move(sessions)));
  if (bind) ECHO_TRY(driver->listener_.open(*bind, preferred_port));
  return driver;
}

Driver::~Driver() {
  ECHO_CHECK(!loop_.is_running(), "destroyed while running");
  disk_.reset();  // before the members that its thread posts to
}

void Driver::run(Core& core, std::function<void(const Action&)> to_application, std::function<void(TimePoint)> start) {
  core_ = &core;
  to_application_ = std::move(to_application);
  read_buffer_.resize(kReadBytes);
  loop_.start(std::move(start));
  if (!disk_) return;
  Disk::Events events;
  events.saved = [this](Status s) { post([this, s = std::move(s)](TimePoint t) { core_->on_saved(s, t); }); };
  events.spooled = [this](PublicationId id, std::uint32_t chunk, Status s) {
    post([this, id, chunk, s = std::move(s)](TimePoint t) { core_->on_spooled(id, chunk, s, t); });
  };
  events.chunk_read = [this](PublicationId id, std::uint32_t chunk, Result<Slice> data) {
    post([this, id, chunk, data = std::move(data)](TimePoint t) { core_->on_chunk_read(id, chunk, data, t); });
  };
  disk_->start(std::move(events));
}

void Driver::stop(std::function<void(TimePoint)> leave) {
  if (!loop_.is_running()) return;
  post([this, leave = std::move(leave)](TimePoint t) {
    leave(t);
    stop_at_ = t + kFlushMax;
    listener_.stop();
  });
  loop_.join();
}

void Driver::check() const {
  listener_.check();
  dialler_.check();
  connections_.check();
  if (downloads_) downloads_->check();
  ECHO_CHECK(!draining_ && later_.empty(), "{} events wait", later_.size());
}

// ---- events ----

void Driver::on_timer(TimePoint t) {
  while (connections_.first_deadline() <= t) {
    Connection& c = connections_.first_due();
    if (c.leaving() || !c.dialled) {
      destroy(c);  // accepted without a handshake in time, or a flush that takes too long
      continue;
    }
    if (const int fd = c.socket.fd(); c.tls && fd >= 0)
      dialler_.narrow().stalled(c.dialled->address, c.dialled->small_segments, stall_of(fd));
    lost(c, fmt::format("no answer within {}", echoline::to_text(Core::kHandshakeTimeout)));
  }
  listener_.resume(t);
  if (downloads_)
    for (const ConnId id : downloads_->take_due(t))
      if (Connection* c = connections_.find(id)) read_bundle(*c);
  core_->on_timer(t);
  drain();
  end_if_stopped();
}

void Driver::end_if_stopped() {
  if (stop_at_ == kNever) return;
  if (now() < stop_at_ && connections_.any_leaving()) return;  // still flushing
  if (!loop_.close()) return;
  while (Connection* c = connections_.any()) destroy(*c);
}

void Driver::accept(int status) {
  if (status != 0) {
    if ((status == UV_EMFILE || status == UV_ENFILE) && make_room()) return;
    log::warn("no connection is accepted for {}: {}", echoline::to_text(Listener::kPause), uv_strerror(status));
    listener_.pause(now());
    return arm_timer();
  }
  const bool full = connections_.is_full() && !make_room();
  Connection& c = connections_.add_accepted(loop_.loop(), *this);
  sockaddr_storage peer{};
  if (c.socket.accept(listener_.stream(), peer) != 0 || full || !sessions_.has_certificate()) return destroy(c);
  c.host = to_endpoint(peer).host;
  connections_.set_unproven(c, network_of(c.host));
  if (connections_.has_too_many_unproven()) make_room();
  c.socket.tune(true);
  auto session = sessions_.server(core_->run_unix_s(now()));
  if (!session) {
    log::error("{}", session.error().message());
    return destroy(c);
  }
  c.tls.emplace(*std::move(session));
  connections_.set_deadline(c, now() + Core::kHandshakeTimeout);
  apply_reading(c);
  arm_timer();
}

// Ends the least valuable connection. False: there is none.
bool Driver::make_room() {
  Connection* const least = connections_.least_valuable();
  if (least) destroy(*least);
  return least != nullptr;
}

// Starts TLS.
void Driver::on_connected(Connection& c, int status) {
  if (c.leaving()) return;
  if (status != 0) {
    lost(c, uv_strerror(status));
    return drain();
  }
  c.socket.tune(c.dialled->service == act::Service::kData);
  if (auto session = sessions_.client(c.dialled->service, c.dialled->expected, core_->run_unix_s(now()))) {
    c.tls.emplace(*std::move(session));
    apply_reading(c);
    flush(c);
  } else {
    lost(c, session.error().detail);
  }
  drain();
}

uv_buf_t Driver::read_buffer() {
  return uv_buf_init(read_buffer_.data(), static_cast<unsigned>(core_->read_bytes_max(read_buffer_.size())));
}

void Driver::on_read(Connection& c, ssize_t n, const char* bytes) {
  if (n < 0) {
    if (c.leaving())
      destroy(c);
    else
      lost(c, n == UV_EOF ? "closed by the peer" : uv_strerror(static_cast<int>(n)));
    drain();
    return end_if_stopped();
  }
  if (c.leaving()) return;
  connections_.set_last_read(c);
  if (!c.is(Stage::kOpening)) core_->on_received(static_cast<std::size_t>(n), now());
  const ConnId id = c.id;
  c.tls->feed(std::as_bytes(std::span(bytes, static_cast<std::size_t>(n))));
  while (on_plaintext(c)) {
  }
  if (Connection* still = connections_.find(id); still && still->tls->has_output()) flush(*still);
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
    if (c.is(Stage::kOpening) && !c.dialled) log::debug("{}: {}", c.host, reason);
    lost(c, reason);
    return false;
  }
  if (c.is(Stage::kOpening) && c.tls->established()) {
    on_handshake_done(c);
    if (c.leaving()) return false;
  }
  if (*n == 0) {
    if (c.tls->peer_closed()) lost(c, "closed by the peer");
    return false;
  }
  if (c.is(Stage::kFetching)) return true;  // it has asked already
  if (!std::exchange(c.heard, true) && downloads_ && !c.dialled && BundleGate::is_request(room.front())) {
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
    return connections_.find(id) != nullptr;
  }
  return true;
}

void Driver::on_handshake_done(Connection& c) {
  c.move(Stage::kOpen);
  connections_.set_proven(c);
  connections_.set_deadline(c, kNever);
  if (c.tls->has_output()) flush(c);
  if (c.dialled) {
    const WorkerId peer = c.dialled->expected;
    const auto found = dialler_.narrow().passed(c.dialled->address, c.dialled->small_segments);
    core_->on_connected(c.id, now());
    if (found) core_->on_large_packets_dropped(peer, *found, now());
  } else {
    core_->on_accepted(c.id, {c.host, c.tls->identity()}, now());
  }
  drain();
}

void Driver::on_written(Connection& c, std::size_t plain) {
  if (c.leaving()) return;
  if (plain) core_->on_sent(c.id, plain, now());
  if (c.is(Stage::kFetching)) read_bundle(c);
  drain();
}

// The connection broke or its bytes are invalid: reports it to the core and closes it without a flush.
void Driver::lost(Connection& c, const std::string& reason, bool corrupt) {
  const ConnId id = c.id;
  const bool opening = c.is(Stage::kOpening), tell = c.is(Stage::kOpen) || (opening && c.dialled);
  if (opening && c.dialled) dialler_.turns().failed(c.host, c.dialled->turn);
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
    if (Connection* c = connections_.find(id)) lost(*c, why);
  });
}

// ---- actions ----

void Driver::drain() {
  if (draining_) return;
  draining_ = true;
  for (;;) {
    for (Action& action : core_->take_actions()) perform(std::move(action));
    connections_.flush_dirty([this](Connection& c) { flush(c); });
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
    if (Connection* c = connections_.find(close->conn)) leave(*c);
    return;
  }
  if (const auto* admit = std::get_if<act::Admit>(&action)) {
    if (Connection* c = connections_.find(admit->conn)) {
      c->decoder.admit();
      c->tls->keep_buffers();
    }
    return;
  }
  if (const auto* reading = std::get_if<act::SetReading>(&action)) return set_reading(*reading);
  if (const auto* use = std::get_if<act::UseCertificate>(&action)) {
    if (const Status used = sessions_.use(*use); !used)
      log::error("a certificate cannot be used: {}", used.error().message());
    return;
  }
  if (auto* save = std::get_if<act::SaveState>(&action)) return disk_->save(std::move(*save));
  if (auto* spool = std::get_if<act::Spool>(&action)) return disk_->spool(std::move(*spool));
  if (const auto* read_chunk = std::get_if<act::ReadChunk>(&action)) return disk_->read_chunk(*read_chunk);
  if (const auto* drop = std::get_if<act::DropSpool>(&action)) return disk_->drop(*drop);
  if (auto* deliver = std::get_if<act::Deliver>(&action); deliver && deliver->spooled) {
    auto file = disk_->payload(*deliver->spooled);
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

void Driver::send(const act::Send& send) {
  Connection* c = connections_.find(send.conn);
  if (!c || !c->tls) return;
  for (const Slice& part : {send.head, send.tail})
    if (!part.empty())
      if (const Status written = c->tls->write(part.bytes(), c->socket.block()); !written)
        return log::debug("{}", written.error().message());
  c->socket.count(send.head.size() + send.tail.size());
  connections_.mark_dirty(*c);
}

void Driver::dial(const act::Dial& dial) {
  Connection& c = connections_.add(loop_.loop(), *this, dial.conn);
  c.host = dial.to.host;
  c.dialled = Connection::Dialled{dial.service, dial.expected, 0, {}, false};
  connections_.set_deadline(c, now() + Core::kHandshakeTimeout);
  dialler_.find(dial.to, [this, id = dial.conn, to = dial.to](const FoundAddress& found) {
    if (Connection* still = connections_.find(id)) connect(*still, to, found);
    drain();
  });
}

void Driver::connect(Connection& c, const Endpoint& to, const FoundAddress& found) {
  if (!found.failure.empty()) return lost_later(c.id, found.failure);
  c.dialled->turn = found.turn;
  c.dialled->address = to_endpoint(found.address).host;
  c.dialled->small_segments = dialler_.narrow().small(c.dialled->address);
  if (const int e = c.socket.connect(found.address, c.dialled->small_segments); e != 0)
    lost_later(c.id, fmt::format("{}: {}", to_text(to), uv_strerror(e)));
}

void Driver::set_reading(const act::SetReading& reading) {
  if (!reading.conn) {
    reading_ = reading.on;
    return connections_.for_each_in_turn([this](Connection& c) { apply_reading(c); });
  }
  if (Connection* c = connections_.find(*reading.conn)) {
    c->held = !reading.on;
    apply_reading(*c);
  }
}

void Driver::apply_reading(Connection& c) {
  if ((reading_ && !c.held) || c.leaving())
    c.socket.start_reading();
  else
    c.socket.stop_reading();
}

void Driver::flush(Connection& c) {
  if (c.tls && c.tls->has_output()) {
    const std::vector<std::byte> own = c.tls->take_output();
    c.socket.block().insert(c.socket.block().end(), own.begin(), own.end());
  }
  Socket::Flushed flushed = c.socket.flush();
  if (!flushed.failure.empty()) return lost_later(c.id, std::move(flushed.failure));
  if (flushed.plain)
    later_.push_back([this, id = c.id, plain = flushed.plain] {
      if (connections_.find(id)) core_->on_sent(id, plain, now());
    });
  if (flushed.all) drain();
}

// Flushes, ends the output, and waits for the peer's end. Closing at once could destroy bytes in flight.
void Driver::leave(Connection& c) {
  if (c.leaving()) return;
  if (c.tls && c.tls->established()) c.tls->close_notify();
  if (c.socket.is_connected()) flush(c);
  c.move(Stage::kLeaving);
  connections_.set_proven(c);
  connections_.set_deadline(c, now() + kFlushMax);
  apply_reading(c);
  if (!c.socket.shut_down()) destroy(c);
}

void Driver::destroy(Connection& c) {
  if (!connections_.release(c)) return;
  c.move(Stage::kLeaving);
  if (downloads_ && downloads_->remove(c.id)) later_.push_back([this] { take_bundle_turns(); });
  c.socket.close();
}

void Driver::arm_timer() {
  const TimePoint downloads = downloads_ ? downloads_->due() : kNever;
  loop_.arm(
      std::min({core_->next_deadline(), stop_at_, listener_.resumes_at(), downloads, connections_.first_deadline()}));
}

}  // namespace echoline::overlay
