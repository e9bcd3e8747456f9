// Codes one segment: chooses between sparse and dense coding, and decodes layers and groups.
#include "delta/segment.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace echoline::delta {
namespace {

Error corrupt(std::string_view why) { return fail(Code::kCorrupt, "read patch", "{}", why); }

template <class T>
void scatter(std::byte* to, std::size_t origin, const std::uint32_t* positions, const std::byte* values,
             std::size_t count) {
  constexpr std::size_t kAhead = 24;  // when a whole model is written, the cache lines are rarely present
  std::size_t i = 0;
  for (; i + kAhead < count; ++i) {
    __builtin_prefetch(to + (positions[i + kAhead] - origin) * sizeof(T), 1);
    store(to + (positions[i] - origin) * sizeof(T), load<T>(values + i * sizeof(T)));
  }
  for (; i < count; ++i) store(to + (positions[i] - origin) * sizeof(T), load<T>(values + i * sizeof(T)));
}

// Writes values to the elements at `positions`; `to` is the address of element `origin`.
void scatter(std::byte* to, std::size_t origin, const std::uint32_t* positions, const std::byte* values,
             std::size_t count, std::size_t element_bytes) {
  with_element_type(element_bytes, [&]<class T>(T) { scatter<T>(to, origin, positions, values, count); });
}

Status check_changes(const Segment& segment, std::size_t elements) {
  for (const Layer& layer : segment.layers)
    if (layer.changed > elements)
      return corrupt(fmt::format("a segment declares {} changes of {} elements", layer.changed, elements));
  return ok();
}

}  // namespace

Result<Segment> read_segment(ByteSpan body, bool group) {
  Reader reader(body);
  Segment segment;
  segment.tensor = reader.varint();
  (group ? segment.tensors : segment.index) = reader.varint();
  const std::uint64_t layers = reader.varint();
  if (reader.failed() || layers == 0 || layers > kLayersMax) return corrupt("a segment's head is malformed");
  for (std::uint64_t i = 0; i < layers; ++i) {
    Layer layer;
    const auto coding = reader.number<std::uint8_t>();
    layer.changed = reader.varint();
    layer.bound_bits = reader.varint();
    layer.payload = reader.bytes(reader.varint());
    if (reader.failed()) return corrupt("the bytes end within a segment");
    if (coding < 1 || coding > 3) return corrupt(fmt::format("unknown coding {} of a segment", coding));
    layer.coding = static_cast<LayerCoding>(coding);
    segment.layers.push_back(layer);
  }
  if (!reader.rest().empty()) return corrupt("a segment has bytes after its last layer");
  return segment;
}

void write_segment(const Segment& segment, ByteVector& out) {
  put_varint(out, segment.tensor);
  put_varint(out, segment.tensors > 1 ? segment.tensors : segment.index);
  put_varint(out, segment.layers.size());
  for (const Layer& layer : segment.layers) {
    put(out, static_cast<std::uint8_t>(layer.coding));
    put_varint(out, layer.changed);
    put_varint(out, layer.bound_bits);
    put_varint(out, layer.payload.size());
    put_bytes(out, layer.payload);
  }
}

