// The functions of a set of kernels. The including file defines kLanes, the number of floats per register: 4, 8 or 16.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "model/kernels.hpp"

namespace echoline::model {
namespace {

using Floats = float __attribute__((vector_size(kLanes * 4)));
using Words = std::uint32_t __attribute__((vector_size(kLanes * 4)));

template <class Vector, class T>
inline Vector load(const T* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// The sums of neighbouring lanes: those of a, then those of b.
template <std::size_t... I>
inline Floats pair_sums(Floats a, Floats b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (2 * I)...) + __builtin_shufflevector(a, b, (2 * I + 1)...);
}
// Lane i of the result is the sum of sums[i]'s lanes. `Count` is a power of two.
template <int Count>
inline Floats lane_sums(Floats (&sums)[Count]) {
  constexpr auto kLaneIndices = std::make_index_sequence<kLanes>();
  for (int count = Count; count > 1; count /= 2)
    for (int i = 0; i < count / 2; ++i) sums[i] = pair_sums(sums[2 * i], sums[2 * i + 1], kLaneIndices);
  for (int lanes = kLanes / Count; lanes > 1; lanes /= 2) sums[0] = pair_sums(sums[0], sums[0], kLaneIndices);
  return sums[0];
}

// Multiplies R rows of x by C rows of weights w into y; R * C is at most the number of lanes. bf16 weights need x from
// interleave(). Each weight is read once for all R rows. Prefetches A rows of weights at `ahead`.
template <int R, int C, int A, class Weight>
inline void multiply_tile(const float* x, std::int64_t in, const Weight* w, const Weight* ahead, float* y,
                          std::int64_t y_stride, bool add) {
  Floats sums[R * C] = {};
  std::int64_t k = 0;  // index of the input
  constexpr int kStep = sizeof(Weight) == 2 ? 2 * kLanes : kLanes;
  for (; k + kStep <= in; k += kStep) {
    for (int a = 0; a < A; ++a) __builtin_prefetch(ahead + a * in + k, /*for writing*/ 0, /*cache locality*/ 2);
    if constexpr (sizeof(Weight) == 2) {
      Floats even[C], odd[C];
      for (int column = 0; column < C; ++column) {
        const Words bf16_pairs = load<Words>(w + column * in + k);
        even[column] = reinterpret_cast<Floats>(bf16_pairs << 16);
        odd[column] = reinterpret_cast<Floats>(bf16_pairs & 0xffff0000u);
      }
      for (int row = 0; row < R; ++row) {
        const Floats a = load<Floats>(x + row * in + k), b = load<Floats>(x + row * in + k + kLanes);
        for (int column = 0; column < C; ++column) sums[row * C + column] += a * even[column];
        for (int column = 0; column < C; ++column) sums[row * C + column] += b * odd[column];
      }
    } else {
      Floats weights[C];
      for (int column = 0; column < C; ++column) weights[column] = load<Floats>(w + column * in + k);
      for (int row = 0; row < R; ++row) {
        const Floats a = load<Floats>(x + row * in + k);
        for (int column = 0; column < C; ++column) sums[row * C + column] += a * weights[column];
      }
    }
  }
  float out[kLanes];
  const Floats dot_products = lane_sums(sums);
  std::memcpy(out, &dot_products, sizeof out);
  for (int row = 0; row < R; ++row) {
    for (int column = 0; column < C; ++column) {
      float sum = out[row * C + column];
      for (std::int64_t i = k; i < in; ++i) {
        float weight;
        if constexpr (sizeof(Weight) == 2) {
          weight = std::bit_cast<float>(std::uint32_t{w[column * in + i]} << 16);
        } else {
          weight = w[column * in + i];
        }
        sum += x[row * in + i] * weight;
      }
      float& result = y[row * y_stride + column];
      result = add ? result + sum : sum;
    }
  }
}

constexpr int kColumns = 4;  // rows of weights, which are columns of y, per tile

// Multiplies all rows of x by C rows of weights. The tiles together prefetch the next C rows of weights.
template <int C, class Weight>
inline void multiply_columns(const float* x, std::int64_t rows, std::int64_t in, const Weight* w, float* y,
                             std::int64_t y_stride, bool add) {
  constexpr int kRows = kLanes / kColumns;  // the most that multiply_tile() permits
  std::int64_t row = 0;
  const Weight* ahead = w + C * in;  // a prefetch beyond the end does nothing
  if (rows < 4 * kRows) {  // few tiles: the first prefetches all C next rows of weights; otherwise each of C tiles one
    if (rows >= kRows) {
      multiply_tile<kRows, C, C>(x, in, w, ahead, y, y_stride, add);
      row = kRows;
    }
  } else {
    for (; row < C * kRows; row += kRows, ahead += in)
      multiply_tile<kRows, C, 1>(x + row * in, in, w, ahead, y + row * y_stride, y_stride, add);
  }
  for (; row + kRows <= rows; row += kRows)
    multiply_tile<kRows, C, 0>(x + row * in, in, w, w, y + row * y_stride, y_stride, add);
  if constexpr (kRows > 2)
    for (; row + 2 <= rows; row += 2)
      multiply_tile<2, C, C>(x + row * in, in, w, w + C * in, y + row * y_stride, y_stride, add);
  if constexpr (kRows > 1)
    for (; row < rows; ++row)
      multiply_tile<1, C, C>(x + row * in, in, w, w + C * in, y + row * y_stride, y_stride, add);
}

template <class Weight>
void product(const float* x, std::int64_t rows, std::int64_t in, const Weight* w, std::int64_t begin, std::int64_t end,
             float* y, std::int64_t y_stride, bool add) {
  std::int64_t output = begin;
  for (; output + kColumns <= end; output += kColumns)
    multiply_columns<kColumns>(x, rows, in, w + output * in, y + output, y_stride, add);
  for (; output < end; ++output) multiply_columns<1>(x, rows, in, w + output * in, y + output, y_stride, add);
}

// Reorders x for products with bf16 weights: of every two registers, first the even elements, then the odd ones. A
// register of pairs of bf16 weights is split into even and odd weights in the same way, without a shuffle. Has the
// parameters of Kernels::pack; the number of rows is not needed.
void interleave(const float* x, std::int64_t, std::int64_t in, std::int64_t begin, std::int64_t end, float* out) {
  x += begin * in, out += begin * in;
  for (std::int64_t row = begin; row < end; ++row, x += in, out += in) {
    std::int64_t k = 0;
    for (; k + 2 * kLanes <= in; k += 2 * kLanes) {
      for (int i = 0; i < kLanes; ++i) {
        out[k + i] = x[k + 2 * i];
        out[k + kLanes + i] = x[k + 2 * i + 1];
      }
    }
    for (; k < in; ++k) out[k] = x[k];
  }
}

std::int64_t interleaved_floats(std::int64_t rows, std::int64_t in) { return rows * in; }

inline float sum_of_squares(const float* x, std::int64_t count) {
  Floats lanes = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    lanes += v * v;
  }
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  for (; i < count; ++i) sum += x[i] * x[i];
  return sum;
}

void rms_norm(const float* x, const float* weight, std::int64_t count, float eps, float* out) {
  const float scale = 1 / std::sqrt(sum_of_squares(x, count) / static_cast<float>(count) + eps);
  for (std::int64_t i = 0; i < count; ++i) out[i] = x[i] * scale * weight[i];
}

void rotate(float* x, const float* weight, std::int64_t dim, float eps, const float* cos, const float* sin) {
  const std::int64_t half = dim / 2;
  if (weight != nullptr) {
    const float scale = 1 / std::sqrt(sum_of_squares(x, dim) / static_cast<float>(dim) + eps);
    for (std::int64_t i = 0; i < dim; ++i) x[i] = x[i] * scale * weight[i];
  }
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos[i] + b * sin[i];
    x[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// e^x to the last one or two bits: 2^n e^r with whole n, and a polynomial for e^r on [-ln 2 / 2, ln 2 / 2]. The
// coefficients are those of the Cephes library.
inline float exponential(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);                       // so that 2^n is a normal fp32 number
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // x / ln 2; adding 1.5 * 2^23 rounds to whole numbers
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;    // x - n ln 2, with ln 2 in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1;
  return p * std::bit_cast<float>((static_cast<std::int32_t>(n) + 127) << 23);
}

void gate(float* gate, const float* up, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) gate[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
}

// GELU by tanh is x sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3).
constexpr float kGeluScale = 2 * 0.797884560802865f, kGeluCubic = 0.044715f;
inline float gelu_sigmoid(float x) { return 1 / (1 + exponential(-kGeluScale * (x + kGeluCubic * x * x * x))); }

void gelu_gate(float* gate, const float* up, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) gate[i] = gate[i] * gelu_sigmoid(gate[i]) * up[i];
}

double sum(const float* x, std::int64_t count) {
  using HalfFloats = float __attribute__((vector_size(kLanes * 2)));
  using Doubles = double __attribute__((vector_size(kLanes * 4)));
  Doubles lanes[4] = {};  // several sums, because each addition waits for the one before it
  std::int64_t i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes)
    for (int j = 0; j < 4; ++j) lanes[j] += __builtin_convertvector(load<HalfFloats>(x + i + j * kLanes / 2), Doubles);
  const Doubles total = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  double sum = 0;
  for (int j = 0; j < kLanes / 2; ++j) sum += total[j];
  for (; i < count; ++i) sum += static_cast<double>(x[i]);
  return sum;
}

