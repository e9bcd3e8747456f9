// Encodes patches (a model's weights, or their changes since another version). Threads code segments (parts of
// tensors), which are written in order during the pass over the tensors. Also folds several deltas into one.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <thread>

#include "base/parallel.hpp"
#include "delta/digest.hpp"
#include "delta/known_leaves.hpp"
#include "delta/patch_format.hpp"

namespace echoline::delta {
namespace {

// The part of a tensor that a segment codes. A group (small tensors coded as one segment) has one for each tensor.
struct TensorPart {
  std::size_t tensor = 0;
  std::uint64_t index = 0;  // of the segment within the tensor
  SegmentRange range;
};

// All tensors, in order, cut into parts of the size of a segment.
std::vector<TensorPart> tensor_parts(const StateView& state) {
  std::vector<TensorPart> parts;
  for (std::size_t tensor = 0; tensor < state.size(); ++tensor)
    for (std::uint64_t i = 0; i < segment_count(state[tensor].bytes.size()); ++i)
      parts.push_back({.tensor = tensor, .index = i, .range = segment_range(state[tensor].bytes.size(), i)});
  return parts;
}

SegmentPlace place_of(const TensorView& tensor, std::uint64_t first_byte) {
  return {.dtype = tensor.dtype,
          .first_element = first_byte / dtype_bytes(tensor.dtype),
          .row_elements = tensor.shape.empty() ? 0 : static_cast<std::uint64_t>(tensor.shape.back())};
}

// A segment to code, by one thread: one part of a tensor, or the tensors of a group.
struct PlannedSegment {
  std::span<const TensorPart> parts;
  std::uint64_t bytes = 0;
};
std::vector<PlannedSegment> one_segment_per_part(const std::vector<TensorPart>& parts) {
  std::vector<PlannedSegment> planned;
  for (const TensorPart& part : parts) planned.push_back({.parts = {&part, 1}, .bytes = part.range.byte_count});
  return planned;
}
// Groups small adjacent tensors of one type, which are coded together. A mixture of experts has thousands of them, and
// a segment's fixed cost would be most of their time and bytes. Groups depend on the tensors only, so that patches
// between versions of a model can be folded.
std::vector<PlannedSegment> group_small_tensors(const std::vector<TensorPart>& parts, const StateView& state) {
  std::vector<PlannedSegment> planned;
  for (const TensorPart& part : parts) {
    const std::uint64_t bytes = part.range.byte_count;
    const auto is_small = [&](const TensorPart& candidate) {
      return state[candidate.tensor].bytes.size() <= kGroupedBytes;
    };
    if (!planned.empty() && is_small(part)) {
      PlannedSegment& group = planned.back();
      const TensorPart& previous = group.parts.back();
      // An empty tensor has no part, so the tensors of two parts need not be adjacent.
      const bool is_adjacent = previous.tensor + 1 == part.tensor;
      const bool has_same_type = state[previous.tensor].dtype == state[part.tensor].dtype;
      if (is_small(previous) && is_adjacent && has_same_type && group.bytes + bytes <= kSegmentBytes) {
        group.parts = {group.parts.data(), group.parts.size() + 1};  // parts are adjacent in memory too
        group.bytes += bytes;
        continue;
      }
    }
    planned.push_back({.parts = {&part, 1}, .bytes = bytes});
  }
  return planned;
}

// A coded segment. It has one layer (coded changes), or in a fold one for each folded delta. The payloads are in the
// encoder's memory until copy_payloads(). A segment without layers is not written, because nothing changes in it.
struct CodedSegment {
  Segment segment;
  std::deque<ByteVector> payloads;  // a deque, because layers point to its elements
  void copy_payloads() {
    for (Layer& layer : segment.layers)
      layer.payload = payloads.emplace_back(layer.payload.begin(), layer.payload.end());
  }
};

// Passes coded segments to the writer in order of their index. A thread that is too far ahead waits, so that few
// segments are in memory. After an error, nothing more is written.
class OrderedWriter {
 public:
  OrderedWriter(PatchWriter& writer, std::uint64_t total_bytes, const Progress& progress)
      : writer_(writer), total_bytes_(total_bytes), progress_(progress) {}

