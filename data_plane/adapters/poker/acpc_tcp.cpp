#include "data_plane/adapters/poker/acpc_tcp.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "base/text.hpp"

namespace echoline::data_plane::poker {
namespace {

constexpr std::string_view kOperation = "poker";
const SystemClock kClock{};

constexpr std::string_view kGone = "the other end has left";

Error socket_error(std::string_view what) {
  const bool gone = errno == EPIPE || errno == ECONNRESET;
  return fail(Code::kUnavailable, kOperation, "{}: {}", what, gone ? kGone : std::strerror(errno));
}

// Waits until the socket is ready for `events` or has an error.
Status wait_for(int fd, short events, TimePoint deadline, std::string_view what) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - kClock.now()).count();
    if (left <= 0) return fail(Code::kUnavailable, kOperation, "{}: no data within the deadline", what);
    pollfd one{fd, events, 0};
    const int ready = ::poll(&one, 1, static_cast<int>(std::min<std::int64_t>(left, 60'000)));
    if (ready > 0) return ok();
    if (ready < 0 && errno != EINTR) return socket_error(what);
  }
}

struct Addresses {
  addrinfo* list = nullptr;
  ~Addresses() {
    if (list != nullptr) ::freeaddrinfo(list);
  }
};

Status look_up(const std::string& host, const std::string& port, int flags, Addresses& found) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  if (const int wrong = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found.list); wrong != 0)
    return fail(Code::kUnavailable, kOperation, "{} port {}: {}", printable(host, 256), port, ::gai_strerror(wrong));
  return ok();
}

int open_socket(const addrinfo& at) {
  return ::socket(at.ai_family, at.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at.ai_protocol);
}

// Disables Nagle's delay: lines are short, and each waits for the answer to the last.
void send_at_once(int fd) {
  const int yes = 1;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
}

struct Endpoint {
  std::string host, port;
};
Result<Endpoint> parse_endpoint(std::string_view text) {
  const auto colon = text.rfind(':');
  std::string_view host = text.substr(0, colon == std::string_view::npos ? 0 : colon);
  const std::string_view port = colon == std::string_view::npos ? "" : text.substr(colon + 1);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  std::uint16_t number = 0;
  const auto read = std::from_chars(port.data(), port.data() + port.size(), number);
  if (host.empty() || port.empty() || read.ec != std::errc{} || read.ptr != port.data() + port.size() || number == 0)
    return fail(Code::kInvalid, "", "'{}': expected HOST:PORT", printable(text, 256));
  return Endpoint{std::string(host), std::string(port)};
}

Status finish_connecting(int fd, const addrinfo& at, TimePoint deadline) {
  if (::connect(fd, at.ai_addr, at.ai_addrlen) == 0) return ok();
  if (errno != EINPROGRESS) return socket_error("connect");
  ECHO_TRY(wait_for(fd, POLLOUT, deadline, "connect"));
  int wrong = 0;
  socklen_t size = sizeof wrong;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &wrong, &size) != 0) return socket_error("connect");
  errno = wrong;
  return wrong == 0 ? ok() : Status(socket_error("connect"));
}

class RemoteSeat final : public Seat {
 public:
  explicit RemoteSeat(std::unique_ptr<LineSocket> socket) : socket_(std::move(socket)) {}
  Status tell(const std::string& line, TimePoint deadline) override { return socket_->send(line, deadline); }
  Result<std::string> hear(TimePoint deadline) override {
    ECHO_ASSIGN(auto line, socket_->receive(deadline));
    if (!line) return fail(Code::kUnavailable, kOperation, "{}", kGone);
    return *std::move(line);
  }

 private:
  std::unique_ptr<LineSocket> socket_;
};

class OwnSeat final : public Seat {
 public:
  OwnSeat(Player& player, const Rules& rules, std::uint64_t seed)
      : client_(player, rules, seed), says_{client_.greeting()} {}
  Status tell(const std::string& line, TimePoint) override {
    ECHO_ASSIGN(says_, client_.take(line));
    return ok();
  }
  // hear() follows every state that needs an answer, so the latest answer is the right one.
  Result<std::string> hear(TimePoint) override { return says_; }

 private:
  AcpcClient client_;
  std::string says_;
};

Error at_seat(int seat, const Error& error) {
  return fail(error.code, kOperation, "seat {}: {}", seat, error.message());
}

}  // namespace

Result<std::unique_ptr<LineSocket>> LineSocket::connect(std::string_view endpoint, Duration patience) {
  ECHO_ASSIGN(const Endpoint at, parse_endpoint(endpoint));
  const TimePoint deadline = kClock.now() + patience;
  Addresses found;
  ECHO_TRY(look_up(at.host, at.port, 0, found));
  Status last = fail(Code::kUnavailable, kOperation, "no address");
  for (const addrinfo* one = found.list; one != nullptr; one = one->ai_next) {
    const int fd = open_socket(*one);
    if (fd < 0) continue;
    auto socket = std::make_unique<LineSocket>(fd);
    send_at_once(fd);
    last = finish_connecting(fd, *one, deadline);
    if (last) return socket;
  }
  return fail(Code::kUnavailable, kOperation, "{}: {}; is a dealer running there?", printable(endpoint, 256),
              last.error().detail);
}

