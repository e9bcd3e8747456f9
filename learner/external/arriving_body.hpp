// The body of a call while it arrives: small ones in ordinary memory, large ones in a file (base/file_memory.hpp),
// because a policy may be larger than the machine's memory. Private to learner/external/.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "base/file_memory.hpp"
#include "base/result.hpp"
#include "overlay/slice.hpp"

namespace echoline::learner {

class ArrivingBody {
 public:
  // At most `bytes_max` bytes will arrive. They may be in a file below `folder`; if that is empty, never.
  explicit ArrivingBody(std::uint64_t bytes_max = 0, std::filesystem::path folder = {})
      : bytes_max_(bytes_max), folder_(std::move(folder)) {}

  // kExhausted: the file's disk is full, or more than `bytes_max` bytes arrive.
  Status append(std::string_view bytes);
  std::uint64_t size() const { return size_; }
  // Returns all bytes. Call it last.
  overlay::Slice finish();

 private:
  std::uint64_t bytes_max_;
  std::filesystem::path folder_;
  std::uint64_t size_ = 0;
  std::string text_;                  // the body, if it is small
  std::shared_ptr<FileMemory> file_;  // the body, if it is large
};

// The bytes of a text, which the slice owns.
overlay::Slice slice_of(std::string text);
inline std::string_view text_of(const overlay::Slice& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace echoline::learner
