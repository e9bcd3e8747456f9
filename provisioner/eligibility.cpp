// Checks and prices single offers, for plans and the fleet. plan.hpp declares ineligibility_reason().
#include "provisioner/eligibility.hpp"

#include <algorithm>

#include "provisioner/throughput.hpp"

namespace echoline::provisioner {
namespace {

constexpr double kBytesPerGb = 1e9;
constexpr double kSecondsPerHour = 3600;

template <class T>
std::optional<T> stated_or_assumed(const std::optional<T>& stated, const std::optional<T>& assumed) {
  return stated ? stated : assumed;
}

double days(Duration d) { return seconds(d) / kSecondsPerDay; }

// Why an offer does not meet fleet.where; absent if it does.
std::optional<std::string> unmet_condition(const OfferConditions& where, const Offer& offer) {
  const auto unstated = [](const char* what, const char* key) {
    return fmt::format("{} not stated, but fleet.where.{} requires it", what, key);
  };
  if (!where.gpus.empty() && std::none_of(where.gpus.begin(), where.gpus.end(),
                                          [&](const std::string& gpu) { return gpu_key(gpu) == gpu_key(offer.gpu); }))
    return fmt::format("{}, not in fleet.where.gpus", offer.gpu);
  if (offer.gpu_count < where.gpu_count_min.value_or(1) ||
      offer.gpu_count > where.gpu_count_max.value_or(offer.gpu_count))
    return fmt::format("{} GPUs, outside of fleet.where.gpu_count_min and gpu_count_max", offer.gpu_count);
  if (where.verified && !offer.verified.value_or(false)) return "not verified by the market";
  if (where.datacenter && !offer.datacenter.value_or(false)) return "not in a data centre";
  if (where.open_ports_min) {
    if (!offer.open_ports) return unstated("open ports", "open_ports_min");
    if (*offer.open_ports < *where.open_ports_min)
      return fmt::format("{} open ports, {} required", *offer.open_ports, *where.open_ports_min);
  }
  if (where.compute_capability_min) {
    if (!offer.compute_capability) return unstated("compute capability", "compute_capability_min");
    if (*offer.compute_capability < *where.compute_capability_min)
      return fmt::format("compute capability {:.1f} below {:.1f}", *offer.compute_capability,
                         *where.compute_capability_min);
  }
  if (where.memory_min) {
    if (!offer.memory_gb) return unstated("host memory", "memory_min");
    if (*offer.memory_gb * kBytesPerGb < static_cast<double>(where.memory_min->count))
      return fmt::format("{:.3g} GB of host memory, {:.3g} required", *offer.memory_gb,
                         static_cast<double>(where.memory_min->count) / kBytesPerGb);
  }
  // An unstated link or price meets its condition; fleet.assume states the value to plan with.
  if (where.down_min && offer.down && *offer.down < *where.down_min)
    return fmt::format("downlink {:.3g} Mbit/s below {:.3g}", offer.down->mbit_per_s(), where.down_min->mbit_per_s());
  const auto is_dearer = [](const std::optional<double>& price, const std::optional<double>& price_max) {
    return price_max && price && *price > *price_max;
  };
  if (is_dearer(offer.upload_usd_per_gb, where.upload_usd_per_gb_max))
    return fmt::format("outgoing traffic costs ${:.3g}/GB, ${:.3g} allowed", *offer.upload_usd_per_gb,
                       *where.upload_usd_per_gb_max);
  if (is_dearer(offer.download_usd_per_gb, where.download_usd_per_gb_max))
    return fmt::format("incoming traffic costs ${:.3g}/GB, ${:.3g} allowed", *offer.download_usd_per_gb,
                       *where.download_usd_per_gb_max);
  return std::nullopt;
}

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

OfferCost cost_of(const PlanRequest& request, const Offer& offer, double forwarded_copies) {
  const double period_s = request.pace.publish_every * seconds(request.pace.step_time);
  const double gb_per_hour = static_cast<double>(request.delta_bytes.count) / kBytesPerGb * kSecondsPerHour / period_s;
  const auto usd_per_gb_up = stated_or_assumed(offer.upload_usd_per_gb, request.fleet.assume.upload_usd_per_gb);
  const auto usd_per_gb_down = stated_or_assumed(offer.download_usd_per_gb, request.fleet.assume.download_usd_per_gb);
  OfferCost cost;
  cost.gpu = request.fleet.pricing == Pricing::kBid ? bid_for(request, offer) : offer.gpu_usd_per_hour;
  cost.storage = stated_or_assumed(offer.storage_usd_per_hour, request.fleet.assume.storage_usd_per_hour);
  // A machine that sends nothing pays nothing for sending, even at an unknown price.
  if (usd_per_gb_down && (usd_per_gb_up || forwarded_copies == 0))
    cost.bandwidth = gb_per_hour * *usd_per_gb_down + gb_per_hour * forwarded_copies * usd_per_gb_up.value_or(0);
  return cost;
}

std::vector<std::string> assumed_keys(const PlanRequest& request, const Offer& offer) {
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
  // A run whose workers join by hand rents nothing, so its plan may compare offers of all providers.
  if (!request.fleet.joined_by_hand() && offer.provider != request.fleet.provider)
    return fmt::format("of provider {}, but this run rents from {}", offer.provider, request.fleet.provider);
  if (!offer.rentable) return "another customer rents it";
  if (!request.fleet.places.empty() &&
      std::none_of(request.fleet.places.begin(), request.fleet.places.end(),
                   [&](const auto& place) { return contains_place(offer.place, place); }))
    return offer.place.empty() ? std::string("place not stated, but fleet.places requires one")
                               : fmt::format("in {}, not in fleet.places", offer.place);
  if (auto unmet = unmet_condition(request.fleet.where, offer)) return unmet;
  if (request.cuda_min) {
    if (!offer.cuda_max) {
      // Without fleet.where.cuda_min, cuda_min is only a guess from the image's name, so an unstated version is
      // allowed.
      if (request.fleet.where.cuda_min) return "CUDA version not stated, but fleet.where.cuda_min requires it";
    } else if (*offer.cuda_max < *request.cuda_min) {
      return fmt::format("its driver supports CUDA {:.1f}, {:.1f} needed", *offer.cuda_max, *request.cuda_min);
    }
  }
  // Unstated host memory and disk count as enough.
  if (request.host_memory_min && offer.memory_gb &&
      *offer.memory_gb * kBytesPerGb < static_cast<double>(request.host_memory_min->count))
    return fmt::format("{:.3g} GB of host memory, {:.3g} needed for the policy and its server", *offer.memory_gb,
                       static_cast<double>(request.host_memory_min->count) / kBytesPerGb);
  if (offer.disk_gb && *offer.disk_gb * kBytesPerGb < static_cast<double>(request.fleet.disk.count))
    return fmt::format("{:.3g} GB of disk, {:.3g} needed (fleet.disk)", *offer.disk_gb,
                       static_cast<double>(request.fleet.disk.count) / kBytesPerGb);
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
  constexpr double kForwardedCopies = 1;  // not 0, so that the price of sending must be known
  const OfferCost cost = cost_of(request, offer, kForwardedCopies);
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