Status LineSocket::send(std::string_view text, TimePoint deadline) {
  while (!text.empty()) {
    const ssize_t sent = ::send(socket_.get(), text.data(), text.size(), MSG_NOSIGNAL);
    if (sent >= 0)
      text.remove_prefix(static_cast<std::size_t>(sent));
    else if (errno == EAGAIN)
      ECHO_TRY(wait_for(socket_.get(), POLLOUT, deadline, "send"));
    else if (errno != EINTR)
      return socket_error("send");
  }
  return ok();
}

Result<std::optional<std::string>> LineSocket::receive(TimePoint deadline) {
  while (true) {
    if (const auto end = received_.find('\n'); end != std::string::npos) {
      std::string line = received_.substr(0, end + 1);
      received_.erase(0, end + 1);
      return std::optional(std::move(line));
    }
    if (received_.size() > kAcpcLineBytesMax)
      return fail(Code::kExhausted, kOperation, "a line of more than {} bytes", kAcpcLineBytesMax);
    std::array<char, 4096> bytes;
    const ssize_t got = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (got == 0) return std::optional<std::string>{};
    if (got > 0)
      received_.append(bytes.data(), static_cast<std::size_t>(got));
    else if (errno == EAGAIN)
      ECHO_TRY(wait_for(socket_.get(), POLLIN, deadline, "receive"));
    else if (errno != EINTR)
      return socket_error("receive");
  }
}

Result<std::unique_ptr<Listener>> Listener::open(const std::string& address, std::uint16_t port) {
  Addresses found;
  ECHO_TRY(look_up(address, std::to_string(port), AI_PASSIVE | AI_NUMERICHOST, found));
  const int fd = open_socket(*found.list);
  if (fd < 0) return socket_error("socket");
  auto listener = std::unique_ptr<Listener>(new Listener(fd, port));
  const int yes = 1;
  (void)::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  if (::bind(fd, found.list->ai_addr, found.list->ai_addrlen) != 0 || ::listen(fd, 1) != 0)
    return socket_error(fmt::format("listen on {} port {}", printable(address, 64), port));
  sockaddr_storage bound{};
  socklen_t size = sizeof bound;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) return socket_error("getsockname");
  listener->port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                                      : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  return listener;
}

Result<std::unique_ptr<LineSocket>> Listener::accept(TimePoint deadline) {
  while (true) {
    const int fd = ::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0) {
      send_at_once(fd);
      return std::make_unique<LineSocket>(fd);
    }
    if (errno == EAGAIN)
      ECHO_TRY(wait_for(socket_.get(), POLLIN, deadline, fmt::format("no player connected to port {}", port_)));
    else if (errno != EINTR && errno != ECONNABORTED)
      return socket_error("accept");
  }
}

std::unique_ptr<Seat> seat_of(Player& player, const Rules& rules, std::uint64_t seed) {
  return std::make_unique<OwnSeat>(player, rules, seed);
}
std::unique_ptr<Seat> seat_of(std::unique_ptr<LineSocket> socket) {
  return std::make_unique<RemoteSeat>(std::move(socket));
}

Status run_match(AcpcDealer& dealer, const std::array<Seat*, 2>& seats, Duration patience) {
  // Passes one line of a seat to the dealer, and the dealer's lines to the seats.
  const auto turn = [&](int seat, TimePoint deadline) -> Result<bool> {
    if (kClock.now() > deadline)
      return at_seat(seat, fail(Code::kUnavailable, "", "sent lines but no action within the deadline"));
    const auto line = seats[static_cast<std::size_t>(seat)]->hear(deadline);
    if (!line) return at_seat(seat, line.error());
    const auto lines = dealer.take(seat, *line);
    if (!lines) return at_seat(seat, lines.error());
    for (const auto& [to, text] : *lines)
      if (const auto told = seats[static_cast<std::size_t>(to)]->tell(text, kClock.now() + patience); !told)
        return at_seat(to, told.error());
    return !lines->empty();
  };
  for (int seat = 0; seat < 2; ++seat)
    for (const TimePoint deadline = kClock.now() + patience; !dealer.greeted(seat);) ECHO_TRY(turn(seat, deadline));
  while (const auto seat = dealer.waits_for()) {
    const TimePoint deadline = kClock.now() + patience;
    for (bool moved = false; !moved;) {
      ECHO_ASSIGN(moved, turn(*seat, deadline));
    }
  }
  return ok();
}

Status play_at(LineSocket& dealer, AcpcClient& client, Duration patience) {
  ECHO_TRY(dealer.send(client.greeting(), kClock.now() + patience));
  while (true) {
    ECHO_ASSIGN(const auto line, dealer.receive(kClock.now() + patience));
    if (!line) return ok();
    ECHO_ASSIGN(const std::string answer, client.take(*line));
    ECHO_TRY(dealer.send(answer, kClock.now() + patience));
  }
}

}  // namespace echoline::data_plane::poker
