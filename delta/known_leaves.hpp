// patch.hpp's calls for a program that makes a delta and proves it: what one of them hashes the other need not.
#pragma once
#include <vector>

#include "delta/patch.hpp"

namespace echoline::delta {

// Of each tensor in canonical order, the digests of its leaves (digest.hpp).
using LeafDigests = std::vector<std::vector<Digest>>;

// `base_leaves`, unless null, gets the digests of the previous state, or nothing where options.base is given.
Result<PatchStats> write_delta(const StateView& prev, const StateView& cur, const PatchSink& sink,
                               const EncodeOptions& options, LeafDigests* base_leaves);

// `leaves` are those of `state`.
Result<PatchInfo> resolve_delta(std::span<const std::byte> patch, const StateView& state, LeafDigests leaves,
                                const WriteSink& sink, const DecodeOptions& options);

}  // namespace echoline::delta
