// A new checkpoint on disk from an old one and a patch. It appears under its name complete, durable and verified, or
// not at all; nothing that exists is overwritten.
#pragma once
#include <filesystem>
#include <span>

#include "delta/checkpoint.hpp"
#include "delta/in_place.hpp"
#include "delta/patch.hpp"

namespace echoline::delta {

// Writes the delta's result as `target`: a file when `prev` is one, otherwise a folder with the same files. Headers,
// metadata and the order of tensors stay those of `prev`. A folder's other files are copied too (configuration,
// tokenizer, index), but neither its subfolders nor weights that do not belong to the checkpoint. Errors are those of
// resolve_delta(); kInvalid when `target` exists.
Result<PatchInfo> apply_to_new(const Checkpoint& prev, std::span<const std::byte> patch,
                               const std::filesystem::path& target, const ApplyOptions& options = {});

// Writes the state of a snapshot, which is held in memory meanwhile. With `like`, its files and headers are taken over
// as above; kInvalid when its tensors are others. Without, `target` is a file when it ends in .safetensors and
// otherwise a folder as write_checkpoint() makes it.
Result<PatchInfo> unpack_snapshot(std::span<const std::byte> patch, const Checkpoint* like,
                                  const std::filesystem::path& target, const ApplyOptions& options = {});

}  // namespace echoline::delta
