// Downloads of the worker's bundle by new machines: which of them reads its next block from the file, and when. No I/O.
// Internal to overlay/uv.
#pragma once
#include <map>

#include "base/state_table.hpp"
#include "overlay/learner/bundle_gate.hpp"

namespace echoline::overlay {

class Downloads {
 public:
  static constexpr std::size_t kBlockBytes = 128 * 1024;

  // `size`: of the file.
  Downloads(BundleGate gate, Bytes size) : gate_(std::move(gate)), size_(size) {}

  // Answers a request (BundleGate::on_request()). If the answer admits the machine, its download waits until
  // take_turns() returns it.
  BundleGate::Answer begin(ConnId conn, std::string_view request, double now_unix_s);
  // Downloads whose turn at the gate has come since the last call.
  std::vector<ConnId> take_turns();

  struct Step {
    enum class Kind { kNone, kRead, kDone } kind = Kind::kNone;
    std::uint64_t offset = 0;  // of the block in the file
    std::size_t bytes = 0;     // of the block
  };
  // Call when the previous block has left. kNone: it is not this download's turn, or it has to wait until
  // next_due_at().
  Step next(ConnId conn, TimePoint now);
  // The block of next() was read, and `bytes` of it leave now; 0: the read failed.
  void on_read(ConnId conn, std::size_t bytes, TimePoint now);
  // The connection is gone. False if it has no download.
  bool remove(ConnId conn);

  // When a download that waits for the uplink may continue; kNever: none waits.
  TimePoint next_due_at() const { return next_due_at_; }
  // Returns the waiting downloads that may continue now.
  std::vector<ConnId> take_due(TimePoint now);
  void check() const;

 private:
  enum class Stage : std::uint8_t { kQueued, kReady, kWaiting, kReading };  // kWaiting: for the uplink
  struct Download {
    Stage stage = Stage::kQueued;
    std::uint64_t offset = 0;  // bytes that have left
    TimePoint next_block_not_before{};
    void move_to(Stage next);
  };
  TimePoint first_waiting() const;

  BundleGate gate_;
  Bytes size_;
  std::map<ConnId, Download> all_;
  TimePoint next_due_at_ = kNever;
};

}  // namespace echoline::overlay
