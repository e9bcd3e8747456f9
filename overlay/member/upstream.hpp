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
// doubled for as long as the rate follows. [formula 4.8 says why one may not be enough]
class StreamProbe {
 public:
  static constexpr std::uint32_t kStreamsMax = 8;
  static constexpr Duration kWindow = std::chrono::milliseconds(1500);
  static constexpr double kRateGrowthMin = 1.2;  // the factor by which twice the connections must raise the rate

  // `bytes`: received over this edge so far. `busy`: the parent holds chunks that the child lacks.
  // Returns the number of connections to have.
  std::uint32_t observe(std::uint64_t bytes, bool busy, TimePoint now);
  // The edge keeps this number of connections: another one could not be opened.
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
  std::optional<TimePoint> since_;  // begin of the window
  std::uint64_t bytes_ = 0;         // at that time
  double rate_before_ = 0;
};

// The learner's terms of an edge.
struct EdgeTerms {
  Parent parent;
  std::optional<SignedGrant> grant;    // the parent serves this node for it
  std::optional<Version> catch_up_to;  // of a helper; absent: an assigned parent
  bool full_only = false;              // of a helper: a full snapshot is needed
};

class Upstream {
 public:
  enum class State : std::uint8_t {
    kClosed,    // no connection, and no attempt is planned
    kPausing,   // the edge failed: the next attempt is at due_
    kDialling,  // this node has dialled
    kAwaited,   // the parent dials, until due_
    kOpen,      // a stream is open
  };
  struct Stream {
    ConnId conn;
    std::uint32_t number = 0;
    bool open = false;
  };

  EdgeTerms terms;

  // `silences`: those of the helper before this one.
  explicit Upstream(EdgeTerms t, int silences = 0) : terms(std::move(t)), silences_(silences) {}

  bool helps() const { return terms.catch_up_to.has_value(); }
  bool is_open() const { return open_conn().has_value(); }
  std::optional<ConnId> open_conn() const;  // the first one
  const std::vector<Stream>& streams() const { return streams_; }
  bool contains(ConnId conn) const {
    return std::any_of(streams_.begin(), streams_.end(), [&](const Stream& stream) { return stream.conn == conn; });
  }

  void await_parent(TimePoint until) { move_to(State::kAwaited, until); }
  void add_dialled(ConnId conn);
  // An awaited parent may dial early, and dials further streams later.
  bool may_be_dialled() const { return state_ != State::kClosed && streams_.size() < StreamProbe::kStreamsMax; }
  // The parent has dialled; open_stream() follows.
  void add_accepted(ConnId conn) { streams_.push_back({conn, next_stream_++}); }
  // Returns the stream's number, 0 for the first one of an edge.
  std::uint32_t open_stream(ConnId conn, Duration heartbeat, TimePoint now);
  // Returns whether the stream was open. If no other one is, the caller calls close().
  bool remove_stream(ConnId conn);
  // Forgets the connections, which the caller has closed.
  void close();
  void pause(TimePoint until) { move_to(State::kPausing, until); }
  bool attempt_is_due(TimePoint now) const { return state_ == State::kPausing && now >= due_; }
  bool parent_is_late(TimePoint now) const { return state_ == State::kAwaited && now >= due_; }
  TimePoint next_deadline() const { return is_open() ? silence_.deadline() : due_; }
  // This process was suspended for `late`, until now.
  void postpone(Duration late, TimePoint now);

  void on_frame(TimePoint now) { silence_.on_other_message(now), heard_ = true; }
  void on_status(const std::vector<Progress>& progress, TimePoint now);
  void on_chunk(std::size_t bytes) { chunk_bytes_ += bytes; }
  void on_proven_chunk() { failures_ = silences_ = 0; }
  int count_corrupt() { return ++corrupt_; }
  int count_failure(bool by_silence) { return silences_ += by_silence, ++failures_; }
  void forgive_corrupt() { corrupt_ = 0; }
  void forgive_failures() { failures_ = 0; }

  bool is_silent(TimePoint now) const { return is_open() && now >= silence_.deadline(); }
  bool has_received_nothing() const { return is_open() && !heard_; }  // since it was opened
  int silences() const { return silences_; }
  // Chunks of recent publications that the parent holds, by stripe.
  const std::map<PublicationId, std::vector<std::uint32_t>>& progress() const { return progress_; }
  // The number of streams to have. `busy`: the parent holds chunks that this node lacks.
  std::uint32_t streams_wanted(bool busy, TimePoint now) { return probe_.observe(chunk_bytes_, busy, now); }
  void settle_streams() { probe_.settle(streams_.size()); }
  void check() const;

 private:
  void move_to(State next, TimePoint due = kNever);
  std::vector<Stream>::iterator find(ConnId conn);

  State state_ = State::kClosed;
  TimePoint due_ = kNever;
  std::vector<Stream> streams_;
  std::uint32_t next_stream_ = 0;
  int failures_ = 0;      // since the last proven chunk
  int silences_ = 0;      // of them, those by silence; a helper goes on from the one before it
  int corrupt_ = 0;       // chunks whose proof failed, since the edge was assigned
  bool heard_ = false;    // a frame has come since the edge was opened
  SilenceMeter silence_;  // of its statuses
  StreamProbe probe_;
  std::uint64_t chunk_bytes_ = 0;
  std::map<PublicationId, std::vector<std::uint32_t>> progress_;
};

}  // namespace echoline::overlay
