// A second decoder of patches, written from delta/FORMAT.md alone: element by element, trusting its input. It shares no
// code with delta/, so their agreement shows that the description is right.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace echoline::delta::reference {

struct Tensor {
  std::string name;
  int dtype = 0;
  std::vector<std::uint64_t> shape;
  std::vector<std::uint8_t> data;
};
using State = std::vector<Tensor>;

// The state in a snapshot, or the result of a delta on `base`. Throws std::runtime_error if a rule of the format is
// broken.
State decode(std::span<const std::byte> patch, State base);

}  // namespace echoline::delta::reference
