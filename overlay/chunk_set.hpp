// A set of chunk indices of one publication, as a bitmap.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace echoline::overlay {

class ChunkSet {
 public:
  ChunkSet() = default;
  explicit ChunkSet(std::uint32_t size) : size_(size), words_((size + 63) / 64) {}
  static ChunkSet all(std::uint32_t size) {
    ChunkSet set(size);
    for (std::uint32_t i = 0; i < set.words_.size(); ++i) set.words_[i] = ~std::uint64_t{0};
    if (size % 64) set.words_.back() = (std::uint64_t{1} << (size % 64)) - 1;
    set.count_ = size;
    return set;
  }

  std::uint32_t size() const { return size_; }
  std::uint32_t count() const { return count_; }
  bool complete() const { return count_ == size_; }
  bool contains(std::uint32_t i) const { return i < size_ && (words_[i / 64] >> (i % 64) & 1); }
  void insert(std::uint32_t i) {
    if (i >= size_ || contains(i)) return;
    words_[i / 64] |= std::uint64_t{1} << (i % 64);
    ++count_;
  }
  void erase(std::uint32_t i) {
    if (!contains(i)) return;
    words_[i / 64] &= ~(std::uint64_t{1} << (i % 64));
    --count_;
  }
  // The lowest index in this set and not in `other` (of the same size).
  std::optional<std::uint32_t> first_not_in(const ChunkSet& other) const {
    for (std::size_t w = 0; w < words_.size(); ++w)
      if (const std::uint64_t bits = words_[w] & ~(w < other.words_.size() ? other.words_[w] : 0))
        return static_cast<std::uint32_t>(w * 64 + static_cast<std::size_t>(std::countr_zero(bits)));
    return std::nullopt;
  }

  // Bit i of the bitmap is bit i%8 of byte i/8.
  std::string to_bytes() const {
    std::string bytes((size_ + 7) / 8, '\0');
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(words_[i / 8] >> (8 * (i % 8)));
    return bytes;
  }
  // Nothing when the length is not that of `size` bits or a bit beyond them is set.
  static std::optional<ChunkSet> from_bytes(std::uint32_t size, std::string_view bytes) {
    ChunkSet set(size);
    if (bytes.size() != (size + std::size_t{7}) / 8) return std::nullopt;
    for (std::size_t i = 0; i < bytes.size(); ++i)
      set.words_[i / 8] |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * (i % 8));
    if (size % 64 && set.words_.back() >> (size % 64)) return std::nullopt;
    for (const std::uint64_t w : set.words_) set.count_ += static_cast<std::uint32_t>(std::popcount(w));
    return set;
  }

 private:
  std::uint32_t size_ = 0, count_ = 0;
  std::vector<std::uint64_t> words_;
};

}  // namespace echoline::overlay
