// The pool of freed memory behind PoolAllocator.
#include "delta/raw_memory.hpp"

#include <sys/mman.h>

#include <array>
#include <bit>
#include <mutex>

namespace echoline::delta {
namespace {

constexpr std::size_t kHugePageBytes = 2u << 20, kPoolBytesMax = 64u << 20;

// Rounds up to a multiple of an eighth of the largest power of two that is at most `bytes`, so that kept memory serves
// requests of similar size. Requires at least 8 bytes, because the step would otherwise be 0.
std::size_t rounded_up(std::size_t bytes) {
  const std::size_t step = std::bit_floor(bytes) / 8;
  return (bytes + step - 1) / step * step;
}

struct Pool {
  struct Block {
    void* memory = nullptr;
    std::size_t bytes = 0;  // a result of rounded_up()
  };
  std::mutex mutex;
  std::array<Block, 256> blocks;           // the first block_count of them are kept
  std::size_t block_count = 0, bytes = 0;  // number and total size of the kept blocks
};

Pool& pool() {
  static Pool& memory_pool = *new Pool;  // never destroyed, because other objects free memory at the end of the process
  return memory_pool;
}

void* allocate_from_system(std::size_t bytes) {
  if (bytes < kHugePageBytes) return ::operator new(bytes);
  // Aligned, because a huge page begins at a multiple of its size.
  void* const memory = ::operator new (bytes, std::align_val_t{kHugePageBytes});
  ::madvise(memory, bytes, MADV_HUGEPAGE);  // advice: without it, the pages are small
  return memory;
}

}  // namespace

void* acquire_memory(std::size_t bytes) {
  bytes = rounded_up(bytes);
  Pool& memory_pool = pool();
  {
    const std::lock_guard lock(memory_pool.mutex);
    for (std::size_t i = memory_pool.block_count; i-- > 0;)
      if (memory_pool.blocks[i].bytes == bytes) {
        void* const memory = memory_pool.blocks[i].memory;
        memory_pool.blocks[i] = memory_pool.blocks[--memory_pool.block_count];
        memory_pool.bytes -= bytes;
        return memory;
      }
  }
  return allocate_from_system(bytes);
}

void release_memory(void* memory, std::size_t bytes) {
  bytes = rounded_up(bytes);
  Pool& memory_pool = pool();
  {
    const std::lock_guard lock(memory_pool.mutex);
    if (memory_pool.block_count < memory_pool.blocks.size() && memory_pool.bytes + bytes <= kPoolBytesMax) {
      memory_pool.blocks[memory_pool.block_count++] = {.memory = memory, .bytes = bytes};
      memory_pool.bytes += bytes;
      return;
    }
  }
  if (bytes < kHugePageBytes)
    ::operator delete(memory);
  else
    ::operator delete (memory, std::align_val_t{kHugePageBytes});
}

}  // namespace echoline::delta
