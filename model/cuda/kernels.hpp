// The device code of a decoding step: what one block does, written over a policy that stands for it. kernels.cu runs it
// with a policy of real threads; the tests run the same functions with one that loops over the threads on the CPU.
// C++17, because CUDA compilers lag behind. Internal to this folder.
//
// Values between two kernels are bf16, arithmetic is fp32, and roundings stand where libtorch's operations have them
// (model/training_ops), so that log-probabilities are those of a training pass.
//
// A policy `Block` of Block::kThreads threads has
//   Local<T>            a T of each thread, indexed by thread; registers on a device
//   own(f)              f(thread) on every thread; what f writes is read by the same thread alone
//   each(f)             the same, and all are done when it returns
//   sum<kWidth>(f)      replaces f(thread), a float&, by the sum over the kWidth neighbouring threads that it is among
//   largest<kWidth>(f)  the same with the largest instead of the sum
//   multiply(sums, low, high, weights)
//                       one product of 16 rows, 32 inputs and 8 outputs by each warp, see multiply_step()
//   arrive(counter, n)  for n blocks that share a counter of 0: true in the last of them, which then sees what the
//                       others have written; the counter is 0 again
//   wait_for_inputs()   returns when the kernel before has ended. Until then a block may read what the kernels before
//                       that one have written, and nothing that it or a later one overwrites.
//   shared<T>()         memory of the block
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ECHO_DEVICE __device__ __forceinline__
#define ECHO_EITHER __host__ __device__ constexpr
#else
#define ECHO_DEVICE inline
#define ECHO_EITHER constexpr
#endif
#if defined(__CUDA_ARCH__)
#define ECHO_UNROLL _Pragma("unroll")
#else
#define ECHO_UNROLL
#endif

namespace echoline::model::cuda {

using Bf16 = std::uint16_t;

inline constexpr unsigned kWarpThreads = 32;
inline constexpr unsigned kPageTokens = 16;  // PagedCache::kPageTokens
inline constexpr unsigned kVectorCount = 8;  // values that a thread loads and stores at once

struct alignas(16) Vector {
  std::uint32_t words[4];  // two values each, the first one in the lower half
};

ECHO_DEVICE float as_float(std::uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

ECHO_DEVICE float wide(Bf16 value) { return as_float(static_cast<std::uint32_t>(value) << 16); }
ECHO_DEVICE float first_of(std::uint32_t pair) { return as_float(pair << 16); }
ECHO_DEVICE float second_of(std::uint32_t pair) { return as_float(pair & 0xffff0000u); }

// To the nearest, ties to even.
ECHO_DEVICE Bf16 narrow(float value) {
#if defined(__CUDA_ARCH__)
  Bf16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<Bf16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
#endif
}
ECHO_DEVICE float rounded(float value) { return wide(narrow(value)); }
ECHO_DEVICE std::uint32_t pair_of(float first, float second) {
  return static_cast<std::uint32_t>(narrow(second)) << 16 | narrow(first);
}

// From an address that is a multiple of 16.
ECHO_DEVICE Vector load_vector(const Bf16* from) {
#if defined(__CUDA_ARCH__)
  const uint4 v = *reinterpret_cast<const uint4*>(from);
  return {{v.x, v.y, v.z, v.w}};
#else
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
#endif
}
// The same of what nothing writes meanwhile, and is not wanted again soon.
ECHO_DEVICE Vector load_once(const Bf16* from) {
#if defined(__CUDA_ARCH__)
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(from));
  return v;
#else
  return load_vector(from);
#endif
}
// The same of the host's memory, which it has just written.
ECHO_DEVICE Vector load_from_host(const Vector* from) {
#if defined(__CUDA_ARCH__)
  Vector v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(from));
  return v;
#else
  return *from;
#endif
}
ECHO_DEVICE void store_vector(Bf16* to, const Vector& v) { *reinterpret_cast<Vector*>(to) = v; }

// Of what other blocks of the same kernel have written.
template <class T>
ECHO_DEVICE T load_shared_result(const T* from) {
#if defined(__CUDA_ARCH__)
  return __ldcg(from);
#else
  return *from;
#endif
}

ECHO_DEVICE float reciprocal_root(float value) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(value);
#else
  return 1 / std::sqrt(value);
#endif
}

// e^x, within two units of the last place for results near 1.
ECHO_DEVICE float fast_exp(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  return std::exp(x);
#endif
}

ECHO_DEVICE float larger(float a, float b) { return a > b ? a : b; }  // b where a is no number
template <class T>
ECHO_EITHER T least(T a, T b) {
  return a < b ? a : b;
}
template <class T>
ECHO_EITHER T most(T a, T b) {
  return a > b ? a : b;
}

// ---- what the host sends ----

inline constexpr unsigned kRowThreads = 128;

struct alignas(16) SentHeader {
  std::uint32_t vectors;  // of 16 bytes, this one included
  std::uint32_t unused[3];
};

struct ReceiveJob {
  const Vector* from;  // memory of the host; it begins with a SentHeader
  Vector* to;
  std::uint32_t blocks;
};

template <class Block>
ECHO_DEVICE void receive_block(Block& block, const ReceiveJob& job, unsigned index) {
  block.wait_for_inputs();
  block.own([&](unsigned thread) {
    const unsigned vectors = load_from_host(job.from).words[0];
    for (unsigned at = index * Block::kThreads + thread; at < vectors; at += job.blocks * Block::kThreads)
      job.to[at] = load_from_host(job.from + at);
  });
}

// ---- embedding ----

struct EmbedJob {
  const Bf16* embedding;    // [vocab, width]
  const std::int32_t* ids;  // [rows]
  Bf16* out;                // [rows, width]
  std::uint32_t rows, width;
};

