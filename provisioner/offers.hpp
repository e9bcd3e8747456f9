// Offers of machines, from a market or a file. A value that is not stated is absent, never 0.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

inline constexpr double kSecondsPerDay = 86'400;

// The source of a predicted throughput: measured, from a profile of the GPU, or from the market's benchmark (dlperf).
enum class RateSource { kUnknown, kMeasured, kProfile, kDlperf };
std::string_view to_string(RateSource source);
// The relative error of a throughput from this source, for a figure without an error of its own.
double usual_uncertainty(RateSource source);

struct Offer {
  std::string id;        // unique in its file
  std::string provider;  // ProviderKind::name
  std::string host;      // the machine's name; "" if not stated
  std::string owner;     // operator of the machine; "" if not stated
  std::string gpu;
  int gpu_count = 1;
  // Which of the machine's GPUs are offered; offers that share a GPU are never rented together. Empty: not stated, the
  // whole machine.
  std::vector<int> gpu_ids;
  std::optional<double> vram_gb;  // per GPU
  std::string place;              // "" if not stated
  // The names by which the cloud rents this kind of machine, for commands that rent it; "" if not stated.
  std::string cloud, region, zone, machine_type;
  std::optional<BitRate> up, down;
  std::optional<double> memory_gb;           // host memory that comes with the offer
  std::optional<double> disk_gb;             // disk that can be rented with it
  std::optional<double> cuda_max;            // newest CUDA version that the machine's driver supports, such as 12.8
  std::optional<double> compute_capability;  // of its GPUs, such as 8.9
  std::optional<int> open_ports;             // of the machine, for all its containers
  std::optional<bool> verified;              // the market has tested the machine
  std::optional<bool> datacenter;            // the market lists its owner as a data centre
  std::optional<double> reliability;         // share of the time that the machine is up
  std::optional<Duration> duration_max;      // longest rental time
  bool rentable = true;                      // false: the market states that it is rented
  double rollouts_per_s = 0;                 // predicted throughput; 0: unknown
  RateSource rollouts_source = RateSource::kUnknown;
  // Relative error of the throughput, either way; absent: usual_uncertainty().
  std::optional<double> rollouts_uncertainty;
  std::string rollouts_from;     // where the figure comes from, in words; "": unknown
  std::string engine;            // WorkerEngines::text() of the run; "" if the throughput is not predicted yet
  std::string engines_note;      // why not all GPUs count for the throughput, for the plan's reason; "": all do
  std::string unfit;             // why the run's engines cannot work there; "": they can
  std::optional<double> dlperf;  // the market's benchmark, of all its GPUs together
  std::optional<double> gpu_usd_per_hour;      // of all its GPUs, on demand
  std::optional<double> bid_usd_per_hour_min;  // the lowest bid that would rent the offer now
  std::optional<double> storage_usd_per_hour;
  std::optional<double> upload_usd_per_gb;  // GB = 10^9 bytes
  std::optional<double> download_usd_per_gb;

  // From ledgers of earlier runs: the hours for which the offer's host (or else its provider) was rented, and the
  // machines lost in these hours.
  double seen_hours = 0, seen_losses = 0;

  // The plan's bid; absent: rented on demand.
  std::optional<double> bid_usd_per_hour;

  double uncertainty() const { return rollouts_uncertainty.value_or(usual_uncertainty(rollouts_source)); }
  // The GPUs' rent, at the bid if there is one.
  std::optional<double> rent_usd_per_hour() const { return bid_usd_per_hour ? bid_usd_per_hour : gpu_usd_per_hour; }
  // Rent of machine and disk; absent if either is not stated.
  std::optional<double> usd_per_hour() const {
    const auto rent = rent_usd_per_hour();
    return rent && storage_usd_per_hour ? std::optional(*rent + *storage_usd_per_hour) : std::nullopt;
  }
  // The stated part of the rent.
  double usd_per_hour_known() const { return rent_usd_per_hour().value_or(0) + storage_usd_per_hour.value_or(0); }
};

// Values that plans use if an offer does not state its own. If both are absent, plans do not consider the offer.
struct Assumptions {
  std::optional<double> storage_usd_per_hour;
  std::optional<double> upload_usd_per_gb;
  std::optional<double> download_usd_per_gb;
  std::optional<BitRate> up, down;
  std::optional<double> vram_gb;
  std::optional<double> reliability;
  std::optional<Duration> duration;
  friend bool operator==(const Assumptions&, const Assumptions&) = default;
};

// Conditions that offers must meet, besides those that follow from the run. An offer that does not state a value does
// not meet a condition on it, except for links and prices, because fleet.assume can state these.
struct OfferConditions {
  std::vector<std::string> gpus;  // names, compared by gpu_key(); empty: any
  std::optional<int> gpu_count_min, gpu_count_max;
  bool verified = false, datacenter = false;  // true: required
  std::optional<int> open_ports_min;
  std::optional<double> cuda_min, compute_capability_min;
  std::optional<Bytes> memory_min;
  std::optional<BitRate> down_min;
  std::optional<double> upload_usd_per_gb_max, download_usd_per_gb_max;
  friend bool operator==(const OfferConditions&, const OfferConditions&) = default;
};

enum class Pricing { kOnDemand, kBid };
std::string_view to_string(Pricing pricing);

inline constexpr std::size_t kOffersMax = 500'000;
inline constexpr std::uint64_t kOffersBytesMax = 1ull << 30;

// Formats of offer files. "own": {"schema_version":1,"offers":[...]} as JSON or YAML, with the keys of
// configs/offers/README.md. The other formats belong to providers (OfferFormat). "auto" recognises the format.
inline constexpr const char* kAutoFormat = "auto";
inline constexpr const char* kOwnFormat = "own";

struct OfferReadOptions {
  std::string format = kAutoFormat;
  Bytes disk{};            // of a worker, because some markets state a price per GB
  std::size_t copies = 1;  // offers made of each kind of machine in a catalogue
};

struct OfferList {
  std::vector<Offer> offers;
  std::string format;  // not "auto"
  // Parts of the file that were left out or are unknown, with the reason; for the plan's notes.
  std::vector<std::string> notes = {};
};

// Null and absent values are unknown. A bad file gives one kInvalid error that lists the problems with their places,
// one per line, up to a limit. Problems are wrong syntax, missing keys, wrong types, values out of range and repeated
// ids; in our own format also unknown and repeated keys. kNotFound, kIo or kExhausted if the file cannot be read.
Result<OfferList> load_offers(const std::filesystem::path& path, const OfferReadOptions& reading = {});
// Parses text; messages name it `name`.
Result<OfferList> parse_offers(std::string_view text, std::string_view name, const OfferReadOptions& reading = {});

}  // namespace echoline::provisioner
