#include "tests/hostile/peer.hpp"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>

#include "base/clock.hpp"
#include "overlay/wire/control.hpp"

namespace echoline::hostile {
namespace {

constexpr Duration kPatience = std::chrono::seconds(5);

}  // namespace

int dial(const overlay::Endpoint& to) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(to.port);
  ::inet_pton(AF_INET, to.host.c_str(), &address.sin_addr);
  const timeval limit{5, 0};
  ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  ::close(fd);
  return -1;
}

Result<std::unique_ptr<Peer>> Peer::connect(const overlay::Endpoint& to, const overlay::Credentials& credentials,
                                            WorkerId expected) {
  const int fd = dial(to);
  if (fd < 0) return fail(Code::kUnavailable, "connect", "{}: {}", overlay::to_text(to), std::strerror(errno));
  const auto context = overlay::TlsContext::create(credentials);
  if (!context) return context.error();
  std::unique_ptr<Peer> peer(new Peer(fd, overlay::TlsSession::client(*context, expected, std::nullopt)));
  const SystemClock clock;
  const TimePoint deadline = clock.now() + kPatience;
  while (peer->flush() && !peer->tls_.established() && clock.now() < deadline)
    peer->read_some(std::chrono::milliseconds(100));
  if (!peer->tls_.established())
    return fail(Code::kUnavailable, "connect", "no handshake with {}", overlay::to_text(to));
  return peer;
}

Peer::~Peer() { ::close(fd_); }

bool Peer::write_all(std::span<const std::byte> bytes) {
  while (!bytes.empty() && open_) {
    const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n <= 0) open_ = false;
    if (n > 0) bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return open_;
}

bool Peer::flush() { return tls_.has_output() ? write_all(tls_.take_output()) : open_; }

bool Peer::read_some(Duration wait) {
  pollfd p{fd_, POLLIN, 0};
  const int ms = static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(wait).count());
  if (!open_ || ::poll(&p, 1, ms) <= 0) return false;
  std::byte buffer[65536];
  const ssize_t n = ::recv(fd_, buffer, sizeof buffer, 0);
  if (n <= 0) return open_ = false;
  tls_.feed(std::span(buffer, static_cast<std::size_t>(n)));
  for (;;) {
    const auto got = tls_.read(decoder_.room());
    if (!got) open_ = false;
    if (!got || *got == 0) break;
    if (!decoder_.advance(*got)) open_ = false;
    if (!open_) break;
    if (auto frame = decoder_.take()) frames_.push_back(std::move(*frame));
  }
  flush();
  if (tls_.peer_closed()) open_ = false;
  return true;
}

bool Peer::send_bytes(std::span<const std::byte> bytes) {
  std::vector<std::byte> block;
  if (!open_ || !tls_.write(bytes, block)) return false;
  return write_all(block);
}

bool Peer::send(const wire::ControlMessage& message) {
  const std::string body = message.SerializeAsString();
  return send_bytes(overlay::encode_frame(overlay::FrameType::kControl, std::as_bytes(std::span(body))));
}

std::optional<wire::ControlMessage> Peer::receive(Duration wait) {
  const SystemClock clock;
  const TimePoint deadline = clock.now() + wait;
  for (;;) {
    while (!frames_.empty()) {
      const overlay::Frame frame = std::move(frames_.front());
      frames_.pop_front();
      if (frame.type == overlay::FrameType::kChunk) chunk_bytes_ += frame.body.size();
      if (frame.type != overlay::FrameType::kControl) continue;
      wire::ControlMessage message;
      if (!message.ParseFromArray(frame.body.data(), static_cast<int>(frame.body.size()))) continue;
      if (message.has_goodbye()) goodbye_ = message.goodbye().reason();
      return message;
    }
    const TimePoint now = clock.now();
    if (!open_ || (!read_some(std::max(deadline - now, Duration(0))) && now >= deadline)) {
      if (frames_.empty()) return std::nullopt;
    }
  }
}

void Peer::drain(Duration wait) {
  while (receive(wait)) wait = Duration(0);
}

Result<Identity> enrol(const overlay::Endpoint& learner, const std::string& token, const std::string& name) {
  constexpr std::string_view kEnrol = "enrol";
  const overlay::trust::SigningKey key = overlay::trust::SigningKey::generate();
  ECHO_ASSIGN(const auto known, overlay::trust::read_token(overlay::trust::Secret(std::string(token))));
  overlay::Credentials nobody;
  nobody.authority = known.authority;
  ECHO_ASSIGN(const auto peer, Peer::connect(learner, nobody, kLearnerId));
  wire::ControlMessage message;
  wire::Enrol& wish = *message.mutable_enrol();
  const auto text = [](const auto& bytes) {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  };
  wish.set_token(token);
  wish.set_instance(name);
  wish.set_public_key(text(key.public_key().bytes));
  wish.set_proof(text(key.sign("enrol 2", std::as_bytes(std::span(token))).bytes));
  peer->send(message);
  const auto answer = peer->receive(kPatience);
  if (!answer || !answer->has_enrolled())
    return fail(Code::kUnavailable, kEnrol, "refused: {}", answer ? peer->goodbye() : "no answer");
  const auto der = [](const std::string& bytes) {
    const auto raw = std::as_bytes(std::span(bytes));
    return std::vector<std::byte>(raw.begin(), raw.end());
  };
  const wire::Enrolled& enrolled = answer->enrolled();
  ECHO_ASSIGN(const auto authority, overlay::trust::read_authority(der(enrolled.authority())));
  Identity identity;
  identity.worker = WorkerId{enrolled.worker()};
  identity.credentials.own = overlay::Credentials::Own{der(enrolled.certificate()), key};
  identity.credentials.authority = der(enrolled.authority());
  identity.credentials.run_id = authority.run_id;
  return identity;
}

}  // namespace echoline::hostile