template <class Block>
ECHO_DEVICE void embed_block(Block& block, const EmbedJob& job, unsigned row) {
  block.wait_for_inputs();
  const Bf16* const from = job.embedding + static_cast<std::size_t>(job.ids[row]) * job.width;
  Bf16* const to = job.out + static_cast<std::size_t>(row) * job.width;
  block.own([&](unsigned thread) {
    for (unsigned at = thread * kVectorCount; at < job.width; at += Block::kThreads * kVectorCount)
      store_vector(to + at, load_vector(from + at));
  });
}

// ---- norm ----

// The sum of squares of 8 values.
ECHO_DEVICE float squares(const Vector& v) {
  float sum = 0;
  ECHO_UNROLL
  for (unsigned w = 0; w < 4; ++w) {
    const float a = first_of(v.words[w]), b = second_of(v.words[w]);
    sum += a * a + b * b;
  }
  return sum;
}

// x * scale * weight, rounded where rms_norm() rounds.
ECHO_DEVICE Vector normed(const Vector& x, const Vector& weight, float scale) {
  Vector out;
  ECHO_UNROLL
  for (unsigned w = 0; w < 4; ++w)
    out.words[w] = pair_of(rounded(first_of(x.words[w]) * scale) * first_of(weight.words[w]),
                           rounded(second_of(x.words[w]) * scale) * second_of(weight.words[w]));
  return out;
}

struct NormJob {
  Bf16* x;            // [rows, width]
  const Bf16* added;  // [rows, width], is added to x first; or null
  const Bf16* weight;
  Bf16* out;  // [rows, width]
  std::uint32_t rows, width;
  float eps;
};

// One block a row.
template <class Block>
ECHO_DEVICE void norm_block(Block& block, const NormJob& job, unsigned row) {
  constexpr unsigned kWarps = Block::kThreads / kWarpThreads, kStep = Block::kThreads * kVectorCount;
  Bf16* const x = job.x + static_cast<std::size_t>(row) * job.width;
  typename Block::template Local<float> sums;
  float* const by_warp = block.template shared<float>();
  block.wait_for_inputs();
  block.own([&](unsigned thread) {
    float sum = 0;
    for (unsigned at = thread * kVectorCount; at < job.width; at += kStep) {
      Vector v = load_vector(x + at);
      if (job.added != nullptr) {
        const Vector more = load_vector(job.added + static_cast<std::size_t>(row) * job.width + at);
        ECHO_UNROLL
        for (unsigned w = 0; w < 4; ++w)
          v.words[w] = pair_of(first_of(v.words[w]) + first_of(more.words[w]),
                               second_of(v.words[w]) + second_of(more.words[w]));
        store_vector(x + at, v);
      }
      sum += squares(v);
    }
    sums[thread] = sum;
  });
  block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return sums[thread]; });
  block.each([&](unsigned thread) {
    if (thread % kWarpThreads == 0) by_warp[thread / kWarpThreads] = sums[thread];
  });
  block.own([&](unsigned thread) {
    float sum = 0;
    ECHO_UNROLL
    for (unsigned warp = 0; warp < kWarps; ++warp) sum += by_warp[warp];
    const float scale = reciprocal_root(sum / static_cast<float>(job.width) + job.eps);
    for (unsigned at = thread * kVectorCount; at < job.width; at += kStep)
      store_vector(job.out + static_cast<std::size_t>(row) * job.width + at,
                   normed(load_vector(x + at), load_vector(job.weight + at), scale));
  });
}

// ---- products with weights, for few rows ----

inline constexpr unsigned kProductThreads = 256;
inline constexpr unsigned kProductWarps = kProductThreads / kWarpThreads;
inline constexpr unsigned kTileOutputs = 8;  // of a warp
inline constexpr unsigned kStepInputs = 32;  // of one multiply()
inline constexpr unsigned kStagePadding = 32;

// out = x weight^T: rounded, then with `bias`, then with `residual` added; or silu(x weight^T) * (x second^T).
struct ProductJob {
  const Bf16* x;         // [rows, in]
  const Bf16* norm;      // [in]: x is normed first; or null
  const Bf16* weight;    // [outputs, in]
  const Bf16* second;    // [outputs, in], or null
  const Bf16* bias;      // [outputs], or null
  const Bf16* residual;  // [rows, outputs], or null; may be `out`
  Bf16* out;             // [rows, out_stride]
  std::uint32_t rows, in, outputs, out_stride;
  std::uint32_t parts;  // warps that share the inputs of a tile: 1, 2, 4 or 8
  float eps;
};

// The memory that a block needs.
template <unsigned kGroups, bool kGated>
ECHO_EITHER std::size_t product_sums_bytes() {
  return sizeof(float) * kProductWarps * (kGated ? 2 : 1) * kGroups * 8 * kTileOutputs;
}
inline std::size_t product_stage_bytes(unsigned rows, unsigned in) {
  return sizeof(Bf16) * std::size_t{rows} * (in + kStagePadding);
}

// Groups of 8 rows that the code is there for: 1, 2, 4 or 8.
inline unsigned product_groups(unsigned rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 8; }
inline constexpr unsigned kProductRowsMax = 16;  // with more, libtorch's products are as fast

// For ProductJob::parts: so many warps that each processor has a block.
inline unsigned product_parts(unsigned processors, unsigned in, unsigned outputs, bool gated) {
  const unsigned tiles = (outputs + kTileOutputs - 1) / kTileOutputs, steps = in / kStepInputs;
  const unsigned warps = processors * kProductWarps * (gated ? 2 : 1);
  unsigned parts = 1;
  while (parts < kProductWarps && 2 * parts <= steps && tiles * parts < warps) parts *= 2;
  return parts;
}

// Whether ProductJob::norm may be given: a block has memory for so many normed rows, and each norms all of them.
inline bool product_norms(unsigned rows, unsigned in, bool gated) {
  constexpr std::size_t kMemoryMax = 96 << 10;
  const std::size_t sums =
      sizeof(float) * kProductWarps * (gated ? 2 : 1) * product_groups(rows) * 8 * kTileOutputs;
  return rows <= 16 && sums + product_stage_bytes(rows, in) <= kMemoryMax;
}

