// Decodes patches (a model's weights, or their changes since another version). Threads resolve segments (parts of
// tensors) independently, and nothing is written before all of it is verified.
#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>

#include "base/file_memory.hpp"
#include "base/parallel.hpp"
#include "delta/digest.hpp"
#include "delta/known_leaves.hpp"
#include "delta/patch_format.hpp"
#include "delta/state_writer.hpp"

namespace echoline::delta {

namespace {

// The result of resolving a delta, beside its writes.
struct Resolved {
  PatchInfo info;
  LeafDigests leaves;  // digests of the result's leaves (digest.hpp)
};

// Counts processed bytes and reports the sum to the caller, from one thread at a time.
class ProgressCounter {
 public:
  ProgressCounter(const Progress& progress, std::uint64_t total) : progress_(progress), total_(total) {}
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

Error stale_error(const Digest& actual, const Digest& expected) {
  return fail(Code::kStale, "apply delta", "the state has digest {}, the delta applies to {}", actual.hex(),
              expected.hex());
}

// A segment (an independently coded part of a tensor, or a group of small tensors) that owns its payloads.
struct OwnedSegment {
  explicit OwnedSegment(const Segment& from) : segment(from) {
    for (Layer& layer : segment.layers)
      layer.payload = payloads.emplace_back(layer.payload.begin(), layer.payload.end());
  }
  Segment segment;
  std::deque<ByteVector> payloads;  // a deque, because layers point to its elements
};

// Queues work(thread, segment) in `tasks` for each segment. The payloads of `segments` need to live only during this
// call: the queue has copies of them. If there are more segments than the queue holds, waits for all of them instead,
// and copies none.
template <class Work>
Status queue_segments(TaskPool& tasks, const std::vector<Segment>& segments, Work&& work) {
  // The queue holds two segments per thread.
  const bool waits_for_all = tasks.threads() == 1 || segments.size() > 2 * tasks.threads();
  Status status = ok();
  for (const Segment& segment : segments) {
    if (!status) break;
    if (waits_for_all)
      status = tasks.add([&](unsigned thread) { return work(thread, segment); });
    else
      status = tasks.add([work, owned = std::make_shared<const OwnedSegment>(segment)](unsigned thread) {
        return work(thread, owned->segment);
      });
  }
  return waits_for_all ? tasks.finish() : status;
}

// Decodes segments on top of `state` on several threads and passes the writes to `sink`, from one thread at a time.
class Resolver {
 public:
  // `leaves`: the digests of `state`; replaced by those of the result.
  Resolver(unsigned threads, ProgressCounter& progress, const StateView& state, LeafDigests& leaves, WriteSink sink)
      : progress_(progress), state_(state), leaves_(leaves), sink_(std::move(sink)), tasks_(threads) {
    decoders_.resize(tasks_.threads());
  }

  // The payloads need to live only during this call.
  Status add(const std::vector<Segment>& segments) {
    return queue_segments(tasks_, segments,
                          [this](unsigned thread, const Segment& segment) { return resolve(thread, segment); });
  }
  // The payloads must live until finish().
  Status add_views(const std::vector<Segment>& segments) {
    for (const Segment& segment : segments)
      ECHO_TRY(tasks_.add([this, &segment](unsigned thread) { return resolve(thread, segment); }));
    return ok();
  }
  Status finish() { return tasks_.finish(); }

 private:
  Status resolve(unsigned thread, const Segment& segment) {
    if (!decoders_[thread]) decoders_[thread] = std::make_unique<SegmentDecoder>();
    std::vector<TensorWrite> writes;
    std::uint64_t bytes = 0;  // of the segment's content
    ECHO_TRY(segment.tensors > 1 ? decode_group(segment, state_, leaves_, *decoders_[thread], writes, bytes)
                                 : decode(segment, state_, leaves_, *decoders_[thread], writes, bytes));
    {
      const std::lock_guard lock(mutex_);
      for (TensorWrite& write : writes) ECHO_TRY(sink_(std::move(write)));
    }
    progress_.add(bytes);
    return ok();
  }

