// The body of a set of training kernels; included after kernels.inl, whose registers and functions it uses.
#include <limits>
#include <vector>

#include "model/training_kernels.hpp"

namespace echoline::model {
namespace {

// Attention computes scores in blocks of kKeys keys and about kQueries queries.
constexpr std::int64_t kKeys = 64, kQueries = 64;
// A product is computed in tiles of kTileRows rows and kTileVectors registers per row, which fit into the processor's
// registers together with their operands.
constexpr int kTileRows = 6, kTileVectors = kLanes == 16 ? 4 : 2;

// `count` floats rounded up to whole registers.
constexpr std::int64_t whole_registers(std::int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// A matrix whose element (i, j) is at data[i * row_stride + j * column_stride].
struct Operand {
  const float* data;
  std::int64_t row_stride, column_stride;
};

// One tile of the product c = a b or, with `add`, c += a b: M rows and V registers of columns. `depth` is the number of
// columns of a and of rows of b.
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
      const float left = a.data[i * a.row_stride + j * a.column_stride];
      for (int v = 0; v < V; ++v) sums[i][v] += right[v] * left;
    }
  }
  for (int i = 0; i < M; ++i)
    for (int v = 0; v < V; ++v) std::memcpy(c + i * c_stride + v * kLanes, &sums[i][v], sizeof(Floats));
}

// product_tile() for any number of rows.
template <int V>
inline void product_rows(Operand a, std::int64_t rows, const float* b, std::int64_t b_stride, std::int64_t depth,
                         float* c, std::int64_t c_stride, bool add) {
  const auto skip = [&](std::int64_t count) { a.data += count * a.row_stride, c += count * c_stride, rows -= count; };
  for (; rows >= kTileRows; skip(kTileRows)) product_tile<kTileRows, V>(a, b, b_stride, depth, c, c_stride, add);
  if (rows >= 4) product_tile<4, V>(a, b, b_stride, depth, c, c_stride, add), skip(4);
  if (rows >= 2) product_tile<2, V>(a, b, b_stride, depth, c, c_stride, add), skip(2);
  if (rows >= 1) product_tile<1, V>(a, b, b_stride, depth, c, c_stride, add);
}

// c = a b or, with `add`, c += a b, for a [rows, depth] and b [depth, columns]. `columns` is a multiple of kLanes.
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
  float max_value = -std::numeric_limits<float>::infinity();
  for (int j = 0; j < kLanes; ++j) max_value = lanes[j] > max_value ? lanes[j] : max_value;
  for (; i < count; ++i) max_value = x[i] > max_value ? x[i] : max_value;
  return max_value;
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

// Buffer `index` of the calling thread, with room for `count` floats. Its memory is kept between calls.
inline float* scratch(int index, std::int64_t count) {
  static thread_local std::vector<float> buffers[10];
  std::vector<float>& buffer = buffers[index];
  if (std::ssize(buffer) < count) buffer.assign(static_cast<std::size_t>(count), 0.0f);
  return buffer.data();
}

// Copies `tokens` rows of `dim` floats, `stride` floats apart, to rows of `width` floats padded with zeros. Appends
// zero rows, up to `tokens_to` rows.
inline void copy_rows(const float* source, std::int64_t stride, std::int64_t tokens, std::int64_t dim,
                      std::int64_t width, std::int64_t tokens_to, float* target) {
  for (std::int64_t token = 0; token < tokens; ++token, source += stride, target += width) {
    std::memcpy(target, source, static_cast<std::size_t>(dim) * sizeof(float));
    std::fill(target + dim, target + width, 0.0f);
  }
  std::fill(target, target + (tokens_to - tokens) * width, 0.0f);
}

// Copies `tokens` <= kKeys rows of `dim` floats, `stride` floats apart, to the columns of a matrix [dim, kKeys] padded
// with zeros.
inline void transpose_rows(const float* source, std::int64_t stride, std::int64_t tokens, std::int64_t dim,
                           float* target) {
  for (std::int64_t d = 0; d < dim; ++d) {
    for (std::int64_t token = 0; token < tokens; ++token) target[d * kKeys + token] = source[token * stride + d];
    std::fill(target + d * kKeys + tokens, target + (d + 1) * kKeys, 0.0f);
  }
}

// The number of tokens whose queries are multiplied with a block of keys together. Each token has `group` queries, one
// per head; row r of such a product is the query of head r % group of the token r / group.
inline std::int64_t tokens_at_a_time(std::int64_t group) { return std::max<std::int64_t>(1, kQueries / group); }

