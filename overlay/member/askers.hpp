// How much the children of a worker may say, by identity: a new connection gives a child nothing anew. A child that
// asks for too much is barred for a while. Pure.
#pragma once
#include <functional>
#include <map>

#include "overlay/budget.hpp"

namespace echoline::overlay {

class Askers {
 public:
  static constexpr Duration kBarred = std::chrono::minutes(1);
  static constexpr std::size_t kAskersMax = 1024;

  // Counts a message of this child. kTooMuch: it is barred from now on. `connected`: whether a child has connections;
  // the others are forgotten where there is no room. `heartbeat`: of the run.
  MessageBudget::Verdict take(WorkerId child, MessageBudget::Kind kind, std::size_t bytes, Duration heartbeat,
                              const std::function<bool(WorkerId)>& connected, TimePoint now) {
    if (askers_.size() >= kAskersMax && !askers_.contains(child))
      std::erase_if(askers_,
                    [&](const auto& other) { return other.second.barred_until < now && !connected(other.first); });
    Asker& from = askers_.try_emplace(child, Asker{MessageBudget(heartbeat), {}}).first->second;
    const auto verdict = from.budget.take(kind, now, bytes);
    if (verdict == MessageBudget::Verdict::kTooMuch) from.barred_until = now + kBarred;
    return verdict;
  }
  bool is_barred(WorkerId child, TimePoint now) const {
    const auto known = askers_.find(child);
    return known != askers_.end() && now < known->second.barred_until;
  }
  // What a child has said, in words.
  std::string told(WorkerId child, MessageBudget::Kind kind) const { return askers_.at(child).budget.told(kind); }

 private:
  struct Asker {
    MessageBudget budget;
    TimePoint barred_until{};
  };
  std::map<WorkerId, Asker> askers_;
};

}  // namespace echoline::overlay
