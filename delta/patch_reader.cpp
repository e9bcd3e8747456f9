// Decoding: every segment is resolved on its own, by several threads; nothing is written before all of it is proven.
#include <mutex>

#include "delta/digest.hpp"
#include "delta/parallel.hpp"
#include "delta/patch_format.hpp"
#include "delta/state_writer.hpp"

namespace echoline::delta {

namespace {

struct Resolved {
  PatchInfo info;
  std::vector<std::vector<Digest>> leaves;  // of the result
};

// Counts what is done and tells the caller, one thread at a time.
class Ticker {
 public:
  Ticker(const Progress& progress, std::uint64_t total) : progress_(progress), total_(total) {}
  void add(std::uint64_t bytes) {
    if (!progress_) return;
    const std::lock_guard lock(mutex_);
    progress_(done_ += bytes, total_);
  }

 private:
  const Progress& progress_;
  const std::uint64_t total_;
  std::mutex mutex_;
  std::uint64_t done_ = 0;
};

Error stale(const Digest& found, const Digest& expected) {
  return fail(Code::kStale, "apply delta", "the state has digest {}, the delta applies to {}", found.hex(),
              expected.hex());
}

// `leaves` are those of `state`, which is canonical.
Result<Resolved> resolve(ByteSpan patch, const StateView& state, std::vector<std::vector<Digest>> leaves,
                         const WriteSink& sink, const DecodeOptions& options) {
  ECHO_ASSIGN(ParsedPatch parsed, parse_patch(patch, options));
  const PatchInfo& info = parsed.info;
  if (info.kind != PatchKind::kDelta)
    return fail(Code::kInvalid, "apply delta",
                "this patch is a snapshot; it replaces a state, it does not apply to one");
  ECHO_TRY(check_tensors_match(info, state));
  if (const Digest found = combine_leaves(state, leaves); found != *info.base) return stale(found, *info.base);

  std::mutex mutex;
  std::optional<Error> failed;
  Ticker ticker(options.progress, info.state_bytes);
  std::vector<std::unique_ptr<SegmentDecoder>> decoders(std::clamp(options.threads, 1u, 256u));
  for_each_parallel(parsed.segments.size(), static_cast<unsigned>(decoders.size()), [&](unsigned self, std::size_t i) {
    {
      const std::lock_guard lock(mutex);
      if (failed) return;
    }
    if (!decoders[self]) decoders[self] = std::make_unique<SegmentDecoder>();
    const Segment& segment = parsed.segments[i];
    const auto t = static_cast<std::size_t>(segment.tensor);
    const auto [first, count] = segment_range(state[t].bytes.size(), segment.index);
    Replacement replacement;
    Status status = decoders[self]->decode(segment, state[t].bytes.subspan(first, count), state[t].dtype, replacement,
                                           leaves[t].data() + first / kLeafBytes);
    {
      const std::lock_guard lock(mutex);
      if (status)
        status = sink({t, first, count, dtype_bytes(state[t].dtype), replacement.whole,
                       std::move(replacement.positions), std::move(replacement.values)});
      if (!status && !failed) failed = std::move(status).error();
    }
    ticker.add(count);
  });
  if (failed) return *failed;
  if (const Digest found = combine_leaves(state, leaves); found != info.result)
    return fail(Code::kCorrupt, "apply delta",
                "the result would have digest {}, the patch promised {}; the state was left as it was", found.hex(),
                info.result.hex());
  return Resolved{std::move(parsed.info), std::move(leaves)};
}

Result<std::vector<TensorWrite>> apply(ByteSpan patch, OwnedState& state, const DecodeOptions& options) {
  std::vector<TensorWrite> writes;
  const auto keep = [&](TensorWrite&& write) {
    writes.push_back(std::move(write));
    return ok();
  };
  ECHO_ASSIGN(Resolved resolved,
              resolve(patch, state.view(), StateWriter::leaves(state, options.threads), keep, options));
  for_each_parallel(writes.size(), options.threads, [&](unsigned, std::size_t i) {
    const TensorWrite& w = writes[i];
    w.write_to(StateWriter::memory(state, w.tensor).subspan(w.first_byte, w.byte_count));
  });
  StateWriter::remember(state, std::move(resolved.leaves));
  return writes;
}

Result<OwnedState> decode(ByteSpan patch, const DecodeOptions& options) {
  ECHO_ASSIGN(const ParsedPatch parsed, parse_patch(patch, options));
  const PatchInfo& info = parsed.info;
  if (info.kind != PatchKind::kSnapshot)
    return fail(Code::kInvalid, "decode snapshot",
                "this patch is a delta to the state with digest {}; it needs that "
                "state to apply to",
                info.base->hex());
  StateView like;
  for (const PatchTensor& t : info.tensors) like.push_back({t.name, t.dtype, t.shape, {}});
  ECHO_ASSIGN(OwnedState state, OwnedState::zeros_like(like));
  std::mutex mutex;
  std::optional<Error> failed;
  Ticker ticker(options.progress, info.state_bytes);
  for_each_parallel(parsed.segments.size(), options.threads, [&](unsigned, std::size_t i) {
    const Segment& segment = parsed.segments[i];
    const auto t = static_cast<std::size_t>(segment.tensor);
    const std::span<std::byte> memory = StateWriter::memory(state, t);
    const auto [first, count] = segment_range(memory.size(), segment.index);
    Status status = decode_dense(segment.layers.front().payload, info.tensors[t].dtype, memory.subspan(first, count));
    if (!status) {
      const std::lock_guard lock(mutex);
      if (!failed) failed = std::move(status).error();
    }
    ticker.add(count);
  });
  if (failed) return *failed;
  if (const Digest found = state.digest(options.threads); found != info.result)
    return fail(Code::kCorrupt, "decode snapshot", "the state has digest {}, the patch promised {}", found.hex(),
                info.result.hex());
  return state;
}

}  // namespace

void TensorWrite::write_to(std::span<std::byte> part) const {
  ECHO_CHECK(part.size() == byte_count);
  write_values(whole, positions, values, element_bytes, part);
}

Result<PatchInfo> inspect(std::span<const std::byte> patch, const DecodeOptions& options) {
  return guarded("read patch", [&]() -> Result<PatchInfo> {
    ECHO_ASSIGN(ParsedPatch parsed, parse_patch(patch, options));
    return std::move(parsed.info);
  });
}

Result<PatchInfo> resolve_delta(std::span<const std::byte> patch, const StateView& state, const WriteSink& sink,
                                const DecodeOptions& options) {
  return guarded("apply delta", [&]() -> Result<PatchInfo> {
    ECHO_ASSIGN(const StateView sorted, canonical(state));
    ECHO_ASSIGN(Resolved resolved, resolve(patch, sorted, leaves_of(sorted, options.threads), sink, options));
    return std::move(resolved.info);
  });
}

Status apply_delta(std::span<const std::byte> patch, OwnedState& state, const DecodeOptions& options) {
  ECHO_TRY(apply_delta_and_tell(patch, state, options));
  return ok();
}

Result<std::vector<TensorWrite>> apply_delta_and_tell(std::span<const std::byte> patch, OwnedState& state,
                                                      const DecodeOptions& options) {
  return guarded("apply delta", [&] { return apply(patch, state, options); });
}

Result<OwnedState> decode_snapshot(std::span<const std::byte> patch, const DecodeOptions& options) {
  return guarded("decode snapshot", [&] { return decode(patch, options); });
}

}  // namespace echoline::delta
