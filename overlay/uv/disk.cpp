// The disk's thread: state file and spools. A spool is a publication on disk. Called by the driver and, before the
// driver starts, by WorkerNode.
#include "overlay/uv/disk.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/files.hpp"
#include "base/log.hpp"
#include "base/priority.hpp"
#include "overlay/wire/proof.hpp"

namespace echoline::overlay {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kStateBytesMax = 16 << 20;

std::string hex_of(const PublicationId& id) {
  std::string text;
  for (const std::byte byte : id) text += fmt::format("{:02x}", static_cast<unsigned>(byte));
  return text;
}

// Without `offset`, appends.
Status write_all(int fd, std::span<const std::byte> bytes, std::optional<std::uint64_t> offset) {
  while (!bytes.empty()) {
    const ssize_t bytes_written = offset ? ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(*offset))
                                         : ::write(fd, bytes.data(), bytes.size());
    if (bytes_written < 0 && errno == EINTR) continue;
    if (bytes_written < 0) return fail(Code::kIo, "write spool", "{}", std::strerror(errno));
    bytes = bytes.subspan(static_cast<std::size_t>(bytes_written));
    if (offset) *offset += static_cast<std::uint64_t>(bytes_written);
  }
  return ok();
}

// The bytes at [offset, offset + size); absent if the file lacks some of them.
std::optional<std::vector<std::byte>> read_at(int fd, std::uint64_t offset, std::size_t size) {
  std::vector<std::byte> bytes(size);
  std::size_t bytes_read = 0;
  while (bytes_read < size) {
    const auto read_offset = static_cast<off_t>(offset + bytes_read);
    const ssize_t count = ::pread(fd, bytes.data() + bytes_read, size - bytes_read, read_offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    bytes_read += static_cast<std::size_t>(count);
  }
  return bytes;
}

}  // namespace

Result<std::unique_ptr<Disk>> Disk::open(const fs::path& folder) {
  ECHO_TRY(make_folders(folder / "spool"));
  return std::unique_ptr<Disk>(new Disk(folder));
}

Disk::~Disk() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  for (const auto& [id, files] : open_spools_) {
    ::close(files.log);
    ::close(files.payload);
  }
}

fs::path Disk::path_of(const PublicationId& id, std::string_view ending) const {
  return folder_ / "spool" / (hex_of(id) + std::string(ending));
}

Result<std::string> Disk::read_state() const { return read_file(folder_ / "state", kStateBytesMax); }

// Reads the log of each spool as a stream of frames, and the bytes of chunks from the payload beside it.
void Disk::recover(const std::function<bool(Frame)>& on_frame) {
  std::vector<fs::path> logs, payloads_without_log;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_ / "spool", error)) {
    if (entry.path().extension() == ".log")
      logs.push_back(entry.path());
    else if (!fs::exists(fs::path(entry.path()).replace_extension(".log"), error))
      payloads_without_log.push_back(entry.path());
  }
  for (const fs::path& path : payloads_without_log) fs::remove(path, error);
  std::sort(logs.begin(), logs.end());  // recovery must not depend on the folder's order
  for (const fs::path& path : logs) {
    const Descriptor log_file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    const Descriptor payload(::open(fs::path(path).replace_extension(".payload").c_str(), O_RDWR | O_CLOEXEC));
    if (log_file.get() < 0) continue;
    FrameDecoder decoder;
    // Lifts the limit on frames, which is for peers that are not identified yet.
    decoder.admit();
    std::uint64_t log_offset = 0, readable_end = 0;  // `readable_end`: the end of the last readable frame in the log
    std::uint64_t chunk_bytes = 0, payload_end = 0;  // `payload_end`: the end of the last chunk in the payload
    bool is_needed = false;
    for (bool is_readable = true; is_readable;) {
      const std::span<std::byte> room = decoder.room();
      const ssize_t bytes_read = ::pread(log_file.get(), room.data(), room.size(), static_cast<off_t>(log_offset));
      if (bytes_read <= 0) break;
      log_offset += static_cast<std::uint64_t>(bytes_read);
      if (!decoder.advance(static_cast<std::size_t>(bytes_read))) break;
      // The log holds only heads of chunks: their bytes are in the payload.
      if (const ChunkHead* head = decoder.awaiting_chunk()) {
        const auto bytes =
            payload.get() < 0 ? std::nullopt : read_at(payload.get(), head->index * chunk_bytes, head->length);
        is_readable = bytes && decoder.adopt(Slice(std::vector<std::byte>(*bytes)));
      }
      if (auto frame = decoder.take()) {
        readable_end = log_offset;  // room() never reaches beyond the current frame, so no read does
        if (frame->type == FrameType::kControl) {
          const auto message = decode_control(frame->body.bytes());
          if (message && std::holds_alternative<SignedAnnouncement>(*message))
            chunk_bytes = announced_chunk_bytes(std::get<SignedAnnouncement>(*message));
        }
        if (frame->type == FrameType::kChunk)
          payload_end = std::max(payload_end, frame->chunk.index * chunk_bytes + frame->chunk.length);
        is_needed = on_frame(std::move(*frame)) || is_needed;
      }
    }
    if (!is_needed) {
      fs::remove(path, error);
      fs::remove(fs::path(path).replace_extension(".payload"), error);
    } else if (::ftruncate(log_file.get(), static_cast<off_t>(readable_end)) != 0 ||
               (payload.get() >= 0 && ::ftruncate(payload.get(), static_cast<off_t>(payload_end)) != 0)) {
      log::warn("{}: {}", path.string(), std::strerror(errno));
    }
  }
}

