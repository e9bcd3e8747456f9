// The pool of freed memory behind PoolAllocator.
#include "delta/raw_memory.hpp"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <mutex>

namespace echoline::delta {
namespace {

constexpr std::size_t kHugePage = 2u << 20, kPoolBytesMax = 64u << 20;

// Sizes are eighths of powers of two, so that kept memory serves requests of similar size.
std::size_t rounded(std::size_t bytes) {
  const std::size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

struct Pool {
  struct Block {
    void* memory = nullptr;
    std::size_t bytes = 0;  // rounded
  };
  std::mutex mutex;
  std::array<Block, 256> blocks;
  std::size_t count = 0, bytes = 0;
};

Pool& pool() {
  static Pool& all = *new Pool;  // never destroyed, because other objects free memory at the end of the process
  return all;
}

void* allocate_from_system(std::size_t bytes) {
  if (bytes < kHugePage) return ::operator new(bytes);
  void* const memory = ::operator new (bytes, std::align_val_t{kHugePage});
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // advice: without it, the pages are small
  return memory;
}

}  // namespace

void* acquire_memory(std::size_t bytes) {
  bytes = rounded(bytes);
  Pool& all = pool();
  {
    const std::lock_guard lock(all.mutex);
    for (std::size_t i = all.count; i-- > 0;)
      if (all.blocks[i].bytes == bytes) {
        void* const memory = all.blocks[i].memory;
        all.blocks[i] = all.blocks[--all.count];
        all.bytes -= bytes;
        return memory;
      }
  }
  return allocate_from_system(bytes);
}

void release_memory(void* memory, std::size_t bytes) {
  bytes = rounded(bytes);
  Pool& all = pool();
  {
    const std::lock_guard lock(all.mutex);
    if (all.count < all.blocks.size() && all.bytes + bytes <= kPoolBytesMax) {
      all.blocks[all.count++] = {memory, bytes};
      all.bytes += bytes;
      return;
    }
  }
  if (bytes < kHugePage)
    ::operator delete(memory);
  else
    ::operator delete (memory, std::align_val_t{kHugePage});
}

}  // namespace echoline::delta
