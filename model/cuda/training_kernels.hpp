// Device code of a training pass: the work of one block of threads in norms, rotations, the gate and the softmax over
// the vocabulary. `Block` is described in training_values.hpp; `index` is the block's. A slope is the gradient of the
// loss with respect to a value. A pack is the values that a thread loads at once, 16 bytes in most cases. Internal to
// model/.
#pragma once
#include "model/cuda/training_values.hpp"

namespace echoline::model::training {

// ---- norms ----

// Computes out = narrow_to(x / rms(x)) * weight for rows of `width` values. With an `addend`, stores x + addend in
// `sum` and normalises that. Addresses and lengths of rows are multiples of 16 bytes.
template <class T>
struct NormJob {
  const T *x, *weight;
  T* out;
  const T* addend;  // or null
  T* sum;           // unused without an addend
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
      for (std::int64_t pack = thread % kWarpSize; pack < packs; pack += kWarpSize) {
        const std::int64_t offset = row * job.width + pack * kValues;
        auto x = load<T, kValues>(job.x + offset);
        if (job.addend) {
          const auto addend_values = load<T, kValues>(job.addend + offset);
          ECHO_TRAINING_UNROLL
          for (unsigned i = 0; i < kValues; ++i)
            x.values[i] = narrow_to<T>(widen(x.values[i]) + widen(addend_values.values[i]));
          store(job.sum + offset, x);
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
    for (std::int64_t pack = thread % kWarpSize; pack < packs; pack += kWarpSize) {
      auto x = load<T, kValues>((job.addend ? job.sum : job.x) + row * job.width + pack * kValues);
      const auto w = load<T, kValues>(job.weight + pack * kValues);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kValues; ++i)
        x.values[i] = narrow_to<T>(round_to<T>(widen(x.values[i]) * scale) * widen(w.values[i]));
      store(job.out + row * job.width + pack * kValues, x);
    }
  });
}

// Writes the gradient of x to x_slope, given the gradient `slope` of the norm. Each block also writes its share of the
// weight's gradient to a row of `sums` [blocks, width]. `added_slope` is added to the gradient of x.
template <class T>
struct NormBackwardJob {
  const T *x, *weight, *slope;
  const T* added_slope;  // or null
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
  // With n = width and r = 1 / rms(x), the gradient of x is r * (w * dy) - x * r^3 * sum(x * w * dy) / n. Two factors
  // per row are stored: r, and the factor of x.
  float* const row_factors = block.shared();
  for (unsigned first_warp_row = 0; first_warp_row < kNormBackwardRows; first_warp_row += kWarps) {
    typename Block::template Local<float> squares, slope_products;
    block.each([&](unsigned thread) {
      const std::int64_t r = first_warp_row + thread / kWarpSize;
      float sum = 0, slope_product = 0;
      if (r < rows)
        for (std::int64_t pack = thread % kWarpSize; pack < packs; pack += kWarpSize) {
          const std::int64_t offset = (first + r) * job.width + pack * kValues;
          const auto x = load<T, kValues>(job.x + offset), dy = load<T, kValues>(job.slope + offset);
          const auto w = load<T, kValues>(job.weight + pack * kValues);
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
      const std::int64_t r = first_warp_row + thread / kWarpSize;
      if (r >= rows || thread % kWarpSize != 0) return;
      const float width = static_cast<float>(job.width), scale = inverse_root(squares[thread] / width + job.eps);
      row_factors[2 * r] = scale;
      row_factors[2 * r + 1] = scale * scale * scale * slope_products[thread] / width;
    });
  }
  block.barrier();
  block.each([&](unsigned thread) {
    for (std::int64_t pack = thread; pack < packs; pack += kNormThreads) {
      const auto w = load<T, kValues>(job.weight + pack * kValues);
      float sums[kValues] = {};
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t offset = (first + r) * job.width + pack * kValues;
        const auto x = load<T, kValues>(job.x + offset), dy = load<T, kValues>(job.slope + offset);
        const float scale = row_factors[2 * r], x_factor = row_factors[2 * r + 1];
        float other_slope[kValues] = {};
        if (job.added_slope) {
          const auto addend = load<T, kValues>(job.added_slope + offset);
          ECHO_TRAINING_UNROLL
          for (unsigned i = 0; i < kValues; ++i) other_slope[i] = widen(addend.values[i]);
        }
        Pack<T, kValues> dx;
        ECHO_TRAINING_UNROLL
        for (unsigned i = 0; i < kValues; ++i) {
          const float value = widen(x.values[i]), slope = widen(dy.values[i]);
          sums[i] += slope * round_to<T>(value * scale);
          dx.values[i] = narrow_to<T>(scale * (slope * widen(w.values[i])) - x_factor * value + other_slope[i]);
        }
        store(job.x_slope + offset, dx);
      }
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kValues; ++i) job.sums[index * job.width + pack * kValues + i] = sums[i];
    }
  });
}

