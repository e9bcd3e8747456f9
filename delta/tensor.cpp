// Element types, checks of states, and the memory and cached digests of OwnedState.
#include "delta/tensor.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/file_memory.hpp"
#include "delta/digest.hpp"
#include "delta/state_writer.hpp"

namespace echoline::delta {
namespace {

constexpr std::size_t kAlignmentBytes = 64;  // of a tensor's memory: a cache line

struct DTypeInfo {
  std::string_view name;  // in safetensors files
  std::size_t bits;       // of an element
};

// Indexed by DType.
constexpr std::array<DTypeInfo, kAllDTypes.size()> kDTypeInfo{
    {{"BOOL", 8}, {"U8", 8},   {"I8", 8},      {"F8_E4M3", 8}, {"F8_E5M2", 8},     {"I16", 16},
     {"U16", 16}, {"F16", 16}, {"BF16", 16},   {"I32", 32},    {"U32", 32},        {"F32", 32},
     {"I64", 64}, {"U64", 64}, {"F64", 64},    {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
     {"C64", 64}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}}};

const DTypeInfo& dtype_info(DType dtype) { return kDTypeInfo.at(static_cast<std::size_t>(dtype)); }

std::string shape_text(std::span<const std::int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

// The byte size of a tensor whose description passes all checks.
Result<std::uint64_t> checked_bytes(const TensorView& tensor) {
  if (tensor.name.size() > kNameBytesMax)
    return fail(Code::kInvalid, "check tensor", "the name '{}...' has {} bytes, at most {} are allowed",
                tensor.name.substr(0, 60), tensor.name.size(), kNameBytesMax);
  if (tensor.shape.size() > kRankMax)
    return fail(Code::kInvalid, "check tensor", "tensor '{}' has {} dimensions, at most {} are allowed", tensor.name,
                tensor.shape.size(), kRankMax);
  auto bytes = tensor_bytes(tensor.dtype, tensor.shape);
  if (!bytes) return fail(Code::kInvalid, "check tensor", "tensor '{}': {}", tensor.name, bytes.error().detail);
  return bytes;
}

// Sorts the tensors, and checks that their names are unique.
Status sort_by_name(StateView& state) {
  std::sort(state.begin(), state.end(), [](const TensorView& a, const TensorView& b) { return a.name < b.name; });
  const auto duplicate = std::adjacent_find(state.begin(), state.end(),
                                            [](const TensorView& a, const TensorView& b) { return a.name == b.name; });
  if (duplicate != state.end()) return fail(Code::kInvalid, "check state", "tensor '{}' occurs twice", duplicate->name);
  return ok();
}

int hex_value(char digit) {
  if (digit >= '0' && digit <= '9') return digit - '0';
  if (digit >= 'a' && digit <= 'f') return digit - 'a' + 10;
  if (digit >= 'A' && digit <= 'F') return digit - 'A' + 10;
  return -1;
}

}  // namespace

std::size_t dtype_bits(DType dtype) { return dtype_info(dtype).bits; }
std::size_t dtype_bytes(DType dtype) { return std::max<std::size_t>(dtype_info(dtype).bits / 8, 1); }
std::string_view dtype_name(DType dtype) { return dtype_info(dtype).name; }

Result<DType> parse_dtype(std::string_view name) {
  std::string known;
  for (const DType dtype : kAllDTypes) {
    if (dtype_name(dtype) == name) return dtype;
    known += (known.empty() ? "" : " ") + std::string(dtype_name(dtype));
  }
  return fail(Code::kInvalid, "", "unknown element type '{}', expected one of: {}", name, known);
}

Result<std::int64_t> element_count(std::span<const std::int64_t> shape) {
  std::int64_t count = 1;
  bool overflows = false;
  bool is_empty = false;
  for (const std::int64_t dim : shape) {
    if (dim < 0) return fail(Code::kInvalid, "", "shape {} has a negative dimension", shape_text(shape));
    is_empty |= dim == 0;
    // A dimension of 0 does not hide that the others overflow.
    overflows |= __builtin_mul_overflow(count, std::max<std::int64_t>(dim, 1), &count);
  }
  if (overflows) return fail(Code::kInvalid, "", "shape {} has more than 2^63 - 1 elements", shape_text(shape));
  return is_empty ? 0 : count;
}

Result<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape) {
  ECHO_ASSIGN(const std::int64_t count, element_count(shape));
  const std::size_t bits = dtype_bits(dtype);
  if (bits < 8) {
    // Every eight elements fill whole bytes, so only those after the last eight can leave a byte unfilled.
    const std::uint64_t whole_eights = static_cast<std::uint64_t>(count) / 8;
    const std::uint64_t last_bits = static_cast<std::uint64_t>(count) % 8 * bits;
    if (last_bits % 8 != 0)
      return fail(Code::kInvalid, "", "shape {} of {}, packed elements of {} bits, does not fill its last byte",
                  shape_text(shape), dtype_name(dtype), bits);
    return whole_eights * bits + last_bits / 8;
  }
  std::uint64_t bytes = 0;
  if (__builtin_mul_overflow(static_cast<std::uint64_t>(count), bits / 8, &bytes))
    return fail(Code::kInvalid, "", "shape {} of {} has more than 2^64 - 1 bytes", shape_text(shape),
                dtype_name(dtype));
  return bytes;
}

Result<StateView> canonical(StateView state) {
  for (const TensorView& tensor : state) {
    ECHO_ASSIGN(const std::uint64_t bytes, checked_bytes(tensor));
    if (bytes != tensor.bytes.size())
      return fail(Code::kInvalid, "check tensor", "tensor '{}': {} {} takes {} bytes, found {}", tensor.name,
                  dtype_name(tensor.dtype), shape_text(tensor.shape), bytes, tensor.bytes.size());
  }
  ECHO_TRY(sort_by_name(state));
  return state;
}

Status check_same_tensors(const StateView& before, const StateView& after) {
  // The tensors that differ in one way.
  struct Differences {
    std::size_t count = 0;
    std::string first_tensor;
    void add(const std::string& tensor) {
      if (count++ == 0) first_tensor = tensor;
    }
    std::string text(std::string_view difference) const {
      return count == 0 ? "" : fmt::format("{} {} ('{}'{})", count, difference, first_tensor, count > 1 ? ", ..." : "");
    }
  };
  Differences gone, added, changed;
  // Both states are sorted by name, so one pass over the two finds every difference.
  auto old_tensor = before.begin(), new_tensor = after.begin();
  while (old_tensor != before.end() || new_tensor != after.end()) {
    if (new_tensor == after.end() || (old_tensor != before.end() && old_tensor->name < new_tensor->name)) {
      gone.add((old_tensor++)->name);
    } else if (old_tensor == before.end() || new_tensor->name < old_tensor->name) {
      added.add((new_tensor++)->name);
    } else {
      if (old_tensor->dtype != new_tensor->dtype || old_tensor->shape != new_tensor->shape)
        changed.add(fmt::format("{}: {} {} before, {} {} now", new_tensor->name, dtype_name(old_tensor->dtype),
                                shape_text(old_tensor->shape), dtype_name(new_tensor->dtype),
                                shape_text(new_tensor->shape)));
      ++old_tensor, ++new_tensor;
    }
  }
  if (gone.count + added.count + changed.count == 0) return ok();
  std::vector<std::string> differences{added.text("new"), gone.text("gone"), changed.text("of another type or shape")};
  std::erase(differences, "");
  return fail(Code::kInvalid, "compare states", "tensors: {}", fmt::join(differences, ", "));
}

std::string Digest::hex() const {
  std::string text;
  for (const std::byte byte : bytes) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

Result<Digest> Digest::parse(std::string_view hex) {
  const auto error_of = [&] {
    return fail(Code::kInvalid, "", "expected a digest of 32 hexadecimal digits, found '{}'", hex.substr(0, 80));
  };
  Digest digest;
  if (hex.size() != 2 * digest.bytes.size()) return error_of();
  for (std::size_t i = 0; i < digest.bytes.size(); ++i) {
    const int high = hex_value(hex[2 * i]);
    const int low = hex_value(hex[2 * i + 1]);
    if (high < 0 || low < 0) return error_of();
    digest.bytes[i] = static_cast<std::byte>(high << 4 | low);
  }
  return digest;
}

void OwnedState::MemoryDeleter::operator()(std::byte* memory) const {
  if (!owner) ::operator delete[](memory, std::align_val_t{kAlignmentBytes});
}

Result<OwnedState> OwnedState::empty_like(const StateView& like) { return empty_like(like, /*allocate=*/nullptr); }

Result<OwnedState> OwnedState::empty_like(const StateView& like, const Allocate& allocate) {
  StateView sorted = like;
  ECHO_TRY(sort_by_name(sorted));
  OwnedState state;
  state.tensors_.reserve(sorted.size());
  const auto aligned = [](std::uint64_t bytes) {
    return (bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
  };
  std::shared_ptr<std::byte> block;
  if (allocate) {
    std::uint64_t block_bytes = kAlignmentBytes;  // not 0, so that a state without tensors has a block too
    for (const TensorView& tensor : sorted) {
      ECHO_ASSIGN(const std::uint64_t bytes, checked_bytes(tensor));
      if (bytes > PTRDIFF_MAX - block_bytes)
        return fail(Code::kExhausted, "allocate state", "tensor '{}' needs {} bytes", tensor.name, bytes);
      block_bytes += aligned(bytes);
    }
    ECHO_ASSIGN(block, allocate(block_bytes));
  }
  std::uint64_t block_offset = 0;
  for (TensorView& tensor : sorted) {
    ECHO_ASSIGN(const std::uint64_t bytes, checked_bytes(tensor));
    std::byte* memory = nullptr;
    if (block)
      memory = block.get() + std::exchange(block_offset, block_offset + aligned(bytes));
    else if (bytes <= PTRDIFF_MAX)
      memory = static_cast<std::byte*>(
          ::operator new[](std::max<std::uint64_t>(bytes, 1), std::align_val_t{kAlignmentBytes}, std::nothrow));
    if (!memory)
      return fail(Code::kExhausted, "allocate state",
                  "tensor '{}' needs {} bytes (after {} for the tensors before it), "
                  "more than this machine has free",
                  tensor.name, bytes, state.total_bytes_);
    state.tensors_.push_back({.name = std::move(tensor.name),
                              .dtype = tensor.dtype,
                              .shape = std::move(tensor.shape),
                              .byte_count = bytes,
                              .memory = std::unique_ptr<std::byte[], MemoryDeleter>(memory, {block}),
                              .leaves = {}});
    state.total_bytes_ += bytes;
  }
  return state;
}

Result<OwnedState> OwnedState::over(const StateView& like, std::span<const std::span<std::byte>> memory,
                                    std::shared_ptr<const void> owner) {
  ECHO_CHECK(owner && memory.size() == like.size());
  OwnedState state;
  state.tensors_.reserve(like.size());
  for (std::size_t i = 0; i < like.size(); ++i) {
    ECHO_CHECK(i == 0 || like[i - 1].name < like[i].name, "tensor '{}' is not in canonical order", like[i].name);
    ECHO_ASSIGN(const std::uint64_t bytes, checked_bytes(like[i]));
    ECHO_CHECK(memory[i].size() == bytes, "tensor '{}' has {} bytes, its memory {}", like[i].name, bytes,
               memory[i].size());
    state.tensors_.push_back({.name = like[i].name,
                              .dtype = like[i].dtype,
                              .shape = like[i].shape,
                              .byte_count = bytes,
                              .memory = std::unique_ptr<std::byte[], MemoryDeleter>(memory[i].data(), {owner}),
                              .leaves = {}});
    state.total_bytes_ += bytes;
  }
  return state;
}

Result<OwnedState> OwnedState::sharing(const StateView& state, std::shared_ptr<const void> owner) {
  ECHO_ASSIGN(const StateView sorted, canonical(state));
  std::vector<std::span<std::byte>> memory;
  for (const TensorView& tensor : sorted)
    memory.emplace_back(const_cast<std::byte*>(tensor.bytes.data()), tensor.bytes.size());
  return over(sorted, memory, std::move(owner));
}

TensorView OwnedState::view_of(const Tensor& tensor) {
  return {.name = tensor.name,
          .dtype = tensor.dtype,
          .shape = tensor.shape,
          .bytes = {tensor.memory.get(), tensor.byte_count}};
}

StateView OwnedState::view() const {
  StateView views;
  views.reserve(tensors_.size());
  for (const Tensor& tensor : tensors_) views.push_back(view_of(tensor));
  return views;
}

std::optional<std::size_t> OwnedState::find(std::string_view name) const {
  const auto it = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const Tensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  if (it == tensors_.end() || it->name != name) return std::nullopt;
  return static_cast<std::size_t>(it - tensors_.begin());
}

std::span<const std::byte> OwnedState::bytes(std::size_t index) const {
  const Tensor& tensor = tensors_.at(index);
  return {tensor.memory.get(), tensor.byte_count};
}

std::span<std::byte> OwnedState::mutable_bytes(std::size_t index) {
  Tensor& tensor = tensors_.at(index);
  tensor.sealed = false;
  tensor.leaves.clear();
  return {tensor.memory.get(), tensor.byte_count};
}

void OwnedState::seal() {
  for (Tensor& tensor : tensors_) tensor.sealed = true;
}

Digest OwnedState::digest(unsigned threads) {
  return state_digest_of_leaves(view(), StateWriter::leaf_digests(*this, threads));
}

std::span<std::byte> StateWriter::memory(OwnedState& state, std::size_t index) {
  OwnedState::Tensor& tensor = state.tensors_[index];
  return {tensor.memory.get(), tensor.byte_count};
}

LeafDigests StateWriter::leaf_digests(OwnedState& state, unsigned threads) {
  const auto has_digests = [](const OwnedState::Tensor& tensor) {
    return tensor.leaves.size() == leaf_count(tensor.byte_count);
  };
  StateView to_hash;
  for (const OwnedState::Tensor& tensor : state.tensors_)
    if (!has_digests(tensor)) to_hash.push_back(OwnedState::view_of(tensor));
  LeafDigests new_digests = leaf_digests_of(to_hash, threads);
  LeafDigests leaves;
  leaves.reserve(state.tensors_.size());
  auto next_new = new_digests.begin();
  for (OwnedState::Tensor& tensor : state.tensors_) {
    leaves.push_back(has_digests(tensor) ? tensor.leaves : std::move(*next_new++));
    if (tensor.sealed) tensor.leaves = leaves.back();
  }
  return leaves;
}

void StateWriter::cache_leaf_digests(OwnedState& state, LeafDigests leaves) {
  for (std::size_t i = 0; i < leaves.size(); ++i)
    if (state.tensors_[i].sealed) state.tensors_[i].leaves = std::move(leaves[i]);
}

Result<OwnedState> copy_of(const StateView& state, const OwnedState::Allocate& allocate) {
  ECHO_ASSIGN(const StateView sorted, canonical(state));
  ECHO_ASSIGN(OwnedState copy, OwnedState::empty_like(sorted, allocate));
  for (std::size_t i = 0; i < sorted.size(); ++i)
    std::copy(sorted[i].bytes.begin(), sorted[i].bytes.end(), copy.mutable_bytes(i).begin());
  copy.seal();
  return copy;
}

OwnedState::Allocate allocate_in(std::filesystem::path folder) {
  return [folder = std::move(folder)](std::uint64_t bytes) -> Result<std::shared_ptr<std::byte>> {
    if (bytes >= kFileMemoryMin) return FileMemory::allocate(folder, bytes);
    auto* const memory =
        static_cast<std::byte*>(::operator new[](bytes, std::align_val_t{kAlignmentBytes}, std::nothrow));
    if (!memory) return fail(Code::kExhausted, "allocate state", "{} bytes, more than this machine has free", bytes);
    return std::shared_ptr<std::byte>(
        memory, [](std::byte* block) { ::operator delete[](block, std::align_val_t{kAlignmentBytes}); });
  };
}

}  // namespace echoline::delta
