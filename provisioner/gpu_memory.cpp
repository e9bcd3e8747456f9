// The table of GPUs and their memory.
#include "provisioner/gpu_memory.hpp"

#include <array>
#include <string>

#include "provisioner/throughput.hpp"

namespace echoline::provisioner {
namespace {

constexpr double kMibPerGib = 1024, kGbPerMib = 1.048576e-3;

struct KnownGpu {
  std::string_view key;  // gpu_key()
  // Nominal sizes in GiB, smaller first; 0: the GPU is sold with one size only.
  double size_gib, other_size_gib = 0;
};

// From the data sheets of NVIDIA and AMD, by the names in catalogues.
constexpr std::array kKnownGpus{
    KnownGpu{"a10", 24},
    KnownGpu{"a10g", 24},
    KnownGpu{"a16", 16},
    KnownGpu{"a30", 24},
    KnownGpu{"a40", 48},
    KnownGpu{"a100", 40, 80},
    KnownGpu{"a100pcie", 40, 80},
    KnownGpu{"a100sxm", 40, 80},
    KnownGpu{"a100sxm4", 40, 80},
    KnownGpu{"a10080gb", 80},
    KnownGpu{"a10080gbsxm", 80},
    KnownGpu{"a4000", 16},
    KnownGpu{"a4500", 20},
    KnownGpu{"a5000", 24},
    KnownGpu{"a6000", 48},
    KnownGpu{"b200", 180, 192},
    KnownGpu{"b300", 262, 288},
    KnownGpu{"h100", 80, 94},
    KnownGpu{"h100mega", 80},
    KnownGpu{"h100nvl", 94},
    KnownGpu{"h100pcie", 80},
    KnownGpu{"h100sxm", 80},
    KnownGpu{"h200", 141},
    KnownGpu{"h200nvl", 141},
    KnownGpu{"h200sxm", 141},
    KnownGpu{"k80", 12},
    KnownGpu{"l4", 24},
    KnownGpu{"l40", 48},
    KnownGpu{"l40s", 48},
    KnownGpu{"mi300x", 192},
    KnownGpu{"p100", 16},
    KnownGpu{"p4", 8},
    KnownGpu{"rtx2000ada", 16},
    KnownGpu{"rtx3060", 8, 12},
    KnownGpu{"rtx3070", 8},
    KnownGpu{"rtx3080", 10, 12},
    KnownGpu{"rtx3080ti", 12},
    KnownGpu{"rtx3090", 24},
    KnownGpu{"rtx3090ti", 24},
    KnownGpu{"rtx4000ada", 20},
    KnownGpu{"rtx4060", 8, 16},
    KnownGpu{"rtx4070", 12, 16},
    KnownGpu{"rtx4070ti", 12, 16},
    KnownGpu{"rtx4080", 16},
    KnownGpu{"rtx4090", 24, 48},
    KnownGpu{"rtx5000ada", 32},
    KnownGpu{"rtx5070", 12},
    KnownGpu{"rtx5070ti", 16},
    KnownGpu{"rtx5080", 16},
    KnownGpu{"rtx5090", 32},
    KnownGpu{"rtx6000ada", 48},
    KnownGpu{"rtxa2000", 6, 12},
    KnownGpu{"rtxa4000", 16},
    KnownGpu{"rtxa4500", 20},
    KnownGpu{"rtxa5000", 24},
    KnownGpu{"rtxa6000", 48},
    KnownGpu{"rtxpro6000", 96},
    KnownGpu{"rtxpro6000s", 96},
    KnownGpu{"rtxpro6000ws", 96},
    KnownGpu{"t4", 16},
    KnownGpu{"v100", 16, 32},
    KnownGpu{"v10032gb", 32},
};

// Whether a stated size means this nominal one. It may be smaller, because part of the memory is reserved for error
// correction.
bool means_size(double stated_gib, double nominal_gib) {
  constexpr double kLeast = 0.88, kMost = 1.03;
  return nominal_gib > 0 && stated_gib >= kLeast * nominal_gib && stated_gib <= kMost * nominal_gib;
}

}  // namespace

std::optional<double> gpu_memory_gb(std::string_view gpu, int count, std::optional<double> stated_mib) {
  const KnownGpu* known = nullptr;
  const std::string key = gpu_key(gpu);
  for (const KnownGpu& each : kKnownGpus)
    if (each.key == key) known = &each;
  const auto gb_of_gib = [](double gib) { return gib * kMibPerGib * kGbPerMib; };
  const auto is_nominal = [&](double gib) {
    return known && (means_size(gib, known->size_gib) || means_size(gib, known->other_size_gib));
  };
  if (stated_mib) {
    const double stated_gib = *stated_mib < kMibPerGib ? *stated_mib : *stated_mib / kMibPerGib;
    if (count == 1) return gb_of_gib(stated_gib);
    if (is_nominal(stated_gib / count)) return gb_of_gib(stated_gib / count);  // stated for all GPUs together
    if (is_nominal(stated_gib)) return gb_of_gib(stated_gib);                  // stated for one
  }
  return known ? std::optional(gb_of_gib(known->size_gib)) : std::nullopt;
}

}  // namespace echoline::provisioner
