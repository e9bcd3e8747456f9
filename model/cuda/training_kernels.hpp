// Device code of a training pass: the work of one block of threads in norms, rotations, the gate and the softmax over
// the vocabulary. Internal to model/.
#pragma once
#include "model/cuda/training_values.hpp"

namespace echoline::model::training {

// ---- norms ----

// out = narrowed(x / rms(x)) * weight for rows of `width` values. Rows and their lengths are multiples of 16 bytes.
// With an `addend`, normalises the sum and stores it in `sum`.
template <class T>
struct NormJob {
  const T *x, *weight;
  T* out;
  const T* addend;  // or null
  T* sum;
  std::int64_t rows, width;
  float eps;
};

constexpr unsigned kNormThreads = 128;
constexpr unsigned kNormRows = kNormThreads / kWarpSize;  // per block, one per warp

template <class T, class Block>
ECHO_TRAINING_DEVICE void norm_rows(Block& block, const NormJob<T>& job, std::int64_t index) {
  constexpr unsigned kValues = kValuesPerPack<T>;
  typename Block::template Local<float> squares;
  const auto row_of = [&](unsigned thread) { return index * kNormRows + thread / kWarpSize; };
  const std::int64_t packs = job.width / kValues;
  block.each([&](unsigned thread) {
    float sum = 0;
    if (const std::int64_t row = row_of(thread); row < job.rows)
      for (std::int64_t p = thread % kWarpSize; p < packs; p += kWarpSize) {
        const std::int64_t at = row * job.width + p * kValues;
        auto x = load<T, kValues>(job.x + at);
        if (job.addend) {
          const auto addend_values = load<T, kValues>(job.addend + at);
          ECHO_TRAINING_UNROLL
          for (unsigned i = 0; i < kValues; ++i)
            x.values[i] = narrowed<T>(widen(x.values[i]) + widen(addend_values.values[i]));
          store(job.sum + at, x);
        }
        ECHO_TRAINING_UNROLL
        for (unsigned i = 0; i < kValues; ++i) sum += widen(x.values[i]) * widen(x.values[i]);
      }
    squares[thread] = sum;
  });
  block.warp_sum(squares);
  block.each([&](unsigned thread) {
    const std::int64_t row = row_of(thread);
    if (row >= job.rows) return;
    const float scale = inverse_root(squares[thread] / static_cast<float>(job.width) + job.eps);
    for (std::int64_t p = thread % kWarpSize; p < packs; p += kWarpSize) {
      auto x = load<T, kValues>((job.addend ? job.sum : job.x) + row * job.width + p * kValues);
      const auto w = load<T, kValues>(job.weight + p * kValues);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kValues; ++i)
        x.values[i] = narrowed<T>(rounded<T>(widen(x.values[i]) * scale) * widen(w.values[i]));
      store(job.out + row * job.width + p * kValues, x);
    }
  });
}

// The gradient of x, and a row of `sums` [blocks, width] per block for the weight's. `beside`: another gradient of x,
// which is added.
template <class T>
struct NormBackwardJob {
  const T *x, *weight, *slope;
  const T* beside;  // or null
  T* x_slope;
  float* sums;
  std::int64_t rows, width;
  float eps;
};

constexpr unsigned kNormBackwardRows = 8;  // per block

