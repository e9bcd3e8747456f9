// Keeps released chunk memory for reuse. Called by FrameDecoder and Sealer for every chunk.
#include "overlay/wire/chunk_memory.hpp"

#include <sys/mman.h>

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "base/result.hpp"

namespace echoline::overlay {
namespace {

constexpr std::size_t kStep = 4096;  // sizes are rounded up to it, so that a publication's last chunk can be reused
constexpr std::size_t kSlabBytes = 2u << 20;  // one huge page, if the system has them
constexpr std::size_t kPooledMax = kSlabBytes / 2;
constexpr std::size_t kEmptySlabsKept =
    32;  // with their pages; of further ones the system takes them when it needs them

// Slabs of equal pieces. A fresh page costs the system more than a relay's work on the bytes in it, so the pool
// allocates huge pages and reuses them.
class Pool {
 public:
  std::byte* take(std::size_t size) {
    const std::lock_guard lock(mutex_);
    auto& open = open_[size];
    if (open.empty()) open.insert(new_slab(size));
    std::byte* const base = *open.begin();  // the lowest first, so that the others become empty
    Slab& slab = slabs_.at(base);
    std::byte* const piece = slab.free.back();
    slab.free.pop_back();
    if (slab.free.empty()) open.erase(base);
    return piece;
  }

  void give(std::byte* piece) {
    const std::lock_guard lock(mutex_);
    std::byte* const base = piece - reinterpret_cast<std::uintptr_t>(piece) % kSlabBytes;
    Slab& slab = slabs_.at(base);
    if (slab.free.empty()) open_[slab.size].insert(base);
    slab.free.push_back(piece);
    if (slab.free.size() < kSlabBytes / slab.size) return;
    open_[slab.size].erase(base);
    slabs_.erase(base);
    if (empty_.size() >= kEmptySlabsKept) madvise(base, kSlabBytes, MADV_FREE);
    empty_.push_back(base);
  }

 private:
  struct Slab {
    std::size_t size;
    std::vector<std::byte*> free;
  };

  std::byte* new_slab(std::size_t size) {
    if (empty_.empty()) map_slabs();
    std::byte* const base = empty_.back();
    empty_.pop_back();
    Slab& slab = slabs_[base];
    slab.size = size;
    for (std::size_t at = kSlabBytes / size; at-- > 0;) slab.free.push_back(base + at * size);
    return base;
  }

  // Maps several slabs at a time. The parts cut off for alignment are address space, not memory.
  void map_slabs() {
    constexpr std::size_t kSlabs = 16;
    void* const mapped =
        mmap(nullptr, (kSlabs + 1) * kSlabBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ECHO_CHECK(mapped != MAP_FAILED, "no memory for chunks");
    auto* base = static_cast<std::byte*>(mapped);
    base += kSlabBytes - reinterpret_cast<std::uintptr_t>(base) % kSlabBytes;
    madvise(base, kSlabs * kSlabBytes, MADV_HUGEPAGE);
    for (std::size_t i = kSlabs; i-- > 0;) empty_.push_back(base + i * kSlabBytes);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::set<std::byte*>> open_;  // slabs with a free piece, by the size of pieces
  std::unordered_map<std::byte*, Slab> slabs_;        // slabs with a piece in use
  std::vector<std::byte*> empty_;
};

Pool& pool() {
  static Pool* const pool = new Pool;  // never destroyed: chunks in static objects may outlive it
  return *pool;
}

}  // namespace

std::shared_ptr<std::byte> chunk_memory(std::size_t size) {
  const std::size_t rounded = std::max(kStep, (size + kStep - 1) / kStep * kStep);
  if (rounded > kPooledMax)
    return std::shared_ptr<std::byte>(new std::byte[rounded], std::default_delete<std::byte[]>());
  return {pool().take(rounded), [](std::byte* piece) { pool().give(piece); }};
}

}  // namespace echoline::overlay
