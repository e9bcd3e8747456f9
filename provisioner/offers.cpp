#include "provisioner/offers.hpp"

#include <map>

#include "base/config.hpp"

namespace echoline::provisioner {
namespace {

constexpr double kMbitMax = 1e6;  // 1 Tbit/s
constexpr double kUsdMax = 1e6;

Offer read_offer(ConfigSection& s) {
  Offer o;
  double up_mbit = 0, down_mbit = 0;
  std::optional<double> days;
  s.require("id", o.id);
  s.require("provider", o.provider);
  s.read("host", o.host);
  s.require("gpu", o.gpu);
  s.read("gpu_count", o.gpu_count, {.min = 1, .max = 1024});
  s.read("vram_gb", o.vram_gb, {.min = 0.0, .max = 1e5});
  s.read("place", o.place);
  s.require("up_mbit_per_s", up_mbit, {.min = 1e-3, .max = kMbitMax});
  s.require("down_mbit_per_s", down_mbit, {.min = 1e-3, .max = kMbitMax});
  s.read("reliability", o.reliability, {.min = 0.0, .max = 1.0});
  s.read("duration_days_max", days, {.min = 0.0, .max = 1e5});
  s.require("rollouts_per_s", o.rollouts_per_s, {.min = 1e-6, .max = 1e9});
  s.require_choice(
      "rollouts_source", o.rollouts_source,
      {{"measured", RateSource::kMeasured}, {"profile", RateSource::kProfile}, {"dlperf", RateSource::kDlperf}});
  s.require("gpu_usd_per_hour", o.gpu_usd_per_hour, {.min = 0.0, .max = kUsdMax});
  s.read("storage_usd_per_hour", o.storage_usd_per_hour, {.min = 0.0, .max = kUsdMax});
  s.read("upload_usd_per_gb", o.upload_usd_per_gb, {.min = 0.0, .max = kUsdMax});
  s.read("download_usd_per_gb", o.download_usd_per_gb, {.min = 0.0, .max = kUsdMax});
  o.up = BitRate::from_mbit_per_s(up_mbit);
  o.down = BitRate::from_mbit_per_s(down_mbit);
  if (days) o.duration_max = from_seconds(*days * 86400);
  return o;
}

Result<std::vector<Offer>> read_offers(ConfigFile file) {
  ConfigSection root = file.root();
  int schema_version = 0;
  root.require("schema_version", schema_version, {.min = 1, .max = 1});
  std::vector<ConfigSection> sections = root.sections("offers");
  if (!root.has("offers")) root.error("offers", "expected a list of offers, found none");
  if (sections.size() > kOffersMax) {
    return fail(Code::kInvalid, "read offers", "expected at most {} offers, found {}", kOffersMax, sections.size());
  }
  std::vector<Offer> offers;
  std::map<std::string, std::string> place_of_id;
  for (ConfigSection& section : sections) {
    offers.push_back(read_offer(section));
    const std::string& id = offers.back().id;
    if (id.empty()) continue;
    const auto [first, is_new] = place_of_id.emplace(id, section.path());
    if (!is_new) section.error("id", fmt::format("the id '{}' is already that of {}", id, first->second));
  }
  ECHO_TRY(file.finish());
  return offers;
}

}  // namespace

std::string_view to_string(RateSource source) {
  switch (source) {
    case RateSource::kMeasured:
      return "measured";
    case RateSource::kProfile:
      return "profile";
    case RateSource::kDlperf:
      return "dlperf";
  }
  return "?";
}

Result<std::vector<Offer>> load_offers(const std::filesystem::path& path) {
  ECHO_ASSIGN(ConfigFile file, ConfigFile::load_json(path));
  return read_offers(std::move(file));
}

Result<std::vector<Offer>> parse_offers(std::string_view text, std::string_view name) {
  ECHO_ASSIGN(ConfigFile file, ConfigFile::parse_json(text, std::string(name)));
  return read_offers(std::move(file));
}

}  // namespace echoline::provisioner
