// What can be rented: offers as the market or a file states them. What is not stated stays absent, never 0.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "base/units.hpp"

namespace echoline::provisioner {

// Where a predicted throughput comes from.
enum class RateSource { kUnknown, kMeasured, kProfile, kDlperf };
std::string_view to_string(RateSource source);
// Share by which a throughput of this source may be off either way, where nobody has said it of that figure.
double usual_uncertainty(RateSource source);

struct Offer {
  std::string id;        // unique in its file
  std::string provider;  // ProviderKind::name
  std::string host;      // the machine; "" when not stated
  std::string owner;     // who runs the machine; "" when not stated
  std::string gpu;
  int gpu_count = 1;
  // Which of its machine's GPUs they are: offers of one machine that share a GPU are never rented together. Empty when
  // not stated: it is the whole machine.
  std::vector<int> gpu_ids;
  std::optional<double> vram_gb;  // per GPU
  std::string place;              // "" when not stated
  std::optional<BitRate> up, down;
  std::optional<double> reliability;     // [0, 1]
  std::optional<Duration> duration_max;  // it can be rented this long
  bool rentable = true;                  // the market says that nobody has it
  double rollouts_per_s = 0;             // mu; 0 while it is not known
  RateSource rollouts_source = RateSource::kUnknown;
  // Share by which the throughput may be off either way; absent: as its source usually is.
  std::optional<double> rollouts_uncertainty;
  std::string rollouts_from;                   // who has measured or published it; "" when not known
  std::optional<double> dlperf;                // the market's benchmark of all its GPUs
  std::optional<double> gpu_usd_per_hour;      // on demand
  std::optional<double> bid_usd_per_hour_min;  // the least bid that would rent it now
  std::optional<double> storage_usd_per_hour;
  std::optional<double> upload_usd_per_gb;  // GB = 10^9 bytes
  std::optional<double> download_usd_per_gb;

  // What ledgers of earlier runs have seen of its host, or else of its provider: hours rented, and machines lost in
  // them.
  double seen_hours = 0, seen_losses = 0;

  // What is bid for it, once a plan has chosen to; absent: it is rented on demand.
  std::optional<double> bid_usd_per_hour;

  // Of `rollouts_per_s`.
  double uncertainty() const { return rollouts_uncertainty.value_or(usual_uncertainty(rollouts_source)); }
  // Rent of its GPUs, at the bid where there is one.
  std::optional<double> rent_usd_per_hour() const { return bid_usd_per_hour ? bid_usd_per_hour : gpu_usd_per_hour; }
  // Rent of machine and disk; absent where either is not stated.
  std::optional<double> usd_per_hour() const {
    const auto rent = rent_usd_per_hour();
    return rent && storage_usd_per_hour ? std::optional(*rent + *storage_usd_per_hour) : std::nullopt;
  }
  // As much of it as is known.
  double usd_per_hour_known() const { return rent_usd_per_hour().value_or(0) + storage_usd_per_hour.value_or(0); }
};

// What to take for what an offer does not state. Where nothing is assumed, such an offer is not considered.
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

enum class Pricing { kOnDemand, kBid };
std::string_view to_string(Pricing pricing);

inline constexpr std::size_t kOffersMax = 500'000;
inline constexpr std::uint64_t kOffersBytesMax = 1ull << 30;

// What a file of offers can be. "own": {"schema_version":1,"offers":[...]} as JSON or YAML, keys as in
// configs/offers/README.md. Others are those of providers (OfferFormat). "auto": by what stands in it.
inline constexpr const char* kAutoFormat = "auto";
inline constexpr const char* kOwnFormat = "own";

struct OfferReading {
  std::string format = kAutoFormat;
  Bytes disk{};            // that a worker will rent: some markets sell it by the GB
  std::size_t copies = 1;  // a catalogue lists kinds of machines: how many of each can be rented
};

struct OfferList {
  std::vector<Offer> offers;
  std::string format;  // not "auto"
};

// Null and absent values are unknown. A bad file is one kInvalid error whose detail lists every problem (the first ones
// of very many), one per line, with its place: syntax, missing keys, wrong types, values out of range, repeated ids; in
// our own format also unknown and repeated keys. kNotFound, kIo or kExhausted when the file cannot be read.
Result<OfferList> load_offers(const std::filesystem::path& path, const OfferReading& reading = {});
// The same for text already read; `name` stands for the file in messages.
Result<OfferList> parse_offers(std::string_view text, std::string_view name, const OfferReading& reading = {});

}  // namespace echoline::provisioner
