// Checks the writes of Device::apply(), uploads them and prepares the swap.
#include "delta/cuda/value_swap.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/parallel.hpp"

namespace echoline::delta::cuda {
namespace {

constexpr std::uint64_t kHalfBytes = 16u << 20;   // half of the pinned buffer for changes
constexpr std::uint64_t kTaskBytes = 512u << 10;  // filled by one thread at a time
constexpr std::uint64_t kPlaceAlignment = 16;     // bytes, of positions and values on the device

Error write_error(std::string_view where, const std::string& defect) {
  return fail(Code::kInvalid, "apply changes",
              "{}: {}; apply only results of resolve_delta(), to a state of the same model", where, defect);
}
std::string description_of(const TensorWrite& write, const StateView& tensors) {
  return fmt::format("a write to tensor '{}' at byte {}", tensors[write.tensor].name, write.first_byte);
}

// Checks that a write is valid for its tensor, without its positions.
Status check_write(const TensorWrite& write, const StateView& tensors) {
  if (write.tensor >= tensors.size())
    return write_error("a write", fmt::format("is for tensor {}, the state has {}", write.tensor, tensors.size()));
  const TensorView& tensor = tensors[write.tensor];
  const std::uint64_t tensor_size = tensor.bytes.size(), element_bytes = dtype_bytes(tensor.dtype);
  const auto error_of = [&](const std::string& defect) { return write_error(description_of(write, tensors), defect); };
  if (write.element_bytes != element_bytes)
    return error_of(fmt::format("has elements of {} bytes, the tensor's have {}", write.element_bytes, element_bytes));
  if (write.first_byte > tensor_size || write.byte_count > tensor_size - write.first_byte)
    return error_of(fmt::format("covers {} bytes, the tensor has {}", write.byte_count, tensor_size));
  if (write.first_byte % element_bytes != 0 || write.byte_count % element_bytes != 0)
    return error_of(fmt::format("covers {} bytes, which are not whole elements", write.byte_count));
  const std::uint64_t value_bytes = write.whole ? write.byte_count : write.positions.size() * element_bytes;
  if (write.values.size() != value_bytes || (write.whole && !write.positions.empty()))
    return error_of(fmt::format("has {} bytes of values, {} fit its {} positions", write.values.size(), value_bytes,
                                write.positions.size()));
  return ok();
}

// Checks a write's positions and flags the leaves that it touches. If more than kManyPerLeaf elements change per leaf,
// on average, flags all leaves of the part, because hashing them is faster than looking at every position.
Status check_positions(const TensorWrite& write, bool is_ascending, const StateView& tensors,
                       std::vector<std::uint8_t>& leaves) {
  constexpr std::uint64_t kManyPerLeaf = 8;
  const std::uint64_t element_bytes = write.element_bytes, elements = write.byte_count / element_bytes;
  const auto position_error = [&](std::uint32_t position) {
    return write_error(description_of(write, tensors), fmt::format("names element {} of {}", position, elements));
  };
  if (!write.whole && is_ascending) {
    if (write.positions.back() >= elements) return position_error(write.positions.back());
  } else if (!write.whole) {
    std::vector<bool> seen(elements);
    for (const std::uint32_t position : write.positions) {
      if (position >= elements) return position_error(position);
      if (seen[position])
        return write_error(description_of(write, tensors), fmt::format("names element {} twice", position));
      seen[position] = true;
    }
  }
  const std::uint64_t first_leaf = write.first_byte / kLeafBytes;
  const std::uint64_t last_leaf = (write.first_byte + write.byte_count - 1) / kLeafBytes;
  const std::uint64_t part_leaves = last_leaf - first_leaf + 1;
  if (write.whole || write.positions.size() > kManyPerLeaf * part_leaves)
    std::fill_n(leaves.begin() + static_cast<std::ptrdiff_t>(first_leaf), part_leaves, std::uint8_t{1});
  else
    for (const std::uint32_t position : write.positions)
      leaves[(write.first_byte + position * element_bytes) / kLeafBytes] = 1;
  return ok();
}

bool knows_leaves(const StateView& tensors, const LeafDigests& leaves, std::size_t tensor) {
  return leaves[tensor].size() == leaf_count(tensors[tensor].bytes.size());
}

}  // namespace

Result<SortedWrites> sorted_writes(std::span<const TensorWrite> writes, const StateView& tensors) {
  SortedWrites sorted;
  for (const TensorWrite& write : writes) {
    ECHO_TRY(check_write(write, tensors));
    if (!write.values.empty()) sorted.push_back(&write);
  }
  std::sort(sorted.begin(), sorted.end(), [](const TensorWrite* a, const TensorWrite* b) {
    return std::pair(a->tensor, a->first_byte) < std::pair(b->tensor, b->first_byte);
  });
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    const TensorWrite &before = *sorted[i - 1], &after = *sorted[i];
    if (before.tensor == after.tensor && after.first_byte < before.first_byte + before.byte_count)
      return fail(Code::kInvalid, "apply changes",
                  "two writes to tensor '{}' overlap at byte {}; apply deltas one after the other, or folded",
                  tensors[after.tensor].name, after.first_byte);
  }
  return sorted;
}

