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
// A measured rate outside these multiples of its prediction is ignored, because it must be of another workload.
constexpr double kRatioMin = 0.05, kRatioMax = 4;
constexpr std::size_t kHostsForGpu = 3;        // measured hosts needed to correct other hosts with the same GPU
constexpr std::size_t kSourceMax = 200;        // bytes of a source's description
constexpr double kMeasuredUncertainty = 0.10;  // for a host that was measured in an earlier run
constexpr double kUncertaintyMax = 0.50;       // for a host that other hosts' results correct

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// The text of Offer::unfit.
std::string why_unfit_for(const WorkerEngines& engines, const Offer& offer) {
  if (engines.count_on(offer.gpu_count) > 0) return "";
  return fmt::format("{} GPU{}, and {} of {} (worker.engines, worker.gpus_per_engine)", offer.gpu_count,
                     offer.gpu_count == 1 ? "" : "s",
                     engines.count && *engines.count > 1 ? fmt::format("the run wants {} engines", *engines.count)
                                                         : std::string("the run wants an engine"),
                     engines.gpus_per_engine);
}

// The text of Offer::engines_note.
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

constexpr Limits<double> kPositive{.min = 1e-3, .max = 1e9};

// The data sheet and the figures of one element of `gpus`, and how the figures correct the computed rates. `shares` is
// null if the file's `engine_shares` have none of the element's engine.
ThroughputProfile::Gpu read_gpu(ConfigSection& section, const std::map<std::string, std::string>& sources,
                                const EngineShares* shares) {
  ThroughputProfile::Gpu gpu;
  if (section.has("bandwidth_gb_per_s")) {
    double memory_gb = 0, bandwidth_gb_per_s = 0, tflops = 0;
    section.require("memory_gb", memory_gb, kPositive);
    section.require("bandwidth_gb_per_s", bandwidth_gb_per_s, kPositive);
    section.require("tflops", tflops, kPositive);
    gpu.data = {.memory_bytes = memory_gb * 1e9, .bytes_per_s = bandwidth_gb_per_s * 1e9, .flops = tflops * 1e12};
    if (shares == nullptr) section.error("bandwidth_gb_per_s", "expected this engine in the file's engine_shares");
  }
  double log_ratios = 0;  // the sum over all figures
  for (ConfigSection& measured : section.sections("measured")) {
    double billions = 0;
    ThroughputProfile::Figure& figure = gpu.figures.emplace_back();
    measured.require("billions", billions, {.min = 1e-6, .max = 1e6});
    measured.require("tokens_per_s", figure.tokens_per_s, kPositive);
    measured.require("source", figure.source);
    if (!sources.contains(figure.source)) measured.error("source", "expected one of `sources`");
    EngineLoad& load = figure.load;
    load.parameters = billions * 1e9;
    if (!gpu.data) continue;
    double kv_kib_per_token = 0;
    measured.require("kv_kib_per_token", kv_kib_per_token, kPositive);
    measured.require("at_once", load.sequences_max, {.min = 1, .max = 1e6});
    measured.require("prompt_tokens", load.prompt_tokens, {.min = 0, .max = 1e6});
    measured.require("response_tokens", load.response_tokens, {.min = 1, .max = 1e6});
    load.kv_bytes_per_token = kv_kib_per_token * 1024;
    if (shares != nullptr && load.kv_bytes_per_token > 0 && figure.tokens_per_s > 0)
      log_ratios += std::log(figure.tokens_per_s / engine_tokens_per_s(*gpu.data, load, *shares));
  }
  // The geometric mean of the ratios of measured to computed rates. One more ratio of 1 counts, for the computation
  // itself, because a single publication is as uncertain as the computation.
  gpu.correction = std::exp(log_ratios / static_cast<double>(gpu.figures.size() + 1));
  const auto does_not_rise = [](const auto& a, const auto& b) { return a.load.parameters >= b.load.parameters; };
  if (!gpu.data && (gpu.figures.empty() || std::ranges::adjacent_find(gpu.figures, does_not_rise) != gpu.figures.end()))
    section.error("measured", "expected figures for rising sizes");
  return gpu;
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
  constexpr Limits<double> kShare{.min = 0.0, .max = 0.95};  // below 1, because plans divide by 1 - uncertainty
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
  ConfigSection shares = root.section("engine_shares");
  for (const char* engine : {"builtin", "sglang", ThroughputProfile::kVllm}) {
    if (!shares.has(engine)) continue;
    ConfigSection engine_section = shares.section(engine);
    EngineShares& engine_shares = profile.shares_[engine];
    engine_section.require("bandwidth", engine_shares.bandwidth, {.min = 0.01, .max = 2.0});
    engine_section.require("compute", engine_shares.compute, {.min = 0.01, .max = 2.0});
    engine_section.require("step_overhead", engine_shares.step_overhead,
                           {.min = Duration{}, .max = std::chrono::seconds(10)});
  }
  for (ConfigSection& section : root.sections("gpus")) {
    std::vector<std::string> names;
    std::string engine = ThroughputProfile::kVllm;
    section.require("names", names);
    section.read_choice("engine", engine, {{"builtin", "builtin"}, {"sglang", "sglang"}, {"vllm", "vllm"}});
    const auto shares_of_engine = profile.shares_.find(engine);
    const Gpu gpu = read_gpu(section, profile.sources_,
                             shares_of_engine == profile.shares_.end() ? nullptr : &shares_of_engine->second);
    if (names.empty()) section.error("names", "expected at least one name");
    for (const std::string& gpu_name : names)
      if (!profile.gpus_.emplace(std::pair(gpu_key(gpu_name), engine), gpu).second)
        section.error("names", fmt::format("'{}' is already described for {}", gpu_name, engine));
  }
  ConfigSection dlperf = root.section("dlperf");
  dlperf.read("gpu", profile.dlperf_gpu_);
  if (dlperf.has("gpu")) {
    dlperf.require("dlperf", profile.dlperf_of_gpu_, kPositive);
    dlperf.require("uncertainty", profile.dlperf_uncertainty_, kShare);
    dlperf.require("source", profile.dlperf_source_);
    if (!profile.gpus_.contains({gpu_key(profile.dlperf_gpu_), ThroughputProfile::kVllm}))
      dlperf.error("gpu", "expected a GPU that the profile describes");
  }
  ECHO_TRY(file.finish());
  return profile;
}

