// Products of many rows with bf16 weights; included after kernels.inl, whose registers and functions it uses.
//
// A block of weights is widened to fp32 and transposed into a panel, which stays in the second-level cache while all
// rows of x are multiplied by it. Line k of a panel has element k of each of its rows of w. A tile handles
// kPanelTileRows rows of x: for each k, it multiplies element k of these rows by line k of the panel, and adds the
// products to sums in registers. Meanwhile the next block of weights is prefetched. The weights keep their order in
// memory, so that a delta changes them in place. Products and sums are fp32, without rounding to bf16.
//
// Shapes: x [rows, in], w [out, in], y [rows, out]; without requirements on alignment or multiples.
namespace echoline::model {
namespace {

// Chosen so that a tile's sums, a line of the panel and an element of x fit into registers: they use 28 of the 32
// registers of AVX-512, or all 16 of AVX2.
constexpr int kPanelTileRows = kLanes == 16 ? 8 : 4, kPanelVectors = 3;
constexpr std::int64_t kPanelDepth = 256;                          // elements of a row of weights in a panel
constexpr std::int64_t kRowsWithoutPanels = kLanes == 16 ? 8 : 5;  // with so few rows, panels would take more time
constexpr std::int64_t kCacheLine = 32;                            // bf16 numbers

// Interleaves the lanes of the lower halves (Upper = 0) or of the upper halves (Upper = 1) of a and b.
template <int Upper, std::size_t... I>
inline Words zip(Words a, Words b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (Upper * kLanes / 2 + I / 2 + I % 2 * kLanes)...);
}

// Transposes a matrix of words. The row and the lane of a word together are an index, of which each round rotates the
// bits by one. After log2(kLanes) rounds, row and lane have changed places.
inline void transpose_words(Words (&m)[kLanes]) {
  for (int round = 1; round < kLanes; round *= 2) {
    Words next[kLanes];
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = zip<0>(m[i], m[i + kLanes / 2], std::make_index_sequence<kLanes>());
      next[2 * i + 1] = zip<1>(m[i], m[i + kLanes / 2], std::make_index_sequence<kLanes>());
    }
    std::copy(next, next + kLanes, m);
  }
}

// Writes elements [0, depth) of `count` rows of w, transposed and in fp32, to panel [depth, V * kLanes]. Columns beyond
// `count` repeat the last row.
template <int V>
void fill_panel(const Bf16* w, std::int64_t in, std::int64_t count, std::int64_t depth, float* panel) {
  constexpr std::int64_t kWidth = V * kLanes;
  for (std::int64_t first = 0; first < kWidth; first += kLanes) {
    const auto row = [&](std::int64_t i) { return w + std::min(first + i, count - 1) * in; };
    // A word holds two neighbouring bf16 elements, the even one in its lower half. In the upper half it is an fp32
    // number.
    std::int64_t k = 0;
    for (; k + 2 * kLanes <= depth; k += 2 * kLanes) {
      Words pairs[kLanes];
      for (int i = 0; i < kLanes; ++i) pairs[i] = load<Words>(row(i) + k);
      transpose_words(pairs);
      for (int i = 0; i < kLanes; ++i) {
        float* const line = panel + (k + 2 * i) * kWidth + first;
        const Words even = pairs[i] << 16, odd = pairs[i] & 0xffff0000u;
        std::memcpy(line, &even, sizeof even);
        std::memcpy(line + kWidth, &odd, sizeof odd);
      }
    }
    for (; k < depth; ++k)
      for (int i = 0; i < kLanes; ++i)
        panel[k * kWidth + first + i] = std::bit_cast<float>(std::uint32_t{row(i)[k]} << 16);
  }
}

// Rows of the next block of weights, for prefetching into the second-level cache.
struct NextBlock {
  const Bf16* w;
  std::int64_t in, rows;
};

// y [M, count] becomes the transpose of x [depth, M] times the first `count` columns of the panel [depth, V * kLanes].
// With `add`, the product is added to y. Prefetches `next_block`.
template <int M, int V>
inline void panel_tile(const float* x, const float* panel, std::int64_t depth, NextBlock next_block, float* y,
                       std::int64_t y_stride, std::int64_t count, bool add) {
  Floats sums[M][V] = {};
  for (std::int64_t k = 0; k < depth;) {
    for (std::int64_t a = 0; a < next_block.rows; ++a)
      __builtin_prefetch(next_block.w + a * next_block.in + k, /*for writing*/ 0, /*cache locality*/ 2);
    for (const std::int64_t line_end = std::min(depth, k + kCacheLine); k < line_end;
         ++k, x += M, panel += V * kLanes) {
      Floats line[V];
      for (int v = 0; v < V; ++v) line[v] = load<Floats>(panel + v * kLanes);
      for (int m = 0; m < M; ++m)
        for (int v = 0; v < V; ++v) sums[m][v] += x[m] * line[v];
    }
  }
  for (int m = 0; m < M; ++m, y += y_stride) {
    if (count == V * kLanes) {
      for (int v = 0; v < V; ++v) {
        if (add) sums[m][v] += load<Floats>(y + v * kLanes);
        std::memcpy(y + v * kLanes, &sums[m][v], sizeof(Floats));
      }
    } else {
      for (std::int64_t o = 0; o < count; ++o)
        y[o] = add ? y[o] + sums[m][o / kLanes][o % kLanes] : sums[m][o / kLanes][o % kLanes];
    }
  }
}

