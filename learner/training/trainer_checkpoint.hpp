// Everything a trainer needs to go on after a crash as if nothing had happened, bit for bit.
//
// Layout of the folder:
//   step-000000012/trainer.safetensors   master/<name>, moment1/<name>, moment2/<name> (F32), torch_generator (U8)
//   step-000000012/trainer.json          format, steps, updates, seed, config digest, digests of the tensors, of the
//                                        policy and of the reference policy ("" without one)
//   step-000000012/model/                the policy (the masters rounded to bf16) as a Hugging Face directory
//   LATEST                               the name of the newest complete folder
//   reference.safetensors                the reference policy of a KL term, with its digest in the metadata
//   damaged-step-000000012/              what could not be read when a run was resumed
// A checkpoint is written into a folder of its own, synced, renamed, and only then named by LATEST, so a crash at any
// point leaves the previous one in force.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"
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

struct Resumed {
  std::int64_t step = 0;
  struct Damaged {
    std::string name, reason;
  };
  std::vector<Damaged> damaged;  // newer checkpoints that could not be read, now called damaged-<name>
};

// Restores the checkpoint LATEST names, or where that one is damaged the newest that is not, into a trainer of the same
// model and settings, and the torch CPU generator of this process. Nothing changes on error: kNotFound when there is no
// checkpoint, kInvalid when it is of another run configuration or model, kCorrupt when none has the bytes that were
// written.
Result<Resumed> load_checkpoint(const std::filesystem::path& folder, Trainer& trainer, const CheckpointOf& of);

// A checkpoint's step and its Hugging Face directory.
struct StoredPolicy {
  std::int64_t step = 0;
  std::filesystem::path model;
  std::string digest;  // of the policy
};
// The checkpoint of `step` (absent: the one LATEST names) below `folder`. kNotFound lists the steps that are there.
Result<StoredPolicy> find_policy(const std::filesystem::path& folder, std::optional<std::int64_t> step = {});

// Keeps `policy` as the reference of a KL term; returns its digest.
Result<std::string> freeze_reference(const std::filesystem::path& folder, const delta::OwnedState& policy);
// Loads it into `model`; returns its digest. kNotFound when none was kept, kCorrupt when it is not what was written.
Result<std::string> load_reference(const std::filesystem::path& folder, model::Transformer& model);

}  // namespace echoline::learner