void Disk::start(Events events) {
  events_ = std::move(events);
  thread_ = std::thread([this] { run_jobs(); });
}

void Disk::push(std::function<void()> job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

void Disk::run_jobs() {
  request_short_time_slices();  // because the driver waits for the results of these short jobs
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

void Disk::save(act::SaveState save) {
  push([this, bytes = std::move(save.bytes)] { events_.saved(write_file_atomic(folder_ / "state", bytes)); });
}

void Disk::spool(act::Spool spool) {
  push([this, spool = std::move(spool)] {
    Status written = write(spool);
    // Only writes of chunks are reported. The driver does not wait for other records: if one is lost, the publication
    // is fetched again.
    if (spool.chunk) events_.spooled(spool.publication, *spool.chunk, std::move(written));
  });
}

void Disk::read_chunk(const act::ReadChunk& read_chunk) {
  push([this, read_chunk] { events_.chunk_read(read_chunk.publication, read_chunk.chunk, read(read_chunk)); });
}

void Disk::drop(const act::DropSpool& drop) {
  push([this, id = drop.publication] {
    if (const auto it = open_spools_.find(id); it != open_spools_.end()) {
      ::close(it->second.log);
      ::close(it->second.payload);
      open_spools_.erase(it);
    }
    ::unlink(path_of(id, ".log").c_str());
    ::unlink(path_of(id, ".payload").c_str());
  });
}

Result<Disk::SpoolFiles> Disk::files_of(const PublicationId& id) {
  if (const auto it = open_spools_.find(id); it != open_spools_.end()) return it->second;
  if (open_spools_.size() >= kOpenSpoolsMax) {  // closes any one; its next request opens it again
    ::close(open_spools_.begin()->second.log);
    ::close(open_spools_.begin()->second.payload);
    open_spools_.erase(open_spools_.begin());
  }
  SpoolFiles files;
  files.log = ::open(path_of(id, ".log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (files.log < 0) return os_error("open spool", path_of(id, ".log"));
  files.payload = ::open(path_of(id, ".payload").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (files.payload < 0) {
    Error error = os_error("open spool", path_of(id, ".payload"));
    ::close(files.log);
    return error;
  }
  return open_spools_[id] = files;
}

// Writes the bytes, then the record that announces them. Neither is synced: every chunk is proven again when read back.
Status Disk::write(const act::Spool& spool) {
  ECHO_ASSIGN(const SpoolFiles files, files_of(spool.publication));
  if (spool.chunk) ECHO_TRY(write_all(files.payload, spool.data.bytes(), spool.offset));
  return write_all(files.log, spool.record.bytes(), std::nullopt);
}

Result<Slice> Disk::read(const act::ReadChunk& read_chunk) {
  ECHO_ASSIGN(const SpoolFiles files, files_of(read_chunk.publication));
  auto bytes = read_at(files.payload, read_chunk.offset, read_chunk.length);
  if (!bytes)
    return fail(Code::kIo, "read spool", "{} bytes at {} are not there", read_chunk.length, read_chunk.offset);
  return Slice(std::move(*bytes));
}

Result<std::shared_ptr<const int>> Disk::open_payload(const PublicationId& id) const {
  const fs::path path = path_of(id, ".payload");
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return os_error("open payload", path);
  return std::shared_ptr<const int>(new int(fd), [](const int* shared_fd) {
    ::close(*shared_fd);
    delete shared_fd;
  });
}

}  // namespace echoline::overlay
