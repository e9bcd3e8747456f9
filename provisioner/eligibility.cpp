// Checks and prices single offers; plans, their renewal and the fleet call it.
#include "provisioner/eligibility.hpp"

#include <algorithm>

namespace echoline::provisioner {
namespace {

constexpr double kBytesPerGb = 1e9;

template <class T>
std::optional<T> either(const std::optional<T>& stated, const std::optional<T>& assumed) {
  return stated ? stated : assumed;
}

double days(Duration d) { return seconds(d) / 86400; }

std::string not_stated(std::string_view what, std::string_view key) {
  return fmt::format("{} not stated (fleet.assume.{})", what, key);
}

}  // namespace

std::optional<double> reliability_of(const PlanRequest& r, const Offer& o) {
  return either(o.reliability, r.fleet.assume.reliability);
}

std::optional<double> bid_for(const PlanRequest& r, const Offer& o) {
  if (r.fleet.pricing != Pricing::kBid || !o.bid_usd_per_hour_min) return std::nullopt;
  return *o.bid_usd_per_hour_min * (1 + r.fleet.bid_over_min);
}

OfferCost cost_of(const PlanRequest& r, const Offer& o, double copies) {
  const double period_s = r.pace.publish_every * seconds(r.pace.step_time);
  const double gb_per_hour = static_cast<double>(r.delta_bytes.count) / kBytesPerGb * 3600 / period_s;
  const auto up = either(o.upload_usd_per_gb, r.fleet.assume.upload_usd_per_gb);
  const auto down = either(o.download_usd_per_gb, r.fleet.assume.download_usd_per_gb);
  OfferCost c;
  c.gpu = r.fleet.pricing == Pricing::kBid ? bid_for(r, o) : o.gpu_usd_per_hour;
  c.storage = either(o.storage_usd_per_hour, r.fleet.assume.storage_usd_per_hour);
  // A machine that sends nothing pays nothing for it, even at an unknown price.
  if (down && (up || copies == 0)) c.bandwidth = gb_per_hour * *down + gb_per_hour * copies * up.value_or(0);
  return c;
}

std::vector<std::string> assumed_of(const PlanRequest& r, const Offer& o) {
  std::vector<std::string> keys;
  const auto note = [&](const auto& stated, const auto& assumed, const char* key) {
    if (!stated && assumed) keys.emplace_back(key);
  };
  note(o.storage_usd_per_hour, r.fleet.assume.storage_usd_per_hour, "storage_usd_per_hour");
  note(o.upload_usd_per_gb, r.fleet.assume.upload_usd_per_gb, "upload_usd_per_gb");
  note(o.download_usd_per_gb, r.fleet.assume.download_usd_per_gb, "download_usd_per_gb");
  note(o.up, r.fleet.assume.up, "up");
  note(o.down, r.fleet.assume.down, "down");
  if (r.gpu_memory_min) note(o.vram_gb, r.fleet.assume.vram_gb, "vram_gb");
  note(o.reliability, r.fleet.assume.reliability, "reliability");
  note(o.duration_max, r.fleet.assume.duration, "duration");
  return keys;
}

std::optional<std::string> ineligibility_reason(const PlanRequest& r, const Offer& o) {
  if (!r.fleet.joined_by_hand() && o.provider != r.fleet.provider)
    return fmt::format("of provider {}, but this run rents from {}", o.provider, r.fleet.provider);
  if (!o.rentable) return "another customer rents it";
  if (!r.fleet.places.empty() && std::none_of(r.fleet.places.begin(), r.fleet.places.end(),
                                              [&](const auto& place) { return contains_place(o.place, place); }))
    return o.place.empty() ? std::string("place not stated, but fleet.places requires one")
                           : fmt::format("in {}, not in fleet.places", o.place);
  if (r.gpu_memory_min) {
    const auto vram = either(o.vram_gb, r.fleet.assume.vram_gb);
    if (!vram) return not_stated("GPU memory", "vram_gb");
    if (*vram * kBytesPerGb < static_cast<double>(r.gpu_memory_min->count))
      return fmt::format("{:.3g} GB per GPU, {:.3g} needed", *vram,
                         static_cast<double>(r.gpu_memory_min->count) / kBytesPerGb);
  }
  if (r.fleet.reliability_min) {
    const auto reliability = reliability_of(r, o);
    if (!reliability) return fmt::format("reliability not stated, {:.3f} required", *r.fleet.reliability_min);
    if (*reliability < *r.fleet.reliability_min)
      return fmt::format("reliability {:.3f} below {:.3f}", *reliability, *r.fleet.reliability_min);
  }
  const auto duration = either(o.duration_max, r.fleet.assume.duration);
  if (r.fleet.duration_min) {
    if (!duration) return fmt::format("rental time not stated, {:.2g} days required", days(*r.fleet.duration_min));
    if (*duration < *r.fleet.duration_min)
      return fmt::format("rentable for {:.2g} days, {:.2g} required", days(*duration), days(*r.fleet.duration_min));
  }
  if (r.run_time && duration && *duration < *r.run_time)
    return fmt::format("rentable for {:.2g} days, the run takes {:.2g}", days(*duration), days(*r.run_time));
  const auto up = either(o.up, r.fleet.assume.up);
  if (!up) return not_stated("uplink", "up");
  if (!either(o.down, r.fleet.assume.down)) return not_stated("downlink", "down");
  if (r.fleet.up_min && up < r.fleet.up_min)
    return fmt::format("uplink {:.3g} Mbit/s below {:.3g}", up->mbit_per_s(), r.fleet.up_min->mbit_per_s());
  if (!(o.rollouts_per_s > 0)) return "throughput unknown: no measurement, no profile of this GPU, no dlperf";
  const OfferCost cost = cost_of(r, o, 1);
  if (!cost.gpu)
    return r.fleet.pricing == Pricing::kBid ? "no bid stated that would rent it" : "its price is not stated";
  if (!cost.storage) return not_stated("disk price", "storage_usd_per_hour");
  if (!cost.bandwidth)
    return o.download_usd_per_gb || r.fleet.assume.download_usd_per_gb
               ? not_stated("upload price", "upload_usd_per_gb")
               : not_stated("download price", "download_usd_per_gb");
  return std::nullopt;
}

}  // namespace echoline::provisioner
