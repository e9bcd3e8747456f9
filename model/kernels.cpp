// Chooses the kernels for this processor.
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

// Requests AMX, which a process must do once. Returns whether the processor has AMX for bf16 and the operating system
// permits it.
bool request_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;      // flags in edx of the CPUID leaf 7
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // Linux's ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (edx & kBf16) == 0 || (edx & kTiles) == 0) return false;
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
  static const bool amx = avx512 && request_amx();
  if (amx) sets.best_first[sets.count++] = &kAmxKernels;
  if (avx512) sets.best_first[sets.count++] = &kAvx512Kernels;
  if (avx2) sets.best_first[sets.count++] = &kAvx2Kernels;
#endif
  sets.best_first[sets.count++] = &kPortableKernels;
  return sets;
}

const Kernels& kernels() {
  static const Kernels* const chosen = [] {
    const KernelSets sets = available_kernels();
    if (const char* name = std::getenv("ECHOLINE_KERNELS"))
      for (int i = 0; i < sets.count; ++i)
        if (std::string_view(name) == sets.best_first[i]->name) return sets.best_first[i];
    return sets.best_first[0];
  }();
  return *chosen;
}

}  // namespace echoline::model
