// Random numbers that are equal on all machines, for simulated runs.
#include "sim/draws.hpp"

#include <algorithm>
#include <cmath>

#include "base/result.hpp"

namespace echoline::sim {
namespace {

constexpr double kLn2 = 0.693147180559945309417232121458;
constexpr double kSqrtHalf = 0.707106781186547524400844362105;
constexpr double kZ95 = 1.6448536269514722;  // the standard normal's 95th percentile

}  // namespace

// frexp, ldexp, floor and sqrt are exact or correctly rounded on all machines.
double exact_log(double x) {
  ECHO_CHECK(x > 0 && std::isfinite(x), "the logarithm of {}", x);
  int exponent = 0;
  double m = std::frexp(x, &exponent);
  if (m < kSqrtHalf) m *= 2, --exponent;
  const double s = (m - 1) / (m + 1), s2 = s * s;  // |s| <= 0.1716: 14 terms exceed a double's precision
  double sum = 0;
  for (int k = 13; k >= 0; --k) sum = sum * s2 + 1.0 / (2 * k + 1);
  return exponent * kLn2 + 2 * s * sum;
}

double exact_exp(double x) {
  ECHO_CHECK(x >= -700 && x <= 700, "e to the {}", x);
  const double n = std::floor(x / kLn2 + 0.5), r = x - n * kLn2;  // |r| <= 0.35
  double sum = 1;
  for (int k = 16; k >= 1; --k) sum = 1 + sum * r / k;
  return std::ldexp(sum, static_cast<int>(n));
}

double Lognormal::sigma() const { return p95 > median && median > 0 ? exact_log(p95 / median) / kZ95 : 0; }

double Lognormal::mean() const {
  const double s = sigma();
  return s > 0 ? median * exact_exp(s * s / 2) : median;
}

double Draws::exponential(double mean) { return -mean * exact_log(1 - random_.uniform()); }

double Draws::normal() {
  for (;;) {  // Marsaglia's polar method
    const double u = 2 * random_.uniform() - 1, v = 2 * random_.uniform() - 1, s = u * u + v * v;
    if (s > 0 && s < 1) return u * std::sqrt(-2 * exact_log(s) / s);
  }
}

double Draws::lognormal(const Lognormal& of) {
  const double sigma = of.sigma();
  if (sigma == 0) return of.median;
  return of.median * exact_exp(sigma * std::clamp(normal(), -3.0, 3.0));
}

double Draws::sample(const Histogram& histogram) {
  ECHO_CHECK(!histogram.values.empty());
  const double at = random_.uniform() * histogram.cumulative_weights.back();
  const auto it = std::upper_bound(histogram.cumulative_weights.begin(), histogram.cumulative_weights.end(), at);
  return histogram.values[std::min<std::size_t>(static_cast<std::size_t>(it - histogram.cumulative_weights.begin()),
                                                histogram.values.size() - 1)];
}

}  // namespace echoline::sim
