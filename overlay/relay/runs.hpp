// The runs of a relay: the learner of each name, the clients that wait for it, and the bytes that each run may pass.
// No I/O; the caller passes the time. Internal to overlay/.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "overlay/action.hpp"
#include "overlay/pacer.hpp"
#include "overlay/relay/protocol.hpp"
#include "overlay/relay/relay.hpp"
#include "overlay/uv/driver_parts.hpp"

namespace echoline::overlay::relay {

struct RelayRun {
  std::string name;
  std::optional<ConnId> control;  // absent: its learner is not connected
  Mac session{};
  std::set<ConnId> clients;
  UnprovenConnections waiting;  // of the clients
  std::uint64_t bytes = 0;      // passed, in both directions
  Pacer pacer;
  bool is_paced_now = false;  // it waits for its rate
  std::uint64_t turn = 0;     // of the loop, in which turn_bytes were passed
  std::size_t turn_bytes = 0;
  // In a round, each connection with bytes is read once. A round lasts several turns if a turn is too short for it.
  std::uint64_t round = 1;
  bool turn_was_too_short = false;
};

class Runs {
 public:
  static constexpr std::size_t kReadBytesMax = 256 * 1024;
  // Most bytes that one run passes in one turn of the loop: those of one read if other runs pass bytes too, so that
  // each gets the same share, however many connections it has.
  static constexpr std::size_t kTurnBytes = kReadBytesMax, kTurnBytesAlone = 16 * kReadBytesMax;
  static constexpr std::size_t kRememberedMax = 1024;  // runs with and without a learner

  explicit Runs(RelayLimits limits, std::function<Ticket()> make_ticket = random_ticket)
      : limits_(std::move(limits)), make_ticket_(std::move(make_ticket)) {}
  const RelayLimits& limits() const { return limits_; }

  // A learner has proven that the run is its own. Returns its earlier control connection, for the caller to close.
  // kExhausted: too many runs, or the run has passed all the bytes that it may.
  Result<std::optional<ConnId>> add(const std::string& name, ConnId control, const Mac& session);
  // The control connection is gone. Joined connections go on; waiting ones stay until their timeout.
  void remove_control(ConnId control);

  struct Invited {
    RelayRun* run = nullptr;
    Ticket ticket{};
    std::optional<ConnId> to_close;  // the waiting client that this one displaces
  };
  // A client asks for a run. Without a run's name, it means the only run. kNotFound: no such run. kUnavailable: its
  // learner is not connected. kExhausted: a limit of the run is reached.
  Result<Invited> invite(const std::string& server_name, ConnId client, const std::string& network);
  // A learner answers. Returns the client; kNotFound: the ticket is unknown, or used. kInvalid: the proof is wrong.
  struct Redeemed {
    RelayRun* run = nullptr;
    ConnId client{};
  };
  Result<Redeemed> redeem(const Ticket& ticket, const Mac& proof);
  // A client is gone, waiting or joined.
  void remove_client(RelayRun& run, ConnId client);

  // Begins a turn of the loop.
  void begin_turn() {
    ++turn_;
    active_before_ = std::exchange(active_, 0);
  }
  // How many bytes of one connection may be read now; 0: none before the next turn, or before paced_until().
  // `round`: the connection's own number, 0 at first.
  std::size_t read_bytes_max(RelayRun& run, std::uint64_t& round, TimePoint now);
  // Returns whether the run may continue; otherwise it has passed all the bytes that it may.
  bool on_passed(RelayRun& run, std::size_t bytes, TimePoint now);
  // The time from which the run's rate allows the next byte.
  static TimePoint paced_until(const RelayRun& run) { return run.pacer.free_at(); }

  std::size_t registered() const;
  const std::map<std::string, std::unique_ptr<RelayRun>>& all() const { return all_; }
  void check() const;

 private:
  struct Waiting {
    RelayRun* run;
    ConnId client;
    std::string network;
  };
  bool is_used_up(const RelayRun& run) const {
    return limits_.bytes_per_run && run.bytes >= limits_.bytes_per_run->count;
  }
  RelayRun* find(const std::string& server_name);
  void stop_waiting(ConnId client);
  void forget_unused();

  RelayLimits limits_;
  std::function<Ticket()> make_ticket_;
  std::map<std::string, std::unique_ptr<RelayRun>> all_;  // by name
  std::map<Ticket, Waiting> waiting_;
  std::map<ConnId, Ticket> tickets_;  // of waiting clients
  std::uint64_t turn_ = 0;
  std::size_t active_ = 0, active_before_ = 0;  // runs that have passed bytes in this turn and in the one before
};

}  // namespace echoline::overlay::relay
