// The child's side of one edge: its parallel connections to a parent or a helper, and what that node has sent. No I/O
// and no clock.
#pragma once
#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "overlay/core.hpp"

namespace echoline::overlay {

// Finds how many parallel connections an edge needs: while the parent has more to send than arrives, their number is
// doubled for as long as the rate follows. One TCP connection is limited to its window per round-trip time.
class StreamProbe {
 public:
  static constexpr std::uint32_t kStreamsMax = 8;
  static constexpr Duration kWindow = std::chrono::milliseconds(1500);
  static constexpr double kRateGrowthMin = 1.2;  // the factor by which twice the connections must raise the rate

  // Returns the number of connections to have. `total_bytes`: received over this edge so far. `busy`: the parent holds
  // chunks that the child lacks.
  std::uint32_t observe(std::uint64_t total_bytes, bool busy, TimePoint now);
  // The edge keeps this number of connections, because another one could not be opened.
  void settle(std::size_t streams) {
    streams_ = std::max(1u, static_cast<std::uint32_t>(streams));
    phase_ = Phase::kSettled;
  }

 private:
  enum class Phase : std::uint8_t {
    kMeasuring,
    kWarmingUp,  // new connections find their speed during one window, which does not count
    kSettled,
  };
  Phase phase_ = Phase::kMeasuring;
  std::uint32_t streams_ = 1;
  std::optional<TimePoint> window_began_at_;  // absent: nothing was observed yet
  std::uint64_t bytes_at_begin_ = 0;          // received when the window began
  double rate_before_ = 0;                    // in the last window that counted [bytes/s]
};

// The learner's instructions for one edge.
struct EdgeTerms {
  Parent parent;
  std::optional<SignedGrant> grant;  // proof for the parent that it must serve this node
  // Set if the edge leads to a helper: the version to catch up to. Absent for an assigned parent.
  std::optional<Version> catch_up_to;
  bool full_only = false;  // only for a helper: a full snapshot is needed
};

class Upstream {
 public:
  enum class State : std::uint8_t {
    kClosed,    // no connection, and no attempt is planned
    kPausing,   // the edge failed: the next attempt is at due_at_
    kDialling,  // this node has dialled
    kAwaited,   // the parent dials, until due_at_
    kOpen,      // a stream is open
  };
  struct Stream {  // one of the parallel connections
    ConnId conn;
    std::uint32_t number = 0;
    bool is_open = false;
  };

  EdgeTerms terms;

  // `silences`: consecutive edges to earlier helpers that failed by heartbeat timeout.
  explicit Upstream(EdgeTerms edge_terms, int silences = 0) : terms(std::move(edge_terms)), silences_(silences) {}

  bool is_helper() const { return terms.catch_up_to.has_value(); }
  bool is_open() const { return open_conn().has_value(); }
  std::optional<ConnId> open_conn() const;  // the first open connection
  const std::vector<Stream>& streams() const { return streams_; }
  bool contains(ConnId conn) const {
    return std::any_of(streams_.begin(), streams_.end(), [&](const Stream& stream) { return stream.conn == conn; });
  }

  void await_parent(TimePoint until) { move_to(State::kAwaited, until); }
  void add_dialled(ConnId conn);
  // Whether a connection from the parent is accepted. The parent may dial before this node expects it, and dials
  // further streams later.
  bool accepts_dial() const { return state_ != State::kClosed && streams_.size() < StreamProbe::kStreamsMax; }
  // The parent has dialled; open_stream() follows.
  void add_accepted(ConnId conn) { streams_.push_back({conn, next_stream_++}); }
  // Returns the stream's number, 0 for the first one of an edge.
  std::uint32_t open_stream(ConnId conn, Duration heartbeat, TimePoint now);
  // Returns whether the stream was open. If no other one is, the caller calls close().
  bool remove_stream(ConnId conn);
  // Forgets the connections, which the caller has closed.
  void close();
  // The edge has failed: the next attempt is due at `until`.
  void pause(TimePoint until) { move_to(State::kPausing, until); }
  bool attempt_is_due(TimePoint now) const { return state_ == State::kPausing && now >= due_at_; }
  bool parent_is_late(TimePoint now) const { return state_ == State::kAwaited && now >= due_at_; }
  TimePoint next_deadline() const { return is_open() ? status_meter_.deadline() : due_at_; }
  // This process was suspended for this time, until now.
  void postpone(Duration suspended_for, TimePoint now);

  void on_frame(TimePoint now) {
    status_meter_.on_other_message(now);
    has_received_frame_ = true;
  }
  void on_status(const std::vector<Progress>& progress, TimePoint now);
  void on_chunk(std::size_t bytes) { chunk_bytes_received_ += bytes; }
  void on_proven_chunk() { failures_ = silences_ = 0; }
  int count_corrupt_chunk() { return ++corrupt_chunks_; }
  // Returns the failures since the last proven chunk.
  int count_failure(bool by_silence) {
    if (by_silence) ++silences_;
    return ++failures_;
  }
  void reset_corrupt_count() { corrupt_chunks_ = 0; }  // the learner has assigned the edge again
  void reset_failure_count() { failures_ = 0; }

  bool is_silent(TimePoint now) const { return is_open() && now >= status_meter_.deadline(); }
  bool has_received_nothing() const { return is_open() && !has_received_frame_; }  // since it was opened
  int silences() const { return silences_; }
  // Number of chunks that the parent holds, per stripe, of each recent publication. Stripe j of s has the chunks i with
  // i mod s = j.
  const std::map<PublicationId, std::vector<std::uint32_t>>& progress() const { return progress_; }
  // Returns the number of streams to have. `busy`: the parent holds chunks that this node lacks.
  std::uint32_t update_streams_wanted(bool busy, TimePoint now) {
    return stream_probe_.observe(chunk_bytes_received_, busy, now);
  }
  void settle_streams() { stream_probe_.settle(streams_.size()); }
  void check() const;

 private:
  void move_to(State next, TimePoint due = kNever);
  std::vector<Stream>::iterator find(ConnId conn);

  State state_ = State::kClosed;
  TimePoint due_at_ = kNever;
  std::vector<Stream> streams_;
  std::uint32_t next_stream_ = 0;
  int failures_ = 0;        // since the last proven chunk
  int silences_ = 0;        // failures by heartbeat timeout; the count carries over from one helper to the next
  int corrupt_chunks_ = 0;  // chunks whose proof failed, since the edge was assigned
  bool has_received_frame_ = false;  // since the edge was opened
  SilenceMeter status_meter_;        // detects that the parent's status messages have stopped
  StreamProbe stream_probe_;
  std::uint64_t chunk_bytes_received_ = 0;
  std::map<PublicationId, std::vector<std::uint32_t>> progress_;
};

}  // namespace echoline::overlay
