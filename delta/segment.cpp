// Codes one segment, a part of a tensor: chooses between sparse coding (of the changes) and dense coding (of all
// values). Decodes layers (a segment has several if deltas were folded into one) and groups (small tensors coded
// together).
#include "delta/segment.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace echoline::delta {
namespace {

Error corrupt(std::string_view defect) { return fail(Code::kCorrupt, "read patch", "{}", defect); }

// Writes values to the elements at `positions`.
template <class T>
void scatter(std::byte* elements, const std::uint32_t* positions, const std::byte* values, std::size_t count) {
  // Prefetches 24 elements ahead, because the cache lines are rarely present when a whole model is written.
  constexpr std::size_t kPrefetchedElements = 24;
  std::size_t i = 0;
  for (; i + kPrefetchedElements < count; ++i) {
    __builtin_prefetch(elements + positions[i + kPrefetchedElements] * sizeof(T), /*for writing=*/1);
    store(elements + positions[i] * sizeof(T), load<T>(values + i * sizeof(T)));
  }
  for (; i < count; ++i) store(elements + positions[i] * sizeof(T), load<T>(values + i * sizeof(T)));
}

// The coding of format version 3 has no small symbols (one byte per element, for elements that often change).
bool has_small_symbols(const Layer& layer) { return layer.coding == LayerCoding::kSparse; }

Status check_changes(const Segment& segment, std::size_t elements) {
  for (const Layer& layer : segment.layers)
    if (layer.changed > elements)
      return corrupt(fmt::format("a segment declares {} changes of {} elements", layer.changed, elements));
  return ok();
}

}  // namespace

Result<Segment> read_segment(ByteSpan body, bool is_group) {
  ByteReader reader(body);
  Segment segment;
  segment.tensor = reader.read_varint();
  // A group consists of whole tensors, so their number takes the place of the index.
  (is_group ? segment.tensors : segment.index) = reader.read_varint();
  const std::uint64_t layers = reader.read_varint();
  if (reader.failed() || layers == 0 || layers > kLayersMax) return corrupt("a segment's head is malformed");
  for (std::uint64_t i = 0; i < layers; ++i) {
    Layer layer;
    const auto coding = reader.read_number<std::uint8_t>();
    layer.changed = reader.read_varint();
    layer.bound_bits = reader.read_varint();
    layer.payload = reader.read_bytes(reader.read_varint());
    if (reader.failed()) return corrupt("the bytes end within a segment");
    const bool is_known = coding >= static_cast<std::uint8_t>(LayerCoding::kSparseOld) &&
                          coding <= static_cast<std::uint8_t>(LayerCoding::kSparse);
    if (!is_known) return corrupt(fmt::format("unknown coding {} of a segment", coding));
    layer.coding = static_cast<LayerCoding>(coding);
    segment.layers.push_back(layer);
  }
  if (!reader.remaining().empty()) return corrupt("a segment has bytes after its last layer");
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
  Layer layer{.coding = LayerCoding::kSparse,
              .changed = count.changed,
              .bound_bits = count.bound_bits,
              .payload = sparse_bytes_};
  // The estimate knows the frequencies of values, but not repetitions. With repetitions, dense coding may need only
  // this fraction of the estimate. So dense coding is tried if it might be shorter.
  constexpr double kRepetitiveFraction = 0.25;
  const double dense_bytes_min = kRepetitiveFraction * dense_.estimate_bytes(cur, place.dtype);
  if (static_cast<double>(sparse_bytes_.size()) > dense_bytes_min) {
    dense_bytes_.clear();
    // - 1: only if it is shorter than the sparse coding.
    if (dense_.encode(cur.all_bytes(gathered_), place.dtype, sparse_bytes_.size() - 1, dense_bytes_)) {
      layer.coding = LayerCoding::kDense;
      layer.payload = dense_bytes_;
    }
  }
  return layer;
}

Layer SegmentEncoder::encode_whole(ByteSpan cur, DType dtype) {
  dense_bytes_.clear();
  dense_.encode(cur, dtype, SIZE_MAX, dense_bytes_);
  return {.coding = LayerCoding::kDense,
          .changed = cur.size() / dtype_bytes(dtype),
          .bound_bits = 8 * dense_bytes_.size(),  // there is no old value, so no better bound is known
          .payload = dense_bytes_};
}

void write_values(bool whole, std::span<const std::uint32_t> positions, ByteSpan values, std::size_t element_bytes,
                  std::span<std::byte> segment) {
  if (whole) {
    std::copy(values.begin(), values.end(), segment.begin());
  } else {
    with_element_type(element_bytes, [&]<class T>(T) {
      scatter<T>(segment.data(), positions.data(), values.data(), positions.size());
    });
  }
}