// silu(gate) * up, rounded where libtorch rounds.
ECHO_DEVICE float gated(float gate, float up) { return rounded(gate / (1 + fast_exp(-gate))) * up; }

// Block `index` of `blocks`. kGroups * 8 >= rows.
//
// In a warp, thread 4 g + t loads 8 inputs of output g at once, and the same inputs of rows g and g + 8: 8 t ... 8 t + 7
// of the 32 of a step. That is not the order in which the tensor cores number them, but the same one on both sides.
template <unsigned kGroups, bool kGated, class Block>
ECHO_DEVICE void product_block(Block& block, const ProductJob& job, unsigned index, unsigned blocks) {
  constexpr unsigned kWeights = kGated ? 2 : 1, kAhead = kGated ? 4 : 8, kRows = kGroups * 8;
  constexpr unsigned kTiles = (kGroups + 1) / 2;  // of 16 rows
  struct Own {
    Vector ahead[kWeights][kAhead];
    Vector low, high;
    float sums[kTiles][kWeights][4];
    float squares;
  };
  typename Block::template Local<Own> locals;
  float* const shared_sums = block.template shared<float>();  // [warp][kWeights][kRows][kTileOutputs]
  Bf16* const stage = reinterpret_cast<Bf16*>(shared_sums + product_sums_bytes<kGroups, kGated>() / sizeof(float));
  const unsigned stage_stride = job.in + kStagePadding;
  const unsigned steps = job.in / kStepInputs, tiles = (job.outputs + kTileOutputs - 1) / kTileOutputs;
  const unsigned per_round = kProductWarps / job.parts;
  const unsigned chunks = ((steps + job.parts - 1) / job.parts + kAhead - 1) / kAhead;

  const auto load = [&](unsigned thread, unsigned first_tile, unsigned chunk) {
    Own& self = locals[thread];
    const unsigned warp = thread / kWarpThreads, lane = thread % kWarpThreads, part = warp % job.parts;
    const unsigned tile = first_tile + warp / job.parts;
    const unsigned output = least(tile * kTileOutputs + lane / 4, job.outputs - 1);
    const unsigned begin = part * steps / job.parts + chunk * kAhead, end = (part + 1) * steps / job.parts;
    const std::size_t at = static_cast<std::size_t>(output) * job.in + begin * kStepInputs + lane % 4 * kVectorCount;
    ECHO_UNROLL
    for (unsigned i = 0; i < kAhead; ++i) {
      const bool there = begin + i < end && tile < tiles;
      self.ahead[0][i] = there ? load_once(job.weight + at + i * kStepInputs) : Vector{};
      if constexpr (kGated) self.ahead[1][i] = there ? load_once(job.second + at + i * kStepInputs) : Vector{};
    }
  };

  block.own([&](unsigned thread) { load(thread, index * per_round, 0); });
  block.wait_for_inputs();

  if (job.norm != nullptr) {
    ECHO_UNROLL
    for (unsigned group = 0; group < kGroups; ++group) {
      if (group * 8 >= job.rows) break;
      static_assert(kProductWarps == 8, "a warp norms one row of each group");
      const auto row_of = [&](unsigned thread) { return group * 8 + thread / kWarpThreads; };
      const auto each_vector = [&](unsigned thread, const auto& use) {  // of the row, some at a time
        constexpr unsigned kStep = kWarpThreads * kVectorCount, kTogether = 4;
        const Bf16* const from = job.x + static_cast<std::size_t>(row_of(thread)) * job.in;
        for (unsigned first = thread % kWarpThreads * kVectorCount; first < job.in; first += kTogether * kStep) {
          Vector v[kTogether];
          ECHO_UNROLL
          for (unsigned i = 0; i < kTogether; ++i)
            v[i] = first + i * kStep < job.in ? load_vector(from + first + i * kStep) : Vector{};
          ECHO_UNROLL
          for (unsigned i = 0; i < kTogether; ++i)
            if (first + i * kStep < job.in) use(first + i * kStep, v[i]);
        }
      };
      block.own([&](unsigned thread) {
        float sum = 0;
        if (row_of(thread) < job.rows) each_vector(thread, [&](unsigned, const Vector& v) { sum += squares(v); });
        locals[thread].squares = sum;
      });
      block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return locals[thread].squares; });
      block.own([&](unsigned thread) {
        const unsigned row = row_of(thread);
        if (row >= job.rows) return;
        const float scale = reciprocal_root(locals[thread].squares / static_cast<float>(job.in) + job.eps);
        each_vector(thread, [&](unsigned at, const Vector& v) {
          store_vector(stage + row * stage_stride + at, normed(v, load_vector(job.norm + at), scale));
        });
      });
    }
    block.each([](unsigned) {});
  }
  const Bf16* const x = job.norm != nullptr ? stage : job.x;
  const unsigned x_stride = job.norm != nullptr ? stage_stride : job.in;

  for (unsigned first_tile = index * per_round; first_tile < tiles; first_tile += blocks * per_round) {
    block.own([&](unsigned thread) {
      ECHO_UNROLL
      for (unsigned m = 0; m < kTiles; ++m)
        ECHO_UNROLL
      for (unsigned w = 0; w < kWeights; ++w)
        ECHO_UNROLL
      for (unsigned i = 0; i < 4; ++i) locals[thread].sums[m][w][i] = 0;
    });
    for (unsigned chunk = 0; chunk < chunks; ++chunk) {
      ECHO_UNROLL
      for (unsigned i = 0; i < kAhead; ++i) {
        ECHO_UNROLL
        for (unsigned m = 0; m < kTiles; ++m) {
          block.own([&](unsigned thread) {
            Own& self = locals[thread];
            const unsigned lane = thread % kWarpThreads, part = thread / kWarpThreads % job.parts;
            const unsigned step = part * steps / job.parts + chunk * kAhead + i;
            const bool there = step < (part + 1) * steps / job.parts;
            const unsigned row = m * 16 + lane / 4;
            const Bf16* const from = x + static_cast<std::size_t>(row) * x_stride + step * kStepInputs +
                                     lane % 4 * kVectorCount;
            self.low = there && row < job.rows ? load_vector(from) : Vector{};
            self.high = kGroups > 1 && there && row + 8 < job.rows
                            ? load_vector(from + std::size_t{8} * x_stride)
                            : Vector{};
          });
          ECHO_UNROLL
          for (unsigned w = 0; w < kWeights; ++w)
            block.multiply([&](unsigned thread) -> float* { return locals[thread].sums[m][w]; },
                           [&](unsigned thread) -> const Vector& { return locals[thread].low; },
                           [&](unsigned thread) -> const Vector& { return locals[thread].high; },
                           [&](unsigned thread) -> const Vector& { return locals[thread].ahead[w][i]; });
        }
      }
      block.own([&](unsigned thread) {  // the next chunk, or the first one of the next tile
        if (chunk + 1 < chunks) {
          load(thread, first_tile, chunk + 1);
        } else if (first_tile + blocks * per_round < tiles) {
          load(thread, first_tile + blocks * per_round, 0);
        }
      });
    }
    block.each([&](unsigned thread) {
      const Own& self = locals[thread];
      const unsigned lane = thread % kWarpThreads, warp = thread / kWarpThreads;
      ECHO_UNROLL
      for (unsigned w = 0; w < kWeights; ++w)
        ECHO_UNROLL
      for (unsigned m = 0; m < kTiles; ++m) {
        float* const to = shared_sums +
                          ((warp * kWeights + w) * kRows + m * 16 + lane / 4) * kTileOutputs + lane % 4 * 2;
        to[0] = self.sums[m][w][0], to[1] = self.sums[m][w][1];
        if (kGroups > 1) {
          to[8 * kTileOutputs] = self.sums[m][w][2];
          to[8 * kTileOutputs + 1] = self.sums[m][w][3];
        }
      }
    });
    block.each([&](unsigned thread) {
      for (unsigned e = thread; e < per_round * kRows * kTileOutputs; e += Block::kThreads) {
        const unsigned row = e / kTileOutputs % kRows, slot = e / kTileOutputs / kRows;
        const unsigned output = (first_tile + slot) * kTileOutputs + e % kTileOutputs;
        if (row >= job.rows || output >= job.outputs) continue;
        const auto total = [&](unsigned w) {
          float sum = 0;
          for (unsigned part = 0; part < job.parts; ++part)
            sum += shared_sums[(((slot * job.parts + part) * kWeights + w) * kRows + row) * kTileOutputs +
                               e % kTileOutputs];
          return rounded(sum);
        };
        float value = total(0);
        if (job.bias != nullptr) value = rounded(value + wide(job.bias[output]));
        if constexpr (kGated) value = gated(value, total(1));
        const std::size_t at = static_cast<std::size_t>(row) * job.out_stride + output;
        if (job.residual != nullptr) value = wide(job.residual[at]) + value;
        job.out[at] = narrow(value);
      }
    });
  }
}

