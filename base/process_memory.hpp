// The memory of this process, as the system and the allocator count it.
#pragma once
#include <optional>

#include "base/units.hpp"

namespace echoline {

struct ProcessMemory {
  Bytes resident;             // right now
  Bytes resident_max;         // the most so far
  std::optional<Bytes> heap;  // in use by malloc() and new; absent where the C library does not say
};

// Thread-safe. Takes microseconds, or milliseconds where the heap has many free pieces; zero where the system says
// nothing.
ProcessMemory process_memory();

}  // namespace echoline