  // Waits until segment `index` is close to the next one to write. False if another thread has failed.
  bool wait_until_near(std::size_t index, unsigned threads) {
    std::unique_lock lock(mutex_);
    // Two segments per thread: the one in work, and one that waits for its turn.
    wake_.wait(lock, [&] { return error_ || index < next_index_ + 2 * threads; });
    return !error_;
  }
  void add(std::size_t index, std::uint64_t bytes, CodedSegment coded) {
    const std::lock_guard lock(mutex_);
    if (error_) return;
    if (index != next_index_) {
      coded.copy_payloads();  // the encoder's next segment overwrites its payloads
      waiting_.emplace(index, WaitingSegment{std::move(coded), bytes});
      return;
    }
    write(coded.segment, bytes);
    for (auto it = waiting_.begin(); it != waiting_.end() && it->first == next_index_ && !error_;
         it = waiting_.erase(it))
      write(it->second.coded.segment, it->second.bytes);
    wake_.notify_all();
  }
  // Ends the encoding: wakes all waiting threads, and status() returns the first error.
  void stop(Error error) {
    const std::lock_guard lock(mutex_);
    fail_with(std::move(error));
  }
  Status status() const { return error_ ? Status(*error_) : ok(); }

 private:
  struct WaitingSegment {
    CodedSegment coded;
    std::uint64_t bytes = 0;
  };
  // The callers of these two hold the mutex.
  void fail_with(Error error) {
    if (!error_) error_ = std::move(error);
    wake_.notify_all();
  }
  void write(const Segment& segment, std::uint64_t bytes) {
    ++next_index_;
    done_bytes_ += bytes;
    if (!segment.layers.empty())
      if (Status status = writer_.add(segment); !status) return fail_with(std::move(status).error());
    if (progress_) progress_(done_bytes_, total_bytes_);
  }
  PatchWriter& writer_;
  const std::uint64_t total_bytes_;
  const Progress& progress_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<std::size_t, WaitingSegment> waiting_;  // by index
  std::size_t next_index_ = 0;                     // of the next segment to write
  std::uint64_t done_bytes_ = 0;
  std::optional<Error> error_;
};

// Runs work(worker, parts) -> Result<CodedSegment> for every planned segment, on several threads. `make_worker` makes
// each thread's own state.
template <class MakeWorker, class Work>
Status encode_segments(const std::vector<PlannedSegment>& planned, unsigned threads, OrderedWriter& ordered_writer,
                       MakeWorker&& make_worker, Work&& work) {
  threads = std::clamp(threads, 1u, 256u);
  std::vector<decltype(make_worker())> workers(threads);
  for_each_parallel(planned.size(), threads, [&](unsigned thread, std::size_t i) {
    if (!ordered_writer.wait_until_near(i, threads)) return;
    try {
      if (!workers[thread]) workers[thread] = make_worker();
      Result<CodedSegment> coded = work(*workers[thread], planned[i].parts);
      if (coded) {
        ordered_writer.add(i, planned[i].bytes, *std::move(coded));
      } else {
        ordered_writer.stop(std::move(coded).error());
      }
    } catch (...) {  // other threads must not wait for this one
      ordered_writer.stop(fail(Code::kExhausted, "encode patch", "out of memory"));
      throw;
    }
  });
  return ordered_writer.status();
}

void count_state(const StateView& state, PatchStats& stats) {
  for (const TensorView& tensor : state) {
    stats.state_bytes += tensor.bytes.size();
    stats.elements += tensor.bytes.size() / dtype_bytes(tensor.dtype);
  }
}

// The state of each thread of encode_canonical_delta().
struct DeltaWorker {
  explicit DeltaWorker(int table_zstd_level) : encoder(table_zstd_level) {}
  SegmentEncoder encoder;
  EntropyCounter* entropy = nullptr;  // this thread's counter; absent if the caller wants no entropy
};

// The content of a segment with these parts.
Content content_of(std::span<const TensorPart> parts, const StateView& state) {
  const TensorPart& first = parts.front();
  if (parts.size() == 1) return state[first.tensor].bytes.subspan(first.range.first_byte, first.range.byte_count);
  std::vector<ByteSpan> pieces;
  for (const TensorPart& part : parts) pieces.push_back(state[part.tensor].bytes);  // a group has whole tensors
  return Content(std::move(pieces));
}
// Hashes leaves (digest.hpp) after the encoder has read them, because their memory is then in the cache. In a group,
// hashes each tensor once all of it was read.
class LeafDigester {
 public:
  LeafDigester(std::span<const TensorPart> parts, const StateView& state, LeafDigests& leaves)
      : parts_(parts), state_(state), leaves_(leaves) {}
  // `first_byte`: of the leaf within the segment. Called for all leaves in order.
  void on_leaf_read(std::size_t first_byte, std::size_t bytes) {
    const TensorPart& first = parts_.front();
    if (parts_.size() == 1) {
      const std::size_t leaf_begin = first.range.first_byte + first_byte;  // within the tensor
      leaves_[first.tensor][leaf_begin / kLeafBytes] =
          digest_bytes(state_[first.tensor].bytes.subspan(leaf_begin, bytes));
      return;
    }
    for (; next_part_ < parts_.size(); ++next_part_) {
      const TensorPart& part = parts_[next_part_];
      const bool was_read = bytes_before_ + part.range.byte_count <= first_byte + bytes;
      if (!was_read) break;
      bytes_before_ += part.range.byte_count;
      digest_leaves(state_[part.tensor].bytes, leaves_[part.tensor].data());
    }
  }