void log_softmax(const float* x, std::int64_t count, float* out) {
  Floats lane_max;
  for (int j = 0; j < kLanes; ++j) lane_max[j] = x[0];
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    lane_max = v > lane_max ? v : lane_max;
  }
  float max_value = lane_max[0];
  for (int j = 1; j < kLanes; ++j) max_value = lane_max[j] > max_value ? lane_max[j] : max_value;
  for (; i < count; ++i) max_value = x[i] > max_value ? x[i] : max_value;
  constexpr std::int64_t kBlock = 512;  // values whose powers are kept at a time, in the first-level cache
  float powers[kBlock];
  double total = 0;
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t block_values = std::min(kBlock, count - begin);
    for (std::int64_t k = 0; k < block_values; ++k) powers[k] = exponential(x[begin + k] - max_value);
    total += sum(powers, block_values);
  }
  const auto log_total = static_cast<float>(std::log(total));
  for (std::int64_t k = 0; k < count; ++k) out[k] = (x[k] - max_value) - log_total;
}

constexpr int kPageTokens = 16, kParts = kPageTokens / kLanes;  // kParts registers hold the scores of a page

// Attention of H heads, so that each key is read once for all of them. `scratch` holds the scores. The first `hidden`
// tokens, fewer than a page has, get no weight.
template <int H>
void attend_heads(const float* q, std::int64_t dim, std::int64_t hidden, std::int64_t token_count,
                  const std::int64_t* pages, const float* keys, const float* values, std::int64_t stride,
                  float* scratch, float* out) {
  const std::int64_t padded_count = (token_count + kPageTokens - 1) / kPageTokens * kPageTokens;
  for (std::int64_t first = 0; first < token_count; first += kPageTokens) {
    const float* const key = keys + pages[first / kPageTokens] * stride;
    Floats scores[H][kParts] = {};
    for (std::int64_t d = 0; d < dim; ++d)
      for (int part = 0; part < kParts; ++part) {
        const Floats k = load<Floats>(key + d * kPageTokens + part * kLanes);
        for (int head = 0; head < H; ++head) scores[head][part] += k * q[head * dim + d];
      }
    for (int head = 0; head < H; ++head)
      std::memcpy(scratch + head * padded_count + first, scores[head], sizeof scores[head]);
  }
  float scale[H];
  for (int head = 0; head < H; ++head) {
    float* const head_scores = scratch + head * padded_count;
    float max_score = head_scores[hidden], sum = 0;
    for (std::int64_t token = hidden + 1; token < token_count; ++token)
      max_score = head_scores[token] > max_score ? head_scores[token] : max_score;
    for (std::int64_t token = hidden; token < token_count; ++token)
      head_scores[token] = exponential(head_scores[token] - max_score);
    std::fill_n(head_scores, hidden, 0.0f);
    for (std::int64_t token = hidden; token < token_count; ++token) sum += head_scores[token];
    scale[head] = 1 / sum;
    if (!(max_score - max_score == 0)) scale[head] = NAN;  // the maximum is NaN or infinite, so the output must be NaN
  }
  std::int64_t d = 0;
  // Computes the next N registers of every head's output, beginning with value d.
  const auto add_weighted_values = [&]<int N>(std::integral_constant<int, N>) {
    Floats mixed[H][N] = {};
    for (std::int64_t first = 0; first < token_count; first += kPageTokens) {
      const float* value = values + pages[first / kPageTokens] * stride + d;
      const std::int64_t end = std::min<std::int64_t>(first + kPageTokens, token_count);
      for (std::int64_t token = first; token < end; ++token, value += dim)
        for (int n = 0; n < N; ++n) {
          const Floats v = load<Floats>(value + n * kLanes);
          for (int head = 0; head < H; ++head) mixed[head][n] += v * scratch[head * padded_count + token];
        }
    }
    for (int head = 0; head < H; ++head)
      for (int n = 0; n < N; ++n) {
        mixed[head][n] *= scale[head];
        std::memcpy(out + head * dim + d + n * kLanes, &mixed[head][n], sizeof(Floats));
      }
    d += N * kLanes;
  };
  while (d + 4 * kLanes <= dim) add_weighted_values(std::integral_constant<int, 4>());
  while (d + kLanes <= dim) add_weighted_values(std::integral_constant<int, 1>());
  for (; d < dim; ++d)
    for (int head = 0; head < H; ++head) {
      float sum = 0;
      for (std::int64_t token = 0; token < token_count; ++token)
        sum += scratch[head * padded_count + token] *
               values[pages[token / kPageTokens] * stride + token % kPageTokens * dim + d];
      out[head * dim + d] = sum * scale[head];
    }
}

