// ProviderDriver polls a provider in real time and waits for its events.
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
  // Returns the next event of a kind, within 20 s. Events of other kinds are kept for later calls.
  template <class Event>
  std::optional<Event> next() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (true) {
      for (auto it = kept_events_.begin(); it != kept_events_.end(); ++it)
        if (auto* event = std::get_if<Event>(&*it)) {
          Event next_event = std::move(*event);
          kept_events_.erase(it);
          return next_event;
        }
      if (std::chrono::steady_clock::now() > deadline) return std::nullopt;
      for (ProviderEvent& event : provider_.poll(begin_ + (clock_.now() - begin_) * speed_))
        kept_events_.push_back(std::move(event));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  std::optional<Listed> listed(const std::string& prefix) {
    constexpr Ticket kTicket = 99;
    provider_.list(kTicket, prefix);
    return next<Listed>();
  }

 private:
  Provider& provider_;
  const int speed_;
  SystemClock clock_;
  const TimePoint begin_ = clock_.now();
  std::vector<ProviderEvent> kept_events_;
};

}  // namespace echoline::provisioner
