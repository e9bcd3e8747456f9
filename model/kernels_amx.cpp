// The kernels for processors with AMX; see kernels.inl. Only products with bf16 weights differ from those of AVX-512.
//
// AMX multiplies bf16 tiles with fp32 sums. The weights are bf16, the activations are not: each activation is split
// into three bf16 numbers of 8 significant bits, called terms, whose sum is the fp32 number. Each product of a weight
// with a term is exact in fp32. So the result is as exact as in fp32, at five times the speed.
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of its own _mm512_undefined_epi32()
#include <immintrin.h>

namespace echoline::model {
namespace {
constexpr int kLanes = 16;
}
}  // namespace echoline::model

#include "model/kernels.inl"

namespace echoline::model {
namespace {

constexpr std::int64_t kTile = 16;                 // rows of a tile; also its columns, each an fp32 or a pair of bf16
constexpr std::int64_t kStep = 2 * kTile;          // bf16 numbers in a row of a tile
constexpr std::int64_t kTerms = 3;                 // bf16 numbers per activation
constexpr std::int64_t kTileSize = kTile * kStep;  // bf16 numbers in a tile
constexpr std::int64_t kRowBytes = 2 * kStep;      // bytes of a row of a tile

constexpr std::int64_t kPanelBytesMax = std::int64_t{1} << 19;   // bytes of weights that fit in the second-level cache
constexpr std::int64_t kPackedBytesMax = std::int64_t{1} << 20;  // bytes of packed activations that also fit there

// Up to this number of rows, AVX-512 is as fast, because reading the weights takes longer than the arithmetic.
constexpr std::int64_t kFewRows = 4;

std::int64_t div_up(std::int64_t count, std::int64_t unit) { return (count + unit - 1) / unit; }

// The operand of the instruction LDTILECFG: the shapes of the eight tile registers.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Transposes a matrix of 16 by 16 words. The masks 0x88 and 0xdd choose the even and the odd 128-bit parts of both
// operands.
void transpose(__m512i (&m)[kTile]) {
  __m512i t[kTile];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      m[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      m[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 4; ++j) {
      t[i + j] = _mm512_shuffle_i32x4(m[i + j], m[i + j + 4], 0x88);
      t[i + j + 4] = _mm512_shuffle_i32x4(m[i + j], m[i + j + 4], 0xdd);
    }
  for (int j = 0; j < 8; ++j) {
    m[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
    m[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
  }
}

std::int64_t packed_floats(std::int64_t rows, std::int64_t in) {
  if (rows <= kFewRows) return interleaved_floats(rows, in);
  return div_up(rows, kTile) * div_up(in, kStep) * kTerms * kTileSize / 2;  // a float has room for two bf16 numbers
}

// Writes, for 16 rows and 32 of their elements, three tiles, one for each term: the first 8 significant bits, the next
// and the last. A tile has a line for every two elements, which holds both for each row. Missing rows and elements are
// zero. Few rows are written by interleave() instead.
void pack(const float* x, std::int64_t rows, std::int64_t in, std::int64_t begin, std::int64_t end, float* packed) {
  if (rows <= kFewRows) return interleave(x, rows, in, begin, end, packed);
  const std::int64_t steps = div_up(in, kStep);
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  alignas(64) std::uint16_t order[32];  // selects the upper halves of the words of two registers
  for (int i = 0; i < 32; ++i) order[i] = static_cast<std::uint16_t>(2 * i + 1);
  const __m512i halves = _mm512_load_si512(order);
  for (std::int64_t first = begin; first < end; first += kTile) {
    auto* out = reinterpret_cast<Bf16*>(packed) + first / kTile * steps * kTerms * kTileSize;
    for (std::int64_t k = 0; k < in; k += kStep) {
      const auto mask = [&](std::int64_t first_element) {  // selects those of 16 elements that exist
        return static_cast<__mmask16>((1u << std::clamp<std::int64_t>(in - first_element, 0, kTile)) - 1);
      };
      const __mmask16 low = mask(k), high = mask(k + kTile);
      __m512i terms[kTerms][kTile] = {};
      for (std::int64_t r = 0; r < std::min(kTile, rows - first); ++r) {
        const float* const values = x + (first + r) * in + k;
        __m512 a = _mm512_maskz_loadu_ps(low, values), b = _mm512_maskz_loadu_ps(high, values + kTile);
        for (int term = 0; term < kTerms; ++term) {
          // The upper half of an fp32 number is a bf16 number; the difference, which is exact, remains for later terms.
          const __m512i a_bits = _mm512_castps_si512(a), b_bits = _mm512_castps_si512(b);
          terms[term][r] = _mm512_permutex2var_epi16(a_bits, halves, b_bits);
          a = _mm512_sub_ps(a, _mm512_castsi512_ps(_mm512_and_si512(a_bits, upper)));
          b = _mm512_sub_ps(b, _mm512_castsi512_ps(_mm512_and_si512(b_bits, upper)));
        }
      }
      for (int term = 0; term < kTerms; ++term) {
        transpose(terms[term]);
        for (int line = 0; line < kTile; ++line) _mm512_store_si512(out + line * kStep, terms[term][line]);
        out += kTileSize;
      }
    }
  }
}

// One thread's part of a product; see Kernels::product_bf16.
struct Product {
  const float* packed;
  std::int64_t rows, in;
  const Bf16* w;
  std::int64_t end;  // of this thread's rows of w
  float* y;
  std::int64_t y_stride;
  bool add;
  std::int64_t steps = div_up(in, kStep);

  struct EdgeTile {
    alignas(64) Bf16 tile[kTileSize];
  };
  struct TileSource {
    const Bf16* tile;
    std::int64_t stride;  // bytes
  };
  // Elements [k, k + 32) of rows [first_output, first_output + 16) of the weights: in place, or a zero-padded copy in
  // `edge` if they cross the end.
  TileSource weights(std::int64_t first_output, std::int64_t k, EdgeTile& edge) const {
    if (first_output + kTile <= end && k + kStep <= in) return {w + first_output * in + k, in * 2};
    std::memset(edge.tile, 0, sizeof edge.tile);
    const std::int64_t count = std::min(kStep, in - k);
    for (std::int64_t i = 0; i < std::min(kTile, end - first_output); ++i)
      std::memcpy(edge.tile + i * kStep, w + (first_output + i) * in + k, static_cast<std::size_t>(count) * 2);
    return {edge.tile, kStep * 2};
  }
  // The tiles that pack() wrote for the 16 rows from `first` on.
  const Bf16* activations(std::int64_t first) const {
    return reinterpret_cast<const Bf16*>(packed) + first / kTile * steps * kTerms * kTileSize;
  }

  // Writes to y the sums for rows [first, first + 16) of x and [first_output, first_output + 16) of w.
  // sums[16 i + j] belongs to row first_output + i of w and row first + j of x.
  void store_sums(const float* sums, std::int64_t first, std::int64_t first_output) const {
    __m512i lines[kTile];
    for (int i = 0; i < kTile; ++i) lines[i] = _mm512_load_si512(sums + i * kTile);
    transpose(lines);
    const auto mask = static_cast<__mmask16>((1u << std::min(kTile, end - first_output)) - 1);
    for (std::int64_t r = 0; r < std::min(kTile, rows - first); ++r) {
      float* const out = y + (first + r) * y_stride + first_output;
      __m512 sum = _mm512_castsi512_ps(lines[r]);
      if (add) sum = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, out), sum);
      _mm512_mask_storeu_ps(out, mask, sum);
    }
  }

  // Multiplies 16 rows of x by 16 M rows of w. Tile registers 0 to 3 hold sums, 4 and 5 weights, 6 and 7 activations.
  template <int M>
  void multiply_16_rows(std::int64_t first, std::int64_t first_output) const {
    const Bf16* x = activations(first);
    EdgeTile edge;
    _tile_zero(0);
    if constexpr (M == 2) _tile_zero(1);
    for (std::int64_t step = 0; step < steps; ++step) {
      TileSource source = weights(first_output, step * kStep, edge);
      _tile_loadd(4, source.tile, source.stride);
      if constexpr (M == 2) {
        source = weights(first_output + kTile, step * kStep, edge);
        _tile_loadd(5, source.tile, source.stride);
      }
      for (int term = 0; term < kTerms; ++term, x += kTileSize) {
        _tile_loadd(6, x, kRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (M == 2) _tile_dpbf16ps(1, 5, 6);
      }
    }
    alignas(64) float sums[M][kTile * kTile];
    _tile_stored(0, sums[0], kRowBytes);
    if constexpr (M == 2) _tile_stored(1, sums[1], kRowBytes);
    for (int m = 0; m < M; ++m) store_sums(sums[m], first, first_output + m * kTile);
  }

  // Multiplies 32 rows of x by 32 rows of w.
  void multiply_32_rows(std::int64_t first, std::int64_t first_output) const {
    const Bf16 *x = activations(first), *x_next = activations(first + kTile);
    EdgeTile edge, edge_next;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (std::int64_t step = 0; step < steps; ++step) {
      const TileSource source = weights(first_output, step * kStep, edge),
                       next_source = weights(first_output + kTile, step * kStep, edge_next);
      _tile_loadd(4, source.tile, source.stride);
      _tile_loadd(5, next_source.tile, next_source.stride);
      for (int term = 0; term < kTerms; ++term, x += kTileSize, x_next += kTileSize) {
        _tile_loadd(6, x, kRowBytes);
        _tile_loadd(7, x_next, kRowBytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    alignas(64) float sums[4][kTile * kTile];
    _tile_stored(0, sums[0], kRowBytes);
    _tile_stored(1, sums[1], kRowBytes);
    _tile_stored(2, sums[2], kRowBytes);
    _tile_stored(3, sums[3], kRowBytes);
    for (int i = 0; i < 4; ++i) store_sums(sums[i], first + i % 2 * kTile, first_output + i / 2 * kTile);
  }

  // Multiplies rows [first, last) of x by rows [first_output, output_end) of w.
  void multiply_panel(std::int64_t first, std::int64_t last, std::int64_t first_output, std::int64_t output_end) const {
    for (; first < last; first += 2 * kTile)
      for (std::int64_t output = first_output; output < output_end; output += 2 * kTile) {
        const bool has_two = output + kTile < output_end;
        if (has_two && first + kTile < last) {
          multiply_32_rows(first, output);
        } else {
          for (std::int64_t row = first; row < std::min(last, first + 2 * kTile); row += kTile)
            has_two ? multiply_16_rows<2>(row, output) : multiply_16_rows<1>(row, output);
        }
      }
  }
};

void product_tiles(const float* packed, std::int64_t rows, std::int64_t in, const Bf16* w, std::int64_t begin,
                   std::int64_t end, float* y, std::int64_t y_stride, bool add) {
  if (rows <= kFewRows) return product<Bf16>(packed, rows, in, w, begin, end, y, y_stride, add);
  const Product part{packed, rows, in, w, end, y, y_stride, add};
  // The rows of weights of a panel (at most four tiles), and the rows of activations: as many as fit in the
  // second-level cache.
  const std::int64_t weight_tile_bytes = 2 * kTile * in;                    // of 16 rows
  const std::int64_t packed_pair_bytes = 4 * packed_floats(2 * kTile, in);  // of 32 rows
  const std::int64_t outputs_per_panel = std::clamp<std::int64_t>(kPanelBytesMax / weight_tile_bytes, 1, 4) * kTile;
  const std::int64_t rows_together = std::max<std::int64_t>(1, kPackedBytesMax / packed_pair_bytes) * 2 * kTile;
  const TileConfig config;
  _tile_loadconfig(&config);
  for (std::int64_t first = 0; first < rows; first += rows_together)
    for (std::int64_t first_output = begin; first_output < end; first_output += outputs_per_panel)
      part.multiply_panel(first, std::min(rows, first + rows_together), first_output,
                          std::min(end, first_output + outputs_per_panel));
  _tile_release();
}

}  // namespace

extern const Kernels kAmxKernels;  // without this line, the constant would be visible in this file only
const Kernels kAmxKernels = ECHOLINE_MODEL_KERNELS("amx", product_tiles, pack, packed_floats);
}  // namespace echoline::model
