// Plays poker by the protocol of the Annual Computer Poker Competition (ACPC), in lines over TCP: the dealer sends
// states, and each of the two seats (players) answers with actions. Either side can be in this process.
#pragma once
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.hpp"
#include "base/files.hpp"
#include "base/result.hpp"
#include "data_plane/adapters/poker/acpc.hpp"

namespace echoline::data_plane::poker {

// One end of a connection that sends lines. Calls block until the line is sent or received, or the deadline. For one
// thread.
class LineSocket {
 public:
  explicit LineSocket(int connected_fd) : socket_(connected_fd) {}
  // "host:port" or "[address]:port". kInvalid if it is neither, kUnavailable if no server answers within `timeout`.
  static Result<std::unique_ptr<LineSocket>> connect(std::string_view endpoint, Duration timeout);

  // kUnavailable if the other end does not accept the text by `deadline`, or has closed.
  Status send(std::string_view text, TimePoint deadline);
  // The next line with its line end; nothing if the other end has closed, and an unfinished line is then discarded.
  // kUnavailable if no line comes by `deadline`; kExhausted if a line is longer than kAcpcLineBytesMax.
  Result<std::optional<std::string>> receive(TimePoint deadline);

 private:
  Descriptor socket_;
  std::string received_;  // bytes after the last line that receive() returned
};

// A listening TCP port.
class Listener {
 public:
  // `address` is one of this machine, such as 127.0.0.1 or ::1; port 0 picks a free port.
  static Result<std::unique_ptr<Listener>> open(const std::string& address, std::uint16_t port);
  std::uint16_t port() const { return port_; }
  Result<std::unique_ptr<LineSocket>> accept(TimePoint deadline);

 private:
  Listener(int listening_fd, std::uint16_t port) : socket_(listening_fd), port_(port) {}
  Descriptor socket_;
  std::uint16_t port_;
};

// The connection of the dealer to one seat.
class Seat {
 public:
  virtual ~Seat() = default;
  virtual Status send_line(const std::string& line, TimePoint deadline) = 0;
  virtual Result<std::string> receive_line(TimePoint deadline) = 0;
};
// The seat of a player in this process, which uses the same protocol. The player must outlive the seat.
std::unique_ptr<Seat> make_seat(Player& player, const Rules& rules, std::uint64_t seed);
// The seat of a remote player.
std::unique_ptr<Seat> make_seat(std::unique_ptr<LineSocket> socket);

// Runs the match to its end. Each seat has `timeout` for every action, including any other lines it sends. A seat that
// takes longer, leaves or violates the protocol ends the match with an error that names the seat.
Status run_match(AcpcDealer& dealer, const std::array<Seat*, 2>& seats, Duration timeout);

// Plays against a remote dealer until it closes the connection; each of its lines may take `timeout`.
Status play_against(LineSocket& dealer, AcpcClient& client, Duration timeout);

}  // namespace echoline::data_plane::poker
