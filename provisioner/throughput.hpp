// Predicts the throughput of offers. The sources, best first: measurements of earlier runs, the offer's own figure, a
// profile of its GPU, the market's benchmark (dlperf). Without any, the throughput stays unknown.
#pragma once
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/worker_engines.hpp"

namespace echoline::provisioner {

// The work of one worker per rollout.
struct Workload {
  double parameters = 0;          // of the model
  double tokens_per_rollout = 0;  // generated
  WorkerEngines engines = {};
};

// A rate with its uncertainty and source.
struct TokenRate {
  double tokens_per_s = 0;
  double uncertainty = 0;  // relative, up or down
  std::string from;
};

// Tokens per second by GPU, engine and model size, from files like those in configs/profiles/. Every figure has its
// source.
class ThroughputProfile {
 public:
  // kInvalid with all problems; kNotFound or kIo.
  static Result<ThroughputProfile> load(const std::filesystem::path& path);
  static Result<ThroughputProfile> parse(std::string_view text, std::string_view name);
  static constexpr const char* kVllm = "vllm";  // the engine of figures that name none
  // The name that stands for one core of any CPU, in figures of the built-in engine.
  static constexpr const char* kCpu = "CPU";

  // The rate of one GPU of this name; absent if the name is unknown. Interpolates linearly in logarithms between two
  // model sizes. Above the largest size, the rate falls with the size; below the smallest, it is constant. Without a
  // figure of this engine, the rate is that of vLLM, and as uncertain as for a size that was not measured.
  std::optional<TokenRate> rate_of_gpu(std::string_view gpu, double parameters, std::string_view engine = kVllm) const;
  // The rate of a GPU from its value in the market's benchmark: proportional to that of the profile's reference GPU.
  std::optional<TokenRate> rate_at_dlperf(double dlperf, double parameters, std::string_view engine = kVllm) const;

 private:
  struct Point {
    double parameters = 0, tokens_per_s = 0;
    std::string source;
  };
  double uncertainty_ = 0, uncertainty_beyond_ = 0;  // between the measured model sizes; beyond them
  std::map<std::string, std::string> sources_;       // descriptions by key
  // The reference GPU of the market's benchmark, and its value in that benchmark.
  std::string dlperf_gpu_, dlperf_source_;
  double dlperf_ = 0, dlperf_uncertainty_ = 0;
  std::map<std::pair<std::string, std::string>, std::vector<Point>> curves_;  // by gpu_key() and engine; smallest first
};

// A normalised GPU name: "NVIDIA GeForce RTX_4090" becomes "rtx4090".
std::string gpu_key(std::string_view name);

// A machine's rate in an earlier run, with its prediction at that time.
struct MeasuredRate {
  std::string run, provider, host, gpu;
  int gpu_count = 1;
  double promised_rollouts_per_s = 0, measured_rollouts_per_s = 0;
  std::string engine = {};  // WorkerEngines::text(); "" in runs of earlier versions, which used one GPU
};

// Sets throughput, source and uncertainty of every offer, if known, for the engines that the workload's workers run
// there. A host's earlier ratio of measured to predicted
// rate corrects its prediction; the median ratio of a GPU's known hosts corrects its other hosts. `measured`: newest
// first. The local provider throttles its workers to their offers, so its measurements are not used.
void predict_throughput(std::span<Offer> offers, const Workload& workload, const ThroughputProfile* profile,
                        std::span<const MeasuredRate> measured);

}  // namespace echoline::provisioner
