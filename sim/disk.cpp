// A simulated disk. The world submits and completes its operations; the fleet reads it when a process starts.
#include "sim/disk.hpp"

#include <algorithm>
#include <cstring>

#include "overlay/wire/bytes.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

// Header of a log record: its length, the length of its data, and the data's offset in the payload.
constexpr std::size_t kRecordHeaderBytes = 16;

std::byte* bytes_of(std::string& text) { return reinterpret_cast<std::byte*>(text.data()); }
const std::byte* bytes_of(const std::string& text) { return reinterpret_cast<const std::byte*>(text.data()); }

// Decodes a frame from its record and, for a chunk, its data. Absent if they are invalid.
std::optional<Frame> frame_of(std::span<const std::byte> record, const Slice& data) {
  FrameDecoder decoder;
  decoder.admit();  // otherwise it takes only small control messages, as of an unknown peer
  while (!record.empty()) {
    const auto room = decoder.room();
    const std::size_t copied_bytes = std::min(room.size(), record.size());
    if (copied_bytes == 0) return std::nullopt;
    std::memcpy(room.data(), record.data(), copied_bytes);
    if (!decoder.advance(copied_bytes)) return std::nullopt;
    record = record.subspan(copied_bytes);
  }
  if (!data.empty() && !decoder.adopt(data)) return std::nullopt;
  return decoder.take();
}

}  // namespace

TimePoint Disk::submit(Action&& action, TimePoint now) {
  Duration delay{};
  if (std::holds_alternative<act::SaveState>(action))
    delay = options_.save_delay;
  else if (std::holds_alternative<act::ReadChunk>(action))
    delay = options_.read_delay;
  else
    delay = options_.write_delay;
  // At random, one to two times the configured delay.
  if (delay > Duration{}) delay += Duration(random_.below(static_cast<std::uint64_t>(delay.count())));
  free_at_ = std::max(free_at_, now) + delay;  // operations are completed one after another, in order
  queue_.push(std::move(action));
  return free_at_;
}

Disk::Answer Disk::complete(TimePoint now) {
  Action action = queue_.pop();
  return perform(action, now);
}

Disk::Answer Disk::perform(Action& action, TimePoint now) {
  if (auto* save = std::get_if<act::SaveState>(&action)) {
    if (random_.uniform() < options_.write_error_share)
      return Saved{fail(Code::kIo, "save state", "input/output error")};
    state_ = std::move(save->bytes);
    return Saved{ok()};
  }
  if (auto* spool = std::get_if<act::Spool>(&action)) {
    Status status = write(*spool, now);
    has_write_failed_ = has_write_failed_ || !status;
    if (!spool->chunk) return std::monostate{};  // a record without a chunk: the core expects no answer
    return Spooled{spool->publication, *spool->chunk, std::move(status)};
  }
  if (const auto* read_chunk = std::get_if<act::ReadChunk>(&action))
    return ChunkRead{read_chunk->publication, read_chunk->chunk, read(*read_chunk)};
  if (const auto found = spools_.find(std::get<act::DropSpool>(action).publication); found != spools_.end()) {
    for (const auto& [offset, piece] : found->second.payload) bytes_ -= piece.data.size();
    spools_.erase(found);
  }
  return std::monostate{};
}

Status Disk::write(act::Spool& spool, TimePoint now) {
  constexpr std::string_view kWriteSpool = "write spool";
  if (random_.uniform() < options_.write_error_share) return fail(Code::kIo, kWriteSpool, "input/output error");
  Spool& file = spools_[spool.publication];
  if (spool.chunk) {
    const auto stored = file.payload.find(spool.offset);
    // The same buffer means that the core spools data that it has read from this file, so there is nothing to write.
    if (stored != file.payload.end() && stored->second.data.data() == spool.data.data()) return ok();
    if (options_.capacity_bytes && bytes_ + spool.data.size() > *options_.capacity_bytes)
      return fail(Code::kIo, kWriteSpool, "no space left on device");
    if (stored != file.payload.end()) bytes_ -= stored->second.data.size();
    bytes_ += spool.data.size();
    file.payload[spool.offset] = {spool.data, now};
  }
  const std::size_t begin = file.log.size();
  file.log.resize(begin + kRecordHeaderBytes + spool.record.size());
  std::byte* record = bytes_of(file.log) + begin;
  put_le<std::uint32_t>(record, static_cast<std::uint32_t>(spool.record.size()));
  put_le<std::uint32_t>(record + 4, static_cast<std::uint32_t>(spool.data.size()));
  put_le<std::uint64_t>(record + 8, spool.offset);
  std::memcpy(record + kRecordHeaderBytes, spool.record.data(), spool.record.size());
  file.log_writes.emplace_back(file.log.size(), now);
  return ok();
}