  // Decodes a segment. Adds its writes and the digests of changed leaves, and sets `bytes` to its size.
  static Status decode(const Segment& segment, const StateView& state, LeafDigests& leaves, SegmentDecoder& decoder,
                       std::vector<TensorWrite>& writes, std::uint64_t& bytes) {
    const auto tensor = static_cast<std::size_t>(segment.tensor);
    const auto [first, count] = segment_range(state[tensor].bytes.size(), segment.index);
    bytes = count;
    auto replacement = std::make_shared<Replacement>();
    ECHO_TRY(decoder.decode(segment, state[tensor].bytes.subspan(first, count), state[tensor].dtype, *replacement,
                            leaves[tensor].data() + first / kLeafBytes));
    writes.push_back({.tensor = tensor,
                      .first_byte = first,
                      .byte_count = count,
                      .element_bytes = dtype_bytes(state[tensor].dtype),
                      .whole = replacement->whole,
                      .positions = replacement->positions,
                      .values = replacement->values,
                      .memory = replacement});
    return ok();
  }

  // Does the same for a group of small tensors. Each changed tensor gets its own write.
  static Status decode_group(const Segment& segment, const StateView& state, LeafDigests& leaves,
                             SegmentDecoder& decoder, std::vector<TensorWrite>& writes, std::uint64_t& bytes) {
    const auto first = static_cast<std::size_t>(segment.tensor);
    const auto tensors = std::span(state).subspan(first, static_cast<std::size_t>(segment.tensors));
    const std::size_t element_bytes = dtype_bytes(tensors.front().dtype);  // all tensors of a group have one type
    bytes = 0;
    for (const TensorView& tensor : tensors) bytes += tensor.bytes.size();
    auto replacement = std::make_shared<Replacement>();
    struct ChangedTensor {
      std::size_t tensor;        // within the group
      std::size_t first, count;  // its changes among those of the group
    };
    std::vector<ChangedTensor> changed_tensors;
    ECHO_TRY(decoder.decode_group(segment, tensors, *replacement, [&](const GroupedTensor& grouped) {
      digest_leaves(grouped.content, leaves[first + grouped.index].data());
      changed_tensors.push_back({.tensor = grouped.index, .first = grouped.first, .count = grouped.count});
    }));
    // Positions are numbered over the group; from here on each tensor's begin at 0.
    std::size_t elements_before = 0, tensor = 0;  // elements_before: of the group, before `tensor`
    for (const ChangedTensor& changed : changed_tensors) {
      for (; tensor < changed.tensor; ++tensor) elements_before += tensors[tensor].bytes.size() / element_bytes;
      std::span<std::uint32_t> positions;
      if (!replacement->whole) positions = std::span(replacement->positions).subspan(changed.first, changed.count);
      for (std::uint32_t& position : positions) position -= static_cast<std::uint32_t>(elements_before);
      const ByteSpan values =
          ByteSpan(replacement->values).subspan(changed.first * element_bytes, changed.count * element_bytes);
      writes.push_back({.tensor = first + changed.tensor,
                        .first_byte = 0,
                        .byte_count = tensors[changed.tensor].bytes.size(),
                        .element_bytes = element_bytes,
                        .whole = replacement->whole,
                        .positions = positions,
                        .values = values,
                        .memory = replacement});
    }
    return ok();
  }

  ProgressCounter& progress_;
  const StateView& state_;
  LeafDigests& leaves_;
  const WriteSink sink_;
  std::mutex mutex_;  // for `sink_`
  std::vector<std::unique_ptr<SegmentDecoder>> decoders_;
  TaskPool tasks_;  // last, so that its threads end before the members they use
};

std::uint64_t bytes_of(const StateView& state) {
  std::uint64_t bytes = 0;
  for (const TensorView& tensor : state) bytes += tensor.bytes.size();
  return bytes;
}

// The writes of a delta until all of it is verified. Those above kWritesInMemoryMax are in a file, if there is a folder
// for it.
class PendingWrites {
 public:
  PendingWrites(std::filesystem::path folder, std::uint64_t state_bytes)
      : folder_(std::move(folder)), state_bytes_(state_bytes) {}

