// Patches: a policy version (the weights of a model after a training step) as bytes, either whole (snapshot) or as the
// changes since another version (delta). Patches are bit-exact: +0 against -0 and NaN payloads count as changes. They
// consist of segments, the parts of tensors that are coded and decoded independently. FORMAT.md defines the bytes.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
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

// Receives the bytes of tensor data processed so far, of `total`. Called occasionally, by one of several threads at a
// time.
using Progress = std::function<void(std::uint64_t done, std::uint64_t total)>;

struct EncodeOptions {
  int table_zstd_level = 1;                   // for the tensor table; weights have other codings
  unsigned threads = 1;                       // does not affect the bytes
  std::optional<Digest> base = std::nullopt;  // digest of the previous state, if known; otherwise computed
  Progress progress = nullptr;
  bool count_entropy = false;  // for deltas: sets PatchStats::entropy
  // Receives the digests of the new state's leaves. For a delta with `base`, the caller may fill it with the previous
  // state's digests. Tensors that are the same memory in both states then count as unchanged and are not read.
  LeafDigests* leaves = nullptr;
};

// The results of an encoding.
struct PatchStats {
  std::uint64_t state_bytes = 0;  // raw bytes of the state
  std::uint64_t elements = 0;
  std::uint64_t changed = 0;  // elements whose bits differ; all of them in a snapshot
  std::uint64_t patch_bytes = 0;
  std::optional<Digest> base;  // of a delta
  Digest result;
  std::optional<EntropyBound> entropy;  // if requested
  double density() const { return elements ? static_cast<double>(changed) / static_cast<double>(elements) : 0.0; }
  double compression_ratio() const {
    return patch_bytes ? static_cast<double>(state_bytes) / static_cast<double>(patch_bytes) : 0.0;
  }
};

// Receives the bytes of a patch in order, while it is encoded; an error stops the encoding.
using PatchSink = std::function<Status(std::span<const std::byte>)>;

// Encodes the change from `prev` to `cur` in one pass over both. Passes segments to `sink` during the pass; memory use
// does not depend on the size of the states. Both need the same tensors with the same types and shapes; kInvalid names
// the first tensor that is new, removed or different. The result is at most 1 % longer than the snapshot of `cur`.
Result<PatchStats> write_delta(const StateView& prev, const StateView& cur, const PatchSink& sink,
                               const EncodeOptions& options = {});
// Encodes the whole of `cur`.
Result<PatchStats> write_snapshot(const StateView& cur, const PatchSink& sink, const EncodeOptions& options = {});

// Folds deltas v -> v+1, ..., v+k-1 -> v+k into one delta v -> v+k. kInvalid if they do not follow each other or belong
// to different models. Without `base`, no weights are needed: the fold holds the changes of every delta, and is about
// as long as all of them. It is checked and applied in one pass. With the state v as `base`, the fold is encoded again
// and is as short as a direct delta.
Result<PatchStats> fold_deltas(std::span<const std::span<const std::byte>> patches, const PatchSink& sink,
                               const StateView* base = nullptr, const EncodeOptions& options = {});

// Limits of memory for decoding (kExhausted beyond them), and further options.
struct DecodeOptions {
  std::uint64_t state_bytes_max = 64ull << 30;  // of the state in a snapshot
  std::size_t tensors_max = 1u << 20;
  std::size_t table_bytes_max = 64u << 20;  // decompressed tensor table
  unsigned threads = 1;
  Progress progress = nullptr;
  // IncomingSnapshot calls this with the canonical layout. It returns the state that receives the content. Null: a
  // state in new memory.
  std::function<Result<OwnedState>(const StateView& layout)> make_state = nullptr;
  // IncomingDelta keeps new values above kWritesInMemoryMax in a file below this folder (base/file_memory.hpp). Empty:
  // all are in ordinary memory.
  std::filesystem::path folder = {};
};

// A delta of any size can then be verified before it takes effect.
inline constexpr std::uint64_t kWritesInMemoryMax = 64ull << 20;

struct PatchTensor {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::uint64_t elements = 0;
  // If small tensors are coded together (a group), these numbers of the first one are the sums over all of them, and
  // the other ones have no changes.
  std::uint64_t coded_tensors = 1, coded_elements = 0;  // of the group, or of this tensor alone
  std::uint64_t changed = 0;                            // in a fold, the sum over the folded deltas
  std::uint64_t payload_bytes = 0;
  std::uint64_t bound_bits = 0;  // entropy of the changes given the old values, in the encoder's model
};

