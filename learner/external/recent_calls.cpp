// Remembers the results of API calls, so that TrainerServer can answer a repeated call.
#include "learner/external/recent_calls.hpp"

#include <utility>

#include "base/text.hpp"

namespace echoline::learner {

Result<RecentCalls::Turn> RecentCalls::begin(const std::string& id, const std::string& description) {
  if (id.empty()) return Turn(nullptr, {}, {});
  if (id.size() > kIdBytesMax)
    return fail(Code::kInvalid, "Idempotency-Key", "expected at most {} bytes, found {}", kIdBytesMax, id.size());
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto [it, is_new] = calls_.try_emplace(id, Call{.description = description});
    if (is_new) return Turn(this, id, {});
    if (it->second.description != description)
      return fail(Code::kInvalid, "Idempotency-Key", "'{}' was the id of {}: give every call a new one", printable(id),
                  printable(it->second.description));
    if (it->second.result) return Turn(this, id, it->second.result);
    ended_.wait(lock);
  }
}

void RecentCalls::Turn::finish(std::string result) {
  if (!calls_) return;
  const std::lock_guard lock(calls_->mutex_);
  const auto call = calls_->calls_.find(id_);
  if (call == calls_->calls_.end()) return;  // dropped while its earlier result was in use
  if (!call->second.result) calls_->finished_ids_.push_back(id_);
  call->second.result = std::move(result);
  for (; calls_->finished_ids_.size() > calls_->results_max_; calls_->finished_ids_.pop_front())
    calls_->calls_.erase(calls_->finished_ids_.front());
  calls_->ended_.notify_all();
}

RecentCalls::Turn::~Turn() {
  if (!calls_) return;
  const std::lock_guard lock(calls_->mutex_);
  if (const auto it = calls_->calls_.find(id_); it != calls_->calls_.end() && !it->second.result)
    calls_->calls_.erase(it);
  calls_->ended_.notify_all();
}

}  // namespace echoline::learner