 private:
  const std::span<const TensorPart> parts_;
  const StateView& state_;
  LeafDigests& leaves_;
  std::size_t next_part_ = 0;     // in a group: the first tensor that is not hashed yet
  std::size_t bytes_before_ = 0;  // of the group's tensors before that one
};

// The place of a segment with these parts. The rows of a group are known only if all tensors have rows of one length.
SegmentPlace place_of(std::span<const TensorPart> parts, const StateView& state) {
  SegmentPlace place = place_of(state[parts.front().tensor], parts.front().range.first_byte);
  for (const TensorPart& part : parts)
    if (place_of(state[part.tensor], /*first_byte=*/0).row_elements != place.row_elements) place.row_elements = 0;
  return place;
}

// A segment with these parts, without layers.
CodedSegment empty_segment(std::span<const TensorPart> parts) {
  CodedSegment coded;
  coded.segment.tensor = parts.front().tensor;
  coded.segment.index = parts.front().index;
  coded.segment.tensors = parts.size();
  return coded;
}

// `prev` and `cur` are canonical: their tensors are sorted by name.
Result<PatchStats> encode_canonical_delta(const StateView& prev, const StateView& cur, const PatchSink& sink,
                                          const EncodeOptions& options, LeafDigests* base_leaves) {
  PatchStats stats;
  count_state(cur, stats);
  PatchWriter writer(sink);
  ECHO_TRY(writer.begin(PatchKind::kDelta, cur, options.table_zstd_level));
  OrderedWriter ordered_writer(writer, stats.state_bytes, options.progress);
  // With a known base digest, the old state is not hashed. (A leaf is a part of 64 KiB of a tensor, with a digest of
  // its own.)
  LeafDigests prev_leaves = options.base ? LeafDigests() : zeroed_leaf_digests(prev);
  LeafDigests cur_leaves = zeroed_leaf_digests(cur);
  const LeafDigests known_leaves = options.leaves ? std::move(*options.leaves) : LeafDigests();
  const bool knows_leaves = options.base && known_leaves.size() == cur.size();
  // A caller that knows a tensor to be unchanged passes the same memory on both sides. Its digests can be taken over if
  // the caller also passed them.
  const auto is_unchanged = [&](const TensorPart& part) {
    const TensorView& tensor = cur[part.tensor];
    return knows_leaves && prev[part.tensor].bytes.data() == tensor.bytes.data() &&
           known_leaves[part.tensor].size() == leaf_count(tensor.bytes.size());
  };
  std::mutex mutex;  // for `counters`
  std::deque<EntropyCounter> counters;
  const std::vector<TensorPart> all_parts = tensor_parts(cur);
  ECHO_TRY(encode_segments(
      group_small_tensors(all_parts, cur), options.threads, ordered_writer,
      [&] {
        auto worker = std::make_unique<DeltaWorker>(options.table_zstd_level);
        const std::lock_guard lock(mutex);
        if (options.count_entropy) worker->entropy = &counters.emplace_back();
        return worker;
      },
      [&](DeltaWorker& worker, std::span<const TensorPart> parts) -> Result<CodedSegment> {
        if (std::all_of(parts.begin(), parts.end(), is_unchanged)) {
          // Takes over the known digests, so that these bytes are not even read.
          for (const TensorPart& part : parts) {
            const auto first_leaf = static_cast<std::ptrdiff_t>(part.range.first_byte / kLeafBytes);
            std::copy_n(known_leaves[part.tensor].begin() + first_leaf, leaf_count(part.range.byte_count),
                        cur_leaves[part.tensor].begin() + first_leaf);
          }
          return empty_segment(parts);
        }
        LeafDigester old_leaves(parts, prev, prev_leaves), new_leaves(parts, cur, cur_leaves);
        const auto leaf_read = [&](std::size_t first_byte, std::size_t bytes) {
          if (!options.base) old_leaves.on_leaf_read(first_byte, bytes);
          new_leaves.on_leaf_read(first_byte, bytes);
        };
        CodedSegment coded = empty_segment(parts);
        if (auto layer = worker.encoder.encode(content_of(parts, prev), content_of(parts, cur), place_of(parts, cur),
                                               leaf_read, worker.entropy))
          coded.segment.layers.push_back(*layer);
        return coded;
      }));
  stats.base = options.base ? *options.base : state_digest_of_leaves(prev, prev_leaves);
  if (base_leaves) *base_leaves = std::move(prev_leaves);
  stats.result = state_digest_of_leaves(cur, cur_leaves);
  if (options.leaves) *options.leaves = std::move(cur_leaves);
  if (options.count_entropy) {
    EntropyCounter total;
    for (EntropyCounter& counter : counters) total.merge(std::move(counter));
    stats.entropy = total.bound();
  }
  ECHO_TRY(writer.finish(stats));
  return stats;
}

Result<PatchStats> encode_canonical_snapshot(const StateView& cur, const PatchSink& sink,
                                             const EncodeOptions& options) {
  PatchStats stats;
  count_state(cur, stats);
  PatchWriter writer(sink);
  ECHO_TRY(writer.begin(PatchKind::kSnapshot, cur, options.table_zstd_level));
  OrderedWriter ordered_writer(writer, stats.state_bytes, options.progress);
  auto leaves = zeroed_leaf_digests(cur);
  const std::vector<TensorPart> all_parts = tensor_parts(cur);
  ECHO_TRY(encode_segments(
      one_segment_per_part(all_parts), options.threads, ordered_writer,
      [&] { return std::make_unique<SegmentEncoder>(options.table_zstd_level); },
      [&](SegmentEncoder& encoder, std::span<const TensorPart> parts) -> Result<CodedSegment> {
        const TensorPart& part = parts.front();  // the only one
        const ByteSpan content = cur[part.tensor].bytes.subspan(part.range.first_byte, part.range.byte_count);
        digest_leaves(content, leaves[part.tensor].data() + part.range.first_byte / kLeafBytes);
        CodedSegment coded = empty_segment(parts);
        coded.segment.layers.push_back(encoder.encode_whole(content, cur[part.tensor].dtype));
        return coded;
      }));
  stats.result = state_digest_of_leaves(cur, leaves);
  if (options.leaves) *options.leaves = std::move(leaves);
  ECHO_TRY(writer.finish(stats));
  return stats;
}

// ---- folding ----

// The tensors of a patch, without content.
StateView layout_of(const PatchInfo& info) {
  StateView layout;
  for (const PatchTensor& tensor : info.tensors)
    layout.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .bytes = {}});
  return layout;
}

