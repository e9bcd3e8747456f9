// The section `fleet` of a run file, and the keys of section `network` that say where machines stand. The planner, the
// fleet's core and its driver take these structs as they were read.
#pragma once
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/units.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/provider.hpp"
#include "provisioner/regions.hpp"

namespace echoline::provisioner {

struct FleetSettings {
  std::filesystem::path offers;
  bool search = false;                              // ask the market for offers instead
  Duration search_every = std::chrono::minutes(5);  // while the run goes on
  std::string offers_format = kAutoFormat;
  std::uint32_t catalogue_copies = 1;                     // of each kind of machine that a catalogue lists
  std::optional<std::filesystem::path> profile;           // throughput by GPU
  std::optional<std::uint32_t> response_tokens_expected;  // of a rollout; absent: rollout.response_tokens_max
  std::string provider = "local";                         // a provider's name, or "none": workers join by hand
  OfferReading reading() const { return {offers_format, disk, catalogue_copies}; }
  bool joined_by_hand() const { return provider == "none"; }
  bool local() const;  // workers are processes of this machine: ProviderKind::here
  std::optional<std::filesystem::path> provider_file;
  std::string image;                            // of the container that a rented host runs
  std::optional<std::filesystem::path> bundle;  // from which a rented host gets the program
  Bytes disk{20'000'000'000};
  std::map<std::string, ServiceSettings> services;  // sections of providers, by their names
  double headroom = 0.10;                           // delta of (1 + delta) M*
  Duration step_time_expected{};                    // T, until it has been measured
  double delta_ratio_expected = 3.0;                // dense bytes / delta bytes, until it has been measured
  Duration install_time_expected{};                 // part of T_b that is not transfer: safe point, apply
  std::optional<double> usd_per_hour_max;
  std::optional<double> usd_max;  // of the whole run
  Pricing pricing = Pricing::kOnDemand;
  double bid_over_min = 0.10;                 // a bid is so much above the least one
  std::optional<std::uint32_t> per_host_max;  // offers of one owner, or machine where that is not stated
  std::vector<std::string> places;            // an offer's place contains one of these words; empty: any
  std::optional<BitRate> up_min;
  Assumptions assume;                     // for what offers do not state
  std::optional<double> reliability_min;  // of an offer, 0..1; offers that do not state it are then left out
  std::optional<Duration>
      duration_min;  // an offer can be rented so long; offers that do not state it are then left out
  std::uint32_t workers_max = 64;
  Duration join_timeout = std::chrono::seconds(60);
  // How long the machine and the place of a worker that is away are kept; also how long a worker tries to come back.
  Duration away_max = std::chrono::minutes(5);
  bool replace_lost = true;
};

// The keys of section `network` about machines and the ways between them. Plans use all of them, the overlay `regions`.
struct PathSettings {
  std::optional<BitRate> worker_rate;  // b, the most that a worker sends, and receives; absent: its offer's own links
  Duration delay_expected{};           // one way where the regions do not say it, for planning only
  RegionMap regions;
  BitRate capped(BitRate rate) const { return worker_rate ? std::min(rate, *worker_rate) : rate; }
};

void read(ConfigSection network, PathSettings& settings);

// Reads the section; mistakes are noted in it. `simulated`: offers may be made up elsewhere, and a fleet may have as
// many workers as the simulator takes.
void read(ConfigSection section, FleetSettings& settings, bool simulated = false);

}  // namespace echoline::provisioner