// The first key of a block that a query may see. `query` is its position, counted from the block's first key.
inline std::int64_t first_visible_key(const AttentionHead& head, std::int64_t query) {
  return head.window == 0 ? 0 : std::max<std::int64_t>(0, query - head.window + 1);
}

// See TrainingKernels::attend. The softmax goes over blocks of keys: for each row, max_scores, weight_sums and
// value_sums are the largest score, the sum of the weights and the weighted sum of values so far, with weights relative
// to the largest score. When a block has a larger score, these sums are scaled down first. The keys and values of the
// first segment, which may be a prefix, stay in their buffers for the other segments.
void attend_segments(const AttentionHead& head, const Segment* segments, std::int64_t count, float* out,
                     std::int64_t out_stride, float* sums, std::int64_t sums_stride) {
  const std::int64_t group = head.group, dim = head.dim, width = whole_registers(dim);
  const std::int64_t step = tokens_at_a_time(group), rows_max = step * group;
  const auto blocks_of = [](const Segment& segment) { return (segment.count + kKeys - 1) / kKeys; };
  std::int64_t own_blocks_max = 0;  // the most blocks of keys of a segment other than the first
  for (std::int64_t segment_index = 1; segment_index < count; ++segment_index)
    own_blocks_max = std::max(own_blocks_max, blocks_of(segments[segment_index]));
  const std::int64_t prefix_blocks = blocks_of(segments[0]);
  float* const keys = scratch(0, (prefix_blocks + own_blocks_max) * dim * kKeys);
  float* const values = scratch(1, (prefix_blocks + own_blocks_max) * kKeys * width);
  float* const queries = scratch(2, rows_max * dim);
  float* const scores = scratch(3, rows_max * kKeys);
  float* const value_sums = scratch(4, rows_max * width);
  float* const max_scores = scratch(5, rows_max);
  float* const weight_sums = scratch(6, rows_max);
  const auto copy_keys_values = [&](const Segment& segment, std::int64_t first_block) {
    for (std::int64_t block = 0; block < blocks_of(segment); ++block) {
      const std::int64_t first = segment.begin + block * kKeys, tokens = std::min(kKeys, segment.count - block * kKeys);
      transpose_rows(head.k + first * head.stride, head.stride, tokens, dim,
                     keys + (first_block + block) * dim * kKeys);
      copy_rows(head.v + first * head.stride, head.stride, tokens, dim, width, kKeys,
                values + (first_block + block) * kKeys * width);
    }
  };
  for (std::int64_t segment_index = 0; segment_index < count; ++segment_index) {
    const Segment& own = segments[segment_index];
    const std::int64_t blocks_before = segment_index > 0 ? prefix_blocks : 0;
    copy_keys_values(own, blocks_before);
    for (std::int64_t first_query = 0; first_query < own.count; first_query += step) {
      const std::int64_t tokens = std::min(step, own.count - first_query), rows = tokens * group;
      for (std::int64_t token = 0; token < tokens; ++token)
        std::memcpy(queries + token * group * dim, head.q + (own.begin + first_query + token) * head.stride,
                    static_cast<std::size_t>(group * dim) * sizeof(float));
      std::fill(value_sums, value_sums + rows * width, 0.0f);
      std::fill(max_scores, max_scores + rows, -std::numeric_limits<float>::infinity());
      std::fill(weight_sums, weight_sums + rows, 0.0f);
      const std::int64_t blocks = blocks_before + (first_query + tokens + kKeys - 1) / kKeys;
      for (std::int64_t block = 0; block < blocks; ++block) {
        const bool is_own_block = block >= blocks_before;
        const std::int64_t first = (is_own_block ? block - blocks_before : block) * kKeys;
        const std::int64_t key_count =
            std::min(kKeys, (is_own_block ? first_query + tokens : segments[0].count) - first);
        const std::int64_t columns = whole_registers(key_count);
        const std::int64_t keys_before = first - (is_own_block ? 0 : segments[0].count);  // the segment's are from 0
        if (first_visible_key(head, first_query - keys_before) >= key_count) continue;    // no query sees the block
        multiply({queries, dim, 1}, rows, keys + block * dim * kKeys, kKeys, dim, columns, scores, kKeys,
                 /*add=*/false);
        for (std::int64_t row = 0; row < rows; ++row) {
          float* const row_scores = scores + row * kKeys;
          // A query attends to all keys of the prefix, and to its segment's keys up to its own.
          const std::int64_t visible_end =
              is_own_block ? std::min(key_count, first_query + row / group + 1 - first) : key_count;
          const std::int64_t visible_begin = first_visible_key(head, first_query + row / group - keys_before);
          if (visible_end <= visible_begin) {
            std::fill(row_scores, row_scores + columns, 0.0f);
            continue;
          }
          const std::int64_t visible_keys = visible_end - visible_begin;
          const float max_score = std::max(max_scores[row], largest(row_scores + visible_begin, visible_keys));
          const float rescale = max_scores[row] == max_score ? 1.0f : exponential(max_scores[row] - max_score);
          std::fill_n(row_scores, visible_begin, 0.0f);
          for (std::int64_t i = visible_begin; i < visible_end; ++i)
            row_scores[i] = exponential(row_scores[i] - max_score);
          std::fill(row_scores + visible_end, row_scores + columns, 0.0f);
          max_scores[row] = max_score;
          weight_sums[row] = weight_sums[row] * rescale + sum_of(row_scores + visible_begin, visible_keys);
          if (rescale != 1.0f)
            for (std::int64_t d = 0; d < width; ++d) value_sums[row * width + d] *= rescale;
        }
        multiply({scores, kKeys, 1}, rows, values + block * kKeys * width, width, key_count, width, value_sums, width,
                 /*add=*/true);
      }
      // The output is the weighted mean of the values.
      for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t token = own.begin + first_query + row / group, head_index = row % group;
        const float scale = 1 / weight_sums[row];
        float* const head_out = out + token * out_stride + head_index * dim;
        for (std::int64_t d = 0; d < dim; ++d) head_out[d] = value_sums[row * width + d] * scale;
        sums[token * sums_stride + head_index] = max_scores[row] + std::log(weight_sums[row]);
      }
    }
  }
}

