// Patches: a policy version as bytes, either whole (snapshot) or as what changed since another version (delta).
// Lossless to the bit: +0 against -0 and NaN payloads count as changes. The byte format is in FORMAT.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "delta/tensor.hpp"

namespace echoline::delta {

enum class PatchKind : std::uint8_t { kSnapshot = 1, kDelta = 2 };

struct EncodeOptions {
  int zstd_level = 1;
  unsigned threads = 1;  // the bytes do not depend on it
};

// What an encoding did.
struct PatchStats {
  std::uint64_t state_bytes = 0;  // raw bytes of the state
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;  // elements whose bits differ; all of them in a snapshot
  std::uint64_t patch_bytes = 0;
  std::optional<Digest> base;  // of a delta
  Digest result;
  double density() const { return elements ? static_cast<double>(changed) / static_cast<double>(elements) : 0.0; }
  double compression_ratio() const {
    return patch_bytes ? static_cast<double>(state_bytes) / static_cast<double>(patch_bytes) : 0.0;
  }
};

// Encodes what turns `prev` into `cur`. Both need the same tensors with the same types and shapes; kInvalid names the
// first tensor that is new, removed or differs. Never longer than the snapshot of `cur`.
Result<std::vector<std::byte>> encode_delta(const StateView& prev, const StateView& cur,
                                            const EncodeOptions& options = {}, PatchStats* stats = nullptr);

// Encodes the whole of `cur`.
Result<std::vector<std::byte>> encode_snapshot(const StateView& cur, const EncodeOptions& options = {},
                                               PatchStats* stats = nullptr);

// Bounds on what decoding may allocate; beyond them kExhausted.
struct DecodeLimits {
  std::uint64_t state_bytes_max = 64ull << 30;
  std::size_t tensors_max = 1u << 20;
  std::size_t table_bytes_max = 64u << 20;  // decompressed tensor table
};

struct PatchTensor {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;
  std::uint64_t payload_bytes = 0;
};

struct PatchInfo {
  PatchKind kind = PatchKind::kSnapshot;
  std::optional<Digest> base;  // digest a state must have for a delta to apply
  Digest result;               // digest of the state afterwards
  std::vector<PatchTensor> tensors;
  std::uint64_t state_bytes = 0;
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;
  std::uint64_t payload_bytes = 0;  // sum over tensors
  std::uint64_t patch_bytes = 0;    // payload plus header, table and checksum
  double density() const { return elements ? static_cast<double>(changed) / static_cast<double>(elements) : 0.0; }
};

// Checks form and checksum and reports what a patch holds, without decoding values. kCorrupt for anything malformed.
Result<PatchInfo> inspect(std::span<const std::byte> patch, const DecodeLimits& limits = {});

// Turns `state` from the delta's base into its result. In order: form and checksum, tensor table against the state,
// base digest against the state's, all replacement values decoded, values written, result digest. On any failure the
// state is bit for bit as before. kStale: the state is not the base; kInvalid: the patch is of another model or is a
// snapshot; kCorrupt: malformed, or the result digest does not match. The caller must not be writing to `state`
// through spans of mutable_bytes() meanwhile.
Status apply_delta(std::span<const std::byte> patch, OwnedState& state, const DecodeLimits& limits = {});

// The state a snapshot holds, its digest verified. kInvalid for a delta.
Result<OwnedState> decode_snapshot(std::span<const std::byte> patch, const DecodeLimits& limits = {});

}  // namespace echoline::delta