Status SegmentDecoder::decode(const Segment& segment, ByteSpan old, DType dtype, Replacement& out, Digest* new_leaves) {
  const std::size_t element_bytes = dtype_bytes(dtype), elements = old.size() / element_bytes;
  ECHO_TRY(check_changes(segment, elements));
  if (segment.layers.size() > 1) return decode_layers(segment, old, dtype, out, new_leaves);
  const Layer& layer = segment.layers.front();
  if (layer.coding == LayerCoding::kDense) {
    out.whole = true;
    out.values.resize(old.size());
    ECHO_TRY(decode_dense(layer.payload, dtype, out.values));
    if (new_leaves) digest_leaves(out.values, new_leaves);
    return ok();
  }
  begin_replacement(elements, layer.changed, element_bytes, out);
  bool has_room = true;  // `out` has room for all changes
  const auto leaf_done = [&](std::size_t first_byte, ByteSpan before, ByteSpan now) {
    if (now.data() == before.data()) return;  // unchanged
    if (new_leaves) new_leaves[first_byte / kLeafBytes] = digest_bytes(now);
    if (!out.whole) has_room = has_room && add_changes(before, now, first_byte, element_bytes, out);
  };
  const auto room = [&](std::size_t first_byte, std::size_t) { return out.values.data() + first_byte; };
  ECHO_TRY(sparse_.decode(layer.payload, has_small_symbols(layer), layer.changed, old, dtype,
                          out.whole ? LeafRoom(room) : LeafRoom(), leaf_done));
  if (!has_room) return corrupt("a segment has more changes than it declares");
  end_replacement(element_bytes, out);
  return ok();
}

// Prepares `out` for `changed` of `elements`. If an eighth or more changes, replaces all, because that is faster.
void SegmentDecoder::begin_replacement(std::uint64_t elements, std::uint64_t changed, std::size_t element_bytes,
                                       Replacement& out) {
  out.whole = 8 * changed >= elements;
  out.positions.clear();
  out.values.clear();
  replaced_elements_ = 0;
  if (out.whole) {
    out.values.resize(elements * element_bytes);
  } else {
    // Spare elements, because the kernels store whole vectors: of the element type, and of 64-bit words.
    out.positions.resize(changed + kSpareElements);
    out.values.resize((changed + kSpareElements) * element_bytes + kSpareElements * sizeof(std::uint64_t));
  }
}

// Adds the changes of a leaf (64 KiB with a digest of their own) to `out`. False if there are more than the segment
// declares.
bool SegmentDecoder::add_changes(ByteSpan before, ByteSpan now, std::size_t first_byte, std::size_t element_bytes,
                                 Replacement& out) {
  const unsigned width = width_index(element_bytes);
  for (std::size_t begin = 0; begin < now.size(); begin += kBlockElementsMax * element_bytes) {
    const std::size_t bytes = std::min(kBlockElementsMax * element_bytes, now.size() - begin);
    const auto count = static_cast<std::uint32_t>(bytes / element_bytes);
    std::uint32_t changed[kBlockWordsMax];
    const std::uint32_t changed_count =
        kernels().diff[width](before.data() + begin, now.data() + begin, count, changed);
    if (replaced_elements_ + changed_count + kSpareElements > out.positions.size()) return false;
    kernels().extract[width](now.data() + begin, changed, count, changed_count,
                             static_cast<std::uint32_t>((first_byte + begin) / element_bytes),
                             out.positions.data() + replaced_elements_,
                             out.values.data() + replaced_elements_ * element_bytes);
    replaced_elements_ += changed_count;
  }
  return true;
}

// Removes the spare elements.
void SegmentDecoder::end_replacement(std::size_t element_bytes, Replacement& out) const {
  if (out.whole) return;
  out.positions.resize(replaced_elements_);
  out.values.resize(replaced_elements_ * element_bytes);
}

