// A match of the ACPC protocol over TCP: whoever sits at the table, here or elsewhere, until it is over.
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

// One end of a conversation in lines. Blocking; one thread.
class LineSocket {
 public:
  explicit LineSocket(int connected) : socket_(connected) {}
  // "host:port" or "[address]:port". kInvalid where it is neither, kUnavailable where nobody answers within `patience`.
  static Result<std::unique_ptr<LineSocket>> connect(std::string_view endpoint, Duration patience);

  // kUnavailable where the other end does not take it by `deadline`, or is gone.
  Status send(std::string_view text, TimePoint deadline);
  // The next line with its end; nothing where the other end has closed. kUnavailable where none comes by `deadline`;
  // kExhausted where a line is longer than kAcpcLineBytesMax.
  Result<std::optional<std::string>> receive(TimePoint deadline);

 private:
  Descriptor socket_;
  std::string received_;
};

// A port that is listened on.
class Listener {
 public:
  // `address` is of this machine, such as 127.0.0.1 or ::1; port 0 takes any that is free.
  static Result<std::unique_ptr<Listener>> open(const std::string& address, std::uint16_t port);
  std::uint16_t port() const { return port_; }
  Result<std::unique_ptr<LineSocket>> accept(TimePoint deadline);

 private:
  Listener(int listening, std::uint16_t port) : socket_(listening), port_(port) {}
  Descriptor socket_;
  std::uint16_t port_;
};

// One seat, as the dealer speaks with it.
class Seat {
 public:
  virtual ~Seat() = default;
  virtual Status tell(const std::string& line, TimePoint deadline) = 0;
  virtual Result<std::string> hear(TimePoint deadline) = 0;  // its next line
};
// A player in this process, through the same lines. It must outlive the seat.
std::unique_ptr<Seat> seat_of(Player& player, const Rules& rules, std::uint64_t seed);
std::unique_ptr<Seat> seat_of(std::unique_ptr<LineSocket> socket);

// Runs the match to its end. Each seat has `patience` for every action, whatever else it says meanwhile; who takes
// longer, leaves or does not speak the protocol ends the match with an error that names the seat.
Status run_match(AcpcDealer& dealer, const std::array<Seat*, 2>& seats, Duration patience);

// Plays at somebody else's table until the dealer closes, for which it may take `patience` each time.
Status play_at(LineSocket& dealer, AcpcClient& client, Duration patience);

}  // namespace echoline::data_plane::poker
