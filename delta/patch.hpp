// Patches: a policy version as bytes, either whole (snapshot) or as what changed since another version (delta).
// Lossless to the bit: +0 against -0 and NaN payloads count as changes. The byte format is in FORMAT.md.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "delta/entropy.hpp"
#include "delta/raw_memory.hpp"
#include "delta/tensor.hpp"

namespace echoline::delta {

enum class PatchKind : std::uint8_t { kSnapshot = 1, kDelta = 2 };

// Bytes of tensor data dealt with so far, of `total`. Called from several threads, one at a time, now and then.
using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;

struct EncodeOptions {
  int table_zstd_level = 1;                   // of the tensor table; weights have their own codings
  unsigned threads = 1;                       // the bytes do not depend on it
  std::optional<Digest> base = std::nullopt;  // digest of the previous state when it is known; it is computed otherwise
  Progress progress = nullptr;
  bool count_entropy = false;  // of a delta: PatchStats::entropy
};

// What an encoding did.
struct PatchStats {
  std::uint64_t state_bytes = 0;  // raw bytes of the state
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;  // elements whose bits differ; all of them in a snapshot
  std::uint64_t patch_bytes = 0;
  std::optional<Digest> base;  // of a delta
  Digest result;
  std::optional<EntropyBound> entropy;  // where it was asked for
  double density() const { return elements ? static_cast<double>(changed) / static_cast<double>(elements) : 0.0; }
  double compression_ratio() const {
    return patch_bytes ? static_cast<double>(state_bytes) / static_cast<double>(patch_bytes) : 0.0;
  }
};

// Takes the bytes of a patch, in order, as they are made; an error stops the encoding.
using PatchSink = std::function<Status(std::span<const std::byte>)>;

// Encodes what turns `prev` into `cur` in one pass over both. Segments leave through `sink` while the pass goes on;
// memory does not depend on the size of the states. Both need the same tensors with the same types and shapes; kInvalid
// names the first tensor that is new, removed or differs. At most 1 % longer than the snapshot of `cur`.
Result<PatchStats> write_delta(const StateView& prev, const StateView& cur, const PatchSink& sink,
                               const EncodeOptions& options = {});
// Encodes the whole of `cur`.
Result<PatchStats> write_snapshot(const StateView& cur, const PatchSink& sink, const EncodeOptions& options = {});

// Folds deltas v -> v+1, ..., v+k-1 -> v+k into one v -> v+k. kInvalid when they do not follow each other or are of
// different models. Without `base` no weights are needed and the parts are kept side by side: the fold is about as long
// as they are together, but is checked and applied in one pass. With the state v as `base` it is encoded anew, as short
// as a direct delta.
Result<PatchStats> fold_deltas(std::span<const std::span<const std::byte>> patches, const PatchSink& sink,
                               const StateView* base = nullptr, const EncodeOptions& options = {});

// Bounds on what decoding may allocate, beyond which it fails with kExhausted; and how it works.
struct DecodeOptions {
  std::uint64_t state_bytes_max = 64ull << 30;  // of the state in a snapshot
  std::size_t tensors_max = 1u << 20;
  std::size_t table_bytes_max = 64u << 20;  // decompressed tensor table
  unsigned threads = 1;
  Progress progress = nullptr;
};

struct PatchTensor {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::uint64_t elements = 0;
  // Of small tensors that are coded together, all are counted at the first, in all numbers below.
  std::uint64_t coded_tensors = 1, coded_elements = 0;  // how many that are; itself, unless it begins a group
  std::uint64_t changed = 0;                            // in a fold, the sum over its parts
  std::uint64_t payload_bytes = 0;
  std::uint64_t bound_bits = 0;  // entropy of the changes given the old values, as the encoder modelled them
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
  std::uint64_t patch_bytes = 0;    // payload plus header, table and trailer
  std::uint64_t bound_bits = 0;
  double density() const { return elements ? static_cast<double>(changed) / static_cast<double>(elements) : 0.0; }
};

// Checks form and checksums and reports what a patch holds, without decoding values. kCorrupt for anything malformed.
Result<PatchInfo> inspect(std::span<const std::byte> patch, const DecodeOptions& options = {});

// New content of a part of a tensor.
struct TensorWrite {
  std::size_t tensor = 0;        // in canonical order
  std::uint64_t first_byte = 0;  // of the part within the tensor
  std::uint64_t byte_count = 0;  // of the part
  std::size_t element_bytes = 0;
  bool whole = false;                        // `values` is the whole part
  std::span<const std::uint32_t> positions;  // otherwise the elements of the part that change, in no order
  std::span<const std::byte> values;
  std::shared_ptr<const void> memory;  // of positions and values; several writes may share it
  // Writes into the part's memory, byte_count bytes.
  void write_to(std::span<std::byte> part) const;
};
// Called by one thread at a time, for parts in no order.
using WriteSink = std::function<Status(TensorWrite&&)>;

// Resolves a delta against the state it applies to, without changing it. Everything is proven before this returns
// success: form and checksums, that `state` has the base digest, and that what `sink` was given leads to the result
// digest. Until then what the sink holds must not take effect. kStale: the state is not the base; kInvalid: the patch
// is of another model or is a snapshot; kCorrupt: malformed, or the result is not what the patch promised.
Result<PatchInfo> resolve_delta(std::span<const std::byte> patch, const StateView& state, const WriteSink& sink,
                                const DecodeOptions& options = {});

// Turns `state` from the delta's base into its result; errors are those of resolve_delta(). All replacement values are
// resolved and proven before the first is written, so on any failure the state is as before. The caller must not be
// writing to `state` through spans of mutable_bytes() meanwhile.
Status apply_delta(std::span<const std::byte> patch, OwnedState& state, const DecodeOptions& options = {});

// A delta that is resolved while it arrives: each segment as soon as all of it is there, so that little is left to do
// once the last byte has come. With options.threads above 1, that many threads decode beside the caller, and add() only
// hands segments over, unless two for each thread wait already. Holds what apply_delta() would, and of the bytes the
// segments that wait. Called by one thread.
class IncomingDelta {
 public:
  // `state` must not change until this is done; it lives longer.
  explicit IncomingDelta(OwnedState& state, const DecodeOptions& options = {});
  // The same for a state whose memory somebody else writes: apply() returns what is to be written there. Canonical.
  explicit IncomingDelta(StateView state, const DecodeOptions& options = {});
  ~IncomingDelta();
  IncomingDelta(IncomingDelta&&) noexcept;
  IncomingDelta& operator=(IncomingDelta&&) noexcept;

