#include "learner/training/trainer_checkpoint.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <nlohmann/json.hpp>
#include <system_error>

#include "base/files.hpp"
#include "delta/digest.hpp"
#include "delta/safetensors.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kFormat = 2;  // format 1 had no model/ and no digests of policies
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporary = "writing";  // a checkpoint that is not complete
constexpr std::string_view kDamaged = "damaged-";
constexpr std::string_view kTensors = "trainer.safetensors", kState = "trainer.json", kLatest = "LATEST";
constexpr std::string_view kModel = "model", kReference = "reference.safetensors";
constexpr std::string_view kGenerator = "torch_generator";

// A tensor's memory as a view; the tensor must be contiguous, on the CPU, and outlive the view.
delta::TensorView view_of(std::string name, const torch::Tensor& tensor, delta::DType dtype) {
  return {std::move(name), dtype, tensor.sizes().vec(),
          std::span(static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes())};
}

// The trainer's tensors in CPU memory, and views of them.
struct Snapshot {
  std::vector<torch::Tensor> memory;
  delta::StateView view;
};

Result<Snapshot> snapshot(const Trainer& trainer) {
  Snapshot result;
  const auto add = [&](std::string name, const torch::Tensor& tensor, delta::DType dtype) {
    result.memory.push_back(tensor.to(torch::kCPU).contiguous());
    result.view.push_back(view_of(std::move(name), result.memory.back(), dtype));
  };
  for (const AdamW::Slot& slot : trainer.optimizer().slots()) {
    add("master/" + slot.name, slot.master, delta::DType::kF32);
    add("moment1/" + slot.name, slot.moment1, delta::DType::kF32);
    add("moment2/" + slot.name, slot.moment2, delta::DType::kF32);
  }
  add(std::string(kGenerator), at::detail::getDefaultCPUGenerator().get_state(), delta::DType::kU8);
  ECHO_ASSIGN(result.view, delta::canonical(std::move(result.view)));
  return result;
}

Status sync_folder(const fs::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && ::fsync(fd) == 0;
  const int e = errno;
  if (fd >= 0) ::close(fd);
  if (!synced) return fail(Code::kIo, "sync folder", "{}: {}", path.string(), std::strerror(e));
  return ok();
}

Status rename_folder(const fs::path& from, const fs::path& to) {
  std::error_code ec;
  fs::rename(from, to, ec);
  if (ec)
    return fail(Code::kIo, "save checkpoint", "cannot rename {} to {}: {}", from.string(), to.string(), ec.message());
  return ok();
}

// Folder for `step` that does not exist yet; a step that was saved before (by a run that was then resumed from an
// earlier one) keeps its folder until it is pruned.
fs::path fresh_folder(const fs::path& folder, std::int64_t step) {
  const std::string name = fmt::format("{}{:09}", kPrefix, step);
  fs::path path = folder / name;
  for (int again = 1; fs::exists(path); ++again) path = folder / fmt::format("{}.{:03}", name, again);
  return path;
}

// Names of the checkpoints, oldest first: names sort by age.
Result<std::vector<std::string>> checkpoints(const fs::path& folder) {
  std::error_code ec;
  std::vector<std::string> names;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec))
    if (it->path().filename().string().starts_with(kPrefix)) names.push_back(it->path().filename().string());
  if (ec && ec != std::errc::no_such_file_or_directory)
    return fail(Code::kIo, "list checkpoints", "{}: {}", folder.string(), ec.message());
  std::sort(names.begin(), names.end());
  return names;
}

std::int64_t step_of(std::string_view name) {
  std::int64_t step = 0;
  name.remove_prefix(kPrefix.size());
  for (const char c : name.substr(0, 18)) {
    if (c < '0' || c > '9') break;
    step = step * 10 + (c - '0');
  }
  return step;
}

