// Writes to tensors (patch.hpp) that own their positions and values.
#pragma once
#include <memory>
#include <utility>

#include "delta/patch.hpp"

namespace echoline::delta {

// `write` with these positions and values.
inline TensorWrite in_own_memory(TensorWrite write, RawVector<std::uint32_t> positions, RawVector<std::byte> values) {
  const auto memory = std::make_shared<std::pair<RawVector<std::uint32_t>, RawVector<std::byte>>>(std::move(positions),
                                                                                                  std::move(values));
  write.positions = memory->first;
  write.values = memory->second;
  write.memory = memory;
  return write;
}

}  // namespace echoline::delta
