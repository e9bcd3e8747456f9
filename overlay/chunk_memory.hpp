// Memory for chunks, used again and again: fresh pages from the system cost more than everything else a relay does.
#pragma once
#include <cstddef>
#include <memory>

namespace echoline::overlay {

// Uninitialised memory for `size` bytes (at most 1 MiB is kept for the next caller, at most kKeptBytes of all). Any
// thread may call it, and drop the last reference.
std::shared_ptr<std::byte> chunk_memory(std::size_t size);

}  // namespace echoline::overlay