// `index`: of `after`, from 0.
Status check_follows(const PatchInfo& before, const PatchInfo& after, std::size_t index) {
  if (after.kind != PatchKind::kDelta)
    return fail(Code::kInvalid, "fold deltas", "patch {} is a snapshot; deltas alone can be folded", index + 1);
  if (index > 0 && after.base != before.result)
    return fail(Code::kInvalid, "fold deltas",
                "patch {} leads to {}, but patch {} begins at {}; give them in the order of their versions", index,
                before.result.hex(), index + 1, after.base->hex());
  return check_tensors_match(after, layout_of(before));
}

Error group_mismatch() {
  return fail(Code::kInvalid, "fold deltas",
              "deltas of format versions 3 and 4 divide small tensors differently; fold those of one version, or make "
              "a delta between the first and the last version");
}

// Joins the layers (one per delta) of all patches for the segment `key` (tensor and index). Leaves out the layers
// before a dense one, which holds all values. next_index[p] is the index of the first unused segment of patch p.
Result<Segment> joined_segment(const std::vector<ParsedPatch>& patches, std::vector<std::size_t>& next_index,
                               std::pair<std::uint64_t, std::uint64_t> key) {
  Segment joined;
  joined.tensor = key.first;
  joined.index = key.second;
  joined.tensors = 0;  // not known until the first patch with this segment
  for (std::size_t patch_index = 0; patch_index < patches.size(); ++patch_index) {
    const std::vector<Segment>& segments = patches[patch_index].segments;
    if (next_index[patch_index] == segments.size()) continue;
    const Segment& segment = segments[next_index[patch_index]];
    if (std::pair(segment.tensor, segment.index) != key) continue;
    // The patches must have the same groups, because a layer covers a whole group.
    if (joined.tensors != 0 && joined.tensors != segment.tensors) return group_mismatch();
    joined.tensors = segment.tensors;
    for (const Layer& layer : segment.layers) {
      if (layer.coding == LayerCoding::kDense) joined.layers.clear();
      joined.layers.push_back(layer);
    }
    ++next_index[patch_index];
  }
  return joined;
}