struct PatchInfo {
  PatchKind kind = PatchKind::kSnapshot;
  std::optional<Digest> base;  // required digest of the state to which a delta applies
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

// Checks form and checksums and reports a patch's content without decoding values. kCorrupt if malformed.
Result<PatchInfo> inspect(std::span<const std::byte> patch, const DecodeOptions& options = {});

// New content for a part of a tensor.
struct TensorWrite {
  std::size_t tensor = 0;        // in canonical order
  std::uint64_t first_byte = 0;  // of the part within the tensor
  std::uint64_t byte_count = 0;  // of the part
  std::size_t element_bytes = 0;
  bool whole = false;                        // `values` is the whole part
  std::span<const std::uint32_t> positions;  // otherwise: the changed elements of the part, in any order
  std::span<const std::byte> values;
  std::shared_ptr<const void> memory;  // owns positions and values; several writes may share it
  // Writes into the part's memory, `part`, of byte_count bytes.
  void write_to(std::span<std::byte> part) const;
};
// Called by one thread at a time, for parts in any order.
using WriteSink = std::function<Status(TensorWrite&&)>;

// Resolves a delta: computes the new values from its base state, without changing the state. Success means that
// everything is verified: form and checksums, the base digest of `state`, and that the writes passed to `sink` lead to
// the result digest. Until then the writes must not take effect. kStale: the state is not the base; kInvalid: the patch
// is of another model or is a snapshot; kCorrupt: it is malformed, or its result differs from the promised one.
Result<PatchInfo> resolve_delta(std::span<const std::byte> patch, const StateView& state, const WriteSink& sink,
                                const DecodeOptions& options = {});

// Turns `state` from the delta's base into its result; errors as those of resolve_delta(). All new values are resolved
// and verified before the first is written, so on failure the state is unchanged. The caller must not write to `state`
// through spans of mutable_bytes() meanwhile.
Status apply_delta(std::span<const std::byte> patch, OwnedState& state, const DecodeOptions& options = {});

// Resolves a delta while it arrives: each segment as soon as it is complete, so that little work remains after the last
// byte. With options.threads above 1, that many threads decode beside the caller, and add() only queues segments,
// unless two per thread are queued already. Holds as much memory as apply_delta(), and the bytes of queued segments.
// Call from one thread.
class IncomingDelta {
 public:
  // `state` must not change until this object is finished, and must outlive it.
  explicit IncomingDelta(OwnedState& state, const DecodeOptions& options = {});
  // For a canonical state whose memory another object writes: apply() returns the writes.
  explicit IncomingDelta(StateView state, const DecodeOptions& options = {});
  ~IncomingDelta();
  IncomingDelta(IncomingDelta&&) noexcept;
  IncomingDelta& operator=(IncomingDelta&&) noexcept;

  // Adds the next bytes of the patch, cut anywhere. After an error this object is unusable: kInvalid if it is a
  // snapshot or of another model, kCorrupt, kExhausted. A later call or apply() may report errors found by threads.
  Status add(std::span<const std::byte> bytes);
  std::uint64_t bytes() const;           // added so far
  std::optional<Digest> result() const;  // of the state afterwards, known at the patch's end
  // Call once, after all bytes were added. Verifies as resolve_delta() does, turns the state into the result, and
  // returns the writes, for a second copy of the state. The writes take four bytes per changed element beside its
  // value (DecodeOptions::folder). On failure the state is unchanged. A state other than the base may be reported as a
  // corrupt patch.
  Result<std::vector<TensorWrite>> apply();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Decodes a snapshot while it arrives, with threads like IncomingDelta. Holds the state and the bytes of queued
// segments. Call from one thread.
class IncomingSnapshot {
 public:
  explicit IncomingSnapshot(const DecodeOptions& options = {});
  ~IncomingSnapshot();
  IncomingSnapshot(IncomingSnapshot&&) noexcept;
  IncomingSnapshot& operator=(IncomingSnapshot&&) noexcept;

  // As in IncomingDelta; kInvalid for a delta.
  Status add(std::span<const std::byte> bytes);
  std::uint64_t bytes() const;
  std::optional<Digest> result() const;
  // Call once, after all bytes were added. Returns the state with its digest verified.
  Result<OwnedState> finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns the state of a snapshot with its digest verified. kInvalid for a delta.
Result<OwnedState> decode_snapshot(std::span<const std::byte> patch, const DecodeOptions& options = {});

}  // namespace echoline::delta
