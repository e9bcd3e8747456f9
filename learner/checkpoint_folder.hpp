// The checkpoints of a run, for any trainer. A checkpoint is complete or absent. After a restart, the run goes on from
// the newest one. A checkpoint's policy is a Hugging Face directory.
//
//   step-000000012/trainer.json          at least format, steps and policy_digest (of the whole policy); with a
//                                        low-rank adapter also base_digest (of the weights that it adapts)
//   step-000000012/model/                the policy as a Hugging Face directory. A low-rank adapter's base never
//                                        changes, so all checkpoints share its files by hard links.
//   LATEST                               the name of the newest complete folder
//   damaged-step-000000012/              a checkpoint that could not be read when the run was resumed.
// A checkpoint is written into its own folder, synced, renamed, and only then named by LATEST. So after a crash at any
// point, the previous one is still valid.
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
#include "delta/tensor.hpp"

namespace echoline::model {
struct ModelFiles;
}

namespace echoline::learner {

inline constexpr std::string_view kCheckpointState = "trainer.json", kCheckpointModel = "model";
inline constexpr std::string_view kReferencePolicyFile =
    "reference.safetensors";                          // the policy that the KL penalty compares with
inline constexpr std::int64_t kCheckpointFormat = 2;  // format 1 had no model/ and no digests of policies

// `write` fills a new folder below `folder` (created if absent), which becomes the checkpoint of `step`. Then all but
// the newest `keep_last` (at least 1) are removed. Returns the checkpoint's folder, or the error of `write`, kIo or
// kExhausted.
Result<std::filesystem::path> add_checkpoint(const std::filesystem::path& folder, std::int64_t step,
                                             std::int64_t keep_last,
                                             const std::function<Status(const std::filesystem::path&)>& write);

// Writes `policy` into `target`/model. `target`: the new folder that add_checkpoint() passes to `write`. `folder`: the
// checkpoints, whose newest one shares an unchanged base. Returns the fields of trainer.json that describe the policy.
Result<nlohmann::json> write_policy(const std::filesystem::path& target, const std::filesystem::path& folder,
                                    const model::ModelFiles& files, const delta::StateView& policy);

// Reads a checkpoint's trainer.json. kCorrupt: a required field is missing. kInvalid: the format of another program
// version.
Result<nlohmann::json> read_checkpoint_state(const std::filesystem::path& checkpoint);

struct ResumeReport {
  std::int64_t step = 0;
  struct Damaged {
    std::string name, reason;
  };
  std::vector<Damaged> damaged;  // newer checkpoints that could not be read, renamed to damaged-<name>
};

// `read` restores a checkpoint and returns its step, or fails and changes nothing. It is called with the checkpoint
// that LATEST names, then with older ones. If it returns kInvalid, the search ends with that error. After any other
// error the checkpoint counts as damaged, and the next one is tried. kNotFound: no checkpoint. kCorrupt: all are
// damaged.
Result<ResumeReport> read_newest_checkpoint(
    const std::filesystem::path& folder, const std::function<Result<std::int64_t>(const std::filesystem::path&)>& read);

// A checkpoint's step and its Hugging Face directory.
struct StoredPolicy {
  std::int64_t step = 0;
  std::filesystem::path model;
  std::string digest;  // of the policy
};
// Finds the checkpoint of `step` (absent: the one that LATEST names) below `folder`. The message of kNotFound lists the
// existing steps.
Result<StoredPolicy> find_policy(const std::filesystem::path& folder, std::optional<std::int64_t> step = {});

}  // namespace echoline::learner
