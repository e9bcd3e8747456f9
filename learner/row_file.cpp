// Reads JSON Lines files, for reports, resumed runs and pages of the trainer API.
#include "learner/row_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace echoline::learner {
namespace {

constexpr std::string_view kOperation = "read run";

// Reads `size` bytes at `offset`; fewer only at the file's end.
Result<std::size_t> read_at(int fd, const std::filesystem::path& path, char* target, std::size_t size,
                            std::uint64_t offset) {
  std::size_t bytes_read = 0;
  while (bytes_read < size) {
    const ssize_t count = ::pread(fd, target + bytes_read, size - bytes_read, static_cast<off_t>(offset + bytes_read));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return os_error(kOperation, path);
    if (count == 0) break;
    bytes_read += static_cast<std::size_t>(count);
  }
  return bytes_read;
}

Result<std::uint64_t> size_of(int fd, const std::filesystem::path& path) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return os_error(kOperation, path);
  if (S_ISDIR(info.st_mode)) return fail(Code::kIo, kOperation, "{}: is a folder, expected a file", path.string());
  return static_cast<std::uint64_t>(info.st_size);
}

// The offset behind newline number `newline_count`, counted from the file's end; 0 if there are fewer.
Result<std::uint64_t> offset_after_newline_from_end(int fd, const std::filesystem::path& path, std::uint64_t size,
                                                    std::uint64_t newline_count) {
  std::string block(kRowBlockBytes, '\0');
  std::uint64_t newlines = 0;
  for (std::uint64_t block_offset = size; block_offset > 0;) {
    const std::size_t block_bytes = static_cast<std::size_t>(std::min<std::uint64_t>(block_offset, block.size()));
    block_offset -= block_bytes;
    ECHO_ASSIGN(const std::size_t bytes_read, read_at(fd, path, block.data(), block_bytes, block_offset));
    for (std::size_t unsearched_bytes = bytes_read; unsearched_bytes > 0;) {
      const void* newline = ::memrchr(block.data(), '\n', unsearched_bytes);
      if (newline == nullptr) break;
      unsearched_bytes = static_cast<std::size_t>(static_cast<const char*>(newline) - block.data());
      if (++newlines == newline_count) return block_offset + unsearched_bytes + 1;
    }
  }
  return std::uint64_t{0};
}

}  // namespace

RowFile::RowFile(std::filesystem::path path, int fd, RowPlace from)
    : path_(std::move(path)), fd_(std::make_unique<Descriptor>(fd)), place_(from), row_begin_(from.offset) {}

Result<RowFile> RowFile::open(const std::filesystem::path& path, RowPlace from) {
  RowFile file(path, ::open(path.c_str(), O_RDONLY | O_CLOEXEC), from);
  if (file.fd_->get() < 0) return os_error(kOperation, path);
  ECHO_TRY(size_of(file.fd_->get(), path));
  return file;
}

Error RowFile::corrupt(std::string_view found) const {
  const std::string where =  // next() has counted the row already, so place_.row is its number from 1
      place_.row ? fmt::format(":{}", *place_.row) : fmt::format(", in the row at byte {}", row_begin_);
  return fail(Code::kCorrupt, kOperation, "{}{}: expected a JSON object in a row of at most {} bytes, found {}",
              path_.string(), where, kRowBytesMax, found);
}