// panel_tile() for x [depth, rows] with rows <= M.
template <int M, int V>
inline void panel_tile_for_rows(std::int64_t rows, const float* x, const float* panel, std::int64_t depth,
                                NextBlock next_block, float* y, std::int64_t y_stride, std::int64_t count, bool add) {
  if constexpr (M > 1)
    if (rows < M) return panel_tile_for_rows<M - 1, V>(rows, x, panel, depth, next_block, y, y_stride, count, add);
  panel_tile<M, V>(x, panel, depth, next_block, y, y_stride, count, add);
}

// y [rows, count] becomes x w^T, or with `add` y + x w^T, for `count` <= V * kLanes rows of w. `packed` is x as written
// by pack_tiles(), `panel` memory for kPanelDepth * V * kLanes floats.
template <int V>
void product_columns(const float* packed, std::int64_t rows, std::int64_t in, const Bf16* w, std::int64_t count,
                     float* y, std::int64_t y_stride, bool add, float* panel) {
  const std::int64_t tiles = (rows + kPanelTileRows - 1) / kPanelTileRows;
  const std::int64_t prefetch_rows = (V * kLanes + tiles - 1) / tiles;  // rows of the next block that a tile prefetches
  for (std::int64_t k = 0; k < in; k += kPanelDepth) {
    const std::int64_t depth = std::min(kPanelDepth, in - k);
    fill_panel<V>(w + k, in, count, depth, panel);
    const Bf16* const next = k + depth < in ? w + k + depth : w + count * in;  // a prefetch beyond the end does nothing
    for (std::int64_t tile_index = 0; tile_index < tiles; ++tile_index) {
      const std::int64_t first = tile_index * kPanelTileRows,
                         tile_rows = std::min<std::int64_t>(kPanelTileRows, rows - first);
      const std::int64_t prefetch_begin = std::min<std::int64_t>(tile_index * prefetch_rows, V * kLanes),
                         prefetch_end = std::min<std::int64_t>(prefetch_begin + prefetch_rows, V * kLanes);
      panel_tile_for_rows<kPanelTileRows, V>(
          tile_rows, packed + first * in + k * tile_rows, panel, depth,
          {.w = next + prefetch_begin * in, .in = in, .rows = prefetch_end - prefetch_begin}, y + first * y_stride,
          y_stride, count, add || k > 0);
    }
  }
}

// Writes rows [begin, end) of x as tiles of kPanelTileRows rows, each stored as [in, rows of the tile]; the last tile
// of x may have fewer. `begin` is a multiple of kPanelTileRows, and so is `end` unless it is `rows`. Up to
// kRowsWithoutPanels rows are written by interleave() instead.
void pack_tiles(const float* x, std::int64_t rows, std::int64_t in, std::int64_t begin, std::int64_t end,
                float* packed) {
  if (rows <= kRowsWithoutPanels) return interleave(x, rows, in, begin, end, packed);
  for (std::int64_t first = begin; first < end; first += kPanelTileRows) {
    const std::int64_t count = std::min<std::int64_t>(kPanelTileRows, rows - first);
    float* out = packed + first * in;
    for (std::int64_t k = 0; k < in; ++k, out += count) {
      const float* const column = x + first * in + k;
      if (count == kPanelTileRows) {  // a constant number of rows, so that the compiler unrolls the loop
        for (int r = 0; r < kPanelTileRows; ++r) out[r] = column[r * in];
      } else {
        for (std::int64_t r = 0; r < count; ++r) out[r] = column[r * in];
      }
    }
  }
}

void product_panels(const float* packed, std::int64_t rows, std::int64_t in, const Bf16* w, std::int64_t begin,
                    std::int64_t end, float* y, std::int64_t y_stride, bool add) {
  if (rows <= kRowsWithoutPanels) return product<Bf16>(packed, rows, in, w, begin, end, y, y_stride, add);
  alignas(64) float panel[kPanelDepth * kPanelVectors * kLanes];
  for (std::int64_t o = begin, count; o < end; o += count) {
    count = std::min<std::int64_t>(kPanelVectors * kLanes, end - o);
    // For the last four registers, two and two are faster than three and one.
    if (end - o > 3 * kLanes && end - o <= 4 * kLanes) count = 2 * kLanes;
    const auto product_of = count > 2 * kLanes ? product_columns<3>
                            : count > kLanes   ? product_columns<2>
                                               : product_columns<1>;
    product_of(packed, rows, in, w + o * in, count, y + o, y_stride, add, panel);
  }
}

}  // namespace
}  // namespace echoline::model
