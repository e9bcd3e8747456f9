// Checks and prices single offers; plans, their renewal and the fleet call it.
#include "provisioner/eligibility.hpp"

#include <algorithm>

namespace echoline::provisioner {
namespace {

constexpr double kBytesPerGb = 1e9;

template <class T>
std::optional<T> stated_or_assumed(const std::optional<T>& stated, const std::optional<T>& assumed) {
  return stated ? stated : assumed;
}

double days(Duration d) { return seconds(d) / kSecondsPerDay; }

std::string not_stated(std::string_view what, std::string_view key) {
  return fmt::format("{} not stated (fleet.assume.{})", what, key);
}

}  // namespace

std::optional<double> reliability_of(const PlanRequest& request, const Offer& offer) {
  return stated_or_assumed(offer.reliability, request.fleet.assume.reliability);
}

std::optional<double> bid_for(const PlanRequest& request, const Offer& offer) {
  if (request.fleet.pricing != Pricing::kBid || !offer.bid_usd_per_hour_min) return std::nullopt;
  return *offer.bid_usd_per_hour_min * (1 + request.fleet.bid_over_min);
}

OfferCost cost_of(const PlanRequest& request, const Offer& offer, double copies) {
  const double period_s = request.pace.publish_every * seconds(request.pace.step_time);
  const double gb_per_hour = static_cast<double>(request.delta_bytes.count) / kBytesPerGb * 3600 / period_s;
  const auto usd_per_gb_up = stated_or_assumed(offer.upload_usd_per_gb, request.fleet.assume.upload_usd_per_gb);
  const auto usd_per_gb_down = stated_or_assumed(offer.download_usd_per_gb, request.fleet.assume.download_usd_per_gb);
  OfferCost cost;
  cost.gpu = request.fleet.pricing == Pricing::kBid ? bid_for(request, offer) : offer.gpu_usd_per_hour;
  cost.storage = stated_or_assumed(offer.storage_usd_per_hour, request.fleet.assume.storage_usd_per_hour);
  // A machine that sends nothing pays nothing for sending, even at an unknown price.
  if (usd_per_gb_down && (usd_per_gb_up || copies == 0))
    cost.bandwidth = gb_per_hour * *usd_per_gb_down + gb_per_hour * copies * usd_per_gb_up.value_or(0);
  return cost;
}

std::vector<std::string> assumed_of(const PlanRequest& request, const Offer& offer) {
  std::vector<std::string> keys;
  const auto add_if_assumed = [&](const auto& stated, const auto& assumed, const char* key) {
    if (!stated && assumed) keys.emplace_back(key);
  };
  add_if_assumed(offer.storage_usd_per_hour, request.fleet.assume.storage_usd_per_hour, "storage_usd_per_hour");
  add_if_assumed(offer.upload_usd_per_gb, request.fleet.assume.upload_usd_per_gb, "upload_usd_per_gb");
  add_if_assumed(offer.download_usd_per_gb, request.fleet.assume.download_usd_per_gb, "download_usd_per_gb");
  add_if_assumed(offer.up, request.fleet.assume.up, "up");
  add_if_assumed(offer.down, request.fleet.assume.down, "down");
  if (request.gpu_memory_min) add_if_assumed(offer.vram_gb, request.fleet.assume.vram_gb, "vram_gb");
  add_if_assumed(offer.reliability, request.fleet.assume.reliability, "reliability");
  add_if_assumed(offer.duration_max, request.fleet.assume.duration, "duration");
  return keys;
}

std::optional<std::string> ineligibility_reason(const PlanRequest& request, const Offer& offer) {
  if (!request.fleet.joined_by_hand() && offer.provider != request.fleet.provider)
    return fmt::format("of provider {}, but this run rents from {}", offer.provider, request.fleet.provider);
  if (!offer.rentable) return "another customer rents it";
  if (!request.fleet.places.empty() &&
      std::none_of(request.fleet.places.begin(), request.fleet.places.end(),
                   [&](const auto& place) { return contains_place(offer.place, place); }))
    return offer.place.empty() ? std::string("place not stated, but fleet.places requires one")
                               : fmt::format("in {}, not in fleet.places", offer.place);
  if (request.gpu_memory_min) {
    const auto vram = stated_or_assumed(offer.vram_gb, request.fleet.assume.vram_gb);
    if (!vram) return not_stated("GPU memory", "vram_gb");
    if (*vram * kBytesPerGb < static_cast<double>(request.gpu_memory_min->count))
      return fmt::format("{:.3g} GB per GPU, {:.3g} needed", *vram,
                         static_cast<double>(request.gpu_memory_min->count) / kBytesPerGb);
  }
  if (request.fleet.reliability_min) {
    const auto reliability = reliability_of(request, offer);
    if (!reliability) return fmt::format("reliability not stated, {:.3f} required", *request.fleet.reliability_min);
    if (*reliability < *request.fleet.reliability_min)
      return fmt::format("reliability {:.3f} below {:.3f}", *reliability, *request.fleet.reliability_min);
  }
  const auto duration = stated_or_assumed(offer.duration_max, request.fleet.assume.duration);
  if (request.fleet.duration_min) {
    if (!duration)
      return fmt::format("rental time not stated, {:.2g} days required", days(*request.fleet.duration_min));
    if (*duration < *request.fleet.duration_min)
      return fmt::format("rentable for {:.2g} days, {:.2g} required", days(*duration),
                         days(*request.fleet.duration_min));
  }
  if (request.run_time && duration && *duration < *request.run_time)
    return fmt::format("rentable for {:.2g} days, the run takes {:.2g}", days(*duration), days(*request.run_time));
  const auto up = stated_or_assumed(offer.up, request.fleet.assume.up);
  if (!up) return not_stated("uplink", "up");
  if (!stated_or_assumed(offer.down, request.fleet.assume.down)) return not_stated("downlink", "down");
  if (request.fleet.up_min && up < request.fleet.up_min)
    return fmt::format("uplink {:.3g} Mbit/s below {:.3g}", up->mbit_per_s(), request.fleet.up_min->mbit_per_s());
  if (!offer.unfit.empty()) return offer.unfit;
  if (!(offer.rollouts_per_s > 0))
    return fmt::format("throughput unknown: no measurement, no profile of this GPU, no dlperf{}{}",
                       offer.engines_note.empty() ? "" : "; ", offer.engines_note);
  constexpr double kCopies = 1;  // the usual case: a worker forwards each publication once
  const OfferCost cost = cost_of(request, offer, kCopies);
  if (!cost.gpu)
    return request.fleet.pricing == Pricing::kBid ? "no bid stated that would rent it" : "its price is not stated";
  if (!cost.storage) return not_stated("disk price", "storage_usd_per_hour");
  if (!cost.bandwidth)
    return offer.download_usd_per_gb || request.fleet.assume.download_usd_per_gb
               ? not_stated("upload price", "upload_usd_per_gb")
               : not_stated("download price", "download_usd_per_gb");
  return std::nullopt;
}

}  // namespace echoline::provisioner
