// What the learner remembers of how its workers behave, by identity: it outlives connections, absences and, as far as
// it is kept, the learner's process. Judges what workers say of each other. Pure.
//
// Of two workers that disagree about what went between them, nobody else can say which one is at fault. So a single
// word parts the two, and nothing more: they are not put together again, and the accuser does not stand better than
// before. Fault is found where several independent words meet, and no more children got on with the accused lately: in
// the parent that several children complain of, or in the child that complains of several parents whom nobody else
// accuses. Who is quarantined may have been wronged, and a bad parent is none the better for that: its word still
// parts, but finds nobody at fault.
//
// What a worker says in no known form is its own doing, and may be a broken driver's: it is counted, and the fifth ends
// it.
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
  static constexpr int kBadChunksMax = 2;             // of one parent, unproven, before its child and it are parted
  static constexpr int kFailuresInARow = 3;           // of one edge, before its ends are parted
  static constexpr int kStallWeighs = 2;              // of them: nothing came over it for a whole stall time
  static constexpr double kWeightToCondemn = 2;       // of words; one weighs 1 by who accuses nobody else
  static constexpr std::size_t kAccusedAloneMax = 2;  // by one worker: accuses more whom nobody else does: it lies
  static constexpr int kBrokenMax = 5;                // messages in no known form, within a day
  static constexpr std::size_t kFailedWithMax = 2;    // edges of one child, before it is taken to be the cause
  static constexpr std::uint64_t kFailureSpacingMs = 250;              // what comes sooner is the same failure
  static constexpr std::uint64_t kWordMemoryMs = 86'400'000;           // of bad chunks, and of what follows from them
  static constexpr std::uint64_t kEdgeMemoryMs = 600'000;              // of failed edges
  static constexpr std::uint64_t kRecordMemoryMs = 2 * kWordMemoryMs;  // of who has not been seen since
  static constexpr std::size_t kRecordsMax = 4096;
  static constexpr std::size_t kWordsMax = 32;  // said by one worker: of so many others
  // Ends of failed edges that one worker may have moved at once, and again.
  static constexpr Allowance kPartings{4, 1.0 / 15};

  struct Word {
    int count = 0;
    std::uint64_t at_ms = 0;
    friend bool operator==(const Word&, const Word&) = default;
  };
  // What survives the learner's process.
  struct Kept {
    std::uint64_t seen_ms = 0;
    std::uint64_t quarantined_until_ms = 0;
    bool slanders = false;  // what it says counts no more
    chains::Role role = chains::Role::kSeed;
    std::map<WorkerId, Word> bad_chunks_of;  // parents, as it says
    Word broken;                             // what it said in no known form
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

  // What follows from a word. kPart: no more than that the two are put apart.
  enum class Ruling { kNothing, kPart, kParent, kChild };

  explicit Conduct(Duration heartbeat, std::map<WorkerId, Kept> kept = {});

  Record& of(WorkerId id, std::uint64_t now_ms);
  const Record* find(WorkerId id) const;
  std::size_t size() const { return records_.size(); }

  // A child says that a parent sent a chunk whose proof fails. kParent and kChild: that one has been quarantined.
  // here: who is a member now, or everybody. Nobody is left who could bear out what is said of one that has gone: it
  // makes no liar of its accuser.
  using Here = std::function<bool(WorkerId)>;
  Ruling bad_chunk(WorkerId child, WorkerId parent, std::uint64_t now_ms, const Here& here = nullptr);
  // An edge failed though both ends live. kParent and kChild: that one has lost a role.
  // weighs: as so many failures in a row.
  Ruling edge_failed(WorkerId child, WorkerId parent, TimePoint now, std::uint64_t now_ms, int weighs = 1);
  // A child has installed what came over its edge from this parent. True: the parent has a better role now.
  bool delivered(WorkerId parent, WorkerId child, std::uint64_t now_ms);

  // It said something in no known form. True: once too often.
  bool broken(WorkerId id, std::uint64_t now_ms);

  // True: it has rested, and may forward again.
  bool tries_again(WorkerId id, std::uint64_t now_ms);

  bool quarantined(WorkerId id, std::uint64_t now_ms) const;
  // Something it says of others is not borne out: it does not stand before those who say nothing.
  bool accuses(WorkerId id, std::uint64_t now_ms) const;
  bool apart(WorkerId a, WorkerId b, std::uint64_t now_ms) const;
  // Pairs that are not put together, each once, the lesser first. Who is quarantined forwards nothing, and needs no
  // keeping apart.
  std::set<std::pair<WorkerId, WorkerId>> apart(std::uint64_t now_ms) const;

  std::uint64_t quarantines() const { return quarantines_; }
  std::uint64_t floods() const { return floods_; }  // workers expelled for exceeding their budgets
  void count_flood() { ++floods_; }

  // Whether prune() is due: once a minute.
  bool take_prune(TimePoint now) { return now >= prune_at_ && (prune_at_ = now + std::chrono::minutes(1), true); }
  // Forgets what is long past; those in `present` stay.
  void prune(const std::set<WorkerId>& present, std::uint64_t now_ms);
  std::map<WorkerId, Kept> kept() const;  // of those that are not clean

 private:
  bool believed(const Record& record, const Word& word, std::uint64_t now_ms) const;
  bool weighs(const Record& record, const Word& word, std::uint64_t now_ms) const;
  double weight_against(WorkerId id, std::uint64_t now_ms) const;
  std::size_t words_of(const Record& record, std::uint64_t now_ms) const;
  std::size_t accused_alone(WorkerId id, std::uint64_t now_ms, const Here& here) const;
  std::size_t vouching_for(WorkerId id, std::uint64_t now_ms) const;
  std::set<WorkerId> failed_with(WorkerId id, std::uint64_t now_ms) const;
  void step_down(WorkerId id, std::uint64_t now_ms);
  static void say(std::map<WorkerId, Word>& words, WorkerId of);

  Duration heartbeat_;
  std::map<WorkerId, Record> records_;
  TimePoint prune_at_{};
  std::uint64_t quarantines_ = 0, floods_ = 0;
};

}  // namespace echoline::overlay
