#include "delta/cuda/extraction.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace echoline::delta::cuda {
namespace {

constexpr std::uint64_t kSegmentBytes = std::uint64_t{kTilesPerSegment} * kTileBytes;
constexpr std::size_t kBatchPiecesMax = 4096;
// All elements of a tile, of one byte each and with a position of four.
constexpr std::uint64_t kTileRecordsBytesMax = 5 * kTileBytes;

struct Batch {
  std::size_t first_piece, pieces;
  std::size_t tiles;
};

std::uint32_t tiles_of(const Piece& piece) { return (piece.bytes + kTileBytes - 1) / kTileBytes; }

std::vector<Piece> split_into_pieces(const StateView& tensors) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < tensors.size(); ++i)
    for (std::uint64_t at = 0; at < tensors[i].bytes.size(); at += kSegmentBytes)
      pieces.push_back(
          {i, at, static_cast<std::uint32_t>(std::min<std::uint64_t>(kSegmentBytes, tensors[i].bytes.size() - at))});
  return pieces;
}

std::vector<Batch> split_into_batches(const std::vector<Piece>& pieces, std::uint64_t bytes_max) {
  std::vector<Batch> batches;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (batches.empty() || bytes + pieces[i].bytes > bytes_max || batches.back().pieces == kBatchPiecesMax) {
      batches.push_back({i, 0, 0});
      bytes = 0;
    }
    ++batches.back().pieces;
    batches.back().tiles += tiles_of(pieces[i]);
    bytes += pieces[i].bytes;
  }
  return batches;
}

}  // namespace

Status BatchInFlight::reserve(const std::shared_ptr<Machine>& machine, std::size_t pieces_max, std::size_t tiles_max,
                              std::uint64_t records_bytes_max) {
  const std::uint64_t needed = tiles_max * kTileRecordsBytesMax;
  at_.tiles = pieces_max * sizeof(ExtractSegment);
  at_.used = round_up(at_.tiles + tiles_max * sizeof(std::uint32_t), 16);
  at_.results = at_.used + 16;
  at_.records = at_.results + tiles_max * sizeof(TileResult);
  at_.end = at_.records + std::min(needed, std::max(records_bytes_max, kTileRecordsBytesMax));
  return memory_.reserve(machine, at_.end);
}

Status BatchInFlight::start(Machine& machine, const StateView& prev, const StateView& cur,
                            std::span<const Piece> pieces) {
  pieces_ = pieces;
  tiles_.clear();
  auto* segments = reinterpret_cast<ExtractSegment*>(memory_.host.data());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const Piece& piece = pieces[i];
    segments[i] = {prev[piece.tensor].bytes.data() + piece.first_byte,
                   cur[piece.tensor].bytes.data() + piece.first_byte, piece.bytes,
                   static_cast<std::uint32_t>(dtype_bytes(cur[piece.tensor].dtype))};
    for (std::uint32_t t = 0; t < tiles_of(piece); ++t)
      tiles_.push_back(static_cast<std::uint32_t>(i) * kTilesPerSegment + t);
  }
  ECHO_TRY(machine.copy_in(memory_.device.data(), memory_.host.data(), pieces.size() * sizeof(ExtractSegment)));
  return run(machine, tiles_);
}

Result<std::vector<TensorWrite>> BatchInFlight::collect(Machine& machine, const StateView& tensors) {
  ECHO_TRY(machine.wait_for(mark_));
  std::vector<TensorWrite> writes(pieces_.size());
  std::vector<std::uint64_t> changed(pieces_.size());
  std::vector<Run> runs(tiles_.size());
  for (std::size_t t = 0; t < tiles_.size(); ++t) {
    std::uint64_t& of_piece = changed[tiles_[t] / kTilesPerSegment];
    runs[t] = {of_piece, result(t).count};
    of_piece += runs[t].count;
  }
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    writes[i].tensor = pieces_[i].tensor;
    writes[i].first_byte = pieces_[i].first_byte;
    writes[i].byte_count = pieces_[i].bytes;
    writes[i].element_bytes = dtype_bytes(tensors[pieces_[i].tensor].dtype);
    writes[i].positions.resize(changed[i]);
    writes[i].values.resize(changed[i] * writes[i].element_bytes);
  }

  std::vector<std::size_t> pending(tiles_.size());  // the tiles that the device was last run for
  std::iota(pending.begin(), pending.end(), std::size_t{0});
  while (true) {
    ECHO_ASSIGN(std::vector<std::size_t> left, take_records(machine, pending, runs, writes));
    if (left.empty()) break;
    ECHO_CHECK(left.size() < pending.size(), "{} tiles, none found room", left.size());
    pending = std::move(left);
    std::vector<std::uint32_t> tiles;
    tiles.reserve(pending.size());
    for (const std::size_t t : pending) tiles.push_back(tiles_[t]);
    ECHO_TRY(run(machine, tiles));
    ECHO_TRY(machine.wait_for(mark_));
  }
  std::erase_if(writes, [](const TensorWrite& write) { return write.positions.empty(); });
  return writes;
}

