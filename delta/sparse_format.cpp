#include "delta/sparse_format.hpp"

namespace echoline::delta {

ExponentField exponent_field(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3:
      return {3, 0xf};
    case DType::kF8E5M2:
      return {2, 0x1f};
    case DType::kF16:
      return {10, 0x1f};
    case DType::kBF16:
      return {7, 0xff};
    case DType::kF32:
      return {23, 0xff};
    case DType::kF64:
      return {52, 0x7ff};
    default:
      return {};
  }
}

const std::array<Frequencies, kGapTables>& gap_frequencies() {
  static const auto tables = [] {
    // 65536 m / (1 + m)
    constexpr std::array<std::uint64_t, kGapTables> kRatio = {33478, 34894, 36303, 37699, 39076, 40431, 41759, 43055,
                                                              44317, 45541, 46724, 47864, 48960, 50010, 51013, 51969,
                                                              52877, 53739, 54554, 55323, 56048, 56730, 57370, 57969};
    std::array<Frequencies, kGapTables> made;
    for (unsigned i = 0; i < kGapTables; ++i) {
      std::array<std::uint64_t, kGapEscape + 1> weights;
      weights[0] = 1u << 28;
      for (unsigned t = 1; t <= kGapEscape; ++t)
        weights[t] = std::max<std::uint64_t>(weights[t - 1] * kRatio[i] >> 16, 1);
      weights[kGapEscape] = (weights[kGapEscape] << 16) / (65536 - kRatio[i]);
      made[i] = normalise(weights);
    }
    return made;
  }();
  return tables;
}

BlockModel model_for(const BlockModel& model, unsigned symbol) {
  BlockModel m = model;
  const std::int64_t base = static_cast<std::int64_t>(model.base) + symbol - kSymbolUnshifted;
  m.base = static_cast<std::uint32_t>(std::max<std::int64_t>(base, 0));
  return m;
}

}  // namespace echoline::delta