std::optional<TokenRate> ThroughputProfile::engine_rate(std::string_view gpu, const Workload& workload) const {
  if (!(workload.parameters > 0)) return std::nullopt;
  const std::string& engine = workload.engines.name;
  const auto it = gpus_.find({gpu_key(gpu), engine});
  const auto shares = shares_.find(engine);
  if (it == gpus_.end() && engine != kVllm) {
    const auto entry_of_vllm = gpus_.find({gpu_key(gpu), kVllm});
    if (entry_of_vllm != gpus_.end() && entry_of_vllm->second.data && shares != shares_.end())
      return computed_rate(entry_of_vllm->second, shares->second, /*is_corrected=*/false, workload);
    Workload for_vllm = workload;
    for_vllm.engines.name = kVllm;
    auto rate_of_vllm = engine_rate(gpu, for_vllm);
    if (!rate_of_vllm) return rate_of_vllm;
    rate_of_vllm->uncertainty = std::max(rate_of_vllm->uncertainty, uncertainty_beyond_);
    rate_of_vllm->from += fmt::format("; of vllm, as the profile has no figure of {}", engine);
    return rate_of_vllm;
  }
  if (it == gpus_.end()) return std::nullopt;
  // read_gpu() has checked that the engine of a data sheet has shares.
  if (it->second.data) return computed_rate(it->second, shares->second, /*is_corrected=*/true, workload);
  auto rate = measured_rate(it->second, workload.parameters);
  if (rate) rate->tokens_per_s *= workload.engines.gpus_per_engine;
  return rate;
}

TokenRate ThroughputProfile::computed_rate(const Gpu& gpu, const EngineShares& shares, bool is_corrected,
                                           const Workload& workload) const {
  const EngineLoad load{.parameters = workload.parameters,
                        .kv_bytes_per_token = workload.kv_bytes_per_token > 0
                                                  ? workload.kv_bytes_per_token
                                                  : usual_kv_bytes_per_token(workload.parameters),
                        .response_tokens = std::max(1.0, workload.tokens_per_rollout),
                        .sequences_max = workload.sequences_at_once_max};
  const double tokens_per_s = engine_tokens_per_s(gpu.data->times(workload.engines.gpus_per_engine), load, shares);
  if (!is_corrected || gpu.figures.empty())
    return {tokens_per_s, uncertainty_beyond_, "computed from the GPU's data sheet"};
  return {tokens_per_s * gpu.correction, uncertainty_,
          fmt::format("computed from the GPU's data sheet, x {:.2f} by {} published figure{}", gpu.correction,
                      gpu.figures.size(), gpu.figures.size() == 1 ? "" : "s")};
}

std::optional<TokenRate> ThroughputProfile::measured_rate(const Gpu& gpu, double parameters) const {
  const std::vector<Figure>& curve = gpu.figures;  // not empty, by rising size of the model
  const auto rate = [&](double tokens_per_s, double uncertainty, const Figure& figure) {
    return TokenRate{tokens_per_s, uncertainty, sources_.at(figure.source)};
  };
  constexpr double kAsMeasured = 1.25;  // a model size within this factor of a measured one counts as measured
  const Figure &smallest = curve.front(), &largest = curve.back();
  const bool is_far_below = parameters * kAsMeasured < smallest.load.parameters;
  const bool is_far_above = parameters > largest.load.parameters * kAsMeasured;
  const double uncertainty = is_far_below || is_far_above ? uncertainty_beyond_ : uncertainty_;
  if (parameters <= smallest.load.parameters) return rate(smallest.tokens_per_s, uncertainty, smallest);
  if (parameters >= largest.load.parameters)
    return rate(largest.tokens_per_s * largest.load.parameters / parameters, uncertainty, largest);
  const auto above_it = std::upper_bound(curve.begin(), curve.end(), parameters,
                                         [](double p, const Figure& figure) { return p < figure.load.parameters; });
  const Figure &above = *above_it, &below = *(above_it - 1);
  // Linear interpolation in logarithms.
  const double weight_above =
      std::log(parameters / below.load.parameters) / std::log(above.load.parameters / below.load.parameters);
  return rate(std::exp((1 - weight_above) * std::log(below.tokens_per_s) + weight_above * std::log(above.tokens_per_s)),
              uncertainty_, weight_above < 0.5 ? below : above);
}

