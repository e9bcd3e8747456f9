// Device code of the optimizer: the work of one block of threads in an update of all tensors. Internal to model/.
#pragma once
#include "model/cuda/training_values.hpp"

namespace echoline::model::training {

constexpr unsigned kUpdateBlock = 256;  // values that share a scale and are updated by one warp
constexpr unsigned kUpdateThreads = 256, kUpdateWarps = kUpdateThreads / kWarpSize;
constexpr unsigned kLaneValues = kUpdateBlock / kWarpSize;
constexpr std::int64_t kUpdateBlocks = 4;  // updated by a warp, one after the other
constexpr std::int64_t kUpdatePart = kUpdateBlocks * kUpdateWarps * kUpdateBlock;  // values per block of threads

// A tensor of the optimizer. Each block of threads processes kUpdatePart values of one tensor.
struct UpdateEntry {
  void* parameter;  // Bf16 or float, holding bf16 values
  float* master;
  void *moment1, *moment2;  // float; with scales int8_t and uint8_t
  float *scale1, *scale2;   // one per kUpdateBlock values, or null
  float* gradient;          // null: zeros
  const Bf16* fresh;        // for AddJob: added to `gradient`
  std::int64_t count, first_part;
  // The parameter is float; it decays; for AddJob: `gradient` is unset so far; all addresses are multiples of 16 bytes.
  std::uint32_t wide, decays, replaces, packed;
};

struct UpdateJob {
  const UpdateEntry* entries;
  std::int64_t entry_count, part_count;
  const float* thresholds;                         // [kUpdateBlock], for scales
  float clip;                                      // factor of gradients; 1 or more: no clipping
  float beta1, rest1, beta2, rest2;                // rest: 1 - beta
  float inverse_correction2, epsilon, keep, step;  // keep: 1 - rate * decay; step: -rate / correction1
};

// The entry of a part: the last one whose first part is at most `part`.
ECHO_TRAINING_DEVICE const UpdateEntry& entry_of(const UpdateEntry* entries, std::int64_t count, std::int64_t part) {
  std::int64_t low = 0, high = count;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (entries[middle].first_part <= part ? low : high) = middle;
  }
  return entries[low];
}

// Index of the lane's value `i`. A warp processes [begin, begin + kUpdateBlock); each lane has kLaneValues of them, in
// groups of four.
ECHO_TRAINING_DEVICE std::int64_t index_of(unsigned lane, unsigned i, std::int64_t begin) {
  return begin + (i / 4 * kWarpSize + lane) * 4 + i % 4;
}
// Calls f(i) for the lane's values before `end`.
template <class F>
ECHO_TRAINING_DEVICE void over_lane(unsigned lane, std::int64_t begin, std::int64_t end, const F& f) {
  ECHO_TRAINING_UNROLL
  for (unsigned i = 0; i < kLaneValues; ++i)
    if (index_of(lane, i, begin) < end) f(i);
}
// The lane's values as floats, padded with zeros. `packed`: all exist, at addresses that are multiples of 16 bytes.
template <class T>
ECHO_TRAINING_DEVICE void load_lane(const T* from, unsigned lane, std::int64_t begin, std::int64_t end, bool packed,
                                    float (&to)[kLaneValues]) {
  const auto as_float = [](auto value) {
    if constexpr (sizeof(value) == 2)
      return widen(value);
    else
      return static_cast<float>(value);
  };
  if (packed) {
    ECHO_TRAINING_UNROLL
    for (unsigned i = 0; i < kLaneValues; i += 4) {
      const auto four = load<T, 4>(from + index_of(lane, i, begin));
      ECHO_TRAINING_UNROLL
      for (unsigned j = 0; j < 4; ++j) to[i + j] = as_float(four.values[j]);
    }
    return;
  }
  ECHO_TRAINING_UNROLL
  for (unsigned i = 0; i < kLaneValues; ++i) {
    const std::int64_t at = index_of(lane, i, begin);
    to[i] = at < end ? as_float(from[at]) : 0.0f;
  }
}
// The inverse; f converts each float.
template <class T, class F>
ECHO_TRAINING_DEVICE void store_lane(T* to, unsigned lane, std::int64_t begin, std::int64_t end, bool packed,
                                     const float (&from)[kLaneValues], const F& f) {
  if (packed) {
    ECHO_TRAINING_UNROLL
    for (unsigned i = 0; i < kLaneValues; i += 4) {
      Pack<T, 4> four;
      ECHO_TRAINING_UNROLL
      for (unsigned j = 0; j < 4; ++j) four.values[j] = f(from[i + j]);
      store(to + index_of(lane, i, begin), four);
    }
    return;
  }
  over_lane(lane, begin, end, [&](unsigned i) { to[index_of(lane, i, begin)] = f(from[i]); });
}

