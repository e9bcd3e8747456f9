// Compresses the run specification with zstd.
#include "data_plane/run_spec.hpp"

#include <zstd.h>

namespace echoline::data_plane {
namespace {

constexpr int kCompressionLevel = 3;  // zstd's default

}  // namespace

Result<std::string> pack_run_spec(const schema::RunSpec& spec) {
  const std::string plain = spec.SerializeAsString();
  if (plain.size() > kRunSpecBytesMax)
    return fail(Code::kExhausted, "run specification", "{} bytes, limit {}: check the size of tokenizer.json",
                plain.size(), kRunSpecBytesMax);
  std::string packed(ZSTD_compressBound(plain.size()), '\0');
  const std::size_t size = ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), kCompressionLevel);
  if (ZSTD_isError(size) != 0) return fail(Code::kInternal, "run specification", "zstd: {}", ZSTD_getErrorName(size));
  packed.resize(size);
  return packed;
}

Result<schema::RunSpec> unpack_run_spec(std::string_view packed) {
  // Checked before anything is unpacked, because a small frame can unpack to any size.
  const unsigned long long size = ZSTD_getFrameContentSize(packed.data(), packed.size());
  if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN || size > kRunSpecBytesMax)
    return fail(Code::kCorrupt, "run specification", "expected a zstd frame of at most {} bytes", kRunSpecBytesMax);
  std::string plain(size, '\0');
  const std::size_t unpacked_bytes = ZSTD_decompress(plain.data(), plain.size(), packed.data(), packed.size());
  if (ZSTD_isError(unpacked_bytes) != 0 || unpacked_bytes != size)
    return fail(Code::kCorrupt, "run specification", "zstd: {}",
                ZSTD_isError(unpacked_bytes) != 0 ? ZSTD_getErrorName(unpacked_bytes) : "shorter than declared");
  schema::RunSpec spec;
  if (!spec.ParseFromString(plain)) return fail(Code::kCorrupt, "run specification", "not a serialised RunSpec");
  return spec;
}

}  // namespace echoline::data_plane