LeafFlags unknown_leaves(const StateView& tensors, const LeafDigests& known) {
  LeafFlags flags(tensors.size());
  for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor)
    flags[tensor].assign(leaf_count(tensors[tensor].bytes.size()), !knows_leaves(tensors, known, tensor));
  return flags;
}

std::vector<LeafRef> flagged_leaves(const LeafFlags& flags) {
  std::vector<LeafRef> leaves;
  for (std::size_t tensor = 0; tensor < flags.size(); ++tensor)
    for (std::size_t leaf = 0; leaf < flags[tensor].size(); ++leaf)
      if (flags[tensor][leaf]) leaves.push_back({.tensor = tensor, .leaf = leaf});
  return leaves;
}

void Upload::clear() {
  sources_.clear();
  bytes_ = 0;
}

Upload::Place Upload::add(const TensorWrite& write) {
  // Returns the offset of the new source.
  const auto add_source = [&](const void* data, std::uint64_t bytes, bool is_positions) {
    sources_.push_back(
        {.offset = bytes_, .bytes = bytes, .data = static_cast<const std::byte*>(data), .is_positions = is_positions});
    bytes_ = round_up(bytes_ + bytes, kPlaceAlignment);
    return sources_.back().offset;
  };
  constexpr bool kPositions = true, kValues = false;
  const std::uint64_t positions =
      add_source(write.positions.data(), write.positions.size() * sizeof(std::uint32_t), kPositions);
  return {.positions = positions, .values = add_source(write.values.data(), write.values.size(), kValues)};
}

// Copies bytes `begin` to `end` of a source; checks the order of positions on the way.
void Upload::copy(Source& source, std::uint64_t begin, std::uint64_t end, std::byte* to) {
  if (!source.is_positions) {
    std::memcpy(to, source.data + begin, end - begin);
    return;
  }
  const std::uint64_t first = begin / sizeof(std::uint32_t), count = (end - begin) / sizeof(std::uint32_t);
  const auto* from = reinterpret_cast<const std::uint32_t*>(source.data) + first;
  auto* out = reinterpret_cast<std::uint32_t*>(to);
  std::uint32_t is_unordered = first > 0 && from[-1] >= from[0] ? 1 : 0;
  out[0] = from[0];
  for (std::uint64_t i = 1; i < count; ++i) {  // branch-free, so that it is vectorised
    out[i] = from[i];
    is_unordered |= from[i - 1] >= from[i] ? 1 : 0;
  }
  if (is_unordered != 0) std::atomic_ref(source.is_unordered).store(1, std::memory_order_relaxed);
}

void Upload::fill(std::uint64_t begin, std::uint64_t end, std::byte* to) {
  const auto ends_before = [&](const Source& source) { return source.offset + source.bytes <= begin; };
  for (auto source = std::ranges::partition_point(sources_, ends_before);
       source != sources_.end() && source->offset < end; ++source) {
    const std::uint64_t part_begin = std::max(source->offset, begin);
    const std::uint64_t part_end = std::min(source->offset + source->bytes, end);
    if (part_begin < part_end)
      copy(*source, part_begin - source->offset, part_end - source->offset, to + (part_begin - begin));
  }
}

Status Upload::send(const std::shared_ptr<DeviceBackend>& backend, std::byte* device, unsigned threads) {
  const std::uint64_t used_half_bytes = std::min(kHalfBytes, bytes_);
  ECHO_TRY(memory_.reserve(backend, 2 * used_half_bytes));
  TaskPool tasks(threads);
  unsigned half = 0;
  for (std::uint64_t begin = 0; begin < bytes_; begin += kHalfBytes, half = 1 - half) {
    const std::uint64_t end = std::min(begin + kHalfBytes, bytes_);
    std::byte* const pinned = memory_.data() + half * used_half_bytes;
    // From the third copy on, waits until the last copy from this half is done.
    if (begin >= 2 * kHalfBytes) ECHO_TRY(backend->wait_for(half));
    for (std::uint64_t task_begin = begin; task_begin < end; task_begin += kTaskBytes)
      ECHO_TRY(tasks.add([this, task_begin, end, to = pinned + (task_begin - begin)](unsigned) {
        fill(task_begin, std::min(task_begin + kTaskBytes, end), to);
        return ok();
      }));
    ECHO_TRY(tasks.finish());
    ECHO_TRY(backend->copy_in(device + begin, pinned, end - begin));
    ECHO_TRY(backend->set_mark(half));
  }
  return ok();
}

