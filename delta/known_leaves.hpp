// Variants of patch.hpp's functions for a program that encodes a delta and then verifies it. The verification reuses
// the encoder's digests of the base, so that the base is hashed once.
#pragma once
#include <vector>

#include "delta/patch.hpp"

namespace echoline::delta {

// `base_leaves`, unless null, receives the digests of the previous state, or nothing if options.base is set.
Result<PatchStats> write_delta(const StateView& prev, const StateView& cur, const PatchSink& sink,
                               const EncodeOptions& options, LeafDigests* base_leaves);

// `leaves`: the digests of `state`.
Result<PatchInfo> resolve_delta(std::span<const std::byte> patch, const StateView& state, LeafDigests leaves,
                                const WriteSink& sink, const DecodeOptions& options);

}  // namespace echoline::delta