template <class T, class Block>
ECHO_TRAINING_DEVICE void norm_backward_rows(Block& block, const NormBackwardJob<T>& job, std::int64_t index) {
  constexpr unsigned kValues = kValuesPerPack<T>, kWarps = kNormThreads / kWarpSize;
  const std::int64_t first = index * kNormBackwardRows, packs = job.width / kValues;
  const std::int64_t rows = job.rows - first < kNormBackwardRows ? job.rows - first : kNormBackwardRows;
  float* const row_factors = block.shared();  // 1 / rms, and the factor of x
  for (unsigned r0 = 0; r0 < kNormBackwardRows; r0 += kWarps) {
    typename Block::template Local<float> squares, slope_products;
    block.each([&](unsigned thread) {
      const std::int64_t r = r0 + thread / kWarpSize;
      float sum = 0, slope_product = 0;
      if (r < rows)
        for (std::int64_t p = thread % kWarpSize; p < packs; p += kWarpSize) {
          const std::int64_t at = (first + r) * job.width + p * kValues;
          const auto x = load<T, kValues>(job.x + at), dy = load<T, kValues>(job.slope + at);
          const auto w = load<T, kValues>(job.weight + p * kValues);
          ECHO_TRAINING_UNROLL
          for (unsigned i = 0; i < kValues; ++i) {
            sum += widen(x.values[i]) * widen(x.values[i]);
            slope_product += widen(x.values[i]) * (widen(dy.values[i]) * widen(w.values[i]));
          }
        }
      squares[thread] = sum;
      slope_products[thread] = slope_product;
    });
    block.warp_sum(squares);
    block.warp_sum(slope_products);
    block.each([&](unsigned thread) {
      const std::int64_t r = r0 + thread / kWarpSize;
      if (r >= rows || thread % kWarpSize != 0) return;
      const float width = static_cast<float>(job.width), scale = inverse_root(squares[thread] / width + job.eps);
      row_factors[2 * r] = scale;
      row_factors[2 * r + 1] = scale * scale * scale * slope_products[thread] / width;
    });
  }
  block.barrier();
  block.each([&](unsigned thread) {
    for (std::int64_t p = thread; p < packs; p += kNormThreads) {
      const auto w = load<T, kValues>(job.weight + p * kValues);
      float sums[kValues] = {};
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t at = (first + r) * job.width + p * kValues;
        const auto x = load<T, kValues>(job.x + at), dy = load<T, kValues>(job.slope + at);
        const float scale = row_factors[2 * r], x_factor = row_factors[2 * r + 1];
        float other_slope[kValues] = {};
        if (job.beside) {
          const auto beside = load<T, kValues>(job.beside + at);
          ECHO_TRAINING_UNROLL
          for (unsigned i = 0; i < kValues; ++i) other_slope[i] = widen(beside.values[i]);
        }
        Pack<T, kValues> dx;
        ECHO_TRAINING_UNROLL
        for (unsigned i = 0; i < kValues; ++i) {
          const float value = widen(x.values[i]), slope = widen(dy.values[i]);
          sums[i] += slope * rounded<T>(value * scale);
          dx.values[i] = narrowed<T>(scale * (slope * widen(w.values[i])) - x_factor * value + other_slope[i]);
        }
        store(job.x_slope + at, dx);
      }
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kValues; ++i) job.sums[index * job.width + p * kValues + i] = sums[i];
    }
  });
}

// ---- sums over rows ----

// out[column] = the sum of that column of `sums` [rows, width], in an order that depends only on `rows`.
template <class T>
struct ColumnSumsJob {
  const float* sums;
  T* out;
  std::int64_t rows, width;
};

constexpr unsigned kColumnThreads = 1024;
constexpr unsigned kColumnGroups = kColumnThreads / kWarpSize;

template <class T, class Block>
ECHO_TRAINING_DEVICE void column_sums(Block& block, const ColumnSumsJob<T>& job, std::int64_t index) {
  float* const parts = block.shared();
  block.each([&](unsigned thread) {
    const std::int64_t column = index * kWarpSize + thread % kWarpSize;
    float sum = 0;
    if (column < job.width)
      for (std::int64_t row = thread / kWarpSize; row < job.rows; row += kColumnGroups)
        sum += job.sums[row * job.width + column];
    parts[thread] = sum;
  });
  block.barrier();
  block.each([&](unsigned thread) {
    const std::int64_t column = index * kWarpSize + thread;
    if (thread >= kWarpSize || column >= job.width) return;
    float sum = 0;
    for (unsigned group = 0; group < kColumnGroups; ++group) sum += parts[group * kWarpSize + thread];
    job.out[column] = narrowed<T>(sum);
  });
}

// ---- norms and rotations of heads ----

// A token's heads: `heads` queries, `kv_heads` keys and `kv_heads` values of `dim` values each; dim is a multiple of 4,
// at most 256. Applies the norm, unless it is null, and the rotation to queries and keys.
template <class T>
struct RotateJob {
  const T* x;                // [tokens, heads + 2 kv_heads, dim]
  T* out;                    // same shape
  const float *cos, *sin;    // [positions, dim]; token t has position t % positions
  const T *q_norm, *k_norm;  // [dim], or null
  std::int64_t tokens, positions;
  int heads, kv_heads, dim;
  float eps;
};