Status ValueSwap::prepare(const std::shared_ptr<DeviceBackend>& backend, const DeviceOptions& options,
                          const SortedWrites& writes, const StateView& tensors, LeafFlags& leaves) {
  job_ = {};
  if (writes.empty()) return ok();
  upload_.clear();
  std::vector<Upload::Place> places;
  places.reserve(writes.size());
  for (const TensorWrite* write : writes) places.push_back(upload_.add(*write));
  if (upload_.bytes() > options.apply_bytes_max)
    return fail(
        Code::kExhausted, "apply changes",
        "the changes take {} bytes on the device, at most {} are allowed (apply_bytes_max); raise the limit, or "
        "upload the whole state",
        upload_.bytes(), options.apply_bytes_max);
  ECHO_TRY(changes_.reserve(backend, upload_.bytes()));
  ECHO_TRY(upload_.send(backend, changes_.data(), thread_count(options.threads)));
  for (std::size_t i = 0; i < writes.size(); ++i)
    ECHO_TRY(check_positions(*writes[i], upload_.is_ascending(i), tensors, leaves[writes[i]->tensor]));

  parts_.clear();
  chunks_.clear();
  for (std::size_t i = 0; i < writes.size(); ++i)
    add(*writes[i], device_bytes(tensors[writes[i]->tensor]) + writes[i]->first_byte,
        reinterpret_cast<const std::uint32_t*>(changes_.data() + places[i].positions),
        changes_.data() + places[i].values);
  const std::uint64_t parts_bytes = parts_.size() * sizeof(SwapPart);
  const std::uint64_t chunks_offset = round_up(parts_bytes, kPlaceAlignment);
  const std::uint64_t chunks_bytes = chunks_.size() * sizeof(SwapChunk);
  ECHO_TRY(tables_.reserve(backend, chunks_offset + chunks_bytes));
  std::memcpy(tables_.host.data(), parts_.data(), parts_bytes);
  std::memcpy(tables_.host.data() + chunks_offset, chunks_.data(), chunks_bytes);
  ECHO_TRY(backend->copy_in(tables_.device.data(), tables_.host.data(), chunks_offset + chunks_bytes));
  job_ = {.parts = reinterpret_cast<const SwapPart*>(tables_.device.data()),
          .chunks = reinterpret_cast<const SwapChunk*>(tables_.device.data() + chunks_offset),
          .chunk_count = static_cast<std::uint32_t>(chunks_.size())};
  return ok();
}

void ValueSwap::add(const TensorWrite& write, std::byte* target, const std::uint32_t* positions, std::byte* values) {
  const std::uint64_t element_bytes = write.element_bytes;
  if (!write.whole)
    return add({.target = target,
                .positions = positions,
                .values = values,
                .count = write.positions.size(),
                .element_bytes = element_bytes});
  // A whole part is swapped in vectors, which is faster, and the rest in elements.
  std::uint64_t vectors_bytes = 0;
  if (reinterpret_cast<std::uintptr_t>(target) % kVectorBytes == 0) {
    vectors_bytes = write.byte_count / kVectorBytes * kVectorBytes;
    add({.target = target,
         .positions = nullptr,
         .values = values,
         .count = write.byte_count / kVectorBytes,
         .element_bytes = kVectorBytes});
  }
  add({.target = target + vectors_bytes,
       .positions = nullptr,
       .values = values + vectors_bytes,
       .count = (write.byte_count - vectors_bytes) / element_bytes,
       .element_bytes = element_bytes});
}

void ValueSwap::add(const SwapPart& part) {
  const auto index = static_cast<std::uint32_t>(parts_.size());
  for (std::uint64_t first = 0; first < part.count; first += kChunkElements)
    chunks_.push_back({.part = index, .chunk = static_cast<std::uint32_t>(first / kChunkElements)});
  parts_.push_back(part);
}

}  // namespace echoline::delta::cuda
