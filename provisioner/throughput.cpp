#include "provisioner/throughput.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "base/config.hpp"
#include "base/files.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kProfileBytesMax = 1 << 20;
// A measurement is believed within these bounds of the prediction: beyond them one of the two is not of this workload.
constexpr double kRatioMin = 0.05, kRatioMax = 4;
constexpr std::size_t kHostsForGpu = 3;  // so many say something about a GPU

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

std::string gpu_key(std::string_view name) {
  std::string key;
  for (const char c : name) {
    if (c >= 'A' && c <= 'Z') key += static_cast<char>(c - 'A' + 'a');
    if ((c >= 'a' && c <= 'z') || (c >= '0' && c <= '9')) key += c;
  }
  for (const char* vendor : {"nvidia", "geforce", "tesla", "quadro"})
    if (key.starts_with(vendor)) key.erase(0, std::string_view(vendor).size());
  return key;
}

Result<ThroughputProfile> ThroughputProfile::load(const std::filesystem::path& path) {
  ECHO_ASSIGN(const std::string text, read_file(path, kProfileBytesMax));
  return parse(text, path.string());
}

Result<ThroughputProfile> ThroughputProfile::parse(std::string_view text, std::string_view name) {
  ECHO_ASSIGN(ConfigFile file, ConfigFile::parse(text, std::string(name)));
  ConfigSection root = file.root();
  ThroughputProfile profile;
  int schema_version = 0;
  root.require("schema_version", schema_version, {.min = 1, .max = 1});
  root.require("source", profile.source_);
  ConfigSection dlperf = root.section("dlperf");
  dlperf.read("gpu", profile.dlperf_gpu_);
  dlperf.read("dlperf", profile.dlperf_, {.min = 1e-3, .max = 1e6});
  std::string dlperf_source;
  dlperf.read("source", dlperf_source);
  std::vector<double> billions;
  root.require("model_billions", billions);
  const auto rising = [](const std::vector<double>& v) {
    return !v.empty() && std::adjacent_find(v.begin(), v.end(), std::greater_equal<>()) == v.end() && v.front() > 0;
  };
  if (!rising(billions)) root.error("model_billions", "expected rising sizes above 0");
  for (ConfigSection& gpu : root.sections("gpus")) {
    Curve curve;
    std::vector<std::string> names;
    gpu.require("names", names);
    gpu.require("tokens_per_s", curve.tokens_per_s);
    for (const double b : billions) curve.parameters.push_back(b * 1e9);
    const bool good = std::all_of(curve.tokens_per_s.begin(), curve.tokens_per_s.end(),
                                  [](double t) { return std::isfinite(t) && t > 0; });
    if (!good || curve.tokens_per_s.size() != billions.size())
      gpu.error("tokens_per_s", fmt::format("expected {} numbers above 0, one for each of model_billions", billions.size()));
    if (names.empty()) gpu.error("names", "expected at least one name");
    for (const std::string& each : names)
      if (!profile.curves_.emplace(gpu_key(each), curve).second)
        gpu.error("names", fmt::format("'{}' is already described", each));
  }
  if (!profile.dlperf_gpu_.empty() && !profile.curves_.contains(gpu_key(profile.dlperf_gpu_)))
    dlperf.error("gpu", "expected a GPU that the profile describes");
  ECHO_TRY(file.finish());
  return profile;
}

std::optional<double> ThroughputProfile::tokens_per_s(std::string_view gpu, double parameters) const {
  const auto it = curves_.find(gpu_key(gpu));
  if (it == curves_.end() || !(parameters > 0)) return std::nullopt;
  const Curve& c = it->second;
  if (parameters <= c.parameters.front()) return c.tokens_per_s.front();
  if (parameters >= c.parameters.back()) return c.tokens_per_s.back() * c.parameters.back() / parameters;
  const auto above = std::upper_bound(c.parameters.begin(), c.parameters.end(), parameters);
  const auto i = static_cast<std::size_t>(above - c.parameters.begin());
  const double share = std::log(parameters / c.parameters[i - 1]) / std::log(c.parameters[i] / c.parameters[i - 1]);
  return std::exp((1 - share) * std::log(c.tokens_per_s[i - 1]) + share * std::log(c.tokens_per_s[i]));
}

std::optional<double> ThroughputProfile::tokens_per_s_of_dlperf(double dlperf, double parameters) const {
  if (dlperf_gpu_.empty() || !(dlperf_ > 0) || !(dlperf > 0)) return std::nullopt;
  const auto reference = tokens_per_s(dlperf_gpu_, parameters);
  return reference ? std::optional(*reference * dlperf / dlperf_) : std::nullopt;
}

void predict_throughput(std::span<Offer> offers, const Workload& workload, const ThroughputProfile* profile,
                        std::span<const MeasuredRate> measured) {
  using Machine = std::tuple<std::string_view, std::string_view, std::string>;  // provider, host, GPU
  std::map<Machine, double> of_host;
  std::map<std::string, std::vector<double>> of_gpu;
  for (const MeasuredRate& m : measured) {
    if (m.provider == "local" || !(m.promised_rollouts_per_s > 0) || !(m.measured_rollouts_per_s > 0)) continue;
    const double ratio = m.measured_rollouts_per_s / m.promised_rollouts_per_s;
    if (ratio < kRatioMin || ratio > kRatioMax) continue;
    const std::string gpu = gpu_key(m.gpu);
    if (m.host.empty() || of_host.emplace(Machine(m.provider, m.host, gpu), ratio).second) of_gpu[gpu].push_back(ratio);
  }
  std::map<std::string, double> gpu_ratio;
  for (const auto& [gpu, ratios] : of_gpu)
    if (ratios.size() >= kHostsForGpu) gpu_ratio[gpu] = median(ratios);

  std::map<std::string, std::optional<double>, std::less<>> tokens_of;  // offers of one GPU are many
  for (Offer& o : offers) {
    if (!(o.rollouts_per_s > 0) && profile && workload.tokens_per_rollout > 0) {
      auto it = tokens_of.find(o.gpu);
      if (it == tokens_of.end()) it = tokens_of.emplace(o.gpu, profile->tokens_per_s(o.gpu, workload.parameters)).first;
      std::optional<double> tokens = it->second;
      if (tokens) {
        *tokens *= o.gpu_count;
        o.rollouts_source = RateSource::kProfile;
      } else if (o.dlperf) {
        tokens = profile->tokens_per_s_of_dlperf(*o.dlperf, workload.parameters);
        if (tokens) o.rollouts_source = RateSource::kDlperf;
      }
      if (tokens) o.rollouts_per_s = *tokens / workload.tokens_per_rollout;
    }
    if (o.provider == "local" || !(o.rollouts_per_s > 0) || o.rollouts_source == RateSource::kMeasured) continue;
    const std::string gpu = gpu_key(o.gpu);
    const auto host = of_host.find(Machine(o.provider, o.host, gpu));
    const auto others = gpu_ratio.find(gpu);
    if (!o.host.empty() && host != of_host.end())
      o.rollouts_per_s *= host->second;
    else if (others != gpu_ratio.end())
      o.rollouts_per_s *= others->second;
    else
      continue;
    o.rollouts_source = RateSource::kMeasured;
  }
}

}  // namespace echoline::provisioner