void attend(const float* q, std::int64_t heads, std::int64_t dim, std::int64_t first_token, std::int64_t token_count,
            const std::int64_t* pages, const float* keys, const float* values, std::int64_t stride, float* scratch,
            float* out) {
  const std::int64_t hidden = first_token % kPageTokens;
  pages += first_token / kPageTokens;
  token_count -= first_token - hidden;
  std::int64_t h = 0;
  for (; h + 4 <= heads; h += 4)
    attend_heads<4>(q + h * dim, dim, hidden, token_count, pages, keys, values, stride, scratch, out + h * dim);
  for (; h + 2 <= heads; h += 2)
    attend_heads<2>(q + h * dim, dim, hidden, token_count, pages, keys, values, stride, scratch, out + h * dim);
  for (; h < heads; ++h)
    attend_heads<1>(q + h * dim, dim, hidden, token_count, pages, keys, values, stride, scratch, out + h * dim);
}

}  // namespace
}  // namespace echoline::model

// The set of these kernels, with the given functions for products with bf16 weights.
#define ECHOLINE_MODEL_KERNELS(name, product_bf16, pack, packed_floats)                                           \
  {                                                                                                               \
    name, product<float>, product_bf16, pack, packed_floats, rms_norm, rotate, gate, gelu_gate, log_softmax, sum, \
        attend                                                                                                    \
  }
