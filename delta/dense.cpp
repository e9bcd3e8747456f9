// Byte planes and their zstd streams, for SegmentEncoder and SegmentDecoder.
#include "delta/dense.hpp"

#define ZSTD_STATIC_LINKING_ONLY  // ZSTD_c_literalCompressionMode
#include <zstd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <new>

#include "delta/exponent.hpp"

namespace echoline::delta {
namespace {

Error corrupt(std::string_view why) { return fail(Code::kCorrupt, "decode patch", "{}", why); }

// Copies byte `plane` of every element; a float's sign bit is first moved to the bottom.
template <class T>
void copy_plane(const std::byte* __restrict elements, std::size_t count, std::size_t plane, bool rotate,
                std::byte* __restrict to) {
  for (std::size_t i = 0; i < count; ++i) {
    const T bits = load<T>(elements + i * sizeof(T));
    to[i] = static_cast<std::byte>((rotate ? std::rotl(bits, 1) : bits) >> (8 * plane));
  }
}

// The inverse for all planes; the most significant comes first.
template <class T>
void join_planes(const std::byte* __restrict planes, std::size_t count, bool rotate, std::byte* __restrict elements) {
  for (std::size_t i = 0; i < count; ++i) {
    T bits = 0;
    for (std::size_t p = 0; p < sizeof(T); ++p)
      bits = static_cast<T>(bits | static_cast<T>(static_cast<T>(planes[(sizeof(T) - 1 - p) * count + i]) << (8 * p)));
    store(elements + i * sizeof(T), rotate ? std::rotr(bits, 1) : bits);
  }
}

// Whether all byte values are about equally frequent, so that an entropy code does not help. This is so for mantissas.
bool looks_random(ByteSpan bytes) {
  constexpr std::size_t kSample = 4096;
  constexpr double kBitsMin = 7.9;  // a sample of random bytes has 7.95
  if (bytes.size() < kSample) return false;
  std::array<std::uint32_t, 256> counts{};
  const std::size_t stride = bytes.size() / kSample;
  for (std::size_t i = 0; i < kSample; ++i) ++counts[static_cast<std::uint8_t>(bytes[i * stride])];
  double bits = 0;
  for (const std::uint32_t n : counts)
    if (n > 0) bits += n * std::log2(static_cast<double>(kSample) / n);
  return bits >= kBitsMin * kSample;
}

}  // namespace

Result<Stream> read_stream(Reader& reader, std::uint64_t raw_min, std::uint64_t raw_max) {
  const auto coding = reader.number<std::uint8_t>();
  const std::uint64_t raw = reader.varint();
  const std::uint64_t stored = coding == 0 ? raw : reader.varint();
  const ByteSpan bytes = reader.bytes(stored);
  if (reader.failed()) return corrupt("the bytes end within a stream");
  if (coding > 1) return corrupt(fmt::format("unknown stream coding {}", coding));
  if (raw < raw_min || raw > raw_max)
    return corrupt(fmt::format("a stream declares {} bytes, expected {} to {}", raw, raw_min, raw_max));
  return Stream{coding == 1, static_cast<std::size_t>(raw), bytes};
}

Status expand_stream(const Stream& stream, std::span<std::byte> to) {
  ECHO_CHECK(to.size() == stream.raw_bytes);
  if (!stream.compressed) {
    std::copy(stream.stored.begin(), stream.stored.end(), to.begin());
    return ok();
  }
  const std::size_t expanded_bytes = ZSTD_decompress(to.data(), to.size(), stream.stored.data(), stream.stored.size());
  if (ZSTD_isError(expanded_bytes)) return corrupt(fmt::format("zstd: {}", ZSTD_getErrorName(expanded_bytes)));
  if (expanded_bytes != to.size())
    return corrupt(fmt::format("a stream holds {} bytes, it declared {}", expanded_bytes, to.size()));
  return ok();
}

struct DenseEncoder::Context {
  explicit Context(int level) : level(level), zstd(ZSTD_createCCtx()) {
    if (!zstd) throw std::bad_alloc();
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_contentSizeFlag, 0);                      // the stream states it
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_literalCompressionMode, ZSTD_ps_enable);  // negative levels disable it
  }
  ~Context() { ZSTD_freeCCtx(zstd); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  const int level;  // for streams other than planes
  ZSTD_CCtx* zstd;
  ByteVector scratch;  // compressed bytes
  ByteVector plane;
};

DenseEncoder::DenseEncoder(int stream_level) : context_(std::make_unique<Context>(stream_level)) {}
DenseEncoder::~DenseEncoder() = default;

bool DenseEncoder::encode_stream(ByteSpan raw, std::size_t bytes_max, ByteVector& out) {
  return encode_stream(raw, context_->level, bytes_max, out);
}

