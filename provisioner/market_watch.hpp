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
  // `found` is called on the watch's thread and must not block. Errors are logged and the market is polled again.
  MarketWatch(MarketSearch search, Duration every, std::function<void(std::vector<Offer>)> found);
  ~MarketWatch();

 private:
  void loop();

  const MarketSearch search_;
  const Duration every_;
  const std::function<void(std::vector<Offer>)> found_;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace echoline::provisioner
