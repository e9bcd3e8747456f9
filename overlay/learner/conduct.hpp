// A record of each worker's conduct, by identity. It outlives connections and absences; its part `StoredConduct` also
// outlives the learner's process. Judges the accusations that workers send about each other. No I/O and no clock.
//
// If two workers disagree about an edge, the connection from a parent to its child, no other machine can know which one
// is at fault. So a single accusation only separates the two: they get no common edge again, and the accuser gains
// nothing. A worker is at fault if several independent accusations agree: a parent is accused by several children, and
// by at least as many as it served well lately; or a child is the only accuser of several parents. For bad chunks, a
// worker at fault is quarantined: it forwards nothing for a day. For failed edges, it loses a role. An accusation by a
// quarantined worker still separates, but counts against no worker.
//
// Malformed messages are the sender's own doing, perhaps a broken driver's: the fifth within a day ends the membership.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "chains/score.hpp"
#include "overlay/budget.hpp"

namespace echoline::overlay {

class Conduct {
 public:
  static constexpr int kBadChunksMax = 2;    // bad chunks of one parent, before its child is separated from it
  static constexpr int kFailuresInARow = 3;  // failures of one edge, before its two ends are separated
  // A stall, in which nothing useful came over an edge for long, counts as this many failures.
  static constexpr int kStallWeight = 2;
  // A parent is at fault from this sum of weights. An accusation by a worker that accuses n workers weighs 1 / n.
  static constexpr double kQuarantineWeight = 2;
  // A worker that is the only accuser of more workers than this is lying.
  static constexpr std::size_t kLoneAccusationsMax = 2;
  static constexpr int kMalformedMax = 5;  // malformed messages within a day
  // A child is at fault if its edges with more parents than this failed.
  static constexpr std::size_t kFailedPartnersMax = 2;
  static constexpr std::uint64_t kFailureSpacingMs = 250;  // a sooner failure is the same one
  // How long the learner remembers accusations of bad chunks and their consequences; failed edges and deliveries; and
  // the records of absent workers.
  static constexpr std::uint64_t kAccusationMemoryMs = 86'400'000;
  static constexpr std::uint64_t kEdgeMemoryMs = 600'000;
  static constexpr std::uint64_t kRecordMemoryMs = 2 * kAccusationMemoryMs;
  static constexpr std::size_t kRecordsMax = 4096;
  static constexpr std::size_t kAccusationsMax = 32;  // workers that one worker can accuse at a time
  // Separations that one worker may cause by failed edges.
  static constexpr Allowance kSeparations{.burst = 4, .per_s = 1.0 / 15};

  // A count that restarts when its last event is too old.
  struct TimedCount {
    int count = 0;
    std::uint64_t last_event_ms = 0;
    friend bool operator==(const TimedCount&, const TimedCount&) = default;
  };
  // The part of a record that survives the learner's process. Times are in milliseconds since 1970.
  struct StoredConduct {
    std::uint64_t seen_ms = 0;  // the last time the worker was present
    std::uint64_t quarantined_until_ms = 0;
    bool accuses_falsely = false;  // its accusations do not count
    chains::Role role = chains::Role::kSeed;
    std::map<WorkerId, TimedCount> bad_chunks_of;  // by accused parent
    TimedCount malformed;                          // malformed messages
    friend bool operator==(const StoredConduct&, const StoredConduct&) = default;
    bool is_clean() const {
      return quarantined_until_ms == 0 && !accuses_falsely && role == chains::Role::kSeed && bad_chunks_of.empty() &&
             malformed.count == 0;
    }
  };
  struct Record {
    StoredConduct stored;
    chains::RoleLadder ladder;                  // its role: it may be a seed, may forward, or only produces rollouts
    std::uint32_t attempts = 0, successes = 0;  // of forwarding to its children
    int troubles_reported = 0;
    MessageBudget budget;
    TokenBucket separations{kSeparations};
    std::map<WorkerId, TimedCount> failures_of;  // failures in a row of the edge from each parent
    // By child: when the child last installed a publication that this worker had sent it.
    std::map<WorkerId, std::uint64_t> delivered_ms;

    explicit Record(Duration heartbeat) : budget(heartbeat) {}
  };

