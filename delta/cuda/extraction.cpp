// Finds changed elements batch by batch; Device::extract() calls it.
#include "delta/cuda/extraction.hpp"

#include <algorithm>
#include <cstring>

namespace echoline::delta::cuda {
namespace {

constexpr std::uint64_t kSegmentBytes = std::uint64_t{kTilesPerSegment} * kTileBytes;
constexpr std::size_t kBatchSegmentsMax = 4096;  // bounds the size of tables if tensors are small

// Size of ExtractJob::records_used in the tables: 8 bytes, and 8 that align the results.
constexpr std::uint64_t kUsedBytes = 16;

// If all elements of a tile change: in the worst case, elements of one byte, each with a position of four bytes.
constexpr std::uint64_t kTileChangesBytesMax = 5 * kTileBytes;

std::uint32_t tiles_of(const TensorSegment& segment) { return (segment.bytes + kTileBytes - 1) / kTileBytes; }

std::vector<TensorSegment> split_into_segments(const StateView& tensors) {
  std::vector<TensorSegment> segments;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (std::uint64_t first_byte = 0; first_byte < tensors[i].bytes.size(); first_byte += kSegmentBytes) {
      const auto bytes = std::min<std::uint64_t>(kSegmentBytes, tensors[i].bytes.size() - first_byte);
      segments.push_back({.tensor = i, .first_byte = first_byte, .bytes = static_cast<std::uint32_t>(bytes)});
    }
  return segments;
}

// The first segments, at least one, with at most `bytes_max` together.
std::span<const TensorSegment> next_batch(std::span<const TensorSegment> segments, std::uint64_t bytes_max) {
  std::uint64_t bytes = segments.front().bytes;
  std::size_t count = 1;
  for (; count < std::min(segments.size(), kBatchSegmentsMax); ++count)
    if ((bytes += segments[count].bytes) > bytes_max) break;
  return segments.first(count);
}

}  // namespace

Status BatchInFlight::reserve(const std::shared_ptr<DeviceBackend>& backend, std::size_t segments_max,
                              std::size_t tiles_max, std::uint64_t changes_bytes) {
  tiles_offset_ = segments_max * sizeof(ExtractSegment);
  used_offset_ = round_up(tiles_offset_ + tiles_max * sizeof(std::uint32_t), kUsedBytes);
  results_offset_ = used_offset_ + kUsedBytes;
  places_offset_ = results_offset_ + tiles_max * sizeof(TileResult);
  changes_bytes_ = changes_bytes;
  ECHO_TRY(tables_.reserve(backend, places_offset_ + tiles_max * sizeof(GatherPlace)));
  return changes_.reserve(backend, changes_bytes);
}

Status BatchInFlight::compare(DeviceBackend& backend, const StateView& prev, const StateView& cur,
                              std::span<const TensorSegment> segments, std::span<std::byte> records) {
  segments_ = segments;
  records_ = records;
  tiles_.clear();
  std::byte *const host = tables_.host.data(), *const device = tables_.device.data();
  auto* device_segments = reinterpret_cast<ExtractSegment*>(host);  // copied to the device below
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const TensorSegment& segment = segments[i];
    device_segments[i] = {.prev = prev[segment.tensor].bytes.data() + segment.first_byte,
                          .cur = cur[segment.tensor].bytes.data() + segment.first_byte,
                          .bytes = segment.bytes,
                          .element_bytes = static_cast<std::uint32_t>(dtype_bytes(cur[segment.tensor].dtype))};
    for (std::uint32_t tile = 0; tile < tiles_of(segment); ++tile)
      tiles_.push_back(static_cast<std::uint32_t>(i) * kTilesPerSegment + tile);
  }
  const std::uint64_t tiles_bytes = tiles_.size() * sizeof(std::uint32_t);
  std::memcpy(host + tiles_offset_, tiles_.data(), tiles_bytes);
  ECHO_TRY(backend.copy_in(device, host, tiles_offset_ + tiles_bytes));
  ECHO_TRY(backend.clear(device + used_offset_, kUsedBytes));
  ExtractJob job{};
  job.segments = reinterpret_cast<const ExtractSegment*>(device);
  job.tiles = reinterpret_cast<const std::uint32_t*>(device + tiles_offset_);
  job.tile_count = static_cast<std::uint32_t>(tiles_.size());
  job.results = reinterpret_cast<TileResult*>(device + results_offset_);
  job.records = records.data();
  job.records_capacity = records.size();
  job.records_used = reinterpret_cast<unsigned long long*>(device + used_offset_);
  ECHO_TRY(backend.run(job));
  ECHO_TRY(backend.copy_out(host + results_offset_, device + results_offset_, tiles_.size() * sizeof(TileResult)));
  return backend.set_mark(mark_);
}

