// The fixed tables of gaps (numbers of unchanged elements between two changes), and the model of a block.
#include "delta/sparse_format.hpp"

namespace echoline::delta {

const std::array<Frequencies, kGapTables>& gap_frequencies() {
  static const auto tables = [] {
    // 65536 m / (1 + m) for the means m of sparse_format.hpp: the ratio of successive probabilities, as integers,
    // because all machines must compute the same tables.
    constexpr std::array<std::uint64_t, kGapTables> kRatio = {33478, 34894, 36303, 37699, 39076, 40431, 41759, 43055,
                                                              44317, 45541, 46724, 47864, 48960, 50010, 51013, 51969,
                                                              52877, 53739, 54554, 55323, 56048, 56730, 57370, 57969};
    std::array<Frequencies, kGapTables> frequencies;
    for (unsigned i = 0; i < kGapTables; ++i) {
      std::array<std::uint64_t, kGapEscape + 1> weights;
      weights[0] = 1u << 28;  // large, so that the weights below keep their precision
      // Each weight is the previous one times m / (1 + m). The last stands for all longer gaps, so it gets their sum.
      for (unsigned token = 1; token <= kGapEscape; ++token)
        weights[token] = std::max<std::uint64_t>(weights[token - 1] * kRatio[i] >> 16, 1);
      weights[kGapEscape] = (weights[kGapEscape] << 16) / (65536 - kRatio[i]);
      frequencies[i] = normalise(weights);
    }
    return frequencies;
  }();
  return tables;
}

const RansEntry* gap_decode_table(unsigned table) {
  static const auto entries = [] {
    std::vector<RansEntry> all_entries(kGapTables * kRansSlots);
    for (unsigned i = 0; i < kGapTables; ++i)
      fill_decode_table(gap_frequencies()[i], kWithoutEscape, all_entries.data() + i * kRansSlots);
    return all_entries;
  }();
  return entries.data() + table * kRansSlots;
}

BlockModel model_for(const BlockModel& model, unsigned symbol) {
  BlockModel block_model = model;
  // The symbol says by how many exponents the block's classes are shifted.
  const std::int64_t base = static_cast<std::int64_t>(model.base) + symbol - kSymbolUnshifted;
  block_model.base = static_cast<std::uint32_t>(std::max<std::int64_t>(base, 0));
  return block_model;
}

}  // namespace echoline::delta
