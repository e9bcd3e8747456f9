// Chooses the block kernels for this processor: the set for the widest vectors that it has. The features below are
// those for which the sets are compiled (CMakeLists.txt).
#include <atomic>
#include <cstdlib>
#include <string_view>

#include "delta/block.hpp"

namespace echoline::delta {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vbmi2");
}
#endif

const Kernels& choose_kernels() {
  const KernelList list = available_kernels();
  if (const char* wanted = std::getenv("ECHOLINE_KERNELS"))
    for (int i = 0; i < list.count; ++i)
      if (std::string_view(wanted) == list.kernels[i]->name) return *list.kernels[i];
  return *list.kernels[0];
}

std::atomic<const Kernels*>& selected_kernels() {
  static std::atomic<const Kernels*> set = &choose_kernels();
  return set;
}

}  // namespace

KernelList available_kernels() {
  KernelList list{};
#if defined(__x86_64__)
  if (has_avx512()) list.kernels[list.count++] = &kAvx512Kernels;
  if (has_avx2()) list.kernels[list.count++] = &kAvx2Kernels;
#endif
  list.kernels[list.count++] = &kPortableKernels;
  return list;
}

const Kernels& kernels() { return *selected_kernels().load(std::memory_order_relaxed); }
void select_kernels(const Kernels& set) { selected_kernels() = &set; }

}  // namespace echoline::delta