Result<Slice> Disk::read(const act::ReadChunk& read_chunk) {
  constexpr std::string_view kReadSpool = "read spool";
  if (random_.uniform() < options_.read_error_share) return fail(Code::kIo, kReadSpool, "input/output error");
  const auto file = spools_.find(read_chunk.publication);
  if (file == spools_.end()) return fail(Code::kNotFound, kReadSpool, "there is no such spool");
  const auto piece = file->second.payload.find(read_chunk.offset);
  if (piece == file->second.payload.end() || piece->second.data.size() < read_chunk.length)
    return fail(Code::kIo, kReadSpool, "expected {} bytes at {}, found fewer", read_chunk.length, read_chunk.offset);
  return piece->second.data.part(0, read_chunk.length);
}

void Disk::complete_all(TimePoint now) {
  while (!queue_.empty()) complete(now);
  free_at_ = now;
  has_write_failed_ = false;
}

void Disk::on_crash(TimePoint now) {
  // The operating system completes the first operations, a random number of them.
  const std::uint64_t completed = queue_.empty() ? 0 : random_.below(queue_.size() + 1);
  for (std::uint64_t i = 0; i < completed; ++i) complete(now);
  queue_.clear();
  free_at_ = now;
  has_write_failed_ = false;
}

void Disk::on_power_loss(TimePoint now) {
  on_crash(now);
  for (auto& [id, spool] : spools_) {
    lose_unsynced_data(spool, now);
    // Payload whose record is lost or torn stays on the disk, but read_spool() no longer returns it.
    std::uint64_t readable_bytes = 0, present_bytes = 0;
    for (const Frame& frame : read_spool(id))
      if (frame.type == FrameType::kChunk) readable_bytes += frame.body.size();
    for (const auto& [offset, piece] : spool.payload) present_bytes += piece.data.size();
    unrecorded_bytes_ += present_bytes - std::min(present_bytes, readable_bytes);
  }
  std::erase_if(spools_, [](const auto& spool) { return spool.second.log.empty() && spool.second.payload.empty(); });
}

void Disk::lose_unsynced_data(Spool& spool, TimePoint now) {
  const auto is_synced = [&](TimePoint written) { return written + options_.sync_delay <= now; };
  while (!spool.log_writes.empty() && !is_synced(spool.log_writes.back().second)) spool.log_writes.pop_back();
  const std::size_t synced_bytes = spool.log_writes.empty() ? 0 : spool.log_writes.back().first;
  if (synced_bytes < spool.log.size()) {
    const std::size_t bytes_kept = synced_bytes + random_.below(spool.log.size() - synced_bytes + 1);
    const std::size_t lost_bytes = spool.log.size() - bytes_kept;
    spool.log.resize(bytes_kept);
    // In a third of the cases, the file system has allocated the lost blocks without writing them: they hold old data.
    if (random_.below(3) == 0) spool.log += random_text(lost_bytes);
    spool.log_writes.emplace_back(spool.log.size(), now);  // the rest of the log counts as one write
  }
  for (auto it = spool.payload.begin(); it != spool.payload.end();) {
    Slice& data = it->second.data;
    // A quarter of the unsynced pieces is lost, a quarter is torn, and half is undamaged.
    constexpr std::uint64_t kUndamaged = 0, kLost = 1, kTorn = 2, kFates = 4;
    const std::uint64_t fate = is_synced(it->second.written) ? kUndamaged : random_.below(kFates);
    if (fate == kLost) {
      bytes_ -= data.size();
      it = spool.payload.erase(it);
      continue;
    }
    if (fate == kTorn) {  // only a part was written: zeros from a random byte on
      std::vector<std::byte> torn(data.bytes().begin(), data.bytes().end());
      const std::size_t torn_from = random_.below(torn.size());
      std::fill(torn.begin() + static_cast<std::ptrdiff_t>(torn_from), torn.end(), std::byte{0});
      data = Slice(std::move(torn));
    }
    ++it;
  }
}

