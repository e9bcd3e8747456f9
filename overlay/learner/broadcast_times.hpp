// Broadcasts that are under way, and how long each takes. A broadcast brings one publication to the workers. Its time
// T_b ends when a quorum, a fraction q of the workers that were active at the publication, has installed it. No I/O and
// no clock.
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
  // Stragglers are given up after kStragglerFactor × the time the quorum took, plus kStragglerPatience.
  static constexpr int kStragglerFactor = 4;
  static constexpr Duration kStragglerPatience = std::chrono::seconds(5);
  // The last worker is left out of T_b if it took more than kOutlierFactor × the time of all others.
  static constexpr double kOutlierFactor = 1.5;
  // Broadcasts whose T_b is still open; older ones are given up.
  static constexpr std::size_t kBroadcastsMax = 64;

  struct Broadcast {
    Version version;
    std::optional<Version> base;
    PublicationId id{};
    TimePoint published;
    TimePoint encoded{};  // when the last byte of the publication was made
    TimePoint closed{};   // when the publication was complete, so that its manifest could be sent
    Duration sealing{};   // hashing and signing of its chunks before `encoded`
    struct Ack {
      TimePoint received_at{};
      Duration verify{}, install{}, acknowledge{};  // as in BroadcastParts
    } last_ack, second_last_ack;                    // the last two acknowledgements of workers in `active`
    WorkerId last_acker{};                          // the sender of `last_ack`
    std::set<WorkerId> active;       // workers that were connected at the publication, without stragglers
    std::set<WorkerId> waiting_for;  // workers in `active` that have not acknowledged it
    // Connected workers for which T_b does not wait: they are far behind, or an earlier broadcast was given up because
    // of them.
    std::set<WorkerId> stragglers;
    std::uint64_t chunk_bytes_sent_before = 0;  // by the learner, until this broadcast began
    chains::Topology topology;
    std::vector<WorkerId> nodes = {};  // of the trainer, in `topology`
  };
  // A broadcast whose T_b is known: it ended at `ended_at`, when `acknowledged` workers had installed the version.
  struct Done {
    Broadcast broadcast;
    TimePoint ended_at;
    std::size_t acknowledged = 0;
  };

  explicit BroadcastTimes(double quorum) : quorum_(quorum) {}

  void begin(Broadcast broadcast);
  void abandon(const PublicationId& id);
  void on_encoded(const PublicationId& id, Duration sealing, TimePoint now);
  void on_closed(const PublicationId& id, TimePoint now);
  // A worker has installed this version, and so all older ones. `delay`: the acknowledgement's transit time.
  void on_acknowledged(WorkerId worker, const Installed& ack, Duration delay, TimePoint now);
  // The worker has lost its place in the topology, so no broadcast waits for it.
  void remove(WorkerId worker);
  // The expected install time of the worker that acknowledged last, divided by that of the slowest other worker; at
  // least 1. It follows from the topology and the links.
  using ExpectedLateness = std::function<double(const Broadcast&)>;
  // Removes and returns the broadcasts that ceil(q * n) of their n active workers have acknowledged, oldest first.
  std::vector<Done> take_done(const ExpectedLateness& expected, TimePoint now);
  // Removes and returns the broadcasts that most workers have acknowledged, but for which the other workers have taken
  // too long. Those workers are still in `waiting_for`.
  std::vector<Done> take_given_up(TimePoint now);
  // The parts of T_b. Durations that the worker reports are cut so that all parts add up to T_b.
  static BroadcastParts parts_of(const Broadcast& broadcast, TimePoint ended_at);

  const std::vector<Broadcast>& open_broadcasts() const { return broadcasts_; }
  void check() const;

 private:
  bool is_last_outlier(const Broadcast& broadcast, const ExpectedLateness& expected) const;

  double quorum_;  // q
  std::vector<Broadcast> broadcasts_;
};

}  // namespace echoline::overlay
