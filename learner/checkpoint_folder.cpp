// Writes and finds checkpoints, for the built-in and the external trainer and for commands that read a run's policies.
#include "learner/checkpoint_folder.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/files.hpp"
#include "base/os_code.hpp"
#include "delta/digest.hpp"
#include "model/policy.hpp"

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kCheckpointPrefix = "step-";
constexpr std::string_view kIncompleteName = "writing";  // of a checkpoint that is being written
constexpr std::string_view kDamagedPrefix = "damaged-";  // before the name of an unreadable checkpoint
constexpr std::string_view kLatest = "LATEST";
constexpr std::size_t kStepDigitsMax = 18;                               // more could overflow 64 bits
constexpr std::size_t kLatestBytesMax = 4096, kStateBytesMax = 1 << 20;  // of the files LATEST and trainer.json

Status sync_folder(const fs::path& path) {
  const Descriptor folder(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.get() < 0 || ::fsync(folder.get()) != 0) return os_error("sync folder", path);
  return ok();
}

Status rename_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  if (error)
    return fail(os_code(error.value()), "save checkpoint", "cannot rename {} to {}: {}", from.string(), to.string(),
                error.message());
  return ok();
}

// An unused folder name for `step`: "step-000000012", then "step-000000012.001" and so on. If the run was resumed from
// an earlier step, an older checkpoint of the same step keeps its folder until it is pruned.
fs::path unused_folder(const fs::path& folder, std::int64_t step) {
  const std::string name = fmt::format("{}{:09}", kCheckpointPrefix, step);
  fs::path path = folder / name;
  for (int suffix = 1; fs::exists(path); ++suffix) path = folder / fmt::format("{}.{:03}", name, suffix);
  return path;
}

