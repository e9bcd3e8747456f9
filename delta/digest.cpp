#include "delta/digest.hpp"

#include <xxhash.h>

#include "delta/bytes.hpp"

namespace echoline::delta {
namespace {

constexpr std::string_view kStateDomain = "echoline.state.1";

Digest hash(ByteSpan bytes) {
  const XXH128_hash_t h = XXH3_128bits(bytes.data(), bytes.size());
  XXH128_canonical_t canonical_form;
  XXH128_canonicalFromHash(&canonical_form, h);
  Digest digest;
  std::memcpy(digest.bytes.data(), canonical_form.digest, digest.bytes.size());
  return digest;
}

}  // namespace

Digest digest_tensor(const TensorView& tensor) {
  ByteVector bound;
  put(bound, static_cast<std::uint8_t>(tensor.dtype));
  put(bound, static_cast<std::uint8_t>(tensor.shape.size()));
  put(bound, static_cast<std::uint16_t>(tensor.name.size()));
  put_bytes(bound, as_byte_span(tensor.name));
  for (const std::int64_t dim : tensor.shape) put(bound, static_cast<std::uint64_t>(dim));
  put_bytes(bound, hash(tensor.bytes).bytes);
  return hash(bound);
}

Digest combine_digests(std::span<const Digest> tensors) {
  ByteVector all;
  all.reserve(kStateDomain.size() + 8 + 16 * tensors.size());
  put_bytes(all, as_byte_span(kStateDomain));
  put(all, static_cast<std::uint64_t>(tensors.size()));
  for (const Digest& d : tensors) put_bytes(all, d.bytes);
  return hash(all);
}

Result<Digest> digest_state(const StateView& state) {
  ECHO_ASSIGN(const StateView sorted, canonical(state));
  std::vector<Digest> digests;
  digests.reserve(sorted.size());
  for (const TensorView& t : sorted) digests.push_back(digest_tensor(t));
  return combine_digests(digests);
}

}  // namespace echoline::delta
