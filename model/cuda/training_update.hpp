// Device code of the optimizer: the work of one block of threads in an update of all tensors. Internal to model/.
#pragma once
#include "model/cuda/training_values.hpp"

namespace echoline::model::training {

constexpr unsigned kValueBlock = 256;  // values that share a scale, and that a warp updates together
constexpr unsigned kUpdateThreads = 256, kUpdateWarps = kUpdateThreads / kWarpSize;
constexpr unsigned kLaneValues = kValueBlock / kWarpSize;  // of a block of values, per thread
constexpr std::int64_t kValueBlocksPerWarp = 4;            // blocks of values that a warp updates one after the other
constexpr std::int64_t kUpdatePart = kValueBlocksPerWarp * kUpdateWarps * kValueBlock;  // values per block of threads

// A tensor of the optimizer. Each block of threads processes one part of a tensor: kUpdatePart values.
struct UpdateEntry {
  void* parameter;  // Bf16 or float, holding bf16 values
  float* master;
  void *moment1, *moment2;         // both float; or, if there are scales, int8_t and uint8_t
  float *scale1, *scale2;          // one per kValueBlock values, or null
  float* gradient;                 // null: zeros
  const Bf16* new_gradient;        // for AddJob, which adds it to `gradient`
  std::int64_t count, first_part;  // number of values; index of its first part among the parts of all tensors
  // Flags. decays: weight decay applies. replaces: AddJob stores new_gradient instead of adding it, because `gradient`
  // holds no values yet. aligned: all addresses are multiples of 16 bytes.
  std::uint32_t parameter_is_fp32, decays, replaces, aligned;
};

struct UpdateJob {
  const UpdateEntry* entries;
  std::int64_t entry_count, part_count;
  // kValueBlock random numbers in [0, 1), for rounding 8-bit moments: floor(x + threshold) rounds up with a probability
  // equal to x's fraction. Null without scales.
  const float* thresholds;
  float clip;  // gradients are multiplied by it, unless it is 1 or more
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  // AdamW corrects its moments by correctionN = 1 - betaN^step (N = 1, 2). The inverse is 1 / correction2.
  float inverse_correction2, epsilon;
  float decay_factor;  // 1 - rate * weight decay
  float step_factor;   // -rate / correction1
};

// The entry whose tensor has the part: the last one whose first_part is at most `part`.
ECHO_TRAINING_DEVICE const UpdateEntry& entry_of(const UpdateEntry* entries, std::int64_t count, std::int64_t part) {
  std::int64_t low = 0, high = count;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (entries[middle].first_part <= part ? low : high) = middle;
  }
  return entries[low];
}

// Index in the tensor of the lane's i-th value. A warp processes [begin, begin + kValueBlock); each lane has
// kLaneValues of these values, in groups of four, so that neighbouring lanes access neighbouring memory.
ECHO_TRAINING_DEVICE std::int64_t index_of(unsigned lane, unsigned i, std::int64_t begin) {
  return begin + (i / 4 * kWarpSize + lane) * 4 + i % 4;
}
// Calls f(i) for the lane's values before `end`.
template <class F>
ECHO_TRAINING_DEVICE void for_lane_values(unsigned lane, std::int64_t begin, std::int64_t end, const F& f) {
  ECHO_TRAINING_UNROLL
  for (unsigned i = 0; i < kLaneValues; ++i)
    if (index_of(lane, i, begin) < end) f(i);
}
// Loads the lane's values as floats, padded with zeros. `whole_and_aligned`: all values of the block exist, at
// addresses that are multiples of 16 bytes, so that four are loaded at once.
template <class T>
ECHO_TRAINING_DEVICE void load_lane(const T* source, unsigned lane, std::int64_t begin, std::int64_t end,
                                    bool whole_and_aligned, float (&values)[kLaneValues]) {
  const auto as_float = [](auto value) {
    if constexpr (sizeof(value) == 2)  // Bf16
      return widen(value);
    else
      return static_cast<float>(value);
  };
  if (whole_and_aligned) {
    ECHO_TRAINING_UNROLL
    for (unsigned i = 0; i < kLaneValues; i += 4) {
      const auto four = load<T, 4>(source + index_of(lane, i, begin));
      ECHO_TRAINING_UNROLL
      for (unsigned j = 0; j < 4; ++j) values[i + j] = as_float(four.values[j]);
    }
    return;
  }
  ECHO_TRAINING_UNROLL
  for (unsigned i = 0; i < kLaneValues; ++i) {
    const std::int64_t index = index_of(lane, i, begin);
    values[i] = index < end ? as_float(source[index]) : 0.0f;
  }
}
// Stores the lane's values in the places from which load_lane() loads. f converts each float to a T.
template <class T, class F>
ECHO_TRAINING_DEVICE void store_lane(T* target, unsigned lane, std::int64_t begin, std::int64_t end,
                                     bool whole_and_aligned, const float (&values)[kLaneValues], const F& f) {
  if (whole_and_aligned) {
    ECHO_TRAINING_UNROLL
    for (unsigned i = 0; i < kLaneValues; i += 4) {
      Pack<T, 4> four;
      ECHO_TRAINING_UNROLL
      for (unsigned j = 0; j < 4; ++j) four.values[j] = f(values[i + j]);
      store(target + index_of(lane, i, begin), four);
    }
    return;
  }
  for_lane_values(lane, begin, end, [&](unsigned i) { target[index_of(lane, i, begin)] = f(values[i]); });
}