// ---- silu(gate) * up ----

struct GateJob {
  const Bf16* gate;  // [rows, stride], the first `width` of each
  const Bf16* up;
  Bf16* out;  // [rows, width]
  std::uint32_t rows, width, stride;
};

ECHO_DEVICE void gate_thread(const GateJob& job, std::size_t vector) {
  const unsigned per_row = job.width / kVectorCount;
  const std::size_t row = vector / per_row, at = vector % per_row * kVectorCount;
  if (row >= job.rows) return;
  const Vector gate = load_vector(job.gate + row * job.stride + at), up = load_vector(job.up + row * job.stride + at);
  Vector out;
  ECHO_UNROLL
  for (unsigned w = 0; w < 4; ++w)
    out.words[w] = pair_of(gated(first_of(gate.words[w]), first_of(up.words[w])),
                           gated(second_of(gate.words[w]), second_of(up.words[w])));
  store_vector(job.out + row * job.width + at, out);
}

// ---- attention of one new token a row over its pages ----

// Threads of a block, for kHeads query heads: more are faster for a few rows, but want more memory.
inline constexpr unsigned kAttendThreads = 128, kAttendThreadsMany = 256;

// Queries and keys are normed and rotated, the new key and value written to their place, and the query heads of a
// key-value head attend to all that its text holds.
struct AttendJob {
  const Bf16* qkv;                  // [rows, (heads + 2 kv_heads) * dim]
  const Bf16* q_norm;               // [dim], or null
  const Bf16* k_norm;               // [dim], or null
  const float* cos;                 // [positions, dim]
  const float* sin;                 // [positions, dim], with the sign of the rotation
  const std::int32_t* positions;    // [rows]: of the new token; negative: no row
  const std::int32_t* pages;        // of all rows
  const std::int32_t* pages_begin;  // [rows]: where a row's begin
  Bf16* keys;                       // [pages, kv_heads, kPageTokens, dim]
  Bf16* values;                     // [pages, kv_heads, kPageTokens, dim]
  Bf16* out;                        // [rows, heads * dim]
  float* partial;                   // [rows, kv_heads, splits, kHeads, dim + 2]
  unsigned* arrived;                // [rows * kv_heads], 0
  std::uint32_t rows, heads, kv_heads, splits;
  std::uint32_t tokens_min;  // of a split
  float eps;
};

// Whether the code is there, for heads of `dim` values and `group` query heads to a key-value head.
inline bool attend_knows(unsigned dim, unsigned group) {
  return (dim == 16 || dim == 32 || dim == 64 || dim == 128) && group <= 8;
}
// kHeads for such a group.
inline unsigned attend_heads(unsigned group) { return group <= 2 ? group : group <= 4 ? 4 : 8; }

// Threads of a block for such a group.
inline unsigned attend_threads(unsigned rows, unsigned group) {
  return attend_heads(group) <= 4 && rows <= 32 ? kAttendThreadsMany : kAttendThreads;
}