Result<std::size_t> BatchInFlight::gather(DeviceBackend& backend, const StateView& tensors) {
  ECHO_TRY(backend.wait_for(mark_));
  std::byte *const host = tables_.host.data(), *const device = tables_.device.data();
  const auto* results = reinterpret_cast<const TileResult*>(host + results_offset_);
  auto* places = reinterpret_cast<GatherPlace*>(host + places_offset_);
  parts_.clear();
  std::uint64_t changes_end = 0;  // of the places given so far
  std::size_t gathered_segments = 0, gathered_tiles = 0;
  for (; gathered_segments < segments_.size(); ++gathered_segments) {
    const TensorSegment& segment = segments_[gathered_segments];
    const std::uint64_t element_bytes = dtype_bytes(tensors[segment.tensor].dtype);
    const std::span segment_results(results + gathered_tiles, tiles_of(segment));
    std::uint64_t count = 0;  // changes of the segment
    for (const TileResult& result : segment_results) count += result.count;
    const std::uint64_t values_offset = changes_end + positions_bytes(count);
    const std::uint64_t bytes = record_bytes(count, static_cast<unsigned>(element_bytes));
    const auto lacked_room = [](const TileResult& result) { return result.count != 0 && result.offset == kNoRoom; };
    if (changes_end + bytes > changes_bytes_ || std::ranges::any_of(segment_results, lacked_room)) break;
    std::uint64_t changes_before = 0;
    for (const TileResult& result : segment_results) {
      places[gathered_tiles++] = {.positions = changes_end + changes_before * sizeof(std::uint32_t),
                                  .values = values_offset + changes_before * element_bytes};
      changes_before += result.count;
    }
    if (count == 0) continue;
    const std::byte* const changes = changes_.host.data();
    parts_.push_back({.tensor = segment.tensor,
                      .first_byte = segment.first_byte,
                      .byte_count = segment.bytes,
                      .element_bytes = element_bytes,
                      .positions = {reinterpret_cast<const std::uint32_t*>(changes + changes_end), count},
                      .values = {changes + values_offset, count * element_bytes}});
    changes_end += bytes;
  }
  if (changes_end == 0) return gathered_segments;
  ECHO_TRY(backend.copy_in(device + places_offset_, host + places_offset_, gathered_tiles * sizeof(GatherPlace)));
  GatherJob job{};
  job.segments = reinterpret_cast<const ExtractSegment*>(device);
  job.tiles = reinterpret_cast<const std::uint32_t*>(device + tiles_offset_);
  job.results = reinterpret_cast<const TileResult*>(device + results_offset_);
  job.records = records_.data();
  job.places = reinterpret_cast<const GatherPlace*>(device + places_offset_);
  job.tile_count = static_cast<std::uint32_t>(gathered_tiles);
  job.out = changes_.device.data();
  ECHO_TRY(backend.run(job));
  ECHO_TRY(backend.copy_out(changes_.host.data(), changes_.device.data(), changes_end));
  ECHO_TRY(backend.set_mark(mark_));
  return gathered_segments;
}

Result<std::span<const ChangedPart>> BatchInFlight::collect(DeviceBackend& backend) {
  if (!parts_.empty()) ECHO_TRY(backend.wait_for(mark_));
  return std::span<const ChangedPart>(parts_);
}

Result<ExtractStats> Extraction::run(const std::shared_ptr<DeviceBackend>& backend, const DeviceOptions& options,
                                     const StateView& prev, const StateView& cur, const ChangeSink& sink) {
  const std::vector<TensorSegment> segments = split_into_segments(cur);
  ExtractStats stats;
  for (const TensorView& tensor : cur) stats.elements += tensor.bytes.size() / dtype_bytes(tensor.dtype);
  if (segments.empty()) return stats;
  std::size_t all_tiles = 0, segment_tiles_max = 0;
  for (const TensorSegment& segment : segments) {
    all_tiles += tiles_of(segment);
    segment_tiles_max = std::max<std::size_t>(segment_tiles_max, tiles_of(segment));
  }
  const std::size_t segments_max = std::min(segments.size(), kBatchSegmentsMax);
  // A batch has the tiles that its bytes fill, a shorter last tile for each segment, or one segment above its bytes.
  const std::size_t batch_tiles_max = options.batch_bytes / kTileBytes + segments_max + kTilesPerSegment;
  const std::size_t tiles_max = std::min(all_tiles, batch_tiles_max);
  // As configured, but enough for the largest segment, and no more than all tiles of a batch can need.
  const std::uint64_t changes_bytes_min = segment_tiles_max * kTileChangesBytesMax;
  const std::uint64_t changes_bytes =
      std::min(std::max(options.changes_bytes, changes_bytes_min), tiles_max * kTileChangesBytesMax);
  for (BatchInFlight& batch : batches_) ECHO_TRY(batch.reserve(backend, segments_max, tiles_max, changes_bytes));
  ECHO_TRY(records_.reserve(backend, changes_bytes));

  std::uint64_t batch_bytes = options.batch_bytes;
  std::span<const TensorSegment> remaining = segments;
  std::span<const TensorSegment> compared;  // the batch compared last
  // Both batches use the same records: the device moves those of one batch before it compares the next one.
  const auto compare_next = [&](std::size_t batch_index) {
    compared = next_batch(remaining, batch_bytes);
    return batches_[batch_index % 2].compare(*backend, prev, cur, compared, {records_.data(), changes_bytes});
  };
  ECHO_TRY(compare_next(0));
  for (std::size_t batch_index = 0; !remaining.empty(); ++batch_index) {
    ECHO_ASSIGN(const std::size_t gathered_segments, batches_[batch_index % 2].gather(*backend, cur));
    if (gathered_segments < compared.size()) {  // the next batches are half as large
      ECHO_CHECK(compared.size() > 1, "no room for one segment");
      batch_bytes = 0;
      for (const TensorSegment& segment : compared.first(compared.size() / 2)) batch_bytes += segment.bytes;
    }
    remaining = remaining.subspan(gathered_segments);
    // Compares the next batch while the changes are copied and the sink processes them.
    if (!remaining.empty()) ECHO_TRY(compare_next(batch_index + 1));
    ECHO_ASSIGN(const std::span<const ChangedPart> parts, batches_[batch_index % 2].collect(*backend));
    for (const ChangedPart& part : parts) stats.changed += part.positions.size();
    if (!parts.empty()) ECHO_TRY(sink(parts));
  }
  ECHO_TRY(backend->finish());
  return stats;
}

}  // namespace echoline::delta::cuda
