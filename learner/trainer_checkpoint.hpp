// Everything a trainer needs to go on after a crash as if nothing had happened, bit for bit.
//
// Layout of the folder:
//   step-000000012/trainer.safetensors   master/<name>, moment1/<name>, moment2/<name> (F32), torch_generator (U8)
//   step-000000012/trainer.json          steps, updates, seed, config digest, digest of the tensors
//   LATEST                               the name of the newest complete folder
// A checkpoint is written into a folder of its own, synced, renamed, and only then named by LATEST, so a crash at any
// point leaves the previous one in force. The policy is not stored: it is the masters rounded to bf16.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "base/result.hpp"
#include "learner/trainer.hpp"

namespace echoline::learner {

// Writes a checkpoint of `trainer` below `folder` (made when absent), then removes all but the newest `keep_last`
// (at least 1). `config_digest` identifies the settings of the run. Returns the checkpoint's folder. kIo, kExhausted.
Result<std::filesystem::path> save_checkpoint(const std::filesystem::path& folder, const Trainer& trainer,
                                              std::string_view config_digest, std::int64_t keep_last = 2);

// Restores the checkpoint LATEST names into a trainer of the same model and settings, and the torch CPU generator of
// this process. Nothing changes on error: kNotFound when there is no checkpoint, kInvalid when it is of another run
// configuration or model, kCorrupt when its bytes are not what was written. Returns the step it continues from.
Result<std::int64_t> load_checkpoint(const std::filesystem::path& folder, Trainer& trainer,
                                     std::string_view config_digest);

}  // namespace echoline::learner