// See TrainingKernels::attend_backward. For each block of keys, goes through the queries that attend to it. `scores`
// become the weights of the softmax, and `slopes` the gradients of the scores: weight * (output gradient . value -
// output gradient . output).
void attend_segments_backward(const AttentionHead& head, const Segment* segments, std::int64_t count, const float* out,
                              const float* out_gradient, std::int64_t out_stride, const float* sums,
                              std::int64_t sums_stride, float* dq, float* dk, float* dv) {
  const std::int64_t group = head.group, dim = head.dim, width = whole_registers(dim);
  const std::int64_t step = tokens_at_a_time(group), rows_max = step * group;
  float* const queries = scratch(0, rows_max * width);
  float* const gradients = scratch(1, rows_max * width);
  float* const query_gradients = scratch(2, rows_max * width);
  float* const keys = scratch(3, kKeys * (width + 2 * dim));
  float* const transposed_keys = keys + kKeys * width;
  float* const transposed_values = transposed_keys + kKeys * dim;
  float* const key_gradients = scratch(4, 2 * kKeys * width);
  float* const value_gradients = key_gradients + kKeys * width;
  float* const scores = scratch(5, 2 * rows_max * kKeys);
  float* const slopes = scores + rows_max * kKeys;
  // Calls use_token(token, index of its first query's row).
  const auto for_each_token = [&](const Segment& segment, std::int64_t first_query, std::int64_t tokens,
                                  auto&& use_token) {
    for (std::int64_t token = 0; token < tokens; ++token) use_token(segment.begin + first_query + token, token * group);
  };
  for (std::int64_t segment_index = 0; segment_index < count; ++segment_index)
    for_each_token(segments[segment_index], 0, segments[segment_index].count,
                   [&](std::int64_t token, std::int64_t) { std::fill_n(dq + token * head.stride, group * dim, 0.0f); });
  for (std::int64_t owner_index = 0; owner_index < count; ++owner_index) {
    const Segment& owner = segments[owner_index];
    for (std::int64_t first = 0; first < owner.count; first += kKeys) {
      const std::int64_t key_count = std::min(kKeys, owner.count - first), columns = whole_registers(key_count);
      const float* const k = head.k + (owner.begin + first) * head.stride;
      copy_rows(k, head.stride, key_count, dim, width, kKeys, keys);
      transpose_rows(k, head.stride, key_count, dim, transposed_keys);
      transpose_rows(head.v + (owner.begin + first) * head.stride, head.stride, key_count, dim, transposed_values);
      std::fill_n(key_gradients, 2 * kKeys * width, 0.0f);
      // Only the owner, the segment of these keys, attends to them; if the owner is the first segment, all others do,
      // too.
      const std::int64_t segments_end = owner_index == 0 ? count : owner_index + 1;
      for (std::int64_t segment_index = owner_index; segment_index < segments_end; ++segment_index) {
        const bool is_owner = segment_index == owner_index;
        for (std::int64_t first_query = is_owner ? first : 0; first_query < segments[segment_index].count;
             first_query += step) {
          const std::int64_t tokens = std::min(step, segments[segment_index].count - first_query),
                             rows = tokens * group;
          const std::int64_t keys_before = first - (is_owner ? 0 : owner.count);          // the segment's are from 0
          if (first_visible_key(head, first_query - keys_before) >= key_count) continue;  // no query sees these keys
          for_each_token(segments[segment_index], first_query, tokens, [&](std::int64_t token, std::int64_t row) {
            copy_rows(head.q + token * head.stride, dim, group, dim, width, group, queries + row * width);
            copy_rows(out_gradient + token * out_stride, dim, group, dim, width, group, gradients + row * width);
            copy_rows(dq + token * head.stride, dim, group, dim, width, group, query_gradients + row * width);
          });
          // Scores of these queries, and the products of output gradients and values.
          multiply({queries, width, 1}, rows, transposed_keys, kKeys, dim, columns, scores, kKeys, /*add=*/false);
          multiply({gradients, width, 1}, rows, transposed_values, kKeys, dim, columns, slopes, kKeys, /*add=*/false);
          for_each_token(segments[segment_index], first_query, tokens, [&](std::int64_t token, std::int64_t row) {
            const std::int64_t query = token - segments[segment_index].begin;
            const std::int64_t visible_end = is_owner ? std::min(key_count, query + 1 - first) : key_count;
            const std::int64_t visible_begin = std::min(first_visible_key(head, query - keys_before), columns);
            for (std::int64_t head_index = 0; head_index < group; ++head_index) {
              float* const row_scores = scores + (row + head_index) * kKeys;
              float* const row_slopes = slopes + (row + head_index) * kKeys;
              const float log_sum = sums[token * sums_stride + head_index];
              const float total =
                  dot(out + token * out_stride + head_index * dim, gradients + (row + head_index) * width, dim);
              for (std::int64_t i = visible_begin; i < visible_end; ++i)
                row_scores[i] = exponential(row_scores[i] - log_sum);
              for (std::int64_t i = visible_begin; i < visible_end; ++i)
                row_slopes[i] = row_scores[i] * (row_slopes[i] - total);
              for (float* const row_values : {row_scores, row_slopes}) {
                std::fill_n(row_values, visible_begin, 0.0f);
                std::fill(row_values + std::max(visible_begin, visible_end), row_values + columns, 0.0f);
              }
            }
          });
          // Adds to the gradients of values, keys and queries.
          multiply({scores, 1, kKeys}, key_count, gradients, width, rows, width, value_gradients, width, /*add=*/true);
          multiply({slopes, 1, kKeys}, key_count, queries, width, rows, width, key_gradients, width, /*add=*/true);
          multiply({slopes, kKeys, 1}, rows, keys, width, key_count, width, query_gradients, width, /*add=*/true);
          for_each_token(segments[segment_index], first_query, tokens, [&](std::int64_t token, std::int64_t row) {
            for (std::int64_t head_index = 0; head_index < group; ++head_index)
              std::copy_n(query_gradients + (row + head_index) * width, dim,
                          dq + token * head.stride + head_index * dim);
          });
        }
      }
      for (std::int64_t key = 0; key < key_count; ++key) {
        const std::int64_t offset = (owner.begin + first + key) * head.stride;
        std::copy_n(key_gradients + key * width, dim, dk + offset);
        std::copy_n(value_gradients + key * width, dim, dv + offset);
      }
    }
  }
}

