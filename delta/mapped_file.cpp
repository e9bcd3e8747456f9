// Maps files into memory; checkpoints and journals are read in this way.
#include "delta/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <utility>

#include "base/files.hpp"

namespace echoline::delta {

Result<MappedFile> MappedFile::open(const std::filesystem::path& path, std::string_view operation, Access access) {
  const bool is_writable = access == Access::kReadWrite;
  // With O_NONBLOCK, open() does not block on a pipe of this name, which is refused below.
  const Descriptor fd(::open(path.c_str(), (is_writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (fd.get() < 0 || ::fstat(fd.get(), &info) != 0) return os_error(operation, path);
  if (!S_ISREG(info.st_mode))
    return fail(Code::kInvalid, operation, "{}: expected a file, found {}", path.string(),
                S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
  MappedFile file;
  const auto size = static_cast<std::size_t>(info.st_size);
  if (size == 0) return file;
  void* address = ::mmap(nullptr, size, is_writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd.get(), 0);
  if (address == MAP_FAILED) return os_error(operation, path);
  file.bytes_ = {static_cast<std::byte*>(address), size};
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace echoline::delta
