// Connects to the relay with libuv, and again after every loss. Called by the learner's driver.
#include "overlay/relay/relay_link.hpp"

#include <netinet/tcp.h>

#include "base/log.hpp"
#include "overlay/uv/address.hpp"

namespace echoline::overlay::relay {
namespace {

constexpr Duration kHandshakeTimeout = std::chrono::seconds(10);
constexpr int kSilentPingsMax = static_cast<int>(kSilenceMax / kPingEvery);

std::uint64_t in_ms(Duration duration) { return static_cast<std::uint64_t>(seconds(duration) * 1e3); }

}  // namespace

struct RelayLink::Socket {
  uv_tcp_t tcp{};
  uv_connect_t connect{};
  RelayLink* link = nullptr;  // null: the link has dropped this socket
};

RelayLink::RelayLink(uv_loop_t& loop, LinkOptions options, std::function<void(const Invitation&)> on_invitation)
    : loop_(loop),
      options_(std::move(options)),
      on_invitation_(std::move(on_invitation)),
      dialler_(loop),
      timer_(new uv_timer_t) {
  uv_timer_init(&loop_, timer_);
  timer_->data = this;
}

RelayLink::~RelayLink() { close(); }

void RelayLink::start() { connect(); }

void RelayLink::close() {
  if (stage_ == Stage::kClosed) return;
  drop_socket();
  stage_ = Stage::kClosed;
  uv_close(reinterpret_cast<uv_handle_t*>(timer_),
           [](uv_handle_t* handle) { delete reinterpret_cast<uv_timer_t*>(handle); });
}

void RelayLink::arm(Duration after) {
  uv_timer_start(
      timer_, [](uv_timer_t* timer) { static_cast<RelayLink*>(timer->data)->on_timer(); }, in_ms(after), /*repeat=*/0);
}

void RelayLink::on_timer() {
  if (stage_ == Stage::kIdle) return connect();
  if (stage_ != Stage::kRegistered)
    return on_lost(fmt::format("no answer within {}", echoline::to_text(kHandshakeTimeout)));
  if (silent_pings_ >= kSilentPingsMax) return on_lost(fmt::format("no answer for {}", echoline::to_text(kSilenceMax)));
  ++silent_pings_;
  write(frames_->seal(ControlFrame::Type::kPing));
  if (stage_ == Stage::kRegistered) arm(kPingEvery);
}

void RelayLink::connect() {
  stage_ = Stage::kConnecting;
  arm(kHandshakeTimeout);
  dialler_.find_address(options_.relay, [this](const FoundAddress& found) {
    if (stage_ == Stage::kConnecting && !socket_) on_address(found);  // otherwise it took too long
  });
}

void RelayLink::on_address(const FoundAddress& found) {
  address_ = found;
  if (!found.failure.empty()) return on_lost(found.failure);
  socket_ = new Socket;
  socket_->link = this;
  uv_tcp_init(&loop_, &socket_->tcp);
  socket_->tcp.data = socket_->connect.data = socket_;
  const int error = uv_tcp_connect(&socket_->connect, &socket_->tcp, reinterpret_cast<const sockaddr*>(&found.address),
                                   [](uv_connect_t* request, int status) {
                                     if (RelayLink* const link = static_cast<Socket*>(request->data)->link)
                                       link->on_connected(status);
                                   });
  if (error != 0) on_lost(uv_strerror(error));
}

void RelayLink::on_connected(int status) {
  if (status != 0) {
    dialler_.turns().on_failed(options_.relay.host, address_.turn);
    return on_lost(uv_strerror(status));
  }
  uv_tcp_nodelay(&socket_->tcp, 1);
  stage_ = Stage::kGreeted;
  nonce_ = random_nonce();
  relay_nonce_.clear();
  uv_read_start(
      reinterpret_cast<uv_stream_t*>(&socket_->tcp),
      [](uv_handle_t* handle, std::size_t, uv_buf_t* buffer) {
        RelayLink* const link = static_cast<Socket*>(handle->data)->link;
        *buffer = link ? uv_buf_init(link->buffer_.data(), static_cast<unsigned>(link->buffer_.size()))
                       : uv_buf_init(nullptr, 0);
      },
      [](uv_stream_t* handle, ssize_t size, const uv_buf_t*) {
        RelayLink* const link = static_cast<Socket*>(handle->data)->link;
        if (link && size != 0) link->on_read(size);
      });
  write(control_greeting(nonce_));
}

void RelayLink::on_read(ssize_t size) {
  if (size < 0) return on_lost(size == UV_EOF ? "it has closed the connection" : uv_strerror(static_cast<int>(size)));
  std::string_view bytes(buffer_.data(), static_cast<std::size_t>(size));
  if (stage_ == Stage::kGreeted) {
    Nonce relay_nonce;
    const std::string_view part = bytes.substr(0, relay_nonce.size() - relay_nonce_.size());
    relay_nonce_ += part;
    bytes.remove_prefix(part.size());
    if (relay_nonce_.size() < relay_nonce.size()) return;
    std::copy_n(reinterpret_cast<const std::byte*>(relay_nonce_.data()), relay_nonce.size(), relay_nonce.begin());
    const Mac session = session_key(options_.key, nonce_, relay_nonce, options_.run_key.public_key());
    frames_.emplace(session, ControlFrames::End::kLearner);
    stage_ = Stage::kAnswered;
    write(answer(options_.key, options_.run_key, nonce_, relay_nonce));
    if (stage_ != Stage::kAnswered) return;
  }
  frames_->feed(bytes);
  while (stage_ == Stage::kAnswered || stage_ == Stage::kRegistered) {
    auto frame = frames_->take();
    Status handled = frame ? ok() : Status(frame.error());
    if (frame && !*frame) return;
    if (frame) handled = handle(**std::move(frame));
    if (!handled) return on_lost(handled.error().detail);
  }
}

Status RelayLink::handle(ControlFrame frame) {
  using Type = ControlFrame::Type;
  silent_pings_ = 0;
  if (frame.type == Type::kRefused) return fail(Code::kInvalid, "relay", "it refuses this run: {}", frame.body);
  if (stage_ == Stage::kAnswered) {
    if (frame.type != Type::kAccepted) return fail(Code::kCorrupt, "relay", "expected its acceptance");
    stage_ = Stage::kRegistered;
    retry_after_ = kRetryMin;
    last_trouble_.clear();
    arm(kPingEvery);
    log::info("workers can reach this run through the relay {}", to_text(options_.relay));
    return ok();
  }
  if (frame.type == Type::kPong) return ok();
  Ticket ticket;
  if (frame.type != Type::kOpen || frame.body.size() < ticket.size())
    return fail(Code::kCorrupt, "relay", "expected a ticket, found a frame of type {}", static_cast<int>(frame.type));
  std::copy_n(reinterpret_cast<const std::byte*>(frame.body.data()), ticket.size(), ticket.begin());
  on_invitation_({.relay = address_.address,
                  .greeting = ticket_greeting(ticket, ticket_proof(frames_->session(), ticket)),
                  .client_host = frame.body.substr(ticket.size())});
  return ok();
}

// Control frames are few and short, so the system takes them at once. If it does not, the relay has stopped reading.
void RelayLink::write(std::string bytes) {
  uv_buf_t buffer = uv_buf_init(bytes.data(), static_cast<unsigned>(bytes.size()));
  const int written = uv_try_write(reinterpret_cast<uv_stream_t*>(&socket_->tcp), &buffer, 1);
  if (written != static_cast<int>(bytes.size()))
    on_lost(written < 0 ? uv_strerror(written) : "it does not read what this learner sends");
}

void RelayLink::on_lost(const std::string& why) {
  const bool was_registered = stage_ == Stage::kRegistered;
  drop_socket();
  stage_ = Stage::kIdle;
  if (was_registered || why != last_trouble_)
    log::warn(
        "the relay {} is {}: {}. The run goes on with the workers that reach it directly; the relay is tried again "
        "every {} at most",
        to_text(options_.relay), was_registered ? "lost" : "not available", why, echoline::to_text(kRetryMax));
  last_trouble_ = why;
  arm(retry_after_);
  retry_after_ = std::min(2 * retry_after_, kRetryMax);
}

void RelayLink::drop_socket() {
  frames_.reset();
  if (!socket_) return;
  Socket* const socket = std::exchange(socket_, nullptr);
  socket->link = nullptr;
  uv_close(reinterpret_cast<uv_handle_t*>(&socket->tcp),
           [](uv_handle_t* handle) { delete static_cast<Socket*>(handle->data); });
}

}  // namespace echoline::overlay::relay