// With r = 1 / rms(x) and n values: dx = r * weight * dy - x * r^3 * sum(x * weight * dy) / n. dx may be dy.
void rms_norm_backward(const float* x, const float* weight, const float* dy, std::int64_t count, float eps, float* dx,
                       float* dw) {
  Floats lanes = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    lanes += load<Floats>(x + i) * load<Floats>(weight + i) * load<Floats>(dy + i);
  float slope_product = 0;
  for (int j = 0; j < kLanes; ++j) slope_product += lanes[j];
  for (; i < count; ++i) slope_product += x[i] * weight[i] * dy[i];
  const float scale = 1 / std::sqrt(sum_of_squares(x, count) / static_cast<float>(count) + eps);
  const float x_factor = slope_product * scale * scale * scale / static_cast<float>(count);
  for (std::int64_t j = 0; j < count; ++j) dw[j] += dy[j] * x[j] * scale;
  for (std::int64_t j = 0; j < count; ++j) dx[j] = dy[j] * weight[j] * scale - x[j] * x_factor;
}

void rotate_backward(const float* x, const float* weight, std::int64_t dim, float eps, const float* cos,
                     const float* sin, float* dy, float* dw) {
  const std::int64_t half = dim / 2;
  // The transpose of the rotation in Kernels::rotate.
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
    // The derivative of silu(x) = x * sigmoid(x) is sigmoid(x) + silu(x) * (1 - sigmoid(x)).
    const float sigmoid = 1 / (1 + exponential(-gate[i])), silu = gate[i] * sigmoid;
    d_gate[i] = dy[i] * up[i] * (sigmoid + silu * (1 - sigmoid));
    d_up[i] = dy[i] * silu;
  }
}