// Removes all but the newest, never the one LATEST names.
Status prune(const fs::path& folder, std::string_view latest, std::int64_t keep_last) {
  ECHO_ASSIGN(const std::vector<std::string> names, checkpoints(folder));
  std::error_code ec;
  std::int64_t surplus = static_cast<std::int64_t>(names.size()) - keep_last;
  for (const std::string& name : names) {
    if (surplus <= 0 || ec) break;
    if (name == latest) continue;
    fs::remove_all(folder / name, ec);
    --surplus;
  }
  if (ec) return fail(Code::kIo, "prune checkpoints", "{}: {}", folder.string(), ec.message());
  return ok();
}

// What LATEST names; empty when it is absent or names nothing.
Result<std::string> latest_in(const fs::path& folder) {
  auto latest = read_file(folder / kLatest, 4096);
  if (!latest && latest.error().code != Code::kNotFound) return latest.error();
  std::string name = latest ? *latest : "";
  while (!name.empty() && name.back() == '\n') name.pop_back();
  const bool plain = name.starts_with(kPrefix) && name.find('/') == std::string::npos;
  return plain && fs::exists(folder / name) ? name : std::string();
}

struct StoredState {
  std::int64_t steps = 0, updates = 0;
  std::string tensors_digest;
};

Result<nlohmann::json> read_state_json(const fs::path& path) {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(const std::string text, read_file(path, 1 << 20));
  const auto json = nlohmann::json::parse(text, nullptr, false);
  const auto integer = [&](const char* key) { return json.contains(key) && json[key].is_number_integer(); };
  const auto string = [&](const char* key) { return json.contains(key) && json[key].is_string(); };
  if (!json.is_object() || !integer("format") || !integer("steps") || !integer("updates") || !integer("seed") ||
      !string("config_digest") || !string("tensors_digest"))
    return fail(Code::kCorrupt, kOperation,
                "{}: expected an object with format, steps, updates, seed, config_digest "
                "and tensors_digest",
                path.string());
  if (json["format"] != 1 && json["format"] != kFormat)
    return fail(Code::kInvalid, kOperation, "{}: format {}, this program reads formats 1 and {}", path.string(),
                json["format"].dump(), kFormat);
  if (json["format"] != 1 && (!string("policy_digest") || !string("reference_digest")))
    return fail(Code::kCorrupt, kOperation, "{}: expected policy_digest and reference_digest", path.string());
  return json;
}

Result<StoredState> read_state(const fs::path& path, const Trainer& trainer, const CheckpointOf& of) {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(const nlohmann::json json, read_state_json(path));
  if (json["config_digest"] != of.config_digest || json["seed"] != trainer.config().seed)
    return fail(Code::kInvalid, kOperation,
                "{} belongs to a run with settings {} and seed {}, this run has {} and {}: resume with the settings it "
                "was made with, or start in another folder",
                path.string(), json["config_digest"].get<std::string>(), json["seed"].dump(), of.config_digest,
                trainer.config().seed);
  const std::string reference = json.value("reference_digest", of.reference_digest);
  if (!of.reference_digest.empty() && reference != of.reference_digest)
    return fail(Code::kInvalid, kOperation,
                "{} was trained against the reference policy {}, {} is {}: it belongs to another run", path.string(),
                reference.empty() ? "none" : reference, kReference, of.reference_digest);
  return StoredState{json["steps"], json["updates"], json["tensors_digest"]};
}

// The stored tensor `name` as a torch tensor that borrows the mapped file; kInvalid unless type and shape match.
Result<torch::Tensor> stored(const delta::StateView& state, const std::string& name, const torch::Tensor& like,
                             delta::DType dtype, const fs::path& path) {
  const auto it = std::lower_bound(state.begin(), state.end(), name,
                                   [](const delta::TensorView& view, const std::string& n) { return view.name < n; });
  if (it == state.end() || it->name != name || it->dtype != dtype || it->shape != like.sizes().vec())
    return fail(Code::kInvalid, "load checkpoint",
                "{} has no tensor {} of type {} and the model's shape: was it made "
                "with another model?",
                path.string(), name, delta::dtype_name(dtype));
  torch::Tensor copy = torch::empty(like.sizes(), torch::TensorOptions().dtype(like.dtype()));
  std::memcpy(copy.data_ptr(), it->bytes.data(), it->bytes.size());
  return copy;
}

}  // namespace

