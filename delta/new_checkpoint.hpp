// Writes a new checkpoint from an old one and a patch. It appears under its name complete, durable and verified, or not
// at all; no existing file is overwritten.
#pragma once
#include <filesystem>
#include <span>

#include "delta/checkpoint.hpp"
#include "delta/in_place.hpp"
#include "delta/patch.hpp"

namespace echoline::delta {

// Writes the delta's result as `target`: a file if `prev` is one, otherwise a folder with the same files. Headers,
// metadata and the order of tensors are those of `prev`. Copies a folder's other files too (configuration, tokenizer,
// index), but not its subfolders or weights outside the checkpoint. Errors as those of resolve_delta(); kInvalid if
// `target` exists.
Result<PatchInfo> apply_to_new(const Checkpoint& prev, std::span<const std::byte> patch,
                               const std::filesystem::path& target, const ApplyOptions& options = {});

// Writes the state of a snapshot, which it holds in memory. With `like`, uses its files and headers as above; kInvalid
// if its tensors differ. Without, `target` is a file if it ends in .safetensors, and otherwise a folder as written by
// write_checkpoint().
Result<PatchInfo> unpack_snapshot(std::span<const std::byte> patch, const Checkpoint* like,
                                  const std::filesystem::path& target, const ApplyOptions& options = {});

}  // namespace echoline::delta
