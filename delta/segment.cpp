#include "delta/segment.hpp"

#include <zstd.h>

#include <algorithm>
#include <limits>
#include <new>

namespace echoline::delta {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();
constexpr std::size_t kGapBytesMax = 4;   // a gap is below 2^22
constexpr std::size_t kStepBytesMax = 3;  // a step is below 2^16

Error corrupt(std::string_view why) { return fail(Code::kCorrupt, "decode patch", "{}", why); }

// Calls f with a value of the unsigned integer type of the element size.
template <class F>
auto with_element_type(std::size_t element_bytes, F&& f) {
  switch (element_bytes) {
    case 1:
      return f(std::uint8_t{});
    case 2:
      return f(std::uint16_t{});
    case 4:
      return f(std::uint32_t{});
    default:
      return f(std::uint64_t{});
  }
}

bool has_steps(DType dtype) { return dtype == DType::kF16 || dtype == DType::kBF16; }

// Bits of a 16-bit float as an integer that grows with the value: neighbouring floats differ by one. A bijection.
std::uint16_t to_ordered(std::uint16_t bits) {
  return static_cast<std::uint16_t>(bits & 0x8000 ? ~bits : bits | 0x8000);
}
std::uint16_t from_ordered(std::uint16_t ordered) {
  return static_cast<std::uint16_t>(ordered & 0x8000 ? ordered & 0x7fff : ~ordered);
}

// Small magnitudes of either sign to small numbers: 0, -1, 1, -2, ...
std::uint16_t zigzag(std::uint16_t step) {
  return static_cast<std::uint16_t>((step << 1) ^ (step & 0x8000 ? 0xffff : 0));
}
std::uint16_t unzigzag(std::uint16_t code) { return static_cast<std::uint16_t>((code >> 1) ^ (code & 1 ? 0xffff : 0)); }

// Appends the positions where the two differ in their bits.
template <class T>
void find_changes(ByteSpan prev, ByteSpan cur, std::vector<std::uint32_t>& positions) {
  constexpr std::size_t kPerWord = 8 / sizeof(T);
  const std::size_t count = cur.size() / sizeof(T);
  const auto check = [&](std::size_t i) {
    if (load<T>(prev.data() + i * sizeof(T)) != load<T>(cur.data() + i * sizeof(T)))
      positions.push_back(static_cast<std::uint32_t>(i));
  };
  std::size_t i = 0;
  for (; i + kPerWord <= count; i += kPerWord) {
    if (load<std::uint64_t>(prev.data() + i * sizeof(T)) == load<std::uint64_t>(cur.data() + i * sizeof(T))) continue;
    for (std::size_t k = 0; k < kPerWord; ++k) check(i + k);
  }
  for (; i < count; ++i) check(i);
}

// Byte `plane` of every element.
template <class T>
void copy_plane(ByteSpan elements, std::size_t plane, std::byte* to) {
  const std::size_t count = elements.size() / sizeof(T);
  for (std::size_t i = 0; i < count; ++i) to[i] = elements[i * sizeof(T) + plane];
}

template <class T>
void spread_plane(ByteSpan bytes, std::size_t plane, std::byte* elements) {
  for (std::size_t i = 0; i < bytes.size(); ++i) elements[i * sizeof(T) + plane] = bytes[i];
}

ByteVector split_planes(ByteSpan elements, std::size_t element_bytes) {
  ByteVector planes(elements.size());
  with_element_type(element_bytes, [&]<class T>(T) {
    for (std::size_t p = 0; p < sizeof(T); ++p)
      copy_plane<T>(elements, p, planes.data() + p * elements.size() / sizeof(T));
  });
  return planes;
}

Result<ByteVector> expand(const Stream& stream) {
  ByteVector raw(stream.raw_bytes);
  ECHO_TRY(expand_stream(stream, raw));
  return raw;
}

Result<std::vector<std::uint32_t>> decode_positions(ByteSpan gaps, std::uint64_t changed, std::uint64_t elements) {
  std::vector<std::uint32_t> positions(static_cast<std::size_t>(changed));
  Reader reader(gaps);
  std::uint64_t next = 0;
  for (std::uint32_t& position : positions) {
    const std::uint64_t gap = reader.varint();
    if (reader.failed() || gap >= elements - next)
      return corrupt("the positions of a segment are cut short or leave the segment");
    position = static_cast<std::uint32_t>(next + gap);
    next = position + 1ull;
  }
  if (!reader.rest().empty()) return corrupt("a segment has bytes after its last position");
  return positions;
}

// New values from the old ones and zig-zag steps of their ordered integers.
Result<ByteVector> decode_steps(ByteSpan steps, const std::vector<std::uint32_t>& positions, ByteSpan old) {
  ByteVector values(positions.size() * 2);
  Reader reader(steps);
  for (std::size_t i = 0; i < positions.size(); ++i) {
    const std::uint64_t code = reader.varint();
    if (reader.failed() || code > 0xffff) return corrupt("the steps of a segment are cut short or out of range");
    const auto before = to_ordered(load<std::uint16_t>(old.data() + positions[i] * 2ull));
    const auto step = unzigzag(static_cast<std::uint16_t>(code));
    store(values.data() + i * 2, from_ordered(static_cast<std::uint16_t>(before + step)));
  }
  if (!reader.rest().empty()) return corrupt("a segment has bytes after its last step");
  return values;
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
  const std::size_t got = ZSTD_decompress(to.data(), to.size(), stream.stored.data(), stream.stored.size());
  if (ZSTD_isError(got)) return corrupt(fmt::format("zstd: {}", ZSTD_getErrorName(got)));
  if (got != to.size()) return corrupt(fmt::format("a stream holds {} bytes, it declared {}", got, to.size()));
  return ok();
}

Result<Segment> read_segment(Reader& reader, DType dtype, std::uint64_t elements) {
  Segment segment;
  segment.elements = elements;
  const auto coding = reader.number<std::uint8_t>();
  if (reader.failed()) return corrupt("the bytes end before a segment");
  if (coding > static_cast<std::uint8_t>(SegmentCoding::kDense))
    return corrupt(fmt::format("unknown segment coding {}", coding));
  segment.coding = static_cast<SegmentCoding>(coding);
  if (segment.coding == SegmentCoding::kUntouched) return segment;
  const std::uint64_t changed = segment.changed = reader.varint();
  if (reader.failed() || changed == 0 || changed > elements)
    return corrupt(fmt::format("a segment declares {} changes of {} elements", changed, elements));
  const ByteSpan start = reader.rest();
  const std::size_t size = dtype_bytes(dtype);
  if (segment.coding == SegmentCoding::kDense) {
    for (std::size_t p = 0; p < size; ++p) ECHO_TRY(read_stream(reader, elements, elements));
  } else {
    ECHO_TRY(read_stream(reader, changed, changed * kGapBytesMax));
    if (segment.coding == SegmentCoding::kSparseRaw) {
      ECHO_TRY(read_stream(reader, changed * size, changed * size));
    } else {
      if (!has_steps(dtype)) return corrupt(fmt::format("steps in a tensor of {}", dtype_name(dtype)));
      ECHO_TRY(read_stream(reader, changed, changed * kStepBytesMax));
    }
  }
  segment.streams = start.first(start.size() - reader.rest().size());
  return segment;
}

Status decode_dense(const Segment& segment, DType dtype, std::span<std::byte> to) {
  const std::size_t size = dtype_bytes(dtype);
  ECHO_CHECK(segment.coding == SegmentCoding::kDense && to.size() == segment.elements * size);
  Reader reader(segment.streams);
  ByteVector plane(static_cast<std::size_t>(segment.elements));
  for (std::size_t p = 0; p < size; ++p) {
    ECHO_ASSIGN(const Stream stream, read_stream(reader, segment.elements, segment.elements));
    ECHO_TRY(expand_stream(stream, plane));
    with_element_type(size, [&]<class T>(T) { spread_plane<T>(plane, p, to.data()); });
  }
  return ok();
}

Result<Replacement> decode_replacement(const Segment& segment, DType dtype, ByteSpan old) {
  const std::size_t size = dtype_bytes(dtype);
  ECHO_CHECK(old.size() == segment.elements * size);
  Replacement result;
  if (segment.coding == SegmentCoding::kUntouched) return result;
  if (segment.coding == SegmentCoding::kDense) {
    result.all = true;
    result.values.resize(old.size());
    ECHO_TRY(decode_dense(segment, dtype, result.values));
    return result;
  }
  Reader reader(segment.streams);
  const std::uint64_t changed = segment.changed;
  {
    ECHO_ASSIGN(const Stream stream, read_stream(reader, changed, changed * kGapBytesMax));
    ECHO_ASSIGN(const ByteVector gaps, expand(stream));
    ECHO_ASSIGN(result.positions, decode_positions(gaps, changed, segment.elements));
  }
  if (segment.coding == SegmentCoding::kSparseStep) {
    ECHO_ASSIGN(const Stream stream, read_stream(reader, changed, changed * kStepBytesMax));
    ECHO_ASSIGN(const ByteVector steps, expand(stream));
    ECHO_ASSIGN(result.values, decode_steps(steps, result.positions, old));
    return result;
  }
  ECHO_ASSIGN(const Stream stream, read_stream(reader, changed * size, changed * size));
  ECHO_ASSIGN(const ByteVector planes, expand(stream));
  result.values.resize(planes.size());
  with_element_type(size, [&]<class T>(T) {
    for (std::size_t p = 0; p < size; ++p)
      spread_plane<T>(ByteSpan(planes).subspan(p * changed, changed), p, result.values.data());
  });
  return result;
}

void Replacement::swap_with(std::span<std::byte> segment_bytes, std::size_t element_bytes) {
  if (all) {
    std::swap_ranges(values.begin(), values.end(), segment_bytes.begin());
    return;
  }
  with_element_type(element_bytes, [&]<class T>(T) {
    for (std::size_t i = 0; i < positions.size(); ++i) {
      std::byte* mine = values.data() + i * sizeof(T);
      std::byte* theirs = segment_bytes.data() + positions[i] * sizeof(T);
      const T value = load<T>(mine);
      store(mine, load<T>(theirs));
      store(theirs, value);
    }
  });
}

struct SegmentEncoder::Context {
  explicit Context(int level) : zstd(ZSTD_createCCtx()) {
    if (!zstd) throw std::bad_alloc();
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_compressionLevel, level);
    ZSTD_CCtx_setParameter(zstd, ZSTD_c_contentSizeFlag, 0);  // the stream states it
  }
  ~Context() { ZSTD_freeCCtx(zstd); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ZSTD_CCtx* zstd;
  ByteVector scratch;  // compressed bytes
  ByteVector plane;
};

SegmentEncoder::SegmentEncoder(int zstd_level) : context_(std::make_unique<Context>(zstd_level)) {}
SegmentEncoder::~SegmentEncoder() = default;

bool SegmentEncoder::encode_stream(ByteSpan raw, std::size_t bytes_max, ByteVector& out) {
  // Room for a block beyond the limit, because zstd codes a block worse when the room is short; with it the result
  // is the same as with unlimited room, and a hopeless attempt still ends early.
  constexpr std::size_t kSlack = ZSTD_BLOCKSIZE_MAX + 1024;
  const std::size_t room = std::min(ZSTD_compressBound(raw.size()), std::max(bytes_max, bytes_max + kSlack));
  ByteVector& scratch = context_->scratch;
  if (scratch.size() < room) scratch.resize(room);
  const std::size_t packed = ZSTD_compress2(context_->zstd, scratch.data(), room, raw.data(), raw.size());
  const bool compressed = !ZSTD_isError(packed) && packed < raw.size();
  const std::size_t start = out.size();
  put(out, static_cast<std::uint8_t>(compressed));
  put_varint(out, raw.size());
  if (compressed) put_varint(out, packed);
  const ByteSpan body = compressed ? ByteSpan(scratch).first(packed) : raw;
  if (body.size() + (out.size() - start) > bytes_max) {
    out.resize(start);
    return false;
  }
  put_bytes(out, body);
  return true;
}

std::optional<ByteVector> SegmentEncoder::encode_dense(ByteSpan cur, std::size_t element_bytes, std::size_t bytes_max) {
  ByteVector out;
  ByteVector& plane = context_->plane;
  plane.resize(cur.size() / element_bytes);
  for (std::size_t p = 0; p < element_bytes; ++p) {
    with_element_type(element_bytes, [&]<class T>(T) { copy_plane<T>(cur, p, plane.data()); });
    if (!encode_stream(plane, bytes_max - out.size(), out)) return std::nullopt;
  }
  return out;
}

// Coding byte, positions and the shorter of the two forms of the values; everything but the change count.
ByteVector SegmentEncoder::encode_sparse(ByteSpan prev, ByteSpan cur, DType dtype) {
  const std::size_t size = dtype_bytes(dtype);
  ByteVector gaps, values, steps, step_stream;
  gaps.reserve(positions_.size() * 2);
  values.reserve(positions_.size() * size);
  std::uint32_t next = 0;
  for (const std::uint32_t position : positions_) {
    put_varint(gaps, position - next);
    next = position + 1;
    put_bytes(values, cur.subspan(position * size, size));
  }
  std::size_t values_bytes_max = kUnlimited;
  if (has_steps(dtype)) {
    steps.reserve(positions_.size() * 2);
    for (const std::uint32_t position : positions_) {
      const auto before = to_ordered(load<std::uint16_t>(prev.data() + position * 2ull));
      const auto after = to_ordered(load<std::uint16_t>(cur.data() + position * 2ull));
      put_varint(steps, zigzag(static_cast<std::uint16_t>(after - before)));
    }
    encode_stream(steps, kUnlimited, step_stream);
    values_bytes_max = step_stream.size() - 1;
  }
  ByteVector out{std::byte{0}};
  encode_stream(gaps, kUnlimited, out);
  const bool raw = encode_stream(split_planes(values, size), values_bytes_max, out);
  if (!raw) put_bytes(out, step_stream);
  out.front() = static_cast<std::byte>(raw ? SegmentCoding::kSparseRaw : SegmentCoding::kSparseStep);
  return out;
}

std::uint64_t SegmentEncoder::encode(std::optional<ByteSpan> prev, ByteSpan cur, DType dtype, ByteVector& out) {
  const std::size_t size = dtype_bytes(dtype);
  std::uint64_t changed = cur.size() / size;
  ByteVector sparse;
  if (prev) {
    positions_.clear();
    with_element_type(size, [&]<class T>(T) { find_changes<T>(*prev, cur, positions_); });
    changed = positions_.size();
    if (changed == 0) {
      out.push_back(static_cast<std::byte>(SegmentCoding::kUntouched));
      return 0;
    }
    sparse = encode_sparse(*prev, cur, dtype);
  }
  const auto dense = encode_dense(cur, size, prev ? sparse.size() - 1 : kUnlimited);
  out.push_back(dense ? static_cast<std::byte>(SegmentCoding::kDense) : sparse.front());
  put_varint(out, changed);
  put_bytes(out, dense ? ByteSpan(*dense) : ByteSpan(sparse).subspan(1));
  return changed;
}

}  // namespace echoline::delta
