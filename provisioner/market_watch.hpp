// Looks at the market again and again while a run goes on, on a thread of its own: a search may take a minute.
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

// What can be rented now, with predicted throughput; nothing where it is not the time to ask, or where all is as
// before. Ends early once `stop` is true.
using MarketLook = std::function<Result<std::optional<std::vector<Offer>>>(const std::atomic<bool>& stop)>;

class MarketWatch {
 public:
  // `found` is called on the watch's thread and must not block. What cannot be read now is logged, and looked at again.
  MarketWatch(MarketLook look, Duration every, std::function<void(std::vector<Offer>)> found);
  ~MarketWatch();

 private:
  void loop();

  const MarketLook look_;
  const Duration every_;
  const std::function<void(std::vector<Offer>)> found_;
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace echoline::provisioner