// Largest codes of the moments in 8 bits. The code of moment 1 grows with its square root, that of moment 2 with its
// fourth root, so that small values keep their precision.
constexpr float kCode1Max = 127, kCode2Max = 255;

struct LaneValues {
  float m[kLaneValues], v[kLaneValues];
};

// One update as defined in learner/training/optimizer.hpp, with the roundings of libtorch's CUDA kernels.
template <class Block>
ECHO_TRAINING_DEVICE void update_part(Block& block, const UpdateJob& job, std::int64_t part) {
  const UpdateEntry& entry = entry_of(job.entries, job.entry_count, part);
  const std::int64_t first = (part - entry.first_part) * kUpdatePart, end = entry.count;
  const auto identity = [](float x) { return x; };
  for (std::int64_t k = 0; k < kUpdateBlocks; ++k) {
    typename Block::template Local<LaneValues> values;
    typename Block::template Local<float> top1, top2;
    const auto begin_of = [&](unsigned thread) {
      return first + (k * kUpdateWarps + thread / kWarpSize) * static_cast<std::int64_t>(kUpdateBlock);
    };
    const auto packed_at = [&](std::int64_t begin) { return entry.packed && begin + kUpdateBlock <= end; };
    block.each([&](unsigned thread) {
      const std::int64_t begin = begin_of(thread);
      top1[thread] = top2[thread] = 0;
      if (begin >= end) return;
      const unsigned lane = thread % kWarpSize;
      const bool packed = packed_at(begin);
      float g[kLaneValues] = {}, master[kLaneValues];
      float(&m)[kLaneValues] = values[thread].m;
      float(&v)[kLaneValues] = values[thread].v;
      load_lane(entry.master, lane, begin, end, packed, master);
      if (entry.gradient) load_lane(entry.gradient, lane, begin, end, packed, g);
      if (entry.scale1) {
        load_lane(static_cast<const std::int8_t*>(entry.moment1), lane, begin, end, packed, m);
        load_lane(static_cast<const std::uint8_t*>(entry.moment2), lane, begin, end, packed, v);
        const float s1 = entry.scale1[begin / kUpdateBlock], s2 = entry.scale2[begin / kUpdateBlock];
        ECHO_TRAINING_UNROLL
        for (unsigned i = 0; i < kLaneValues; ++i) {
          const float a = times(m[i], 1.0f / kCode1Max), b = times(v[i], 1.0f / kCode2Max), square = times(b, b);
          m[i] = times(times(a, fabsf(a)), s1);
          v[i] = times(times(square, square), s2);
        }
      } else {
        load_lane(static_cast<const float*>(entry.moment1), lane, begin, end, packed, m);
        load_lane(static_cast<const float*>(entry.moment2), lane, begin, end, packed, v);
      }
      float max1 = 0, max2 = 0;
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kLaneValues; ++i) {
        if (job.clip < 1) g[i] = times(g[i], job.clip);
        m[i] = multiply_add(job.rest1, g[i], times(m[i], job.beta1));
        v[i] = multiply_add(job.rest2, times(g[i], g[i]), times(v[i], job.beta2));
        const float denominator = plus(root(times(v[i], job.inverse_correction2)), job.epsilon);
        if (entry.decays) master[i] = times(master[i], job.keep);
        master[i] = multiply_add(job.step, over(m[i], denominator), master[i]);
        max1 = fabsf(m[i]) > max1 ? fabsf(m[i]) : max1;
        max2 = v[i] > max2 ? v[i] : max2;
      }
      store_lane(entry.master, lane, begin, end, packed, master, identity);
      if (entry.wide)
        store_lane(static_cast<float*>(entry.parameter), lane, begin, end, packed, master,
                   [](float x) { return rounded<Bf16>(x); });
      else
        store_lane(static_cast<Bf16*>(entry.parameter), lane, begin, end, packed, master,
                   [](float x) { return narrowed<Bf16>(x); });
      if (!entry.scale1) {
        store_lane(static_cast<float*>(entry.moment1), lane, begin, end, packed, m, identity);
        store_lane(static_cast<float*>(entry.moment2), lane, begin, end, packed, v, identity);
      }
      top1[thread] = max1;
      top2[thread] = max2;
    });
    if (!entry.scale1) continue;
    block.warp_max(top1);
    block.warp_max(top2);
    block.each([&](unsigned thread) {
      const std::int64_t begin = begin_of(thread);
      if (begin >= end) return;
      const unsigned lane = thread % kWarpSize;
      const float s1 = top1[thread], s2 = top2[thread];
      if (lane == 0) {
        entry.scale1[begin / kUpdateBlock] = s1;
        entry.scale2[begin / kUpdateBlock] = s2;
      }
      float(&m)[kLaneValues] = values[thread].m;
      float(&v)[kLaneValues] = values[thread].v;
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kLaneValues; ++i) {
        const float share1 = over(m[i], s1 > 1e-30f ? s1 : 1e-30f), share2 = over(v[i], s2 > 1e-30f ? s2 : 1e-30f);
        const float threshold = job.thresholds[index_of(lane, i, 0)];
        const float sign = share1 > 0 ? 1.0f : share1 < 0 ? -1.0f : 0.0f;
        const float code1 = floorf(plus(times(times(sign, root(fabsf(share1))), kCode1Max), threshold));
        float code2 = floorf(plus(times(root(root(share2)), kCode2Max), threshold));
        m[i] = code1 < -kCode1Max ? -kCode1Max : code1 > kCode1Max ? kCode1Max : code1;
        code2 = code2 < 0 ? 0.0f : code2 > kCode2Max ? kCode2Max : code2;
        v[i] = share2 > 0 && code2 < 1 ? 1.0f : code2;
      }
      store_lane(static_cast<std::int8_t*>(entry.moment1), lane, begin, end, packed_at(begin), m,
                 [](float x) { return static_cast<std::int8_t>(x); });
      store_lane(static_cast<std::uint8_t*>(entry.moment2), lane, begin, end, packed_at(begin), v,
                 [](float x) { return static_cast<std::uint8_t>(x); });
    });
  }
}