constexpr unsigned kRotateThreads = 256, kRotateWarps = kRotateThreads / kWarpSize;
constexpr int kDimMax = 256;
constexpr unsigned kHeadsAtOnce = 4;  // per warp, so that several loads are in flight

// A lane has values 2 i, 2 i + 1 and those half a head later, for i = lane, lane + 32, ...: kPairs of them, 1 for heads
// of up to 128 values and 2 for larger ones.
template <class T, unsigned kPairs>
struct HeadPacks {
  Pack<T, 2> low[kPairs], high[kPairs];
};
template <unsigned kPairs>
struct HeadValues {
  float low[kPairs][2], high[kPairs][2];
};

template <unsigned kPairs, class F>
ECHO_TRAINING_DEVICE void over_pairs(unsigned lane, int dim, const F& f) {
  ECHO_TRAINING_UNROLL
  for (unsigned k = 0; k < kPairs; ++k)
    if (const int i = 2 * static_cast<int>(lane + k * kWarpSize); i < dim / 2) f(k, i);
}

template <unsigned kPairs, class T, class Block>
ECHO_TRAINING_DEVICE void rotate_token(Block& block, const RotateJob<T>& job, std::int64_t token) {
  const int all = job.heads + 2 * job.kv_heads, rotated_heads = job.heads + job.kv_heads, half = job.dim / 2;
  const float* const cos = job.cos + token % job.positions * job.dim;
  const float* const sin = job.sin + token % job.positions * job.dim;
  for (int h0 = 0; h0 < all; h0 += kRotateWarps * kHeadsAtOnce) {
    typename Block::template Local<HeadPacks<T, kPairs>> values[kHeadsAtOnce];
    typename Block::template Local<float> squares[kHeadsAtOnce];
    const auto head_of = [&](unsigned thread, unsigned n) {
      return h0 + static_cast<int>(n * kRotateWarps + thread / kWarpSize);
    };
    block.each([&](unsigned thread) {
      ECHO_TRAINING_UNROLL
      for (unsigned n = 0; n < kHeadsAtOnce; ++n) {
        const int head = head_of(thread, n);
        float sum = 0;
        if (head < all) {
          const T* const x = job.x + (token * all + head) * job.dim;
          over_pairs<kPairs>(thread % kWarpSize, job.dim, [&](unsigned k, int i) {
            const auto low = values[n][thread].low[k] = load<T, 2>(x + i);
            const auto high = values[n][thread].high[k] = load<T, 2>(x + half + i);
            ECHO_TRAINING_UNROLL
            for (unsigned j = 0; j < 2; ++j)
              sum += widen(low.values[j]) * widen(low.values[j]) + widen(high.values[j]) * widen(high.values[j]);
          });
        }
        squares[n][thread] = sum;
      }
    });
    ECHO_TRAINING_UNROLL
    for (unsigned n = 0; n < kHeadsAtOnce; ++n) block.warp_sum(squares[n]);
    block.each([&](unsigned thread) {
      ECHO_TRAINING_UNROLL
      for (unsigned n = 0; n < kHeadsAtOnce; ++n) {
        const int head = head_of(thread, n);
        if (head >= all) continue;
        T* const out = job.out + (token * all + head) * job.dim;
        const T* const norm = head < job.heads ? job.q_norm : job.k_norm;
        const float scale = inverse_root(squares[n][thread] / static_cast<float>(job.dim) + job.eps);
        over_pairs<kPairs>(thread % kWarpSize, job.dim, [&](unsigned k, int i) {
          auto low = values[n][thread].low[k], high = values[n][thread].high[k];
          if (head < rotated_heads) {
            const auto cos_low = load<float, 2>(cos + i), cos_high = load<float, 2>(cos + half + i);
            const auto sin_low = load<float, 2>(sin + i), sin_high = load<float, 2>(sin + half + i);
            ECHO_TRAINING_UNROLL
            for (unsigned j = 0; j < 2; ++j) {
              float a = widen(low.values[j]), b = widen(high.values[j]);
              if (norm) {
                a = a * scale * widen(norm[i + j]);
                b = b * scale * widen(norm[half + i + j]);
              }
              low.values[j] = narrowed<T>(multiply_add(b, sin_low.values[j], times(a, cos_low.values[j])));
              high.values[j] = narrowed<T>(multiply_add(a, sin_high.values[j], times(b, cos_high.values[j])));
            }
          }
          store(out + i, low);
          store(out + half + i, high);
        });
      }
    });
  }
}

