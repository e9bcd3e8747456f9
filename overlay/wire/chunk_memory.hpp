// Memory for chunks, in huge pages and used again and again: fresh small pages cost more than all else a relay does.
#pragma once
#include <cstddef>
#include <memory>

namespace echoline::overlay {

// Uninitialised memory for `size` bytes. What is dropped is kept for the next callers: 64 MiB of it for good, and more
// for as long as the system has no other use for it. Any thread may call it, and drop the last reference.
std::shared_ptr<std::byte> chunk_memory(std::size_t size);

}  // namespace echoline::overlay
