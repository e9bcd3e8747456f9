// Clients and learners of a relay on blocking sockets, for tests and benchmarks.
#pragma once
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <memory>

#include "base/files.hpp"
#include "overlay/relay/protocol.hpp"
#include "overlay/uv/tls.hpp"

namespace echoline::overlay::relay {

// A connection whose calls wait, at most for a minute.
class Wire {
 public:
  explicit Wire(const Endpoint& to, int receive_timeout_s = 60)
      : fd_(std::make_unique<Descriptor>(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0))) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(to.port);
    ECHO_CHECK(::inet_pton(AF_INET, "127.0.0.1", &address.sin_addr) == 1);
    const timeval limit{.tv_sec = receive_timeout_s, .tv_usec = 0};
    const int on = 1;
    ECHO_CHECK(::setsockopt(fd_->get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0 &&
               ::setsockopt(fd_->get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0 &&
               ::setsockopt(fd_->get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) == 0);
    ECHO_CHECK(::connect(fd_->get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, "{}",
               to_text(to));
  }
  // False: the connection is over.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_->get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
    return true;
  }
  // At most `limit` bytes of what comes next; empty: the connection is over.
  std::string receive(std::size_t limit = 64 * 1024) {
    std::string bytes(limit, '\0');
    const ssize_t size = ::recv(fd_->get(), bytes.data(), limit, 0);
    bytes.resize(size > 0 ? static_cast<std::size_t>(size) : 0);
    return bytes;
  }
  // Exactly `size` bytes; fewer: the connection is over.
  std::string receive_all(std::size_t size) {
    std::string bytes;
    while (bytes.size() < size) {
      const std::string more = receive(size - bytes.size());
      if (more.empty()) break;
      bytes += more;
    }
    return bytes;
  }
  bool is_over() { return receive().empty(); }
  void end_output() { ::shutdown(fd_->get(), SHUT_WR); }
  int fd() const { return fd_->get(); }

 private:
  std::unique_ptr<Descriptor> fd_;
};

// A worker's first message for the run.
inline std::string client_hello(const trust::SigningKey& run_key) {
  const auto context =
      TlsContext::create({.own = std::nullopt, .authority = trust::fingerprint(run_key.public_key()), .run_id = "run"});
  TlsSession session = TlsSession::client(*context, kLearnerId, std::nullopt);
  const std::vector<std::byte> bytes = session.take_output();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// A learner's control connection.
class TestLink {
 public:
  TestLink(const Endpoint& relay, const trust::Secret& key, const trust::SigningKey& run_key)
      : relay_(relay), wire_(relay) {
    const Nonce own = random_nonce();
    ECHO_CHECK(wire_.send(control_greeting(own)));
    Nonce theirs{};
    const std::string bytes = wire_.receive_all(theirs.size());
    if (bytes.size() < theirs.size()) return;
    std::copy_n(reinterpret_cast<const std::byte*>(bytes.data()), theirs.size(), theirs.begin());
    frames_.emplace(session_key(key, own, theirs, run_key.public_key()), ControlFrames::End::kLearner);
    wire_.send(answer(key, run_key, own, theirs));
  }
  // The relay's next frame. An error: it is not proven; absent: the connection is over.
  Result<std::optional<ControlFrame>> next() {
    while (frames_) {
      auto frame = frames_->take();
      if (!frame || *frame) return frame;
      const std::string bytes = wire_.receive();
      if (bytes.empty()) break;
      frames_->feed(bytes);
    }
    return std::optional<ControlFrame>();
  }
  bool is_accepted() {
    const auto frame = next();
    return frame && *frame && (*frame)->type == ControlFrame::Type::kAccepted;
  }
  // The ticket of the next client.
  std::optional<Ticket> next_ticket() {
    const auto frame = next();
    if (!frame || !*frame || (*frame)->type != ControlFrame::Type::kOpen) return std::nullopt;
    Ticket ticket;
    std::copy_n(reinterpret_cast<const std::byte*>((*frame)->body.data()), ticket.size(), ticket.begin());
    return ticket;
  }
  // Meets the client of this ticket.
  Wire meet(const Ticket& ticket) {
    Wire wire(relay_);
    ECHO_CHECK(wire.send(ticket_greeting(ticket, ticket_proof(frames_->session(), ticket))));
    return wire;
  }
  bool ping() { return wire_.send(frames_->seal(ControlFrame::Type::kPing)); }
  Wire& wire() { return wire_; }

 private:
  Endpoint relay_;
  Wire wire_;
  std::optional<ControlFrames> frames_;
};

}  // namespace echoline::overlay::relay