// The gradient of RotateJob::x, given attention's gradients of queries, keys and values. Keys and values of a token may
// be in several rows, each in `repeats` consecutive heads: their gradients are summed.
template <class T>
struct RotateBackwardJob {
  RotateJob<T> forward;                  // without `out`
  const T *q_slope, *k_slope, *v_slope;  // rows of heads, with these strides in values
  std::int64_t q_stride, k_stride, v_stride;
  const std::int32_t *copies_first, *copies;  // rows of token t's keys: copies[copies_first[t]] ... ; null: row t
  T* x_slope;
  float* sums;  // [blocks, 2 dim]: for the norms of queries and of keys
  int repeats;
};

constexpr unsigned kRotateBackwardTokens = 4;  // per block

template <unsigned kPairs, class T, class Block>
ECHO_TRAINING_DEVICE void rotate_backward_tokens(Block& block, const RotateBackwardJob<T>& job, std::int64_t index) {
  const RotateJob<T>& f = job.forward;
  const int all = f.heads + 2 * f.kv_heads, rotated_heads = f.heads + f.kv_heads, half = f.dim / 2;
  typename Block::template Local<HeadValues<kPairs>> q_sums, k_sums;
  block.each([&](unsigned thread) { q_sums[thread] = k_sums[thread] = HeadValues<kPairs>{}; });
  for (unsigned t = 0; t < kRotateBackwardTokens; ++t) {
    const std::int64_t token = index * kRotateBackwardTokens + t;
    if (token >= f.tokens) break;
    const int copies_begin = job.copies ? job.copies_first[token] : 0;
    const int copies_end = job.copies ? job.copies_first[token + 1] : 1;
    const float* const cos = f.cos + token % f.positions * f.dim;
    const float* const sin = f.sin + token % f.positions * f.dim;
    for (int h0 = 0; h0 < all; h0 += kRotateWarps * kHeadsAtOnce) {
      typename Block::template Local<HeadPacks<T, kPairs>> values[kHeadsAtOnce];
      typename Block::template Local<HeadValues<kPairs>> slopes[kHeadsAtOnce];
      typename Block::template Local<float> squares[kHeadsAtOnce], slope_products[kHeadsAtOnce];
      const auto head_of = [&](unsigned thread, unsigned n) {
        return h0 + static_cast<int>(n * kRotateWarps + thread / kWarpSize);
      };
      block.each([&](unsigned thread) {
        ECHO_TRAINING_UNROLL
        for (unsigned n = 0; n < kHeadsAtOnce; ++n) {
          const int head = head_of(thread, n);
          if (head >= all) continue;
          const bool is_query = head < f.heads, is_value = head >= rotated_heads;
          const T* const x = f.x + (token * all + head) * f.dim;
          const int repeats = is_query ? 1 : job.repeats;
          const int own_head = is_query ? head : (is_value ? head - rotated_heads : head - f.heads) * repeats;
          const T* const from = (is_query ? job.q_slope : is_value ? job.v_slope : job.k_slope) + own_head * f.dim;
          const std::int64_t stride = is_query ? job.q_stride : is_value ? job.v_stride : job.k_stride;
          const int begin = is_query ? 0 : copies_begin, end = is_query ? 1 : copies_end;
          over_pairs<kPairs>(thread % kWarpSize, f.dim, [&](unsigned k, int i) {
            values[n][thread].low[k] = load<T, 2>(x + i);
            values[n][thread].high[k] = load<T, 2>(x + half + i);
            float low[2] = {}, high[2] = {};
            for (int c = begin; c < end; ++c) {
              const T* const row = from + (is_query || !job.copies ? token : job.copies[c]) * stride + i;
              for (int repeat = 0; repeat < repeats; ++repeat) {
                const auto a = load<T, 2>(row + repeat * f.dim), b = load<T, 2>(row + repeat * f.dim + half);
                ECHO_TRAINING_UNROLL
                for (unsigned j = 0; j < 2; ++j) low[j] += widen(a.values[j]), high[j] += widen(b.values[j]);
              }
            }
            ECHO_TRAINING_UNROLL
            for (unsigned j = 0; j < 2; ++j) {
              slopes[n][thread].low[k][j] = low[j];
              slopes[n][thread].high[k][j] = high[j];
            }
          });
        }
      });
      block.each([&](unsigned thread) {
        ECHO_TRAINING_UNROLL
        for (unsigned n = 0; n < kHeadsAtOnce; ++n) {
          const int head = head_of(thread, n);
          const T* const norm = head < f.heads ? f.q_norm : f.k_norm;
          float sum = 0, slope_product = 0;
          if (head < rotated_heads)
            over_pairs<kPairs>(thread % kWarpSize, f.dim, [&](unsigned k, int i) {
              const auto cos_low = load<float, 2>(cos + i), cos_high = load<float, 2>(cos + half + i);
              const auto sin_low = load<float, 2>(sin + i), sin_high = load<float, 2>(sin + half + i);
              ECHO_TRAINING_UNROLL
              for (unsigned j = 0; j < 2; ++j) {
                float &da = slopes[n][thread].low[k][j], &db = slopes[n][thread].high[k][j];
                const float rotated_back = da * cos_low.values[j] + db * sin_high.values[j];
                db = db * cos_high.values[j] + da * sin_low.values[j];
                da = rotated_back;
                if (norm) {
                  const float a = widen(values[n][thread].low[k].values[j]),
                              b = widen(values[n][thread].high[k].values[j]);
                  sum += a * a + b * b;
                  slope_product += a * (da * widen(norm[i + j])) + b * (db * widen(norm[half + i + j]));
                }
              }
            });
          squares[n][thread] = sum;
          slope_products[n][thread] = slope_product;
        }
      });
      ECHO_TRAINING_UNROLL
      for (unsigned n = 0; n < kHeadsAtOnce; ++n) {
        block.warp_sum(squares[n]);
        block.warp_sum(slope_products[n]);
      }
      block.each([&](unsigned thread) {
        ECHO_TRAINING_UNROLL
        for (unsigned n = 0; n < kHeadsAtOnce; ++n) {
          const int head = head_of(thread, n);
          if (head >= all) continue;
          const bool is_query = head < f.heads;
          const T* const norm = head >= rotated_heads ? nullptr : is_query ? f.q_norm : f.k_norm;
          T* const to = job.x_slope + (token * all + head) * f.dim;
          const float dim = static_cast<float>(f.dim), scale = inverse_root(squares[n][thread] / dim + f.eps);
          const float x_factor = scale * scale * scale * slope_products[n][thread] / dim;
          over_pairs<kPairs>(thread % kWarpSize, f.dim, [&](unsigned k, int i) {
            Pack<T, 2> low, high;
            ECHO_TRAINING_UNROLL
            for (unsigned j = 0; j < 2; ++j) {
              float da = slopes[n][thread].low[k][j], db = slopes[n][thread].high[k][j];
              if (norm) {
                const float a = widen(values[n][thread].low[k].values[j]),
                            b = widen(values[n][thread].high[k].values[j]);
                if (is_query) {  // no reference, which would move the sums out of registers
                  q_sums[thread].low[k][j] += da * (a * scale);
                  q_sums[thread].high[k][j] += db * (b * scale);
                } else {
                  k_sums[thread].low[k][j] += da * (a * scale);
                  k_sums[thread].high[k][j] += db * (b * scale);
                }
                da = scale * (da * widen(norm[i + j])) - x_factor * a;
                db = scale * (db * widen(norm[half + i + j])) - x_factor * b;
              }
              low.values[j] = narrowed<T>(da);
              high.values[j] = narrowed<T>(db);
            }
            store(to + i, low);
            store(to + half + i, high);
          });
        }
      });
    }
  }
  if (!f.q_norm) return;
  // Adds the warps' sums one after the other, so that the order is fixed.
  float* const shared = block.shared();  // [2 dim]
  block.each([&](unsigned thread) {
    for (int i = static_cast<int>(thread); i < 2 * f.dim; i += kRotateThreads) shared[i] = 0;
  });
  for (unsigned warp = 0; warp < kRotateWarps; ++warp) {
    block.barrier();
    block.each([&](unsigned thread) {
      if (thread / kWarpSize != warp) return;
      over_pairs<kPairs>(thread % kWarpSize, f.dim, [&](unsigned k, int i) {
        ECHO_TRAINING_UNROLL
        for (unsigned j = 0; j < 2; ++j) {
          shared[i + j] += q_sums[thread].low[k][j];
          shared[half + i + j] += q_sums[thread].high[k][j];
          shared[f.dim + i + j] += k_sums[thread].low[k][j];
          shared[f.dim + half + i + j] += k_sums[thread].high[k][j];
        }
      });
    });
  }
  block.barrier();
  block.each([&](unsigned thread) {
    for (int i = static_cast<int>(thread); i < 2 * f.dim; i += kRotateThreads)
      job.sums[index * 2 * f.dim + i] = shared[i];
  });
}

