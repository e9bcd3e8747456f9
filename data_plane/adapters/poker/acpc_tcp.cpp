// Implements the sockets and the match loops of `echoline adapter poker` for the ACPC protocol.
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
    if (left <= 0)
      return fail(Code::kUnavailable, kOperation, "{}: the other end was not ready within the deadline", what);
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
  if (const int error_number = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found.list); error_number != 0)
    return fail(Code::kUnavailable, kOperation, "{} port {}: {}", printable(host, 256), port,
                ::gai_strerror(error_number));
  return ok();
}

int open_socket(const addrinfo& at) {
  return ::socket(at.ai_family, at.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at.ai_protocol);
}

// Lines are short, and each waits for the answer to the last, so a delay would add up.
void disable_nagle(int fd) {
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

Status connect_socket(int fd, const addrinfo& at, TimePoint deadline) {
  if (::connect(fd, at.ai_addr, at.ai_addrlen) == 0) return ok();
  if (errno != EINPROGRESS) return socket_error("connect");
  ECHO_TRY(wait_for(fd, POLLOUT, deadline, "connect"));
  int error_number = 0;
  socklen_t size = sizeof error_number;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error_number, &size) != 0) return socket_error("connect");
  errno = error_number;
  return error_number == 0 ? ok() : Status(socket_error("connect"));
}

class RemoteSeat final : public Seat {
 public:
  explicit RemoteSeat(std::unique_ptr<LineSocket> socket) : socket_(std::move(socket)) {}
  Status send_line(const std::string& line, TimePoint deadline) override { return socket_->send(line, deadline); }
  Result<std::string> receive_line(TimePoint deadline) override {
    ECHO_ASSIGN(auto line, socket_->receive(deadline));
    if (!line) return fail(Code::kUnavailable, kOperation, "{}", kGone);
    return *std::move(line);
  }

 private:
  std::unique_ptr<LineSocket> socket_;
};

class LocalSeat final : public Seat {
 public:
  LocalSeat(Player& player, const Rules& rules, std::uint64_t seed)
      : client_(player, rules, seed), latest_answer_{client_.greeting()} {}
  Status send_line(const std::string& line, TimePoint) override {
    ECHO_ASSIGN(latest_answer_, client_.on_line(line));
    return ok();
  }
  // run_match() calls it only after a state that needs an answer, and then latest_answer_ is that answer.
  Result<std::string> receive_line(TimePoint) override { return latest_answer_; }

 private:
  AcpcClient client_;
  std::string latest_answer_;
};

Error at_seat(int seat, const Error& error) {
  return fail(error.code, kOperation, "seat {}: {}", seat, error.message());
}

}  // namespace

Result<std::unique_ptr<LineSocket>> LineSocket::connect(std::string_view endpoint, Duration timeout) {
  ECHO_ASSIGN(const Endpoint at, parse_endpoint(endpoint));
  const TimePoint deadline = kClock.now() + timeout;
  Addresses found;
  ECHO_TRY(look_up(at.host, at.port, 0, found));
  Status last = fail(Code::kUnavailable, kOperation, "no address");
  for (const addrinfo* one = found.list; one != nullptr; one = one->ai_next) {
    const int fd = open_socket(*one);
    if (fd < 0) continue;
    auto socket = std::make_unique<LineSocket>(fd);
    disable_nagle(fd);
    last = connect_socket(fd, *one, deadline);
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
    if (got == 0) return std::optional<std::string>{};  // closed
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
      disable_nagle(fd);
      return std::make_unique<LineSocket>(fd);
    }
    if (errno == EAGAIN)
      ECHO_TRY(wait_for(socket_.get(), POLLIN, deadline, fmt::format("no player connected to port {}", port_)));
    else if (errno != EINTR && errno != ECONNABORTED)
      return socket_error("accept");
  }
}

std::unique_ptr<Seat> make_seat(Player& player, const Rules& rules, std::uint64_t seed) {
  return std::make_unique<LocalSeat>(player, rules, seed);
}
std::unique_ptr<Seat> make_seat(std::unique_ptr<LineSocket> socket) {
  return std::make_unique<RemoteSeat>(std::move(socket));
}

Status run_match(AcpcDealer& dealer, const std::array<Seat*, 2>& seats, Duration timeout) {
  // Passes one line of a seat to the dealer, and the dealer's lines to the seats. Returns whether the dealer has sent
  // any: it ignores comments and late answers, and a greeting may not need an answer.
  const auto forward_line = [&](int seat, TimePoint deadline) -> Result<bool> {
    if (kClock.now() > deadline)
      return at_seat(seat, fail(Code::kUnavailable, "", "sent lines but no action within the deadline"));
    const auto line = seats[static_cast<std::size_t>(seat)]->receive_line(deadline);
    if (!line) return at_seat(seat, line.error());
    const auto lines = dealer.on_line(seat, *line);
    if (!lines) return at_seat(seat, lines.error());
    for (const auto& [to, text] : *lines)
      if (const auto told = seats[static_cast<std::size_t>(to)]->send_line(text, kClock.now() + timeout); !told)
        return at_seat(to, told.error());
    return !lines->empty();
  };
  for (int seat = 0; seat < 2; ++seat) {
    const TimePoint deadline = kClock.now() + timeout;
    while (!dealer.greeted(seat)) {
      ECHO_TRY(forward_line(seat, deadline));
    }
  }
  while (const auto seat = dealer.seat_to_act()) {
    const TimePoint deadline = kClock.now() + timeout;
    bool acted = false;
    while (!acted) {
      ECHO_ASSIGN(acted, forward_line(*seat, deadline));
    }
  }
  return ok();
}

Status play_against(LineSocket& dealer, AcpcClient& client, Duration timeout) {
  ECHO_TRY(dealer.send(client.greeting(), kClock.now() + timeout));
  while (true) {
    ECHO_ASSIGN(const auto line, dealer.receive(kClock.now() + timeout));
    if (!line) return ok();
    ECHO_ASSIGN(const std::string answer, client.on_line(*line));
    ECHO_TRY(dealer.send(answer, kClock.now() + timeout));
  }
}

}  // namespace echoline::data_plane::poker
