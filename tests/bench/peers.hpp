// Encodings of weight updates that others have published, rebuilt from their descriptions, to measure ours against on
// the same pairs. Each has a decoder, so that its size is that of something that can be read back.
//
// They are given the easiest case: one thread, no digest, no checksum, and a receiver that knows names and shapes.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "delta/tensor.hpp"

namespace echoline::bench {

using Blob = std::vector<std::byte>;

struct Peer {
  std::string name;
  std::string description;
  Result<Blob> (*encode)(const delta::StateView& prev, const delta::StateView& cur);
  // Turns `state`, which holds the old version, into the new one.
  Status (*apply)(std::span<const std::byte> blob, delta::OwnedState& state);
};

// - LEB128 gaps: per tensor the number of changes, then for each the gap to the one before as LEB128 and the new value.
//   The encoding that SparrowRL's delta transfer describes.
// - PULSE v3.1 (grail): one frame of zstd level 1 over, per tensor, row deltas, column deltas (from the start of a row
//   where the row changes) and new values, in the narrowest of u8/u16/i32 and u16/i32; a JSON header with the layout.
// - slime, mode `overwrite`: per tensor a frame of zstd level 1 over u32 count, u32 positions of changed *bytes* and
//   the new bytes.
// - zstd --patch-from --single-thread: level 3 with the old weights as prefix, a window over all of them and
//   long-distance matching. The copies into one piece of memory are part of its time. (Without --single-thread the
//   program compresses in jobs of which only the first sees all of the prefix, and the result is many times larger.)
const std::vector<Peer>& peers();

}  // namespace echoline::bench
