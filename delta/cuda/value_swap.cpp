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

constexpr std::uint64_t kHalfBytes = 16u << 20;    // of the pinned buffer for changes
constexpr std::uint64_t kPieceBytes = 512u << 10;  // filled by one thread at a time

Error write_error(std::string_view where, const std::string& why) {
  return fail(Code::kInvalid, "apply changes",
              "{}: {}; apply only results of resolve_delta(), to a state of the same model", where, why);
}
std::string place_of(const TensorWrite& write, const StateView& tensors) {
  return fmt::format("a write to tensor '{}' at byte {}", tensors[write.tensor].name, write.first_byte);
}

// Whether a write is valid for its tensor, without its positions.
Status check_write(const TensorWrite& write, const StateView& tensors) {
  if (write.tensor >= tensors.size())
    return write_error("a write", fmt::format("is for tensor {}, the state has {}", write.tensor, tensors.size()));
  const TensorView& tensor = tensors[write.tensor];
  const std::uint64_t tensor_size = tensor.bytes.size(), size = dtype_bytes(tensor.dtype);
  const auto error_of = [&](const std::string& why) { return write_error(place_of(write, tensors), why); };
  if (write.element_bytes != size)
    return error_of(fmt::format("has elements of {} bytes, the tensor's have {}", write.element_bytes, size));
  if (write.first_byte > tensor_size || write.byte_count > tensor_size - write.first_byte)
    return error_of(fmt::format("covers {} bytes, the tensor has {}", write.byte_count, tensor_size));
  if (write.first_byte % size != 0 || write.byte_count % size != 0)
    return error_of(fmt::format("covers {} bytes, which are not whole elements", write.byte_count));
  const std::uint64_t expected = write.whole ? write.byte_count : write.positions.size() * size;
  if (write.values.size() != expected || (write.whole && !write.positions.empty()))
    return error_of(fmt::format("has {} bytes of values, {} fit its {} positions", write.values.size(), expected,
                                write.positions.size()));
  return ok();
}

// Whether a write's positions are valid; if so, flags the leaves that it touches. If many elements of a leaf change,
// flags all leaves of the part, because hashing them is faster than checking positions.
Status check_positions(const TensorWrite& write, bool ascending, const StateView& tensors,
                       std::vector<std::uint8_t>& leaves) {
  constexpr std::uint64_t kMany = 8;
  const std::uint64_t size = write.element_bytes, elements = write.byte_count / size;
  const auto position_error = [&](std::uint32_t position) {
    return write_error(place_of(write, tensors), fmt::format("names element {} of {}", position, elements));
  };
  if (!write.whole && ascending) {
    if (write.positions.back() >= elements) return position_error(write.positions.back());
  } else if (!write.whole) {
    std::vector<bool> seen(elements);
    for (const std::uint32_t position : write.positions) {
      if (position >= elements) return position_error(position);
      if (seen[position]) return write_error(place_of(write, tensors), fmt::format("names element {} twice", position));
      seen[position] = true;
    }
  }
  const std::uint64_t first = write.first_byte / kLeafBytes;
  const std::uint64_t count = (write.first_byte + write.byte_count - 1) / kLeafBytes + 1 - first;
  if (write.whole || write.positions.size() > kMany * count)
    std::fill_n(leaves.begin() + static_cast<std::ptrdiff_t>(first), count, std::uint8_t{1});
  else
    for (const std::uint32_t position : write.positions) leaves[(write.first_byte + position * size) / kLeafBytes] = 1;
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
    const TensorWrite &a = *sorted[i - 1], &b = *sorted[i];
    if (a.tensor == b.tensor && b.first_byte < a.first_byte + a.byte_count)
      return fail(Code::kInvalid, "apply changes",
                  "two writes to tensor '{}' overlap at byte {}; apply deltas one after the other, or folded",
                  tensors[a.tensor].name, b.first_byte);
  }
  return sorted;
}

LeafFlags unknown_leaves(const StateView& tensors, const LeafDigests& known) {
  LeafFlags flags(tensors.size());
  for (std::size_t t = 0; t < tensors.size(); ++t)
    flags[t].assign(leaf_count(tensors[t].bytes.size()), !knows_leaves(tensors, known, t));
  return flags;
}

std::vector<LeafRef> flagged_leaves(const LeafFlags& flags) {
  std::vector<LeafRef> leaves;
  for (std::size_t t = 0; t < flags.size(); ++t)
    for (std::size_t leaf = 0; leaf < flags[t].size(); ++leaf)
      if (flags[t][leaf]) leaves.push_back({t, leaf});
  return leaves;
}

void Upload::clear() {
  sources_.clear();
  bytes_ = 0;
}

Upload::Place Upload::add(const TensorWrite& write) {
  const auto place = [&](const void* from, std::uint64_t bytes, bool positions) {
    sources_.push_back({bytes_, bytes, static_cast<const std::byte*>(from), positions});
    bytes_ = round_up(bytes_ + bytes, 16);
    return sources_.back().at;
  };
  const std::uint64_t positions = place(write.positions.data(), write.positions.size() * sizeof(std::uint32_t), true);
  return {positions, place(write.values.data(), write.values.size(), false)};
}