// Joins all segments of the patches, in ascending order of (tensor, index), like a merge of sorted lists.
Result<std::vector<Segment>> joined_segments(const std::vector<ParsedPatch>& patches) {
  std::vector<Segment> result;
  std::vector<std::size_t> next_index(patches.size());
  for (;;) {
    std::optional<std::pair<std::uint64_t, std::uint64_t>> least_key;
    for (std::size_t patch_index = 0; patch_index < patches.size(); ++patch_index) {
      if (next_index[patch_index] == patches[patch_index].segments.size()) continue;
      const Segment& segment = patches[patch_index].segments[next_index[patch_index]];
      const std::pair key(segment.tensor, segment.index);
      if (!least_key || key < *least_key) least_key = key;
    }
    if (!least_key) return result;
    // A segment of a tensor within the previous group shows that the patches have different groups.
    if (!result.empty() && result.back().tensors > 1 && result.back().tensor + result.back().tensors > least_key->first)
      return group_mismatch();
    ECHO_ASSIGN(Segment joined, joined_segment(patches, next_index, *least_key));
    result.push_back(std::move(joined));
  }
}

// The statistics of a fold, without those that PatchWriter::finish() sets.
PatchStats fold_stats(const std::vector<ParsedPatch>& patches) {
  const PatchInfo& first = patches.front().info;
  PatchStats stats;
  stats.state_bytes = first.state_bytes;
  stats.elements = first.elements;
  stats.base = first.base;
  stats.result = patches.back().info.result;
  return stats;
}