std::string Disk::random_text(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (char& c : text) c = static_cast<char>(random_.next());
  return text;
}

void Disk::wipe() {
  queue_.clear();
  state_.reset();
  spools_.clear();
  bytes_ = unrecorded_bytes_ = 0;
}

std::size_t Disk::corrupt_pieces(std::size_t pieces) {
  std::vector<Piece*> candidates;
  for (auto& [id, spool] : spools_)
    for (auto& [offset, piece] : spool.payload)
      if (!piece.data.empty()) candidates.push_back(&piece);
  std::size_t flipped_bits = 0;
  for (; flipped_bits < pieces && !candidates.empty(); ++flipped_bits) {
    Slice& data = candidates[random_.below(candidates.size())]->data;
    std::vector<std::byte> flipped(data.bytes().begin(), data.bytes().end());
    flipped[random_.below(flipped.size())] ^= std::byte{1} << static_cast<int>(random_.below(8));
    data = Slice(std::move(flipped));
    is_corrupted_ = true;
  }
  return flipped_bits;
}

std::vector<Frame> Disk::read_spool(const PublicationId& id) const {
  std::vector<Frame> frames;
  const auto found = spools_.find(id);
  if (found == spools_.end()) return frames;
  const Spool& file = found->second;
  for (std::size_t position = 0; position + kRecordHeaderBytes <= file.log.size();) {
    const std::byte* header = bytes_of(file.log) + position;
    const auto record_bytes = get_le<std::uint32_t>(header);
    const auto data_bytes = get_le<std::uint32_t>(header + 4);
    const auto offset = get_le<std::uint64_t>(header + 8);
    position += kRecordHeaderBytes;
    // A torn record: the position of the next one is unknown.
    if (record_bytes == 0 || record_bytes > file.log.size() - position || data_bytes > kChunkBytesMax) break;
    const auto piece = file.payload.find(offset);
    const bool has_data = piece != file.payload.end() && piece->second.data.size() == data_bytes;
    if (data_bytes == 0 || has_data)
      if (auto frame = frame_of({header + kRecordHeaderBytes, record_bytes}, data_bytes ? piece->second.data : Slice()))
        frames.push_back(std::move(*frame));
    position += record_bytes;
  }
  return frames;
}

void Disk::trim_spool(const PublicationId& id, std::optional<std::uint64_t> payload_end) {
  auto& payload = spools_.at(id).payload;
  const auto first_removed = payload.lower_bound(payload_end.value_or(0));
  for (auto it = first_removed; it != payload.end(); ++it) bytes_ -= it->second.data.size();
  payload.erase(first_removed, payload.end());
  if (!payload_end) spools_.erase(id);
}

std::vector<PublicationId> Disk::spools() const {
  std::vector<PublicationId> ids;
  for (const auto& [id, spool] : spools_) ids.push_back(id);
  return ids;
}

std::vector<Slice> Disk::pieces(const PublicationId& id) const {
  std::vector<Slice> data;
  if (const auto found = spools_.find(id); found != spools_.end())
    for (const auto& [offset, piece] : found->second.payload) data.push_back(piece.data);
  return data;
}

Result<Payload> Disk::open(const PublicationId& id, std::uint64_t bytes) const {
  const auto found = spools_.find(id);
  std::uint64_t contiguous_bytes = 0;
  if (found != spools_.end())
    for (const auto& [offset, piece] : found->second.payload) {
      if (offset != contiguous_bytes) break;
      contiguous_bytes += piece.data.size();
    }
  if (contiguous_bytes != bytes)
    return fail(Code::kNotFound, "open spool", "expected {} bytes without a gap, found {}", bytes, contiguous_bytes);
  return Payload(pieces(id));
}

}  // namespace echoline::sim