Result<fs::path> save_checkpoint(const fs::path& folder, const Trainer& trainer, const model::ModelFiles& files,
                                 const CheckpointOf& of, std::int64_t keep_last) try {
  ECHO_CHECK(keep_last >= 1, "keep_last is {}", keep_last);
  const fs::path temporary = folder / kTemporary;
  fs::remove_all(temporary);
  ECHO_TRY(make_folders(temporary));
  ECHO_ASSIGN(const Snapshot tensors, snapshot(trainer));
  ECHO_TRY(delta::write_safetensors(temporary / kTensors, tensors.view));
  ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(tensors.view));
  ECHO_ASSIGN(delta::OwnedState policy, trainer.policy());
  ECHO_TRY(model::save_model(temporary / kModel, files, policy.view()));
  const nlohmann::json state = {{"format", kFormat},
                                {"steps", trainer.steps()},
                                {"updates", trainer.optimizer().updates()},
                                {"seed", trainer.config().seed},
                                {"config_digest", of.config_digest},
                                {"tensors_digest", digest.hex()},
                                {"policy_digest", policy.digest().hex()},
                                {"reference_digest", of.reference_digest}};
  ECHO_TRY(write_file_atomic(temporary / kState, state.dump(2) + "\n"));
  const fs::path complete = fresh_folder(folder, trainer.steps());
  ECHO_TRY(rename_folder(temporary, complete));
  ECHO_TRY(sync_folder(folder));
  ECHO_TRY(write_file_atomic(folder / kLatest, complete.filename().string() + "\n"));
  ECHO_TRY(prune(folder, complete.filename().string(), keep_last));
  return complete;
} catch (const std::exception& error) {
  return fail(Code::kIo, "save checkpoint", "{}: {}", folder.string(), error.what());
}

namespace {

// Restores one checkpoint; all or nothing.
Result<std::int64_t> restore(const fs::path& folder, Trainer& trainer, const CheckpointOf& of) {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(const StoredState state, read_state(folder / kState, trainer, of));
  const fs::path path = folder / kTensors;
  auto file = delta::SafetensorsFile::open(path);
  if (!file) {
    const Code code = file.error().code == Code::kInvalid ? Code::kCorrupt : file.error().code;
    return fail(code, kOperation, "{}", file.error().detail);
  }
  ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(file->view()));
  if (digest.hex() != state.tensors_digest)
    return fail(Code::kCorrupt, kOperation, "{}: digest {}, {} says {}", path.string(), digest.hex(), kState,
                state.tensors_digest);
  std::vector<torch::Tensor> restored;
  const auto& slots = trainer.optimizer().slots();
  for (const AdamW::Slot& slot : slots) {
    for (const char* kind : {"master/", "moment1/", "moment2/"}) {
      ECHO_ASSIGN(auto tensor, stored(file->view(), kind + slot.name, slot.master, delta::DType::kF32, path));
      restored.push_back(std::move(tensor));
    }
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  ECHO_ASSIGN(const auto generator_state,
              stored(file->view(), std::string(kGenerator), generator.get_state(), delta::DType::kU8, path));
  if (file->view().size() != restored.size() + 1)
    return fail(Code::kInvalid, kOperation, "{} has {} tensors, this model needs {}: was it made with another model?",
                path.string(), file->view().size(), restored.size() + 1);
  torch::NoGradGuard no_gradient;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    AdamW::Slot& slot = trainer.optimizer().slots()[i];
    slot.master.copy_(restored[3 * i]);
    slot.moment1.copy_(restored[3 * i + 1]);
    slot.moment2.copy_(restored[3 * i + 2]);
  }
  generator.set_state(generator_state);
  trainer.optimizer().set_updates(state.updates);
  trainer.optimizer().publish();
  trainer.set_steps(state.steps);
  return state.steps;
}

}  // namespace