  void add(TensorWrite&& write) {
    const std::uint64_t bytes = write.positions.size_bytes() + write.values.size();
    if (memory_bytes_ + bytes > kWritesInMemoryMax && !folder_.empty() && move_to_file(write)) {
      writes_.push_back(std::move(write));
      return;
    }
    memory_bytes_ += bytes;
    writes_.push_back(std::move(write));
  }
  const std::vector<TensorWrite>& all() const { return writes_; }
  std::vector<TensorWrite> take() { return std::move(writes_); }

 private:
  // False if the file cannot take it, such as on a full disk: then it stays in memory.
  bool move_to_file(TensorWrite& write) {
    constexpr std::uint64_t kAlignment = alignof(std::uint32_t);  // of positions
    if (!file_ && !has_failed_) {
      // Every element may have a position of four bytes and a value, of one byte at least.
      auto file = FileMemory::make(folder_, 5 * state_bytes_ + kAlignment * (state_bytes_ + 1));
      if (file) file_ = *std::move(file);
      has_failed_ = !file_;
    }
    if (has_failed_) return false;
    const std::uint64_t values_bytes = (write.values.size() + kAlignment - 1) / kAlignment * kAlignment;
    const auto room = file_->extend(write.positions.size_bytes() + values_bytes);
    has_failed_ = !room;
    if (has_failed_) return false;
    std::byte* const positions = room->data();
    std::byte* const values = positions + write.positions.size_bytes();
    std::ranges::copy(std::as_bytes(write.positions), positions);
    std::ranges::copy(write.values, values);
    write.positions = {reinterpret_cast<const std::uint32_t*>(positions), write.positions.size()};
    write.values = {values, write.values.size()};
    write.memory = file_;
    return true;
  }

  const std::filesystem::path folder_;
  const std::uint64_t state_bytes_;
  std::vector<TensorWrite> writes_;
  std::uint64_t memory_bytes_ = 0;  // of writes that are not in the file
  std::shared_ptr<FileMemory> file_;
  bool has_failed_ = false;  // the file takes no more
};

Error snapshot_error() {
  return fail(Code::kInvalid, "apply delta", "this patch is a snapshot; it replaces a state, it does not apply to one");
}

Status check_result(const StateView& state, const LeafDigests& leaves, const PatchInfo& info) {
  if (const Digest actual = state_digest_of_leaves(state, leaves); actual != info.result)
    return fail(Code::kCorrupt, "apply delta",
                "the result would have digest {}, the patch promised {}; the state was left as it was", actual.hex(),
                info.result.hex());
  return ok();
}

// Writes the new values, and caches the digests of the result.
void write_to_state(OwnedState& state, const std::vector<TensorWrite>& writes, LeafDigests leaves, unsigned threads) {
  for_each_parallel(writes.size(), threads, [&](unsigned, std::size_t i) {
    const TensorWrite& write = writes[i];
    write.write_to(StateWriter::memory(state, write.tensor).subspan(write.first_byte, write.byte_count));
  });
  StateWriter::cache_leaf_digests(state, std::move(leaves));
}

// `leaves`: the digests of `state`, which is canonical.
Result<Resolved> resolve(ByteSpan patch, const StateView& state, LeafDigests leaves, const WriteSink& sink,
                         const DecodeOptions& options) {
  ECHO_ASSIGN(ParsedPatch parsed, parse_patch(patch, options));
  const PatchInfo& info = parsed.info;
  if (info.kind != PatchKind::kDelta) return snapshot_error();
  ECHO_TRY(check_tensors_match(info, state));
  if (const Digest actual = state_digest_of_leaves(state, leaves); actual != *info.base)
    return stale_error(actual, *info.base);

  ProgressCounter progress(options.progress, info.state_bytes);
  Resolver resolver(options.threads, progress, state, leaves, sink);
  ECHO_TRY(resolver.add_views(parsed.segments));
  ECHO_TRY(resolver.finish());
  ECHO_TRY(check_result(state, leaves, info));
  return Resolved{.info = std::move(parsed.info), .leaves = std::move(leaves)};
}

Status apply(ByteSpan patch, OwnedState& state, const DecodeOptions& options) {
  std::vector<TensorWrite> writes;
  const auto keep_write = [&](TensorWrite&& write) {
    writes.push_back(std::move(write));
    return ok();
  };
  ECHO_ASSIGN(Resolved resolved,
              resolve(patch, state.view(), StateWriter::leaf_digests(state, options.threads), keep_write, options));
  write_to_state(state, writes, std::move(resolved.leaves), options.threads);
  return ok();
}

// Splits the arriving bytes of a patch, cut anywhere, into complete segments.
class SegmentStream {
 public:
  explicit SegmentStream(const DecodeOptions& options) : parser_(options) {}

