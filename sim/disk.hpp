// A host's simulated disk: the state file and the spools of publications, with delays, errors, a full disk, and what a
// crash leaves of writes that were under way. Pure: the world asks it and calls the core.
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
  Duration sync_delay = std::chrono::seconds(1);       // until a power loss cannot take a spooled write any more
  std::optional<std::uint64_t> capacity_bytes;
  double read_error_share = 0, write_error_share = 0;
};

class Disk {
 public:
  explicit Disk(std::uint64_t seed, std::uint64_t stream) : random_(seed, stream) {}

  void configure(const DiskOptions& options) { options_ = options; }
  const DiskOptions& options() const { return options_; }

  // What a call of the core follows once the disk has done something; std::monostate: nothing to tell.
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

  // Takes act::SaveState, act::Spool, act::Unspool or act::DropSpool; returns when complete() may be called for it.
  TimePoint submit(overlay::Action&& action, TimePoint now);
  // The operation submitted first is through.
  Answer complete(TimePoint now);

  // The process ends in good order: everything handed over is carried out.
  void finish(TimePoint now);
  // The process died: what it had handed over may have been written up to any point.
  void on_crash(TimePoint now);
  // The machine died: of what was not synced, an end is missing, cut in the middle, or garbage.
  void on_power_loss(TimePoint now);
  void wipe();
  // Bits of so many pieces of payload turn over, whichever; what is read later has them. Returns how many there were.
  std::size_t rot(std::size_t pieces);
  // They have, of what is there or was.
  bool rotten() const { return rotten_; }

  // ---- what a driver reads at its start ----

  const std::optional<std::string>& state() const { return state_; }
  // The frames of a spool in order, as far as they can be read. Chunks whose data is not there are left out.
  std::vector<overlay::Frame> read_spool(const overlay::PublicationId& id) const;
  std::vector<overlay::PublicationId> spools() const;
  // As a driver does after reading a spool: cuts its payload there, or removes all of it.
  void trim_spool(const overlay::PublicationId& id, std::optional<std::uint64_t> payload_end);
  // The payload of a spool as act::Deliver means it; kNotFound when there is a gap.
  Result<overlay::Payload> open(const overlay::PublicationId& id, std::uint64_t bytes) const;
  // A write has failed since the last crash or start.
  bool write_failed() const { return write_failed_; }
  // All payload bytes of all spools.
  std::uint64_t bytes() const { return bytes_; }
  // Of these at least, those that somebody knows of: without what a power loss has left of chunks whose records it
  // took.
  std::uint64_t known_bytes() const { return bytes_ - std::min(bytes_, remains_); }
  // Data pieces of a spool by offset, in order.
  std::vector<overlay::Slice> pieces(const overlay::PublicationId& id) const;

 private:
  struct Piece {
    overlay::Slice data;
    TimePoint written;
  };
  struct Spool {
    std::string log;                                            // records one after another
    std::vector<std::pair<std::size_t, TimePoint>> log_writes;  // end of each record, and when it was written
    std::map<std::uint64_t, Piece> payload;                     // by offset
  };
  Answer perform(overlay::Action& action, TimePoint now);
  Status write(overlay::act::Spool& spool, TimePoint now);
  Result<overlay::Slice> read(const overlay::act::Unspool& unspool);
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
