// Writes and reads the built-in trainer's state. PolicyToTrain calls it.
#include "learner/training/trainer_checkpoint.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/files.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "delta/safetensors.hpp"
#include "model/finite.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kTensors = "trainer.safetensors";
constexpr std::string_view kGenerator = "torch_generator";

// A tensor's memory as a view; the tensor must be contiguous, on the CPU, and outlive the view.
delta::TensorView view_of(std::string name, const torch::Tensor& tensor, delta::DType dtype) {
  return {std::move(name), dtype, tensor.sizes().vec(),
          std::span(static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes())};
}

delta::DType stored_type(const torch::Tensor& tensor) {
  if (tensor.scalar_type() == torch::kInt8) return delta::DType::kI8;
  return tensor.scalar_type() == torch::kUInt8 ? delta::DType::kU8 : delta::DType::kF32;
}

// An optimizer's tensors by their names in a checkpoint.
std::vector<std::pair<std::string, torch::Tensor>> stored_tensors(const AdamW& optimizer) {
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (const AdamW::Slot& slot : optimizer.slots()) {
    tensors.emplace_back("master/" + slot.name, slot.master);
    tensors.emplace_back("moment1/" + slot.name, slot.moment1);
    tensors.emplace_back("moment2/" + slot.name, slot.moment2);
    if (!slot.scale1.defined()) continue;
    tensors.emplace_back("scale1/" + slot.name, slot.scale1);
    tensors.emplace_back("scale2/" + slot.name, slot.scale2);
  }
  return tensors;
}

// The trainer's tensors in CPU memory, and views of them.
struct Snapshot {
  std::vector<torch::Tensor> memory;
  delta::StateView view;
};

Result<Snapshot> make_snapshot(const Trainer& trainer) {
  Snapshot result;
  const auto add = [&](std::string name, const torch::Tensor& tensor, delta::DType dtype) {
    result.memory.push_back(tensor.to(torch::kCPU).contiguous());
    result.view.push_back(view_of(std::move(name), result.memory.back(), dtype));
  };
  for (const auto& [name, tensor] : stored_tensors(trainer.optimizer())) add(name, tensor, stored_type(tensor));
  add(std::string(kGenerator), at::detail::getDefaultCPUGenerator().get_state(), delta::DType::kU8);
  ECHO_ASSIGN(result.view, delta::canonical(std::move(result.view)));
  return result;
}

struct StoredState {
  std::int64_t steps = 0, updates = 0;
  std::string tensors_digest;
};

Result<StoredState> read_state(const fs::path& path, const Trainer& trainer, const CheckpointDigests& digests) {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(const nlohmann::json json, read_checkpoint_state(path));
  const auto has_integer = [&](const char* key) { return json.contains(key) && json[key].is_number_integer(); };
  const auto has_string = [&](const char* key) { return json.contains(key) && json[key].is_string(); };
  if (!has_integer("updates") || !has_integer("seed") || !has_string("config_digest") ||
      !has_string("tensors_digest") || (json["format"] != 1 && !has_string("reference_digest")))
    return fail(Code::kCorrupt, kOperation,
                "{}: expected updates, seed, config_digest, tensors_digest and reference_digest",
                (path / kCheckpointState).string());
  if (json["config_digest"] != digests.config_digest || json["seed"] != trainer.config().seed)
    return fail(Code::kInvalid, kOperation,
                "{} belongs to a run with settings {} and seed {}, this run has {} and {}: resume with the settings it "
                "was made with, or start in another folder",
                path.string(), json["config_digest"].get<std::string>(), json["seed"].dump(), digests.config_digest,
                trainer.config().seed);
  // A checkpoint of format 1 has no such digest, so it cannot be compared.
  const std::string reference = json.value("reference_digest", digests.reference_digest);
  if (!digests.reference_digest.empty() && reference != digests.reference_digest)
    return fail(Code::kInvalid, kOperation,
                "{} was trained against the reference policy {}, {} is {}: it belongs to another run", path.string(),
                reference.empty() ? "none" : reference, kReferencePolicyFile, digests.reference_digest);
  return StoredState{.steps = json["steps"], .updates = json["updates"], .tensors_digest = json["tensors_digest"]};
}

// The bytes of the stored tensor `name`; kInvalid unless type and shape match.
Result<std::span<const std::byte>> stored_bytes(const delta::StateView& state, const std::string& name,
                                                const torch::Tensor& target, delta::DType dtype, const fs::path& path) {
  const auto it =
      std::lower_bound(state.begin(), state.end(), name,
                       [](const delta::TensorView& view, const std::string& wanted) { return view.name < wanted; });
  if (it == state.end() || it->name != name || it->dtype != dtype || it->shape != target.sizes().vec())
    return fail(Code::kInvalid, "load checkpoint",
                "{} has no tensor {} of type {} and the model's shape: was it made with another model, or other "
                "learner.moments?",
                path.string(), name, delta::dtype_name(dtype));
  return it->bytes;
}

}  // namespace

