// Message budgets (limits per kind of message) of a worker's children. They belong to identities, so a new connection
// does not refill one. A child that far exceeds its budget is barred for a while. No I/O and no clock.
#pragma once
#include <functional>
#include <map>

#include "overlay/budget.hpp"

namespace echoline::overlay {

class ChildBudgets {
 public:
  static constexpr Duration kBarredTime = std::chrono::minutes(1);
  static constexpr std::size_t kChildrenMax = 1024;

  // Counts a message of this child, and decides what happens to it. kTooMuch: the child is barred for kBarredTime.
  // `heartbeat`: the run's heartbeat interval. If kChildrenMax children are remembered, those that are neither
  // connected (`is_connected`) nor barred are forgotten.
  MessageBudget::Verdict count(WorkerId child, MessageBudget::Kind kind, std::size_t bytes, Duration heartbeat,
                               const std::function<bool(WorkerId)>& is_connected, TimePoint now) {
    if (children_.size() >= kChildrenMax && !children_.contains(child))
      std::erase_if(children_,
                    [&](const auto& other) { return other.second.barred_until < now && !is_connected(other.first); });
    Child& sender = children_.try_emplace(child, Child{MessageBudget(heartbeat), {}}).first->second;
    const auto verdict = sender.budget.count(kind, now, bytes);
    if (verdict == MessageBudget::Verdict::kTooMuch) sender.barred_until = now + kBarredTime;
    return verdict;
  }
  bool is_barred(WorkerId child, TimePoint now) const {
    const auto known = children_.find(child);
    return known != children_.end() && now < known->second.barred_until;
  }
  std::string limit_text(WorkerId child, MessageBudget::Kind kind) const {
    return children_.at(child).budget.describe(kind);
  }

 private:
  struct Child {
    MessageBudget budget;
    TimePoint barred_until{};
  };
  std::map<WorkerId, Child> children_;
};

}  // namespace echoline::overlay
