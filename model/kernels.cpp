#include "model/kernels.hpp"

#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace echoline::model {

#if defined(__x86_64__)
extern const Kernels kAmxKernels, kAvx512Kernels, kAvx2Kernels;

namespace {

// Whether the processor has AMX for bf16 and the operating system permits it, which a process must request once.
bool amx_permitted() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;      // of cpuid 7.0, edx
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16) == 0 || (d & kTiles) == 0) return false;
  return ::syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

}  // namespace
#endif
extern const Kernels kPortableKernels;

KernelSets available_kernels() {
  KernelSets sets{};
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  static const bool amx = avx512 && amx_permitted();
  if (amx) sets.of[sets.count++] = &kAmxKernels;
  if (avx512) sets.of[sets.count++] = &kAvx512Kernels;
  if (avx2) sets.of[sets.count++] = &kAvx2Kernels;
#endif
  sets.of[sets.count++] = &kPortableKernels;
  return sets;
}

const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    const KernelSets sets = available_kernels();
    if (const char* wanted = std::getenv("ECHOLINE_KERNELS"))
      for (int i = 0; i < sets.count; ++i)
        if (std::string_view(wanted) == sets.of[i]->name) return sets.of[i];
    return sets.of[0];
  }();
  return *chosen;
}

}  // namespace echoline::model
