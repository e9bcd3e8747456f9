// The body of a set of training kernels; included after kernels.inl, whose registers and functions it uses.
#include <limits>
#include <vector>

#include "model/training_kernels.hpp"

namespace echoline::model {
namespace {

// Keys and, approximately, queries per block of scores.
constexpr std::int64_t kKeys = 64, kQueries = 64;
// Registers of a product's tile; with its operands no more than the processor has.
constexpr int kTileRows = 6, kTileVectors = kLanes == 16 ? 4 : 2;

constexpr std::int64_t whole_registers(std::int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// A matrix whose element (i, j) is at data[i * rows + j * columns].
struct Operand {
  const float* data;
  std::int64_t rows, columns;
};

// c (+)= a b, of M rows and V registers of columns.
template <int M, int V>
inline void product_tile(Operand a, const float* b, std::int64_t b_stride, std::int64_t depth, float* c,
                         std::int64_t c_stride, bool add) {
  Floats sums[M][V] = {};
  if (add)
    for (int i = 0; i < M; ++i)
      for (int v = 0; v < V; ++v) sums[i][v] = load<Floats>(c + i * c_stride + v * kLanes);
  for (std::int64_t j = 0; j < depth; ++j) {
    Floats right[V];
    for (int v = 0; v < V; ++v) right[v] = load<Floats>(b + j * b_stride + v * kLanes);
    for (int i = 0; i < M; ++i) {
      const float left = a.data[i * a.rows + j * a.columns];
      for (int v = 0; v < V; ++v) sums[i][v] += right[v] * left;
    }
  }
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < V; ++v) std::memcpy(c + i * c_stride + v * kLanes, &sums[i][v], sizeof(Floats));
}

template <int V>
inline void product_rows(Operand a, std::int64_t rows, const float* b, std::int64_t b_stride, std::int64_t depth,
                         float* c, std::int64_t c_stride, bool add) {
  const auto next = [&](std::int64_t count) { a.data += count * a.rows, c += count * c_stride, rows -= count; };
  for (; rows >= kTileRows; next(kTileRows)) product_tile<kTileRows, V>(a, b, b_stride, depth, c, c_stride, add);
  if (rows >= 4) product_tile<4, V>(a, b, b_stride, depth, c, c_stride, add), next(4);
  if (rows >= 2) product_tile<2, V>(a, b, b_stride, depth, c, c_stride, add), next(2);
  if (rows >= 1) product_tile<1, V>(a, b, b_stride, depth, c, c_stride, add);
}

// c (+)= a b: [rows, depth] times [depth, columns]; `columns` is a multiple of kLanes.
inline void multiply(Operand a, std::int64_t rows, const float* b, std::int64_t b_stride, std::int64_t depth,
                     std::int64_t columns, float* c, std::int64_t c_stride, bool add) {
  std::int64_t n = 0;
  for (; n + kTileVectors * kLanes <= columns; n += kTileVectors * kLanes)
    product_rows<kTileVectors>(a, rows, b + n, b_stride, depth, c + n, c_stride, add);
  for (; n < columns; n += kLanes) product_rows<1>(a, rows, b + n, b_stride, depth, c + n, c_stride, add);
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// The largest of `count` numbers, ignoring NaN.
inline float largest(const float* x, std::int64_t count) {
  Floats lanes = Floats{} - std::numeric_limits<float>::infinity();
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes = larger(load<Floats>(x + i), lanes);
  float top = -std::numeric_limits<float>::infinity();
  for (int j = 0; j < kLanes; ++j) top = lanes[j] > top ? lanes[j] : top;
  for (; i < count; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

inline float sum_of(const float* x, std::int64_t count) {
  Floats lanes = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes += load<Floats>(x + i);
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  for (; i < count; ++i) sum += x[i];
  return sum;
}

inline float dot(const float* x, const float* y, std::int64_t count) {
  Floats lanes = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) lanes += load<Floats>(x + i) * load<Floats>(y + i);
  float sum = 0;
  for (int j = 0; j < kLanes; ++j) sum += lanes[j];
  for (; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

// Scratch memory of one thread's attention, kept between calls.
inline float* scratch(int which, std::int64_t count) {
  static thread_local std::vector<float> kept[10];
  std::vector<float>& v = kept[which];
  if (std::ssize(v) < count) v.assign(static_cast<std::size_t>(count), 0.0f);
  return v.data();
}

// Copies `tokens` rows of `dim` floats to rows of `width`, padded with zeros, and adds zero rows up to `tokens_to`.
inline void copy_rows(const float* from, std::int64_t stride, std::int64_t tokens, std::int64_t dim, std::int64_t width,
                      std::int64_t tokens_to, float* to) {
  for (std::int64_t t = 0; t < tokens; ++t, from += stride, to += width) {
    std::memcpy(to, from, static_cast<std::size_t>(dim) * sizeof(float));
    std::fill(to + dim, to + width, 0.0f);
  }
  std::fill(to, to + (tokens_to - tokens) * width, 0.0f);
}

// Copies `tokens` <= kKeys rows of `dim` floats to the columns of [dim, kKeys], padded with zeros.
inline void transpose_rows(const float* from, std::int64_t stride, std::int64_t tokens, std::int64_t dim, float* to) {
  for (std::int64_t d = 0; d < dim; ++d) {
    for (std::int64_t t = 0; t < tokens; ++t) to[d * kKeys + t] = from[t * stride + d];
    std::fill(to + d * kKeys + tokens, to + (d + 1) * kKeys, 0.0f);
  }
}

// Queries of consecutive tokens are multiplied with a block of keys together: token after token, with all their heads.
inline std::int64_t tokens_at_a_time(std::int64_t group) { return std::max<std::int64_t>(1, kQueries / group); }

void attend_segments(const AttentionHead& head, const Segment* segments, std::int64_t count, float* out,
                     std::int64_t out_stride, float* sums, std::int64_t sums_stride) {
  const std::int64_t group = head.group, dim = head.dim, width = whole_registers(dim);
  const std::int64_t step = tokens_at_a_time(group), rows_max = step * group;
  const auto blocks_of = [](const Segment& s) { return (s.count + kKeys - 1) / kKeys; };
  std::int64_t most = 0;  // most key blocks of a segment other than the first
  for (std::int64_t s = 1; s < count; ++s) most = std::max(most, blocks_of(segments[s]));
  const std::int64_t shared = blocks_of(segments[0]);
  float* const keys = scratch(0, (shared + most) * dim * kKeys);
  float* const values = scratch(1, (shared + most) * kKeys * width);
  float* const queries = scratch(2, rows_max * dim);
  float* const scores = scratch(3, rows_max * kKeys);
  float* const mixed = scratch(4, rows_max * width);
  float* const top = scratch(5, rows_max);
  float* const sum = scratch(6, rows_max);
  const auto gather = [&](const Segment& s, std::int64_t at) {
    for (std::int64_t b = 0; b < blocks_of(s); ++b) {
      const std::int64_t first = s.begin + b * kKeys, tokens = std::min(kKeys, s.count - b * kKeys);
      transpose_rows(head.k + first * head.stride, head.stride, tokens, dim, keys + (at + b) * dim * kKeys);
      copy_rows(head.v + first * head.stride, head.stride, tokens, dim, width, kKeys,
                values + (at + b) * kKeys * width);
    }
  };
  for (std::int64_t s = 0; s < count; ++s) {
    const Segment& own = segments[s];
    const std::int64_t before = s > 0 ? shared : 0;  // blocks of the prefix
    gather(own, before);
    for (std::int64_t t0 = 0; t0 < own.count; t0 += step) {
      const std::int64_t tokens = std::min(step, own.count - t0), rows = tokens * group;
      for (std::int64_t t = 0; t < tokens; ++t)
        std::memcpy(queries + t * group * dim, head.q + (own.begin + t0 + t) * head.stride,
                    static_cast<std::size_t>(group * dim) * sizeof(float));
      std::fill(mixed, mixed + rows * width, 0.0f);
      std::fill(top, top + rows, -std::numeric_limits<float>::infinity());
      std::fill(sum, sum + rows, 0.0f);
      const std::int64_t blocks = before + (t0 + tokens + kKeys - 1) / kKeys;
      for (std::int64_t b = 0; b < blocks; ++b) {
        const bool causal = b >= before;
        const std::int64_t first = (causal ? b - before : b) * kKeys;
        const std::int64_t there = std::min(kKeys, (causal ? t0 + tokens : segments[0].count) - first);
        const std::int64_t columns = whole_registers(there);
        multiply({queries, dim, 1}, rows, keys + b * dim * kKeys, kKeys, dim, columns, scores, kKeys, false);
        for (std::int64_t row = 0; row < rows; ++row) {
          float* const p = scores + row * kKeys;
          const std::int64_t seen = causal ? std::min(there, t0 + row / group + 1 - first) : there;
          if (seen <= 0) {
            std::fill(p, p + columns, 0.0f);
            continue;
          }
          const float above = std::max(top[row], largest(p, seen));
          const float shrink = top[row] == above ? 1.0f : exponential(top[row] - above);
          for (std::int64_t i = 0; i < seen; ++i) p[i] = exponential(p[i] - above);
          std::fill(p + seen, p + columns, 0.0f);
          top[row] = above;
          sum[row] = sum[row] * shrink + sum_of(p, seen);
          if (shrink != 1.0f)
            for (std::int64_t d = 0; d < width; ++d) mixed[row * width + d] *= shrink;
        }
        multiply({scores, kKeys, 1}, rows, values + b * kKeys * width, width, there, width, mixed, width, true);
      }
      for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t token = own.begin + t0 + row / group, h = row % group;
        const float scale = 1 / sum[row];
        float* const to = out + token * out_stride + h * dim;
        for (std::int64_t d = 0; d < dim; ++d) to[d] = mixed[row * width + d] * scale;
        sums[token * sums_stride + h] = top[row] + std::log(sum[row]);
      }
    }
  }
}

void attend_segments_backward(const AttentionHead& head, const Segment* segments, std::int64_t count, const float* out,
                              const float* out_gradient, std::int64_t out_stride, const float* sums,
                              std::int64_t sums_stride, float* dq, float* dk, float* dv) {
  const std::int64_t group = head.group, dim = head.dim, width = whole_registers(dim);
  const std::int64_t step = tokens_at_a_time(group), rows_max = step * group;
  float* const queries = scratch(0, rows_max * width);
  float* const gradients = scratch(1, rows_max * width);
  float* const query_gradients = scratch(2, rows_max * width);
  float* const keys = scratch(3, kKeys * (width + 2 * dim));
  float* const keys_across = keys + kKeys * width;
  float* const values_across = keys_across + kKeys * dim;
  float* const key_gradients = scratch(4, 2 * kKeys * width);
  float* const value_gradients = key_gradients + kKeys * width;
  float* const scores = scratch(5, 2 * rows_max * kKeys);
  float* const slopes = scores + rows_max * kKeys;
  const auto each_token = [&](const Segment& s, std::int64_t t0, std::int64_t tokens, auto&& one) {
    for (std::int64_t t = 0; t < tokens; ++t) one(s.begin + t0 + t, t * group);
  };
  for (std::int64_t s = 0; s < count; ++s)
    each_token(segments[s], 0, segments[s].count,
               [&](std::int64_t token, std::int64_t) { std::fill_n(dq + token * head.stride, group * dim, 0.0f); });
  for (std::int64_t of = 0; of < count; ++of) {
    const Segment& owner = segments[of];
    for (std::int64_t first = 0; first < owner.count; first += kKeys) {
      const std::int64_t there = std::min(kKeys, owner.count - first), columns = whole_registers(there);
      const float* const k = head.k + (owner.begin + first) * head.stride;
      copy_rows(k, head.stride, there, dim, width, kKeys, keys);
      transpose_rows(k, head.stride, there, dim, keys_across);
      transpose_rows(head.v + (owner.begin + first) * head.stride, head.stride, there, dim, values_across);
      std::fill_n(key_gradients, 2 * kKeys * width, 0.0f);
      const std::int64_t last = of == 0 ? count : of + 1;  // segments that attend to these keys
      for (std::int64_t s = of; s < last; ++s) {
        const bool causal = s == of;
        for (std::int64_t t0 = causal ? first : 0; t0 < segments[s].count; t0 += step) {
          const std::int64_t tokens = std::min(step, segments[s].count - t0), rows = tokens * group;
          each_token(segments[s], t0, tokens, [&](std::int64_t token, std::int64_t row) {
            copy_rows(head.q + token * head.stride, dim, group, dim, width, group, queries + row * width);
            copy_rows(out_gradient + token * out_stride, dim, group, dim, width, group, gradients + row * width);
            copy_rows(dq + token * head.stride, dim, group, dim, width, group, query_gradients + row * width);
          });
          multiply({queries, width, 1}, rows, keys_across, kKeys, dim, columns, scores, kKeys, false);
          multiply({gradients, width, 1}, rows, values_across, kKeys, dim, columns, slopes, kKeys, false);
          each_token(segments[s], t0, tokens, [&](std::int64_t token, std::int64_t row) {
            const std::int64_t seen = causal ? std::min(there, token - owner.begin + 1 - first) : there;
            for (std::int64_t h = 0; h < group; ++h) {
              float *const p = scores + (row + h) * kKeys, *const d = slopes + (row + h) * kKeys;
              const float log_sum = sums[token * sums_stride + h];
              const float total = dot(out + token * out_stride + h * dim, gradients + (row + h) * width, dim);
              for (std::int64_t i = 0; i < seen; ++i) p[i] = exponential(p[i] - log_sum);
              for (std::int64_t i = 0; i < seen; ++i) d[i] = p[i] * (d[i] - total);
              std::fill(p + seen, p + columns, 0.0f);
              std::fill(d + seen, d + columns, 0.0f);
            }
          });
          multiply({scores, 1, kKeys}, there, gradients, width, rows, width, value_gradients, width, true);
          multiply({slopes, 1, kKeys}, there, queries, width, rows, width, key_gradients, width, true);
          multiply({slopes, kKeys, 1}, rows, keys, width, there, width, query_gradients, width, true);
          each_token(segments[s], t0, tokens, [&](std::int64_t token, std::int64_t row) {
            for (std::int64_t h = 0; h < group; ++h)
              std::copy_n(query_gradients + (row + h) * width, dim, dq + token * head.stride + h * dim);
          });
        }
      }
      for (std::int64_t t = 0; t < there; ++t) {
        const std::int64_t to = (owner.begin + first + t) * head.stride;
        std::copy_n(key_gradients + t * width, dim, dk + to);
        std::copy_n(value_gradients + t * width, dim, dv + to);
      }
    }
  }
}

void rms_norm_backward(const float* x, const float* weight, const float* dy, std::int64_t count, float eps, float* dx,
                       float* dw) {
  Floats lanes = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    lanes += load<Floats>(x + i) * load<Floats>(weight + i) * load<Floats>(dy + i);
  float along = 0;
  for (int j = 0; j < kLanes; ++j) along += lanes[j];
  for (; i < count; ++i) along += x[i] * weight[i] * dy[i];
  const float scale = 1 / std::sqrt(sum_of_squares(x, count) / static_cast<float>(count) + eps);
  const float pull = along * scale * scale * scale / static_cast<float>(count);
  for (std::int64_t j = 0; j < count; ++j) dw[j] += dy[j] * x[j] * scale;
  for (std::int64_t j = 0; j < count; ++j) dx[j] = dy[j] * weight[j] * scale - x[j] * pull;
}

void rotate_backward(const float* x, const float* weight, std::int64_t dim, float eps, const float* cos,
                     const float* sin, float* dy, float* dw) {
  const std::int64_t half = dim / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const float a = dy[i], b = dy[i + half];
    dy[i] = a * cos[i] + b * sin[i + half];
    dy[i + half] = a * sin[i] + b * cos[i + half];
  }
  if (weight != nullptr) rms_norm_backward(x, weight, dy, dim, eps, dy, dw);
}

void gate_forward(const float* gate, const float* up, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
}

void gate_backward(const float* gate, const float* up, const float* dy, std::int64_t count, float* d_gate,
                   float* d_up) {
  for (std::int64_t i = 0; i < count; ++i) {
    const float share = 1 / (1 + exponential(-gate[i])), silu = gate[i] * share;
    d_gate[i] = dy[i] * up[i] * (share + silu * (1 - share));
    d_up[i] = dy[i] * silu;
  }
}

void score(const float* logits, std::int64_t count, float scale, std::int64_t target, float* logprob, float* entropy,
           float* log_sum) {
  const float top = largest(logits, count);
  double sum = 0, along = 0;  // of parts, because an fp32 sum over a vocabulary loses digits
  for (std::int64_t first = 0; first < count; first += 1024) {
    const std::int64_t end = std::min<std::int64_t>(count, first + 1024);
    Floats sums = {}, products = {};
    std::int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      float p[kLanes];
      for (int j = 0; j < kLanes; ++j) p[j] = exponential((logits[i + j] - top) * scale);
      const Floats e = load<Floats>(p);
      sums += e, products += e * (load<Floats>(logits + i) - top);
    }
    for (int j = 0; j < kLanes; ++j) sum += static_cast<double>(sums[j]), along += static_cast<double>(products[j]);
    for (; i < end; ++i) {
      const float e = exponential((logits[i] - top) * scale);
      sum += static_cast<double>(e), along += static_cast<double>(e * (logits[i] - top));
    }
  }
  const auto log_of = static_cast<float>(std::log(sum));
  *logprob = (logits[target] - top) * scale - log_of;
  *entropy = log_of - static_cast<float>(along / sum) * scale;
  *log_sum = top * scale + log_of;
}

void score_backward(float* logits, std::int64_t count, float scale, std::int64_t target, float log_sum,
                    float gradient) {
  const float pull = -gradient * scale;
  for (std::int64_t i = 0; i < count; ++i) logits[i] = pull * exponential(logits[i] * scale - log_sum);
  logits[target] -= pull;
}

}  // namespace
}  // namespace echoline::model

#define ECHOLINE_TRAINING_KERNELS(name)                                                                               \
  {                                                                                                                   \
    name, attend_segments, attend_segments_backward, rms_norm_backward, rotate_backward, gate_forward, gate_backward, \
        score, score_backward                                                                                         \
  }
