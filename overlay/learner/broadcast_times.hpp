// Broadcasts that are under way, and how long each takes: the broadcast time T_b ends when a quorum of the workers that
// were active at its publication has installed it. Pure.
#pragma once
#include <functional>
#include <set>
#include <vector>

#include "chains/topology.hpp"
#include "overlay/types.hpp"
#include "overlay/wire/control.hpp"

namespace echoline::overlay {

class BroadcastTimes {
 public:
  // Stragglers are given up after this many times what the quorum took, and kStragglerPatience.
  static constexpr int kStragglerFactor = 4;
  static constexpr Duration kStragglerPatience = std::chrono::seconds(5);
  // As late as all others together, times this, before one alone is left out of T_b.
  static constexpr double kAloneFactor = 1.5;
  // Broadcasts whose T_b is still open; older ones are given up.
  static constexpr std::size_t kBroadcastsMax = 64;

  struct Broadcast {
    Version version;
    std::optional<Version> base;
    PublicationId id{};
    TimePoint published;
    TimePoint encoded{}, closed{};  // the last byte was made; the manifest may leave
    Duration sealing{};
    struct Ack {
      TimePoint at{};
      Duration verify{}, install{}, acknowledge{};
    } last, before;  // the last two of `active`
    WorkerId acked_last{};
    // Those that were there when it was published, but for those that let an earlier one wait in vain.
    std::set<WorkerId> active, waiting;
    std::set<WorkerId> stragglers;  // they were there, too
    std::uint64_t wire_bytes_before = 0;
    chains::Topology topology;
  };
  // A broadcast whose T_b is known: it ended at `until`, when so many had acknowledged.
  struct Done {
    Broadcast broadcast;
    TimePoint until;
    std::size_t acknowledged = 0;
  };

  explicit BroadcastTimes(double quorum) : quorum_(quorum) {}

  void begin(Broadcast broadcast);
  void abandon(const PublicationId& id);
  void encoded(const PublicationId& id, Duration sealing, TimePoint now);
  void closed(const PublicationId& id, TimePoint now);
  // A worker has installed this version, and so all older ones. `delay`: of its acknowledgement on the way.
  void acknowledged(WorkerId worker, const Installed& ack, Duration delay, TimePoint now);
  // The worker has lost its place: no broadcast waits for it.
  void remove(WorkerId worker);
  // How much later than all others the last one was expected, by its place and link: 1 or more.
  using Lateness = std::function<double(const Broadcast&)>;
  // Broadcasts that ceil(q * n) of their active workers have, in the order of their publication.
  std::vector<Done> take_done(const Lateness& expected, TimePoint now);
  // Broadcasts that most have, and some let wait for too long: those are still in `waiting`.
  std::vector<Done> take_given_up(TimePoint now);
  // The parts of T_b. The worker reports its durations, so they count up to the time that there was.
  static BroadcastParts parts_of(const Broadcast& broadcast, TimePoint until);

  const std::vector<Broadcast>& open() const { return broadcasts_; }
  void check() const;

 private:
  bool last_is_alone(const Broadcast& broadcast, const Lateness& expected) const;

  double quorum_;
  std::vector<Broadcast> broadcasts_;
};

}  // namespace echoline::overlay
