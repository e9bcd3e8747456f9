// Byte planes and their zstd streams, for SegmentEncoder and SegmentDecoder. Plane i holds byte i of every element.
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

Error corrupt(std::string_view defect) { return fail(Code::kCorrupt, "decode patch", "{}", defect); }

// Copies byte `plane` of every element, counted from the lowest. A float is first rotated by one bit, which moves its
// sign to the bottom and its exponent to the top.
template <class T>
void copy_plane(const std::byte* __restrict elements, std::size_t count, std::size_t plane, bool is_float,
                std::byte* __restrict to) {
  for (std::size_t i = 0; i < count; ++i) {
    const T bits = load<T>(elements + i * sizeof(T));
    to[i] = static_cast<std::byte>((is_float ? std::rotl(bits, 1) : bits) >> (8 * plane));
  }
}

// The inverse for all planes; the most significant comes first.
template <class T>
void join_planes(const std::byte* __restrict planes, std::size_t count, bool is_float, std::byte* __restrict elements) {
  for (std::size_t i = 0; i < count; ++i) {
    T bits = 0;
    for (std::size_t byte_index = 0; byte_index < sizeof(T); ++byte_index) {
      const T byte = static_cast<T>(planes[(sizeof(T) - 1 - byte_index) * count + i]);
      bits = static_cast<T>(bits | static_cast<T>(byte << (8 * byte_index)));
    }
    store(elements + i * sizeof(T), is_float ? std::rotr(bits, 1) : bits);
  }
}

// Whether all byte values of a sample are about equally frequent, so that an entropy code does not help. This is so for
// the planes of mantissas.
bool looks_random(ByteSpan bytes) {
  constexpr std::size_t kSampleBytes = 4096;
  constexpr double kEntropyMin = 7.9;  // bits per byte; a sample of 4096 random bytes has 7.95 on average
  if (bytes.size() < kSampleBytes) return false;
  std::array<std::uint32_t, 256> counts{};
  const std::size_t stride = bytes.size() / kSampleBytes;
  for (std::size_t i = 0; i < kSampleBytes; ++i) ++counts[static_cast<std::uint8_t>(bytes[i * stride])];
  double entropy_bits = 0;
  for (const std::uint32_t count : counts)
    if (count > 0) entropy_bits += count * std::log2(static_cast<double>(kSampleBytes) / count);
  return entropy_bits >= kEntropyMin * kSampleBytes;
}

}  // namespace

Result<Stream> read_stream(ByteReader& reader, std::uint64_t raw_min, std::uint64_t raw_max) {
  const auto coding = reader.read_number<std::uint8_t>();  // 0: unchanged, 1: zstd
  const std::uint64_t raw_bytes = reader.read_varint();
  const std::uint64_t stored_bytes = coding == 0 ? raw_bytes : reader.read_varint();
  const ByteSpan stored = reader.read_bytes(stored_bytes);
  if (reader.failed()) return corrupt("the bytes end within a stream");
  if (coding > 1) return corrupt(fmt::format("unknown stream coding {}", coding));
  if (raw_bytes < raw_min || raw_bytes > raw_max)
    return corrupt(fmt::format("a stream declares {} bytes, expected {} to {}", raw_bytes, raw_min, raw_max));
  return Stream{.compressed = coding == 1, .raw_bytes = static_cast<std::size_t>(raw_bytes), .stored = stored};
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
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_literalCompressionMode, ZSTD_ps_enable);  // negative levels turn it off
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
  // Room for a block (and 1024 bytes for its headers) beyond the limit, because zstd codes a block worse if its room is
  // short. The result is then the same as with unlimited room, and a hopeless attempt still ends early.
  constexpr std::size_t kExtraRoomBytes = ZSTD_BLOCKSIZE_MAX + 1024;
  const std::size_t limit_with_room = std::max(bytes_max, bytes_max + kExtraRoomBytes);  // the sum may overflow
  const std::size_t room_bytes = std::min(ZSTD_compressBound(raw.size()), limit_with_room);
  ByteVector& scratch = context_->scratch;
  std::size_t compressed_bytes = raw.size();
  if (level) {
    ZSTD_CCtx_setParameter(context_->zstd, ZSTD_c_compressionLevel, *level);
    if (scratch.size() < room_bytes) scratch.resize(room_bytes);
    compressed_bytes = ZSTD_compress2(context_->zstd, scratch.data(), room_bytes, raw.data(), raw.size());
  }
  const bool is_compressed = !ZSTD_isError(compressed_bytes) && compressed_bytes < raw.size();
  const std::size_t old_size = out.size();
  put(out, static_cast<std::uint8_t>(is_compressed));
  put_varint(out, raw.size());
  if (is_compressed) put_varint(out, compressed_bytes);
  const ByteSpan body = is_compressed ? ByteSpan(scratch).first(compressed_bytes) : raw;
  if (body.size() + (out.size() - old_size) > bytes_max) {
    out.resize(old_size);
    return false;
  }
  put_bytes(out, body);
  return true;
}