  // Once the header is complete, calls `resolve` with the segments that these bytes complete. They are views that end
  // with the call.
  template <class Resolve>
  Status add(ByteSpan bytes, Resolve&& resolve) {
    if (failed_ || parser_.has_trailer())
      return fail(Code::kCorrupt, "read patch", "{} bytes come after the {}", bytes.size(),
                  failed_ ? "error" : "trailer");
    added_bytes_ += bytes.size();
    failed_ = true;  // every early return is an error; reset at the end
    const auto parse_and_resolve = [&](ByteSpan from) -> Result<std::size_t> {
      std::vector<Segment> segments;
      ECHO_ASSIGN(const std::size_t parsed_bytes, parser_.parse(from, segments));
      if (parser_.has_header()) ECHO_TRY(resolve(segments));
      return parsed_bytes;
    };
    if (incomplete_frame_.empty()) {
      ECHO_ASSIGN(const std::size_t parsed_bytes, parse_and_resolve(bytes));
      incomplete_frame_.assign(bytes.begin() + static_cast<std::ptrdiff_t>(parsed_bytes), bytes.end());
    } else {
      put_bytes(incomplete_frame_, bytes);
      ECHO_ASSIGN(const std::size_t parsed_bytes, parse_and_resolve(incomplete_frame_));
      incomplete_frame_.erase(incomplete_frame_.begin(),
                              incomplete_frame_.begin() + static_cast<std::ptrdiff_t>(parsed_bytes));
    }
    failed_ = false;
    return ok();
  }

  // kCorrupt unless all bytes were added. Call once.
  Status check_complete() {
    if (failed_) return fail(Code::kCorrupt, "read patch", "it could not be read");
    failed_ = true;
    return parser_.check_complete(added_bytes_);
  }

  std::uint64_t bytes() const { return added_bytes_; }
  const PatchInfo& info() { return parser_.info(); }
  std::optional<Digest> result() {
    if (!parser_.has_trailer()) return std::nullopt;
    return info().result;
  }

