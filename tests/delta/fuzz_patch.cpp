// Fuzz target: bytes as a patch, unchanged and with a corrected checksum. No input may crash, a failed apply must leave
// the state alone, and an accepted patch must produce the promised digest.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "delta/patch.hpp"
#include "patch_frames.hpp"

using namespace echoline;
using namespace echoline::delta;

namespace {

const DecodeOptions kLimits{.state_bytes_max = 1 << 22, .tensors_max = 4096, .table_bytes_max = 1 << 16};

// The base of the deltas in the corpus.
OwnedState base_state() {
  auto state = OwnedState::empty_like({{"a", DType::kBF16, {40, 5}, {}}, {"b", DType::kF32, {9}, {}}});
  for (std::size_t t = 0; t < state->size(); ++t) {
    const auto bytes = state->mutable_bytes(t);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 37 + t);
  }
  state->seal();
  return std::move(state).value();
}

void require(bool condition) {
  if (!condition) std::abort();
}

void try_patch(std::span<const std::byte> patch) {
  const auto info = inspect(patch, kLimits);
  OwnedState state = base_state();
  const Digest before = state.digest();
  const Status applied = apply_delta(patch, state, kLimits);
  require(!applied || (info && *digest_state(state.view()) == info->result));
  require(applied || *digest_state(state.view()) == before);
  OwnedState arriving = base_state();
  DecodeOptions limits = kLimits;
  limits.threads = patch.size() % 8 == 0 ? 3 : 1;
  IncomingDelta incoming(arriving, limits);
  Status added = ok();
  for (std::size_t begin = 0, bytes = 1; added && begin < patch.size(); begin += bytes, bytes = bytes * 3 % 61 + 1)
    added = incoming.add(patch.subspan(begin, std::min(bytes, patch.size() - begin)));
  const bool applied_in_parts = added && incoming.apply();
  require(applied_in_parts == applied.has_value());
  require(*digest_state(arriving.view()) == *digest_state(state.view()));
  const auto decoded = decode_snapshot(patch, kLimits);
  require(!decoded || (info && *digest_state(decoded->view()) == info->result));
  IncomingSnapshot snapshot(limits);
  added = ok();
  for (std::size_t begin = 0, bytes = 1; added && begin < patch.size(); begin += bytes, bytes = bytes * 5 % 67 + 1)
    added = snapshot.add(patch.subspan(begin, std::min(bytes, patch.size() - begin)));
  auto in_parts = added ? snapshot.finish() : Result<OwnedState>(added.error());
  require(in_parts.has_value() == decoded.has_value());
  require(!in_parts || in_parts->digest() == *digest_state(decoded->view()));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  try_patch({bytes, size});
  test::Blob sealed(bytes, bytes + size);
  test::fix_checksums(sealed);
  try_patch(sealed);
  return 0;
}