// Folds without weights: the result has the layers of all patches, one on top of the other.
Result<PatchStats> fold_by_joining(const std::vector<ParsedPatch>& patches, const PatchSink& sink,
                                   const EncodeOptions& options) {
  PatchStats stats = fold_stats(patches);
  PatchWriter writer(sink);
  ECHO_TRY(writer.begin(PatchKind::kDelta, layout_of(patches.front().info), options.table_zstd_level));
  ECHO_ASSIGN(const std::vector<Segment> segments, joined_segments(patches));
  for (const Segment& segment : segments) {
    if (segment.layers.size() > kLayersMax)
      return fail(Code::kExhausted, "fold deltas", "more than {} deltas; fold fewer at a time", kLayersMax);
    ECHO_TRY(writer.add(segment));
  }
  ECHO_TRY(writer.finish(stats));
  return stats;
}

// The state of each thread of fold_by_encoding().
struct FoldWorker {
  explicit FoldWorker(int table_zstd_level) : encoder(table_zstd_level) {}
  SegmentDecoder decoder;
  SegmentEncoder encoder;
  Replacement replacement;
  ByteVector content;
  RawVector<std::byte> base_scratch;  // the concatenated tensors of a group
};

// Folds with the weights of the first version: decodes all layers of a segment, and encodes the change from `base`.
Result<PatchStats> fold_by_encoding(const std::vector<ParsedPatch>& patches, const PatchSink& sink,
                                    const StateView& base, const EncodeOptions& options) {
  const PatchInfo& info = patches.front().info;
  ECHO_TRY(check_tensors_match(info, base));
  PatchStats stats = fold_stats(patches);
  auto leaves = leaf_digests_of(base, options.threads);
  if (const Digest actual = state_digest_of_leaves(base, leaves); actual != *info.base)
    return fail(Code::kStale, "fold deltas", "the base has digest {}, the first delta applies to {}", actual.hex(),
                info.base->hex());
  ECHO_ASSIGN(const std::vector<Segment> segments, joined_segments(patches));
  std::vector<TensorPart> all_parts;  // one per segment, and in groups one per tensor
  for (const Segment& segment : segments)
    for (std::uint64_t i = 0; i < segment.tensors; ++i) {
      const auto tensor = static_cast<std::size_t>(segment.tensor + i);
      all_parts.push_back(
          {.tensor = tensor, .index = segment.index, .range = segment_range(base[tensor].bytes.size(), segment.index)});
    }
  std::vector<PlannedSegment> all_planned;
  for (std::size_t first_part = 0; const Segment& segment : segments) {
    PlannedSegment planned{.parts =
                               std::span(all_parts).subspan(first_part, static_cast<std::size_t>(segment.tensors))};
    for (const TensorPart& part : planned.parts) planned.bytes += part.range.byte_count;
    all_planned.push_back(planned);
    first_part += planned.parts.size();
  }
  PatchWriter writer(sink);
  ECHO_TRY(writer.begin(PatchKind::kDelta, base, options.table_zstd_level));
  OrderedWriter ordered_writer(writer, stats.state_bytes, options.progress);
  ECHO_TRY(encode_segments(
      all_planned, options.threads, ordered_writer,
      [&] { return std::make_unique<FoldWorker>(options.table_zstd_level); },
      [&](FoldWorker& worker, std::span<const TensorPart> parts) -> Result<CodedSegment> {
        const TensorPart& first = parts.front();
        // `segments` are sorted by tensor and index, and each is a planned segment.
        const auto segment =
            std::lower_bound(segments.begin(), segments.end(), std::pair(std::uint64_t{first.tensor}, first.index),
                             [](const Segment& candidate, const auto& key) {
                               return std::pair(candidate.tensor, candidate.index) < key;
                             });
        const TensorView& tensor = base[first.tensor];
        const bool is_group = parts.size() > 1;
        const ByteSpan old = content_of(parts, base).all_bytes(worker.base_scratch);
        // The leaves of a group are hashed below, tensor by tensor.
        Digest* new_leaves = is_group ? nullptr : leaves[first.tensor].data() + first.range.first_byte / kLeafBytes;
        ECHO_TRY(worker.decoder.decode(*segment, old, tensor.dtype, worker.replacement, new_leaves));
        worker.content.assign(old.begin(), old.end());
        write_values(worker.replacement.whole, worker.replacement.positions, worker.replacement.values,
                     dtype_bytes(tensor.dtype), worker.content);
        if (is_group) {
          ByteSpan remaining = worker.content;
          for (const TensorPart& part : parts) {
            digest_leaves(remaining.first(part.range.byte_count), leaves[part.tensor].data());
            remaining = remaining.subspan(part.range.byte_count);
          }
        }
        CodedSegment coded = empty_segment(parts);
        if (auto layer = worker.encoder.encode(old, ByteSpan(worker.content), place_of(parts, base), /*leaf_read=*/{},
                                               /*entropy=*/nullptr))
          coded.segment.layers.push_back(*layer);
        return coded;
      }));
  if (const Digest actual = state_digest_of_leaves(base, leaves); actual != stats.result)
    return fail(Code::kCorrupt, "fold deltas", "the deltas lead to digest {}, the last one promised {}", actual.hex(),
                stats.result.hex());
  ECHO_TRY(writer.finish(stats));
  return stats;
}

}  // namespace