// For AttendJob::splits and tokens_min. A text is shared among blocks where processors would idle otherwise, a long one
// in any case; to put the shares together costs as much as some hundred tokens.
inline unsigned attend_splits(unsigned processors, unsigned rows, unsigned kv_heads) {
  const unsigned pairs = rows * kv_heads, wanted = (16 * processors + pairs - 1) / pairs;
  return most(1u, least(wanted, 32u));
}
inline unsigned attend_tokens_min(unsigned processors, unsigned rows, unsigned kv_heads) {
  return 64 * most(1u, least(4 * rows * kv_heads / processors, 16u));
}

ECHO_EITHER unsigned attend_row(unsigned dim) { return dim + dim / kWarpThreads; }  // in the block's memory, padded
template <unsigned kDim, unsigned kHeads>
ECHO_EITHER std::size_t attend_shared_bytes(unsigned threads) {
  return sizeof(float) * (kHeads * kDim + kDim + threads / (kDim / 8) * kHeads * (attend_row(kDim) + std::size_t{3}));
}

// The block of split `split` for a row and a key-value head, of which the query heads are at most kHeads.
//
// A team of threads has a token, each of them 8 of its values. Teams keep sums of their own and are added up at the end.
// Keys and values of a round of tokens are on their way while the round before is computed, and the first ones while
// the kernels before still run.
template <unsigned kDim, unsigned kHeads, class Block>
ECHO_DEVICE void attend_block(Block& block, const AttendJob& job, unsigned row, unsigned kv, unsigned split) {
  constexpr unsigned kThreads = Block::kThreads, kWarps = kThreads / kWarpThreads;
  constexpr unsigned kLanes = kDim / kVectorCount;  // threads of a team
  constexpr unsigned kTeams = kThreads / kLanes;
  constexpr unsigned kAhead = kHeads > 4 ? 2 : 4;  // tokens of a team in one round, of one page
  constexpr unsigned kRound = kTeams * kAhead, kHalf = kDim / 2, kRow = attend_row(kDim);
  constexpr unsigned kPairs = (kHalf + kWarpThreads - 1) / kWarpThreads;
  static_assert(kLanes >= 2 && kLanes <= kWarpThreads && kPageTokens % kAhead == 0, "a team is a part of a warp");
  struct Own {
    float first[kPairs], second[kPairs], squares;
    float q[kHeads][kVectorCount], mixed[kHeads][kVectorCount];
    float top[kHeads], sum[kHeads], scores[kAhead][kHeads];
    Vector keys[kAhead], values[kAhead];
    std::int32_t page;  // of the tokens of the round after the one that is loaded
  };
  if (job.positions[row] < 0) return;
  const unsigned group = job.heads / job.kv_heads, width = (job.heads + 2 * job.kv_heads) * kDim;
  const unsigned position = static_cast<unsigned>(job.positions[row]), seen = position + 1;
  const unsigned share = most((seen + job.splits - 1) / job.splits, job.tokens_min);
  const unsigned chunk = (share + kRound - 1) / kRound * kRound;
  const unsigned active = (seen + chunk - 1) / chunk, begin = split * chunk, end = least(seen, begin + chunk);
  if (begin >= seen) return;
  typename Block::template Local<Own> locals;
  const std::int32_t* const pages = job.pages + job.pages_begin[row];
  const auto place = [&](std::int32_t page, unsigned token) {
    return ((static_cast<std::size_t>(page) * job.kv_heads + kv) * kPageTokens + token % kPageTokens) * kDim;
  };
  float* const queries = block.template shared<float>();  // [kHeads][kDim]
  float* const fresh = queries + kHeads * kDim;           // key and value of the new token, bf16 [2][kDim]
  float* const mixed = fresh + kDim;                      // [kTeams][kHeads][kRow]
  float* const tops = mixed + kTeams * kHeads * kRow;     // [kTeams][kHeads], and the next two
  float* const sums = tops + kTeams * kHeads;
  float* const shares = sums + kTeams * kHeads;
  Bf16* const fresh_key = reinterpret_cast<Bf16*>(fresh);
  Bf16* const fresh_value = fresh_key + kDim;

  const auto token_of = [&](unsigned thread, unsigned round) { return round + thread / kLanes * kAhead; };
  // The new token's are not there yet, and come from the block's memory.
  const auto load = [&](unsigned thread, unsigned round, const Bf16* from, std::int32_t page, Vector* to) {
    const unsigned t = token_of(thread, round);
    const std::size_t at = place(page, t) + thread % kLanes * kVectorCount;
    ECHO_UNROLL
    for (unsigned i = 0; i < kAhead; ++i)
      to[i] = t + i < end && t + i != position ? load_vector(from + at + i * kDim) : Vector{};
  };
  const auto page_of = [&](unsigned thread, unsigned round) {
    const unsigned t = token_of(thread, round);
    return t < end ? pages[t / kPageTokens] : 0;
  };
  block.own([&](unsigned thread) {
    Own& self = locals[thread];
    self.page = page_of(thread, begin);
    load(thread, begin, job.keys, self.page, self.keys);
    load(thread, begin, job.values, self.page, self.values);
    self.page = page_of(thread, begin + kRound);
  });
  block.wait_for_inputs();

  // Queries, and where the new token is in this split, its key and value.
  const Bf16* const token = job.qkv + static_cast<std::size_t>(row) * width;
  const unsigned units = group + (end == seen ? 1 : 0);
  for (unsigned first_unit = 0; first_unit < units; first_unit += kWarps) {
    const auto pair_at = [](unsigned thread, unsigned i) { return thread % kWarpThreads + i * kWarpThreads; };
    block.own([&](unsigned thread) {
      Own& self = locals[thread];
      const unsigned unit = first_unit + thread / kWarpThreads;
      const Bf16* const head = token + (unit < group ? kv * group + unit : job.heads + kv) * kDim;
      self.squares = 0;
      ECHO_UNROLL
      for (unsigned i = 0; i < kPairs; ++i) {
        const unsigned at = pair_at(thread, i);
        if (unit >= units || at >= kHalf) continue;
        self.first[i] = wide(head[at]), self.second[i] = wide(head[at + kHalf]);
        self.squares += self.first[i] * self.first[i] + self.second[i] * self.second[i];
      }
    });
    if (job.q_norm != nullptr)
      block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return locals[thread].squares; });
    block.own([&](unsigned thread) {
      Own& self = locals[thread];
      const unsigned unit = first_unit + thread / kWarpThreads;
      const bool is_query = unit < group;
      const Bf16* const norm = is_query ? job.q_norm : job.k_norm;
      const float scale = reciprocal_root(self.squares / static_cast<float>(kDim) + job.eps);
      ECHO_UNROLL
      for (unsigned i = 0; i < kPairs; ++i) {
        const unsigned at = pair_at(thread, i);
        if (unit >= units || at >= kHalf) continue;
        float a = self.first[i], b = self.second[i];
        if (norm != nullptr) a = a * scale * wide(norm[at]), b = b * scale * wide(norm[at + kHalf]);
        const std::size_t turn = static_cast<std::size_t>(position) * kDim + at;
        const float x = a * job.cos[turn] + b * job.sin[turn];
        const float y = b * job.cos[turn + kHalf] + a * job.sin[turn + kHalf];
        if (is_query) {
          queries[unit * kDim + at] = rounded(x), queries[unit * kDim + at + kHalf] = rounded(y);
          continue;
        }
        const std::size_t to = place(pages[position / kPageTokens], position) + at;
        const Bf16* const value = token + (job.heads + job.kv_heads + kv) * kDim + at;
        job.keys[to] = fresh_key[at] = narrow(x), job.keys[to + kHalf] = fresh_key[at + kHalf] = narrow(y);
        job.values[to] = fresh_value[at] = value[0], job.values[to + kHalf] = fresh_value[at + kHalf] = value[kHalf];
      }
    });
  }
  block.each([](unsigned) {});

  block.own([&](unsigned thread) {
    Own& self = locals[thread];
    ECHO_UNROLL
    for (unsigned h = 0; h < kHeads; ++h) {
      self.top[h] = -INFINITY, self.sum[h] = 0;
      ECHO_UNROLL
      for (unsigned d = 0; d < kVectorCount; ++d) {
        self.q[h][d] = h < group ? queries[h * kDim + thread % kLanes * kVectorCount + d] : 0;
        self.mixed[h][d] = 0;
      }
    }
  });
  for (unsigned round = begin; round < end; round += kRound) {
    block.own([&](unsigned thread) {
      Own& self = locals[thread];
      const unsigned t = token_of(thread, round);
      ECHO_UNROLL
      for (unsigned i = 0; i < kAhead; ++i) {
        if (t + i == position) {
          self.keys[i] = load_vector(fresh_key + thread % kLanes * kVectorCount);
          self.values[i] = load_vector(fresh_value + thread % kLanes * kVectorCount);
        }
        ECHO_UNROLL
        for (unsigned h = 0; h < kHeads; ++h) {
          float score = 0;
          ECHO_UNROLL
          for (unsigned w = 0; w < 4; ++w)
            score += first_of(self.keys[i].words[w]) * self.q[h][2 * w] +
                     second_of(self.keys[i].words[w]) * self.q[h][2 * w + 1];
          self.scores[i][h] = score;
        }
      }
      load(thread, round + kRound, job.keys, self.page, self.keys);
    });
    ECHO_UNROLL
    for (unsigned i = 0; i < kAhead; ++i) {
      ECHO_UNROLL
      for (unsigned h = 0; h < kHeads; ++h)
        block.template sum<kLanes>([&](unsigned thread) -> float& { return locals[thread].scores[i][h]; });
    }
    block.own([&](unsigned thread) {
      Own& self = locals[thread];
      const unsigned t = token_of(thread, round);
      ECHO_UNROLL
      for (unsigned h = 0; h < kHeads; ++h) {
        float top = self.top[h];
        ECHO_UNROLL
        for (unsigned i = 0; i < kAhead; ++i)
          if (t + i < end) top = larger(self.scores[i][h], top);
        const float base = top == -INFINITY ? 0 : top, kept = fast_exp(self.top[h] - base);
        self.top[h] = top;
        self.sum[h] *= kept;
        ECHO_UNROLL
        for (unsigned d = 0; d < kVectorCount; ++d) self.mixed[h][d] *= kept;
        ECHO_UNROLL
        for (unsigned i = 0; i < kAhead; ++i) {
          const float p = t + i < end ? fast_exp(self.scores[i][h] - base) : 0;
          self.sum[h] += p;
          ECHO_UNROLL
          for (unsigned w = 0; w < 4; ++w) {
            self.mixed[h][2 * w] += p * first_of(self.values[i].words[w]);
            self.mixed[h][2 * w + 1] += p * second_of(self.values[i].words[w]);
          }
        }
      }
      load(thread, round + kRound, job.values, self.page, self.values);
      self.page = page_of(thread, round + 2 * kRound);
    });
  }

  const auto padded = [](unsigned d) { return d + d / kWarpThreads; };
  block.each([&](unsigned thread) {
    const Own& self = locals[thread];
    const unsigned team = thread / kLanes, lane = thread % kLanes;
    ECHO_UNROLL
    for (unsigned h = 0; h < kHeads; ++h) {
      ECHO_UNROLL
      for (unsigned d = 0; d < kVectorCount; ++d)
        mixed[(team * kHeads + h) * kRow + padded(lane * kVectorCount + d)] = self.mixed[h][d];
      if (lane == 0) tops[team * kHeads + h] = self.top[h], sums[team * kHeads + h] = self.sum[h];
    }
  });
  const auto top_of = [&](unsigned h) {
    float top = -INFINITY;
    ECHO_UNROLL
    for (unsigned team = 0; team < kTeams; ++team) top = larger(tops[team * kHeads + h], top);
    return top;
  };
  block.each([&](unsigned thread) {
    for (unsigned e = thread; e < kTeams * kHeads; e += kThreads) shares[e] = fast_exp(tops[e] - top_of(e % kHeads));
  });
  Bf16* const out = job.out + static_cast<std::size_t>(row) * job.heads * kDim + kv * group * kDim;
  float* const partial =
      job.partial + (static_cast<std::size_t>(row) * job.kv_heads + kv) * job.splits * kHeads * (kDim + 2);
  block.own([&](unsigned thread) {
    for (unsigned e = thread; e < group * kDim; e += kThreads) {
      const unsigned h = e / kDim, d = e % kDim;
      float sum = 0, value = 0;
      ECHO_UNROLL
      for (unsigned team = 0; team < kTeams; ++team) {
        const float kept = shares[team * kHeads + h];
        sum += sums[team * kHeads + h] * kept;
        value += mixed[(team * kHeads + h) * kRow + padded(d)] * kept;
      }
      if (active == 1) {
        out[e] = narrow(value / sum);
        continue;
      }
      float* const to = partial + (split * kHeads + h) * (kDim + 2);
      to[d] = value;
      if (d == 0) to[kDim] = top_of(h), to[kDim + 1] = sum;
    }
  });
  if (active == 1 || !block.arrive(job.arrived + row * job.kv_heads + kv, active)) return;
  block.own([&](unsigned thread) {
    for (unsigned e = thread; e < group * kDim; e += kThreads) {
      const unsigned h = e / kDim, d = e % kDim;
      const auto part = [&](unsigned s, unsigned at) {
        return load_shared_result(partial + (s * kHeads + h) * (kDim + 2) + at);
      };
      constexpr unsigned kTogether = 4;
      float top = -INFINITY, sum = 0, value = 0;
      for (unsigned first = 0; first < active; first += kTogether) {
        float its_top[kTogether], its_sum[kTogether], its_value[kTogether];
        ECHO_UNROLL
        for (unsigned i = 0; i < kTogether; ++i) {
          const bool there = first + i < active;
          its_top[i] = there ? part(first + i, kDim) : -INFINITY;
          its_sum[i] = there ? part(first + i, kDim + 1) : 0;
          its_value[i] = there ? part(first + i, d) : 0;
        }
        float next = top;
        ECHO_UNROLL
        for (unsigned i = 0; i < kTogether; ++i) next = larger(its_top[i], next);
        const float before = fast_exp(top - next);
        sum *= before, value *= before, top = next;
        ECHO_UNROLL
        for (unsigned i = 0; i < kTogether; ++i) {
          const float kept = fast_exp(its_top[i] - next);
          sum += its_sum[i] * kept, value += its_value[i] * kept;
        }
      }
      out[e] = narrow(value / sum);
    }
  });
}

