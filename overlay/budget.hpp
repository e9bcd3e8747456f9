// Message budgets of one identity: a token bucket for every kind of message, and one for dropped messages. A sender
// that empties the last bucket is expelled. The budgets are far above the needs of any worker, so only floods reach
// them. Pure.
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
  // Dropped messages before the sender is expelled.
  static constexpr Allowance kDropped{128, 2};
  // A message weighs 1, plus 1 for every kBytesPerMessage bytes.
  static constexpr std::size_t kBytesPerMessage = 2048;

  // `heartbeat`: the interval of regular messages.
  explicit MessageBudget(Duration heartbeat);

  enum class Verdict { kTake, kDrop, kTooMuch };
  Verdict take(Kind kind, TimePoint now, std::size_t bytes = 0);
  // A message without any basis in what its sender can know. It counts as kUnfounded dropped messages. Returns kDrop or
  // kTooMuch.
  static constexpr int kUnfounded = 12;
  Verdict unfounded(TimePoint now);
  // The budget of a message; absent for messages that neither a learner nor a parent accepts.
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
