#include "learner/trainer_checkpoint.hpp"

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

namespace echoline::learner {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kFormat = 1;
constexpr std::string_view kPrefix = "step-";
constexpr std::string_view kTemporary = "writing";  // a checkpoint that is not complete
constexpr std::string_view kTensors = "trainer.safetensors", kState = "trainer.json", kLatest = "LATEST";
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

// Removes all but the newest, never the one LATEST names. Names sort by age.
Status prune(const fs::path& folder, std::string_view latest, std::int64_t keep_last) {
  std::error_code ec;
  std::vector<fs::path> found;
  for (fs::directory_iterator it(folder, ec), end; !ec && it != end; it.increment(ec)) {
    if (it->path().filename().string().starts_with(kPrefix)) found.push_back(it->path());
  }
  std::sort(found.begin(), found.end());
  std::int64_t surplus = static_cast<std::int64_t>(found.size()) - keep_last;
  for (const fs::path& path : found) {
    if (surplus <= 0 || ec) break;
    if (path.filename() == latest) continue;
    fs::remove_all(path, ec);
    --surplus;
  }
  if (ec) return fail(Code::kIo, "prune checkpoints", "{}: {}", folder.string(), ec.message());
  return ok();
}

struct StoredState {
  std::int64_t steps = 0, updates = 0;
  std::string tensors_digest;
};

Result<StoredState> read_state(const fs::path& path, const Trainer& trainer, std::string_view config_digest) {
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
  if (json["format"] != kFormat)
    return fail(Code::kInvalid, kOperation, "{}: format {}, this program reads format {}", path.string(),
                json["format"].dump(), kFormat);
  if (json["config_digest"] != config_digest || json["seed"] != trainer.config().seed)
    return fail(Code::kInvalid, kOperation,
                "{} belongs to a run with settings {} and seed {}, this run has {} and {}: resume with the settings it "
                "was made with, or start in another folder",
                path.string(), json["config_digest"].get<std::string>(), json["seed"].dump(), config_digest,
                trainer.config().seed);
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

Result<fs::path> save_checkpoint(const fs::path& folder, const Trainer& trainer, std::string_view config_digest,
                                 std::int64_t keep_last) try {
  ECHO_CHECK(keep_last >= 1, "keep_last is {}", keep_last);
  const fs::path temporary = folder / kTemporary;
  fs::remove_all(temporary);
  ECHO_TRY(make_folders(temporary));
  ECHO_ASSIGN(const Snapshot tensors, snapshot(trainer));
  ECHO_TRY(delta::write_safetensors(temporary / kTensors, tensors.view));
  ECHO_ASSIGN(const delta::Digest digest, delta::digest_state(tensors.view));
  const nlohmann::json state = {{"format", kFormat},
                                {"steps", trainer.steps()},
                                {"updates", trainer.optimizer().updates()},
                                {"seed", trainer.config().seed},
                                {"config_digest", config_digest},
                                {"tensors_digest", digest.hex()}};
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

Result<std::int64_t> load_checkpoint(const fs::path& folder, Trainer& trainer, std::string_view config_digest) try {
  constexpr auto kOperation = "load checkpoint";
  ECHO_ASSIGN(std::string latest, read_file(folder / kLatest, 4096));
  while (!latest.empty() && latest.back() == '\n') latest.pop_back();
  if (!latest.starts_with(kPrefix) || latest.find('/') != std::string::npos)
    return fail(Code::kCorrupt, kOperation, "{}: expected the name of a checkpoint, found '{}'",
                (folder / kLatest).string(), latest);
  ECHO_ASSIGN(const StoredState state, read_state(folder / latest / kState, trainer, config_digest));
  const fs::path path = folder / latest / kTensors;
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
} catch (const std::exception& error) {
  return fail(Code::kInternal, "load checkpoint", "{}: {}", folder.string(), error.what());
}

}  // namespace echoline::learner