 private:
  PatchParser parser_;
  ByteVector incomplete_frame_;  // the bytes after the last complete frame (a checksummed part of a patch)
  std::uint64_t added_bytes_ = 0;
  bool failed_ = false;  // an error occurred, or check_complete() was called; no call is allowed then
};

}  // namespace

void TensorWrite::write_to(std::span<std::byte> part) const {
  ECHO_CHECK(part.size() == byte_count);
  write_values(whole, positions, values, element_bytes, part);
}

Result<PatchInfo> inspect(std::span<const std::byte> patch, const DecodeOptions& options) {
  return catch_out_of_memory("read patch", [&]() -> Result<PatchInfo> {
    ECHO_ASSIGN(ParsedPatch parsed, parse_patch(patch, options));
    return std::move(parsed.info);
  });
}

Result<PatchInfo> resolve_delta(std::span<const std::byte> patch, const StateView& state, const WriteSink& sink,
                                const DecodeOptions& options) {
  return catch_out_of_memory("apply delta", [&]() -> Result<PatchInfo> {
    ECHO_ASSIGN(const StateView sorted, canonical(state));
    ECHO_ASSIGN(Resolved resolved, resolve(patch, sorted, leaf_digests_of(sorted, options.threads), sink, options));
    return std::move(resolved.info);
  });
}

Result<PatchInfo> resolve_delta(std::span<const std::byte> patch, const StateView& state, LeafDigests leaves,
                                const WriteSink& sink, const DecodeOptions& options) {
  return catch_out_of_memory("apply delta", [&]() -> Result<PatchInfo> {
    ECHO_ASSIGN(const StateView sorted, canonical(state));
    ECHO_ASSIGN(Resolved resolved, resolve(patch, sorted, std::move(leaves), sink, options));
    return std::move(resolved.info);
  });
}

Status apply_delta(std::span<const std::byte> patch, OwnedState& state, const DecodeOptions& options) {
  return catch_out_of_memory("apply delta", [&] { return apply(patch, state, options); });
}

struct IncomingDelta::Impl {
  Impl(OwnedState* owned_state, StateView state_view, const DecodeOptions& decode_options)
      : state(owned_state),
        view(std::move(state_view)),
        options(decode_options),
        incoming(decode_options),
        progress(options.progress, bytes_of(view)),
        writes(options.folder, bytes_of(view)),
        resolver(decode_options.threads, progress, view, leaves, [this](TensorWrite&& write) {
          writes.add(std::move(write));
          return ok();
        }) {}

  Status add(ByteSpan bytes) {
    return incoming.add(bytes, [this](const std::vector<Segment>& segments) -> Status {
      if (!std::exchange(has_begun, true)) ECHO_TRY(begin());
      return resolver.add(segments);
    });
  }

  Status begin() {
    if (incoming.info().kind != PatchKind::kDelta) return snapshot_error();
    ECHO_TRY(check_tensors_match(incoming.info(), view));
    leaves = state ? StateWriter::leaf_digests(*state, options.threads) : leaf_digests_of(view, options.threads);
    base = state_digest_of_leaves(view, leaves);
    return ok();
  }

  Result<std::vector<TensorWrite>> apply() {
    ECHO_TRY(resolver.finish());
    ECHO_TRY(incoming.check_complete());
    // A patch states its base at its end.
    if (base != *incoming.info().base) return stale_error(base, *incoming.info().base);
    ECHO_TRY(check_result(view, leaves, incoming.info()));
    if (state) write_to_state(*state, writes.all(), std::move(leaves), options.threads);
    return writes.take();
  }

  OwnedState* const state;  // null: the state is in another object's memory
  const StateView view;
  const DecodeOptions options;
  SegmentStream incoming;
  ProgressCounter progress;
  bool has_begun = false;
  LeafDigests leaves;  // of the state; leaves of decoded segments already have the result's digests
  Digest base;         // of the state before
  PendingWrites writes;
  Resolver resolver;  // last, so that its threads end before the members they use
};

IncomingDelta::IncomingDelta(OwnedState& state, const DecodeOptions& options)
    : impl_(std::make_unique<Impl>(&state, state.view(), options)) {}
IncomingDelta::IncomingDelta(StateView state, const DecodeOptions& options)
    : impl_(std::make_unique<Impl>(/*owned_state=*/nullptr, std::move(state), options)) {}
IncomingDelta::~IncomingDelta() = default;
IncomingDelta::IncomingDelta(IncomingDelta&&) noexcept = default;
IncomingDelta& IncomingDelta::operator=(IncomingDelta&&) noexcept = default;

Status IncomingDelta::add(std::span<const std::byte> bytes) {
  return catch_out_of_memory("read patch", [&] { return impl_->add(bytes); });
}
std::uint64_t IncomingDelta::bytes() const { return impl_->incoming.bytes(); }
std::optional<Digest> IncomingDelta::result() const { return impl_->incoming.result(); }
Result<std::vector<TensorWrite>> IncomingDelta::apply() {
  return catch_out_of_memory("apply delta", [&] { return impl_->apply(); });
}

struct IncomingSnapshot::Impl {
  explicit Impl(const DecodeOptions& decode_options)
      : options(decode_options), incoming(decode_options), tasks(decode_options.threads) {}

