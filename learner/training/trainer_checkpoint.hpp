// Everything a trainer needs to go on after a crash as if nothing had happened, bit for bit.
//
// Beside what every checkpoint has (learner/checkpoint_folder.hpp):
//   step-000000012/trainer.safetensors   master/<name>, moment1/<name>, moment2/<name> (F32), torch_generator (U8);
//                                        8-bit moments are I8 and U8, with scale1/<name>, scale2/<name> (F32)
//   step-000000012/trainer.json          format, steps, updates, seed, config digest, digests of the tensors, of the
//                                        policy and of the reference policy ("" without one)
//   reference.safetensors                the reference policy of a KL term, with its digest in the metadata
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/result.hpp"
#include "learner/checkpoint_folder.hpp"
#include "learner/training/trainer.hpp"
#include "model/model_files.hpp"

namespace echoline::learner {

// What a checkpoint must agree with.
struct CheckpointOf {
  std::string config_digest;     // of the run's settings
  std::string reference_digest;  // of the reference policy; empty without one
};

// Writes a checkpoint of `trainer` below `folder` (made when absent), then removes all but the newest `keep_last`
// (at least 1). Returns the checkpoint's folder. kIo, kExhausted.
Result<std::filesystem::path> save_checkpoint(const std::filesystem::path& folder, const Trainer& trainer,
                                              const model::ModelFiles& files, const CheckpointOf& of,
                                              std::int64_t keep_last = 2);

// Restores the checkpoint LATEST names, or where that one is damaged the newest that is not, into a trainer of the same
// model and settings, and the torch CPU generator of this process. Nothing changes on error: kNotFound when there is no
// checkpoint, kInvalid when it is of another run configuration or model, kCorrupt when none has the bytes that were
// written.
Result<Resumed> load_checkpoint(const std::filesystem::path& folder, Trainer& trainer, const CheckpointOf& of);

// Keeps `policy` as the reference of a KL term; returns its digest.
Result<std::string> freeze_reference(const std::filesystem::path& folder, const delta::OwnedState& policy);
// Loads it into `model`; returns its digest. kNotFound when none was kept, kCorrupt when it is not what was written.
Result<std::string> load_reference(const std::filesystem::path& folder, model::Transformer& model);

}  // namespace echoline::learner
