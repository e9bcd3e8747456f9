#include "overlay/chunk_memory.hpp"

#include <map>
#include <mutex>
#include <vector>

namespace echoline::overlay {
namespace {

constexpr std::size_t kKeptBytes = 64u << 20;
constexpr std::size_t kKeptSizeMax = 1u << 20;
constexpr std::size_t kStep = 4096;  // sizes are rounded up to it, so that the last chunk of a payload fits others

class Pool {
 public:
  std::byte* take(std::size_t size) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto it = free_.find(size); it != free_.end() && !it->second.empty()) {
        std::byte* memory = it->second.back();
        it->second.pop_back();
        kept_ -= size;
        return memory;
      }
    }
    return new std::byte[size];
  }
  void give(std::byte* memory, std::size_t size) {
    if (size <= kKeptSizeMax) {
      const std::lock_guard lock(mutex_);
      if (kept_ + size <= kKeptBytes) {
        free_[size].push_back(memory);
        kept_ += size;
        return;
      }
    }
    delete[] memory;
  }

 private:
  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;
  std::size_t kept_ = 0;
};

Pool& pool() {
  static Pool* const pool = new Pool;  // outlives every chunk, also those of other static objects
  return *pool;
}

}  // namespace

std::shared_ptr<std::byte> chunk_memory(std::size_t size) {
  const std::size_t rounded = (size + kStep - 1) / kStep * kStep;
  return {pool().take(rounded), [rounded](std::byte* memory) { pool().give(memory, rounded); }};
}

}  // namespace echoline::overlay