// Writes the sum of squares of a part of the gradients to sums[part].
struct SquaresJob {
  const UpdateEntry* entries;
  std::int64_t entry_count, part_count;
  double* sums;
};

template <class Block>
ECHO_TRAINING_DEVICE void squares_part(Block& block, const SquaresJob& job, std::int64_t part) {
  const UpdateEntry& entry = entry_of(job.entries, job.entry_count, part);
  const std::int64_t first = (part - entry.first_part) * kUpdatePart;
  typename Block::template Local<double> sums;
  block.each([&](unsigned thread) {
    double sum = 0;
    if (entry.gradient)
      for (std::int64_t k = 0; k < kUpdateBlocks; ++k) {
        const std::int64_t begin =
            first + (k * kUpdateWarps + thread / kWarpSize) * static_cast<std::int64_t>(kUpdateBlock);
        if (begin >= entry.count) break;
        float g[kLaneValues], squares = 0;
        load_lane(entry.gradient, thread % kWarpSize, begin, entry.count,
                  entry.packed && begin + kUpdateBlock <= entry.count, g);
        ECHO_TRAINING_UNROLL
        for (unsigned i = 0; i < kLaneValues; ++i) squares += g[i] * g[i];
        sum += static_cast<double>(squares);
      }
    sums[thread] = sum;
  });
  block.block_sum(sums);
  block.each([&](unsigned thread) {
    if (thread == 0) job.sums[part] = sums[thread];
  });
}

// Adds new bf16 gradients to fp32 sums.
struct AddJob {
  const UpdateEntry* entries;
  std::int64_t entry_count, part_count;
};

template <class Block>
ECHO_TRAINING_DEVICE void add_part(Block& block, const AddJob& job, std::int64_t part) {
  const UpdateEntry& entry = entry_of(job.entries, job.entry_count, part);
  const std::int64_t first = (part - entry.first_part) * kUpdatePart;
  block.each([&](unsigned thread) {
    const unsigned lane = thread % kWarpSize;
    for (std::int64_t k = 0; k < kUpdateBlocks; ++k) {
      const std::int64_t begin =
          first + (k * kUpdateWarps + thread / kWarpSize) * static_cast<std::int64_t>(kUpdateBlock);
      if (begin >= entry.count) return;
      const bool packed = entry.packed && begin + kUpdateBlock <= entry.count;
      float fresh[kLaneValues], sum[kLaneValues] = {};
      load_lane(entry.fresh, lane, begin, entry.count, packed, fresh);
      if (!entry.replaces) load_lane(entry.gradient, lane, begin, entry.count, packed, sum);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kLaneValues; ++i) sum[i] = entry.replaces ? fresh[i] : plus(sum[i], fresh[i]);
      store_lane(entry.gradient, lane, begin, entry.count, packed, sum, [](float x) { return x; });
    }
  });
}

}  // namespace echoline::model::training
