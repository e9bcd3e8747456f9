// A set of chunk indices of one publication, as a bitmap that grows with the publication. A stripe is a fixed share of
// the chunks, which travels over its own edges.
#pragma once
#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace echoline::overlay {

// Stripe j of s holds the chunks i with i mod s = j; s is a power of two, at most 64.
inline constexpr std::uint32_t kStripesMax = 64;

// The stripes wanted over one edge: bit j of `wanted` is stripe j.
struct StripeMask {
  std::uint32_t stripes = 1;
  std::uint64_t wanted = 1;
  static StripeMask all() { return {}; }
  static StripeMask none() { return {1, 0}; }
  static bool is_valid(std::uint32_t stripes, std::uint64_t wanted) {
    return stripes >= 1 && stripes <= kStripesMax && std::has_single_bit(stripes) &&
           (stripes == 64 || wanted >> stripes == 0);
  }
  bool contains(std::uint32_t chunk) const { return wanted >> (chunk % stripes) & 1; }
  // The fraction of all chunks; at least that of one stripe, because it serves as a positive weight.
  double share() const { return static_cast<double>(std::max(1, std::popcount(wanted))) / stripes; }
  // Bit i: whether chunk i mod 64 is in one of the stripes.
  std::uint64_t pattern() const {
    std::uint64_t bits = wanted;
    for (std::uint32_t width = stripes; width < 64; width *= 2) bits |= bits << width;
    return bits;
  }
  friend bool operator==(const StripeMask&, const StripeMask&) = default;
};

class ChunkSet {
 public:
  ChunkSet() = default;
  // The chunks 0 .. size - 1.
  static ChunkSet all(std::uint32_t size) {
    ChunkSet set;
    set.words_.assign((size + std::size_t{63}) / 64, ~std::uint64_t{0});
    if (size % 64) set.words_.back() = (std::uint64_t{1} << (size % 64)) - 1;
    set.count_ = size;
    return set;
  }

  std::uint32_t count() const { return count_; }
  bool contains(std::uint32_t chunk) const {
    return chunk / 64 < words_.size() && (words_[chunk / 64] >> (chunk % 64) & 1);
  }
  void insert(std::uint32_t chunk) {
    if (contains(chunk)) return;
    if (chunk / 64 >= words_.size()) words_.resize(chunk / 64 + 1);
    words_[chunk / 64] |= std::uint64_t{1} << (chunk % 64);
    ++count_;
  }
  void erase(std::uint32_t chunk) {
    if (!contains(chunk)) return;
    words_[chunk / 64] &= ~(std::uint64_t{1} << (chunk % 64));
    --count_;
  }
  void insert_all(const ChunkSet& other) {
    if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
    count_ = 0;
    for (std::size_t word_index = 0; word_index < words_.size(); ++word_index) {
      if (word_index < other.words_.size()) words_[word_index] |= other.words_[word_index];
      count_ += static_cast<std::uint32_t>(std::popcount(words_[word_index]));
    }
  }
  // One more than the highest index in the set.
  std::uint32_t end() const {
    for (std::size_t word_index = words_.size(); word_index-- > 0;)
      if (words_[word_index])
        return static_cast<std::uint32_t>(word_index * 64 + 64 -
                                          static_cast<unsigned>(std::countl_zero(words_[word_index])));
    return 0;
  }
  // The lowest index of the given stripes that is in this set and not in `other`.
  std::optional<std::uint32_t> first_not_in(const ChunkSet& other, const StripeMask& mask) const {
    const std::uint64_t pattern = mask.pattern();
    for (std::size_t word_index = 0; word_index < words_.size(); ++word_index)
      if (const std::uint64_t bits =
              words_[word_index] & pattern & ~(word_index < other.words_.size() ? other.words_[word_index] : 0))
        return static_cast<std::uint32_t>(word_index * 64 + static_cast<std::size_t>(std::countr_zero(bits)));
    return std::nullopt;
  }
  // Number of chunks of the given stripes in this set.
  std::uint32_t count_of(const StripeMask& mask) const {
    const std::uint64_t pattern = mask.pattern();
    std::uint32_t chunks = 0;
    for (const std::uint64_t word : words_) chunks += static_cast<std::uint32_t>(std::popcount(word & pattern));
    return chunks;
  }

  // Bit i of the bitmap is bit i mod 8 of byte i div 8; as many bytes as `size` chunks need.
  std::string to_bytes(std::uint32_t size) const {
    std::string bytes((size + std::size_t{7}) / 8, '\0');
    for (std::size_t i = 0; i < bytes.size() && i / 8 < words_.size(); ++i)
      bytes[i] = static_cast<char>(words_[i / 8] >> (8 * (i % 8)));
    return bytes;
  }
  // Absent if the length does not fit `size` bits, or a bit beyond them is set.
  static std::optional<ChunkSet> from_bytes(std::uint32_t size, std::string_view bytes) {
    if (bytes.size() != (size + std::size_t{7}) / 8) return std::nullopt;
    ChunkSet set;
    set.words_.resize((size + std::size_t{63}) / 64);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      set.words_[i / 8] |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * (i % 8));
    if (size % 64 && set.words_.back() >> (size % 64)) return std::nullopt;
    for (const std::uint64_t word : set.words_) set.count_ += static_cast<std::uint32_t>(std::popcount(word));
    return set;
  }

 private:
  std::uint32_t count_ = 0;
  std::vector<std::uint64_t> words_;
};

}  // namespace echoline::overlay
