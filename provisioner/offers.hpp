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
enum class RateSource { kMeasured, kProfile, kDlperf };
std::string_view to_string(RateSource source);

struct Offer {
  std::string id;        // unique in its file
  std::string provider;  // "local", "vast", ...
  std::string host;      // the machine: two offers of one are never rented together; "" when not stated
  std::string gpu;
  int gpu_count = 1;
  std::optional<double> vram_gb;  // per GPU
  std::string place;              // "" when not stated
  BitRate up, down;
  std::optional<double> reliability;     // [0, 1]
  std::optional<Duration> duration_max;  // it can be rented this long
  double rollouts_per_s = 0;             // mu
  RateSource rollouts_source = RateSource::kProfile;
  double gpu_usd_per_hour = 0;
  std::optional<double> storage_usd_per_hour;
  std::optional<double> upload_usd_per_gb;  // GB = 10^9 bytes
  std::optional<double> download_usd_per_gb;

  // Rent of machine and disk; absent where the disk's is not stated.
  std::optional<double> usd_per_hour() const {
    return storage_usd_per_hour ? std::optional(gpu_usd_per_hour + *storage_usd_per_hour) : std::nullopt;
  }
};

inline constexpr std::size_t kOffersMax = 100'000;

// Reads {"schema_version":1,"offers":[{...}]}; keys as in configs/offers/README.md, null and absent are the same. A
// bad file is one kInvalid error whose detail lists every problem, one per line, with line, column, offer and key:
// syntax, missing, unknown (with a suggestion) and repeated keys, wrong types, values out of range, repeated ids.
// kNotFound or kIo when the file cannot be read.
Result<std::vector<Offer>> load_offers(const std::filesystem::path& path);
// The same for text already read; `name` stands for the file in messages.
Result<std::vector<Offer>> parse_offers(std::string_view text, std::string_view name);

}  // namespace echoline::provisioner
