// The parts of a world: hosts and connections. Private to world*.cpp.
#pragma once
#include <limits>

#include "sim/world.hpp"

namespace echoline::sim {

// The data of one send action. It travels as a whole and is read whole or in pieces.
struct World::Transfer {
  enum class Last : std::uint8_t { kNo, kEnd, kReset };
  overlay::Slice head, tail;
  std::size_t reported_bytes = 0;  // reported to the sending core as taken; malice may change the real size
  Last last = Last::kNo;
  TimePoint through{}, arrives_at{};  // when it has left the uplink, and its earliest arrival at the receiver
  std::size_t read_bytes = 0;         // passed to the decoder
  std::size_t size() const { return head.size() + tail.size(); }
};

// One end of a connection.
struct World::End {
  enum class State : std::uint8_t { kNone, kOpening, kOpen, kClosed };
  std::size_t host = 0;
  std::uint64_t incarnation = 0;
  ConnId id;
  std::optional<WorkerId> peer;  // as proved on this connection
  State state = State::kNone;
  bool vanished = false;  // its machine lost power without notice
  bool reading = true;
  overlay::FrameDecoder decoder;

  // Transfers to this end, in order. Events mean "one more", so the order never changes.
  Fifo<Transfer> inbound;
  std::size_t scheduled = 0;  // of inbound: the first byte has reached the downlink
  std::size_t arrived = 0;    // of inbound: arrived and not read
  std::size_t parked = 0;     // arrivals waiting for a partition to heal
  TimePoint first_arrival{}, last_arrival{};

  Fifo<Transfer> outbound;  // of this end: waiting for the uplink

  // Flow control: unread data of the peer fills the sockets' buffers. Bytes are reported to the core as taken only
  // while there is room.
  std::size_t unread_bytes = 0;  // sent by this end
  std::size_t held_bytes = 0;    // read by the peer, but the notice waits for a partition to heal
  Fifo<std::size_t> unreported;  // sent by this end, not reported as taken
  std::size_t through = 0;       // of unreported: have left the uplink
};

struct World::Connection {
  std::size_t slot = 0;
  std::uint64_t generation = 0;
  bool used = false;
  overlay::act::Service service{};
  WorkerId expected;
  TimePoint dialled{};
  std::string failure;  // why the dial fails
  overlay::trust::PeerIdentity dialler;
  End ends[2];  // 0 dialled
};

struct World::Host {
  Host(std::uint64_t seed, std::uint64_t index) : disk(seed, 1000 + index) {}
  AccessLink link;
  std::uint32_t region = 0;
  overlay::Endpoint endpoint;
  double unix_origin_s = 0;
  Disk disk;
  std::unique_ptr<Process> process;
  std::unique_ptr<Malice> malice;
  std::uint64_t incarnation = 0, next_accepted = 2;
  std::map<ConnId, Side> connections;
  std::string certificate;  // DER
  TimePoint down_free{}, timer_at = kNever, links_stopped_until{}, paused_until{};
  // Connections with data to send and their generations, in turn; those starting with little data have priority.
  Fifo<std::pair<Side, std::uint64_t>> priority_senders, senders;
  bool up_busy = false;
  bool reading = true, performing = false, nat = false, powered = true;
  std::uint64_t bytes_sent = 0;
  std::optional<std::size_t> corrupt_bytes_min;
  std::size_t connections_max = std::numeric_limits<std::size_t>::max();
};

inline World::End& World::end(const Side& side) { return side.connection->ends[side.side]; }

}  // namespace echoline::sim