// Copies rows of `width` values from rows[r] of `from`, whose rows are `stride` values apart. Repeats each part of
// `dim` values `repeats` times in a row. All sizes are multiples of 16 bytes.
template <class T>
struct GatherJob {
  const T* from;
  T* to;
  const std::int32_t* rows;
  std::int64_t count;
  std::int64_t stride;
  int width, dim, repeats;
};

constexpr unsigned kGatherThreads = 256;

template <class T, class Block>
ECHO_TRAINING_DEVICE void gather_row(Block& block, const GatherJob<T>& job, std::int64_t index) {
  constexpr int kValues = kValuesPerPack<T>, kStep = kGatherThreads * kValuesPerPack<T>;
  block.each([&](unsigned thread) {
    const T* const from = job.from + job.rows[index] * job.stride;
    T* const to = job.to + index * job.width * job.repeats;
    for (int i = static_cast<int>(thread) * kValues; i < job.width; i += kStep) {
      const auto values = load<T, kValuesPerPack<T>>(from + i);
      const int part = i / job.dim;
      for (int r = 0; r < job.repeats; ++r)
        store(to + (part * job.repeats + r) * job.dim + (i - part * job.dim), values);
    }
  });
}

// ---- the gate ----

// Rows of `width` values: dense if there is one value for each pair, and `stride` values apart for gate and `up`.
// Widths, strides and addresses are multiples of 16 bytes.
template <class T>
struct GateJob {
  const T *gate, *up;
  const T* slope;  // dense; backward only
  T* out;          // dense; forward only
  T *gate_slope, *up_slope;
  std::int64_t rows, width, stride;
};

