// A hash table for the frequent lookups of a tokenizer, which maps a pair of integers to another pair. Internal to
// model.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

namespace echoline::model {

// Open addressing with linear probing, at most half full. An entry is 16 bytes, so a lookup usually touches one cache
// line.
class PairTable {
 public:
  struct Value {
    std::uint32_t first = 0, second = 0;
  };
  static constexpr std::uint64_t key(std::uint32_t a, std::uint32_t b) { return std::uint64_t(a) << 32 | b; }

  // Sets the value of `key`, which must not be kEmpty.
  void set(std::uint64_t key, Value value) {
    if ((size_ + 1) * 2 > slots_.size()) grow();
    Slot& slot = slots_[index(key)];
    if (slot.key == kEmpty) ++size_;
    slot = {key, value};
  }
  const Value* find(std::uint64_t key) const {
    if (size_ == 0) return nullptr;
    const Slot& slot = slots_[index(key)];
    return slot.key == kEmpty ? nullptr : &slot.value;
  }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  struct Slot {
    std::uint64_t key = kEmpty;
    Value value;
  };

  // Index of the slot of `key`, or of the empty slot in which it would be stored.
  std::size_t index(std::uint64_t key) const {
    const std::size_t mask = slots_.size() - 1;
    // Fibonacci hashing: a bit of the product depends on all lower bits of the key. From 8192 slots on, as with real
    // vocabularies, the bits from 20 on also depend on the first number of the pair, which is the key's upper half.
    std::size_t i = static_cast<std::size_t>(key * 0x9e3779b97f4a7c15u >> 20) & mask;
    while (slots_[i].key != key && slots_[i].key != kEmpty) i = (i + 1) & mask;
    return i;
  }
  void grow() {
    std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots_.empty() ? 16 : slots_.size() * 2));
    for (const Slot& slot : old)
      if (slot.key != kEmpty) slots_[index(slot.key)] = slot;
  }

  std::vector<Slot> slots_;  // their number is a power of two
  std::size_t size_ = 0;
};

}  // namespace echoline::model