std::optional<Layer> SegmentEncoder::encode(const Content& prev, const Content& cur, const SegmentPlace& place,
                                            const LeafRead& leaf_read, EntropyCounter* entropy) {
  sparse_bytes_.clear();
  const SparseCount count = sparse_.encode(prev, cur, place, leaf_read, entropy, sparse_bytes_);
  if (count.changed == 0) return std::nullopt;
  Layer layer{LayerCoding::kSparse, count.changed, count.bound_bits, sparse_bytes_};
  // The estimate knows the frequencies of values. Repetitive content may need only a fraction of it.
  constexpr double kRepeats = 4;
  if (kRepeats * static_cast<double>(sparse_bytes_.size()) > dense_.estimate(cur, place.dtype)) {
    dense_bytes_.clear();
    if (dense_.encode(cur.whole(gathered_), place.dtype, sparse_bytes_.size() - 1, dense_bytes_))
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
  ECHO_TRY(check_changes(segment, old.size() / size));
  if (segment.layers.size() > 1) return decode_layers(segment, old, dtype, out, new_leaves);
  const Layer& layer = segment.layers.front();
  if (layer.coding == LayerCoding::kDense) {
    out.whole = true;
    out.values.resize(old.size());
    ECHO_TRY(decode_dense(layer.payload, dtype, out.values));
    if (new_leaves) digest_leaves(out.values, new_leaves);
    return ok();
  }
  begin_replacement(old.size() / size, layer.changed, size, out);
  bool fits = true;
  const auto leaf_done = [&](std::size_t first_byte, ByteSpan before, ByteSpan now) {
    if (now.data() == before.data()) return;
    if (new_leaves) new_leaves[first_byte / kLeafBytes] = digest_bytes(now);
    if (!out.whole) fits = fits && add_changes(before, now, first_byte, size, out);
  };
  const auto room = [&](std::size_t first_byte, std::size_t) { return out.values.data() + first_byte; };
  ECHO_TRY(sparse_.decode(layer.payload, layer.coding == LayerCoding::kSparse, layer.changed, old, dtype,
                          out.whole ? LeafRoom(room) : LeafRoom(), leaf_done));
  if (!fits) return corrupt("a segment has more changes than it declares");
  end_replacement(size, out);
  return ok();
}

// Prepares `out` for `changed` of `elements`. If an eighth or more changes, writing all of them is faster.
void SegmentDecoder::begin_replacement(std::uint64_t elements, std::uint64_t changed, std::size_t element_bytes,
                                       Replacement& out) {
  out.whole = 8 * changed >= elements;
  out.positions.clear();
  out.values.clear();
  replaced_ = 0;
  if (out.whole) {
    out.values.resize(elements * element_bytes);
  } else {
    out.positions.resize(changed + kSpareElements);
    out.values.resize((changed + kSpareElements) * element_bytes + kSpareElements * sizeof(std::uint64_t));
  }
}

// Adds a leaf's changes to `out`. False if there are more than the segment declares.
bool SegmentDecoder::add_changes(ByteSpan before, ByteSpan now, std::size_t first_byte, std::size_t element_bytes,
                                 Replacement& out) {
  const unsigned width = width_index(element_bytes);
  for (std::size_t at = 0; at < now.size(); at += kBlockElementsMax * element_bytes) {
    const std::size_t bytes = std::min(kBlockElementsMax * element_bytes, now.size() - at);
    const auto count = static_cast<std::uint32_t>(bytes / element_bytes);
    std::uint32_t changed[kBlockWordsMax];
    const std::uint32_t changed_count = kernels().diff[width](before.data() + at, now.data() + at, count, changed);
    if (replaced_ + changed_count + kSpareElements > out.positions.size()) return false;
    kernels().extract[width](now.data() + at, changed, count, changed_count,
                             static_cast<std::uint32_t>((first_byte + at) / element_bytes),
                             out.positions.data() + replaced_, out.values.data() + replaced_ * element_bytes);
    replaced_ += changed_count;
  }
  return true;
}

void SegmentDecoder::end_replacement(std::size_t element_bytes, Replacement& out) const {
  if (out.whole) return;
  out.positions.resize(replaced_);
  out.values.resize(replaced_ * element_bytes);
}

Status SegmentDecoder::decode_group(const Segment& segment, std::span<const TensorView> tensors, Replacement& out,
                                    const TensorDone& done) {
  const DType dtype = tensors.front().dtype;
  const std::size_t size = dtype_bytes(dtype);
  std::vector<ByteSpan> pieces;
  for (const TensorView& tensor : tensors) pieces.push_back(tensor.bytes);
  const Content old(std::move(pieces));
  ECHO_TRY(check_changes(segment, old.size() / size));

  GroupedTensor next;  // the first tensor that is incomplete
  std::size_t next_begin = 0;
  // The first `complete_bytes` bytes of the group are complete. `made` ends there and begins before `next` does.
  const auto report = [&](std::size_t complete_bytes, ByteSpan made) {
    for (; next.number < tensors.size(); ++next.number) {
      const std::size_t bytes = tensors[next.number].bytes.size();
      if (next_begin + bytes > complete_bytes) break;
      next.content = made.subspan(made.size() - (complete_bytes - next_begin), bytes);
      next_begin += bytes;
      next.first += std::exchange(next.count, 0);
      const std::size_t end = next_begin / size;
      if (out.whole)
        next.count = end - next.first;
      else
        while (next.first + next.count < replaced_ && out.positions[next.first + next.count] < end) ++next.count;
      if (next.count > 0) done(next);
    }
  };
  const Layer& layer = segment.layers.front();
  if (segment.layers.size() > 1 || layer.coding == LayerCoding::kDense)
    return decode_copied_group(segment, old, dtype, out, report);

  begin_replacement(old.size() / size, layer.changed, size, out);
  // Unless everything is replaced, the new content passes through a window. It holds the current leaf and, before it,
  // the complete part of an unfinished tensor.
  window_.resize(out.whole ? 0 : kGroupedBytes + kLeafBytes + kSpareElements * size);
  std::size_t kept = 0;  // bytes before the leaf
  bool fits = true;
  const auto room = [&](std::size_t first_byte, std::size_t) {
    return out.whole ? out.values.data() + first_byte : window_.data() + kept;
  };
  const auto leaf_done = [&](std::size_t first_byte, ByteSpan before, ByteSpan now) {
    const std::size_t complete_bytes = first_byte + now.size();
    if (out.whole) return report(complete_bytes, ByteSpan(out.values).first(complete_bytes));
    fits = fits && add_changes(before, now, first_byte, size, out);
    const std::size_t held = kept + now.size();
    report(complete_bytes, ByteSpan(window_).first(held));
    kept = complete_bytes - next_begin;
    std::memmove(window_.data(), window_.data() + held - kept, kept);
  };
  ECHO_TRY(
      sparse_.decode(layer.payload, layer.coding == LayerCoding::kSparse, layer.changed, old, dtype, room, leaf_done));
  if (!fits) return corrupt("a segment has more changes than it declares");
  end_replacement(size, out);
  return ok();
}

// Decodes via copies of the whole group, for folded deltas and dense coding.
Status SegmentDecoder::decode_copied_group(const Segment& segment, const Content& old, DType dtype, Replacement& out,
                                           const GroupMade& made) {
  RawVector<std::byte> memory;
  const ByteSpan before = old.whole(memory);
  ECHO_TRY(decode(segment, before, dtype, out, nullptr));
  replaced_ = out.positions.size();
  RawVector<std::byte> now(before.begin(), before.end());
  write_values(out.whole, out.positions, out.values, dtype_bytes(dtype), now);
  made(now.size(), now);
  return ok();
}

// A fold of several deltas: decodes each layer on top of the result of the earlier ones.
Status SegmentDecoder::decode_layers(const Segment& segment, ByteSpan old, DType dtype, Replacement& out,
                                     Digest* new_leaves) {
  const std::size_t size = dtype_bytes(dtype);
  std::uint64_t changed = 0;
  bool has_dense_layer = false;
  folded_.assign(old.begin(), old.end());
  for (const Layer& layer : segment.layers) {
    changed += layer.changed;
    if (layer.coding == LayerCoding::kDense) {
      has_dense_layer = true;
      ECHO_TRY(decode_dense(layer.payload, dtype, folded_));
      continue;
    }
    ECHO_TRY(sparse_.decode(layer.payload, layer.coding == LayerCoding::kSparse, layer.changed, ByteSpan(folded_),
                            dtype, {}, [&](std::size_t first_byte, ByteSpan before, ByteSpan now) {
                              if (now.data() != before.data())
                                std::copy(now.begin(), now.end(), folded_.data() + first_byte);
                            }));
  }
  if (new_leaves) digest_leaves(folded_, new_leaves);
  begin_replacement(old.size() / size, has_dense_layer ? old.size() / size : std::min(changed, old.size() / size), size,
                    out);
  if (out.whole) {
    out.values.assign(folded_.begin(), folded_.end());
    return ok();
  }
  for (std::size_t at = 0; at < old.size(); at += kLeafBytes) {
    const std::size_t count = std::min(kLeafBytes, old.size() - at);
    if (!add_changes(old.subspan(at, count), ByteSpan(folded_).subspan(at, count), at, size, out))
      return corrupt("a segment has more changes than it declares");
  }
  end_replacement(size, out);
  return ok();
}

}  // namespace echoline::delta