constexpr unsigned kGateThreads = 256;

// Calls f(dense, strided) with the offsets of the thread's values.
template <class T, class F>
ECHO_TRAINING_DEVICE void over_gates(const GateJob<T>& job, std::int64_t index, unsigned thread, const F& f) {
  const std::int64_t at = (index * kGateThreads + thread) * kValuesPerPack<T>;
  if (at >= job.rows * job.width) return;
  const std::int64_t row = at / job.width;
  f(at, row * job.stride + at - row * job.width);
}

// out = narrowed(gate * sigmoid(gate)) * up
template <class T, class Block>
ECHO_TRAINING_DEVICE void gate_part(Block& block, const GateJob<T>& job, std::int64_t index) {
  constexpr unsigned kValues = kValuesPerPack<T>;
  block.each([&](unsigned thread) {
    over_gates(job, index, thread, [&](std::int64_t dense, std::int64_t strided) {
      auto g = load<T, kValues>(job.gate + strided);
      const auto u = load<T, kValues>(job.up + strided);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kValues; ++i) {
        const float x = widen(g.values[i]);
        g.values[i] = narrowed<T>(rounded<T>(x / (1 + exponential<T>(-x))) * widen(u.values[i]));
      }
      store(job.out + dense, g);
    });
  });
}

template <class T, class Block>
ECHO_TRAINING_DEVICE void gate_backward_part(Block& block, const GateJob<T>& job, std::int64_t index) {
  constexpr unsigned kValues = kValuesPerPack<T>;
  block.each([&](unsigned thread) {
    over_gates(job, index, thread, [&](std::int64_t dense, std::int64_t strided) {
      auto g = load<T, kValues>(job.gate + strided), u = load<T, kValues>(job.up + strided);
      const auto d = load<T, kValues>(job.slope + dense);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kValues; ++i) {
        const float x = widen(g.values[i]), slope = widen(d.values[i]), sigmoid = 1 / (1 + exponential<T>(-x));
        g.values[i] = narrowed<T>(slope * widen(u.values[i]) * sigmoid * (1 + x * (1 - sigmoid)));
        u.values[i] = narrowed<T>(slope * rounded<T>(x * sigmoid));
      }
      store(job.gate_slope + strided, g);
      store(job.up_slope + strided, u);
    });
  });
}

// ---- softmax over the vocabulary ----

