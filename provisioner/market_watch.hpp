// Polls the market on its own thread while a run goes on, because a search may take a minute.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

// Returns the current offers with predicted throughput; absent if it is too early to ask or if nothing has changed.
// Returns early once `stop` is true.
using MarketSearch = std::function<Result<std::optional<std::vector<Offer>>>(const std::atomic<bool>& stop)>;

class MarketWatch {
 public:
  // Calls `on_offers` on the watch's thread; it must not block. Errors are logged, and the market is polled again.
  MarketWatch(MarketSearch search, Duration interval, std::function<void(std::vector<Offer>)> on_offers);
  ~MarketWatch();

 private:
  void loop();

  const MarketSearch search_;
  const Duration interval_;
  const std::function<void(std::vector<Offer>)> on_offers_;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;  // last, because it uses the other members
};

}  // namespace echoline::provisioner
