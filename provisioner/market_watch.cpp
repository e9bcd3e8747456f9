// The thread that searches the market again while a run goes on; FleetDriver owns it.
#include "provisioner/market_watch.hpp"

#include <utility>

#include "base/log.hpp"

namespace echoline::provisioner {

MarketWatch::MarketWatch(MarketSearch search, Duration interval, std::function<void(std::vector<Offer>)> on_offers)
    : search_(std::move(search)), interval_(interval), on_offers_(std::move(on_offers)), thread_([this] { loop(); }) {}

MarketWatch::~MarketWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void MarketWatch::loop() {
  while (!stop_) {
    Result<std::optional<std::vector<Offer>>> found = search_(stop_);
    if (!found && !stop_) log::warn("the market could not be read again: {}", found.error().message());
    if (found && found->has_value()) on_offers_(std::move(**found));
    std::unique_lock lock(mutex_);
    wake_.wait_for(lock, interval_, [this] { return stop_.load(); });
  }
}

}  // namespace echoline::provisioner
