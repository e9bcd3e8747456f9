// How many rollouts a second an offer will give: from measurements of earlier runs, else from what the offer states,
// else from a profile of its GPU, else from the market's benchmark. What none of them knows stays unknown.
#pragma once
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "provisioner/offers.hpp"

namespace echoline::provisioner {

// What one worker does for the run.
struct Workload {
  double parameters = 0;          // of the model
  double tokens_per_rollout = 0;  // generated
};

// A figure, how sure it is, and who says so.
struct TokenRate {
  double tokens_per_s = 0;
  double uncertainty = 0;  // share, either way
  std::string from;
};

// Tokens per second by GPU and size of the model, as files below configs/profiles/ have them: every figure with its
// source.
class ThroughputProfile {
 public:
  // kInvalid with every problem; kNotFound or kIo.
  static Result<ThroughputProfile> load(const std::filesystem::path& path);
  static Result<ThroughputProfile> parse(std::string_view text, std::string_view name);
  // Of one GPU; between two sizes on the straight line of logarithms, above the largest in proportion to the size,
  // below the smallest as fast as that. Absent for a GPU that is not in it.
  std::optional<TokenRate> of_gpu(std::string_view gpu, double parameters) const;
  // By the market's benchmark of a GPU, in proportion to the GPU that the profile names for that.
  std::optional<TokenRate> of_dlperf(double dlperf, double parameters) const;

 private:
  struct Point {
    double parameters = 0, tokens_per_s = 0;
    std::string source;
  };
  double uncertainty_ = 0, uncertainty_beyond_ = 0;
  std::map<std::string, std::string> sources_;
  std::string dlperf_gpu_, dlperf_source_;
  double dlperf_ = 0, dlperf_uncertainty_ = 0;
  std::map<std::string, std::vector<Point>> curves_;  // by gpu_key(); the smallest model first
};

// A GPU's name as markets write it, without what they write differently: "NVIDIA GeForce RTX_4090" is "rtx4090".
std::string gpu_key(std::string_view name);

// What a machine did in an earlier run, and what had been predicted of it then.
struct MeasuredRate {
  std::string run, provider, host, gpu;
  int gpu_count = 1;
  double promised_rollouts_per_s = 0, measured_rollouts_per_s = 0;
};

// Sets throughput, source and uncertainty of every offer for which there is one. A host that did more or less than was
// predicted of it is predicted by so much more or less, and other hosts with that GPU by the median of those that are
// known. `measured`: newest first. Offers of the local provider are held to what they state, so nothing is learned of
// them.
void predict_throughput(std::span<Offer> offers, const Workload& workload, const ThroughputProfile* profile,
                        std::span<const MeasuredRate> measured);

}  // namespace echoline::provisioner
