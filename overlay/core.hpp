// The base of all protocol cores: the events they take, the actions they return, and the rate limits of the node's
// network link. A core decides for one node, a learner or a worker.
//
// A core and its components do no I/O and read no clock: no socket, disk, thread or randomness, so equal events give
// equal actions. Each component's check() aborts if an invariant is broken; tests and simulator call it between events.
//
// The driver (uv/ on real machines, sim/ under virtual time) calls an event function with the time, then performs
// take_actions() in order, and calls on_timer() when next_deadline() has come.
#pragma once
#include <deque>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "overlay/action.hpp"
#include "overlay/connection_limits.hpp"
#include "overlay/pacer.hpp"
#include "overlay/transport.hpp"
#include "overlay/trust/authority.hpp"

namespace echoline::overlay {

// The peer of an accepted connection: its address and its proven identity.
struct PeerInfo {
  std::string host;
  trust::PeerIdentity identity;
};

// Lets a test force a rare but legal course of events at named points (sites) of the cores. Production code has no such
// object.
class FaultPoints {
 public:
  virtual ~FaultPoints() = default;
  // Whether the core takes the rare course at this site now.
  virtual bool fire(std::string_view site) = 0;
};

struct CoreOptions {
  LinkLimits limits;
  double wire_overhead = 0;       // fraction that network headers add to every byte; counts towards the limits
  double unix_origin_s = 0;       // the wall clock at TimePoint zero [s since 1970], for certificates and expiry
  FaultPoints* faults = nullptr;  // only in tests
  ConnectionLimits connections = ConnectionLimits::of(/*files=*/65536);  // nodes set those of their process
};

class Core {
 public:
  static constexpr Duration kHandshakeTimeout = std::chrono::seconds(5);
  // A worker asks for a helper, a node that sends it missing versions, at most once in this many heartbeat intervals.
  static constexpr int kHelpPauseHeartbeats = 4;

  explicit Core(const CoreOptions& options)
      : up_pacer_(options.limits.up, options.wire_overhead),
        uplink_(up_pacer_, actions_),
        transport_(up_pacer_, uplink_, actions_),
        unix_origin_s_(options.unix_origin_s),
        down_pacer_(options.limits.down, options.wire_overhead),
        faults_(options.faults) {}
  virtual ~Core() = default;
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // A connection is reported once it is encrypted and the peer has proven its identity.
  virtual void on_accepted(ConnId conn, const PeerInfo& peer, TimePoint now) = 0;
  virtual void on_connected(ConnId conn, TimePoint now) = 0;
  // The peer closed, or the connection or the dial failed.
  virtual void on_closed(ConnId conn, const std::string& reason, TimePoint now) = 0;
  // The peer sent bytes that cannot be read. TLS excludes damage on the way, so the peer itself is at fault.
  virtual void on_corrupt(ConnId conn, const std::string& reason, TimePoint now) { on_closed(conn, reason, now); }
  virtual void on_frame(ConnId conn, Frame frame, TimePoint now) = 0;
  // The network has taken another `bytes` bytes of those sent on `conn`.
  virtual void on_sent(ConnId conn, std::size_t bytes, TimePoint now) = 0;
  virtual void on_timer(TimePoint now) = 0;
  virtual TimePoint next_deadline() const = 0;
  // Answers to act::SaveState, act::Spool and act::ReadChunk. A spool is the file of a publication on this node's disk.
  virtual void on_saved(const Status&, TimePoint) {}
  virtual void on_spooled(const PublicationId&, std::uint32_t /*chunk*/, const Status&, TimePoint) {}
  virtual void on_chunk_read(const PublicationId&, std::uint32_t /*chunk*/, Result<Slice>, TimePoint) {}
  // The spool of a publication to deliver could not be opened.
  virtual void on_delivery_failed(Version, const std::string&, TimePoint) {}
  // A path is narrow if it drops large packets, as with a wrong MTU (narrow_paths.hpp). `what` describes the evidence.
  virtual void on_large_packets_dropped(WorkerId peer, const std::string& what, TimePoint now);

  // Bytes were read from a connection and are not decoded yet. Enforces the download limit.
  void on_received(std::size_t bytes, TimePoint now);
  // The most bytes that the driver should read at a time, so that the download rate stays even.
  std::size_t read_bytes_max(std::size_t buffer_bytes) const { return down_pacer_.slice_bytes(buffer_bytes); }

  // The time against which certificates are checked: the learner's clock, as far as this node knows it. [seconds since
  // 1970]
  virtual double run_unix_s(TimePoint now) const { return unix_s(now); }