// ---- sums over rows ----

// Writes the sum of each column of `sums` [rows, width] to `out`. The order of the additions depends only on `rows`, so
// a repetition gives the same bits.
template <class T>
struct ColumnSumsJob {
  const float* sums;
  T* out;
  std::int64_t rows, width;
};

constexpr unsigned kColumnThreads = 1024;
constexpr unsigned kColumnGroups = kColumnThreads / kWarpSize;  // each group, a warp, sums some of the rows

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
    job.out[column] = narrow_to<T>(sum);
  });
}

// ---- norms and rotations of heads ----

// Applies the norm, unless it is null, and the rotation to queries and keys, and copies values. A token has `heads`
// query heads, `kv_heads` key heads and `kv_heads` value heads of `dim` numbers each; dim is a multiple of 4, at most
// 256.
template <class T>
struct RotateJob {
  const T* x;                // [tokens, heads + 2 kv_heads, dim]
  T* out;                    // same shape
  const float *cos, *sin;    // [positions, dim], the first half of each row of sin negated; position: t % positions
  const T *q_norm, *k_norm;  // [dim], or null
  std::int64_t tokens, positions;
  int heads, kv_heads, dim;
  float eps;
};

constexpr unsigned kRotateThreads = 256, kRotateWarps = kRotateThreads / kWarpSize;
constexpr int kDimMax = 256;          // the largest head, for which HeadPacks needs kPairs = 2
constexpr unsigned kHeadsAtOnce = 4;  // heads per warp, so that several loads are in flight

// A lane's share of a head, for i = lane, lane + 32, ...: the values 2 i and 2 i + 1 of the head (low), and the values
// half a head later (high). Value j is rotated together with value j + dim / 2, so the lane has both. kPairs is the
// number of these i: 1 for heads of up to 128 values, 2 for larger ones.
template <class T, unsigned kPairs>
struct HeadPacks {
  Pack<T, 2> low[kPairs], high[kPairs];
};
template <unsigned kPairs>
struct HeadValues {
  float low[kPairs][2], high[kPairs][2];
};

// Calls f(k, 2 i) for the lane's k-th i (see HeadPacks).
template <unsigned kPairs, class F>
ECHO_TRAINING_DEVICE void for_each_pair(unsigned lane, int dim, const F& f) {
  ECHO_TRAINING_UNROLL
  for (unsigned k = 0; k < kPairs; ++k)
    if (const int i = 2 * static_cast<int>(lane + k * kWarpSize); i < dim / 2) f(k, i);
}

