// Access to an OwnedState's memory and cached digests; internal to this folder.
#pragma once
#include <span>
#include <vector>

#include "delta/tensor.hpp"

namespace echoline::delta {

class StateWriter {
 public:
  // The tensor's memory. Unlike mutable_bytes(), keeps the tensor sealed and its digests cached.
  static std::span<std::byte> memory(OwnedState& state, std::size_t index);
  // Digests of all leaves, computed unless cached; caches those of sealed tensors.
  static std::vector<std::vector<Digest>> leaf_digests(OwnedState& state, unsigned threads);
  static void cache_leaf_digests(OwnedState& state, std::vector<std::vector<Digest>> leaves);
};

}  // namespace echoline::delta