void gelu_gate_forward(const float* gate, const float* up, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = gate[i] * gelu_sigmoid(gate[i]) * up[i];
}

void gelu_gate_backward(const float* gate, const float* up, const float* dy, std::int64_t count, float* d_gate,
                        float* d_up) {
  for (std::int64_t i = 0; i < count; ++i) {
    // As in gate_backward(), times the derivative of the sigmoid's argument.
    const float x = gate[i], sigmoid = gelu_sigmoid(x), slope = kGeluScale * (1 + 3 * kGeluCubic * x * x);
    d_gate[i] = dy[i] * up[i] * sigmoid * (1 + x * (1 - sigmoid) * slope);
    d_up[i] = dy[i] * x * sigmoid;
  }
}

void score(const float* logits, std::int64_t count, float scale, std::int64_t target, float* logprob, float* entropy,
           float* log_sum) {
  const float max_logit = largest(logits, count);
  // Sums over a part are in fp32, the sums of the parts in fp64, because an fp32 sum over a vocabulary loses digits.
  constexpr std::int64_t kPartLogits = 1024;
  double sum = 0, weighted_sum = 0;
  for (std::int64_t first = 0; first < count; first += kPartLogits) {
    const std::int64_t end = std::min<std::int64_t>(count, first + kPartLogits);
    Floats sums = {}, products = {};
    std::int64_t i = first;
    for (; i + kLanes <= end; i += kLanes) {
      float p[kLanes];
      for (int j = 0; j < kLanes; ++j) p[j] = exponential((logits[i + j] - max_logit) * scale);
      const Floats e = load<Floats>(p);
      sums += e, products += e * (load<Floats>(logits + i) - max_logit);
    }
    for (int j = 0; j < kLanes; ++j)
      sum += static_cast<double>(sums[j]), weighted_sum += static_cast<double>(products[j]);
    for (; i < end; ++i) {
      const float e = exponential((logits[i] - max_logit) * scale);
      sum += static_cast<double>(e), weighted_sum += static_cast<double>(e * (logits[i] - max_logit));
    }
  }
  const auto log_shifted_sum = static_cast<float>(std::log(sum));
  *logprob = (logits[target] - max_logit) * scale - log_shifted_sum;
  *entropy = log_shifted_sum - static_cast<float>(weighted_sum / sum) * scale;
  *log_sum = max_logit * scale + log_shifted_sum;
}

void score_backward(float* logits, std::int64_t count, float scale, std::int64_t target, float log_sum,
                    float gradient) {
  // Each logit's gradient is gradient * scale * (onehot - probability); onehot is 1 at the target, otherwise 0.
  const float slope = -gradient * scale;
  for (std::int64_t i = 0; i < count; ++i) logits[i] = slope * exponential(logits[i] * scale - log_sum);
  logits[target] -= slope;
}

}  // namespace
}  // namespace echoline::model

// The set of these training kernels.
#define ECHOLINE_TRAINING_KERNELS(name)                                                                               \
  {                                                                                                                   \
    name, attend_segments, attend_segments_backward, rms_norm_backward, rotate_backward, gate_forward, gate_backward, \
        gelu_gate_forward, gelu_gate_backward, score, score_backward                                                  \
  }
