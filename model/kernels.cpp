#include "model/kernels.hpp"

#include <cstdlib>
#include <string_view>

namespace echoline::model {

#if defined(__x86_64__)
extern const Kernels kAvx512Kernels, kAvx2Kernels;
#endif
extern const Kernels kPortableKernels;

KernelSets available_kernels() {
  KernelSets sets{};
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    sets.of[sets.count++] = &kAvx512Kernels;
  if (avx2) sets.of[sets.count++] = &kAvx2Kernels;
#endif
  sets.of[sets.count++] = &kPortableKernels;
  return sets;
}

const Kernels& kernels() {
  static const Kernels& chosen = [&]() -> const Kernels& {
    const KernelSets sets = available_kernels();
    if (const char* wanted = std::getenv("ECHOLINE_KERNELS"))
      for (int i = 0; i < sets.count; ++i)
        if (std::string_view(wanted) == sets.of[i]->name) return *sets.of[i];
    return *sets.of[0];
  }();
  return chosen;
}

}  // namespace echoline::model
