// Draws numbers from distributions. Does not use the mathematics library, whose last bits differ between machines.
#pragma once
#include <cstdint>
#include <vector>

#include "base/random.hpp"

namespace echoline::sim {

double portable_log(double x);  // for a positive, finite x
double portable_exp(double x);  // for -700 to 700

// A lognormal distribution, given by its median and 95th percentile. If they are equal, all draws are the median.
struct Lognormal {
  double median = 0;
  double p95 = 0;
  double sigma() const;  // standard deviation of the logarithm
  double mean() const;
};

// Values with their weights.
struct Histogram {
  std::vector<double> values;
  std::vector<double> cumulative_weights;  // the last is the sum of all weights
  void add(double value, double weight) {
    values.push_back(value);
    cumulative_weights.push_back((cumulative_weights.empty() ? 0 : cumulative_weights.back()) + weight);
  }
};

// Draws from one random stream of a seed.
class Draws {
 public:
  Draws(std::uint64_t seed, std::uint64_t stream) : random_(seed, stream) {}
  double uniform() { return random_.uniform(); }
  std::uint64_t below(std::uint64_t bound) { return random_.below(bound); }
  bool chance(double probability) { return probability > 0 && random_.uniform() < probability; }
  double exponential(double mean);
  double normal();
  // The logarithm is limited to three standard deviations from its mean.
  double lognormal(const Lognormal& distribution);
  double sample(const Histogram& histogram);

 private:
  Random random_;
};

}  // namespace echoline::sim
