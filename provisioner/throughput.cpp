// Reads throughput profiles and predicts the throughput of offers, for plans.
#include "provisioner/throughput.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>

#include "base/config.hpp"
#include "base/files.hpp"
#include "provisioner/providers/registry.hpp"

namespace echoline::provisioner {
namespace {

constexpr std::size_t kProfileBytesMax = 1 << 20;
// Measured rates outside these multiples of the prediction are ignored: the two must be of different workloads.
constexpr double kRatioMin = 0.05, kRatioMax = 4;
constexpr std::size_t kHostsForGpu = 3;   // measured hosts needed to correct other hosts with the same GPU
constexpr std::size_t kSourceMax = 200;   // bytes
constexpr double kOwnUncertainty = 0.10;  // for a host that was measured in another run
constexpr double kUncertaintyMax = 0.50;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Offer::unfit.
std::string why_unfit_for(const WorkerEngines& engines, const Offer& offer) {
  if (engines.count_on(offer.gpu_count) > 0) return "";
  return fmt::format("{} GPU{}, and {} of {} (worker.engines, worker.gpus_per_engine)", offer.gpu_count,
                     offer.gpu_count == 1 ? "" : "s",
                     engines.count && *engines.count > 1 ? fmt::format("the run wants {} engines", *engines.count)
                                                         : std::string("the run wants an engine"),
                     engines.gpus_per_engine);
}

// Offer::engines_note.
std::string note_on_engines(const WorkerEngines& engines, const Offer& offer, bool has_profile) {
  const int gpus = offer.gpu_count, used = engines.gpus_used_on(gpus);
  if (engines.on_cpu) return has_profile ? "the built-in engine computes on its CPU (worker.device)" : "";
  if (used == gpus) return "";
  const int count = engines.count_on(gpus);
  return fmt::format("{} of its {} GPUs compute{}: {}", used, gpus, used == 1 ? "s" : "",
                     engines.is_builtin() ? std::string("the built-in engine uses one")
                                          : fmt::format("{} engine{} of {} (worker.engines, worker.gpus_per_engine)",
                                                        count, count == 1 ? "" : "s", engines.gpus_per_engine));
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
  constexpr Limits<double> kShare{.min = 0.0, .max = 0.95};
  constexpr Limits<double> kPositive{.min = 1e-3, .max = 1e9};
  int schema_version = 0;
  root.require("schema_version", schema_version, {.min = 2, .max = 2});
  ConfigSection uncertainty = root.section("uncertainty");
  uncertainty.require("measured", profile.uncertainty_, kShare);
  uncertainty.require("beyond", profile.uncertainty_beyond_, kShare);
  ConfigSection sources = root.section("sources");
  for (const std::string& key : sources.keys()) {
    sources.require(key, profile.sources_[key]);
    if (profile.sources_[key].size() > kSourceMax)
      sources.error(key, fmt::format("expected at most {} bytes", kSourceMax));
  }
  for (ConfigSection& gpu : root.sections("gpus")) {
    std::vector<Point> points;
    std::vector<std::string> names;
    std::string engine = ThroughputProfile::kVllm;
    gpu.require("names", names);
    gpu.read_choice("engine", engine, {{"builtin", "builtin"}, {"sglang", "sglang"}, {"vllm", "vllm"}});
    for (ConfigSection& figure : gpu.sections("measured")) {
      double billions = 0;
      Point& point = points.emplace_back();
      figure.require("billions", billions, {.min = 1e-6, .max = 1e6});
      figure.require("tokens_per_s", point.tokens_per_s, kPositive);
      figure.require("source", point.source);
      if (!profile.sources_.contains(point.source)) figure.error("source", "expected one of `sources`");
      point.parameters = billions * 1e9;
    }
    const auto does_not_rise = [](const Point& a, const Point& b) { return a.parameters >= b.parameters; };
    if (points.empty() || std::adjacent_find(points.begin(), points.end(), does_not_rise) != points.end())
      gpu.error("measured", "expected figures for rising sizes");
    if (names.empty()) gpu.error("names", "expected at least one name");
    for (const std::string& gpu_name : names)
      if (!profile.curves_.emplace(std::pair(gpu_key(gpu_name), engine), points).second)
        gpu.error("names", fmt::format("'{}' is already described for {}", gpu_name, engine));
  }
  ConfigSection dlperf = root.section("dlperf");
  dlperf.read("gpu", profile.dlperf_gpu_);
  if (dlperf.has("gpu")) {
    dlperf.require("dlperf", profile.dlperf_, kPositive);
    dlperf.require("uncertainty", profile.dlperf_uncertainty_, kShare);
    dlperf.require("source", profile.dlperf_source_);
    if (!profile.curves_.contains({gpu_key(profile.dlperf_gpu_), ThroughputProfile::kVllm}))
      dlperf.error("gpu", "expected a GPU that the profile describes");
  }
  ECHO_TRY(file.finish());
  return profile;
}

std::optional<TokenRate> ThroughputProfile::rate_of_gpu(std::string_view gpu, double parameters,
                                                        std::string_view engine) const {
  const auto it = curves_.find({gpu_key(gpu), std::string(engine)});
  if (it == curves_.end() && engine != kVllm) {
    auto of_vllm = rate_of_gpu(gpu, parameters);
    if (!of_vllm) return of_vllm;
    of_vllm->uncertainty = std::max(of_vllm->uncertainty, uncertainty_beyond_);
    of_vllm->from += fmt::format("; of vllm, as the profile has no figure of {}", engine);
    return of_vllm;
  }
  if (it == curves_.end() || !(parameters > 0)) return std::nullopt;
  const std::vector<Point>& curve = it->second;
  const auto rate = [&](double tokens_per_s, double uncertainty, const Point& point) {
    return TokenRate{tokens_per_s, uncertainty, sources_.at(point.source)};
  };
  constexpr double kAsMeasured = 1.25;  // a model size within this factor of a measured one counts as measured
  const Point &smallest = curve.front(), &largest = curve.back();
  if (parameters <= smallest.parameters)
    return rate(smallest.tokens_per_s,
                parameters * kAsMeasured < smallest.parameters ? uncertainty_beyond_ : uncertainty_, smallest);
  if (parameters >= largest.parameters)
    return rate(largest.tokens_per_s * largest.parameters / parameters,
                parameters > largest.parameters * kAsMeasured ? uncertainty_beyond_ : uncertainty_, largest);
  const auto above_it = std::upper_bound(curve.begin(), curve.end(), parameters,
                                         [](double p, const Point& point) { return p < point.parameters; });
  const Point &above = *above_it, &below = *(above_it - 1);
  // Linear interpolation in logarithms; `weight` is that of the point above.
  const double weight = std::log(parameters / below.parameters) / std::log(above.parameters / below.parameters);
  return rate(std::exp((1 - weight) * std::log(below.tokens_per_s) + weight * std::log(above.tokens_per_s)),
              uncertainty_, weight < 0.5 ? below : above);
}

std::optional<TokenRate> ThroughputProfile::rate_at_dlperf(double dlperf, double parameters,
                                                           std::string_view engine) const {
  if (dlperf_gpu_.empty() || !(dlperf > 0)) return std::nullopt;
  auto rate = rate_of_gpu(dlperf_gpu_, parameters, engine);
  if (!rate) return rate;
  rate->tokens_per_s *= dlperf / dlperf_;
  rate->uncertainty = std::max(rate->uncertainty, dlperf_uncertainty_);
  rate->from = fmt::format("{} x {:.3g}/{:.3g} by dlperf ({})", dlperf_gpu_, dlperf, dlperf_, rate->from);
  return rate;
}

void predict_throughput(std::span<Offer> offers, const Workload& workload, const ThroughputProfile* profile,
                        std::span<const MeasuredRate> measured) {
  using Machine = std::tuple<std::string_view, std::string_view, std::string>;  // provider, host, GPU
  struct HostRatio {
    double ratio = 1;
    std::string_view run;
  };
  std::map<Machine, HostRatio> ratio_by_host;
  std::map<std::string, std::vector<double>> ratios_by_gpu;
  const auto is_of_these_engines = [&](const MeasuredRate& rate) {
    if (!rate.engine.empty()) return rate.engine == workload.engines.text();
    return rate.gpu_count == 1 && !workload.engines.on_cpu;
  };
  for (const MeasuredRate& rate : measured) {
    if (!is_of_these_engines(rate)) continue;
    if (is_local_provider(rate.provider) || !(rate.promised_rollouts_per_s > 0) || !(rate.measured_rollouts_per_s > 0))
      continue;
    const double ratio = rate.measured_rollouts_per_s / rate.promised_rollouts_per_s;
    if (ratio < kRatioMin || ratio > kRatioMax) continue;
    const std::string gpu = gpu_key(rate.gpu);
    // `measured` is newest first, so only the newest rate of a host counts.
    const bool is_newest =
        rate.host.empty() ||
        ratio_by_host.emplace(Machine(rate.provider, rate.host, gpu), HostRatio{.ratio = ratio, .run = rate.run})
            .second;
    if (is_newest) ratios_by_gpu[gpu].push_back(ratio);
  }
  struct Correction {
    double ratio = 1, uncertainty = 0;
    std::string from;
  };
  std::map<std::string, Correction> correction_by_gpu;
  for (const auto& [gpu, ratios] : ratios_by_gpu) {
    if (ratios.size() < kHostsForGpu) continue;
    const double median_ratio = median(ratios);
    std::vector<double> distances;
    for (const double ratio : ratios) distances.push_back(std::abs(ratio / median_ratio - 1));
    // Uncertainty for one more host: half of the known hosts are within the median distance, and nearly all within
    // three times the median distance.
    correction_by_gpu[gpu] = {
        .ratio = median_ratio,
        .uncertainty = std::clamp(3 * median(distances), kOwnUncertainty, kUncertaintyMax),
        .from = fmt::format("the results of {} hosts with this GPU in earlier runs", ratios.size())};
  }

  const WorkerEngines& engines = workload.engines;
  const std::string cpu = ThroughputProfile::kCpu;
  // Cached, because many offers have the same GPU.
  std::map<std::string, std::optional<TokenRate>, std::less<>> rate_by_gpu;
  for (Offer& o : offers) {
    o.engine = engines.text();
    o.unfit = why_unfit_for(engines, o);
    if (!o.unfit.empty()) continue;
    o.engines_note = note_on_engines(engines, o, profile != nullptr);
    const int gpus_used = engines.gpus_used_on(o.gpu_count);
    if (!(o.rollouts_per_s > 0) && profile && workload.tokens_per_rollout > 0) {
      const std::string& device = engines.on_cpu ? cpu : o.gpu;
      auto it = rate_by_gpu.find(device);
      if (it == rate_by_gpu.end())
        it = rate_by_gpu.emplace(device, profile->rate_of_gpu(device, workload.parameters, engines.name)).first;
      std::optional<TokenRate> rate = it->second;
      if (rate) {
        if (!engines.on_cpu) rate->tokens_per_s *= gpus_used;
        o.rollouts_source = RateSource::kProfile;
      } else if (o.dlperf && !engines.on_cpu) {
        rate = profile->rate_at_dlperf(*o.dlperf * gpus_used / o.gpu_count, workload.parameters, engines.name);
        if (rate) o.rollouts_source = RateSource::kDlperf;
      }
      if (rate) {
        o.rollouts_per_s = rate->tokens_per_s / workload.tokens_per_rollout;
        o.rollouts_uncertainty = rate->uncertainty;
        o.rollouts_from = std::move(rate->from);
      }
    }
    if (is_local_provider(o.provider) || !(o.rollouts_per_s > 0) || o.rollouts_source == RateSource::kMeasured)
      continue;
    const std::string gpu = gpu_key(o.gpu);
    const auto host = ratio_by_host.find(Machine(o.provider, o.host, gpu));
    const auto correction = correction_by_gpu.find(gpu);
    if (!o.host.empty() && host != ratio_by_host.end()) {
      o.rollouts_per_s *= host->second.ratio;
      o.rollouts_uncertainty = kOwnUncertainty;
      o.rollouts_from = fmt::format("the result of this host in the run {}", host->second.run);
    } else if (correction != correction_by_gpu.end()) {
      o.rollouts_per_s *= correction->second.ratio;
      o.rollouts_uncertainty = correction->second.uncertainty;
      o.rollouts_from = correction->second.from;
    } else {
      continue;
    }
    o.rollouts_source = RateSource::kMeasured;
  }
}

}  // namespace echoline::provisioner
