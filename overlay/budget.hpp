// How much one identity may say: a token bucket for every kind of message, and a last one for what was dropped, whose
// end is an expulsion. The budgets are far above what a worker ever needs, so only floods meet them. Pure.
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
    kNeedHelp,
    kEdgeFailed,
    kPoisoned,
    kRenew,
    kTrouble,
    kDraining,
    kJoin,
    kApplication,   // a message of the application
    kHave,          // of a child
    kChunkRequest,  // of a child
    kMoreStreams,   // of a child
  };
  static constexpr std::size_t kKinds = 13;
  // Dropped messages before the sender has to go.
  static constexpr Allowance kDropped{128, 2};
  // Of a long message, which weigh as much as another one.
  static constexpr std::size_t kBytesPerMessage = 2048;

  // `heartbeat`: the interval by which what is said regularly is said.
  explicit MessageBudget(Duration heartbeat);

  enum class Verdict { kTake, kDrop, kTooMuch };
  Verdict take(Kind kind, TimePoint now, std::size_t bytes = 0);
  // A message that nothing it could know speaks for: weighs as much as kUnfounded that were dropped. kDrop or kTooMuch.
  static constexpr int kUnfounded = 12;
  Verdict unfounded(TimePoint now);
  // What is counted against a budget; nothing for messages that a learner or a parent does not take at all.
  static std::optional<Kind> kind_of(const ControlMessage& message);
  // "renewals: at most 4 at once and 1 per minute"
  std::string told(Kind kind) const;
  std::uint64_t dropped() const { return dropped_total_; }

 private:
  std::array<Allowance, kKinds> allowed_;
  std::vector<TokenBucket> buckets_;
  TokenBucket dropped_{kDropped};
  std::uint64_t dropped_total_ = 0;
};

}  // namespace echoline::overlay
