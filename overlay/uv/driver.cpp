// Carries events of sockets, disk and timer to the core, and performs its actions. Used by the nodes (uv/node.cpp).
#include "overlay/uv/driver.hpp"

#include "base/log.hpp"
#include "overlay/uv/address.hpp"
#include "overlay/uv/hosts.hpp"
#include "overlay/uv/stall.hpp"

namespace echoline::overlay {

Driver::Driver(DriverOptions options, Sessions sessions)
    : loop_(LoopThread::Events{.timer = [this](TimePoint fired_at) { on_timer(fired_at); },
                               .paused = [this](Duration pause) { connections_.postpone_deadlines(pause); },
                               .after_work = [this] { perform_actions(); },
                               .idle = [this] { end_if_stopped(); }}),
      disk_(std::move(options.disk)),
      bundle_(std::move(options.bundle)),
      sessions_(std::move(sessions)),
      listener_(loop_.loop(), [this](int status) { accept(status); }),
      dialler_(loop_.loop()),
      connections_(options.limits) {
  if (options.gate) downloads_.emplace(*std::move(options.gate), bundle_->size);
  if (options.relay)
    relay_.emplace(loop_.loop(), *std::move(options.relay),
                   [this](const relay::Invitation& invitation) { accept_relayed(invitation); });
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
  disk_.reset();  // ends the disk's thread before the members that this thread uses
}

void Driver::run(Core& core, std::function<void(const Action&)> to_application, std::function<void(TimePoint)> start) {
  core_ = &core;
  to_application_ = std::move(to_application);
  read_buffer_.resize(kReadBytes);
  loop_.start([this, start = std::move(start)](TimePoint called_at) {
    start(called_at);
    if (relay_) relay_->start();
  });
  if (!disk_) return;
  Disk::Events events;
  events.saved = [this](Status status) {
    post([this, status = std::move(status)](TimePoint called_at) { core_->on_saved(status, called_at); });
  };
  events.spooled = [this](PublicationId id, std::uint32_t chunk, Status status) {
    post([this, id, chunk, status = std::move(status)](TimePoint called_at) {
      core_->on_spooled(id, chunk, status, called_at);
    });
  };
  events.chunk_read = [this](PublicationId id, std::uint32_t chunk, Result<Slice> data) {
    post([this, id, chunk, data = std::move(data)](TimePoint called_at) {
      core_->on_chunk_read(id, chunk, data, called_at);
    });
  };
  disk_->start(std::move(events));
}

void Driver::stop(std::function<void(TimePoint)> leave) {
  if (!loop_.is_running()) return;
  post([this, leave = std::move(leave)](TimePoint called_at) {
    leave(called_at);
    stop_at_ = called_at + kFlushMax;
    listener_.stop();
  });
  loop_.join();
}

void Driver::check() const {
  listener_.check();
  dialler_.check();
  connections_.check();
  if (downloads_) downloads_->check();
  ECHO_CHECK(!is_performing_ && deferred_events_.empty(), "{} events wait", deferred_events_.size());
}

// ---- events ----

void Driver::on_timer(TimePoint fired_at) {
  while (connections_.first_deadline() <= fired_at) {
    Connection& connection = connections_.with_first_deadline();
    if (connection.is_leaving() || !connection.dialled) {
      close_at_once(connection);  // accepted without a handshake in time, or a flush that takes too long
      continue;
    }
    if (const int fd = connection.socket.fd(); connection.tls && fd >= 0)
      dialler_.narrow_paths().on_handshake_timeout(connection.dialled->address, connection.dialled->small_segments,
                                                   stall_of(fd));
    on_lost(connection, fmt::format("no answer within {}", echoline::to_text(Core::kHandshakeTimeout)));
  }
  listener_.resume(fired_at);
  if (downloads_)
    for (const ConnId id : downloads_->take_due(fired_at))
      if (Connection* connection = connections_.find(id)) read_bundle(*connection);
  core_->on_timer(fired_at);
  perform_actions();
  end_if_stopped();
}

void Driver::end_if_stopped() {
  if (stop_at_ == kNever) return;
  if (now() < stop_at_ && connections_.any_is_leaving()) return;  // still flushing
  if (!loop_.close()) return;
  if (relay_) relay_->close();
  while (Connection* connection = connections_.any()) close_at_once(*connection);
}

void Driver::accept(int status) {
  if (status != 0) {
    if ((status == UV_EMFILE || status == UV_ENFILE) && make_room()) return;
    log::warn("no connection is accepted for {}: {}", echoline::to_text(Listener::kPause), uv_strerror(status));
    listener_.pause(now());
    return arm_timer();
  }
  // A connection that is too many is accepted and closed, because libuv would report a waiting one again and again.
  const bool is_full = connections_.is_full() && !make_room();
  Connection& connection = connections_.add_accepted(loop_.loop(), *this);
  sockaddr_storage peer{};
  if (connection.socket.accept(listener_.stream(), peer) != 0 || is_full || !sessions_.has_certificate())
    return close_at_once(connection);
  connection.host = to_endpoint(peer).host;
  connections_.set_unproven(connection, network_of(connection.host));
  if (connections_.has_too_many_unproven()) make_room();
  if (begin_accepted(connection)) connections_.set_deadline(connection, now() + Core::kHandshakeTimeout);
  arm_timer();
}

// Waits for the handshake of a peer that has dialled this node. False: the connection is closed.
bool Driver::begin_accepted(Connection& connection) {
  connection.socket.tune(/*bulk=*/true);  // in case it is one for chunks: its purpose is not known yet
  auto session = sessions_.server(core_->run_unix_s(now()));
  if (!session) {
    log::error("{}", session.error().message());
    close_at_once(connection);
    return false;
  }
  connection.tls.emplace(*std::move(session));
  apply_reading(connection);
  return true;
}

// A peer has dialled this node's relay. From here on, the connection to the relay counts as one from that peer.
void Driver::accept_relayed(const relay::Invitation& invitation) {
  if (stop_at_ != kNever || (connections_.is_full() && !make_room()) || !sessions_.has_certificate()) return;
  Connection& connection = connections_.add_accepted(loop_.loop(), *this);
  connection.host = invitation.client_host;
  connection.relay_greeting = invitation.greeting;
  connections_.set_unproven(connection, network_of(connection.host));
  if (connections_.has_too_many_unproven()) make_room();
  connections_.set_deadline(connection, now() + Core::kHandshakeTimeout);
  if (const int error = connection.socket.connect(invitation.relay, /*small_segments=*/false); error != 0) {
    log::warn("a worker cannot be met at the relay: {}", uv_strerror(error));
    close_at_once(connection);
  }
  arm_timer();
}

// Closes the connection that is needed least. False: there is none to close.
bool Driver::make_room() {
  Connection* const to_close = connections_.first_to_close();
  if (to_close) close_at_once(*to_close);
  return to_close != nullptr;
}

// The TCP connection is open, or has failed. Starts TLS.
void Driver::on_connected(Connection& connection, int status) {
  if (connection.is_leaving()) return;
  if (status != 0) {
    on_lost(connection, uv_strerror(status));
    return perform_actions();
  }
  if (!connection.dialled) {
    const auto greeting = std::as_bytes(std::span(connection.relay_greeting));
    connection.socket.block().assign(greeting.begin(), greeting.end());
    if (begin_accepted(connection)) flush(connection);
    return perform_actions();
  }
  connection.socket.tune(connection.dialled->service == act::Service::kData);
  if (auto session =
          sessions_.client(connection.dialled->service, connection.dialled->expected, core_->run_unix_s(now()))) {
    connection.tls.emplace(*std::move(session));
    apply_reading(connection);
    flush(connection);
  } else {
    on_lost(connection, session.error().detail);
  }
  perform_actions();
}

uv_buf_t Driver::read_buffer() {
  return uv_buf_init(read_buffer_.data(), static_cast<unsigned>(core_->read_bytes_max(read_buffer_.size())));
}

void Driver::on_read(Connection& connection, ssize_t result, const char* bytes) {
  if (result < 0) {
    if (connection.is_leaving())
      close_at_once(connection);
    else
      on_lost(connection, result == UV_EOF ? "closed by the peer" : uv_strerror(static_cast<int>(result)));
    perform_actions();
    return end_if_stopped();
  }
  if (connection.is_leaving()) return;
  connections_.set_last_read(connection);
  // Handshakes are short, and do not count for the download limit.
  if (!connection.is(Stage::kOpening)) core_->on_received(static_cast<std::size_t>(result), now());
  const ConnId id = connection.id;
  connection.tls->feed(std::as_bytes(std::span(bytes, static_cast<std::size_t>(result))));
  while (read_plaintext(connection)) {
  }
  if (Connection* remaining = connections_.find(id); remaining && remaining->tls->has_output()) flush(*remaining);
  perform_actions();
  end_if_stopped();
}

// Decrypts the next piece directly to its destination. False if there is none, or the connection is over.
bool Driver::read_plaintext(Connection& connection) {
  const std::span<std::byte> room = connection.decoder.room();
  const auto bytes_read = connection.tls->read(room);
  if (!bytes_read) {
    flush(connection);  // tells the peer the reason
    const std::string reason = bytes_read.error().message();
    if (connection.is(Stage::kOpening) && !connection.dialled) log::debug("{}: {}", connection.host, reason);
    on_lost(connection, reason);
    return false;
  }
  if (connection.is(Stage::kOpening) && connection.tls->established()) {
    on_handshake_done(connection);
    if (connection.is_leaving()) return false;
  }
  if (*bytes_read == 0) {
    if (connection.tls->peer_closed()) on_lost(connection, "closed by the peer");
    return false;
  }
  if (connection.is(Stage::kFetching)) return true;  // ignores what the peer sends after its request
  if (!std::exchange(connection.has_received, true) && downloads_ && !connection.dialled &&
      BundleGate::is_request(room.front())) {
    begin_request(connection, std::string(reinterpret_cast<const char*>(room.data()), *bytes_read));
    return false;
  }
  if (const Status advanced = connection.decoder.advance(*bytes_read); !advanced) {
    on_lost(connection, advanced.error().message(), /*corrupt=*/true);
    return false;
  }
  if (auto frame = connection.decoder.take()) {
    const ConnId id = connection.id;
    core_->on_frame(id, std::move(*frame), now());
    perform_actions();
    return connections_.find(id) != nullptr;
  }
  return true;
}

void Driver::on_handshake_done(Connection& connection) {
  connection.move_to(Stage::kOpen);
  connections_.set_proven(connection);
  connections_.set_deadline(connection, kNever);
  if (connection.tls->has_output()) flush(connection);
  if (connection.dialled) {
    const WorkerId peer = connection.dialled->expected;
    const auto narrow_path =
        dialler_.narrow_paths().on_handshake_done(connection.dialled->address, connection.dialled->small_segments);
    core_->on_connected(connection.id, now());
    if (narrow_path) core_->on_large_packets_dropped(peer, *narrow_path, now());
  } else {
    core_->on_accepted(connection.id, {connection.host, connection.tls->identity()}, now());
  }
  perform_actions();
}

void Driver::on_written(Connection& connection, std::size_t frame_bytes) {
  if (connection.is_leaving()) return;
  if (frame_bytes) core_->on_sent(connection.id, frame_bytes, now());
  if (connection.is(Stage::kFetching)) read_bundle(connection);
  perform_actions();
}

// The connection broke or its bytes are invalid: reports it to the core and closes it without a flush.
void Driver::on_lost(Connection& connection, const std::string& reason, bool corrupt) {
  const ConnId id = connection.id;
  const bool is_failed_dial = connection.is(Stage::kOpening) && connection.dialled;
  const bool core_knows_it = connection.is(Stage::kOpen) || is_failed_dial;
  if (is_failed_dial) dialler_.turns().on_failed(connection.host, connection.dialled->address_turn);
  close_at_once(connection);
  if (!core_knows_it) return;
  if (corrupt)
    core_->on_corrupt(id, reason, now());
  else
    core_->on_closed(id, reason, now());
}

// Like on_lost(), for a loss that is found while an action is performed: notifies the core afterwards.
void Driver::report_lost_later(ConnId id, std::string reason) {
  deferred_events_.push_back([this, id, why = std::move(reason)] {
    if (Connection* connection = connections_.find(id)) on_lost(*connection, why);
  });
}

// ---- actions ----

void Driver::perform_actions() {
  if (is_performing_) return;
  is_performing_ = true;
  for (;;) {
    for (Action& action : core_->take_actions()) perform(std::move(action));
    connections_.flush_marked([this](Connection& connection) { flush(connection); });
    if (deferred_events_.empty()) break;
    for (const auto& event : std::exchange(deferred_events_, {})) event();
  }
  is_performing_ = false;
  arm_timer();
}

void Driver::perform(Action&& action) {
  if (const auto* sent = std::get_if<act::Send>(&action)) return send(*sent);
  if (const auto* dialled = std::get_if<act::Dial>(&action)) return dial(*dialled);
  if (const auto* close = std::get_if<act::Close>(&action)) {
    if (Connection* connection = connections_.find(close->conn)) close_after_flush(*connection);
    return;
  }
  if (const auto* admit = std::get_if<act::Admit>(&action)) {
    if (Connection* connection = connections_.find(admit->conn)) {
      connection->decoder.admit();
      connection->tls->keep_buffers();  // an admitted peer sends often
    }
    return;
  }
  if (const auto* reading = std::get_if<act::SetReading>(&action)) return set_reading(*reading);
  if (const auto* use = std::get_if<act::UseCertificate>(&action)) {
    if (const Status used = sessions_.use_certificate(*use); !used)
      log::error("a certificate cannot be used: {}", used.error().message());
    return;
  }
  if (auto* save = std::get_if<act::SaveState>(&action)) return disk_->save(std::move(*save));
  if (auto* spool = std::get_if<act::Spool>(&action)) return disk_->spool(std::move(*spool));
  if (const auto* read_chunk = std::get_if<act::ReadChunk>(&action)) return disk_->read_chunk(*read_chunk);
  if (const auto* drop = std::get_if<act::DropSpool>(&action)) return disk_->drop(*drop);
  if (auto* deliver = std::get_if<act::DeliverPublication>(&action); deliver && deliver->spooled) {
    auto file = disk_->open_payload(*deliver->spooled);
    if (!file) {
      post([this, version = deliver->publication.version, why = file.error().message()](TimePoint called_at) {
        core_->on_delivery_failed(version, why, called_at);
      });
      return;
    }
    deliver->publication.payload = Payload(*std::move(file), deliver->bytes);
  }
  to_application_(action);
}

void Driver::send(const act::Send& send) {
  Connection* connection = connections_.find(send.conn);
  if (!connection || !connection->tls) return;
  for (const Slice& part : {send.head, send.tail})
    if (!part.empty())
      if (const Status written = connection->tls->write(part.bytes(), connection->socket.block()); !written)
        return log::debug("{}", written.error().message());
  connection->socket.count_frame_bytes(send.head.size() + send.tail.size());
  connections_.mark_for_flush(*connection);
}

void Driver::dial(const act::Dial& dial) {
  Connection& connection = connections_.add(loop_.loop(), *this, dial.conn);
  connection.host = dial.to.host;
  connection.dialled = Connection::Dialled{
      .service = dial.service, .expected = dial.expected, .address_turn = 0, .address = {}, .small_segments = false};
  connections_.set_deadline(connection, now() + Core::kHandshakeTimeout);
  dialler_.find_address(dial.to, [this, id = dial.conn, to = dial.to](const FoundAddress& found) {
    if (Connection* remaining = connections_.find(id)) connect(*remaining, to, found);
    perform_actions();
  });
}

void Driver::connect(Connection& connection, const Endpoint& to, const FoundAddress& found) {
  if (!found.failure.empty()) return report_lost_later(connection.id, found.failure);
  connection.dialled->address_turn = found.turn;
  connection.dialled->address = to_endpoint(found.address).host;
  connection.dialled->small_segments = dialler_.narrow_paths().wants_small_segments(connection.dialled->address);
  if (const int error = connection.socket.connect(found.address, connection.dialled->small_segments); error != 0)
    report_lost_later(connection.id, fmt::format("{}: {}", to_text(to), uv_strerror(error)));
}

void Driver::set_reading(const act::SetReading& reading) {
  if (!reading.conn) {
    is_reading_ = reading.on;
    return connections_.for_each_in_turn([this](Connection& connection) { apply_reading(connection); });
  }
  if (Connection* connection = connections_.find(*reading.conn)) {
    connection->reading_paused = !reading.on;
    apply_reading(*connection);
  }
}

void Driver::apply_reading(Connection& connection) {
  if ((is_reading_ && !connection.reading_paused) || connection.is_leaving())
    connection.socket.start_reading();
  else
    connection.socket.stop_reading();
}

void Driver::flush(Connection& connection) {
  if (connection.tls && connection.tls->has_output()) {
    const std::vector<std::byte> session_bytes = connection.tls->take_output();  // of the handshake, or an alert
    connection.socket.block().insert(connection.socket.block().end(), session_bytes.begin(), session_bytes.end());
  }
  Socket::Flushed flushed = connection.socket.flush();
  if (!flushed.failure.empty()) return report_lost_later(connection.id, std::move(flushed.failure));
  if (flushed.frame_bytes)
    deferred_events_.push_back([this, id = connection.id, frame_bytes = flushed.frame_bytes] {
      if (connections_.find(id)) core_->on_sent(id, frame_bytes, now());
    });
  if (flushed.all) perform_actions();  // runs the event just queued, unless a caller performs actions already
}

// Flushes, ends the output, and waits for the peer's end. Closing without a flush could destroy bytes in flight.
void Driver::close_after_flush(Connection& connection) {
  if (connection.is_leaving()) return;
  if (connection.tls && connection.tls->established()) connection.tls->close_notify();
  if (connection.socket.is_connected()) flush(connection);
  connection.move_to(Stage::kLeaving);
  connections_.set_proven(connection);  // no longer counts as one whose handshake is due; the flush has its own time
  connections_.set_deadline(connection, now() + kFlushMax);
  apply_reading(connection);
  if (!connection.socket.shut_down()) close_at_once(connection);
}

void Driver::close_at_once(Connection& connection) {
  if (!connections_.release(connection)) return;
  connection.move_to(Stage::kLeaving);
  if (downloads_ && downloads_->remove(connection.id)) deferred_events_.push_back([this] { take_bundle_turns(); });
  connection.socket.close();
}

void Driver::arm_timer() {
  const TimePoint downloads = downloads_ ? downloads_->next_due_at() : kNever;
  loop_.arm(
      std::min({core_->next_deadline(), stop_at_, listener_.resumes_at(), downloads, connections_.first_deadline()}));
}

}  // namespace echoline::overlay
