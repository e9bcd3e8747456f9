#include "learner/desk_inbox.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/result.hpp"

namespace echoline::learner {
namespace {

// As many bytes as so many of the longest messages, within two limits.
constexpr std::size_t kLongest = 32, kBytesMin = 16u << 20, kBytesMax = 256u << 20;

}  // namespace

DeskInbox::DeskInbox(Bytes message_max)
    : bytes_max_(std::clamp<std::size_t>(kLongest * message_max.count, kBytesMin, kBytesMax)) {}

DeskInbox::Admission DeskInbox::admit(WorkerId worker, std::size_t bytes, bool held_up) {
  const std::lock_guard lock(mutex_);
  if (const auto barred = barred_.find(worker); barred != barred_.end()) return {false, barred->second};
  const auto found = waiting_.find(worker);
  const Waiting waits = found == waiting_.end() ? Waiting{} : found->second;
  if (waits.messages >= kMessagesMax || waits.bytes + bytes > bytes_max_) {
    if (held_up) {
      overflowed_.insert(worker);
      return {};
    }
    return {false,
            fmt::format("{} messages of it, {} bytes, wait to be read", waits.messages + 1, waits.bytes + bytes)};
  }
  waiting_[worker] = {waits.messages + 1, waits.bytes + bytes};
  return {true, {}};
}

void DeskInbox::read(WorkerId worker, std::size_t bytes) {
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

void DeskInbox::bar(WorkerId worker, const std::string& reason) {
  const std::lock_guard lock(mutex_);
  barred_.emplace(worker, reason);
}

bool DeskInbox::is_barred(WorkerId worker) const {
  const std::lock_guard lock(mutex_);
  return barred_.contains(worker);
}

void DeskInbox::check() const {
  const std::lock_guard lock(mutex_);
  for (const auto& [worker, waits] : waiting_)
    ECHO_CHECK(waits.messages > 0 && waits.messages <= kMessagesMax && waits.bytes <= bytes_max_,
               "worker {}: {} messages of {} bytes wait", worker, waits.messages, waits.bytes);
}

}  // namespace echoline::learner
