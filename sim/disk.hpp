// A host's simulated disk, with delays, errors, a full disk, and the damage that a crash leaves. It holds the state
// file and the spools. A spool keeps the chunks of one publication: their payload, and a log with a record of each. The
// world submits a core's disk actions here and passes the answers to the core.
#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/random.hpp"
#include "overlay/action.hpp"
#include "sim/fifo.hpp"

namespace echoline::sim {

struct DiskOptions {
  Duration write_delay = std::chrono::milliseconds(1), read_delay = std::chrono::milliseconds(1);
  Duration save_delay = std::chrono::milliseconds(5);  // for a write of the state file, which survives a power loss
  Duration sync_delay = std::chrono::seconds(1);       // from a write to a spool until it survives a power loss
  std::optional<std::uint64_t> capacity_bytes;         // for the payload of all spools; absent: unlimited
  double read_error_share = 0, write_error_share = 0;  // shares of the reads and writes that fail
};

class Disk {
 public:
  // `stream`: selects this disk's random numbers among those of the seed.
  Disk(std::uint64_t seed, std::uint64_t stream) : random_(seed, stream) {}

  void configure(const DiskOptions& options) { options_ = options; }
  const DiskOptions& options() const { return options_; }

  // The result of an operation. The world passes it to the core by on_saved(), on_spooled() or on_chunk_read().
  // std::monostate: the core gets no answer.
  struct Saved {
    Status status;
  };
  struct Spooled {
    overlay::PublicationId publication{};
    std::uint32_t chunk = 0;
    Status status;
  };
  struct ChunkRead {
    overlay::PublicationId publication{};
    std::uint32_t chunk = 0;
    Result<overlay::Slice> data;
  };
  using Answer = std::variant<std::monostate, Saved, Spooled, ChunkRead>;

  // Queues an act::SaveState, act::Spool, act::ReadChunk or act::DropSpool. Returns the time at which to call
  // complete() for it.
  TimePoint submit(overlay::Action&& action, TimePoint now);
  // Completes the oldest operation.
  Answer complete(TimePoint now);

  // Completes all operations, because the process ends normally.
  void complete_all(TimePoint now);
  // The process died. Completes a random number of its operations, in order, and drops the rest.
  void on_crash(TimePoint now);
  // The machine died. Also loses, truncates or garbles unsynced data.
  void on_power_loss(TimePoint now);
  void wipe();  // removes all data
  // Flips a bit in `pieces` randomly drawn pieces of payload. Later reads return the damaged pieces. Returns the number
  // of flipped bits.
  std::size_t corrupt_pieces(std::size_t pieces);
  // Whether corrupt_pieces() has ever flipped a bit.
  bool is_corrupted() const { return is_corrupted_; }

  // ---- what a process reads when it starts ----

  const std::optional<std::string>& state() const { return state_; }
  // The readable frames of a spool, in order, without chunks whose data is missing.
  std::vector<overlay::Frame> read_spool(const overlay::PublicationId& id) const;
  std::vector<overlay::PublicationId> spools() const;
  // Removes a spool's payload from `payload_end` on, or the whole spool if `payload_end` is absent. Called after a core
  // has read the spool, to drop what the core cannot use.
  void trim_spool(const overlay::PublicationId& id, std::optional<std::uint64_t> payload_end);
  // The payload of a spool. kNotFound if it has a gap, or not `bytes` bytes.
  Result<overlay::Payload> open(const overlay::PublicationId& id, std::uint64_t bytes) const;
  // Whether a write to a spool has failed since the process started.
  bool has_write_failed() const { return has_write_failed_; }
  // Payload bytes of all spools.
  std::uint64_t bytes() const { return bytes_; }
  // The part of bytes() that has records in a log. A power loss can remove a chunk's record and keep its data.
  std::uint64_t recorded_bytes() const { return bytes_ - std::min(bytes_, unrecorded_bytes_); }
  // Data pieces of a spool, by offset.
  std::vector<overlay::Slice> pieces(const overlay::PublicationId& id) const;

 private:
  struct Piece {
    overlay::Slice data;
    TimePoint written;
  };
  struct Spool {
    std::string log;                                            // consecutive records
    std::vector<std::pair<std::size_t, TimePoint>> log_writes;  // offset of each record's end, and its write time
    std::map<std::uint64_t, Piece> payload;                     // by offset
  };
  Answer perform(overlay::Action& action, TimePoint now);
  Status write(overlay::act::Spool& spool, TimePoint now);
  Result<overlay::Slice> read(const overlay::act::ReadChunk& read_chunk);
  void lose_unsynced_data(Spool& spool, TimePoint now);
  std::string random_text(std::size_t bytes);

  DiskOptions options_;
  Random random_;
  Fifo<overlay::Action> queue_;
  TimePoint free_at_{};  // when the last queued operation is complete
  std::optional<std::string> state_;
  std::map<overlay::PublicationId, Spool> spools_;
  std::uint64_t bytes_ = 0;             // of the payload of all spools
  std::uint64_t unrecorded_bytes_ = 0;  // the part of bytes_ whose records are lost
  bool has_write_failed_ = false, is_corrupted_ = false;
};

}  // namespace echoline::sim