Result<PatchStats> write_delta(const StateView& prev, const StateView& cur, const PatchSink& sink,
                               const EncodeOptions& options) {
  return write_delta(prev, cur, sink, options, /*base_leaves=*/nullptr);
}

Result<PatchStats> write_delta(const StateView& prev, const StateView& cur, const PatchSink& sink,
                               const EncodeOptions& options, LeafDigests* base_leaves) {
  return catch_out_of_memory("encode delta", [&]() -> Result<PatchStats> {
    ECHO_ASSIGN(const StateView before, canonical(prev));
    ECHO_ASSIGN(const StateView after, canonical(cur));
    if (const Status same = check_same_tensors(before, after); !same)
      return fail(Code::kInvalid, "encode delta",
                  "{}; a delta needs the same tensors on both sides, publish a snapshot instead", same.error().detail);
    return encode_canonical_delta(before, after, sink, options, base_leaves);
  });
}

Result<PatchStats> write_snapshot(const StateView& cur, const PatchSink& sink, const EncodeOptions& options) {
  return catch_out_of_memory("encode snapshot", [&]() -> Result<PatchStats> {
    ECHO_ASSIGN(const StateView sorted, canonical(cur));
    return encode_canonical_snapshot(sorted, sink, options);
  });
}

Result<PatchStats> fold_deltas(std::span<const std::span<const std::byte>> patches, const PatchSink& sink,
                               const StateView* base, const EncodeOptions& options) {
  return catch_out_of_memory("fold deltas", [&]() -> Result<PatchStats> {
    if (patches.empty()) return fail(Code::kInvalid, "fold deltas", "expected at least one delta");
    std::vector<ParsedPatch> parsed;
    for (std::size_t i = 0; i < patches.size(); ++i) {
      auto patch = parse_patch(patches[i], /*options=*/{});
      if (!patch) return fail(patch.error().code, "fold deltas", "patch {}: {}", i + 1, patch.error().detail);
      // The first patch has none before it and is compared with itself.
      ECHO_TRY(check_follows(parsed.empty() ? patch->info : parsed.back().info, patch->info, i));
      parsed.push_back(*std::move(patch));
    }
    if (!base) return fold_by_joining(parsed, sink, options);
    ECHO_ASSIGN(const StateView sorted, canonical(*base));
    return fold_by_encoding(parsed, sink, sorted, options);
  });
}

}  // namespace echoline::delta