Result<std::vector<std::size_t>> BatchInFlight::take_records(Machine& machine, const std::vector<std::size_t>& tiles,
                                                             const std::vector<Run>& runs,
                                                             std::vector<TensorWrite>& writes) {
  const auto write_of = [&](std::size_t tile) -> TensorWrite& { return writes[tiles_[tile] / kTilesPerSegment]; };
  std::uint64_t end = 0;
  std::vector<std::size_t> left;
  for (std::size_t k = 0; k < tiles.size(); ++k) {
    const std::uint64_t count = runs[tiles[k]].count;
    if (result(k).count != count)
      return fail(Code::kInvalid, "extract changes",
                  "the weights changed while they were compared; wait for whoever writes to them before extract()");
    if (count == 0) continue;
    if (result(k).offset == kNoRoom)
      left.push_back(tiles[k]);
    else
      end = std::max(end,
                     result(k).offset + record_bytes(count, static_cast<unsigned>(write_of(tiles[k]).element_bytes)));
  }
  if (end == 0) return left;
  ECHO_TRY(machine.copy_out(memory_.host.data() + at_.records, memory_.device.data() + at_.records, end));
  ECHO_TRY(machine.set_mark(mark_));
  ECHO_TRY(machine.wait_for(mark_));
  for (std::size_t k = 0; k < tiles.size(); ++k) {
    const auto [first, count] = runs[tiles[k]];
    if (count == 0 || result(k).offset == kNoRoom) continue;
    const std::byte* const record = memory_.host.data() + at_.records + result(k).offset;
    TensorWrite& write = write_of(tiles[k]);
    std::memcpy(write.positions.data() + first, record, count * sizeof(std::uint32_t));
    std::memcpy(write.values.data() + first * write.element_bytes, record + positions_bytes(count),
                count * write.element_bytes);
  }
  return left;
}

const TileResult& BatchInFlight::result(std::size_t index) const {
  return reinterpret_cast<const TileResult*>(memory_.host.data() + at_.results)[index];
}

Status BatchInFlight::run(Machine& machine, const std::vector<std::uint32_t>& tiles) {
  std::byte* const host = memory_.host.data();
  std::byte* const device = memory_.device.data();
  std::memcpy(host + at_.tiles, tiles.data(), tiles.size() * sizeof(std::uint32_t));
  ECHO_TRY(machine.copy_in(device + at_.tiles, host + at_.tiles, tiles.size() * sizeof(std::uint32_t)));
  ECHO_TRY(machine.clear(device + at_.used, 16));
  ExtractJob job{};
  job.segments = reinterpret_cast<const ExtractSegment*>(device);
  job.tiles = reinterpret_cast<const std::uint32_t*>(device + at_.tiles);
  job.tile_count = static_cast<std::uint32_t>(tiles.size());
  job.results = reinterpret_cast<TileResult*>(device + at_.results);
  job.records = device + at_.records;
  job.records_capacity = at_.end - at_.records;
  job.records_used = reinterpret_cast<unsigned long long*>(device + at_.used);
  ECHO_TRY(machine.run(job));
  ECHO_TRY(machine.copy_out(host + at_.results, device + at_.results, tiles.size() * sizeof(TileResult)));
  return machine.set_mark(mark_);
}

Result<ExtractStats> Extraction::run(const std::shared_ptr<Machine>& machine, const DeviceOptions& options,
                                     const StateView& prev, const StateView& cur, const WriteSink& sink) {
  const std::vector<Piece> pieces = split_into_pieces(cur);
  const std::vector<Batch> batches = split_into_batches(pieces, options.batch_bytes);
  std::size_t pieces_max = 0, tiles_max = 0;
  for (const Batch& batch : batches) {
    pieces_max = std::max(pieces_max, batch.pieces);
    tiles_max = std::max(tiles_max, batch.tiles);
  }
  ExtractStats stats;
  if (batches.empty()) return stats;
  for (BatchInFlight& batch : batches_) ECHO_TRY(batch.reserve(machine, pieces_max, tiles_max, options.records_bytes));
  for (const TensorView& tensor : cur) stats.elements += tensor.bytes.size() / dtype_bytes(tensor.dtype);
  const auto start = [&](std::size_t b) {
    const std::span<const Piece> all = pieces;
    return batches_[b % 2].start(*machine, prev, cur, all.subspan(batches[b].first_piece, batches[b].pieces));
  };
  for (std::size_t b = 0; b < batches.size(); ++b) {
    if (b == 0) ECHO_TRY(start(0));
    if (b + 1 < batches.size()) ECHO_TRY(start(b + 1));  // the device goes on while the host takes what it found
    ECHO_ASSIGN(std::vector<TensorWrite> writes, batches_[b % 2].collect(*machine, cur));
    for (TensorWrite& write : writes) {
      stats.changed += write.positions.size();
      ECHO_TRY(sink(std::move(write)));
    }
  }
  ECHO_TRY(machine->finish());
  return stats;
}

}  // namespace echoline::delta::cuda
