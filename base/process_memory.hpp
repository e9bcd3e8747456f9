// This process's memory, by the system and by the allocator.
#pragma once
#include <optional>

#include "base/units.hpp"

namespace echoline {

struct ProcessMemory {
  Bytes resident;             // now
  Bytes resident_max;         // the highest so far
  std::optional<Bytes> heap;  // what malloc() and new have in use; absent if the C library does not report it
};

// Thread-safe. Takes microseconds, or milliseconds if the heap has many free pieces. Values that the system does not
// report are zero.
ProcessMemory process_memory();

}  // namespace echoline