  // The consequence of an accusation. kSeparate: the two get no common edge, and neither is at fault.
  enum class Ruling { kNothing, kSeparate, kParentAtFault, kChildAtFault };

  explicit Conduct(Duration heartbeat, std::map<WorkerId, StoredConduct> earlier = {});

  Record& record_of(WorkerId id, std::uint64_t now_ms);
  const Record* find(WorkerId id) const;
  std::size_t size() const { return records_.size(); }

  // A child says that a parent sent a chunk whose proof fails. The worker at fault, if any, is quarantined now. An
  // accusation of a worker that is not connected (`is_connected` empty: all are) is never counted as a lie, because no
  // other worker can confirm it.
  using IsConnected = std::function<bool(WorkerId)>;
  Ruling on_bad_chunk(WorkerId child, WorkerId parent, std::uint64_t now_ms, const IsConnected& is_connected = nullptr);
  // An edge failed though both ends live. The worker at fault, if any, has lost a role. The failure counts as `weight`
  // failures in a row. `now` is the clock of the rate limit, `now_ms` the wall clock of the stored times.
  Ruling on_edge_failed(WorkerId child, WorkerId parent, TimePoint now, std::uint64_t now_ms, int weight = 1);
  // A child has installed what came over its edge from this parent. Returns whether the parent has a better role now.
  bool on_delivery(WorkerId parent, WorkerId child, std::uint64_t now_ms);

  // Counts a message that cannot be read or breaks a rule. Returns whether the worker must be expelled.
  bool count_malformed(WorkerId id, std::uint64_t now_ms);
  // Returns, once, whether the worker may forward again some time after it lost that role.
  bool take_retry(WorkerId id, std::uint64_t now_ms);

  bool is_quarantined(WorkerId id, std::uint64_t now_ms) const;
  // Whether the worker accuses one that is not at fault so far. Such an accuser gets no place directly below the
  // learner.
  bool accuses(WorkerId id, std::uint64_t now_ms) const;
  // Whether the two get no common edge.
  bool are_separated(WorkerId a, WorkerId b, std::uint64_t now_ms) const;
  // Separated pairs, the lesser id first. Excludes quarantined accused workers, which forward nothing anyway.
  std::set<std::pair<WorkerId, WorkerId>> separated_pairs(std::uint64_t now_ms) const;

  std::uint64_t quarantines() const { return quarantines_; }
  std::uint64_t floods() const { return floods_; }  // workers expelled for exceeding their budgets
  void count_flood() { ++floods_; }

  // Returns whether prune() is due: once a minute.
  bool take_prune(TimePoint now) {
    if (now < prune_at_) return false;
    prune_at_ = now + std::chrono::minutes(1);
    return true;
  }
  // Forgets old accusations and absent workers; workers in `present` stay.
  void prune(const std::set<WorkerId>& present, std::uint64_t now_ms);
  std::map<WorkerId, StoredConduct> stored_records() const;  // of workers whose record is not clean
  void check() const;

 private:
  // `record`: of the accuser; `bad_chunks`: of the accused parent.
  bool is_credible(const Record& record, const TimedCount& bad_chunks, std::uint64_t now_ms) const;
  bool counts_against(const Record& record, const TimedCount& bad_chunks, std::uint64_t now_ms) const;
  double weight_against(WorkerId id, std::uint64_t now_ms) const;
  std::size_t accusations_by(const Record& record, std::uint64_t now_ms) const;
  std::size_t lone_accusations(WorkerId id, std::uint64_t now_ms, const IsConnected& is_connected) const;
  std::size_t satisfied_children(WorkerId id, std::uint64_t now_ms) const;
  std::set<WorkerId> failed_edge_partners(WorkerId id, std::uint64_t now_ms) const;
  void demote(WorkerId id, std::uint64_t now_ms);
  static void drop_oldest_if_full(std::map<WorkerId, TimedCount>& counts, WorkerId accused);

  Duration heartbeat_;
  std::map<WorkerId, Record> records_;
  TimePoint prune_at_{};
  std::uint64_t quarantines_ = 0, floods_ = 0;
};

}  // namespace echoline::overlay
