// Access to the memory and the remembered digests of an OwnedState; internal to this folder.
#pragma once
#include <span>
#include <vector>

#include "delta/tensor.hpp"

namespace echoline::delta {

class StateWriter {
 public:
  static std::span<std::byte> memory(OwnedState& state, std::size_t index);
  // Digests of all leaves, hashed where they are not remembered; those of sealed tensors are remembered.
  static std::vector<std::vector<Digest>> leaves(OwnedState& state, unsigned threads);
  static void remember(OwnedState& state, std::vector<std::vector<Digest>> leaves);
};

}  // namespace echoline::delta
