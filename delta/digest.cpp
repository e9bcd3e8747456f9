// Hashes leaves, tensors and states, on several threads.
#include "delta/digest.hpp"

#include <algorithm>

#include "base/parallel.hpp"
#include "delta/block.hpp"
#include "delta/bytes.hpp"

namespace echoline::delta {
namespace {

// Prefix of the bytes that are hashed for a state, so that they never equal those hashed for a tensor. 2 is the
// version.
constexpr std::string_view kStateDomain = "echoline.state.2";

}  // namespace

Digest digest_bytes(std::span<const std::byte> bytes) {
  std::uint64_t low = 0, high = 0;
  kernels().hash(bytes.data(), bytes.size(), &low, &high);
  Digest digest;
  // Big-endian, so that hex() prints the hash as one number.
  store(digest.bytes.data(), __builtin_bswap64(high));
  store(digest.bytes.data() + 8, __builtin_bswap64(low));
  return digest;
}

void digest_leaves(std::span<const std::byte> bytes, Digest* to) {
  for (std::size_t leaf = 0; leaf < bytes.size(); leaf += kLeafBytes)
    *to++ = digest_bytes(bytes.subspan(leaf, std::min(kLeafBytes, bytes.size() - leaf)));
}

Digest digest_tensor(const TensorView& tensor, std::span<const Digest> leaves) {
  ByteVector hashed;
  // 4: type, rank, and two bytes for the length of the name. kRankMax and kNameBytesMax fit in these bytes.
  hashed.reserve(4 + tensor.name.size() + 8 * tensor.shape.size() + sizeof(Digest) * leaves.size());
  put(hashed, static_cast<std::uint8_t>(tensor.dtype));
  put(hashed, static_cast<std::uint8_t>(tensor.shape.size()));
  put(hashed, static_cast<std::uint16_t>(tensor.name.size()));
  put_bytes(hashed, as_byte_span(tensor.name));
  for (const std::int64_t dim : tensor.shape) put(hashed, static_cast<std::uint64_t>(dim));
  for (const Digest& leaf : leaves) put_bytes(hashed, leaf.bytes);
  return digest_bytes(hashed);
}

Digest digest_tensor(const TensorView& tensor) {
  std::vector<Digest> leaves(leaf_count(tensor.bytes.size()));
  digest_leaves(tensor.bytes, leaves.data());
  return digest_tensor(tensor, leaves);
}

Digest state_digest_of_tensors(std::span<const Digest> tensors) {
  ByteVector hashed;
  hashed.reserve(kStateDomain.size() + 8 + sizeof(Digest) * tensors.size());
  put_bytes(hashed, as_byte_span(kStateDomain));
  put(hashed, static_cast<std::uint64_t>(tensors.size()));
  for (const Digest& digest : tensors) put_bytes(hashed, digest.bytes);
  return digest_bytes(hashed);
}

LeafDigests zeroed_leaf_digests(const StateView& state) {
  LeafDigests leaves(state.size());
  for (std::size_t i = 0; i < state.size(); ++i) leaves[i].resize(leaf_count(state[i].bytes.size()));
  return leaves;
}

LeafDigests leaf_digests_of(const StateView& state, unsigned threads) {
  constexpr std::size_t kTaskBytes = 64 * kLeafBytes;  // a thread hashes this many at a time
  struct Task {
    std::size_t tensor, first_byte;
  };
  std::vector<Task> tasks;
  LeafDigests leaves = zeroed_leaf_digests(state);
  for (std::size_t i = 0; i < state.size(); ++i) {
    for (std::size_t first_byte = 0; first_byte < state[i].bytes.size(); first_byte += kTaskBytes)
      tasks.push_back({.tensor = i, .first_byte = first_byte});
  }
  for_each_parallel(tasks.size(), threads, [&](unsigned, std::size_t task_index) {
    const auto [tensor, first_byte] = tasks[task_index];
    const ByteSpan bytes = state[tensor].bytes;
    digest_leaves(bytes.subspan(first_byte, std::min(kTaskBytes, bytes.size() - first_byte)),
                  leaves[tensor].data() + first_byte / kLeafBytes);
  });
  return leaves;
}

Digest state_digest_of_leaves(const StateView& state, const LeafDigests& leaves) {
  std::vector<Digest> digests;
  digests.reserve(state.size());
  for (std::size_t i = 0; i < state.size(); ++i) digests.push_back(digest_tensor(state[i], leaves[i]));
  return state_digest_of_tensors(digests);
}

Result<Digest> digest_state(const StateView& state, unsigned threads) {
  ECHO_ASSIGN(const StateView sorted, canonical(state));
  return state_digest_of_leaves(sorted, leaf_digests_of(sorted, threads));
}

}  // namespace echoline::delta
