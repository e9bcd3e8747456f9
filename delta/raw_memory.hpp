// Vectors for large contents that are written as a whole: what is in a new element is not set, and large ones lie in
// huge pages where the system has any, which take a fraction of the time to come by.
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
  static std::align_val_t alignment(std::size_t count) {
    return std::align_val_t{count * sizeof(T) >= kHugePage ? kHugePage : 64};
  }
  T* allocate(std::size_t count) {
    T* const memory = static_cast<T*>(::operator new(count * sizeof(T), alignment(count)));
    if (count * sizeof(T) >= kHugePage) ::madvise(memory, count * sizeof(T), MADV_HUGEPAGE);  // a wish
    return memory;
  }
  void deallocate(T* memory, std::size_t count) { ::operator delete(memory, alignment(count)); }
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
