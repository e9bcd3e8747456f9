#include "data_plane/run_spec.hpp"

#include <zstd.h>

#include <algorithm>

namespace echoline::data_plane {

Result<std::vector<schema::RunSpecPart>> cut_run_spec(const schema::RunSpec& spec) {
  const std::string plain = spec.SerializeAsString();
  if (plain.size() > kRunSpecBytesMax)
    return fail(Code::kExhausted, "run specification", "{} bytes, limit {}: is tokenizer.json that large?",
                plain.size(), kRunSpecBytesMax);
  std::string packed(ZSTD_compressBound(plain.size()), '\0');
  const std::size_t size = ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), 3);
  if (ZSTD_isError(size) != 0) return fail(Code::kInternal, "run specification", "zstd: {}", ZSTD_getErrorName(size));
  packed.resize(size);
  std::vector<schema::RunSpecPart> parts((size + kRunSpecPartBytes - 1) / kRunSpecPartBytes);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].set_index(static_cast<std::uint32_t>(i));
    parts[i].set_count(static_cast<std::uint32_t>(parts.size()));
    parts[i].set_data(packed.substr(i * kRunSpecPartBytes, kRunSpecPartBytes));
  }
  return parts;
}

Result<std::optional<schema::RunSpec>> RunSpecAssembler::add(const schema::RunSpecPart& part) {
  if (part.index() != next_ || part.index() >= part.count())
    return fail(Code::kCorrupt, "run specification", "expected part {}, found part {} of {}", next_, part.index(),
                part.count());
  if (bytes_.size() + part.data().size() > ZSTD_compressBound(kRunSpecBytesMax))
    return fail(Code::kCorrupt, "run specification", "more than {} compressed bytes", kRunSpecBytesMax);
  bytes_ += part.data();
  if (++next_ < part.count()) return std::optional<schema::RunSpec>();

  const unsigned long long size = ZSTD_getFrameContentSize(bytes_.data(), bytes_.size());
  if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN || size > kRunSpecBytesMax)
    return fail(Code::kCorrupt, "run specification", "expected a zstd frame of at most {} bytes", kRunSpecBytesMax);
  std::string plain(size, '\0');
  const std::size_t written = ZSTD_decompress(plain.data(), plain.size(), bytes_.data(), bytes_.size());
  if (ZSTD_isError(written) != 0 || written != size)
    return fail(Code::kCorrupt, "run specification", "zstd: {}",
                ZSTD_isError(written) != 0 ? ZSTD_getErrorName(written) : "shorter than declared");
  schema::RunSpec spec;
  if (!spec.ParseFromString(plain)) return fail(Code::kCorrupt, "run specification", "not a serialised RunSpec");
  next_ = 0;
  bytes_.clear();
  return std::optional<schema::RunSpec>(std::move(spec));
}

}  // namespace echoline::data_plane
