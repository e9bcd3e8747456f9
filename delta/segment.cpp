#include "delta/segment.hpp"

#include <algorithm>

namespace echoline::delta {
namespace {

Error corrupt(std::string_view why) { return fail(Code::kCorrupt, "read patch", "{}", why); }

template <class T>
void scatter(std::byte* to, std::size_t origin, const std::uint32_t* positions, const std::byte* values,
             std::size_t count) {
  constexpr std::size_t kAhead = 24;  // the lines are rarely in a cache when a whole model is written
  std::size_t i = 0;
  for (; i + kAhead < count; ++i) {
    __builtin_prefetch(to + (positions[i + kAhead] - origin) * sizeof(T), 1);
    store(to + (positions[i] - origin) * sizeof(T), load<T>(values + i * sizeof(T)));
  }
  for (; i < count; ++i) store(to + (positions[i] - origin) * sizeof(T), load<T>(values + i * sizeof(T)));
}

// Writes values to the elements at `positions`; `to` is where element `origin` lies.
void scatter(std::byte* to, std::size_t origin, const std::uint32_t* positions, const std::byte* values,
             std::size_t count, std::size_t element_bytes) {
  with_element_type(element_bytes, [&]<class T>(T) { scatter<T>(to, origin, positions, values, count); });
}

}  // namespace

Result<Segment> read_segment(ByteSpan body) {
  Reader reader(body);
  Segment segment;
  segment.tensor = reader.varint();
  segment.index = reader.varint();
  const std::uint64_t layers = reader.varint();
  if (reader.failed() || layers == 0 || layers > kLayersMax) return corrupt("a segment's head is malformed");
  for (std::uint64_t i = 0; i < layers; ++i) {
    Layer layer;
    const auto coding = reader.number<std::uint8_t>();
    layer.changed = reader.varint();
    layer.bound_bits = reader.varint();
    layer.payload = reader.bytes(reader.varint());
    if (reader.failed()) return corrupt("the bytes end within a segment");
    if (coding != 1 && coding != 2) return corrupt(fmt::format("unknown coding {} of a segment", coding));
    layer.coding = static_cast<LayerCoding>(coding);
    segment.layers.push_back(layer);
  }
  if (!reader.rest().empty()) return corrupt("a segment has bytes after its last layer");
  return segment;
}

void write_segment(const Segment& segment, ByteVector& out) {
  put_varint(out, segment.tensor);
  put_varint(out, segment.index);
  put_varint(out, segment.layers.size());
  for (const Layer& layer : segment.layers) {
    put(out, static_cast<std::uint8_t>(layer.coding));
    put_varint(out, layer.changed);
    put_varint(out, layer.bound_bits);
    put_varint(out, layer.payload.size());
    put_bytes(out, layer.payload);
  }
}

std::optional<Layer> SegmentEncoder::encode(ByteSpan prev, ByteSpan cur, const SegmentPlace& place, Digest* prev_leaves,
                                            Digest* cur_leaves, EntropyCounter* entropy) {
  sparse_bytes_.clear();
  const SparseCount count = sparse_.encode(prev, cur, place, prev_leaves, cur_leaves, entropy, sparse_bytes_);
  if (count.changed == 0) return std::nullopt;
  Layer layer{LayerCoding::kSparse, count.changed, count.bound_bits, sparse_bytes_};
  // The whole content can only be shorter when the changes take much, or when it is very regular, which a piece of it
  // shows.
  constexpr std::size_t kProbeBytes = 16u << 10, kStreamBytes = 24;  // what a plane takes that holds next to nothing
  bool promising = sparse_bytes_.size() > cur.size() / 24 || cur.size() <= kLeafBytes;
  if (!promising && sparse_bytes_.size() > cur.size() / 8192) {
    dense_bytes_.clear();
    const std::size_t at = (cur.size() - kProbeBytes) / 2 / 8 * 8;
    const std::size_t share = sparse_bytes_.size() * kProbeBytes / cur.size();
    promising = dense_.encode(cur.subspan(at, kProbeBytes), place.dtype,
                              2 * share + kStreamBytes * dtype_bytes(place.dtype), dense_bytes_);
  }
  if (promising) {
    dense_bytes_.clear();
    if (dense_.encode(cur, place.dtype, sparse_bytes_.size() - 1, dense_bytes_))
      layer = {LayerCoding::kDense, count.changed, count.bound_bits, dense_bytes_};
  }
  return layer;
}

Layer SegmentEncoder::encode_whole(ByteSpan cur, DType dtype) {
  dense_bytes_.clear();
  dense_.encode(cur, dtype, SIZE_MAX, dense_bytes_);
  return {LayerCoding::kDense, cur.size() / dtype_bytes(dtype), 8 * dense_bytes_.size(), dense_bytes_};
}

void write_values(bool whole, std::span<const std::uint32_t> positions, ByteSpan values, std::size_t element_bytes,
                  std::span<std::byte> segment) {
  if (whole) {
    std::copy(values.begin(), values.end(), segment.begin());
  } else {
    scatter(segment.data(), 0, positions.data(), values.data(), positions.size(), element_bytes);
  }
}

Status SegmentDecoder::decode(const Segment& segment, ByteSpan old, DType dtype, Replacement& out, Digest* new_leaves) {
  const std::size_t size = dtype_bytes(dtype);
  for (const Layer& layer : segment.layers)
    if (layer.changed > old.size() / size)
      return corrupt(fmt::format("a segment declares {} changes of {} elements", layer.changed, old.size() / size));
  if (segment.layers.size() > 1) return decode_layers(segment, old, dtype, out, new_leaves);
  const Layer& layer = segment.layers.front();
  if (layer.coding == LayerCoding::kDense) {
    out.whole = true;
    out.values.resize(old.size());
    ECHO_TRY(decode_dense(layer.payload, dtype, out.values));
    digest_leaves(out.values, new_leaves);
    return ok();
  }
  // The new content of a leaf is put together, hashed and forgotten while it is in the cache.
  if (scratch_.size() < kLeafBytes) scratch_.resize(kLeafBytes);
  const auto leaf_done = [&](std::size_t first_byte, std::size_t from, std::size_t to) {
    if (from == to) return;
    const ByteSpan leaf = old.subspan(first_byte, std::min(kLeafBytes, old.size() - first_byte));
    std::copy(leaf.begin(), leaf.end(), scratch_.begin());
    scatter(scratch_.data(), first_byte / size, changes_.positions.data() + from, changes_.values.data() + from * size,
            to - from, size);
    new_leaves[first_byte / kLeafBytes] = digest_bytes(ByteSpan(scratch_).first(leaf.size()));
  };
  ECHO_TRY(sparse_.decode(layer.payload, layer.changed, old, dtype, changes_, leaf_done));
  out.whole = false;
  const auto count = static_cast<std::ptrdiff_t>(changes_.count);
  out.positions.assign(changes_.positions.begin(), changes_.positions.begin() + count);
  out.values.assign(changes_.values.begin(), changes_.values.begin() + count * static_cast<std::ptrdiff_t>(size));
  return ok();
}

// Several deltas in one: each layer is decoded on top of what the layers before it made.
Status SegmentDecoder::decode_layers(const Segment& segment, ByteSpan old, DType dtype, Replacement& out,
                                     Digest* new_leaves) {
  const std::size_t size = dtype_bytes(dtype);
  scratch_.assign(old.begin(), old.end());
  std::vector<bool> touched(old.size() / size);
  out.whole = false;
  for (const Layer& layer : segment.layers) {
    if (layer.coding == LayerCoding::kDense) {
      out.whole = true;
      ECHO_TRY(decode_dense(layer.payload, dtype, scratch_));
      continue;
    }
    ECHO_TRY(sparse_.decode(layer.payload, layer.changed, scratch_, dtype, changes_, [](auto, auto, auto) {}));
    scatter(scratch_.data(), 0, changes_.positions.data(), changes_.values.data(), changes_.count, size);
    for (std::size_t i = 0; i < changes_.count; ++i) touched[changes_.positions[i]] = true;
  }
  digest_leaves(scratch_, new_leaves);
  if (out.whole) {
    out.values = scratch_;
    return ok();
  }
  out.positions.clear();
  out.values.clear();
  for (std::size_t i = 0; i < touched.size(); ++i) {
    if (!touched[i]) continue;
    out.positions.push_back(static_cast<std::uint32_t>(i));
    put_bytes(out.values, ByteSpan(scratch_).subspan(i * size, size));
  }
  return ok();
}

}  // namespace echoline::delta
