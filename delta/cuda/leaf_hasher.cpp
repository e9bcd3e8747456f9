// Hashes leaves on the device, short ones on the host; Device::digest() and apply() call it.
#include "delta/cuda/leaf_hasher.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace echoline::delta::cuda {
namespace {

std::uint32_t leaf_bytes(const StateView& tensors, const LeafRef& ref) {
  return static_cast<std::uint32_t>(
      std::min<std::uint64_t>(kLeafBytes, tensors[ref.tensor].bytes.size() - ref.leaf * kLeafBytes));
}

}  // namespace

Status LeafHasher::prepare(const std::shared_ptr<DeviceBackend>& backend, const StateView& tensors,
                           std::vector<LeafRef> leaves) {
  leaves_ = std::move(leaves);
  if (leaves_.empty()) return ok();
  // The memory holds the table, then the digests, then the content of short leaves, which the host hashes.
  const std::uint64_t digests_offset = leaves_.size() * sizeof(HashLeaf);
  const std::uint64_t shorts_offset = digests_offset + leaves_.size() * sizeof(Digest);
  const auto is_short = [&](const LeafRef& ref) { return leaf_bytes(tensors, ref) <= kShortLeafBytes; };
  const auto short_count = static_cast<std::uint64_t>(std::count_if(leaves_.begin(), leaves_.end(), is_short));
  ECHO_TRY(memory_.reserve(backend, shorts_offset + short_count * kShortSlotBytes));
  std::byte* const device = memory_.device.data();
  table_ = {reinterpret_cast<HashLeaf*>(memory_.host.data()), leaves_.size()};
  digests_ = {memory_.host.data() + digests_offset, leaves_.size() * sizeof(Digest)};
  shorts_ = {memory_.host.data() + shorts_offset, short_count * kShortSlotBytes};
  job_ = {.leaves = reinterpret_cast<const HashLeaf*>(device),
          .leaf_count = static_cast<std::uint32_t>(leaves_.size()),
          .digests = reinterpret_cast<std::uint64_t*>(device + digests_offset),
          .shorts = device + shorts_offset};
  std::uint32_t next_slot = 0;
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    const LeafRef& ref = leaves_[i];
    table_[i] = {.data = tensors[ref.tensor].bytes.data() + ref.leaf * kLeafBytes,
                 .bytes = leaf_bytes(tensors, ref),
                 .short_slot = is_short(ref) ? next_slot++ : 0};
  }
  return backend->copy_in(device, memory_.host.data(), digests_offset);
}

Status LeafHasher::start(DeviceBackend& backend) {
  if (leaves_.empty()) return ok();
  ECHO_TRY(backend.run(job_));
  // One copy, because the short leaves follow the digests.
  return backend.copy_out(digests_.data(), reinterpret_cast<const std::byte*>(job_.digests),
                          digests_.size() + shorts_.size());
}

void LeafHasher::store_digests(const StateView& tensors, LeafDigests& leaves) const {
  for (std::size_t i = 0; i < tensors.size(); ++i) leaves[i].resize(leaf_count(tensors[i].bytes.size()));
  for (std::size_t i = 0; i < leaves_.size(); ++i) {
    Digest& digest = leaves[leaves_[i].tensor][leaves_[i].leaf];
    if (table_[i].bytes <= kShortLeafBytes)
      digest = digest_bytes(shorts_.subspan(std::size_t{table_[i].short_slot} * kShortSlotBytes, table_[i].bytes));
    else
      std::memcpy(digest.bytes.data(), digests_.data() + i * sizeof(Digest), sizeof(Digest));
  }
}

std::uint64_t LeafHasher::bytes() const {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < leaves_.size(); ++i) sum += table_[i].bytes;
  return sum;
}

}  // namespace echoline::delta::cuda
