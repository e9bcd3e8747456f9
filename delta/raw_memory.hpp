// Vectors for large contents: resize() leaves new elements unset, and a vector of 2 MiB or more lies in huge pages
// where the system has them. A page fault for each 4 KiB would take longer than writing the content.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>
#include <vector>

namespace echoline::delta {

template <class T>
struct RawAllocator {
  using value_type = T;
  RawAllocator() = default;
  template <class U>
  RawAllocator(const RawAllocator<U>&) {}

  static constexpr std::size_t kHugePage = 2u << 20;
  T* allocate(std::size_t count) {
    const std::size_t bytes = count * sizeof(T);
    if (bytes < kHugePage) return static_cast<T*>(::operator new(bytes));
    T* const memory = static_cast<T*>(::operator new (bytes, std::align_val_t{kHugePage}));
    ::madvise(memory, bytes, MADV_HUGEPAGE);  // a wish: without it, the pages are small
    return memory;
  }
  void deallocate(T* memory, std::size_t count) {
    if (count * sizeof(T) < kHugePage)
      ::operator delete(memory);
    else
      ::operator delete (memory, std::align_val_t{kHugePage});
  }
  template <class U>
  void construct(U* at) {
    ::new (static_cast<void*>(at)) U;
  }
  template <class U, class... Args>
  void construct(U* at, Args&&... args) {
    ::new (static_cast<void*>(at)) U(std::forward<Args>(args)...);
  }
  friend bool operator==(const RawAllocator&, const RawAllocator&) { return true; }
};

template <class T>
using RawVector = std::vector<T, RawAllocator<T>>;

}  // namespace echoline::delta
