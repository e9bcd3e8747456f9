#include "delta/cuda/exchange.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace echoline::delta::cuda {
namespace {

constexpr std::uint64_t kStageBytes = 8u << 20;

// Whether a write is sound for the tensor it names.
Status check_write(const TensorWrite& write, const StateView& tensors) {
  const auto complain = [&](std::string_view where, const std::string& why) {
    return fail(Code::kInvalid, "apply changes",
                "{}: {}; apply what resolve_delta() gives, to a state of the same model", where, why);
  };
  if (write.tensor >= tensors.size())
    return complain("a write", fmt::format("is for tensor {}, the state has {}", write.tensor, tensors.size()));
  const TensorView& tensor = tensors[write.tensor];
  const std::uint64_t tensor_size = tensor.bytes.size(), size = dtype_bytes(tensor.dtype);
  const std::string where = fmt::format("a write to tensor '{}' at byte {}", tensor.name, write.first_byte);
  if (write.element_bytes != size)
    return complain(where, fmt::format("has elements of {} bytes, the tensor's have {}", write.element_bytes, size));
  if (write.first_byte > tensor_size || write.byte_count > tensor_size - write.first_byte)
    return complain(where, fmt::format("covers {} bytes, the tensor has {}", write.byte_count, tensor_size));
  if (write.first_byte % size != 0 || write.byte_count % size != 0)
    return complain(where, fmt::format("covers {} bytes, which are not whole elements", write.byte_count));
  const std::uint64_t expected = write.whole ? write.byte_count : write.positions.size() * size;
  if (write.values.size() != expected || (write.whole && !write.positions.empty()))
    return complain(where, fmt::format("has {} bytes of values, {} fit its {} positions", write.values.size(), expected,
                                       write.positions.size()));
  const std::uint64_t elements = write.byte_count / size;
  bool ascending = true;
  for (std::size_t i = 0; i < write.positions.size(); ++i) {
    if (write.positions[i] >= elements)
      return complain(where, fmt::format("names element {} of {}", write.positions[i], elements));
    ascending = ascending && (i == 0 || write.positions[i - 1] < write.positions[i]);
  }
  if (!ascending) {
    std::vector<bool> seen(elements);
    for (const std::uint32_t position : write.positions) {
      if (seen[position]) return complain(where, fmt::format("names element {} twice", position));
      seen[position] = true;
    }
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

std::vector<LeafRef> leaves_to_hash(const SortedWrites& writes, const StateView& tensors, const LeafDigests& known) {
  std::vector<LeafRef> leaves;
  auto write = writes.begin();
  std::vector<bool> touched;
  for (std::size_t t = 0; t < tensors.size(); ++t) {
    touched.assign(leaf_count(tensors[t].bytes.size()), !knows_leaves(tensors, known, t));
    for (; write != writes.end() && (*write)->tensor == t; ++write) {
      const TensorWrite& w = **write;
      if (w.whole)
        for (std::uint64_t leaf = w.first_byte / kLeafBytes; leaf * kLeafBytes < w.first_byte + w.byte_count; ++leaf)
          touched[leaf] = true;
      for (const std::uint32_t position : w.positions)
        touched[(w.first_byte + position * std::uint64_t{w.element_bytes}) / kLeafBytes] = true;
    }
    for (std::size_t leaf = 0; leaf < touched.size(); ++leaf)
      if (touched[leaf]) leaves.push_back({t, leaf});
  }
  return leaves;
}

Status Stager::start(const std::shared_ptr<Machine>& machine) {
  machine_ = machine.get();
  filled_ = 0;
  travelling_ = {};
  for (Buffer& block : blocks_) ECHO_TRY(block.reserve(machine, kStageBytes));
  return ok();
}

Status Stager::go_to(std::byte* device) {
  ECHO_TRY(send());
  device_ = device;
  return ok();
}

Status Stager::put(const void* from, std::uint64_t bytes) {
  const auto* at = static_cast<const std::byte*>(from);
  while (bytes != 0) {
    const std::uint64_t part = std::min(bytes, kStageBytes - filled_);
    std::memcpy(blocks_[current_].data() + filled_, at, part);
    filled_ += part;
    at += part;
    bytes -= part;
    if (filled_ == kStageBytes) ECHO_TRY(send());
  }
  return ok();
}

Status Stager::pad() {
  static constexpr std::array<std::byte, 16> kZeros{};
  return put(kZeros.data(), round_up(filled_, 16) - filled_);
}

Status Stager::send() {
  if (filled_ == 0) return ok();
  ECHO_TRY(machine_->copy_in(device_, blocks_[current_].data(), filled_));
  ECHO_TRY(machine_->set_mark(current_));
  travelling_[current_] = true;
  device_ += filled_;
  filled_ = 0;
  current_ = 1 - current_;
  if (travelling_[current_]) ECHO_TRY(machine_->wait_for(current_));
  return ok();
}

Status Exchange::prepare(const std::shared_ptr<Machine>& machine, const SortedWrites& writes, const StateView& tensors,
                         std::uint64_t bytes_max) {
  job_ = {};
  if (writes.empty()) return ok();
  std::uint64_t bytes = 0;
  for (const TensorWrite* write : writes)
    bytes += round_up(position_bytes(*write), 16) + round_up(write->values.size(), 16);
  if (bytes > bytes_max)
    return fail(
        Code::kExhausted, "apply changes",
        "the changes take {} bytes on the device, at most {} are allowed (apply_bytes_max); raise the limit, or "
        "upload the whole state",
        bytes, bytes_max);
  ECHO_TRY(changes_.reserve(machine, bytes));
  ECHO_TRY(stager_.start(machine));
  ECHO_TRY(stager_.go_to(changes_.data()));
  parts_.clear();
  chunks_.clear();
  std::byte* at = changes_.data();
  for (const TensorWrite* write : writes) {
    std::byte* const values = at + round_up(position_bytes(*write), 16);
    add(*write, device_bytes(tensors[write->tensor]) + write->first_byte, reinterpret_cast<const std::uint32_t*>(at),
        values);
    ECHO_TRY(stager_.put(write->positions.data(), position_bytes(*write)));
    ECHO_TRY(stager_.pad());
    ECHO_TRY(stager_.put(write->values.data(), write->values.size()));
    ECHO_TRY(stager_.pad());
    at = values + round_up(write->values.size(), 16);
  }

  const std::uint64_t parts_bytes = round_up(parts_.size() * sizeof(SwapPart), 16);
  ECHO_TRY(tables_.reserve(machine, parts_bytes + chunks_.size() * sizeof(SwapChunk)));
  ECHO_TRY(stager_.go_to(tables_.data()));
  ECHO_TRY(stager_.put(parts_.data(), parts_.size() * sizeof(SwapPart)));
  ECHO_TRY(stager_.pad());
  ECHO_TRY(stager_.put(chunks_.data(), chunks_.size() * sizeof(SwapChunk)));
  ECHO_TRY(stager_.send());
  job_ = {reinterpret_cast<const SwapPart*>(tables_.data()),
          reinterpret_cast<const SwapChunk*>(tables_.data() + parts_bytes), static_cast<std::uint32_t>(chunks_.size())};
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