  std::vector<Action> take_actions() { return std::exchange(actions_, {}); }
  Bytes bytes_received() const { return {bytes_received_}; }
  Bytes bytes_sent() const { return {transport_.bytes_sent() + uplink_.bytes_sent()}; }

 protected:
  void send_control(ConnId conn, const ControlMessage& message, TimePoint now) { transport_.send(conn, message, now); }
  void close(ConnId conn) { transport_.close(conn); }
  void resume_reading(TimePoint now);  // call in on_timer()
  // When reading resumes, after the download limit has stopped it; otherwise kNever.
  TimePoint reading_deadline() const { return is_reading_ ? kNever : down_pacer_.free_at(); }
  ConnId dial(const Endpoint& to, act::Service service, WorkerId expected) {
    return transport_.dial(to, service, expected);
  }
  double unix_s(TimePoint now) const { return unix_origin_s_ + seconds(now.time_since_epoch()); }
  std::uint64_t unix_ms(TimePoint now) const { return static_cast<std::uint64_t>(unix_s(now) * 1e3); }
  bool is_fault_forced(std::string_view site) const { return faults_ && faults_->fire(site); }

  Pacer up_pacer_;
  std::vector<Action> actions_;
  Uplink uplink_;
  Transport transport_;
  double unix_origin_s_;

 private:
  Pacer down_pacer_;
  FaultPoints* faults_;
  std::uint64_t bytes_received_ = 0;
  bool is_reading_ = true;  // false: the download limit has stopped reading
  TimePoint resumed_at_{};  // when reading resumed last
};

// Messages of the application to one peer, cut into frames that alternate with chunks. The core bounds the queue.
class MessageQueue final : public Source {
 public:
  static constexpr std::size_t kPartBytes = 32 * 1024;  // small, so that no other frame waits long for one part

  void push(Slice message);
  std::optional<OutFrame> next(ConnId) override;
  // The peer is in the local network. Call before the first connection is opened.
  void set_local(bool is_local) { is_local_ = is_local; }
  bool is_local() const override { return is_local_; }
  std::size_t bytes() const { return bytes_; }
  void clear() { messages_.clear(), front_bytes_sent_ = bytes_ = 0; }

 private:
  std::deque<Slice> messages_;
  std::size_t front_bytes_sent_ = 0;  // bytes of the first message that have left
  std::size_t bytes_ = 0;             // of all messages, without those that have left
  bool is_local_ = false;
};

// Reassembles the messages of one peer.
class MessageAssembler {
 public:
  // Returns the whole message with its last part. kExhausted for a message above `bytes_max`: the assembler drops it
  // and skips its further parts. The error repeats for every further `bytes_max` bytes.
  Result<std::optional<std::string>> add(const Frame& part, std::size_t bytes_max = kMessageBytesMax);
  std::size_t bytes() const { return bytes_.size(); }  // of the incomplete message

 private:
  std::string bytes_;
  std::size_t skipped_bytes_ = 0;  // bytes of a message that is too long, since the last error; 0: no part is skipped
};

// The time after which a peer that sends regular messages counts as silent. It is learned from the gaps between the
// messages (mean and deviation, like TCP's retransmission timeout), within [4, 12] intervals. The time doubles after
// every silence, because messages from before the silence may still fill the link.
class SilenceMeter {
 public:
  static constexpr int kBackoffsMax = 5;

  // `silences`: how often the peer was silent before. Each silence doubles the time.
  void begin(Duration interval, TimePoint now, int silences = 0) {
    interval_ = interval;
    last_regular_at_ = now;
    mean_s_ = seconds(interval);
    backoffs_ = std::min(silences, kBackoffsMax);
  }
  void on_regular_message(TimePoint now);
  // The peer sent a message that is not a regular one, so its gap is not counted.
  void on_other_message(TimePoint now) { last_other_at_ = now; }
  // This process was suspended for `pause`, until now. That time does not count as silence of the peer. If the peer
  // was heard after the suspension, the whole pause would be too much, so `now` bounds both times.
  void postpone(Duration pause, TimePoint now) {
    last_regular_at_ = std::min(last_regular_at_ + pause, now);
    last_other_at_ = std::min(last_other_at_ + pause, now);
  }
  TimePoint deadline() const;  // kNever before begin()

 private:
  Duration interval_{};
  TimePoint last_regular_at_{}, last_other_at_{};
  double mean_s_ = 0, deviation_s_ = 0;  // of the gaps between regular messages
  int backoffs_ = 0;
};

}  // namespace echoline::overlay