Result<fs::path> save_checkpoint(const fs::path& folder, const Trainer& trainer, const model::ModelFiles& files,
                                 const CheckpointDigests& digests, std::int64_t keep_last) {
  return add_checkpoint(folder, trainer.steps(), keep_last, [&](const fs::path& target) -> Status {
    ECHO_ASSIGN(delta::OwnedState policy, trainer.policy());
    if (const Status finite = model::check_finite(policy.view()); !finite)
      return fail(Code::kCorrupt, "save checkpoint", "step {} is not kept, because {}", trainer.steps(),
                  finite.error().message());
    ECHO_ASSIGN(const Snapshot tensors, make_snapshot(trainer));
    ECHO_TRY(delta::write_safetensors(target / kTensors, tensors.view));
    ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(tensors.view));
    ECHO_ASSIGN(nlohmann::json state, write_policy(target, folder, files, policy.view()));
    state.update({{"format", kCheckpointFormat},
                  {"steps", trainer.steps()},
                  {"updates", trainer.optimizer().updates()},
                  {"seed", trainer.config().seed},
                  {"config_digest", digests.config_digest},
                  {"tensors_digest", digest.hex()},
                  {"reference_digest", digests.reference_digest}});
    return write_file_atomic(target / kCheckpointState, state.dump(/*indent=*/2) + "\n");
  });
}

namespace {

// Loads a checkpoint's whole policy, for a run with an adapter. The trainer's tensors lack the weights under the
// adapter, and a warm start may have changed those.
Status load_base(const fs::path& folder, model::Transformer& model) {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(const nlohmann::json json, read_checkpoint_state(folder));
  const auto policy = delta::Checkpoint::open(folder / kCheckpointModel);
  if (!policy) return fail(Code::kCorrupt, kOperation, "{}", policy.error().detail);
  ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(policy->view()));
  if (json["policy_digest"] != digest.hex())
    return fail(Code::kCorrupt, kOperation, "{}: digest {}, {} says {}", (folder / kCheckpointModel).string(),
                digest.hex(), kCheckpointState, json["policy_digest"].dump());
  return model::load_policy(model, policy->view());
}

// Restores one checkpoint; all or nothing.
Result<std::int64_t> restore(const fs::path& folder, Trainer& trainer, const CheckpointDigests& digests) {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(const StoredState state, read_state(folder, trainer, digests));
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
  std::vector<std::pair<torch::Tensor, std::span<const std::byte>>> copies;
  for (const auto& [name, tensor] : stored_tensors(trainer.optimizer())) {
    ECHO_ASSIGN(const auto bytes, stored_bytes(file->view(), name, tensor, stored_type(tensor), path));
    copies.emplace_back(tensor, bytes);
  }
  auto generator = at::detail::getDefaultCPUGenerator();
  const torch::Tensor generator_state = generator.get_state().clone();
  ECHO_ASSIGN(const auto generator_bytes,
              stored_bytes(file->view(), std::string(kGenerator), generator_state, delta::DType::kU8, path));
  if (file->view().size() != copies.size() + 1)  // the optimizer's tensors and the generator's state
    return fail(Code::kInvalid, kOperation, "{} has {} tensors, this model needs {}: was it made with another model?",
                path.string(), file->view().size(), copies.size() + 1);
  if (trainer.model().config().adapter) ECHO_TRY(load_base(folder, trainer.model()));
  torch::NoGradGuard no_gradient;
  for (const auto& [tensor, bytes] : copies) {
    if (tensor.is_cpu()) {
      std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
      continue;
    }
    const torch::Tensor cpu_copy = torch::empty(tensor.sizes(), torch::TensorOptions().dtype(tensor.scalar_type()));
    std::memcpy(cpu_copy.data_ptr(), bytes.data(), bytes.size());
    torch::Tensor(tensor).copy_(cpu_copy);  // another handle of the same memory, because `tensor` is const
  }
  std::memcpy(generator_state.data_ptr(), generator_bytes.data(), generator_bytes.size());
  generator.set_state(generator_state);
  trainer.optimizer().set_updates(state.updates);
  trainer.optimizer().round_parameters();
  trainer.set_steps(state.steps);
  return state.steps;
}

}  // namespace

Result<ResumeReport> load_checkpoint(const fs::path& folder, Trainer& trainer, const CheckpointDigests& digests) {
  return read_newest_checkpoint(folder,
                                [&](const fs::path& checkpoint) { return restore(checkpoint, trainer, digests); });
}

Result<std::string> freeze_reference(const fs::path& folder, const delta::OwnedState& policy) {
  ECHO_TRY(make_folders(folder));
  ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(policy.view()));
  ECHO_TRY(delta::write_safetensors(folder / kReferencePolicyFile, policy.view(), {{"digest", digest.hex()}}));
  return digest.hex();
}

Result<std::string> load_reference(const fs::path& folder, model::Transformer& model) {
  constexpr auto kOperation = "load reference policy";
  const fs::path path = folder / kReferencePolicyFile;
  auto file = delta::SafetensorsFile::open(path);
  if (!file && file.error().code == Code::kNotFound)
    return fail(Code::kNotFound, kOperation,
                "{} does not exist: the run began with learner.kl_coefficient 0, so it has no reference policy. "
                "Resume it with kl_coefficient 0, or start a new run",
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
