// File operations with the path in every error.
#include "base/files.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/os_code.hpp"

namespace echoline {
namespace {

constexpr std::size_t kReadBlockBytes = 65536;

Status write_atomic(const std::filesystem::path& path, std::string_view content, mode_t mode) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
  std::string temporary = (folder / ("." + path.filename().string() + ".XXXXXX")).string();
  {
    const Descriptor fd(::mkostemp(temporary.data(), O_CLOEXEC));
    if (fd.get() < 0) return os_error("write file", path);
    const auto remove_and_fail = [&] {
      const Error error = os_error("write file", path);
      ::unlink(temporary.c_str());
      return error;
    };
    for (std::size_t written = 0; written < content.size();) {
      const ssize_t n = ::write(fd.get(), content.data() + written, content.size() - written);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return remove_and_fail();
      written += static_cast<std::size_t>(n);
    }
    // mkostemp() makes the file readable by its owner only.
    if (::fchmod(fd.get(), mode) != 0 || ::fsync(fd.get()) != 0) return remove_and_fail();
    if (::rename(temporary.c_str(), path.c_str()) != 0) return remove_and_fail();
  }
  const Descriptor directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0 || ::fsync(directory.get()) != 0) return os_error("sync folder", folder);
  return ok();
}

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Code os_code(int error) {
  if (error == ENOENT) return Code::kNotFound;
  return error == ENOSPC || error == EDQUOT || error == EFBIG ? Code::kExhausted : Code::kIo;
}

Error os_error(std::string_view operation, const std::filesystem::path& path) {
  const int error_number = errno;  // before a call can change it
  return fail(os_code(error_number), operation, "{}: {}", path.string(), std::strerror(error_number));
}

Result<std::string> read_file(const std::filesystem::path& path, std::uint64_t bytes_max) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return os_error("read file", path);
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return os_error("read file", path);
  if (S_ISDIR(info.st_mode)) return fail(Code::kIo, "read file", "{}: is a folder, expected a file", path.string());
  std::string content;
  char block[kReadBlockBytes];
  for (;;) {
    const ssize_t n = ::read(fd.get(), block, sizeof block);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return os_error("read file", path);
    if (n == 0) return content;
    if (content.size() + static_cast<std::uint64_t>(n) > bytes_max)
      return fail(Code::kExhausted, "read file", "{}: larger than the limit of {} bytes", path.string(), bytes_max);
    content.append(block, static_cast<std::size_t>(n));
  }
}

Status write_file_atomic(const std::filesystem::path& path, std::string_view content) {
  return write_atomic(path, content, 0644);
}

Status write_private_file_atomic(const std::filesystem::path& path, std::string_view content) {
  return write_atomic(path, content, 0600);
}

Status make_folders(const std::filesystem::path& path) {
  std::error_code ec;
  std::filesystem::create_directories(path, ec);
  if (ec) return fail(os_code(ec.value()), "create folder", "{}: {}", path.string(), ec.message());
  return ok();
}

}  // namespace echoline
