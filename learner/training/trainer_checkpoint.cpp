#include "learner/training/trainer_checkpoint.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "delta/digest.hpp"
#include "delta/safetensors.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTensors = "trainer.safetensors", kReference = "reference.safetensors";
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

struct StoredState {
  std::int64_t steps = 0, updates = 0;
  std::string tensors_digest;
};

Result<StoredState> read_state(const fs::path& path, const Trainer& trainer, const CheckpointOf& of) {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(const nlohmann::json json, read_checkpoint_state(path));
  const auto integer = [&](const char* key) { return json.contains(key) && json[key].is_number_integer(); };
  const auto string = [&](const char* key) { return json.contains(key) && json[key].is_string(); };
  if (!integer("updates") || !integer("seed") || !string("config_digest") || !string("tensors_digest") ||
      (json["format"] != 1 && !string("reference_digest")))
    return fail(Code::kCorrupt, kOperation, "{}: expected updates, seed, config_digest, tensors_digest and reference_digest",
                (path / kCheckpointState).string());
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
                                 const CheckpointOf& of, std::int64_t keep_last) {
  return add_checkpoint(folder, trainer.steps(), keep_last, [&](const fs::path& into) -> Status {
    ECHO_ASSIGN(const Snapshot tensors, snapshot(trainer));
    ECHO_TRY(delta::write_safetensors(into / kTensors, tensors.view));
    ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(tensors.view));
    ECHO_ASSIGN(delta::OwnedState policy, trainer.policy());
    ECHO_TRY(model::save_model(into / kCheckpointModel, files, policy.view()));
    const nlohmann::json state = {{"format", kCheckpointFormat},
                                  {"steps", trainer.steps()},
                                  {"updates", trainer.optimizer().updates()},
                                  {"seed", trainer.config().seed},
                                  {"config_digest", of.config_digest},
                                  {"tensors_digest", digest.hex()},
                                  {"policy_digest", policy.digest().hex()},
                                  {"reference_digest", of.reference_digest}};
    return write_file_atomic(into / kCheckpointState, state.dump(2) + "\n");
  });
}

namespace {

// Restores one checkpoint; all or nothing.
Result<std::int64_t> restore(const fs::path& folder, Trainer& trainer, const CheckpointOf& of) {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(const StoredState state, read_state(folder, trainer, of));
  const fs::path path = folder / kTensors;
  auto file = delta::SafetensorsFile::open(path);
  if (!file) {
    const Code code = file.error().code == Code::kInvalid ? Code::kCorrupt : file.error().code;
    return fail(code, kOperation, "{}", file.error().detail);
  }
  ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(file->view()));
  if (digest.hex() != state.tensors_digest)
    return fail(Code::kCorrupt, kOperation, "{}: digest {}, {} says {}", path.string(), digest.hex(), kCheckpointState,
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

Result<Resumed> load_checkpoint(const fs::path& folder, Trainer& trainer, const CheckpointOf& of) {
  return read_newest_checkpoint(folder, [&](const fs::path& checkpoint) { return restore(checkpoint, trainer, of); });
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