// Largest 8-bit codes of the moments. The code of moment 1 grows with the square root of its magnitude, that of moment
// 2 with its fourth root, so that small values keep their precision.
constexpr float kCode1Max = 127, kCode2Max = 255;
constexpr float kScaleMin = 1e-30f;  // avoids division by zero

struct LaneValues {
  float m[kLaneValues], v[kLaneValues];  // first and second moments
};

// One update as defined in learner/training/optimizer.hpp, with the roundings of libtorch's CUDA kernels.
template <class Block>
ECHO_TRAINING_DEVICE void update_part(Block& block, const UpdateJob& job, std::int64_t part) {
  const UpdateEntry& entry = entry_of(job.entries, job.entry_count, part);
  const std::int64_t first = (part - entry.first_part) * kUpdatePart, end = entry.count;
  const auto identity = [](float x) { return x; };
  for (std::int64_t k = 0; k < kValueBlocksPerWarp; ++k) {
    typename Block::template Local<LaneValues> values;
    typename Block::template Local<float> largest1, largest2;
    const auto begin_of = [&](unsigned thread) {  // of the warp's block of values
      return first + (k * kUpdateWarps + thread / kWarpSize) * static_cast<std::int64_t>(kValueBlock);
    };
    const auto is_whole_and_aligned = [&](std::int64_t begin) { return entry.aligned && begin + kValueBlock <= end; };
    block.each([&](unsigned thread) {
      const std::int64_t begin = begin_of(thread);
      largest1[thread] = largest2[thread] = 0;
      if (begin >= end) return;
      const unsigned lane = thread % kWarpSize;
      const bool whole_and_aligned = is_whole_and_aligned(begin);
      float g[kLaneValues] = {}, master[kLaneValues];
      float(&m)[kLaneValues] = values[thread].m;
      float(&v)[kLaneValues] = values[thread].v;
      load_lane(entry.master, lane, begin, end, whole_and_aligned, master);
      if (entry.gradient) load_lane(entry.gradient, lane, begin, end, whole_and_aligned, g);
      if (entry.scale1) {
        load_lane(static_cast<const std::int8_t*>(entry.moment1), lane, begin, end, whole_and_aligned, m);
        load_lane(static_cast<const std::uint8_t*>(entry.moment2), lane, begin, end, whole_and_aligned, v);
        const float s1 = entry.scale1[begin / kValueBlock], s2 = entry.scale2[begin / kValueBlock];
        ECHO_TRAINING_UNROLL
        for (unsigned i = 0; i < kLaneValues; ++i) {
          // Decodes: moment 1 is the signed square of its code, moment 2 the fourth power.
          const float a = times(m[i], 1.0f / kCode1Max), b = times(v[i], 1.0f / kCode2Max), square = times(b, b);
          m[i] = times(times(a, fabsf(a)), s1);
          v[i] = times(times(square, square), s2);
        }
      } else {
        load_lane(static_cast<const float*>(entry.moment1), lane, begin, end, whole_and_aligned, m);
        load_lane(static_cast<const float*>(entry.moment2), lane, begin, end, whole_and_aligned, v);
      }
      float max1 = 0, max2 = 0;
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kLaneValues; ++i) {
        if (job.clip < 1) g[i] = times(g[i], job.clip);
        m[i] = multiply_add(job.one_minus_beta1, g[i], times(m[i], job.beta1));
        v[i] = multiply_add(job.one_minus_beta2, times(g[i], g[i]), times(v[i], job.beta2));
        const float denominator = plus(root(times(v[i], job.inverse_correction2)), job.epsilon);
        if (entry.decays) master[i] = times(master[i], job.decay_factor);
        master[i] = multiply_add(job.step_factor, divide(m[i], denominator), master[i]);
        max1 = fabsf(m[i]) > max1 ? fabsf(m[i]) : max1;
        max2 = v[i] > max2 ? v[i] : max2;
      }
      store_lane(entry.master, lane, begin, end, whole_and_aligned, master, identity);
      if (entry.parameter_is_fp32)
        store_lane(static_cast<float*>(entry.parameter), lane, begin, end, whole_and_aligned, master,
                   [](float x) { return round_to<Bf16>(x); });
      else
        store_lane(static_cast<Bf16*>(entry.parameter), lane, begin, end, whole_and_aligned, master,
                   [](float x) { return narrow_to<Bf16>(x); });
      if (!entry.scale1) {
        store_lane(static_cast<float*>(entry.moment1), lane, begin, end, whole_and_aligned, m, identity);
        store_lane(static_cast<float*>(entry.moment2), lane, begin, end, whole_and_aligned, v, identity);
      }
      largest1[thread] = max1;
      largest2[thread] = max2;
    });
    if (!entry.scale1) continue;
    // Encodes the moments in 8 bits, relative to the block's largest values, which become its scales.
    block.warp_max(largest1);
    block.warp_max(largest2);
    block.each([&](unsigned thread) {
      const std::int64_t begin = begin_of(thread);
      if (begin >= end) return;
      const unsigned lane = thread % kWarpSize;
      const float s1 = largest1[thread], s2 = largest2[thread];
      if (lane == 0) {
        entry.scale1[begin / kValueBlock] = s1;
        entry.scale2[begin / kValueBlock] = s2;
      }
      float(&m)[kLaneValues] = values[thread].m;
      float(&v)[kLaneValues] = values[thread].v;
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kLaneValues; ++i) {
        const float share1 = divide(m[i], s1 > kScaleMin ? s1 : kScaleMin),
                    share2 = divide(v[i], s2 > kScaleMin ? s2 : kScaleMin);
        const float threshold = job.thresholds[index_of(lane, i, /*begin=*/0)];
        const float sign = share1 > 0 ? 1.0f : share1 < 0 ? -1.0f : 0.0f;
        const float code1 = floorf(plus(times(times(sign, root(fabsf(share1))), kCode1Max), threshold));
        float code2 = floorf(plus(times(root(root(share2)), kCode2Max), threshold));
        m[i] = code1 < -kCode1Max ? -kCode1Max : code1 > kCode1Max ? kCode1Max : code1;
        code2 = code2 < 0 ? 0.0f : code2 > kCode2Max ? kCode2Max : code2;
        // A positive second moment must not become 0, because the step is divided by its root.
        v[i] = share2 > 0 && code2 < 1 ? 1.0f : code2;
      }
      store_lane(static_cast<std::int8_t*>(entry.moment1), lane, begin, end, is_whole_and_aligned(begin), m,
                 [](float x) { return static_cast<std::int8_t>(x); });
      store_lane(static_cast<std::uint8_t*>(entry.moment2), lane, begin, end, is_whole_and_aligned(begin), v,
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
      for (std::int64_t k = 0; k < kValueBlocksPerWarp; ++k) {
        const std::int64_t begin =
            first + (k * kUpdateWarps + thread / kWarpSize) * static_cast<std::int64_t>(kValueBlock);
        if (begin >= entry.count) break;
        float g[kLaneValues], squares = 0;
        load_lane(entry.gradient, thread % kWarpSize, begin, entry.count,
                  entry.aligned && begin + kValueBlock <= entry.count, g);
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

// Adds new bf16 gradients to fp32 sums, or stores them as the first sums (UpdateEntry::replaces).
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
    for (std::int64_t k = 0; k < kValueBlocksPerWarp; ++k) {
      const std::int64_t begin =
          first + (k * kUpdateWarps + thread / kWarpSize) * static_cast<std::int64_t>(kValueBlock);
      if (begin >= entry.count) return;
      const bool whole_and_aligned = entry.aligned && begin + kValueBlock <= entry.count;
      float added[kLaneValues], sum[kLaneValues] = {};
      load_lane(entry.new_gradient, lane, begin, entry.count, whole_and_aligned, added);
      if (!entry.replaces) load_lane(entry.gradient, lane, begin, entry.count, whole_and_aligned, sum);
      ECHO_TRAINING_UNROLL
      for (unsigned i = 0; i < kLaneValues; ++i) sum[i] = entry.replaces ? added[i] : plus(sum[i], added[i]);
      store_lane(entry.gradient, lane, begin, entry.count, whole_and_aligned, sum, [](float x) { return x; });
    }
  });
}

}  // namespace echoline::model::training