// Reads the next block behind the data in the buffer. False at the file's end.
Result<bool> RowFile::read_block() {
  if (end_ - begin_ > kRowBytesMax) {  // the row is too long: only its newline is searched for
    skipped_bytes_ += end_ - begin_;
    begin_ = scanned_ = end_ = 0;
  }
  if (begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    scanned_ -= begin_;
    begin_ = 0;
  }
  if (buffer_.size() < end_ + kRowBlockBytes) {  // doubles the buffer, up to the bound of buffer_bytes()
    constexpr std::size_t kBufferBytesMax = kRowBytesMax + 2 * kRowBlockBytes;
    buffer_.reserve(std::min(kBufferBytesMax, 2 * (end_ + kRowBlockBytes)));
    buffer_.resize(std::min(buffer_.capacity(), kBufferBytesMax));
  }
  const std::uint64_t next_offset = place_.offset + skipped_bytes_ + (end_ - begin_);  // behind the data in the buffer
  ECHO_ASSIGN(const std::size_t bytes_read,
              read_at(fd_->get(), path_, buffer_.data() + end_, kRowBlockBytes, next_offset));
  end_ += bytes_read;
  return bytes_read > 0;
}

Result<std::optional<std::string_view>> RowFile::next() {
  for (;;) {
    const char* unscanned = buffer_.data() + scanned_;
    const void* newline = scanned_ < end_ ? std::memchr(unscanned, '\n', end_ - scanned_) : nullptr;
    if (newline == nullptr) {
      scanned_ = end_;
      ECHO_ASSIGN(const bool has_more, read_block());
      if (has_more) continue;
      return std::optional<std::string_view>();
    }
    const std::string_view row(buffer_.data() + begin_,
                               static_cast<std::size_t>(static_cast<const char*>(newline) - (buffer_.data() + begin_)));
    const std::uint64_t row_bytes = std::exchange(skipped_bytes_, 0) + row.size();
    row_begin_ = place_.offset;
    place_.offset += row_bytes + 1;
    if (place_.row) ++*place_.row;
    begin_ = scanned_ = begin_ + row.size() + 1;
    if (row_bytes > kRowBytesMax) return corrupt(fmt::format("one of {} bytes", row_bytes));
    return std::optional(row);
  }
}

Result<std::optional<std::string_view>> RowFile::next_checked() {
  ECHO_ASSIGN(const auto text, next());
  if (!text) return text;
  const std::size_t first = text->find_first_not_of(" \t\r");
  const bool is_object = first != std::string_view::npos && (*text)[first] == '{' && nlohmann::json::accept(*text);
  if (!is_object) return corrupt("something else");
  return text;
}

Result<std::optional<nlohmann::json>> RowFile::next_object() {
  ECHO_ASSIGN(const auto text, next());
  if (!text) return std::optional<nlohmann::json>();
  nlohmann::json row = nlohmann::json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!row.is_object()) return corrupt("something else");
  return std::optional(std::move(row));
}

Status each_row(const std::filesystem::path& path, const std::function<Status(nlohmann::json)>& visit) {
  ECHO_ASSIGN(RowFile file, RowFile::open(path));
  for (;;) {
    ECHO_ASSIGN(auto row, file.next_object());
    if (!row) return ok();
    ECHO_TRY(visit(std::move(*row)));
  }
}

Result<RowPlace> last_rows(const std::filesystem::path& path, std::uint64_t rows) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return os_error(kOperation, path);
  ECHO_ASSIGN(const std::uint64_t size, size_of(fd.get(), path));
  // Looks for one more newline, which ends the row before them.
  ECHO_ASSIGN(const std::uint64_t offset, offset_after_newline_from_end(fd.get(), path, size, rows + 1));
  return RowPlace{.offset = offset, .row = offset == 0 ? std::optional<std::uint64_t>(0) : std::nullopt};
}

Status cut_torn_row(const std::filesystem::path& path) {
  const Descriptor fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (fd.get() < 0) {
    if (errno == ENOENT) return ok();
    return os_error("resume", path);
  }
  ECHO_ASSIGN(const std::uint64_t size, size_of(fd.get(), path));
  ECHO_ASSIGN(const std::uint64_t kept_bytes, offset_after_newline_from_end(fd.get(), path, size, 1));
  if (kept_bytes < size && ::ftruncate(fd.get(), static_cast<off_t>(kept_bytes)) != 0) return os_error("resume", path);
  return ok();
}

}  // namespace echoline::learner
