// The fixed tables of gaps, and the model of a block.
#include "delta/sparse_format.hpp"

namespace echoline::delta {

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

const RansEntry* gap_entries(unsigned table) {
  static const auto entries = [] {
    std::vector<RansEntry> made(kGapTables * kRansSlots);
    for (unsigned i = 0; i < kGapTables; ++i) rans_table(gap_frequencies()[i], false, made.data() + i * kRansSlots);
    return made;
  }();
  return entries.data() + table * kRansSlots;
}

BlockModel model_for(const BlockModel& model, unsigned symbol) {
  BlockModel m = model;
  const std::int64_t base = static_cast<std::int64_t>(model.base) + symbol - kSymbolUnshifted;
  m.base = static_cast<std::uint32_t>(std::max<std::int64_t>(base, 0));
  return m;
}

}  // namespace echoline::delta
