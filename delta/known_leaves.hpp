// The calls of patch.hpp for a program that encodes a delta and then proves it: the proof takes over the digests of the
// base that the encoder has computed.
#pragma once
#include <vector>

#include "delta/patch.hpp"

namespace echoline::delta {

// The digests of each tensor's leaves (digest.hpp); tensors are in canonical order.
using LeafDigests = std::vector<std::vector<Digest>>;

// `base_leaves`, unless null, gets the digests of the previous state, or nothing where options.base is given.
Result<PatchStats> write_delta(const StateView& prev, const StateView& cur, const PatchSink& sink,
                               const EncodeOptions& options, LeafDigests* base_leaves);

// `leaves` are those of `state`.
Result<PatchInfo> resolve_delta(std::span<const std::byte> patch, const StateView& state, LeafDigests leaves,
                                const WriteSink& sink, const DecodeOptions& options);

}  // namespace echoline::delta
