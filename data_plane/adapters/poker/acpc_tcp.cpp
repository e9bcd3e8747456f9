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
const SystemClock kSystemClock{};

constexpr std::string_view kHasLeft = "the other end has left";
constexpr std::int64_t kPollMsMax = 60'000;  // poll() takes an int, so a longer wait is repeated
constexpr std::size_t kReadBlockBytes = 4096, kEndpointBytesShown = 256, kAddressBytesShown = 64;

Error socket_error(std::string_view what) {
  const bool has_left = errno == EPIPE || errno == ECONNRESET;
  return fail(Code::kUnavailable, kOperation, "{}: {}", what, has_left ? kHasLeft : std::strerror(errno));
}

// Waits until the socket is ready for `events` or has an error.
Status wait_for(int fd, short events, TimePoint deadline, std::string_view what) {
  while (true) {
    const auto ms_left = std::chrono::ceil<std::chrono::milliseconds>(deadline - kSystemClock.now()).count();
    if (ms_left <= 0)
      return fail(Code::kUnavailable, kOperation, "{}: the other end was not ready within the deadline", what);
    pollfd entry{.fd = fd, .events = events, .revents = 0};
    const int ready = ::poll(&entry, 1, static_cast<int>(std::min<std::int64_t>(ms_left, kPollMsMax)));
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

// Resolves a host name or address. `flags` are those of getaddrinfo(3).
Status look_up(const std::string& host, const std::string& port, int flags, Addresses& addresses) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  if (const int error_number = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &addresses.list); error_number != 0)
    return fail(Code::kUnavailable, kOperation, "{} port {}: {}", printable(host, kEndpointBytesShown), port,
                ::gai_strerror(error_number));
  return ok();
}

int open_socket(const addrinfo& address) {
  return ::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, address.ai_protocol);
}

// Lines are short, and each waits for the answer to the one before, so a delay would add up.
void disable_nagle(int fd) {
  const int enabled = 1;
  (void)::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &enabled, sizeof enabled);
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
  const auto parsed = std::from_chars(port.data(), port.data() + port.size(), number);
  if (host.empty() || port.empty() || parsed.ec != std::errc{} || parsed.ptr != port.data() + port.size() ||
      number == 0)
    return fail(Code::kInvalid, "", "'{}': expected HOST:PORT", printable(text, kEndpointBytesShown));
  return Endpoint{.host = std::string(host), .port = std::string(port)};
}

Status connect_socket(int fd, const addrinfo& address, TimePoint deadline) {
  if (::connect(fd, address.ai_addr, address.ai_addrlen) == 0) return ok();
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
    if (!line) return fail(Code::kUnavailable, kOperation, "{}", kHasLeft);
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

// The same error, naming the seat.
Error error_of_seat(int seat, const Error& error) {
  return fail(error.code, kOperation, "seat {}: {}", seat, error.message());
}

}  // namespace

Result<std::unique_ptr<LineSocket>> LineSocket::connect(std::string_view endpoint, Duration timeout) {
  ECHO_ASSIGN(const Endpoint host_and_port, parse_endpoint(endpoint));
  const TimePoint deadline = kSystemClock.now() + timeout;
  Addresses addresses;
  ECHO_TRY(look_up(host_and_port.host, host_and_port.port, /*flags=*/0, addresses));
  Status last_status = fail(Code::kUnavailable, kOperation, "no address");
  for (const addrinfo* address = addresses.list; address != nullptr; address = address->ai_next) {
    const int fd = open_socket(*address);
    if (fd < 0) continue;
    auto socket = std::make_unique<LineSocket>(fd);
    disable_nagle(fd);
    last_status = connect_socket(fd, *address, deadline);
    if (last_status) return socket;
  }
  return fail(Code::kUnavailable, kOperation, "{}: {}; is a dealer running there?",
              printable(endpoint, kEndpointBytesShown), last_status.error().detail);
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
    std::array<char, kReadBlockBytes> bytes;
    const ssize_t bytes_received = ::recv(socket_.get(), bytes.data(), bytes.size(), 0);
    if (bytes_received == 0) return std::optional<std::string>{};  // closed
    if (bytes_received > 0)
      received_.append(bytes.data(), static_cast<std::size_t>(bytes_received));
    else if (errno == EAGAIN)
      ECHO_TRY(wait_for(socket_.get(), POLLIN, deadline, "receive"));
    else if (errno != EINTR)
      return socket_error("receive");
  }
}

Result<std::unique_ptr<Listener>> Listener::open(const std::string& address, std::uint16_t port) {
  Addresses addresses;
  ECHO_TRY(look_up(address, std::to_string(port), AI_PASSIVE | AI_NUMERICHOST, addresses));
  const int fd = open_socket(*addresses.list);
  if (fd < 0) return socket_error("socket");
  auto listener = std::unique_ptr<Listener>(new Listener(fd, port));
  const int enabled = 1;
  (void)::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &enabled, sizeof enabled);
  if (::bind(fd, addresses.list->ai_addr, addresses.list->ai_addrlen) != 0 || ::listen(fd, /*backlog=*/1) != 0)
    return socket_error(fmt::format("listen on {} port {}", printable(address, kAddressBytesShown), port));
  sockaddr_storage bound_address{};
  socklen_t size = sizeof bound_address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&bound_address), &size) != 0) return socket_error("getsockname");
  listener->port_ =
      ntohs(bound_address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound_address)->sin6_port
                                                : reinterpret_cast<const sockaddr_in*>(&bound_address)->sin_port);
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
    if (kSystemClock.now() > deadline)
      return error_of_seat(seat, fail(Code::kUnavailable, "", "sent lines but no action within the deadline"));
    const auto line = seats[static_cast<std::size_t>(seat)]->receive_line(deadline);
    if (!line) return error_of_seat(seat, line.error());
    const auto lines = dealer.on_line(seat, *line);
    if (!lines) return error_of_seat(seat, lines.error());
    for (const auto& [to, text] : *lines)
      if (const auto sent = seats[static_cast<std::size_t>(to)]->send_line(text, kSystemClock.now() + timeout); !sent)
        return error_of_seat(to, sent.error());
    return !lines->empty();
  };
  for (int seat = 0; seat < 2; ++seat) {
    const TimePoint deadline = kSystemClock.now() + timeout;
    while (!dealer.has_greeted(seat)) {
      ECHO_TRY(forward_line(seat, deadline));
    }
  }
  while (const auto seat = dealer.seat_to_act()) {
    const TimePoint deadline = kSystemClock.now() + timeout;
    bool dealer_answered = false;
    while (!dealer_answered) {
      ECHO_ASSIGN(dealer_answered, forward_line(*seat, deadline));
    }
  }
  return ok();
}

Status play_against(LineSocket& dealer, AcpcClient& client, Duration timeout) {
  ECHO_TRY(dealer.send(client.greeting(), kSystemClock.now() + timeout));
  while (true) {
    ECHO_ASSIGN(const auto line, dealer.receive(kSystemClock.now() + timeout));
    if (!line) return ok();
    ECHO_ASSIGN(const std::string answer, client.on_line(*line));
    ECHO_TRY(dealer.send(answer, kSystemClock.now() + timeout));
  }
}

}  // namespace echoline::data_plane::poker
