// Application messages of workers that have not arrived whole. Bounded for one worker and for all together. Pure.
#pragma once
#include <algorithm>
#include <map>

#include "overlay/core.hpp"

namespace echoline::overlay {

class Inbox {
 public:
  Inbox(std::size_t message_bytes_max, std::size_t bytes_max)
      : message_bytes_max_(message_bytes_max), bytes_max_(bytes_max) {}

  // As MessageAssembler::add().
  Result<std::optional<std::string>> add(WorkerId from, const Frame& part) {
    MessageAssembler& message = incomplete_[from];
    bytes_ -= message.bytes();
    auto whole = message.add(part, message_bytes_max_);
    bytes_ += message.bytes();
    return whole;
  }
  void remove(WorkerId worker) {
    bytes_ -= bytes_of(worker);
    incomplete_.erase(worker);
  }
  // The worker with most bytes here, if all together have more than the limit.
  std::optional<WorkerId> overflow() const {
    if (bytes_ <= bytes_max_) return std::nullopt;
    return std::max_element(incomplete_.begin(), incomplete_.end(),
                            [](const auto& a, const auto& b) { return a.second.bytes() < b.second.bytes(); })
        ->first;
  }
  std::size_t bytes_of(WorkerId worker) const {
    const auto it = incomplete_.find(worker);
    return it == incomplete_.end() ? 0 : it->second.bytes();
  }
  std::size_t bytes() const { return bytes_; }
  void check() const {
    std::size_t sum = 0;
    for (const auto& [id, message] : incomplete_) sum += message.bytes();
    ECHO_CHECK(sum == bytes_, "{} bytes of messages instead of {}", bytes_, sum);
  }

 private:
  std::size_t message_bytes_max_, bytes_max_;
  std::map<WorkerId, MessageAssembler> incomplete_;
  std::size_t bytes_ = 0;
};

}  // namespace echoline::overlay
