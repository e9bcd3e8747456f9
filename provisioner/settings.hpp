// The run file's section `fleet`, and the keys of section `network` about machines' places. The planner, the fleet's
// core and its driver use these structs directly.
#pragma once
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "provisioner/capacity.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/provider.hpp"
#include "provisioner/regions.hpp"

namespace echoline::provisioner {

// Defaults of pull_timeout, boot_timeout and silence_max, which a longer join_timeout or away_max raises.
inline constexpr Duration kPullTimeout = std::chrono::minutes(15), kBootTimeout = std::chrono::minutes(10);
inline constexpr Duration kSilenceMax = std::chrono::minutes(15);

struct FleetSettings {
  std::filesystem::path offers;
  bool search = false;                              // search a provider's market instead of reading a file
  Duration search_every = std::chrono::minutes(5);  // during the run
  std::string offers_format = kAutoFormat;
  // How many machines of each entry can be rented, if the offers come from a catalogue (a list of kinds of machines).
  std::uint32_t catalogue_copies = 1;
  std::optional<std::filesystem::path> profile;           // throughput by GPU
  std::optional<std::uint32_t> response_tokens_expected;  // per rollout; absent: rollout.response_tokens_max
  std::string provider = "local";                         // a provider's name, or "none": workers join by hand
  OfferReadOptions reading() const { return {offers_format, disk, catalogue_copies}; }
  bool joined_by_hand() const { return provider == "none"; }
  bool is_local() const;  // ProviderKind::is_local: workers are processes of this machine
  std::optional<std::filesystem::path> provider_file;
  std::string image;                            // container image of rented hosts
  std::optional<std::filesystem::path> bundle;  // rented hosts unpack the program from it
  Bytes disk{20'000'000'000};
  // The CUDA version that the machine's driver must support: where.cuda_min, or else the version in the image's name.
  std::optional<double> cuda_needed() const;
  std::map<std::string, ServiceSettings> services;  // by provider name
  // Spare capacity as a share: (1 + headroom) times the required capacity M* (provisioner/capacity.hpp) is rented.
  double headroom = 0.10;
  CapacityRule capacity_rule = CapacityRule::kOverlap;
  // T, the time of a learner step, used until it is measured.
  Duration step_time_expected{};
  // Bytes of the whole policy per byte of a delta, used until it is measured.
  double delta_ratio_expected = 3.0;
  // The part of T_b, the time of a broadcast, that is not transfer: applying the delta. A worker pauses for this time.
  // Used until it is measured.
  Duration install_time_expected{};
  std::optional<double> usd_per_hour_max;
  std::optional<double> usd_max;  // for the whole run
  Pricing pricing = Pricing::kOnDemand;
  double bid_over_min = 0.10;                 // a bid exceeds the lowest accepted bid by this share
  std::optional<std::uint32_t> per_host_max;  // offers of one owner, or of one machine if the owner is not stated
  std::vector<std::string> places;            // an offer's place must contain one of these words; empty: any
  std::optional<BitRate> up_min;
  OfferConditions where;
  Assumptions assume;                     // for unstated values
  std::optional<double> reliability_min;  // 0..1; excludes offers that do not state it
  // Minimum rental time; excludes offers that do not state theirs.
  std::optional<Duration> duration_min;
  std::uint32_t workers_max = 64;
  // Limits of the phases of a rented machine's start. A provider that reports the state of its containers
  // (ProviderKind::reports_phases) has the phases pulling and booting, any other the phase joining.
  Duration queue_timeout = std::chrono::minutes(5);  // queued: from the request to the provider's answer
  std::optional<Duration> pull_timeout;              // pulling: from the answer until the container runs
  std::optional<Duration> boot_timeout;              // booting: from then until the worker has joined
  Duration join_timeout = std::chrono::seconds(60);  // joining: from the answer until the worker has joined
  Duration pull_limit() const { return pull_timeout.value_or(std::max<Duration>(kPullTimeout, join_timeout)); }
  Duration boot_limit() const { return boot_timeout.value_or(std::max<Duration>(kBootTimeout, join_timeout)); }
  // From the provider's answer until the worker has joined, at most.
  Duration start_limit(bool reports_phases) const {
    return reports_phases ? pull_limit() + boot_limit() : join_timeout;
  }
  // How long the fleet keeps the machine and place of an absent worker; also how long a worker tries to reconnect.
  Duration away_max = std::chrono::minutes(5);
  bool replace_lost = true;
  // A rented container ends itself when its worker has been out of touch with the learner for this long.
  std::optional<Duration> silence_max;
  Duration silence_limit() const { return silence_max.value_or(std::max<Duration>(kSilenceMax, 3 * away_max)); }
};

// The keys of section `network` about machines and the links between them. Plans use all of them, the overlay
// `regions`.
struct PathSettings {
  // Limit of a worker's sending and receiving rates; absent: only the links of its offer limit it.
  std::optional<BitRate> worker_rate;
  Duration delay_expected{};  // one way, if the regions do not state it; for planning only
  RegionMap regions;
  BitRate capped(BitRate rate) const { return worker_rate ? std::min(rate, *worker_rate) : rate; }
};

void read(ConfigSection network, PathSettings& settings);

// Reads the section and records mistakes in it. `simulated`: offers may be generated elsewhere, and the fleet may have
// as many workers as the simulator supports.
void read(ConfigSection section, FleetSettings& settings, bool simulated = false);

}  // namespace echoline::provisioner
