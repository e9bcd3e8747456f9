// The parts of a world: hosts and connections. Private to world*.cpp.
#pragma once
#include <limits>

#include "sim/world.hpp"

namespace echoline::sim {

// Event kinds in the trace hash. Different events may share a number; equal runs still have equal hashes.
enum HashedKind : std::uint64_t {
  kHashStart = 1,
  kHashStop = 2,
  kHashKill = 3,
  kHashStopLinks = 4,
  kHashPartition = 5,
  kHashPartitionEnd = 6,
  kHashQueuedEvent = 7,  // plus the event's kind
  kHashPause = 8,
  kHashChangeAddress = 9,
  kHashClockStep = 10,
  kHashAction = 40,
  kHashFrame = 41
};

// The data of one send action. It travels as a whole and is read whole or in pieces. The last transfer of a connection
// carries its ending instead: an orderly end, or a reset.
struct World::Transfer {
  enum class Ending : std::uint8_t { kNone, kEnd, kReset };
  overlay::Slice head, tail;       // as in act::Send
  std::size_t reported_bytes = 0;  // reported to the core as taken; a dishonest host may send another number
  Ending ending = Ending::kNone;
  TimePoint sent_at{}, arrives_at{};  // when it has left the uplink, and its earliest arrival at the receiver
  std::size_t read_bytes = 0;         // passed to the decoder
  static Transfer of_ending(Ending kind) {
    Transfer transfer;
    transfer.ending = kind;
    return transfer;
  }
  std::size_t size() const { return head.size() + tail.size(); }
};

// One end of a connection.
struct World::End {
  enum class State : std::uint8_t { kNone, kOpening, kOpen, kClosed };
  std::size_t host = 0;
  std::uint64_t incarnation = 0;  // Host::incarnation when this end was made: the end belongs to that process
  ConnId id;
  std::optional<WorkerId> peer;  // the worker that the peer's certificate names
  State state = State::kNone;
  bool vanished = false;  // its machine lost power; the peer does not notice
  bool reading = true;    // the host's core takes data from this connection
  overlay::FrameDecoder decoder;

  // Transfers to this end, in order. The events kFirstByte and kArrives name no transfer. Each event applies to the
  // first transfer that has not had an event of its kind, so transfers cannot overtake each other.
  Fifo<Transfer> inbound;
  std::size_t on_downlink_transfers = 0;  // the first so many of `inbound`: their first byte has reached the downlink
  std::size_t arrived_transfers = 0;      // the first so many of `inbound`: arrived and not read
  std::size_t parked_transfers = 0;       // arrivals waiting for a partition to heal
  // When the most recent transfer to this end arrives: its first byte, and all of it. Later ones arrive no earlier.
  TimePoint first_arrival{}, last_arrival{};

  Fifo<Transfer> outbound;  // of this end: waiting for the uplink

  // Flow control: data that the peer has not yet read fills the sockets' buffers. Bytes are reported to the core as
  // taken only while the buffers have room.
  std::size_t unread_bytes = 0;          // sent by this end, not yet read by the peer
  std::size_t unacknowledged_bytes = 0;  // read by the peer, but the notice waits for a partition to heal
  Fifo<std::size_t> unreported;          // sizes of transfers sent by this end, not yet reported as taken
  std::size_t unreported_sent = 0;       // how many of `unreported`, from the front, have left the uplink
};

struct World::Connection {
  std::size_t slot = 0;
  std::uint64_t generation = 0;  // number of connections that had this slot before; old events do not match it
  bool in_use = false;
  overlay::act::Service service{};  // requested by the dialling end
  WorkerId expected;                // the worker that should answer; kLearnerId: the learner
  TimePoint dialled{};              // when the dial began
  std::string failure;              // why the dial fails
  End ends[2];                      // the dialling end, the dialled end
};

struct World::Host {
  static constexpr std::uint64_t kFirstDiskStream = 1000;  // random streams of the hosts' disks begin here
  Host(std::uint64_t seed, std::uint64_t index) : disk(seed, kFirstDiskStream + index) {}
  AccessLink link;
  std::uint32_t region = 0;
  overlay::Endpoint endpoint;
  double unix_origin_s = 0;  // Unix time at virtual time zero, by the host's clock
  Disk disk;
  std::unique_ptr<Process> process;
  std::unique_ptr<MessageRewriter> rewriter;            // of a malicious worker's messages
  std::uint64_t incarnation = 0, next_accepted_id = 2;  // even; the core gives odd ids to the connections that it dials
  std::map<ConnId, Side> connections;
  std::string certificate;  // DER
  TimePoint downlink_free_at{}, timer_at = kNever, links_stopped_until{}, paused_until{};
  // Connections that wait for the uplink, in turn, each with its generation. Those that start with little data have
  // priority.
  Fifo<std::pair<Side, std::uint64_t>> priority_senders, senders;
  bool uplink_busy = false;
  bool reading = true;  // false: the core takes no data from any connection
  bool performing_actions = false, behind_nat = false, has_power = true;
  std::uint64_t bytes_sent = 0;
  std::optional<std::size_t> corrupt_bytes_min;  // corrupt_next(): a bit flips in the next body of at least this size
  std::size_t connections_max = std::numeric_limits<std::size_t>::max();
};

inline World::End& World::end(const Side& side) { return side.connection->ends[side.end_index]; }

}  // namespace echoline::sim