Result<Resumed> load_checkpoint(const fs::path& folder, Trainer& trainer, const CheckpointOf& of) try {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(std::vector<std::string> names, checkpoints(folder));
  ECHO_ASSIGN(const std::string latest, latest_in(folder));
  if (names.empty()) return fail(Code::kNotFound, kOperation, "{} holds no checkpoint", folder.string());
  std::reverse(names.begin(), names.end());
  std::stable_partition(names.begin(), names.end(), [&](const std::string& name) { return name == latest; });
  Resumed resumed;
  for (const std::string& name : names) {
    const auto step = restore(folder / name, trainer, of);
    if (!step && step.error().code == Code::kInvalid) return step.error();
    if (!step) {
      resumed.damaged.push_back({name, step.error().message()});
      continue;
    }
    resumed.step = *step;
    for (const Resumed::Damaged& damaged : resumed.damaged) {
      fs::remove_all(folder / (std::string(kDamaged) + damaged.name));
      ECHO_TRY(rename_folder(folder / damaged.name, folder / (std::string(kDamaged) + damaged.name)));
    }
    if (name != latest) ECHO_TRY(write_file_atomic(folder / kLatest, name + "\n"));
    return resumed;
  }
  std::string reasons;
  for (const Resumed::Damaged& damaged : resumed.damaged) reasons += (reasons.empty() ? "" : "; ") + damaged.reason;
  return fail(Code::kCorrupt, kOperation, "every checkpoint in {} is damaged: {}", folder.string(), reasons);
} catch (const std::exception& error) {
  return fail(Code::kInternal, "load checkpoint", "{}: {}", folder.string(), error.what());
}

Result<StoredPolicy> find_policy(const fs::path& folder, std::optional<std::int64_t> step) {
  ECHO_ASSIGN(const std::vector<std::string> names, checkpoints(folder));
  ECHO_ASSIGN(std::string chosen, latest_in(folder));
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
  ECHO_ASSIGN(const nlohmann::json state, read_state_json(folder / chosen / kState));
  if (state["format"] == 1)
    return fail(Code::kInvalid, "find checkpoint",
                "{} was written by an earlier version and holds no model directory: go on with the run (--resume) to get one",
                (folder / chosen).string());
  return StoredPolicy{state["steps"], folder / chosen / kModel, state["policy_digest"]};
}

Result<std::string> freeze_reference(const fs::path& folder, const delta::OwnedState& policy) {
  ECHO_TRY(make_folders(folder));
  ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(policy.view()));
  ECHO_TRY(delta::write_safetensors(folder / kReference, policy.view(), {{"digest", digest.hex()}}));
  return digest.hex();
}

Result<std::string> load_reference(const fs::path& folder, model::Transformer& model) {
  constexpr auto kOperation = "load reference policy";
  const fs::path path = folder / kReference;
  auto file = delta::SafetensorsFile::open(path);
  if (!file && file.error().code == Code::kNotFound)
    return fail(Code::kNotFound, kOperation,
                "{} is not there: the run began with learner.kl_coefficient 0, so nothing was kept to stay close to. "
                "Resume it with kl_coefficient 0, or start anew",
                path.string());
  if (!file) return fail(Code::kCorrupt, kOperation, "{}", file.error().detail);
  ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(file->view()));
  const auto stated = file->metadata().find("digest");
  if (stated == file->metadata().end() || stated->second != digest.hex())
    return fail(Code::kCorrupt, kOperation, "{}: digest {}, its metadata says {}", path.string(), digest.hex(),
                stated == file->metadata().end() ? "nothing" : stated->second);
  ECHO_TRY(model::load_policy(model, file->view()));
  return digest.hex();
}

}  // namespace echoline::learner
