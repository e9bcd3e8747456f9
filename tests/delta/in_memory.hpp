// Patches and copies of states in memory, for tests and benchmarks. The program streams patches and reads states from
// files.
#pragma once
#include <algorithm>
#include <vector>

#include "delta/patch.hpp"

namespace echoline::delta {

inline Result<std::vector<std::byte>> in_memory(const std::function<Result<PatchStats>(const PatchSink&)>& write,
                                                PatchStats* stats) {
  std::vector<std::byte> bytes;
  ECHO_ASSIGN(const PatchStats done, write([&](std::span<const std::byte> part) {
                bytes.insert(bytes.end(), part.begin(), part.end());
                return ok();
              }));
  if (stats) *stats = done;
  return bytes;
}

inline Result<std::vector<std::byte>> encode_delta(const StateView& prev, const StateView& cur,
                                                   const EncodeOptions& options = {}, PatchStats* stats = nullptr) {
  return in_memory([&](const PatchSink& sink) { return write_delta(prev, cur, sink, options); }, stats);
}
inline Result<std::vector<std::byte>> encode_snapshot(const StateView& cur, const EncodeOptions& options = {},
                                                      PatchStats* stats = nullptr) {
  return in_memory([&](const PatchSink& sink) { return write_snapshot(cur, sink, options); }, stats);
}

}  // namespace echoline::delta
