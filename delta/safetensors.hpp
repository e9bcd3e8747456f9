// The safetensors file format: reading by memory map, writing atomically.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "delta/mapped_file.hpp"
#include "delta/tensor.hpp"

namespace echoline::delta {

// The "__metadata__" entry of a file.
using Metadata = std::map<std::string, std::string>;

// The content of a header; views point into the parsed data.
struct SafetensorsContent {
  StateView tensors;  // in canonical order (sorted by name)
  Metadata metadata;
};

// Parses a whole file in memory, strictly. The header has at most 100,000,000 bytes and starts with '{'. It has no
// duplicate or unknown keys, and only known types. Tensors fill the data without gap or overlap. Otherwise returns
// kInvalid; the message names `what` (a path) and, if a size is wrong, the expected and the found size.
Result<SafetensorsContent> parse_safetensors(std::span<const std::byte> file, std::string_view what);

// A safetensors file mapped read-only. The views of view() are valid while this object (or the one it was moved into)
// lives. The file must not be truncated meanwhile; replacing it by rename is fine.
class SafetensorsFile {
 public:
  // kNotFound or kIo if it cannot be opened, kInvalid if it is not a valid safetensors file.
  static Result<SafetensorsFile> open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  std::span<const std::byte> bytes() const { return mapping_.bytes(); }  // the whole file; the views point into it
  const StateView& view() const { return content_.tensors; }
  const Metadata& metadata() const { return content_.metadata; }

 private:
  SafetensorsFile() = default;
  std::filesystem::path path_;
  MappedFile mapping_;
  SafetensorsContent content_;
};

// Returns the bytes of the file that write_safetensors() would write.
Result<std::string> safetensors_bytes(const StateView& state, const Metadata& metadata = {});

// Writes `state` in one pass without a second copy in memory. Atomic: temporary file, fsync, rename, fsync of the
// folder. Tensors with larger elements come first, so that every tensor is aligned; then by name.
Status write_safetensors(const std::filesystem::path& path, const StateView& state, const Metadata& metadata = {});

}  // namespace echoline::delta
