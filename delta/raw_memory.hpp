// Vectors for large contents. Memory of at least 2 MiB uses huge pages if the system has them. Freed memory is kept for
// the next vector, because a page fault per 4 KiB would take longer than writing the content. resize() of a RawVector
// leaves new elements uninitialised, because they are overwritten anyway.
#pragma once
#include <cstddef>
#include <new>
#include <utility>
#include <vector>

namespace echoline::delta {

// Allocate and free memory of kPooledBytesMin bytes or more. Released memory is kept for later calls, up to 64 MiB per
// process. Thread-safe.
inline constexpr std::size_t kPooledBytesMin = 256u << 10;  // smaller memory is left to operator new
void* acquire_memory(std::size_t bytes);
void release_memory(void* memory, std::size_t bytes);

// Initialises new elements, like std::allocator.
template <class T>
struct PoolAllocator {
  using value_type = T;
  PoolAllocator() = default;
  template <class U>
  PoolAllocator(const PoolAllocator<U>&) {}

  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    return static_cast<T*>(bytes < kPooledBytesMin ? ::operator new(bytes) : acquire_memory(bytes));
  }
  void deallocate(T* memory, std::size_t count) {
    if (count * sizeof(T) < kPooledBytesMin)
      ::operator delete(memory);
    else
      release_memory(memory, count * sizeof(T));
  }
  friend bool operator==(const PoolAllocator&, const PoolAllocator&) { return true; }
};

// Leaves new elements uninitialised.
template <class T>
struct RawAllocator : PoolAllocator<T> {
  using value_type = T;
  RawAllocator() = default;
  template <class U>
  RawAllocator(const RawAllocator<U>&) {}
  template <class U>
  struct rebind {
    using other = RawAllocator<U>;
  };
  template <class U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;
  }
  template <class U, class... Args>
  void construct(U* at, Args&&... args) {
    ::new (static_cast<void*>(at)) U(std::forward<Args>(args)...);
  }
};

template <class T>
using RawVector = std::vector<T, RawAllocator<T>>;

}  // namespace echoline::delta
