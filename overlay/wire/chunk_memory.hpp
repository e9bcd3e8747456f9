// Reused memory for chunks, in huge pages. Page faults of fresh small pages cost a relay more than all its other
// work.
#pragma once
#include <cstddef>
#include <memory>

namespace echoline::overlay {

// Returns uninitialised memory for `size` bytes. Released memory is kept for later calls: 64 MiB permanently, more
// until the system needs it. Any thread may call this and may drop the last reference.
std::shared_ptr<std::byte> chunk_memory(std::size_t size);

}  // namespace echoline::overlay