// ---- drawing ----

inline constexpr unsigned kSampleThreads = 256;
inline constexpr unsigned kSampleWarps = kSampleThreads / kWarpThreads;
inline constexpr unsigned kSampleOwn = 16;  // tokens of a thread
inline constexpr unsigned kSampleShare = kWarpThreads * kSampleOwn;  // of a warp
inline constexpr unsigned kSampleSharesMax = 2048;

// The token where the cumulative probability of softmax(logits / temperature), in the vocabulary's order, passes the
// uniform number, and its log-probability. Temperature 0: the first of the most likely ones, and its log-probability at
// temperature 1. What is not finite gives a log-probability that is not finite.
struct SampleJob {
  const Bf16* logits;        // [rows, stride]
  const float* temperature;  // [rows]
  const double* uniform;     // [rows]
  float* tops;               // [rows, shares]
  float* sums;               // [rows, shares]
  unsigned* arrived;         // [rows], 0
  std::int32_t* tokens;      // [rows]
  float* logprobs;           // [rows]
  std::uint32_t rows, vocab, stride;
};
inline unsigned sample_blocks(unsigned vocab) {
  return (vocab + kSampleShare * kSampleWarps - 1) / (kSampleShare * kSampleWarps);
}

struct SampleShared {
  double weights[kSampleSharesMax];
  double by_lane[kWarpThreads];
  float tops[kSampleSharesMax];
  float by_warp[kSampleWarps];
  double left;
  float top, log_total;
  unsigned share;
};

