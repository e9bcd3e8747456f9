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

// Sizes are rounded up to a multiple of this, so that the memory of a publication's last chunk can be reused.
constexpr std::size_t kStepBytes = 4096;
constexpr std::size_t kSlabBytes = 2u << 20;                  // one huge page, if the system has them
constexpr std::size_t kPooledPieceBytesMax = kSlabBytes / 2;  // larger pieces are allocated singly
// Empty slabs that keep their pages. The system takes the pages of further empty slabs when it needs them.
constexpr std::size_t kEmptySlabsKept = 32;

// Hands out pieces of memory. Each slab is divided into pieces of one size. A page fault takes longer than forwarding
// the page's bytes, so the pool allocates huge pages and reuses them.
class Pool {
 public:
  std::byte* allocate(std::size_t size) {
    const std::lock_guard lock(mutex_);
    auto& with_room = slabs_with_room_[size];
    if (with_room.empty()) with_room.insert(new_slab(size));
    std::byte* const base = *with_room.begin();  // always the lowest address, so that higher slabs become empty
    Slab& slab = slabs_.at(base);
    std::byte* const piece = slab.free_pieces.back();
    slab.free_pieces.pop_back();
    if (slab.free_pieces.empty()) with_room.erase(base);
    return piece;
  }

  void release(std::byte* piece) {
    const std::lock_guard lock(mutex_);
    // The slab begins at the next lower multiple of its size, because slabs are aligned to it.
    std::byte* const base = piece - reinterpret_cast<std::uintptr_t>(piece) % kSlabBytes;
    Slab& slab = slabs_.at(base);
    if (slab.free_pieces.empty()) slabs_with_room_[slab.piece_bytes].insert(base);
    slab.free_pieces.push_back(piece);
    if (slab.free_pieces.size() < kSlabBytes / slab.piece_bytes) return;
    slabs_with_room_[slab.piece_bytes].erase(base);
    slabs_.erase(base);
    if (empty_slabs_.size() >= kEmptySlabsKept) madvise(base, kSlabBytes, MADV_FREE);
    empty_slabs_.push_back(base);
  }

 private:
  struct Slab {
    std::size_t piece_bytes;
    std::vector<std::byte*> free_pieces;
  };

  std::byte* new_slab(std::size_t size) {
    if (empty_slabs_.empty()) map_slabs();
    std::byte* const base = empty_slabs_.back();
    empty_slabs_.pop_back();
    Slab& slab = slabs_[base];
    slab.piece_bytes = size;
    for (std::size_t i = kSlabBytes / size; i-- > 0;) slab.free_pieces.push_back(base + i * size);
    return base;
  }

  // Maps several slabs at a time. The parts cut off for alignment are address space, not memory.
  void map_slabs() {
    constexpr std::size_t kSlabs = 16;  // mapped at a time
    void* const mapped =
        mmap(nullptr, (kSlabs + 1) * kSlabBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ECHO_CHECK(mapped != MAP_FAILED, "no memory for chunks");
    auto* base = static_cast<std::byte*>(mapped);
    base += kSlabBytes - reinterpret_cast<std::uintptr_t>(base) % kSlabBytes;
    madvise(base, kSlabs * kSlabBytes, MADV_HUGEPAGE);
    for (std::size_t i = kSlabs; i-- > 0;) empty_slabs_.push_back(base + i * kSlabBytes);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::set<std::byte*>> slabs_with_room_;  // slabs with a free piece, by the size of pieces
  std::unordered_map<std::byte*, Slab> slabs_;                   // slabs with a piece in use
  std::vector<std::byte*> empty_slabs_;
};

Pool& pool() {
  static Pool* const pool = new Pool;  // never destroyed: chunks in static objects may outlive it
  return *pool;
}

}  // namespace

std::shared_ptr<std::byte> chunk_memory(std::size_t size) {
  const std::size_t rounded_bytes = std::max(kStepBytes, (size + kStepBytes - 1) / kStepBytes * kStepBytes);
  if (rounded_bytes > kPooledPieceBytesMax)
    return std::shared_ptr<std::byte>(new std::byte[rounded_bytes], std::default_delete<std::byte[]>());
  return {pool().allocate(rounded_bytes), [](std::byte* piece) { pool().release(piece); }};
}

}  // namespace echoline::overlay
