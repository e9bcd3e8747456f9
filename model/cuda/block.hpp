// The device code of a decoding step: the work of one block of threads, as templates over a class that represents the
// block. kernels.cu uses a class of real threads; the tests use one that loops over the threads on the CPU. The
// language is C++17, because CUDA compilers lag behind. This file has the shared parts and the smaller kernels.
// Internal to this folder.
//
// Kernels read and write bf16 values, and compute in fp32. They round in the same places as libtorch's operations
// (model/training_ops), so that log-probabilities equal those of a training pass.
//
// A class `Block` of Block::kThreads threads has
//   Local<T>            one T per thread, indexed by thread; in registers on a device
//   on_each_thread(f)   calls f(thread) on every thread. Other threads must not read the values that f writes.
//   on_each_thread_and_wait(f)
//                       the same, and returns after all threads have finished f, so that all may read those values
//   sum<kWidth>(f)      f(thread) is a float&; replaces it by the sum over the thread's aligned group of kWidth threads
//   largest<kWidth>(f)  the same with the largest value instead of the sum
//   multiply(sums, low, high, weights)
//                       each warp adds one product of 16 rows, 32 inputs and 8 outputs to its sums; see product_block()
//   is_last_to_arrive(counter, n)
//                       called by n blocks that share a counter, which is 0 at first. Returns true in the last of them,
//                       which then sees all that the others have written, and resets the counter to 0.
//   wait_for_inputs()   returns when the previous kernel has ended. Before, a block may only read memory that neither
//                       the previous kernel nor a later one writes.
//   shared<T>()         memory that the block's threads share
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define ECHO_DEVICE __device__ __forceinline__     // for device code
#define ECHO_EITHER __host__ __device__ constexpr  // for device and host code
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
inline constexpr unsigned kPageTokens = 16;  // equals PagedCache::kPageTokens
inline constexpr unsigned kVectorCount = 8;  // values that a thread loads and stores at once

// kVectorCount bf16 values.
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

ECHO_DEVICE float to_float(Bf16 value) { return as_float(static_cast<std::uint32_t>(value) << 16); }
// The values of a word of a Vector.
ECHO_DEVICE float first_of(std::uint32_t pair) { return as_float(pair << 16); }
ECHO_DEVICE float second_of(std::uint32_t pair) { return as_float(pair & 0xffff0000u); }

// Rounds to nearest, ties to even.
ECHO_DEVICE Bf16 to_bf16(float value) {
#if defined(__CUDA_ARCH__)
  Bf16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
  return out;
#else
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;  // NaN
  return static_cast<Bf16>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
#endif
}
ECHO_DEVICE float round_to_bf16(float value) { return to_float(to_bf16(value)); }
// The word of a Vector that holds both values.
ECHO_DEVICE std::uint32_t pair_of(float first, float second) {
  return static_cast<std::uint32_t>(to_bf16(second)) << 16 | to_bf16(first);
}

// Loads from an address that is a multiple of 16.
ECHO_DEVICE Vector load_vector(const Bf16* source) {
#if defined(__CUDA_ARCH__)
  const uint4 v = *reinterpret_cast<const uint4*>(source);
  return {{v.x, v.y, v.z, v.w}};
#else
  Vector v;
  std::memcpy(&v, source, sizeof v);
  return v;
#endif
}
// Loads data that does not change during the kernel and is not read again soon, without keeping it in the L1 cache.
ECHO_DEVICE Vector load_once(const Bf16* source) {
#if defined(__CUDA_ARCH__)
  Vector v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(source));
  return v;
#else
  return load_vector(source);
#endif
}
// Loads from host memory that the host has just written.
ECHO_DEVICE Vector load_from_host(const Vector* source) {
#if defined(__CUDA_ARCH__)
  Vector v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(source));
  return v;
#else
  return *source;
#endif
}
ECHO_DEVICE void store_vector(Bf16* target, const Vector& v) { *reinterpret_cast<Vector*>(target) = v; }

// Loads a result of another block of the same kernel. Does not use the L1 cache, which may hold an older value.
template <class T>
ECHO_DEVICE T load_shared_result(const T* source) {
#if defined(__CUDA_ARCH__)
  return __ldcg(source);
#else
  return *source;
#endif
}

ECHO_DEVICE float reciprocal_root(float value) {
#if defined(__CUDA_ARCH__)
  return rsqrtf(value);
#else
  return 1 / std::sqrt(value);
#endif
}

// e^x, with an error of up to two units of the last place for results near 1.
ECHO_DEVICE float fast_exp(float x) {
#if defined(__CUDA_ARCH__)
  return __expf(x);
#else
  return std::exp(x);
#endif
}

ECHO_DEVICE float larger(float a, float b) { return a > b ? a : b; }  // b if a is NaN
template <class T>
ECHO_EITHER T min_of(T a, T b) {
  return a < b ? a : b;
}
template <class T>
ECHO_EITHER T max_of(T a, T b) {
  return a > b ? a : b;
}

// ---- input from the host ----

inline constexpr unsigned kRowThreads = 128;  // threads per block of the smaller kernels

struct alignas(16) InputHeader {
  std::uint32_t vectors;  // number of 16-byte vectors, including this one
  std::uint32_t unused[3];
};

// Copies a step's input to the device, with `blocks` blocks of threads.
struct ReceiveJob {
  const Vector* source;  // host memory; it begins with an InputHeader
  Vector* destination;
  std::uint32_t blocks;
};

