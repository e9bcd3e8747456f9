// Number types, packs of values, and the description of a block of threads, for the device code of a training pass.
// training_kernels.cu runs this code on real threads; the tests run it with loops on the CPU. The language is C++17,
// because CUDA compilers lag behind. Needs no libtorch. Internal to model/.
//
// A class `Block` of kThreads threads has
//   Block::Local<T>     one T per thread, indexed by thread; in registers on a device
//   each(f)             f(thread) on every thread
//   barrier()           all threads of the block see what any of them wrote to shared and global memory before
//   warp_sum(local)     replaces each thread's value by the sum over its warp; warp_max() by the maximum
//   block_sum(local)    the same over the block; block_max() by the maximum
//   shared()            memory that the block's threads share: the floats that a kernel needs, at most kSharedFloats
// Code outside each() runs the same way on all threads.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#define ECHO_TRAINING_DEVICE __device__ __forceinline__
#else
#define ECHO_TRAINING_DEVICE inline
#endif
#if defined(__CUDA_ARCH__)
#define ECHO_TRAINING_UNROLL _Pragma("unroll")
#else
#define ECHO_TRAINING_UNROLL
#endif

namespace echoline::model::training {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kSharedFloats = 4096;

// ---- numbers ----

struct Bf16 {
  std::uint16_t bits;
};

ECHO_TRAINING_DEVICE float widen(float x) { return x; }
ECHO_TRAINING_DEVICE float widen(Bf16 x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x.bits) << 16;
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

template <class T>
ECHO_TRAINING_DEVICE T narrow_to(float x);
template <>
ECHO_TRAINING_DEVICE float narrow_to<float>(float x) {
  return x;
}
// Rounds to nearest, ties to even.
template <>
ECHO_TRAINING_DEVICE Bf16 narrow_to<Bf16>(float x) {
#if defined(__CUDA_ARCH__)
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  if (std::isnan(x)) return {0x7fc0};  // a NaN; the addition below could make it infinite
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}
// The value of x after it was stored as a T.
template <class T>
ECHO_TRAINING_DEVICE float round_to(float x) {
  return widen(narrow_to<T>(x));
}

// Operations that the compiler must not fuse or replace on a device. multiply_add() is a * b + c, rounded once.
#if defined(__CUDA_ARCH__)
ECHO_TRAINING_DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
ECHO_TRAINING_DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
ECHO_TRAINING_DEVICE float multiply_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
ECHO_TRAINING_DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
ECHO_TRAINING_DEVICE float root(float a) { return __fsqrt_rn(a); }
ECHO_TRAINING_DEVICE float inverse_root(float a) { return rsqrtf(a); }
#else
inline float times(float a, float b) { return a * b; }
inline float plus(float a, float b) { return a + b; }
inline float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }
inline float divide(float a, float b) { return a / b; }
inline float root(float a) { return std::sqrt(a); }
inline float inverse_root(float a) { return 1.0f / std::sqrt(a); }
#endif
// e^a with the precision of a T.
template <class T>
ECHO_TRAINING_DEVICE float exponential(float a) {
#if defined(__CUDA_ARCH__)
  if (sizeof(T) < sizeof(float)) return __expf(a);
#endif
  return expf(a);
}

// Values that a thread loads and stores at once.
template <class T, unsigned kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T values[kCount];
};
// Values in one load or store of 16 bytes.
template <class T>
constexpr unsigned kValuesPerPack = 16 / sizeof(T);

template <class T, unsigned kCount>
ECHO_TRAINING_DEVICE Pack<T, kCount> load(const T* source) {
  return *reinterpret_cast<const Pack<T, kCount>*>(source);
}
template <class T, unsigned kCount>
ECHO_TRAINING_DEVICE void store(T* target, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(target) = pack;
}

}  // namespace echoline::model::training