  Status add(ByteSpan bytes) {
    return incoming.add(bytes, [this](const std::vector<Segment>& segments) -> Status {
      if (!state) ECHO_TRY(begin());
      return queue_segments(tasks, segments, [this](unsigned, const Segment& segment) { return resolve(segment); });
    });
  }

  Status begin() {
    const PatchInfo& info = incoming.info();
    if (info.kind != PatchKind::kSnapshot)
      return fail(Code::kInvalid, "decode snapshot", "this patch is a delta; it needs the state that it applies to");
    StateView like;
    for (const PatchTensor& tensor : info.tensors)
      like.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .bytes = {}});
    ECHO_ASSIGN(state, options.make_state ? options.make_state(like) : OwnedState::empty_like(like));
    leaves = zeroed_leaf_digests(state->view());
    progress.emplace(options.progress, info.state_bytes);
    return ok();
  }

  Status resolve(const Segment& segment) {
    const auto tensor_index = static_cast<std::size_t>(segment.tensor);
    const std::span<std::byte> tensor = StateWriter::memory(*state, tensor_index);
    const auto [first, count] = segment_range(tensor.size(), segment.index);
    const std::span<std::byte> part = tensor.subspan(first, count);
    ECHO_TRY(decode_dense(segment.layers.front().payload, incoming.info().tensors[tensor_index].dtype, part));
    digest_leaves(part, leaves[tensor_index].data() + first / kLeafBytes);
    progress->add(count);
    return ok();
  }

  Result<OwnedState> finish() {
    ECHO_TRY(tasks.finish());
    ECHO_TRY(incoming.check_complete());
    const PatchInfo& info = incoming.info();
    if (info.changed != info.elements)
      return fail(Code::kCorrupt, "decode snapshot", "it has {} of {} elements", info.changed, info.elements);
    if (const Digest actual = state_digest_of_leaves(state->view(), leaves); actual != info.result)
      return fail(Code::kCorrupt, "decode snapshot", "the state has digest {}, the patch promised {}", actual.hex(),
                  info.result.hex());
    StateWriter::cache_leaf_digests(*state, std::move(leaves));
    return std::move(*state);
  }

  const DecodeOptions options;
  SegmentStream incoming;
  std::optional<OwnedState> state;  // set after the header
  LeafDigests leaves;
  std::optional<ProgressCounter> progress;
  TaskPool tasks;  // last, so that its threads end before the members they use
};

IncomingSnapshot::IncomingSnapshot(const DecodeOptions& options) : impl_(std::make_unique<Impl>(options)) {}
IncomingSnapshot::~IncomingSnapshot() = default;
IncomingSnapshot::IncomingSnapshot(IncomingSnapshot&&) noexcept = default;
IncomingSnapshot& IncomingSnapshot::operator=(IncomingSnapshot&&) noexcept = default;

Status IncomingSnapshot::add(std::span<const std::byte> bytes) {
  return catch_out_of_memory("read patch", [&] { return impl_->add(bytes); });
}
std::uint64_t IncomingSnapshot::bytes() const { return impl_->incoming.bytes(); }
std::optional<Digest> IncomingSnapshot::result() const { return impl_->incoming.result(); }
Result<OwnedState> IncomingSnapshot::finish() {
  return catch_out_of_memory("decode snapshot", [&] { return impl_->finish(); });
}

Result<OwnedState> decode_snapshot(std::span<const std::byte> patch, const DecodeOptions& options) {
  IncomingSnapshot incoming(options);
  ECHO_TRY(incoming.add(patch));
  return incoming.finish();
}

}  // namespace echoline::delta