// Names of the checkpoints in the order of their steps, because the steps in them are padded with zeros. The newest of
// equal steps is the last of them.
Result<std::vector<std::string>> checkpoint_names(const fs::path& folder) {
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    if (it->path().filename().string().starts_with(kCheckpointPrefix)) names.push_back(it->path().filename().string());
  if (error && error != std::errc::no_such_file_or_directory)
    return fail(Code::kIo, "list checkpoints", "{}: {}", folder.string(), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

// The step in a checkpoint's name, which may end with a suffix such as ".001".
std::int64_t step_of(std::string_view name) {
  std::int64_t step = 0;
  name.remove_prefix(kCheckpointPrefix.size());
  for (const char digit : name.substr(0, kStepDigitsMax)) {
    if (digit < '0' || digit > '9') break;
    step = step * 10 + (digit - '0');
  }
  return step;
}

// Removes all but the newest `keep_last` checkpoints, and never the one that LATEST names: after a resume from an
// earlier step, that one may be older than others.
Status prune(const fs::path& folder, std::string_view latest, std::int64_t keep_last) {
  ECHO_ASSIGN(const std::vector<std::string> names, checkpoint_names(folder));
  std::error_code error;
  std::int64_t surplus = static_cast<std::int64_t>(names.size()) - keep_last;
  for (const std::string& name : names) {
    if (surplus <= 0 || error) break;
    if (name == latest) continue;
    fs::remove_all(folder / name, error);
    --surplus;
  }
  if (error) return fail(Code::kIo, "prune checkpoints", "{}: {}", folder.string(), error.message());
  return ok();
}

// The name of the checkpoint that LATEST names; empty if that does not exist.
Result<std::string> read_latest(const fs::path& folder) {
  auto latest = read_file(folder / kLatest, kLatestBytesMax);
  if (!latest && latest.error().code != Code::kNotFound) return latest.error();
  std::string name = latest ? *latest : "";
  while (!name.empty() && name.back() == '\n') name.pop_back();
  // LATEST may be damaged: a name with '/' would lead out of the folder.
  const bool is_checkpoint_name = name.starts_with(kCheckpointPrefix) && name.find('/') == std::string::npos;
  return is_checkpoint_name && fs::exists(folder / name) ? name : std::string();
}

}  // namespace

Result<fs::path> add_checkpoint(const fs::path& folder, std::int64_t step, std::int64_t keep_last,
                                const std::function<Status(const fs::path&)>& write) try {
  ECHO_CHECK(keep_last >= 1, "keep_last is {}", keep_last);
  const fs::path incomplete = folder / kIncompleteName;
  fs::remove_all(incomplete);
  ECHO_TRY(make_folders(incomplete));
  const fs::path complete = unused_folder(folder, step);
  const auto save = [&]() -> Status {
    ECHO_TRY(write(incomplete));
    ECHO_TRY(rename_folder(incomplete, complete));
    ECHO_TRY(sync_folder(folder));
    return write_file_atomic(folder / kLatest, complete.filename().string() + "\n");
  };
  if (const Status saved = save(); !saved) {
    // The incomplete checkpoint takes space that the run and the next attempt need.
    std::error_code ignored;
    fs::remove_all(incomplete, ignored);
    fs::remove_all(complete, ignored);
    return saved.error();
  }
  // Prunes last, so that a crash before this line leaves one checkpoint too many rather than none.
  ECHO_TRY(prune(folder, complete.filename().string(), keep_last));
  return complete;
} catch (const std::exception& error) {
  return fail(Code::kIo, "save checkpoint", "{}: {}", folder.string(), error.what());
}

Result<nlohmann::json> write_policy(const fs::path& target, const fs::path& folder, const model::ModelFiles& files,
                                    const delta::StateView& policy) {
  ECHO_ASSIGN(const delta::StateView tensors, delta::canonical(policy));
  std::vector<delta::Digest> all_digests, base_digests;  // each tensor is read once, for both
  for (const delta::TensorView& tensor : tensors) {
    all_digests.push_back(delta::digest_tensor(tensor));
    if (!model::is_adapter_tensor(tensor.name)) base_digests.push_back(all_digests.back());
  }
  nlohmann::json fields = {{"policy_digest", delta::state_digest_of_tensors(all_digests).hex()}};
  std::optional<fs::path> same_base;
  if (files.config.adapter) {
    fields["base_digest"] = delta::state_digest_of_tensors(base_digests).hex();
    ECHO_ASSIGN(const std::string latest, read_latest(folder));
    if (!latest.empty()) {
      const auto state = read_checkpoint_state(folder / latest);
      if (state && state->value("base_digest", nlohmann::json()) == fields["base_digest"])
        same_base = folder / latest / kCheckpointModel;
    }
  }
  ECHO_TRY(model::save_model(target / kCheckpointModel, files, policy, model::kShardBytesMax, same_base));
  return fields;
}

Result<nlohmann::json> read_checkpoint_state(const fs::path& checkpoint) {
  constexpr auto kOperation = "load checkpoint";
  const fs::path path = checkpoint / kCheckpointState;
  ECHO_ASSIGN(const std::string text, read_file(path, kStateBytesMax));
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto has_integer = [&](const char* key) { return json.contains(key) && json[key].is_number_integer(); };
  if (!json.is_object() || !has_integer("format") || !has_integer("steps"))
    return fail(Code::kCorrupt, kOperation, "{}: expected an object with format and steps", path.string());
  if (json["format"] != 1 && json["format"] != kCheckpointFormat)
    return fail(Code::kInvalid, kOperation, "{}: format {}, this program reads formats 1 and {}", path.string(),
                json["format"].dump(), kCheckpointFormat);
  if (json["format"] != 1 && (!json.contains("policy_digest") || !json["policy_digest"].is_string()))
    return fail(Code::kCorrupt, kOperation, "{}: expected policy_digest", path.string());
  return json;
}

Result<ResumeReport> read_newest_checkpoint(const fs::path& folder,
                                            const std::function<Result<std::int64_t>(const fs::path&)>& read) try {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(std::vector<std::string> names, checkpoint_names(folder));
  ECHO_ASSIGN(const std::string latest, read_latest(folder));
  if (names.empty()) return fail(Code::kNotFound, kOperation, "{} holds no checkpoint", folder.string());
  // Newest first, but the one that LATEST names before all.
  std::reverse(names.begin(), names.end());
  std::stable_partition(names.begin(), names.end(), [&](const std::string& name) { return name == latest; });
  ResumeReport resumed;
  for (const std::string& name : names) {
    const auto step = read(folder / name);
    // kInvalid: the checkpoint is intact, but this program or configuration cannot use it, nor any older one.
    if (!step && step.error().code == Code::kInvalid) return step.error();
    if (!step) {
      resumed.damaged.push_back({name, step.error().message()});
      continue;
    }
    resumed.step = *step;
    // Renamed only now: if no checkpoint can be read, all keep their names.
    for (const ResumeReport::Damaged& damaged : resumed.damaged) {
      fs::remove_all(folder / (std::string(kDamagedPrefix) + damaged.name));
      ECHO_TRY(rename_folder(folder / damaged.name, folder / (std::string(kDamagedPrefix) + damaged.name)));
    }
    if (name != latest) ECHO_TRY(write_file_atomic(folder / kLatest, name + "\n"));
    return resumed;
  }
  std::string reasons;
  for (const ResumeReport::Damaged& damaged : resumed.damaged)
    reasons += (reasons.empty() ? "" : "; ") + damaged.reason;
  return fail(Code::kCorrupt, kOperation, "every checkpoint in {} is damaged: {}", folder.string(), reasons);
} catch (const std::exception& error) {
  return fail(Code::kInternal, "load checkpoint", "{}: {}", folder.string(), error.what());
}

Result<StoredPolicy> find_policy(const fs::path& folder, std::optional<std::int64_t> step) {
  ECHO_ASSIGN(const std::vector<std::string> names, checkpoint_names(folder));
  ECHO_ASSIGN(std::string chosen, read_latest(folder));
  if (step || chosen.empty()) {
    chosen.clear();
    for (const std::string& name : names)  // the last of equal steps is the newest
      if (!step || step_of(name) == *step) chosen = name;
  }
  if (chosen.empty()) {
    std::string steps;
    for (const std::string& name : names) steps += fmt::format("{}{}", steps.empty() ? "" : ", ", step_of(name));
    return fail(Code::kNotFound, "find checkpoint", "{} has no checkpoint{}; steps with one: {}", folder.string(),
                step ? fmt::format(" of step {}", *step) : "", steps.empty() ? "none" : steps);
  }
  ECHO_ASSIGN(const nlohmann::json state, read_checkpoint_state(folder / chosen));
  if (state["format"] == 1)
    return fail(
        Code::kInvalid, "find checkpoint",
        "{} was written by an earlier version and holds no model directory: go on with the run (--resume) to get one",
        (folder / chosen).string());
  return StoredPolicy{
      .step = state["steps"], .model = folder / chosen / kCheckpointModel, .digest = state["policy_digest"]};
}

}  // namespace echoline::learner
