// Waits for a provider's events, in real time.
#pragma once
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include "provisioner/provider.hpp"

namespace echoline::provisioner {

class ProviderDriver {
 public:
  // The provider's time runs `speed` times as fast as ours.
  explicit ProviderDriver(Provider& provider, int speed = 1) : provider_(provider), speed_(speed) {}
  // The next event of a kind, within 20 s; others are kept.
  template <class Event>
  std::optional<Event> next() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (true) {
      for (auto it = seen_.begin(); it != seen_.end(); ++it)
        if (auto* event = std::get_if<Event>(&*it)) {
          Event found = std::move(*event);
          seen_.erase(it);
          return found;
        }
      if (std::chrono::steady_clock::now() > deadline) return std::nullopt;
      for (ProviderEvent& event : provider_.poll(begin_ + (clock_.now() - begin_) * speed_))
        seen_.push_back(std::move(event));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  std::optional<Listed> listed(const std::string& prefix) {
    provider_.list(99, prefix);
    return next<Listed>();
  }
  const std::vector<ProviderEvent>& left() const { return seen_; }

 private:
  Provider& provider_;
  const int speed_;
  SystemClock clock_;
  const TimePoint begin_ = clock_.now();
  std::vector<ProviderEvent> seen_;
};

}  // namespace echoline::provisioner