template <unsigned kPairs, class T, class Block>
ECHO_TRAINING_DEVICE void rotate_token(Block& block, const RotateJob<T>& job, std::int64_t token) {
  const int all_heads = job.heads + 2 * job.kv_heads, rotated_heads = job.heads + job.kv_heads, half = job.dim / 2;
  const float* const cos = job.cos + token % job.positions * job.dim;
  const float* const sin = job.sin + token % job.positions * job.dim;
  for (int first_head = 0; first_head < all_heads; first_head += kRotateWarps * kHeadsAtOnce) {
    typename Block::template Local<HeadPacks<T, kPairs>> values[kHeadsAtOnce];
    typename Block::template Local<float> squares[kHeadsAtOnce];
    const auto head_of = [&](unsigned thread, unsigned n) {  // the n-th of the warp's kHeadsAtOnce heads
      return first_head + static_cast<int>(n * kRotateWarps + thread / kWarpSize);
    };
    block.each([&](unsigned thread) {
      ECHO_TRAINING_UNROLL
      for (unsigned n = 0; n < kHeadsAtOnce; ++n) {
        const int head = head_of(thread, n);
        float sum = 0;
        if (head < all_heads) {
          const T* const x = job.x + (token * all_heads + head) * job.dim;
          for_each_pair<kPairs>(thread % kWarpSize, job.dim, [&](unsigned k, int i) {
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
        if (head >= all_heads) continue;
        T* const out = job.out + (token * all_heads + head) * job.dim;
        const T* const norm = head < job.heads ? job.q_norm : job.k_norm;
        const float scale = inverse_root(squares[n][thread] / static_cast<float>(job.dim) + job.eps);
        for_each_pair<kPairs>(thread % kWarpSize, job.dim, [&](unsigned k, int i) {
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
              low.values[j] = narrow_to<T>(multiply_add(b, sin_low.values[j], times(a, cos_low.values[j])));
              high.values[j] = narrow_to<T>(multiply_add(a, sin_high.values[j], times(b, cos_high.values[j])));
            }
          }
          store(out + i, low);
          store(out + half + i, high);
        });
      }
    });
  }
}

// Computes the gradient of RotateJob::x, given those of the rotated queries, keys and values. Keys and values of a
// token may have been copied to several rows, and each head to `repeats` consecutive heads; the gradients of all copies
// are summed.
template <class T>
struct RotateBackwardJob {
  RotateJob<T> forward;  // without `out`
  const T *q_slope, *k_slope, *v_slope;
  std::int64_t q_stride, k_stride, v_stride;  // numbers from one token or row to the next
  // The rows of token t's keys and values are copies[i] for i from copies_first[t] to below copies_first[t + 1]. If
  // `copies` is null, they are row t.
  const std::int32_t *copies_first, *copies;
  T* x_slope;
  float* sums;  // [blocks, 2 dim]: each block's share of the gradients of q_norm and k_norm
  int repeats;
};

constexpr unsigned kRotateBackwardTokens = 4;  // per block

template <unsigned kPairs, class T, class Block>
ECHO_TRAINING_DEVICE void rotate_backward_tokens(Block& block, const RotateBackwardJob<T>& job, std::int64_t index) {
  const RotateJob<T>& forward = job.forward;
  const int all_heads = forward.heads + 2 * forward.kv_heads, rotated_heads = forward.heads + forward.kv_heads,
            half = forward.dim / 2;
  typename Block::template Local<HeadValues<kPairs>> q_sums, k_sums;
  block.each([&](unsigned thread) { q_sums[thread] = k_sums[thread] = HeadValues<kPairs>{}; });
  for (unsigned t = 0; t < kRotateBackwardTokens; ++t) {
    const std::int64_t token = index * kRotateBackwardTokens + t;
    if (token >= forward.tokens) break;
    const int copies_begin = job.copies ? job.copies_first[token] : 0;
    const int copies_end = job.copies ? job.copies_first[token + 1] : 1;  // 1: only the token's own row
    const float* const cos = forward.cos + token % forward.positions * forward.dim;
    const float* const sin = forward.sin + token % forward.positions * forward.dim;
    for (int first_head = 0; first_head < all_heads; first_head += kRotateWarps * kHeadsAtOnce) {
      typename Block::template Local<HeadPacks<T, kPairs>> values[kHeadsAtOnce];
      typename Block::template Local<HeadValues<kPairs>> slopes[kHeadsAtOnce];
      typename Block::template Local<float> squares[kHeadsAtOnce], slope_products[kHeadsAtOnce];
      const auto head_of = [&](unsigned thread, unsigned n) {
        return first_head + static_cast<int>(n * kRotateWarps + thread / kWarpSize);
      };
      block.each([&](unsigned thread) {
        ECHO_TRAINING_UNROLL
        for (unsigned n = 0; n < kHeadsAtOnce; ++n) {
          const int head = head_of(thread, n);
          if (head >= all_heads) continue;
          const bool is_query = head < forward.heads, is_value = head >= rotated_heads;
          const T* const x = forward.x + (token * all_heads + head) * forward.dim;
          const int repeats = is_query ? 1 : job.repeats;
          // Index of the head, or of its first repetition, among the slopes of its kind.
          const int own_head = is_query ? head : (is_value ? head - rotated_heads : head - forward.heads) * repeats;
          const T* const head_slopes = (is_query   ? job.q_slope
                                        : is_value ? job.v_slope
                                                   : job.k_slope) +
                                       own_head * forward.dim;
          const std::int64_t stride = is_query ? job.q_stride : is_value ? job.v_stride : job.k_stride;
          const int begin = is_query ? 0 : copies_begin, end = is_query ? 1 : copies_end;
          for_each_pair<kPairs>(thread % kWarpSize, forward.dim, [&](unsigned k, int i) {
            values[n][thread].low[k] = load<T, 2>(x + i);
            values[n][thread].high[k] = load<T, 2>(x + half + i);
            float low[2] = {}, high[2] = {};
            for (int c = begin; c < end; ++c) {
              const T* const row = head_slopes + (is_query || !job.copies ? token : job.copies[c]) * stride + i;
              for (int repeat = 0; repeat < repeats; ++repeat) {
                const auto a = load<T, 2>(row + repeat * forward.dim),
                           b = load<T, 2>(row + repeat * forward.dim + half);
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
          const T* const norm = head < forward.heads ? forward.q_norm : forward.k_norm;
          float sum = 0, slope_product = 0;
          if (head < rotated_heads)
            for_each_pair<kPairs>(thread % kWarpSize, forward.dim, [&](unsigned k, int i) {
              const auto cos_low = load<float, 2>(cos + i), cos_high = load<float, 2>(cos + half + i);
              const auto sin_low = load<float, 2>(sin + i), sin_high = load<float, 2>(sin + half + i);
              ECHO_TRAINING_UNROLL
              for (unsigned j = 0; j < 2; ++j) {
                // A gradient passes back through a rotation by the transpose; in place.
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
          if (head >= all_heads) continue;
          const bool is_query = head < forward.heads;
          const T* const norm = head >= rotated_heads ? nullptr : is_query ? forward.q_norm : forward.k_norm;
          T* const x_slope = job.x_slope + (token * all_heads + head) * forward.dim;
          const float dim = static_cast<float>(forward.dim),
                      scale = inverse_root(squares[n][thread] / dim + forward.eps);
          const float x_factor = scale * scale * scale * slope_products[n][thread] / dim;
          for_each_pair<kPairs>(thread % kWarpSize, forward.dim, [&](unsigned k, int i) {
            Pack<T, 2> low, high;
            ECHO_TRAINING_UNROLL
            for (unsigned j = 0; j < 2; ++j) {
              float da = slopes[n][thread].low[k][j], db = slopes[n][thread].high[k][j];
              if (norm) {
                const float a = widen(values[n][thread].low[k].values[j]),
                            b = widen(values[n][thread].high[k].values[j]);
                // Two branches, because a reference to one of the sums would keep them out of registers.
                if (is_query) {
                  q_sums[thread].low[k][j] += da * (a * scale);
                  q_sums[thread].high[k][j] += db * (b * scale);
                } else {
                  k_sums[thread].low[k][j] += da * (a * scale);
                  k_sums[thread].high[k][j] += db * (b * scale);
                }
                da = scale * (da * widen(norm[i + j])) - x_factor * a;
                db = scale * (db * widen(norm[half + i + j])) - x_factor * b;
              }
              low.values[j] = narrow_to<T>(da);
              high.values[j] = narrow_to<T>(db);
            }
            store(x_slope + i, low);
            store(x_slope + half + i, high);
          });
        }
      });
    }
  }
  if (!forward.q_norm) return;
  // Adds the warps' sums one after the other, so that the order of additions is always the same.
  float* const shared = block.shared();  // [2 dim]
  block.each([&](unsigned thread) {
    for (int i = static_cast<int>(thread); i < 2 * forward.dim; i += kRotateThreads) shared[i] = 0;
  });
  for (unsigned warp = 0; warp < kRotateWarps; ++warp) {
    block.barrier();
    block.each([&](unsigned thread) {
      if (thread / kWarpSize != warp) return;
      for_each_pair<kPairs>(thread % kWarpSize, forward.dim, [&](unsigned k, int i) {
        ECHO_TRAINING_UNROLL
        for (unsigned j = 0; j < 2; ++j) {
          shared[i + j] += q_sums[thread].low[k][j];
          shared[half + i + j] += q_sums[thread].high[k][j];
          shared[forward.dim + i + j] += k_sums[thread].low[k][j];
          shared[forward.dim + half + i + j] += k_sums[thread].high[k][j];
        }
      });
    });
  }
  block.barrier();
  block.each([&](unsigned thread) {
    for (int i = static_cast<int>(thread); i < 2 * forward.dim; i += kRotateThreads)
      job.sums[index * 2 * forward.dim + i] = shared[i];
  });
}

// Copies row rows[r] of `source` to row r of `target`, for `count` rows of `width` values. The rows of `source` are
// `stride` values apart. Each head of `dim` values is repeated `repeats` times consecutively. All sizes are multiples
// of 16 bytes.
template <class T>
struct GatherJob {
  const T* source;
  T* target;
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
    const T* const source = job.source + job.rows[index] * job.stride;
    T* const target = job.target + index * job.width * job.repeats;
    for (int i = static_cast<int>(thread) * kValues; i < job.width; i += kStep) {
      const auto values = load<T, kValuesPerPack<T>>(source + i);
      const int head = i / job.dim, value_in_head = i - head * job.dim;
      for (int r = 0; r < job.repeats; ++r) store(target + (head * job.repeats + r) * job.dim + value_in_head, values);
    }
  });
}

// ---- the gate ----

// Computes `out` from gate and up, or their gradients from `slope`, that of `out`. Rows have `width` values. Rows of
// gate, up and their slopes are `stride` values apart. Widths, strides and addresses are multiples of 16 bytes.
template <class T>
struct GateJob {
  const T *gate, *up;
  const T* slope;  // of `out`, dense; backward only
  T* out;          // dense; forward only
  T *gate_slope, *up_slope;
  std::int64_t rows, width, stride;
};

constexpr unsigned kGateThreads = 256;

// Calls f(dense, strided) with the offsets of the thread's kValuesPerPack values in dense and in strided tensors.
template <class T, class F>
ECHO_TRAINING_DEVICE void for_gate_values(const GateJob<T>& job, std::int64_t index, unsigned thread, const F& f) {
  const std::int64_t offset = (index * kGateThreads + thread) * kValuesPerPack<T>;
  if (offset >= job.rows * job.width) return;
  const std::int64_t row = offset / job.width;
  f(offset, row * job.stride + offset - row * job.width);
}

// out = narrow_to(gate * sigmoid(gate)) * up
template <class T, class Block>
ECHO_TRAINING_DEVICE void gate_part(Block& block, const GateJob<T>& job, std::int64_t index) {
  constexpr unsigned kValues = kValuesPerPack<T>;
  block.each([&](unsigned thread) {
    for_gate_values(job, index, thread, [&](std::int64_t dense, std::int64_t strided) {
      auto g = load<T, kValues>(job.gate + strided);
      const auto u = load<T, kValues>(job.up + strided);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kValues; ++i) {
        const float x = widen(g.values[i]);
        g.values[i] = narrow_to<T>(round_to<T>(x / (1 + exponential<T>(-x))) * widen(u.values[i]));
      }
      store(job.out + dense, g);
    });
  });
}

template <class T, class Block>
ECHO_TRAINING_DEVICE void gate_backward_part(Block& block, const GateJob<T>& job, std::int64_t index) {
  constexpr unsigned kValues = kValuesPerPack<T>;
  block.each([&](unsigned thread) {
    for_gate_values(job, index, thread, [&](std::int64_t dense, std::int64_t strided) {
      auto g = load<T, kValues>(job.gate + strided), u = load<T, kValues>(job.up + strided);
      const auto d = load<T, kValues>(job.slope + dense);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kValues; ++i) {
        // The derivative of x * sigmoid(x) is sigmoid(x) * (1 + x * (1 - sigmoid(x))).
        const float x = widen(g.values[i]), slope = widen(d.values[i]), sigmoid = 1 / (1 + exponential<T>(-x));
        g.values[i] = narrow_to<T>(slope * widen(u.values[i]) * sigmoid * (1 + x * (1 - sigmoid)));
        u.values[i] = narrow_to<T>(slope * round_to<T>(x * sigmoid));
      }
      store(job.gate_slope + strided, g);
      store(job.up_slope + strided, u);
    });
  });
}

// ---- softmax over the vocabulary ----

// For each row of logits [rows, width], writes the log-probability of its target under softmax(logits * scale), the
// entropy, and the logarithm of the softmax's denominator. The backward kernel replaces the logits by their gradients,
// which are slope * scale * (onehot - probability); onehot is 1 at the target, otherwise 0.
template <class T>
struct ScoreJob {
  T* logits;
  const std::int64_t* targets;
  float *logprobs, *entropies, *log_sums;
  const float* slopes;  // backward only
  std::int64_t rows, width;
  float scale;
  bool aligned;  // addresses and lengths of rows are multiples of 16 bytes
};

constexpr unsigned kScoreThreads = 512;

// Calls f(pack, offset) for the thread's values of the row. A pack has kValuesPerPack values if `aligned`, otherwise
// one.
template <class T, class F>
ECHO_TRAINING_DEVICE void for_row_values(const T* row, std::int64_t width, bool aligned, unsigned thread, const F& f) {
  constexpr unsigned kValues = kValuesPerPack<T>;
  if (aligned)
    for (std::int64_t offset = thread * kValues; offset < width; offset += kScoreThreads * kValues)
      f(load<T, kValues>(row + offset), offset);
  else
    for (std::int64_t offset = thread; offset < width; offset += kScoreThreads) f(load<T, 1>(row + offset), offset);
}

template <class T, class Block>
ECHO_TRAINING_DEVICE void score_row(Block& block, const ScoreJob<T>& job, std::int64_t row) {
  typename Block::template Local<float> row_max, thread_max, sums, weighted_sums;
  const T* const logits = job.logits + row * job.width;
  block.each([&](unsigned thread) {
    float max_logit = -INFINITY, sum = 0, weighted_sum = 0;  // sums of exp(x - max_logit) and of x exp(x - max_logit)
    const auto add_values = [&](const auto& pack, std::int64_t) {
      constexpr unsigned kCount = sizeof(pack) / sizeof(T);
      float x[kCount], pack_max = -INFINITY;
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kCount; ++i) {
        x[i] = widen(pack.values[i]) * job.scale;
        pack_max = x[i] > pack_max ? x[i] : pack_max;
      }
      if (pack_max > max_logit) {  // the sums so far are relative to the old maximum
        const float rescale = exponential<T>(max_logit - pack_max);
        sum *= rescale;
        weighted_sum *= rescale;
        max_logit = pack_max;
      }
      if (max_logit == -INFINITY) return;  // the values add nothing, and the difference below would be NaN
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kCount; ++i) {
        const float e = exponential<T>(x[i] - max_logit);
        sum += e;
        weighted_sum += x[i] == -INFINITY ? 0.0f : x[i] * e;  // -INFINITY * 0 would be NaN
      }
    };
    for_row_values(logits, job.width, job.aligned, thread, add_values);
    row_max[thread] = thread_max[thread] = max_logit;
    sums[thread] = sum;
    weighted_sums[thread] = weighted_sum;
  });
  block.block_max(row_max);
  block.each([&](unsigned thread) {
    // A thread whose values are all -INFINITY has sums of 0. The difference could be NaN then.
    const float rescale = thread_max[thread] == -INFINITY ? 0.0f : exponential<T>(thread_max[thread] - row_max[thread]);
    sums[thread] *= rescale;
    weighted_sums[thread] *= rescale;
  });
  block.block_sum(sums);
  block.block_sum(weighted_sums);
  block.each([&](unsigned thread) {
    if (thread != 0) return;
    const float log_sum = row_max[thread] + logf(sums[thread]);
    job.log_sums[row] = log_sum;
    job.logprobs[row] = widen(logits[job.targets[row]]) * job.scale - log_sum;
    job.entropies[row] = log_sum - weighted_sums[thread] / sums[thread];  // log_sum minus the expected x
  });
}

template <class T, class Block>
ECHO_TRAINING_DEVICE void score_backward_row(Block& block, const ScoreJob<T>& job, std::int64_t row) {
  T* const logits = job.logits + row * job.width;
  const float log_sum = job.log_sums[row], slope = job.slopes[row] * job.scale;
  const std::int64_t target = job.targets[row];
  block.each([&](unsigned thread) {
    for_row_values(logits, job.width, job.aligned, thread, [&](auto pack, std::int64_t offset) {
      constexpr unsigned kCount = sizeof(pack) / sizeof(T);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kCount; ++i) {
        const float p = exponential<T>(widen(pack.values[i]) * job.scale - log_sum);
        pack.values[i] = narrow_to<T>(slope * ((offset + i == target ? 1.0f : 0.0f) - p));
      }
      store(logits + offset, pack);
    });
  });
}

}  // namespace echoline::model::training
