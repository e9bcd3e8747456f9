// A host's simulated disk: the state file and the publications' spools, with delays, errors, a full disk, and the
// remains of writes after a crash. Pure: the world calls it and the core.
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
  Duration save_delay = std::chrono::milliseconds(5);  // of the state file, which is synced
  Duration sync_delay = std::chrono::seconds(1);       // until a spooled write survives a power loss
  std::optional<std::uint64_t> capacity_bytes;
  double read_error_share = 0, write_error_share = 0;
};

class Disk {
 public:
  explicit Disk(std::uint64_t seed, std::uint64_t stream) : random_(seed, stream) {}

  void configure(const DiskOptions& options) { options_ = options; }
  const DiskOptions& options() const { return options_; }

  // The call to make into the core after an operation; std::monostate: none.
  struct Saved {
    Status status;
  };
  struct Spooled {
    overlay::PublicationId publication{};
    std::uint32_t chunk = 0;
    Status status;
  };
  struct Unspooled {
    overlay::PublicationId publication{};
    std::uint32_t chunk = 0;
    Result<overlay::Slice> data;
  };
  using Answer = std::variant<std::monostate, Saved, Spooled, Unspooled>;

  // Takes act::SaveState, act::Spool, act::ReadChunk or act::DropSpool. Returns when to call complete() for it.
  TimePoint submit(overlay::Action&& action, TimePoint now);
  // Completes the oldest operation.
  Answer complete(TimePoint now);

  // The process ends normally: completes all operations.
  void finish(TimePoint now);
  // The process died: a random prefix of its operations is completed.
  void on_crash(TimePoint now);
  // The machine died: the end of the unsynced data is missing, truncated or garbage.
  void on_power_loss(TimePoint now);
  void wipe();
  // Flips bits in this many random pieces of payload; later reads return them. Returns how many pieces there were.
  std::size_t rot(std::size_t pieces);
  // Whether rot() ever flipped bits.
  bool rotten() const { return rotten_; }

  // ---- reading by a driver at its start ----

  const std::optional<std::string>& state() const { return state_; }
  // The readable frames of a spool, in order, without chunks whose data is missing.
  std::vector<overlay::Frame> read_spool(const overlay::PublicationId& id) const;
  std::vector<overlay::PublicationId> spools() const;
  // Cuts a spool's payload, or removes the whole spool, as a driver does after reading it.
  void trim_spool(const overlay::PublicationId& id, std::optional<std::uint64_t> payload_end);
  // The payload of a spool for act::Deliver; kNotFound if there is a gap.
  Result<overlay::Payload> open(const overlay::PublicationId& id, std::uint64_t bytes) const;
  // Whether a write has failed since the last crash or start.
  bool write_failed() const { return write_failed_; }
  // Payload bytes of all spools.
  std::uint64_t bytes() const { return bytes_; }
  // The part of bytes() that has records: excludes chunks whose records a power loss removed.
  std::uint64_t known_bytes() const { return bytes_ - std::min(bytes_, remains_); }
  // Data pieces of a spool, by offset.
  std::vector<overlay::Slice> pieces(const overlay::PublicationId& id) const;

 private:
  struct Piece {
    overlay::Slice data;
    TimePoint written;
  };
  struct Spool {
    std::string log;                                            // consecutive records
    std::vector<std::pair<std::size_t, TimePoint>> log_writes;  // end and write time of each record
    std::map<std::uint64_t, Piece> payload;                     // by offset
  };
  Answer perform(overlay::Action& action, TimePoint now);
  Status write(overlay::act::Spool& spool, TimePoint now);
  Result<overlay::Slice> read(const overlay::act::ReadChunk& read_chunk);
  void damage(Spool& spool, TimePoint now);
  std::string garbage(std::size_t bytes);

  DiskOptions options_;
  Random random_;
  Fifo<overlay::Action> queue_;
  TimePoint free_at_{};
  std::optional<std::string> state_;
  std::map<overlay::PublicationId, Spool> spools_;
  std::uint64_t bytes_ = 0, remains_ = 0;
  bool write_failed_ = false, rotten_ = false;
};

}  // namespace echoline::sim