// The first of `count` weights at which `left` is used up; of `left`, what is over before it. The last one that is not 0
// where rounding leaves something, and then everything is left.
template <class Weight>
ECHO_DEVICE unsigned pick(unsigned count, double& left, const Weight& weight) {
  constexpr unsigned kTogether = 8;
  unsigned last = 0;
  for (unsigned first = 0; first < count; first += kTogether) {
    double some[kTogether];
    ECHO_UNROLL
    for (unsigned i = 0; i < kTogether; ++i) some[i] = first + i < count ? static_cast<double>(weight(first + i)) : 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kTogether; ++i) {
      if (!(some[i] > 0)) continue;
      last = first + i;
      if (left < some[i]) return last;
      left -= some[i];
    }
  }
  left = INFINITY;
  return last;
}

// Block `index` of sample_blocks(): each warp the tokens of one share. The last block of a row draws.
template <class Block>
ECHO_DEVICE void sample_block(Block& block, const SampleJob& job, unsigned row, unsigned index) {
  struct Own {
    float x[kSampleOwn], top, sum;
  };
  typename Block::template Local<Own> locals;
  const Bf16* const logits = job.logits + static_cast<std::size_t>(row) * job.stride;
  const bool greedy = job.temperature[row] == 0;
  const float temperature = greedy ? 1 : job.temperature[row];
  const unsigned blocks = (job.vocab + kSampleShare * kSampleWarps - 1) / (kSampleShare * kSampleWarps);
  const unsigned shares = blocks * kSampleWarps;
  // Of the tokens from `first` on; none is as if it were impossible.
  const auto load = [&](unsigned first, float* x) {
    ECHO_UNROLL
    for (unsigned i = 0; i < kSampleOwn; i += kVectorCount) {
      const Vector v = first + i < job.stride ? load_vector(logits + first + i) : Vector{};
      ECHO_UNROLL
      for (unsigned k = 0; k < kVectorCount; ++k) {
        const float value = k % 2 == 0 ? first_of(v.words[k / 2]) : second_of(v.words[k / 2]);
        x[i + k] = first + i + k < job.vocab ? value / temperature : -INFINITY;
      }
    }
  };
  const auto top_of = [&](unsigned thread) -> float& { return locals[thread].top; };
  const auto sum_of = [&](unsigned thread) -> float& { return locals[thread].sum; };
  block.wait_for_inputs();

  block.own([&](unsigned thread) {
    Own& self = locals[thread];
    load(index * kSampleWarps * kSampleShare + thread * kSampleOwn, self.x);
    self.top = -INFINITY;
    ECHO_UNROLL
    for (unsigned i = 0; i < kSampleOwn; ++i) self.top = larger(self.x[i], self.top);
  });
  block.template largest<kWarpThreads>(top_of);
  block.own([&](unsigned thread) {
    Own& self = locals[thread];
    self.sum = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kSampleOwn; ++i)
      self.sum += self.x[i] == -INFINITY ? 0 : std::exp(self.x[i] - self.top);
  });
  block.template sum<kWarpThreads>(sum_of);
  block.own([&](unsigned thread) {
    if (thread % kWarpThreads != 0) return;
    const std::size_t at = static_cast<std::size_t>(row) * shares + index * kSampleWarps + thread / kWarpThreads;
    job.tops[at] = locals[thread].top, job.sums[at] = locals[thread].sum;
  });
  if (!block.arrive(job.arrived + row, blocks)) return;

  SampleShared& shared = *block.template shared<SampleShared>();
  block.own([&](unsigned thread) {
    float& top = locals[thread].top = -INFINITY;
    for (unsigned i = thread; i < shares; i += kSampleThreads) {
      shared.tops[i] = load_shared_result(job.tops + static_cast<std::size_t>(row) * shares + i);
      shared.weights[i] = static_cast<double>(load_shared_result(job.sums + static_cast<std::size_t>(row) * shares + i));
      top = larger(shared.tops[i], top);
    }
  });
  block.template largest<kWarpThreads>(top_of);
  block.each([&](unsigned thread) {
    if (thread % kWarpThreads == 0) shared.by_warp[thread / kWarpThreads] = locals[thread].top;
  });
  block.each([&](unsigned thread) {
    float top = shared.by_warp[0];
    ECHO_UNROLL
    for (unsigned i = 1; i < kSampleWarps; ++i) top = larger(shared.by_warp[i], top);
    for (unsigned i = thread; i < shares; i += kSampleThreads) {
      if (greedy && shared.tops[i] == top) shared.tops[i] = INFINITY;  // marks where it is
      if (shared.weights[i] > 0 && shared.tops[i] != INFINITY)
        shared.weights[i] *= static_cast<double>(std::exp(shared.tops[i] - top));
    }
    if (thread == 0) shared.top = top;
  });
  const unsigned per_lane = (shares + kWarpThreads - 1) / kWarpThreads;
  block.each([&](unsigned thread) {
    if (thread >= kWarpThreads) return;
    double sum = 0;
    for (unsigned i = thread * per_lane; i < least((thread + 1) * per_lane, shares); ++i) sum += shared.weights[i];
    shared.by_lane[thread] = sum;
  });
  block.each([&](unsigned thread) {
    if (thread != 0) return;
    double total = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kWarpThreads; ++i) total += shared.by_lane[i];
    shared.log_total = static_cast<float>(std::log(total));
    if (greedy) {
      shared.left = 0;
      shared.share = pick(shares, shared.left, [&](unsigned i) { return shared.tops[i] == INFINITY ? 1 : 0; });
      return;
    }
    double left = job.uniform[row] * total;
    const unsigned first = pick(kWarpThreads, left, [&](unsigned i) { return shared.by_lane[i]; }) * per_lane;
    shared.share = first + pick(least(per_lane, shares - least(first, shares)), left,
                                [&](unsigned i) { return shared.weights[first + i]; });
    shared.left = left;
  });
  const auto p = [&](float x) { return greedy ? (x == shared.top ? 1.0f : 0.0f) : std::exp(x - shared.top); };
  block.each([&](unsigned thread) {
    if (thread >= kWarpThreads) return;
    Own& self = locals[thread];
    load(shared.share * kSampleShare + thread * kSampleOwn, self.x);
    float sum = 0;
    ECHO_UNROLL
    for (unsigned i = 0; i < kSampleOwn; ++i) sum += p(self.x[i]);
    shared.by_lane[thread] = static_cast<double>(sum);
  });
  block.each([&](unsigned thread) {
    if (thread != 0) return;
    double left = shared.left;
    shared.share = shared.share * kWarpThreads + pick(kWarpThreads, left, [&](unsigned i) { return shared.by_lane[i]; });
    shared.left = left;
  });
  block.own([&](unsigned thread) {
    if (thread != shared.share % kWarpThreads) return;
    Own& self = locals[thread];
    double left = shared.left;
    unsigned token = 0;
    float x = self.x[0];
    ECHO_UNROLL
    for (unsigned i = 0; i < kSampleOwn; ++i) {
      const double w = static_cast<double>(p(self.x[i]));
      if (!(w > 0) || left < 0) continue;
      token = i, x = self.x[i];
      left = left < w ? -1 : left - w;  // below 0: found
    }
    const unsigned first = shared.share * kSampleOwn;
    job.tokens[row] = static_cast<std::int32_t>(least(first + token, job.vocab - 1));
    job.logprobs[row] = (x - shared.top) - shared.log_total;
  });
}

}  // namespace echoline::model::cuda
