// The checkpoints of a run, whatever its trainer keeps in them: made whole or not at all, the newest found again, its
// policy a Hugging Face directory.
//
//   step-000000012/trainer.json          at least format, steps, and policy_digest, the digest of the policy
//   step-000000012/model/                the policy as a Hugging Face directory
//   LATEST                               the name of the newest complete folder
//   damaged-step-000000012/              what could not be read when a run was resumed
// A checkpoint is written into a folder of its own, synced, renamed, and only then named by LATEST, so a crash at any
// point leaves the previous one in force.
#pragma once
#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.hpp"

namespace echoline::learner {

inline constexpr std::string_view kCheckpointState = "trainer.json", kCheckpointModel = "model";
inline constexpr std::string_view kCheckpointReference =
    "reference.safetensors";                          // beside the checkpoints: the policy to stay close to
inline constexpr std::int64_t kCheckpointFormat = 2;  // format 1 had no model/ and no digests of policies

// Has `write` fill a new folder below `folder` (made when absent), makes it the checkpoint of `step`, then removes all
// but the newest `keep_last` (at least 1). Returns the checkpoint's folder. Errors of `write`, kIo, kExhausted.
Result<std::filesystem::path> add_checkpoint(const std::filesystem::path& folder, std::int64_t step,
                                             std::int64_t keep_last,
                                             const std::function<Status(const std::filesystem::path&)>& write);

// trainer.json of a checkpoint, with what every one has: kCorrupt without, kInvalid for a format of another program.
Result<nlohmann::json> read_checkpoint_state(const std::filesystem::path& checkpoint);

struct Resumed {
  std::int64_t step = 0;
  struct Damaged {
    std::string name, reason;
  };
  std::vector<Damaged> damaged;  // newer checkpoints that could not be read, now called damaged-<name>
};

// Has `read` restore the checkpoint that LATEST names, or where that one is damaged the newest that is not; it returns
// the checkpoint's step, or leaves everything as it was. kNotFound when there is no checkpoint, kInvalid when `read`
// says so, kCorrupt when none could be read.
Result<Resumed> read_newest_checkpoint(const std::filesystem::path& folder,
                                       const std::function<Result<std::int64_t>(const std::filesystem::path&)>& read);

// A checkpoint's step and its Hugging Face directory.
struct StoredPolicy {
  std::int64_t step = 0;
  std::filesystem::path model;
  std::string digest;  // of the policy
};
// The checkpoint of `step` (absent: the one LATEST names) below `folder`. kNotFound lists the steps that are there.
Result<StoredPolicy> find_policy(const std::filesystem::path& folder, std::optional<std::int64_t> step = {});

}  // namespace echoline::learner
