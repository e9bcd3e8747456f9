// Dense coding: the whole content of a segment, byte plane by byte plane. Floats are rotated by one bit first, so that
// the exponent has a plane of its own; it takes few values and compresses well. Internal to this folder; FORMAT.md,
// "Dense coding" and "Streams".
#pragma once
#include <memory>
#include <optional>

#include "base/result.hpp"
#include "delta/bytes.hpp"
#include "delta/content.hpp"
#include "delta/tensor.hpp"

namespace echoline::delta {

// A stream is a byte string, stored as it is or zstd-compressed, whichever is shorter; this is its form in a patch.
struct Stream {
  bool compressed = false;
  std::size_t raw_bytes = 0;
  ByteSpan stored;
};
// Reads one whose content must have `raw_min` to `raw_max` bytes, without decompressing it.
Result<Stream> read_stream(Reader& reader, std::uint64_t raw_min, std::uint64_t raw_max);
// The content; kCorrupt when it does not have exactly the declared size.
Status expand_stream(const Stream& stream, std::span<std::byte> to);

// Keeps its working memory between calls. One per thread.
class DenseEncoder {
 public:
  explicit DenseEncoder(int stream_level);
  ~DenseEncoder();
  // Appends the coding of `content`, or nothing and false when it takes more than `bytes_max`.
  bool encode(ByteSpan content, DType dtype, std::size_t bytes_max, ByteVector& out);
  // About how many bytes encode() takes, from the values of some elements. Content that repeats itself takes less.
  static double estimate(const Content& content, DType dtype);
  bool encode_stream(ByteSpan raw, std::size_t bytes_max, ByteVector& out);

 private:
  // Without a level, as it is.
  bool encode_stream(ByteSpan raw, std::optional<int> level, std::size_t bytes_max, ByteVector& out);
  struct Context;
  std::unique_ptr<Context> context_;
};

// Decodes into `to`, all of its bytes. kCorrupt when malformed.
Status decode_dense(ByteSpan coded, DType dtype, std::span<std::byte> to);

}  // namespace echoline::delta
