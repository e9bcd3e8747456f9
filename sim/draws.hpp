// Numbers drawn from distributions. Nothing here calls the mathematics library, whose last bits differ from machine to
// machine.
#pragma once
#include <cstdint>
#include <vector>

#include "base/random.hpp"

namespace echoline::sim {

double exact_log(double x);  // of a positive, finite x
double exact_exp(double x);  // of -700 to 700

// Most of the time near `median`, at most `p95` 95 times of 100; p95 = median: always that.
struct Lognormal {
  double median = 0;
  double p95 = 0;
  double sigma() const;
  double mean() const;
};

// A value for each bin, and how often it comes.
struct Histogram {
  std::vector<double> values;
  std::vector<double> until;  // cumulative weights; the last one is the sum of all
  void add(double value, double weight) {
    values.push_back(value);
    until.push_back((until.empty() ? 0 : until.back()) + weight);
  }
};

class Draws {
 public:
  Draws(std::uint64_t seed, std::uint64_t stream) : random_(seed, stream) {}
  double uniform() { return random_.uniform(); }
  std::uint64_t below(std::uint64_t bound) { return random_.below(bound); }
  bool chance(double p) { return p > 0 && random_.uniform() < p; }
  double exponential(double mean);
  double normal();
  // Within three standard deviations.
  double lognormal(const Lognormal& of);
  double of(const Histogram& histogram);

 private:
  Random random_;
};

}  // namespace echoline::sim
