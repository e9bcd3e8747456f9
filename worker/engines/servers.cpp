// Makes the engine of a worker that generates with inference servers: their folder, and their number by the GPUs.
#include <cstdlib>

#include "base/log.hpp"
#include "model/model_files.hpp"
#include "worker/engines/engine_set.hpp"
#include "worker/engines/gpus.hpp"
#include "worker/engines/remote.hpp"
#include "worker/groups.hpp"

namespace echoline::worker {
namespace {

constexpr std::string_view kServersOperation = "engine";  // the operation in errors
// A copy of the tied output head, for servers that need it as a tensor of its own.
const RepeatedTensor kSeparateHead{.copy_name = "lm_head.weight", .source_name = "model.embed_tokens.weight"};

std::unique_ptr<Protocol> protocol_of(EngineKind kind) {
  return kind == EngineKind::kSglang ? sglang_protocol() : vllm_protocol();
}

Result<std::shared_ptr<PolicyFolder>> make_policy_folder(const EngineOptions& options, const Task& task,
                                                         const Protocol& protocol) {
  const bool is_carried = task.model.family == model::Family::kCarried;  // only servers can compute this model
  // At its start a server ties the head to the embedding; when it loads weights again, it may not. With an adapter, the
  // base is not loaded again.
  const bool use_separate_head =
      !is_carried && !task.model.adapter && task.model.tie_embeddings && protocol.needs_separate_head();
  model::ModelConfig config = task.model;
  config.eos = task.phrasing->eos();
  if (use_separate_head) config.tie_embeddings = false;
  ECHO_ASSIGN(model::ModelFiles files, model::ModelFiles::make(config, task.phrasing->tokenizer()));
  // The learner sends a carried model's own files, which replace those made above. For other models it sends none.
  for (const auto& [name, text] : task.spec.model_files()) files.content[name] = text;
  // Used only if the user has chosen no folder.
  const std::filesystem::path parent =
      first_large_folder({kMemoryFolder, kDiskFolder}, model::memory_estimate(task.model).policy_bf16);
  if (options.folder.empty() && parent != kMemoryFolder)
    log::warn("{} is smaller than the policy, so {} keeps its files in {}", kMemoryFolder, protocol.name(),
              parent.string());
  ECHO_ASSIGN(auto folder, PolicyFolder::make(files.content, options.folder, parent, threads_of(options),
                                              use_separate_head ? std::optional(kSeparateHead) : std::nullopt,
                                              task.model.adapter ? task.model.adapter->to_json() : std::string()));
  return std::shared_ptr<PolicyFolder>(std::move(folder));
}

}  // namespace

Result<std::unique_ptr<Engine>> make_remote_engine(const EngineOptions& options, const Task& task,
                                                   const EngineHost& host) {
  const schema::RunSpec& spec = task.spec;
  auto protocol = protocol_of(options.kind);
  if (spec.top_p() < 1 || spec.top_k() > 0 || spec.min_p() > 0)
    return fail(Code::kInvalid, kServersOperation,
                "the run samples with top_p {}, top_k {} and min_p {}, and {} does not report log-probabilities "
                "under these: set rollout.top_p: 1, rollout.top_k: 0 and rollout.min_p: 0, or generate with the "
                "built-in engine",
                spec.top_p(), spec.top_k(), spec.min_p(), protocol->name());
  std::vector<std::string> gpu_lists{""};  // by server: its CUDA_VISIBLE_DEVICES; empty: all that this process has
  if (!options.command.empty()) {          // else the server runs already, and has its GPUs
    const std::vector<std::string> gpus = find_gpus(std::getenv(kVisibleGpusVariable), "/dev");
    ECHO_ASSIGN(gpu_lists, distribute_gpus(gpus, options.gpus_per_engine, options.engines));
  }
  ECHO_ASSIGN(auto folder, make_policy_folder(options, task, *protocol));
  if (gpu_lists.size() == 1)
    return std::unique_ptr<Engine>(make_folder_engine(options, task, host, std::move(protocol), std::move(folder)));
  log::info("starts {} engines of {}, on the GPUs {}", gpu_lists.size(), protocol->name(), fmt::join(gpu_lists, " | "));
  std::vector<std::unique_ptr<FolderEngine>> engines;
  for (const std::string& gpu_list : gpu_lists) {
    EngineOptions own_options = options;
    own_options.visible_gpus = gpu_list;
    engines.push_back(make_folder_engine(own_options, task, host, protocol_of(options.kind), folder));
  }
  return std::unique_ptr<Engine>(std::make_unique<EngineSet>(std::move(engines), std::move(folder), host));
}

}  // namespace echoline::worker