std::optional<TokenRate> ThroughputProfile::engine_rate_at_dlperf(double dlperf, const Workload& workload) const {
  if (dlperf_gpu_.empty() || !(dlperf > 0)) return std::nullopt;
  auto rate = engine_rate(dlperf_gpu_, workload);
  if (!rate) return rate;
  rate->tokens_per_s *= dlperf / dlperf_of_gpu_;
  rate->uncertainty = std::max(rate->uncertainty, dlperf_uncertainty_);
  rate->from = fmt::format("{} x {:.3g}/{:.3g} by dlperf ({})", dlperf_gpu_, dlperf, dlperf_of_gpu_, rate->from);
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
    return rate.gpu_count == 1 && !workload.engines.on_cpu;  // a run of an earlier version used one GPU
  };
  for (const MeasuredRate& rate : measured) {
    if (!is_of_these_engines(rate)) continue;
    if (is_local_provider(rate.provider) || !(rate.promised_rollouts_per_s > 0) || !(rate.measured_rollouts_per_s > 0))
      continue;
    const double ratio = rate.measured_rollouts_per_s / rate.promised_rollouts_per_s;
    if (ratio < kRatioMin || ratio > kRatioMax) continue;
    const std::string gpu = gpu_key(rate.gpu);
    // `measured` is newest first, so only the newest rate of a host counts. Without a host's name, every rate counts.
    const bool counts =
        rate.host.empty() ||
        ratio_by_host.emplace(Machine(rate.provider, rate.host, gpu), HostRatio{.ratio = ratio, .run = rate.run})
            .second;
    if (counts) ratios_by_gpu[gpu].push_back(ratio);
  }
  struct Correction {  // of the rates of hosts without a ratio of their own
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
        .uncertainty = std::clamp(3 * median(distances), kMeasuredUncertainty, kUncertaintyMax),
        .from = fmt::format("the results of {} hosts with this GPU in earlier runs", ratios.size())};
  }

  const WorkerEngines& engines = workload.engines;
  const std::string cpu = ThroughputProfile::kCpu;
  // The rates of one engine. A cache, because many offers have the same GPU.
  std::map<std::string, std::optional<TokenRate>, std::less<>> rate_by_device;
  for (Offer& o : offers) {
    o.engine = engines.text();
    o.unfit = why_unfit_for(engines, o);
    if (!o.unfit.empty()) continue;
    o.engines_note = note_on_engines(engines, o, profile != nullptr);
    if (!(o.rollouts_per_s > 0) && profile && workload.tokens_per_rollout > 0) {
      const std::string& device = engines.on_cpu ? cpu : o.gpu;
      auto cached = rate_by_device.find(device);
      if (cached == rate_by_device.end())
        cached = rate_by_device.emplace(device, profile->engine_rate(device, workload)).first;
      std::optional<TokenRate> engine_rate = cached->second;
      RateSource source = RateSource::kProfile;
      if (!engine_rate && o.dlperf && !engines.on_cpu) {
        engine_rate = profile->engine_rate_at_dlperf(*o.dlperf / o.gpu_count, workload);
        source = RateSource::kDlperf;
      }
      if (engine_rate) {
        const int engine_count = engines.on_cpu ? 1 : engines.count_on(o.gpu_count);
        o.rollouts_per_s = engine_rate->tokens_per_s * engine_count / workload.tokens_per_rollout;
        o.rollouts_source = source;
        o.rollouts_uncertainty = engine_rate->uncertainty;
        o.rollouts_from = std::move(engine_rate->from);
      }
    }
    if (is_local_provider(o.provider) || !(o.rollouts_per_s > 0) || o.rollouts_source == RateSource::kMeasured)
      continue;
    const std::string gpu = gpu_key(o.gpu);
    const auto own_ratio = ratio_by_host.find(Machine(o.provider, o.host, gpu));
    const auto correction = correction_by_gpu.find(gpu);
    if (!o.host.empty() && own_ratio != ratio_by_host.end()) {
      o.rollouts_per_s *= own_ratio->second.ratio;
      o.rollouts_uncertainty = kMeasuredUncertainty;
      o.rollouts_from = fmt::format("the result of this host in the run {}", own_ratio->second.run);
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