template <class Block>
ECHO_DEVICE void receive_block(Block& block, const ReceiveJob& job, unsigned index) {
  block.wait_for_inputs();
  block.on_each_thread([&](unsigned thread) {
    const unsigned vectors = load_from_host(job.source).words[0];
    for (unsigned i = index * Block::kThreads + thread; i < vectors; i += job.blocks * Block::kThreads)
      job.destination[i] = load_from_host(job.source + i);
  });
}

// ---- embedding ----

// Copies the embedding of each row's token.
struct EmbedJob {
  const Bf16* embedding;    // [vocab, width]
  const std::int32_t* ids;  // [rows]
  Bf16* out;                // [rows, width]
  std::uint32_t rows, width;
};

template <class Block>
ECHO_DEVICE void embed_block(Block& block, const EmbedJob& job, unsigned row) {
  block.wait_for_inputs();
  const Bf16* const source = job.embedding + static_cast<std::size_t>(job.ids[row]) * job.width;
  Bf16* const target = job.out + static_cast<std::size_t>(row) * job.width;
  block.on_each_thread([&](unsigned thread) {
    for (unsigned offset = thread * kVectorCount; offset < job.width; offset += Block::kThreads * kVectorCount)
      store_vector(target + offset, load_vector(source + offset));
  });
}

// ---- norm ----

ECHO_DEVICE float square_sum(const Vector& v) {
  float sum = 0;
  ECHO_UNROLL
  for (unsigned w = 0; w < 4; ++w) {
    const float a = first_of(v.words[w]), b = second_of(v.words[w]);
    sum += a * a + b * b;
  }
  return sum;
}

// x * scale * weight, rounded in the same places as by rms_norm() in model/training_ops.
ECHO_DEVICE Vector normalise(const Vector& x, const Vector& weight, float scale) {
  Vector out;
  ECHO_UNROLL
  for (unsigned w = 0; w < 4; ++w)
    out.words[w] = pair_of(round_to_bf16(first_of(x.words[w]) * scale) * first_of(weight.words[w]),
                           round_to_bf16(second_of(x.words[w]) * scale) * second_of(weight.words[w]));
  return out;
}

// Adds `added` to x in place, and computes out = x / rms(x) * weight.
struct NormJob {
  Bf16* x;             // [rows, width]
  const Bf16* added;   // [rows, width], or null
  const Bf16* weight;  // [width]
  Bf16* out;           // [rows, width]
  std::uint32_t rows, width;
  float eps;
};

// Processes one row.
template <class Block>
ECHO_DEVICE void norm_block(Block& block, const NormJob& job, unsigned row) {
  constexpr unsigned kWarps = Block::kThreads / kWarpThreads, kStep = Block::kThreads * kVectorCount;
  Bf16* const x = job.x + static_cast<std::size_t>(row) * job.width;
  typename Block::template Local<float> sums;
  float* const warp_sums = block.template shared<float>();
  block.wait_for_inputs();
  block.on_each_thread([&](unsigned thread) {
    float sum = 0;
    for (unsigned offset = thread * kVectorCount; offset < job.width; offset += kStep) {
      Vector v = load_vector(x + offset);
      if (job.added != nullptr) {
        const Vector addend = load_vector(job.added + static_cast<std::size_t>(row) * job.width + offset);
        ECHO_UNROLL
        for (unsigned w = 0; w < 4; ++w)
          v.words[w] = pair_of(first_of(v.words[w]) + first_of(addend.words[w]),
                               second_of(v.words[w]) + second_of(addend.words[w]));
        store_vector(x + offset, v);
      }
      sum += square_sum(v);
    }
    sums[thread] = sum;
  });
  block.template sum<kWarpThreads>([&](unsigned thread) -> float& { return sums[thread]; });
  block.on_each_thread_and_wait([&](unsigned thread) {
    if (thread % kWarpThreads == 0) warp_sums[thread / kWarpThreads] = sums[thread];
  });
  block.on_each_thread([&](unsigned thread) {
    float sum = 0;
    ECHO_UNROLL
    for (unsigned warp = 0; warp < kWarps; ++warp) sum += warp_sums[warp];
    const float scale = reciprocal_root(sum / static_cast<float>(job.width) + job.eps);
    for (unsigned offset = thread * kVectorCount; offset < job.width; offset += kStep)
      store_vector(job.out + static_cast<std::size_t>(row) * job.width + offset,
                   normalise(load_vector(x + offset), load_vector(job.weight + offset), scale));
  });
}

// ---- silu(gate) * up ----

// silu(gate) * up, rounded in the same places as by libtorch.
ECHO_DEVICE float gated_value(float gate, float up) { return round_to_bf16(gate / (1 + fast_exp(-gate))) * up; }

struct GateJob {
  const Bf16* gate;  // [rows, stride]; only the first `width` values of a row are used
  const Bf16* up;    // [rows, stride]
  Bf16* out;         // [rows, width]
  std::uint32_t rows, width, stride;
};

// Computes the `vector`-th group of kVectorCount values of the output.
ECHO_DEVICE void gate_thread(const GateJob& job, std::size_t vector) {
  const unsigned vectors_per_row = job.width / kVectorCount;
  const std::size_t row = vector / vectors_per_row, offset = vector % vectors_per_row * kVectorCount;
  if (row >= job.rows) return;
  const Vector gate = load_vector(job.gate + row * job.stride + offset),
               up = load_vector(job.up + row * job.stride + offset);
  Vector out;
  ECHO_UNROLL
  for (unsigned w = 0; w < 4; ++w)
    out.words[w] = pair_of(gated_value(first_of(gate.words[w]), first_of(up.words[w])),
                           gated_value(second_of(gate.words[w]), second_of(up.words[w])));
  store_vector(job.out + row * job.width + offset, out);
}

}  // namespace echoline::model::cuda
