// A market with a realistic spread, the same for the same seed. It has GPUs of many kinds, and prices that vary with
// host and place. Links and traffic prices depend on neither. Machines are offered whole and in parts.
#pragma once
#include <string>
#include <vector>

#include "base/random.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

inline std::vector<Offer> seeded_market(std::uint64_t seed, std::size_t count) {
  struct Kind {
    const char* gpu;
    double vram_gb, rollouts_per_s, usd_per_hour;  // of one GPU
  };
  static constexpr Kind kKinds[] = {
      {"RTX 3060", 12, 0.033, 0.06},  {"RTX 3080", 10, 0.070, 0.11}, {"RTX 3090", 24, 0.087, 0.14},
      {"RTX 4070", 12, 0.047, 0.10},  {"RTX 4080", 16, 0.066, 0.19}, {"RTX 4090", 24, 0.093, 0.32},
      {"RTX 5090", 32, 0.166, 0.48},  {"L40S", 48, 0.080, 0.55},     {"RTX A6000", 48, 0.071, 0.42},
      {"A100 SXM4", 80, 0.180, 0.85}, {"H100 SXM", 80, 0.310, 1.90}, {"H200", 141, 0.445, 2.40}};
  static constexpr const char* kPlaces[] = {"Oregon, US", "Texas, US",  "Quebec, CA", "Sweden, SE",
                                            "Poland, PL", "Taiwan, TW", "India, IN"};
  Random random(seed);
  std::vector<Offer> offers;
  // A log-uniform draw between middle / factor and middle * factor.
  const auto spread = [&](double middle, double factor) { return middle * std::pow(factor, 2 * random.uniform() - 1); };
  for (std::size_t machine = 1; offers.size() < count; ++machine) {
    const Kind& kind = kKinds[random.below(std::size(kKinds))];
    Offer o;
    o.provider = "vast";
    o.host = fmt::format("m{}", machine);
    o.owner = fmt::format("h{}", random.below(count / 4 + 1));
    o.gpu = kind.gpu;
    o.vram_gb = kind.vram_gb;
    o.place = kPlaces[random.below(std::size(kPlaces))];
    o.up = BitRate::from_mbit_per_s(spread(250, 8));
    o.down = BitRate::from_mbit_per_s(spread(700, 4));
    o.reliability = 1 - 0.08 * random.uniform() * random.uniform();
    o.duration_max = from_seconds(86400 * spread(20, 10));
    o.rollouts_source = RateSource::kProfile;
    const double price = spread(kind.usd_per_hour, 1.8), speed = spread(kind.rollouts_per_s, 1.15);
    o.storage_usd_per_hour = spread(0.006, 3);
    o.upload_usd_per_gb = random.below(5) == 0 ? 0 : spread(0.004, 5);
    o.download_usd_per_gb = random.below(3) == 0 ? 0 : spread(0.003, 4);
    // One GPU, or a machine of four offered whole and in parts.
    const bool has_parts = random.below(5) == 0;
    const std::vector<std::vector<int>> slices =
        has_parts ? std::vector<std::vector<int>>{{0}, {1}, {2, 3}, {0, 1, 2, 3}} : std::vector<std::vector<int>>{{0}};
    for (const auto& gpus : slices) {
      if (offers.size() == count) break;
      o.id = fmt::format("a{}", offers.size() + 1);
      o.gpu_ids = gpus;
      o.gpu_count = static_cast<int>(gpus.size());
      o.rollouts_per_s = speed * o.gpu_count;
      o.gpu_usd_per_hour = price * o.gpu_count * (gpus.size() == 4 ? 0.95 : 1.0);
      o.bid_usd_per_hour_min = *o.gpu_usd_per_hour * (0.4 + 0.3 * random.uniform());
      offers.push_back(o);
    }
  }
  return offers;
}

}  // namespace echoline::provisioner
