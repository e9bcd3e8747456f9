// Memory for policies and publications of any size: the pages of a file without a name. The system can write them to
// the disk and take them back, so the machine's memory need not hold them all. A killed process leaves no file behind.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

#include "base/files.hpp"
#include "base/result.hpp"

namespace echoline {

// Smaller policies and publications stay in ordinary memory, which needs no disk.
inline constexpr std::uint64_t kFileMemoryMin = 64ull << 20;

// Grows at its end. One thread may extend it while others use the bytes handed out before.
class FileMemory {
 public:
  // Makes the file in `folder`. Reserves addresses for `capacity` bytes (at least 1), but no space on the disk. Freed
  // on a thread of its own, because that takes a tenth of a second per GB. kIo, kNotFound or kExhausted with the folder
  // in the message.
  static Result<std::shared_ptr<FileMemory>> make(const std::filesystem::path& folder, std::uint64_t capacity);
  // All of `bytes` at once: make(), extend() and close().
  static Result<std::shared_ptr<std::byte>> allocate(const std::filesystem::path& folder, std::uint64_t bytes);
  FileMemory(const FileMemory&) = delete;
  FileMemory& operator=(const FileMemory&) = delete;
  ~FileMemory();

  // Returns zeroed memory for the next `bytes` bytes, directly behind that of the call before. The disk has space for
  // it, because a write to memory without space would end the process. kExhausted: the disk is full, or `capacity` is
  // used up.
  Result<std::span<std::byte>> extend(std::uint64_t bytes);
  // Ends the growth: frees the unused addresses and the descriptor.
  void close();
  std::span<std::byte> bytes() { return {address_, size_}; }

 private:
  FileMemory(std::filesystem::path folder, int fd, std::byte* address, std::uint64_t capacity)
      : folder_(std::move(folder)), fd_(fd), address_(address), capacity_(capacity) {}
  const std::filesystem::path folder_;  // for messages
  int fd_;                              // -1 after close()
  std::byte* const address_;
  std::uint64_t capacity_;       // mapped addresses
  std::uint64_t size_ = 0;       // bytes handed out
  std::uint64_t allocated_ = 0;  // bytes with space on the disk
};

}  // namespace echoline