// For each row of logits [rows, width] under softmax(logits * scale): the log-probability of its target, the entropy,
// and the logarithm of the sum. Backward, replaces the logits by slope * scale * (one at the target - probability).
template <class T>
struct ScoreJob {
  T* logits;
  const std::int64_t* targets;
  float *logprobs, *entropies, *log_sums;
  const float* slopes;  // backward only
  std::int64_t rows, width;
  float scale;
  bool packed;  // rows and their lengths are multiples of 16 bytes
};

constexpr unsigned kScoreThreads = 512;

// Calls f(value, i) for the thread's values of the row; loads several at a time if `packed`.
template <class T, class F>
ECHO_TRAINING_DEVICE void over_row(const T* row, std::int64_t width, bool packed, unsigned thread, const F& f) {
  constexpr unsigned kValues = kValuesPerPack<T>;
  if (packed)
    for (std::int64_t at = thread * kValues; at < width; at += kScoreThreads * kValues)
      f(load<T, kValues>(row + at), at);
  else
    for (std::int64_t at = thread; at < width; at += kScoreThreads) f(load<T, 1>(row + at), at);
}

template <class T, class Block>
ECHO_TRAINING_DEVICE void score_row(Block& block, const ScoreJob<T>& job, std::int64_t row) {
  typename Block::template Local<float> tops, own_tops, sums, weighted_sums;
  const T* const logits = job.logits + row * job.width;
  block.each([&](unsigned thread) {
    float top = -INFINITY, sum = 0, weighted_sum = 0;  // sums of exp(x - top) and of x exp(x - top)
    const auto add_values = [&](const auto& pack, std::int64_t) {
      constexpr unsigned kCount = sizeof(pack) / sizeof(T);
      float x[kCount], highest = -INFINITY;
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kCount; ++i) {
        x[i] = widen(pack.values[i]) * job.scale;
        highest = x[i] > highest ? x[i] : highest;
      }
      if (highest > top) {
        const float rescale = exponential<T>(top - highest);
        sum *= rescale;
        weighted_sum *= rescale;
        top = highest;
      }
      if (top == -INFINITY) return;
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kCount; ++i) {
        const float e = exponential<T>(x[i] - top);
        sum += e;
        weighted_sum += x[i] == -INFINITY ? 0.0f : x[i] * e;
      }
    };
    over_row(logits, job.width, job.packed, thread, add_values);
    tops[thread] = own_tops[thread] = top;
    sums[thread] = sum;
    weighted_sums[thread] = weighted_sum;
  });
  block.block_max(tops);
  block.each([&](unsigned thread) {
    const float rescale = own_tops[thread] == -INFINITY ? 0.0f : exponential<T>(own_tops[thread] - tops[thread]);
    sums[thread] = own_tops[thread] == -INFINITY && sums[thread] == 0 ? 0.0f : sums[thread] * rescale;
    weighted_sums[thread] =
        own_tops[thread] == -INFINITY && weighted_sums[thread] == 0 ? 0.0f : weighted_sums[thread] * rescale;
  });
  block.block_sum(sums);
  block.block_sum(weighted_sums);
  block.each([&](unsigned thread) {
    if (thread != 0) return;
    const float log_sum = tops[thread] + logf(sums[thread]);
    job.log_sums[row] = log_sum;
    job.logprobs[row] = widen(logits[job.targets[row]]) * job.scale - log_sum;
    job.entropies[row] = log_sum - weighted_sums[thread] / sums[thread];
  });
}

template <class T, class Block>
ECHO_TRAINING_DEVICE void score_backward_row(Block& block, const ScoreJob<T>& job, std::int64_t row) {
  T* const logits = job.logits + row * job.width;
  const float log_sum = job.log_sums[row], slope = job.slopes[row] * job.scale;
  const std::int64_t target = job.targets[row];
  block.each([&](unsigned thread) {
    over_row(logits, job.width, job.packed, thread, [&](auto pack, std::int64_t at) {
      constexpr unsigned kCount = sizeof(pack) / sizeof(T);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kCount; ++i) {
        const float p = exponential<T>(widen(pack.values[i]) * job.scale - log_sum);
        pack.values[i] = narrowed<T>(slope * ((at + i == target ? 1.0f : 0.0f) - p));
      }
      store(logits + at, pack);
    });
  });
}

}  // namespace echoline::model::training
