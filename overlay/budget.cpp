// The limits of each kind of message. The learner's core and ChildBudgets count every message of a worker here.
#include "overlay/budget.hpp"

#include "base/overloaded.hpp"

namespace echoline::overlay {
namespace {

struct Rule {
  const char* name;
  Allowance allowance;
  double per_heartbeat = 0;  // messages allowed in addition at each heartbeat
};

// Indexed by Kind. Columns: name, {burst, per second}, additional messages per heartbeat.
constexpr std::array<Rule, MessageBudget::kKinds> kRules{{
    {"heartbeats", {64, 0}, 4},
    {"acknowledgements", {1024, 64}},
    {"calls for help", {64, 0}, 1},
    {"failed edges", {256, 16}},
    {"bad chunks", {16, 1}},
    {"renewals", {4, 1.0 / 60}},
    {"troubles", {64, 1}},
    {"announcements that it drains", {4, 0.1}},
    {"joins", {16, 0.5}},
    {"messages", {4096, 1024}},
    {"lists of its chunks", {256, 32}, 4},
    {"requests for a chunk", {1024, 128}},
    {"requests for streams", {64, 4}},
}};

}  // namespace

MessageBudget::MessageBudget(Duration heartbeat) {
  for (std::size_t kind = 0; kind < kKinds; ++kind) {
    allowed_[kind] = kRules[kind].allowance;
    if (heartbeat > Duration{}) allowed_[kind].per_s += kRules[kind].per_heartbeat / seconds(heartbeat);
    buckets_.emplace_back(allowed_[kind]);
  }
}

MessageBudget::Verdict MessageBudget::count(Kind kind, TimePoint now, std::size_t bytes) {
  const double weight = 1 + static_cast<double>(bytes / kBytesPerMessage);
  if (buckets_[static_cast<std::size_t>(kind)].take(now, weight)) return Verdict::kAccept;
  ++dropped_total_;
  return dropped_.take(now, weight) ? Verdict::kDrop : Verdict::kTooMuch;
}

MessageBudget::Verdict MessageBudget::count_unfounded_accusation(TimePoint now) {
  ++dropped_total_;
  for (int i = 0; i < kUnfoundedWeight; ++i)
    if (!dropped_.take(now)) return Verdict::kTooMuch;
  return Verdict::kDrop;
}

std::optional<MessageBudget::Kind> MessageBudget::kind_of(const ControlMessage& message) {
  return std::visit(Overloaded{[](const Heartbeat&) { return std::optional(Kind::kHeartbeat); },
                               [](const Installed&) { return std::optional(Kind::kAck); },
                               [](const NeedHelp&) { return std::optional(Kind::kNeedHelp); },
                               [](const EdgeFailed&) { return std::optional(Kind::kEdgeFailed); },
                               [](const Poisoned&) { return std::optional(Kind::kPoisoned); },
                               [](const Renew&) { return std::optional(Kind::kRenew); },
                               [](const Trouble&) { return std::optional(Kind::kTrouble); },
                               [](const Draining&) { return std::optional(Kind::kDraining); },
                               [](const Have&) { return std::optional(Kind::kHave); },
                               // A child sends a grant before the list of chunks that it permits.
                               [](const SignedGrant&) { return std::optional(Kind::kHave); },
                               [](const ChunkRequest&) { return std::optional(Kind::kChunkRequest); },
                               [](const MoreStreams&) { return std::optional(Kind::kMoreStreams); },
                               [](const auto&) { return std::optional<Kind>(); }},
                    message);
}

std::string MessageBudget::describe(Kind kind) const {
  const Allowance& allowance = allowed_[static_cast<std::size_t>(kind)];
  const std::string rate = allowance.per_s >= 1 ? fmt::format("{:.0f} a second", allowance.per_s)
                                                : fmt::format("{:.0f} a minute", allowance.per_s * 60);
  return fmt::format("{}: at most {:.0f} at once and {}", kRules[static_cast<std::size_t>(kind)].name, allowance.burst,
                     rate);
}

}  // namespace echoline::overlay
