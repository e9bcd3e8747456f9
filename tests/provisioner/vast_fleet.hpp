// A fleet that rents from the test's vast.ai, on a clock that runs faster than ours.
#pragma once
#include <mutex>
#include <string>
#include <vector>

#include "provisioner/fleet_driver.hpp"

namespace echoline::provisioner {

// Runs `speed` times as fast as the system's clock, so that the service's pauses take milliseconds.
class FastClock final : public Clock {
 public:
  explicit FastClock(int speed = 400) : speed_(speed) {}
  TimePoint now() const override { return TimePoint((system_.now() - begin_) * speed_) + std::chrono::hours(1); }
  double unix_seconds() const override { return 1.7e9 + seconds(now().time_since_epoch()); }

 private:
  const int speed_;
  const SystemClock system_;
  const TimePoint begin_ = system_.now();
};

inline Offer vast_offer(const std::string& id) {
  Offer o;
  o.id = id;
  o.provider = "vast";
  o.host = "host-" + id;
  o.gpu_usd_per_hour = 0.4;
  o.storage_usd_per_hour = 0.01;
  return o;
}

// A fleet that wants `wanted` machines of `offers` (ids from 100). Environment variable VAST_API_KEY must hold the key.
inline FleetOptions vast_fleet_options(const Clock& clock, const std::string& url, const std::filesystem::path& ledger,
                                       int wanted, int offers) {
  std::vector<Offer> market;
  for (int i = 0; i < offers; ++i) {
    Offer o = vast_offer(std::to_string(100 + i));
    o.up = o.down = BitRate{1e8};
    o.rollouts_per_s = 60;
    o.upload_usd_per_gb = o.download_usd_per_gb = 0;
    market.push_back(std::move(o));
  }
  PlanRequest request;
  request.fleet.provider = "none";  // of any
  request.fleet.workers_max = static_cast<std::uint32_t>(wanted + 8);
  // Without headroom, `wanted` machines are needed for steps of 10 s.
  request.fleet.headroom = 0;
  request.pace = {600.0 * wanted - 300, 1, std::chrono::seconds(10)};
  request.delta_bytes = request.full_bytes = {1000};
  request.learner_up = {1e12};
  FleetOptions options;
  options.run = "run";
  options.plan = std::move(make_plan(request, market)).value();
  options.ledger_file = ledger;
  options.providers.services["vast"].url = url;
  options.clock = &clock;
  options.tick = std::chrono::milliseconds(1);
  options.launch = [](const Offer&) -> Result<LaunchSpec> {
    LaunchSpec s;
    s.image = "debian:12";
    s.argv = {"/bin/true"};
    return s;
  };
  options.record = [](std::string_view, const std::string&, const std::string&) {};
  return options;
}

}  // namespace echoline::provisioner