bool DenseEncoder::encode_stream(ByteSpan raw, std::optional<int> level, std::size_t bytes_max, ByteVector& out) {
  // Room for a block beyond the limit, because zstd codes a block worse if its room is short. The result is then the
  // same as with unlimited room, and a hopeless attempt still ends early.
  constexpr std::size_t kSlack = ZSTD_BLOCKSIZE_MAX + 1024;
  const std::size_t room_bytes = std::min(ZSTD_compressBound(raw.size()), std::max(bytes_max, bytes_max + kSlack));
  ByteVector& scratch = context_->scratch;
  std::size_t compressed_bytes = raw.size();
  if (level) {
    ZSTD_CCtx_setParameter(context_->zstd, ZSTD_c_compressionLevel, *level);
    if (scratch.size() < room_bytes) scratch.resize(room_bytes);
    compressed_bytes = ZSTD_compress2(context_->zstd, scratch.data(), room_bytes, raw.data(), raw.size());
  }
  const bool compressed = !ZSTD_isError(compressed_bytes) && compressed_bytes < raw.size();
  const std::size_t start = out.size();
  put(out, static_cast<std::uint8_t>(compressed));
  put_varint(out, raw.size());
  if (compressed) put_varint(out, compressed_bytes);
  const ByteSpan body = compressed ? ByteSpan(scratch).first(compressed_bytes) : raw;
  if (body.size() + (out.size() - start) > bytes_max) {
    out.resize(start);
    return false;
  }
  put_bytes(out, body);
  return true;
}

bool DenseEncoder::encode(ByteSpan content, DType dtype, std::size_t bytes_max, ByteVector& out) {
  // Exponents compress because some are frequent, not because they repeat. A level that hardly searches for repetitions
  // is faster and leaves more to the entropy code.
  constexpr int kPlaneLevel = -500;
  const std::size_t size = dtype_bytes(dtype);
  const std::size_t start = out.size();
  ByteVector& plane = context_->plane;
  plane.resize(content.size() / size);
  // The top plane first: if it is too large already, the others are skipped.
  for (std::size_t p = size; p-- > 0;) {
    with_element_type(
        size, [&]<class T>(T) { copy_plane<T>(content.data(), plane.size(), p, is_float(dtype), plane.data()); });
    const std::size_t used = out.size() - start;
    const auto level = is_float(dtype) && looks_random(plane) ? std::nullopt : std::optional(kPlaneLevel);
    if (used > bytes_max || !encode_stream(plane, level, bytes_max - used, out)) {
      out.resize(start);
      return false;
    }
  }
  return true;
}

double DenseEncoder::estimate(const Content& content, DType dtype) {
  constexpr std::size_t kSample = 128;
  const std::size_t size = dtype_bytes(dtype), count = content.size() / size;
  const std::size_t stride = std::max<std::size_t>(count / kSample, 1);
  std::array<std::array<std::uint16_t, 256>, sizeof(std::uint64_t)> counts{};
  double sampled = 0;
  RawVector<std::byte> scratch;
  for (std::size_t i = 0; i < count; i += stride, ++sampled)
    with_element_type(size, [&]<class T>(T) {
      T bits = load<T>(content.part(i * sizeof(T), sizeof(T), scratch).data());
      if (is_float(dtype)) bits = std::rotl(bits, 1);
      for (std::size_t p = 0; p < sizeof(T); ++p) ++counts[p][static_cast<std::uint8_t>(bits >> (8 * p))];
    });
  static const auto n_log_n = [] {
    std::array<double, 2 * kSample> values{};
    for (std::size_t n = 1; n < values.size(); ++n)
      values[n] = static_cast<double>(n) * std::log2(static_cast<double>(n));
    return values;
  }();
  double bits = 0;
  for (std::size_t p = 0; p < size; ++p) {
    bits += n_log_n[static_cast<std::size_t>(sampled)];
    for (const std::uint16_t n : counts[p]) bits -= n_log_n[n];
  }
  return bits / 8 * static_cast<double>(count) / std::max(sampled, 1.0);
}

Status decode_dense(ByteSpan coded, DType dtype, std::span<std::byte> to) {
  const std::size_t size = dtype_bytes(dtype);
  const std::size_t count = to.size() / size;
  Reader reader(coded);
  ByteVector planes(to.size());
  for (std::size_t p = 0; p < size; ++p) {
    ECHO_ASSIGN(const Stream stream, read_stream(reader, count, count));
    ECHO_TRY(expand_stream(stream, std::span(planes).subspan(p * count, count)));
  }
  if (!reader.rest().empty()) return corrupt("a segment has bytes after its last plane");
  with_element_type(size, [&]<class T>(T) { join_planes<T>(planes.data(), count, is_float(dtype), to.data()); });
  return ok();
}

}  // namespace echoline::delta
