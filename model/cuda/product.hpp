// Products of few rows with weights: device code as in block.hpp. Internal to this folder.
#pragma once
#include "model/cuda/block.hpp"

namespace echoline::model::cuda {

inline constexpr unsigned kProductThreads = 256;
inline constexpr unsigned kProductWarps = kProductThreads / kWarpThreads;
inline constexpr unsigned kTileOutputs = 8;    // outputs that a warp computes together
inline constexpr unsigned kGroupRows = 8;      // rows of x are handled in groups of this size
inline constexpr unsigned kStepInputs = 32;    // inputs that Block::multiply() processes, which is called a step
inline constexpr unsigned kStagePadding = 32;  // unused values after each row in shared memory, against bank conflicts

// out = x weight^T + bias + residual, rounded after the product and after each addition. With `second`, the product is
// called gated: out = silu(x weight^T) * (x second^T).
struct ProductJob {
  const Bf16* x;         // [rows, in]
  const Bf16* norm;      // [in]: weights of a norm of x before the product; or null
  const Bf16* weight;    // [outputs, in]
  const Bf16* second;    // [outputs, in], or null
  const Bf16* bias;      // [outputs], or null
  const Bf16* residual;  // [rows, outputs], or null; may be `out`
  Bf16* out;             // [rows, out_stride]
  std::uint32_t rows, in, outputs, out_stride;
  std::uint32_t parts;  // warps that share the inputs of a tile of outputs: 1, 2, 4 or 8
  float eps;
};

// A block's shared memory holds the sums of all warps and, with a norm, the stage: the normalised rows.
template <unsigned kGroups, bool kGated>
ECHO_EITHER std::size_t product_sums_bytes() {
  return sizeof(float) * kProductWarps * (kGated ? 2 : 1) * kGroups * kGroupRows * kTileOutputs;
}
inline std::size_t product_stage_bytes(unsigned rows, unsigned in) {
  return sizeof(Bf16) * std::size_t{rows} * (in + kStagePadding);
}

// The parameter kGroups of product_block(): the number of groups of kGroupRows rows, rounded up to 1, 2, 4 or 8.
inline unsigned product_groups(unsigned rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8; }
inline constexpr unsigned kProductRowsMax = 16;  // with more rows, libtorch's products are equally fast

// The value for ProductJob::parts: as many as give every processor enough warps.
inline unsigned product_parts(unsigned processors, unsigned in, unsigned outputs, bool gated) {
  const unsigned tiles = (outputs + kTileOutputs - 1) / kTileOutputs, steps = in / kStepInputs;
  const unsigned wanted_warps = processors * kProductWarps * (gated ? 2 : 1);
  unsigned parts = 1;
  while (parts < kProductWarps && 2 * parts <= steps && tiles * parts < wanted_warps) parts *= 2;
  return parts;
}

// Whether a product of this size supports ProductJob::norm: each block then normalises all rows and keeps them in its
// shared memory, which must be large enough.
inline bool product_can_norm(unsigned rows, unsigned in, bool gated) {
  // Every GPU with compute capability 8.0 or higher gives a block more than that.
  constexpr std::size_t kSharedBytesMax = 96 << 10;
  const std::size_t sums_bytes =
      sizeof(float) * kProductWarps * (gated ? 2 : 1) * product_groups(rows) * kGroupRows * kTileOutputs;
  return rows <= 16 && sums_bytes + product_stage_bytes(rows, in) <= kSharedBytesMax;
}

// The work of block `index` of `blocks`. In a round, a block computes tiles_per_round tiles of kTileOutputs outputs; it
// processes every blocks-th round. Requires kGroups * kGroupRows >= rows.
//
// In a warp, thread 4 g + t loads the weights of output g for inputs 8 t to 8 t + 7 of the 32 inputs of a step. It also
// loads these inputs of rows g and g + 8. The tensor cores expect the inputs in another order. The result is the same,
// because the order of the weights and of the rows' inputs is the same.
template <unsigned kGroups, bool kGated, class Block>
ECHO_DEVICE void product_block(Block& block, const ProductJob& job, unsigned index, unsigned blocks) {
  // A thread loads 8 vectors of weights ahead, with one weight or with two.
  constexpr unsigned kWeights = kGated ? 2 : 1, kStepsAhead = kGated ? 4 : 8, kRows = kGroups * kGroupRows;
  constexpr unsigned kGroupPairs = (kGroups + 1) / 2;  // Block::multiply() processes a pair of groups: 16 rows
  struct ThreadValues {
    Vector next_weights[kWeights][kStepsAhead];
    Vector low, high;                      // inputs of rows g and g + 8
    float sums[kGroupPairs][kWeights][4];  // of two outputs of row g, then of row g + 8
    float square_sum;
  };
  typename Block::template Local<ThreadValues> locals;
  float* const shared_sums = block.template shared<float>();  // [warp][kWeights][kRows][kTileOutputs]
  Bf16* const stage = reinterpret_cast<Bf16*>(shared_sums + product_sums_bytes<kGroups, kGated>() / sizeof(float));
  const unsigned stage_stride = job.in + kStagePadding;
  const unsigned steps = job.in / kStepInputs, tiles = (job.outputs + kTileOutputs - 1) / kTileOutputs;
  const unsigned tiles_per_round = kProductWarps / job.parts;
  // A warp's share of the steps, in groups of kStepsAhead steps, whose weights are loaded in advance.
  const unsigned step_groups = ((steps + job.parts - 1) / job.parts + kStepsAhead - 1) / kStepsAhead;

  // Loads the weights for a group of steps of the warp's tile in the round that begins with `first_tile`.
  const auto load = [&](unsigned thread, unsigned first_tile, unsigned step_group) {
    ThreadValues& self = locals[thread];
    const unsigned warp = thread / kWarpThreads, lane = thread % kWarpThreads, part = warp % job.parts;
    const unsigned tile = first_tile + warp / job.parts;
    // A tile may have places beyond the last output. They load the last output's weights, and are not written.
    const unsigned output = min_of(tile * kTileOutputs + lane / 4, job.outputs - 1);
    const unsigned begin = part * steps / job.parts + step_group * kStepsAhead, end = (part + 1) * steps / job.parts;
    const std::size_t offset =
        static_cast<std::size_t>(output) * job.in + begin * kStepInputs + lane % 4 * kVectorCount;
    ECHO_UNROLL
    for (unsigned i = 0; i < kStepsAhead; ++i) {
      const bool has_input = begin + i < end && tile < tiles;
      self.next_weights[0][i] = has_input ? load_once(job.weight + offset + i * kStepInputs) : Vector{};
      if constexpr (kGated)
        self.next_weights[1][i] = has_input ? load_once(job.second + offset + i * kStepInputs) : Vector{};
    }
  };

  block.on_each_thread([&](unsigned thread) { load(thread, index * tiles_per_round, /*step_group=*/0); });
  block.wait_for_inputs();

  // Writes the normalised rows to `stage`.
  if (job.norm != nullptr) {
    ECHO_UNROLL
    for (unsigned group = 0; group < kGroups; ++group) {
      if (group * kGroupRows >= job.rows) break;
      static_assert(kProductWarps == kGroupRows, "a warp norms one row of each group");
      const auto row_of = [&](unsigned thread) { return group * kGroupRows + thread / kWarpThreads; };
      // Calls use(offset, vector) for the thread's vectors of the row. Loads kBatch of them before it uses one, so that
      // the loads do not wait for each other.
      const auto for_each_vector = [&](unsigned thread, const auto& use) {
        constexpr unsigned kStep = kWarpThreads * kVectorCount, kBatch = 4;
        const Bf16* const row_start = job.x + static_cast<std::size_t>(row_of(thread)) * job.in;
        for (unsigned first = thread % kWarpThreads * kVectorCount; first < job.in; first += kBatch * kStep) {
          Vector v[kBatch];
          ECHO_UNROLL
          for (unsigned i = 0; i < kBatch; ++i)
            v[i] = first + i * kStep < job.in ? load_vector(row_start + first + i * kStep) : Vector{};
          ECHO_UNROLL
          for (unsigned i = 0; i < kBatch; ++i)
            if (first + i * kStep < job.in) use(first + i * kStep, v[i]);
        }
      };
      block.on_each_thread([&](unsigned thread) {
        float sum = 0;
        if (row_of(thread) < job.rows)
          for_each_vector(thread, [&](unsigned, const Vector& v) { sum += square_sum(v); });
        locals[thread].square_sum = sum;
      });
      block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return locals[thread].square_sum; });
      block.on_each_thread([&](unsigned thread) {
        const unsigned row = row_of(thread);
        if (row >= job.rows) return;
        const float scale = reciprocal_root(locals[thread].square_sum / static_cast<float>(job.in) + job.eps);
        for_each_vector(thread, [&](unsigned offset, const Vector& v) {
          store_vector(stage + row * stage_stride + offset, normalise(v, load_vector(job.norm + offset), scale));
        });
      });
    }
    block.on_each_thread_and_wait([](unsigned) {});  // only waits, until `stage` is complete
  }
  const Bf16* const x = job.norm != nullptr ? stage : job.x;
  const unsigned x_stride = job.norm != nullptr ? stage_stride : job.in;

  for (unsigned first_tile = index * tiles_per_round; first_tile < tiles; first_tile += blocks * tiles_per_round) {
    block.on_each_thread([&](unsigned thread) {
      ECHO_UNROLL
      for (unsigned m = 0; m < kGroupPairs; ++m) ECHO_UNROLL
      for (unsigned w = 0; w < kWeights; ++w) ECHO_UNROLL
      for (unsigned i = 0; i < 4; ++i) locals[thread].sums[m][w][i] = 0;
    });
    for (unsigned step_group = 0; step_group < step_groups; ++step_group) {
      ECHO_UNROLL
      for (unsigned i = 0; i < kStepsAhead; ++i) {
        ECHO_UNROLL
        for (unsigned m = 0; m < kGroupPairs; ++m) {
          block.on_each_thread([&](unsigned thread) {
            ThreadValues& self = locals[thread];
            const unsigned lane = thread % kWarpThreads, part = thread / kWarpThreads % job.parts;
            const unsigned step = part * steps / job.parts + step_group * kStepsAhead + i;
            const bool has_input = step < (part + 1) * steps / job.parts;
            const unsigned row = m * 16 + lane / 4;
            const Bf16* const inputs =
                x + static_cast<std::size_t>(row) * x_stride + step * kStepInputs + lane % 4 * kVectorCount;
            self.low = has_input && row < job.rows ? load_vector(inputs) : Vector{};
            self.high = kGroups > 1 && has_input && row + 8 < job.rows ? load_vector(inputs + std::size_t{8} * x_stride)
                                                                       : Vector{};
          });
          ECHO_UNROLL
          for (unsigned w = 0; w < kWeights; ++w)
            block.multiply([&](unsigned thread) -> float* { return locals[thread].sums[m][w]; },
                           [&](unsigned thread) -> const Vector& { return locals[thread].low; },
                           [&](unsigned thread) -> const Vector& { return locals[thread].high; },
                           [&](unsigned thread) -> const Vector& { return locals[thread].next_weights[w][i]; });
        }
      }
      // Loads the weights for the next group of steps, or for the first group of the next round.
      block.on_each_thread([&](unsigned thread) {
        if (step_group + 1 < step_groups) {
          load(thread, first_tile, step_group + 1);
        } else if (first_tile + blocks * tiles_per_round < tiles) {
          load(thread, first_tile + blocks * tiles_per_round, /*step_group=*/0);
        }
      });
    }
    // Adds the sums of the warps that share a tile, and writes the outputs.
    block.on_each_thread_and_wait([&](unsigned thread) {
      const ThreadValues& self = locals[thread];
      const unsigned lane = thread % kWarpThreads, warp = thread / kWarpThreads;
      ECHO_UNROLL
      for (unsigned w = 0; w < kWeights; ++w) ECHO_UNROLL
      for (unsigned m = 0; m < kGroupPairs; ++m) {
        float* const target =
            shared_sums + ((warp * kWeights + w) * kRows + m * 16 + lane / 4) * kTileOutputs + lane % 4 * 2;
        target[0] = self.sums[m][w][0], target[1] = self.sums[m][w][1];
        if (kGroups > 1) {
          target[8 * kTileOutputs] = self.sums[m][w][2];
          target[8 * kTileOutputs + 1] = self.sums[m][w][3];
        }
      }
    });
    block.on_each_thread_and_wait([&](unsigned thread) {
      for (unsigned element = thread; element < tiles_per_round * kRows * kTileOutputs; element += Block::kThreads) {
        const unsigned row = element / kTileOutputs % kRows, tile_in_round = element / kTileOutputs / kRows;
        const unsigned output = (first_tile + tile_in_round) * kTileOutputs + element % kTileOutputs;
        if (row >= job.rows || output >= job.outputs) continue;
        const auto total = [&](unsigned w) {
          float sum = 0;
          for (unsigned part = 0; part < job.parts; ++part)
            sum += shared_sums[(((tile_in_round * job.parts + part) * kWeights + w) * kRows + row) * kTileOutputs +
                               element % kTileOutputs];
          return round_to_bf16(sum);
        };
        float value = total(0);
        if (job.bias != nullptr) value = round_to_bf16(value + to_float(job.bias[output]));
        if constexpr (kGated) value = gated_value(value, total(1));
        const std::size_t offset = static_cast<std::size_t>(row) * job.out_stride + output;
        if (job.residual != nullptr) value = to_float(job.residual[offset]) + value;
        job.out[offset] = to_bf16(value);
      }
    });
  }
}

}  // namespace echoline::model::cuda
