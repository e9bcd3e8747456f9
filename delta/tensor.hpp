// Named tensors as bytes: element types, non-owning views of a model state, and a state that owns its memory.
#pragma once
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace echoline::delta {

// Element types. The numbers are part of the patch format and of digests (FORMAT.md); never renumber.
enum class DType : std::uint8_t {
  kBool = 0,
  kU8 = 1,
  kI8 = 2,
  kF8E4M3 = 3,
  kF8E5M2 = 4,
  kI16 = 5,
  kU16 = 6,
  kF16 = 7,
  kBF16 = 8,
  kI32 = 9,
  kU32 = 10,
  kF32 = 11,
  kI64 = 12,
  kU64 = 13,
  kF64 = 14,
  kF8E8M0 = 15,      // scales of microscaling formats
  kF8E4M3Fnuz = 16,  // without negative zero and infinity
  kF8E5M2Fnuz = 17,
  kC64 = 18,     // two F32
  kF4 = 19,      // packed: two elements per byte
  kF6E2M3 = 20,  // packed: four elements in three bytes
  kF6E3M2 = 21,  // packed
};
inline constexpr std::array kAllDTypes = {
    DType::kBool, DType::kU8,  DType::kI8,     DType::kF8E4M3, DType::kF8E5M2,     DType::kI16,
    DType::kU16,  DType::kF16, DType::kBF16,   DType::kI32,    DType::kU32,        DType::kF32,
    DType::kI64,  DType::kU64, DType::kF64,    DType::kF8E8M0, DType::kF8E4M3Fnuz, DType::kF8E5M2Fnuz,
    DType::kC64,  DType::kF4,  DType::kF6E2M3, DType::kF6E3M2};

std::size_t dtype_bits(DType dtype);
// Bytes of the unit in which patches count and code: an element, or one byte if elements are packed.
std::size_t dtype_bytes(DType dtype);
// The name safetensors uses: "BF16", "F32", "BOOL", ...
std::string_view dtype_name(DType dtype);
// From the safetensors name; kInvalid lists the known names.
Result<DType> parse_dtype(std::string_view name);

// Limits on every state, whatever its source.
inline constexpr std::size_t kRankMax = 32;
inline constexpr std::size_t kNameBytesMax = 4096;

// Product of `shape` (1 for a scalar); kInvalid if a dimension is negative or the product exceeds int64.
Result<std::int64_t> element_count(std::span<const std::int64_t> shape);
// element_count() times the element size, checked for overflow; kInvalid if packed elements do not fill the last byte.
Result<std::uint64_t> tensor_bytes(DType dtype, std::span<const std::int64_t> shape);

// A tensor in memory owned elsewhere: row-major, little endian, without guaranteed alignment.
struct TensorView {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

// A whole model state. It is canonical if sorted by name (bytewise) with unique names.
using StateView = std::vector<TensorView>;

// Sorts by name and checks the state. Names must be unique and have at most kNameBytesMax bytes, shapes at most
// kRankMax dimensions, and byte sizes must match type and shape. kInvalid names the invalid tensor.
Result<StateView> canonical(StateView state);

// Whether two canonical states have the same tensors, whatever their values. kInvalid counts the tensors that are new,
// gone, or of another type or shape, and names the first of each.
Status check_same_tensors(const StateView& before, const StateView& after);

// 128 bits that identify a tensor or a state; digest.hpp computes them.
struct Digest {
  std::array<std::byte, 16> bytes{};
  // 32 lower-case hexadecimal digits, most significant byte first.
  std::string hex() const;
  // The inverse of hex(); accepts upper case too. kInvalid for any other text.
  static Result<Digest> parse(std::string_view hex);
  friend auto operator<=>(const Digest&, const Digest&) = default;
};

// Digests by tensor, in canonical order, and by leaf (a part of 64 KiB of a tensor, digest.hpp).
using LeafDigests = std::vector<std::vector<Digest>>;

// A state that owns its memory: one 64-byte aligned block per tensor, in canonical order. Addresses do not change
// during the object's life, including moves. Not thread-safe: one writer, or several readers.
class OwnedState {
 public:
  OwnedState() = default;
  // Allocates tensors with the names, types and shapes of `like`, whose bytes are not read and may be empty. The
  // content is uninitialised, so that memory costs nothing before it is written. kInvalid for an invalid name or shape,
  // kExhausted if memory runs out.
  static Result<OwnedState> empty_like(const StateView& like);
  // As above, in one block of memory. `allocate` returns the block: `bytes` bytes at an address that is a multiple
  // of 64.
  using Allocate = std::function<Result<std::shared_ptr<std::byte>>(std::uint64_t bytes)>;
  static Result<OwnedState> empty_like(const StateView& like, const Allocate& allocate);
  // As above, for a canonical `like`, in existing memory: memory[i] has the size of tensor i. `owner` keeps it alive.
  static Result<OwnedState> over(const StateView& like, std::span<const std::span<std::byte>> memory,
                                 std::shared_ptr<const void> owner);
  // Shares the memory of `state`, which `owner` keeps alive. It must not change from now on, also not through the new
  // state. Errors as those of canonical().
  static Result<OwnedState> sharing(const StateView& state, std::shared_ptr<const void> owner);

  std::size_t size() const { return tensors_.size(); }
  std::uint64_t total_bytes() const { return total_bytes_; }
  const std::string& name(std::size_t index) const { return tensors_.at(index).name; }
  // Views are valid while this object (or the one it was moved into) lives.
  StateView view() const;
  std::optional<std::size_t> find(std::string_view name) const;
  std::span<const std::byte> bytes(std::size_t index) const;

  // Returns writable memory. Until seal(), the tensor counts as changing, and its digests are not cached.
  std::span<std::byte> mutable_bytes(std::size_t index);
  // Ends the use of all spans that mutable_bytes() returned.
  void seal();

  // Digest of the current content, computed by up to `threads` threads. Digests of sealed tensors are cached.
  Digest digest(unsigned threads = 1);

 private:
  friend class StateWriter;
  struct MemoryDeleter {
    std::shared_ptr<const void> owner;  // keeps the memory alive; null: the memory is the tensor's own and is freed
    void operator()(std::byte* memory) const;
  };
  struct Tensor {
    std::string name;
    DType dtype = DType::kU8;
    std::vector<std::int64_t> shape;
    std::size_t byte_count = 0;
    std::unique_ptr<std::byte[], MemoryDeleter> memory;
    bool sealed = true;          // no caller has writable memory
    std::vector<Digest> leaves;  // digests of its leaves (digest.hpp), if known; only while sealed
  };
  static TensorView view_of(const Tensor& tensor);
  std::vector<Tensor> tensors_;
  std::uint64_t total_bytes_ = 0;
};

// A state with several owners that does not change any more.
using SharedState = std::shared_ptr<const OwnedState>;
inline SharedState share(OwnedState state) { return std::make_shared<const OwnedState>(std::move(state)); }

// A copy of the state, in memory from `allocate` if that is given. Errors as those of canonical() and empty_like().
Result<OwnedState> copy_of(const StateView& state, const OwnedState::Allocate& allocate = nullptr);

// Allocates small states in ordinary memory, and those of at least kFileMemoryMin bytes in files below `folder`
// (base/file_memory.hpp).
OwnedState::Allocate allocate_in(std::filesystem::path folder);

}  // namespace echoline::delta