Status SegmentDecoder::decode_group(const Segment& segment, std::span<const TensorView> tensors, Replacement& out,
                                    const TensorDone& done) {
  const DType dtype = tensors.front().dtype;
  const std::size_t element_bytes = dtype_bytes(dtype);
  std::vector<ByteSpan> pieces;
  for (const TensorView& tensor : tensors) pieces.push_back(tensor.bytes);
  const Content old(std::move(pieces));
  ECHO_TRY(check_changes(segment, old.size() / element_bytes));

  GroupedTensor next;          // the first tensor that is incomplete
  std::size_t next_begin = 0;  // its first byte within the group
  // Reports the tensors within the first `complete_bytes` bytes of the group. `content` ends there; it begins with the
  // first byte of `next`, or earlier.
  const auto report = [&](std::size_t complete_bytes, ByteSpan content) {
    for (; next.index < tensors.size(); ++next.index) {
      const std::size_t tensor_bytes = tensors[next.index].bytes.size();
      if (next_begin + tensor_bytes > complete_bytes) break;
      next.content = content.subspan(content.size() - (complete_bytes - next_begin), tensor_bytes);
      next_begin += tensor_bytes;
      next.first += std::exchange(next.count, 0);
      const std::size_t element_end = next_begin / element_bytes;
      if (out.whole)
        next.count = element_end - next.first;
      else
        while (next.first + next.count < replaced_elements_ && out.positions[next.first + next.count] < element_end)
          ++next.count;
      if (next.count > 0) done(next);
    }
  };
  const Layer& layer = segment.layers.front();
  if (segment.layers.size() > 1 || layer.coding == LayerCoding::kDense)
    return decode_copied_group(segment, old, dtype, out, report);

  begin_replacement(old.size() / element_bytes, layer.changed, element_bytes, out);
  // Unless everything is replaced, the new content passes through a window. It holds the current leaf and, before it,
  // the complete part of an unfinished tensor.
  window_.resize(out.whole ? 0 : kGroupedBytes + kLeafBytes + kSpareElements * element_bytes);
  std::size_t bytes_before_leaf = 0;  // in the window
  bool has_room = true;               // `out` has room for all changes
  const auto room = [&](std::size_t first_byte, std::size_t) {
    return out.whole ? out.values.data() + first_byte : window_.data() + bytes_before_leaf;
  };
  const auto leaf_done = [&](std::size_t first_byte, ByteSpan before, ByteSpan now) {
    const std::size_t complete_bytes = first_byte + now.size();
    if (out.whole) return report(complete_bytes, ByteSpan(out.values).first(complete_bytes));
    has_room = has_room && add_changes(before, now, first_byte, element_bytes, out);
    const std::size_t window_bytes = bytes_before_leaf + now.size();
    report(complete_bytes, ByteSpan(window_).first(window_bytes));
    // Keeps the complete part of the unfinished tensor for the next leaf.
    bytes_before_leaf = complete_bytes - next_begin;
    std::memmove(window_.data(), window_.data() + window_bytes - bytes_before_leaf, bytes_before_leaf);
  };
  ECHO_TRY(sparse_.decode(layer.payload, has_small_symbols(layer), layer.changed, old, dtype, room, leaf_done));
  if (!has_room) return corrupt("a segment has more changes than it declares");
  end_replacement(element_bytes, out);
  return ok();
}

// Decodes via copies of the whole group, for folded deltas and dense coding.
Status SegmentDecoder::decode_copied_group(const Segment& segment, const Content& old, DType dtype, Replacement& out,
                                           const GroupContent& on_content) {
  RawVector<std::byte> memory;
  const ByteSpan before = old.all_bytes(memory);
  ECHO_TRY(decode(segment, before, dtype, out, /*new_leaves=*/nullptr));
  replaced_elements_ = out.positions.size();
  RawVector<std::byte> now(before.begin(), before.end());
  write_values(out.whole, out.positions, out.values, dtype_bytes(dtype), now);
  on_content(now.size(), now);
  return ok();
}

// A fold of several deltas: decodes each layer on top of the result of the earlier ones.
Status SegmentDecoder::decode_layers(const Segment& segment, ByteSpan old, DType dtype, Replacement& out,
                                     Digest* new_leaves) {
  const std::size_t element_bytes = dtype_bytes(dtype), elements = old.size() / element_bytes;
  std::uint64_t layer_changes = 0;  // sum over the layers; an element may change in several
  bool has_dense_layer = false;
  folded_content_.assign(old.begin(), old.end());
  for (const Layer& layer : segment.layers) {
    layer_changes += layer.changed;
    if (layer.coding == LayerCoding::kDense) {
      has_dense_layer = true;
      ECHO_TRY(decode_dense(layer.payload, dtype, folded_content_));
      continue;
    }
    ECHO_TRY(sparse_.decode(layer.payload, has_small_symbols(layer), layer.changed, ByteSpan(folded_content_), dtype,
                            /*room=*/{}, [&](std::size_t first_byte, ByteSpan before, ByteSpan now) {
                              if (now.data() != before.data())
                                std::copy(now.begin(), now.end(), folded_content_.data() + first_byte);
                            }));
  }
  if (new_leaves) digest_leaves(folded_content_, new_leaves);
  const std::uint64_t changed_max = has_dense_layer ? elements : std::min<std::uint64_t>(layer_changes, elements);
  begin_replacement(elements, changed_max, element_bytes, out);
  if (out.whole) {
    out.values.assign(folded_content_.begin(), folded_content_.end());
    return ok();
  }
  for (std::size_t leaf = 0; leaf < old.size(); leaf += kLeafBytes) {
    const std::size_t leaf_bytes = std::min(kLeafBytes, old.size() - leaf);
    const ByteSpan before = old.subspan(leaf, leaf_bytes), now = ByteSpan(folded_content_).subspan(leaf, leaf_bytes);
    if (!add_changes(before, now, leaf, element_bytes, out))
      return corrupt("a segment has more changes than it declares");
  }
  end_replacement(element_bytes, out);
  return ok();
}

}  // namespace echoline::delta