bool DenseEncoder::encode(ByteSpan content, DType dtype, std::size_t bytes_max, ByteVector& out) {
  // Exponents compress because some are frequent, not because they repeat. A level that hardly searches for repetitions
  // is faster and leaves more to the entropy code.
  constexpr int kPlaneLevel = -500;  // of zstd: the more negative, the fewer searches
  const std::size_t element_bytes = dtype_bytes(dtype);
  const std::size_t old_size = out.size();
  ByteVector& plane = context_->plane;
  plane.resize(content.size() / element_bytes);
  // Begins with the top plane, because the others are skipped if it is too large already.
  for (std::size_t byte_index = element_bytes; byte_index-- > 0;) {
    with_element_type(element_bytes, [&]<class T>(T) {
      copy_plane<T>(content.data(), plane.size(), byte_index, is_float(dtype), plane.data());
    });
    const std::size_t used_bytes = out.size() - old_size;
    const auto level = is_float(dtype) && looks_random(plane) ? std::nullopt : std::optional(kPlaneLevel);
    // used_bytes is at most bytes_max, because encode_stream() keeps to its limit.
    if (!encode_stream(plane, level, bytes_max - used_bytes, out)) {
      out.resize(old_size);
      return false;
    }
  }
  return true;
}

double DenseEncoder::estimate_bytes(const Content& content, DType dtype) {
  constexpr std::size_t kSampleElements = 128;
  const std::size_t element_bytes = dtype_bytes(dtype), count = content.size() / element_bytes;
  const std::size_t stride = std::max<std::size_t>(count / kSampleElements, 1);
  std::array<std::array<std::uint16_t, 256>, sizeof(std::uint64_t)> counts{};
  double sampled = 0;
  RawVector<std::byte> scratch;
  for (std::size_t i = 0; i < count; i += stride, ++sampled)
    with_element_type(element_bytes, [&]<class T>(T) {
      T bits = load<T>(content.part(i * sizeof(T), sizeof(T), scratch).data());
      if (is_float(dtype)) bits = std::rotl(bits, 1);
      for (std::size_t byte_index = 0; byte_index < sizeof(T); ++byte_index)
        ++counts[byte_index][static_cast<std::uint8_t>(bits >> (8 * byte_index))];
    });
  // 2 * kSampleElements: the stride is rounded down, so up to twice as many elements may be sampled.
  static const auto n_log_n = [] {
    std::array<double, 2 * kSampleElements> values{};
    for (std::size_t n = 1; n < values.size(); ++n)
      values[n] = static_cast<double>(n) * std::log2(static_cast<double>(n));
    return values;
  }();
  // The entropy of each plane: N log2 N - sum of n log2 n, with the count n of each byte value among N bytes.
  double entropy_bits = 0;
  for (std::size_t byte_index = 0; byte_index < element_bytes; ++byte_index) {
    entropy_bits += n_log_n[static_cast<std::size_t>(sampled)];
    for (const std::uint16_t n : counts[byte_index]) entropy_bits -= n_log_n[n];
  }
  return entropy_bits / 8 * static_cast<double>(count) / std::max(sampled, 1.0);
}

Status decode_dense(ByteSpan coded, DType dtype, std::span<std::byte> to) {
  const std::size_t element_bytes = dtype_bytes(dtype);
  const std::size_t count = to.size() / element_bytes;
  ByteReader reader(coded);
  ByteVector planes(to.size());
  for (std::size_t plane = 0; plane < element_bytes; ++plane) {
    ECHO_ASSIGN(const Stream stream, read_stream(reader, /*raw_min=*/count, /*raw_max=*/count));
    ECHO_TRY(expand_stream(stream, std::span(planes).subspan(plane * count, count)));
  }
  if (!reader.remaining().empty()) return corrupt("a segment has bytes after its last plane");
  with_element_type(element_bytes,
                    [&]<class T>(T) { join_planes<T>(planes.data(), count, is_float(dtype), to.data()); });
  return ok();
}

}  // namespace echoline::delta