  // The next bytes of the patch, in order, however they are cut. After an error this is of no more use: kInvalid when
  // it is a snapshot or of another model, kCorrupt, kExhausted. A later call or apply() reports what threads find.
  Status add(std::span<const std::byte> bytes);
  std::uint64_t bytes() const;           // added so far
  std::optional<Digest> result() const;  // of the state afterwards, as the patch says at its end
  // All bytes were added. Proves what resolve_delta() does, turns the state into the result, and returns what was
  // written, for who holds the state a second time; of an element that changes, its value and four bytes. Once,
  // whatever comes of it. On failure the state is as before; a state that is not the base may look like a corrupt
  // patch, too.
  Result<std::vector<TensorWrite>> apply();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// A snapshot that is decoded while it arrives, with threads as of IncomingDelta. Holds the state, and of the bytes the
// segments that wait. Called by one thread.
class IncomingSnapshot {
 public:
  explicit IncomingSnapshot(const DecodeOptions& options = {});
  ~IncomingSnapshot();
  IncomingSnapshot(IncomingSnapshot&&) noexcept;
  IncomingSnapshot& operator=(IncomingSnapshot&&) noexcept;

  // As of IncomingDelta; kInvalid for a delta.
  Status add(std::span<const std::byte> bytes);
  std::uint64_t bytes() const;
  std::optional<Digest> result() const;
  // All bytes were added: the state, its digest verified. Once.
  Result<OwnedState> finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The state a snapshot holds, its digest verified. kInvalid for a delta.
Result<OwnedState> decode_snapshot(std::span<const std::byte> patch, const DecodeOptions& options = {});

}  // namespace echoline::delta
