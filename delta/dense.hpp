// Dense coding: the whole content of a segment (a part of a tensor), one byte plane after the other. Plane i holds byte
// i of every element. Floats are first rotated by one bit, because the exponent then has its own plane, which has few
// values and compresses well. Internal to this folder; FORMAT.md, "Dense coding" and "Streams".
#pragma once
#include <memory>
#include <optional>

#include "base/result.hpp"
#include "delta/bytes.hpp"
#include "delta/content.hpp"
#include "delta/tensor.hpp"

namespace echoline::delta {

// A byte string in its form in a patch: unchanged or zstd-compressed, whichever is shorter.
struct Stream {
  bool compressed = false;
  std::size_t raw_bytes = 0;
  ByteSpan stored;  // a part of the patch
};
// Reads a stream whose content must have `raw_min` to `raw_max` bytes, without decompressing it.
Result<Stream> read_stream(ByteReader& reader, std::uint64_t raw_min, std::uint64_t raw_max);
// Writes the content; kCorrupt if its size differs from the declared one.
Status expand_stream(const Stream& stream, std::span<std::byte> to);

// Keeps its working memory between calls. Use one per thread.
class DenseEncoder {
 public:
  explicit DenseEncoder(int stream_level);  // zstd's, for encode_stream()
  ~DenseEncoder();
  // Appends the coding of `content`. Appends nothing and returns false if it needs more than `bytes_max`.
  bool encode(ByteSpan content, DType dtype, std::size_t bytes_max, ByteVector& out);
  // Estimates, from a sample of elements, the number of bytes that encode() needs. Repetitive content needs less.
  static double estimate_bytes(const Content& content, DType dtype);
  // Appends `raw` as a stream, with the level of the constructor. Returns false if it needs more than `bytes_max`.
  bool encode_stream(ByteSpan raw, std::size_t bytes_max, ByteVector& out);

 private:
  // Without a level, the stream is stored unchanged.
  bool encode_stream(ByteSpan raw, std::optional<int> level, std::size_t bytes_max, ByteVector& out);
  struct Context;
  std::unique_ptr<Context> context_;
};

// Decodes into all bytes of `to`. kCorrupt if malformed.
Status decode_dense(ByteSpan coded, DType dtype, std::span<std::byte> to);

}  // namespace echoline::delta
