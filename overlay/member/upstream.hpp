// The child's side of one edge: its parallel connections to a parent, and what is known of that parent. Pure.
#pragma once
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "overlay/core.hpp"

namespace echoline::overlay {

// How many parallel connections an edge should have, found by trying: while the parent has more to send than comes,
// their number is doubled for as long as the rate follows. [formula 4.8 says why one may not be enough]
class StreamProbe {
 public:
  static constexpr std::uint32_t kStreamsMax = 8;
  static constexpr Duration kWindow = std::chrono::milliseconds(1500);
  static constexpr double kWorthIt = 1.2;  // the rate must grow at least so much

  // `bytes`: received over this edge so far. `busy`: the parent holds chunks that the child lacks.
  // Returns the number of connections to have.
  std::uint32_t observe(std::uint64_t bytes, bool busy, TimePoint now);
  // One more could not be opened: so many there are, and no more are tried.
  void settle(std::size_t streams) {
    streams_ = std::max(1u, static_cast<std::uint32_t>(streams));
    settled_ = true;
  }

 private:
  std::uint32_t streams_ = 1;
  std::optional<TimePoint> since_;
  std::uint64_t bytes_ = 0;
  double rate_before_ = 0;
  bool settled_ = false, settling_ = false;
};

struct Upstream {
  struct Stream {
    ConnId conn;
    std::uint32_t number = 0;
    bool up = false;
  };
  Parent parent;
  std::optional<SignedGrant> grant;    // what lets this node be served there
  std::optional<Version> catch_up_to;  // a helper; absent: an assigned parent
  bool full_only = false;
  std::vector<Stream> streams;
  std::uint32_t next_stream = 0;
  int failures = 0;  // since the last verified chunk
  int silences = 0;  // of them, those by silence; a helper's are counted on from the helper before it
  int corrupt = 0;   // chunks whose proof failed, since the edge was assigned
  TimePoint redial_at = kNever;
  TimePoint opens_by = kNever;  // the parent dials: until when it should have
  bool heard = false;           // anything, since it was opened
  SilenceMeter silence;
  StreamProbe probe;
  std::uint64_t chunk_bytes = 0;
  std::map<PublicationId, std::vector<std::uint32_t>> progress;  // what the parent says it holds, by stripe

  bool up() const;
  Stream* stream_of(ConnId conn);
};

}  // namespace echoline::overlay
