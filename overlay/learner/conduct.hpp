// How workers behave, by identity: outlives connections, absences and, for Kept, the learner's process. Judges what
// workers say of each other. Pure.
//
// If two workers disagree about an edge between them, no other machine can know which one is at fault. So a single word
// only separates the two: they are not put together again, and the accuser does not stand better than before. A worker
// is at fault if several independent words meet in it and no more children got on with it lately: a parent accused by
// several children, or a child that accuses several parents alone. A quarantined worker may have been wronged, and a
// bad parent stays bad: its word still separates, but finds no worker at fault.
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
  static constexpr int kBadChunksMax = 2;             // of one parent, before its child is separated from it
  static constexpr int kFailuresInARow = 3;           // of one edge, before its ends are separated
  static constexpr int kStallWeighs = 2;              // failures, for an edge over which nothing came for a stall time.
  static constexpr double kWeightToCondemn = 2;       // sum of words; 1 for a worker that accuses no other one
  static constexpr std::size_t kAccusedAloneMax = 2;  // a worker that accuses more workers alone is lying
  static constexpr int kBrokenMax = 5;                // malformed messages within a day.
  static constexpr std::size_t kFailedWithMax = 2;    // failed edges of one child, before it is the cause.
  static constexpr std::uint64_t kFailureSpacingMs = 250;              // sooner failures are the same one
  static constexpr std::uint64_t kWordMemoryMs = 86'400'000;           // of bad chunks, and of their consequences
  static constexpr std::uint64_t kEdgeMemoryMs = 600'000;              // of failed edges
  static constexpr std::uint64_t kRecordMemoryMs = 2 * kWordMemoryMs;  // of a worker that was not seen since
  static constexpr std::size_t kRecordsMax = 4096;
  static constexpr std::size_t kWordsMax = 32;  // workers about which one worker has a word
  // Separations that one worker may cause by failed edges.
  static constexpr Allowance kPartings{4, 1.0 / 15};

  struct Word {
    int count = 0;
    std::uint64_t at_ms = 0;
    friend bool operator==(const Word&, const Word&) = default;
  };
  // The part of a record that survives the learner's process.
  struct Kept {
    std::uint64_t seen_ms = 0;
    std::uint64_t quarantined_until_ms = 0;
    bool slanders = false;  // its words do not count
    chains::Role role = chains::Role::kSeed;
    std::map<WorkerId, Word> bad_chunks_of;  // parents that it accuses
    Word broken;                             // malformed messages
    friend bool operator==(const Kept&, const Kept&) = default;
    bool clean() const {
      return quarantined_until_ms == 0 && !slanders && role == chains::Role::kSeed && bad_chunks_of.empty() &&
             broken.count == 0;
    }
  };
  struct Record {
    Kept kept;
    chains::RoleLadder ladder;
    std::uint32_t attempts = 0, successes = 0;  // forwards to its children
    int troubles = 0;
    MessageBudget budget;
    TokenBucket partings{kPartings};
    std::map<WorkerId, Word> failures_of;  // edges from parents, in a row; kFailuresInARow: it has failed
    std::map<WorkerId, std::uint64_t>
        served;  // children that installed what it sent them, and when, the latest of each

    explicit Record(Duration heartbeat) : budget(heartbeat) {}
  };

  // The consequence of a word. kPart: the two are separated, and neither is at fault.
  enum class Ruling { kNothing, kPart, kParent, kChild };

  explicit Conduct(Duration heartbeat, std::map<WorkerId, Kept> kept = {});

  Record& of(WorkerId id, std::uint64_t now_ms);
  const Record* find(WorkerId id) const;
  std::size_t size() const { return records_.size(); }

  // A child says that a parent sent a chunk whose proof fails. kParent and kChild: that one is quarantined now. `here`:
  // whether a worker is connected; empty: all are. An accusation of an absent worker makes no liar of the accuser,
  // because no other worker can confirm it.
  using Here = std::function<bool(WorkerId)>;
  Ruling bad_chunk(WorkerId child, WorkerId parent, std::uint64_t now_ms, const Here& here = nullptr);
  // An edge failed though both ends live. kParent and kChild: that one has lost a role. `weighs`: failures in a row.
  Ruling edge_failed(WorkerId child, WorkerId parent, TimePoint now, std::uint64_t now_ms, int weighs = 1);
  // A child has installed what came over its edge from this parent. True: the parent has a better role now.
  bool on_delivery(WorkerId parent, WorkerId child, std::uint64_t now_ms);

  // True: it was the last one that is tolerated.
  bool count_malformed(WorkerId id, std::uint64_t now_ms);
  // Whether its rest has just ended, so that it may forward again.
  bool take_retry(WorkerId id, std::uint64_t now_ms);

  bool is_quarantined(WorkerId id, std::uint64_t now_ms) const;
  // It accuses a worker without proof, and does not stand before workers that accuse none.
  bool accuses(WorkerId id, std::uint64_t now_ms) const;
  bool are_apart(WorkerId a, WorkerId b, std::uint64_t now_ms) const;
  // Pairs that are kept separate, the lesser first. Without quarantined workers: they forward nothing anyway.
  std::set<std::pair<WorkerId, WorkerId>> pairs_apart(std::uint64_t now_ms) const;

  std::uint64_t quarantines() const { return quarantines_; }
  std::uint64_t floods() const { return floods_; }  // workers expelled for exceeding their budgets
  void count_flood() { ++floods_; }

  // Whether prune() is due: once a minute.
  bool take_prune(TimePoint now) { return now >= prune_at_ && (prune_at_ = now + std::chrono::minutes(1), true); }
  // Forgets old words and absent workers; workers in `present` stay.
  void prune(const std::set<WorkerId>& present, std::uint64_t now_ms);
  std::map<WorkerId, Kept> kept() const;  // of workers whose record is not clean
  void check() const;

 private:
  bool believed(const Record& record, const Word& word, std::uint64_t now_ms) const;
  bool weighs(const Record& record, const Word& word, std::uint64_t now_ms) const;
  double weight_against(WorkerId id, std::uint64_t now_ms) const;
  std::size_t words_of(const Record& record, std::uint64_t now_ms) const;
  std::size_t accused_alone(WorkerId id, std::uint64_t now_ms, const Here& here) const;
  std::size_t vouching_for(WorkerId id, std::uint64_t now_ms) const;
  std::set<WorkerId> failed_with(WorkerId id, std::uint64_t now_ms) const;
  void step_down(WorkerId id, std::uint64_t now_ms);
  static void make_room(std::map<WorkerId, Word>& words, WorkerId of);

  Duration heartbeat_;
  std::map<WorkerId, Record> records_;
  TimePoint prune_at_{};
  std::uint64_t quarantines_ = 0, floods_ = 0;
};

}  // namespace echoline::overlay
