#include "data_plane/run_spec.hpp"

#include <zstd.h>

namespace echoline::data_plane {
namespace {

// Of a trajectory, beside its tokens: ids, digest, reward and its components.
constexpr std::uint64_t kTrajectoryBytes = 8192;
// A token id of up to 2^28; of a response also its log-probability, mask and text. Tokens of more text than this are
// rare, and never stand in a row.
constexpr std::uint64_t kPromptTokenBytes = 4, kTextBytesPerToken = 12;
constexpr std::uint64_t kResponseTokenBytes = 4 + 4 + 1 + kTextBytesPerToken;

}  // namespace

Result<std::string> pack_run_spec(const schema::RunSpec& spec) {
  const std::string plain = spec.SerializeAsString();
  if (plain.size() > kRunSpecBytesMax)
    return fail(Code::kExhausted, "run specification", "{} bytes, limit {}: is tokenizer.json that large?",
                plain.size(), kRunSpecBytesMax);
  std::string packed(ZSTD_compressBound(plain.size()), '\0');
  const std::size_t size = ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), 3);
  if (ZSTD_isError(size) != 0) return fail(Code::kInternal, "run specification", "zstd: {}", ZSTD_getErrorName(size));
  packed.resize(size);
  return packed;
}

Result<schema::RunSpec> unpack_run_spec(std::string_view packed) {
  const unsigned long long size = ZSTD_getFrameContentSize(packed.data(), packed.size());
  if (size == ZSTD_CONTENTSIZE_ERROR || size == ZSTD_CONTENTSIZE_UNKNOWN || size > kRunSpecBytesMax)
    return fail(Code::kCorrupt, "run specification", "expected a zstd frame of at most {} bytes", kRunSpecBytesMax);
  std::string plain(size, '\0');
  const std::size_t written = ZSTD_decompress(plain.data(), plain.size(), packed.data(), packed.size());
  if (ZSTD_isError(written) != 0 || written != size)
    return fail(Code::kCorrupt, "run specification", "zstd: {}",
                ZSTD_isError(written) != 0 ? ZSTD_getErrorName(written) : "shorter than declared");
  schema::RunSpec spec;
  if (!spec.ParseFromString(plain)) return fail(Code::kCorrupt, "run specification", "not a serialised RunSpec");
  return spec;
}

std::uint64_t submission_bytes_max(std::uint64_t rollouts, std::uint64_t prompt_tokens, std::uint64_t response_tokens) {
  return rollouts * (kTrajectoryBytes + prompt_tokens * kPromptTokenBytes + response_tokens * kResponseTokenBytes);
}

}  // namespace echoline::data_plane
