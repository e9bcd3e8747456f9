// Predicts the throughput of offers. The sources, best first: measurements of earlier runs, the offer's own figure, a
// profile of its GPU, the market's benchmark (dlperf). Without any of them, the throughput stays unknown.
#pragma once
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "provisioner/engine_rate.hpp"
#include "provisioner/offers.hpp"
#include "provisioner/worker_engines.hpp"

namespace echoline::provisioner {

// The work of one worker per rollout.
struct Workload {
  double parameters = 0;          // of the model
  double tokens_per_rollout = 0;  // generated
  WorkerEngines engines = {};
  double kv_bytes_per_token = 0;         // keys and values of all layers; 0: not known
  double sequences_at_once_max = 256.0;  // of one engine
};

// A rate with its uncertainty and source.
struct TokenRate {
  double tokens_per_s = 0;
  double uncertainty = 0;  // relative, up or down
  std::string from;
};

// Tokens per second by GPU, engine and model, from files like those in configs/profiles/. The rate of a GPU with a data
// sheet is computed (provisioner/engine_rate) and corrected by published measurements of that GPU. Without a data
// sheet, the measurements are the rate. Every figure has its source.
class ThroughputProfile {
 public:
  // A published measurement of one GPU.
  struct Figure {
    double tokens_per_s = 0;
    std::string source;  // a key of the file's `sources`
    EngineLoad load;     // only its `parameters` are set for a GPU without a data sheet
  };
  struct Gpu {
    std::optional<GpuData> data;
    std::vector<Figure> figures;  // by rising size of the model if there is no data sheet
    double correction = 1;        // measured over computed
  };

  // kInvalid with all problems; kNotFound or kIo.
  static Result<ThroughputProfile> load(const std::filesystem::path& path);
  static Result<ThroughputProfile> parse(std::string_view text, std::string_view name);
  static constexpr const char* kVllm = "vllm";  // the engine of figures that name none
  // The name that stands for one core of any CPU, in figures of the built-in engine.
  static constexpr const char* kCpu = "CPU";

  // The rate of one engine of the workload, on gpus_per_engine GPUs of this name; absent if the name is unknown.
  // Prompts are left out, because the responses of a group share one. Without a data sheet, interpolates linearly in
  // logarithms between two measured model sizes; above the largest size, the rate falls with the size; below the
  // smallest, it is constant. If the GPU has no entry for this engine, uses the data sheet or the figures of its entry
  // for vLLM; the rate is then as uncertain as one that was not measured.
  std::optional<TokenRate> engine_rate(std::string_view gpu, const Workload& workload) const;
  // The same from a GPU's value in the market's benchmark: the rate of the profile's reference GPU, times the ratio of
  // the two GPUs' values.
  std::optional<TokenRate> engine_rate_at_dlperf(double dlperf, const Workload& workload) const;

  // By gpu_key() and engine.
  const std::map<std::pair<std::string, std::string>, Gpu>& gpus() const { return gpus_; }
  // By engine.
  const std::map<std::string, EngineShares>& shares() const { return shares_; }

 private:
  std::optional<TokenRate> measured_rate(const Gpu& gpu, double parameters) const;
  // `is_corrected`: the GPU's figures are of the workload's engine, so they correct the rate.
  TokenRate computed_rate(const Gpu& gpu, const EngineShares& shares, bool is_corrected,
                          const Workload& workload) const;

  double uncertainty_ = 0;         // relative, for a GPU and a model size with measurements
  double uncertainty_beyond_ = 0;  // without
  std::map<std::string, EngineShares> shares_;
  std::map<std::string, std::string> sources_;  // descriptions by key
  // The reference GPU of the market's benchmark, and its value in that benchmark.
  std::string dlperf_gpu_, dlperf_source_;
  double dlperf_of_gpu_ = 0, dlperf_uncertainty_ = 0;
  std::map<std::pair<std::string, std::string>, Gpu> gpus_;
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
// there. A host's earlier ratio of measured to predicted rate corrects the prediction for that host. For a host without
// a ratio, the median ratio of the hosts with the same GPU corrects it. `measured`: newest first. The local provider
// throttles its workers to their offers, so its measurements are not used.
void predict_throughput(std::span<Offer> offers, const Workload& workload, const ThroughputProfile* profile,
                        std::span<const MeasuredRate> measured);

}  // namespace echoline::provisioner