// Copies bytes `begin` to `end` of a source; checks the order of positions on the way.
void Upload::copy(Source& source, std::uint64_t begin, std::uint64_t end, std::byte* to) {
  if (!source.positions) {
    std::memcpy(to, source.from + begin, end - begin);
    return;
  }
  const std::uint64_t first = begin / sizeof(std::uint32_t), count = (end - begin) / sizeof(std::uint32_t);
  const auto* from = reinterpret_cast<const std::uint32_t*>(source.from) + first;
  auto* out = reinterpret_cast<std::uint32_t*>(to);
  std::uint32_t disorder = first > 0 && from[-1] >= from[0] ? 1 : 0;
  out[0] = from[0];
  for (std::uint64_t i = 1; i < count; ++i) {  // branch-free, so that it is vectorised
    out[i] = from[i];
    disorder |= from[i - 1] >= from[i] ? 1 : 0;
  }
  if (disorder != 0) std::atomic_ref(source.disorder).store(1, std::memory_order_relaxed);
}

void Upload::fill(std::uint64_t begin, std::uint64_t end, std::byte* to) {
  const auto before = [&](const Source& source) { return source.at + source.bytes <= begin; };
  for (auto source = std::ranges::partition_point(sources_, before); source != sources_.end() && source->at < end;
       ++source) {
    const std::uint64_t from = std::max(source->at, begin), until = std::min(source->at + source->bytes, end);
    if (from < until) copy(*source, from - source->at, until - source->at, to + (from - begin));
  }
}

Status Upload::send(const std::shared_ptr<DeviceBackend>& backend, std::byte* device, unsigned threads) {
  ECHO_TRY(memory_.reserve(backend, 2 * std::min(kHalfBytes, bytes_)));
  Tasks tasks(threads);
  unsigned half = 0;
  for (std::uint64_t begin = 0; begin < bytes_; begin += kHalfBytes, half = 1 - half) {
    const std::uint64_t end = std::min(begin + kHalfBytes, bytes_);
    std::byte* const pinned = memory_.data() + half * std::min(kHalfBytes, bytes_);
    if (begin >= 2 * kHalfBytes) ECHO_TRY(backend->wait_for(half));
    for (std::uint64_t at = begin; at < end; at += kPieceBytes)
      ECHO_TRY(tasks.add([this, at, end, to = pinned + (at - begin)](unsigned) {
        fill(at, std::min(at + kPieceBytes, end), to);
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
    ECHO_TRY(check_positions(*writes[i], upload_.ascending(i), tensors, leaves[writes[i]->tensor]));

  parts_.clear();
  chunks_.clear();
  for (std::size_t i = 0; i < writes.size(); ++i)
    add(*writes[i], device_bytes(tensors[writes[i]->tensor]) + writes[i]->first_byte,
        reinterpret_cast<const std::uint32_t*>(changes_.data() + places[i].positions),
        changes_.data() + places[i].values);
  const std::uint64_t parts_bytes = parts_.size() * sizeof(SwapPart), chunks_at = round_up(parts_bytes, 16);
  const std::uint64_t chunks_bytes = chunks_.size() * sizeof(SwapChunk);
  ECHO_TRY(tables_.reserve(backend, chunks_at + chunks_bytes));
  std::memcpy(tables_.host.data(), parts_.data(), parts_bytes);
  std::memcpy(tables_.host.data() + chunks_at, chunks_.data(), chunks_bytes);
  ECHO_TRY(backend->copy_in(tables_.device.data(), tables_.host.data(), chunks_at + chunks_bytes));
  job_ = {reinterpret_cast<const SwapPart*>(tables_.device.data()),
          reinterpret_cast<const SwapChunk*>(tables_.device.data() + chunks_at),
          static_cast<std::uint32_t>(chunks_.size())};
  return ok();
}

void ValueSwap::add(const TensorWrite& write, std::byte* target, const std::uint32_t* positions, std::byte* values) {
  const std::uint64_t size = write.element_bytes;
  if (!write.whole) return add({target, positions, values, write.positions.size(), size});
  std::uint64_t done = 0;
  if (reinterpret_cast<std::uintptr_t>(target) % kVectorBytes == 0) {
    done = write.byte_count / kVectorBytes * kVectorBytes;
    add({target, nullptr, values, write.byte_count / kVectorBytes, kVectorBytes});
  }
  add({target + done, nullptr, values + done, (write.byte_count - done) / size, size});
}

void ValueSwap::add(const SwapPart& part) {
  const auto index = static_cast<std::uint32_t>(parts_.size());
  for (std::uint64_t first = 0; first < part.count; first += kChunkElements)
    chunks_.push_back({index, static_cast<std::uint32_t>(first / kChunkElements)});
  parts_.push_back(part);
}

}  // namespace echoline::delta::cuda
