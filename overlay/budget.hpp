// Message budgets of one identity: a token bucket for every kind of message, and one for dropped messages. A sender
// that empties the last bucket is expelled. The budgets are far above the needs of any worker, so only floods reach
// them. No I/O and no clock.
#pragma once
#include <array>
#include <cstdint>
#include <string>

#include "base/token_bucket.hpp"
#include "overlay/wire/control.hpp"

namespace echoline::overlay {

class MessageBudget {
 public:
  enum class Kind : std::uint8_t {
    kHeartbeat,
    kAck,
    kNeedHelp,    // a worker's parents cannot bring it up to date
    kEdgeFailed,  // the connection to a parent failed
    kPoisoned,    // a parent sent a chunk whose proof fails
    kRenew,
    kTrouble,   // a problem that an operator must solve
    kDraining,  // a worker hands its children over, then leaves
    kJoin,
    kApplication,   // a message of the application
    kHave,          // of a child
    kChunkRequest,  // of a child
    kMoreStreams,   // of a child
  };
  static constexpr std::size_t kKinds = 13;
  // Dropped messages before the sender is expelled.
  static constexpr Allowance kDroppedAllowance{.burst = 128, .per_s = 2};
  // A message weighs 1, plus 1 for every kBytesPerMessage bytes.
  static constexpr std::size_t kBytesPerMessage = 2048;

  // `heartbeat`: the interval of heartbeats. The limits on kinds that are sent with each heartbeat follow from it.
  explicit MessageBudget(Duration heartbeat);

  enum class Verdict {
    kAccept,   // within the budget
    kDrop,     // beyond the budget of its kind: the caller ignores the message
    kTooMuch,  // beyond the budget of dropped messages: the caller expels the sender
  };
  // Counts a message of `bytes` bytes, and decides what happens to it.
  Verdict count(Kind kind, TimePoint now, std::size_t bytes = 0);
  static constexpr int kUnfoundedWeight = 12;
  // Counts an accusation against a worker that never sent anything to the accuser: as kUnfoundedWeight dropped
  // messages, because an honest worker makes none. Returns kDrop or kTooMuch.
  Verdict count_unfounded_accusation(TimePoint now);
  // The budget of a message; absent for messages that neither a learner nor a parent accepts.
  static std::optional<Kind> kind_of(const ControlMessage& message);
  // The limit as text, such as "renewals: at most 4 at once and 1 a minute".
  std::string describe(Kind kind) const;
  std::uint64_t dropped() const { return dropped_total_; }

 private:
  std::array<Allowance, kKinds> allowed_;
  std::vector<TokenBucket> buckets_;
  TokenBucket dropped_{kDroppedAllowance};
  std::uint64_t dropped_total_ = 0;
};

}  // namespace echoline::overlay
