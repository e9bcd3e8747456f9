// A read-only piece of shared memory: chunks pass through a node in it without being copied.
#pragma once
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace echoline::overlay {

using SharedBytes = std::shared_ptr<const std::vector<std::byte>>;

// The memory lives as long as any slice of it.
class Slice {
 public:
  Slice() = default;
  Slice(std::shared_ptr<const std::byte> data, std::size_t length) : data_(std::move(data)), length_(length) {}
  explicit Slice(SharedBytes bytes) : length_(bytes ? bytes->size() : 0) {
    if (bytes) data_ = {bytes, bytes->data()};
  }
  explicit Slice(std::vector<std::byte> bytes)
      : Slice(std::make_shared<const std::vector<std::byte>>(std::move(bytes))) {}

  std::size_t size() const { return length_; }
  bool empty() const { return length_ == 0; }
  const std::byte* data() const { return data_.get(); }
  std::span<const std::byte> bytes() const { return {data_.get(), length_}; }
  // Whether the bytes of `next` are directly behind these, in the same memory.
  bool is_continued_by(const Slice& next) const {
    const bool same_owner = !data_.owner_before(next.data_) && !next.data_.owner_before(data_);
    return same_owner && data() + size() == next.data();
  }
  // Both together; `next` must continue this one.
  Slice joined_with(const Slice& next) const { return {data_, length_ + next.length_}; }
  // Bytes [offset, offset + length), which must lie within this slice.
  Slice part(std::size_t offset, std::size_t length) const { return {{data_, data_.get() + offset}, length}; }

 private:
  std::shared_ptr<const std::byte> data_;
  std::size_t length_ = 0;
};

}  // namespace echoline::overlay
