// An ACPC match over TCP: as the dealer of local and remote players, or as a player of a remote dealer.
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

// One end of a connection that sends lines. Blocking; one thread.
class LineSocket {
 public:
  explicit LineSocket(int connected) : socket_(connected) {}
  // "host:port" or "[address]:port". kInvalid if it is neither, kUnavailable if no server answers within `patience`.
  static Result<std::unique_ptr<LineSocket>> connect(std::string_view endpoint, Duration patience);

  // kUnavailable if the other end does not accept the text by `deadline`, or has closed.
  Status send(std::string_view text, TimePoint deadline);
  // The next line with its line end; nothing if the other end has closed. kUnavailable if no line comes by `deadline`;
  // kExhausted if a line is longer than kAcpcLineBytesMax.
  Result<std::optional<std::string>> receive(TimePoint deadline);

 private:
  Descriptor socket_;
  std::string received_;
};

// A listening TCP port.
class Listener {
 public:
  // `address` is one of this machine, such as 127.0.0.1 or ::1; port 0 picks a free port.
  static Result<std::unique_ptr<Listener>> open(const std::string& address, std::uint16_t port);
  std::uint16_t port() const { return port_; }
  Result<std::unique_ptr<LineSocket>> accept(TimePoint deadline);

 private:
  Listener(int listening, std::uint16_t port) : socket_(listening), port_(port) {}
  Descriptor socket_;
  std::uint16_t port_;
};

// One seat, as the dealer sees it.
class Seat {
 public:
  virtual ~Seat() = default;
  virtual Status tell(const std::string& line, TimePoint deadline) = 0;
  virtual Result<std::string> hear(TimePoint deadline) = 0;  // its next line
};
// A player in this process, which uses the same protocol. It must outlive the seat.
std::unique_ptr<Seat> seat_of(Player& player, const Rules& rules, std::uint64_t seed);
std::unique_ptr<Seat> seat_of(std::unique_ptr<LineSocket> socket);

// Runs the match to its end. Each seat has `patience` for every action, including any other lines it sends. A seat that
// takes longer, leaves or violates the protocol ends the match with an error that names the seat.
Status run_match(AcpcDealer& dealer, const std::array<Seat*, 2>& seats, Duration patience);

// Plays against a remote dealer until it closes the connection; each of its lines may take `patience`.
Status play_at(LineSocket& dealer, AcpcClient& client, Duration patience);

}  // namespace echoline::data_plane::poker
