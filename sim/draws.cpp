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

// The functions below compute series from + - * /, frexp, ldexp, floor and sqrt only, which give the same bits on all
// machines.

// x = m * 2^exponent, where m is `mantissa`. log(m) = 2 * (s + s^3/3 + s^5/5 + ...) with s = (m - 1) / (m + 1).
double portable_log(double x) {
  ECHO_CHECK(x > 0 && std::isfinite(x), "the logarithm of {}", x);
  int exponent = 0;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < kSqrtHalf) mantissa *= 2, --exponent;
  const double s = (mantissa - 1) / (mantissa + 1), s_squared = s * s;
  double sum = 0;  // |s| <= 0.1716: 14 terms give a double's full precision
  for (int k = 13; k >= 0; --k) sum = sum * s_squared + 1.0 / (2 * k + 1);
  return exponent * kLn2 + 2 * s * sum;
}

// x = exponent * log(2) + reduced, and e^reduced is its Taylor series.
double portable_exp(double x) {
  ECHO_CHECK(x >= -700 && x <= 700, "e to the {}", x);
  const double exponent = std::floor(x / kLn2 + 0.5), reduced = x - exponent * kLn2;
  double sum = 1;  // |reduced| <= 0.35: 16 terms give a double's full precision
  for (int k = 16; k >= 1; --k) sum = 1 + sum * reduced / k;
  return std::ldexp(sum, static_cast<int>(exponent));
}

double Lognormal::sigma() const { return p95 > median && median > 0 ? portable_log(p95 / median) / kZ95 : 0; }

double Lognormal::mean() const {
  const double s = sigma();
  return s > 0 ? median * portable_exp(s * s / 2) : median;
}

// uniform() is below 1, so the logarithm's argument is positive.
double Draws::exponential(double mean) { return -mean * portable_log(1 - random_.uniform()); }

double Draws::normal() {
  for (;;) {  // Marsaglia's polar method
    const double u = 2 * random_.uniform() - 1, v = 2 * random_.uniform() - 1, s = u * u + v * v;
    if (s > 0 && s < 1) return u * std::sqrt(-2 * portable_log(s) / s);
  }
}

double Draws::lognormal(const Lognormal& distribution) {
  const double sigma = distribution.sigma();
  if (sigma == 0) return distribution.median;
  constexpr double kSigmasMax = 3;  // so that no draw is an extreme
  return distribution.median * portable_exp(sigma * std::clamp(normal(), -kSigmasMax, kSigmasMax));
}

double Draws::sample(const Histogram& histogram) {
  ECHO_CHECK(!histogram.values.empty());
  const std::vector<double>& weights = histogram.cumulative_weights;
  const double weight = random_.uniform() * weights.back();
  const auto index =
      static_cast<std::size_t>(std::upper_bound(weights.begin(), weights.end(), weight) - weights.begin());
  return histogram.values[std::min(index, histogram.values.size() - 1)];  // rounding may make `weight` equal to the sum
}

}  // namespace echoline::sim
