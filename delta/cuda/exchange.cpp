#include "delta/cuda/exchange.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/parallel.hpp"

namespace echoline::delta::cuda {
namespace {

constexpr std::uint64_t kPieceBytes = 1u << 20;

Error unsound(std::string_view where, const std::string& why) {
  return fail(Code::kInvalid, "apply changes", "{}: {}; apply what resolve_delta() gives, to a state of the same model",
              where, why);
}
std::string place_of(const TensorWrite& write, const StateView& tensors) {
  return fmt::format("a write to tensor '{}' at byte {}", tensors[write.tensor].name, write.first_byte);
}

// Whether a write is sound for the tensor it names, positions aside.
Status check_write(const TensorWrite& write, const StateView& tensors) {
  if (write.tensor >= tensors.size())
    return unsound("a write", fmt::format("is for tensor {}, the state has {}", write.tensor, tensors.size()));
  const TensorView& tensor = tensors[write.tensor];
  const std::uint64_t tensor_size = tensor.bytes.size(), size = dtype_bytes(tensor.dtype);
  const auto complain = [&](const std::string& why) { return unsound(place_of(write, tensors), why); };
  if (write.element_bytes != size)
    return complain(fmt::format("has elements of {} bytes, the tensor's have {}", write.element_bytes, size));
  if (write.first_byte > tensor_size || write.byte_count > tensor_size - write.first_byte)
    return complain(fmt::format("covers {} bytes, the tensor has {}", write.byte_count, tensor_size));
  if (write.first_byte % size != 0 || write.byte_count % size != 0)
    return complain(fmt::format("covers {} bytes, which are not whole elements", write.byte_count));
  const std::uint64_t expected = write.whole ? write.byte_count : write.positions.size() * size;
  if (write.values.size() != expected || (write.whole && !write.positions.empty()))
    return complain(fmt::format("has {} bytes of values, {} fit its {} positions", write.values.size(), expected,
                                write.positions.size()));
  return ok();
}

bool ascending(std::span<const std::uint32_t> positions) {
  bool wrong = false;  // without a branch, so that it is vectorised
  for (std::size_t i = 1; i < positions.size(); ++i) wrong |= positions[i - 1] >= positions[i];
  return !wrong;
}

// Whether the positions of a write are sound, and if so, flags the leaves of its tensor that it touches. Other threads
// may flag some of them as well.
Status check_positions(const TensorWrite& write, const StateView& tensors, std::vector<std::uint8_t>& leaves) {
  const auto flag = [&](std::uint64_t leaf) { std::atomic_ref(leaves[leaf]).store(1, std::memory_order_relaxed); };
  if (write.whole) {
    for (std::uint64_t leaf = write.first_byte / kLeafBytes; leaf * kLeafBytes < write.first_byte + write.byte_count;
         ++leaf)
      flag(leaf);
    return ok();
  }
  const std::uint64_t size = write.element_bytes, elements = write.byte_count / size;
  const auto leaf_of = [&](std::uint32_t position) { return (write.first_byte + position * size) / kLeafBytes; };
  const auto beyond = [&](std::uint32_t position) {
    return unsound(place_of(write, tensors), fmt::format("names element {} of {}", position, elements));
  };
  if (ascending(write.positions)) {
    if (write.positions.back() >= elements) return beyond(write.positions.back());
    for (auto at = write.positions.begin(); at != write.positions.end();) {
      const std::uint64_t leaf = leaf_of(*at);
      flag(leaf);
      at = std::lower_bound(at, write.positions.end(), ((leaf + 1) * kLeafBytes - write.first_byte) / size);
    }
    return ok();
  }
  std::vector<bool> seen(elements);
  for (const std::uint32_t position : write.positions) {
    if (position >= elements) return beyond(position);
    if (seen[position]) return unsound(place_of(write, tensors), fmt::format("names element {} twice", position));
    seen[position] = true;
    flag(leaf_of(position));
  }
  return ok();
}

bool knows_leaves(const StateView& tensors, const LeafDigests& leaves, std::size_t tensor) {
  return leaves[tensor].size() == leaf_count(tensors[tensor].bytes.size());
}

std::uint64_t position_bytes(const TensorWrite& write) { return write.positions.size() * sizeof(std::uint32_t); }

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

std::vector<LeafRef> flagged(const LeafFlags& flags) {
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

std::uint64_t Upload::add(const void* from, std::uint64_t bytes) {
  const std::uint64_t at = bytes_;
  sources_.push_back({at, bytes, static_cast<const std::byte*>(from)});
  bytes_ = round_up(at + bytes, 16);
  return at;
}

std::size_t Upload::pieces() const { return static_cast<std::size_t>((bytes_ + kPieceBytes - 1) / kPieceBytes); }

Status Upload::start(const std::shared_ptr<Machine>& machine, std::byte* device) {
  machine_ = machine;
  device_ = device;
  unused_ = static_cast<unsigned>(std::min<std::size_t>(pieces(), Machine::kMarks));
  travelling_.clear();
  return memory_.reserve(machine, unused_ * kPieceBytes);
}

// There are more slots than threads, so that some are unused or travelling.
Result<unsigned> Upload::free_slot() {
  if (unused_ > 0) return --unused_;
  ECHO_CHECK(!travelling_.empty());
  const unsigned slot = travelling_.front();
  ECHO_TRY(machine_->wait_for(slot));
  travelling_.pop_front();
  return slot;
}

Status Upload::send(std::size_t piece) {
  const std::uint64_t begin = piece * kPieceBytes, end = std::min(begin + kPieceBytes, bytes_);
  unsigned slot = 0;
  {
    const std::lock_guard lock(mutex_);
    ECHO_ASSIGN(slot, free_slot());
  }
  std::byte* const to = memory_.data() + slot * kPieceBytes;
  const auto before = [&](const Source& source) { return source.at + source.bytes <= begin; };
  for (auto source = std::ranges::partition_point(sources_, before); source != sources_.end() && source->at < end;
       ++source) {
    const std::uint64_t from = std::max(source->at, begin), until = std::min(source->at + source->bytes, end);
    std::memcpy(to + (from - begin), source->from + (from - source->at), until - from);
  }
  const std::lock_guard lock(mutex_);
  ECHO_TRY(machine_->copy_in(device_ + begin, to, end - begin));
  ECHO_TRY(machine_->set_mark(slot));
  travelling_.push_back(slot);
  return ok();
}

Status Exchange::prepare(const std::shared_ptr<Machine>& machine, const DeviceOptions& options,
                         const SortedWrites& writes, const StateView& tensors, LeafFlags& leaves) {
  job_ = {};
  if (writes.empty()) return ok();
  upload_.clear();
  struct Places {
    std::uint64_t positions, values;
  };
  std::vector<Places> places;
  places.reserve(writes.size());
  for (const TensorWrite* write : writes) {
    const std::uint64_t positions = upload_.add(write->positions.data(), position_bytes(*write));
    places.push_back({positions, upload_.add(write->values.data(), write->values.size())});
  }
  if (upload_.bytes() > options.apply_bytes_max)
    return fail(
        Code::kExhausted, "apply changes",
        "the changes take {} bytes on the device, at most {} are allowed (apply_bytes_max); raise the limit, or "
        "upload the whole state",
        upload_.bytes(), options.apply_bytes_max);
  ECHO_TRY(changes_.reserve(machine, upload_.bytes()));
  ECHO_TRY(upload_.start(machine, changes_.data()));
  const std::size_t pieces = upload_.pieces();
  std::vector<Status> done(pieces + writes.size());
  // Pieces first: while they travel, positions are checked.
  for_each_parallel(
      done.size(), std::min(thread_count(options.threads), Machine::kMarks - 1), [&](unsigned, std::size_t i) {
        done[i] = i < pieces ? upload_.send(i)
                             : check_positions(*writes[i - pieces], tensors, leaves[writes[i - pieces]->tensor]);
      });
  for (Status& status : done) ECHO_TRY(std::move(status));

  parts_.clear();
  chunks_.clear();
  for (std::size_t i = 0; i < writes.size(); ++i)
    add(*writes[i], device_bytes(tensors[writes[i]->tensor]) + writes[i]->first_byte,
        reinterpret_cast<const std::uint32_t*>(changes_.data() + places[i].positions),
        changes_.data() + places[i].values);
  const std::uint64_t parts_bytes = parts_.size() * sizeof(SwapPart), chunks_at = round_up(parts_bytes, 16);
  const std::uint64_t chunks_bytes = chunks_.size() * sizeof(SwapChunk);
  ECHO_TRY(tables_.reserve(machine, chunks_at + chunks_bytes));
  std::memcpy(tables_.host.data(), parts_.data(), parts_bytes);
  std::memcpy(tables_.host.data() + chunks_at, chunks_.data(), chunks_bytes);
  ECHO_TRY(machine->copy_in(tables_.device.data(), tables_.host.data(), chunks_at + chunks_bytes));
  job_ = {reinterpret_cast<const SwapPart*>(tables_.device.data()),
          reinterpret_cast<const SwapChunk*>(tables_.device.data() + chunks_at),
          static_cast<std::uint32_t>(chunks_.size())};
  return ok();
}

void Exchange::add(const TensorWrite& write, std::byte* target, const std::uint32_t* positions, std::byte* values) {
  const std::uint64_t size = write.element_bytes;
  if (!write.whole) return add({target, positions, values, write.positions.size(), size});
  std::uint64_t done = 0;
  if (reinterpret_cast<std::uintptr_t>(target) % kVectorBytes == 0) {
    done = write.byte_count / kVectorBytes * kVectorBytes;
    add({target, nullptr, values, write.byte_count / kVectorBytes, kVectorBytes});
  }
  add({target + done, nullptr, values + done, (write.byte_count - done) / size, size});
}

void Exchange::add(const SwapPart& part) {
  const auto index = static_cast<std::uint32_t>(parts_.size());
  for (std::uint64_t first = 0; first < part.count; first += kChunkElements)
    chunks_.push_back({index, static_cast<std::uint32_t>(first / kChunkElements)});
  parts_.push_back(part);
}

}  // namespace echoline::delta::cuda
