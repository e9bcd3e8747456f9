// Counts workers' unread messages, for RolloutDesk and DeskLogic.
#include "learner/desk_inbox.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/result.hpp"

namespace echoline::learner {
namespace {

// One worker may have as many unread bytes as kLongestMessages messages of the greatest length, clamped to
// [kBytesMin, kBytesMax].
constexpr std::size_t kLongestMessages = 32, kBytesMin = 16u << 20, kBytesMax = 256u << 20;

}  // namespace

DeskInbox::DeskInbox(Bytes message_max)
    : bytes_max_(std::clamp<std::size_t>(kLongestMessages * message_max.count, kBytesMin, kBytesMax)) {}

DeskInbox::Admission DeskInbox::admit(WorkerId worker, std::size_t bytes, bool database_stalled) {
  const std::lock_guard lock(mutex_);
  if (const auto blocked = blocked_.find(worker); blocked != blocked_.end())
    return {.is_accepted = false, .expel_reason = blocked->second};
  const auto waiting = waiting_.find(worker);
  const Waiting unread = waiting == waiting_.end() ? Waiting{} : waiting->second;
  if (unread.messages >= kMessagesMax || unread.bytes + bytes > bytes_max_) {
    if (database_stalled) {
      overflowed_.insert(worker);
      return {};  // neither accepted nor expelled
    }
    return {.is_accepted = false,
            .expel_reason =
                fmt::format("{} messages of it, {} bytes, wait to be read", unread.messages + 1, unread.bytes + bytes)};
  }
  waiting_[worker] = {.messages = unread.messages + 1, .bytes = unread.bytes + bytes};
  return {.is_accepted = true, .expel_reason = {}};
}

void DeskInbox::release(WorkerId worker, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto it = waiting_.find(worker);
  ECHO_CHECK(it != waiting_.end() && it->second.bytes >= bytes, "worker {}: {} bytes are read that do not wait", worker,
             bytes);
  it->second.bytes -= bytes;
  if (--it->second.messages == 0) waiting_.erase(it);
}

std::set<WorkerId> DeskInbox::take_overflowed() {
  const std::lock_guard lock(mutex_);
  return std::exchange(overflowed_, {});
}

void DeskInbox::block(WorkerId worker, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  blocked_.emplace(worker, reason);
}

bool DeskInbox::is_blocked(WorkerId worker) const {
  const std::lock_guard lock(mutex_);
  return blocked_.contains(worker);
}

void DeskInbox::check() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [worker, unread] : waiting_)
    ECHO_CHECK(unread.messages > 0 && unread.messages <= kMessagesMax && unread.bytes <= bytes_max_,
               "worker {}: {} messages of {} bytes wait", worker, unread.messages, unread.bytes);
}

}  // namespace echoline::learner
