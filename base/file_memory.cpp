// Maps unnamed files. The learner keeps policies and publications in them, the worker what it is about to install.
#include "base/file_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

namespace echoline {
namespace {

constexpr std::string_view kOperation = "allocate memory in a file";
constexpr std::uint64_t kStepBytes = 64ull << 20;  // space that is allocated on the disk at a time
constexpr std::uint64_t kPageBytes = 4096;         // a multiple of it can be unmapped on every machine this runs on

std::uint64_t rounded_up(std::uint64_t bytes, std::uint64_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

Result<std::shared_ptr<FileMemory>> FileMemory::make(const std::filesystem::path& folder, std::uint64_t capacity) {
  ECHO_CHECK(capacity > 0 && capacity <= PTRDIFF_MAX);
  std::string path = (folder / ".memory-XXXXXX").string();
  const int fd = ::mkostemp(path.data(), O_CLOEXEC);
  if (fd < 0) return os_error(kOperation, folder);
  ::unlink(path.c_str());
  void* const address = ::ftruncate(fd, static_cast<off_t>(capacity)) == 0
                            ? ::mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                            : MAP_FAILED;
  if (address == MAP_FAILED) {
    Error error = os_error(kOperation, folder);
    ::close(fd);
    return error;
  }
  const auto free_memory = [](FileMemory* memory) {
    try {
      std::thread([memory] { delete memory; }).detach();
    } catch (const std::system_error&) {
      delete memory;  // the system has no thread left
    }
  };
  return std::shared_ptr<FileMemory>(new FileMemory(folder, fd, static_cast<std::byte*>(address), capacity),
                                     free_memory);
}

Result<std::shared_ptr<std::byte>> FileMemory::allocate(const std::filesystem::path& folder, std::uint64_t bytes) {
  ECHO_ASSIGN(auto memory, make(folder, std::max<std::uint64_t>(bytes, 1)));
  ECHO_ASSIGN(const std::span<std::byte> all, memory->extend(bytes));
  memory->close();
  return std::shared_ptr<std::byte>(std::move(memory), all.data());
}

FileMemory::~FileMemory() {
  close();
  if (capacity_ > 0) ::munmap(address_, capacity_);
}

Result<std::span<std::byte>> FileMemory::extend(std::uint64_t bytes) {
  if (fd_ < 0 || bytes > capacity_ - size_)
    return fail(Code::kExhausted, kOperation, "{}: {} more bytes after {}, the limit is {}", folder_.string(), bytes,
                size_, capacity_);
  if (size_ + bytes > allocated_) {
    const std::uint64_t end = std::min(capacity_, rounded_up(size_ + bytes, kStepBytes));
    int error = EINTR;
    while (error == EINTR)
      error = ::posix_fallocate(fd_, static_cast<off_t>(allocated_), static_cast<off_t>(end - allocated_));
    if (error != 0) {
      errno = error;
      return os_error(kOperation, folder_);
    }
    allocated_ = end;
  }
  return std::span(address_ + std::exchange(size_, size_ + bytes), bytes);
}

void FileMemory::close() {
  if (fd_ < 0) return;
  const std::uint64_t used = std::min(capacity_, rounded_up(size_, kPageBytes));
  if (used < capacity_) {
    ::munmap(address_ + used, capacity_ - used);
    capacity_ = used;
    // Gives unused space on the disk back. If that fails, it is free once the memory is.
    if (::ftruncate(fd_, static_cast<off_t>(used)) != 0) allocated_ = used;
  }
  ::close(std::exchange(fd_, -1));
}

}  // namespace echoline
