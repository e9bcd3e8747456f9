// A trainer's complete state. A resumed trainer continues bit for bit as if it had not crashed.
//
// In addition to the files of every checkpoint (learner/checkpoint_folder.hpp):
//
//   step-000000012/trainer.safetensors   master/<name>, moment1/<name>, moment2/<name> (F32), torch_generator (U8);
//                                        8-bit moments are I8 and U8, with scale1/<name>, scale2/<name> (F32).
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

// Digests that must match those in a checkpoint.
struct CheckpointDigests {
  std::string config_digest;     // of the run's settings
  std::string reference_digest;  // of the reference policy; empty without one
};

// Writes a checkpoint of `trainer` below `folder` (created if absent), then removes all but the newest `keep_last` (at
// least 1). Returns the checkpoint's folder, or kIo or kExhausted.
Result<std::filesystem::path> save_checkpoint(const std::filesystem::path& folder, const Trainer& trainer,
                                              const model::ModelFiles& files, const CheckpointDigests& digests,
                                              std::int64_t keep_last = 2);

// Restores the checkpoint that LATEST names, or the newest undamaged one, into a trainer of the same model and
// settings. Also restores this process's torch CPU generator. Nothing changes on error. kNotFound: no checkpoint.
// kInvalid: it belongs to another run configuration or model. kCorrupt: every checkpoint is damaged.
Result<ResumeReport> load_checkpoint(const std::filesystem::path& folder, Trainer& trainer,
                                     const CheckpointDigests& digests);

// Keeps `policy` as the reference of a KL term; returns its digest.
Result<std::string> freeze_reference(const std::filesystem::path& folder, const delta::OwnedState& policy);
// Loads the kept reference policy into `model`; returns its digest. kNotFound: none was kept. kCorrupt: it is damaged.
Result<std::string> load_reference(const std::filesystem::path& folder, model::Transformer& model);

}  // namespace echoline::learner
