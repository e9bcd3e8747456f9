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

constexpr std::string_view kMakeServers = "engine";  // the operation in errors
// A copy of the tied head, for servers that need a head of its own.
const RepeatedTensor kSeparateHead{.copy_name = "lm_head.weight", .source_name = "model.embed_tokens.weight"};

std::unique_ptr<Protocol> protocol_of(EngineKind kind) {
  return kind == EngineKind::kSglang ? sglang_protocol() : vllm_protocol();
}

Result<std::shared_ptr<PolicyFolder>> make_policy_folder(const EngineOptions& options, const Task& task,
                                                         const Protocol& protocol) {
  const bool carried = task.model.family == model::Family::kCarried;
  // The base of an adapter is not loaded again after the server's start.
  const bool use_separate_head =
      !carried && !task.model.adapter && task.model.tie_embeddings && protocol.needs_separate_head();
  ECHO_ASSIGN(model::ModelFiles files, model::ModelFiles::make(
                                           [&] {
                                             model::ModelConfig config = task.model;
                                             config.eos = task.phrasing->eos();
                                             if (use_separate_head) config.tie_embeddings = false;
                                             return config;
                                           }(),
                                           task.phrasing->tokenizer()));
  for (const auto& [name, text] : task.spec.model_files()) files.content[name] = text;
  ECHO_ASSIGN(auto folder, PolicyFolder::make(files.content, options.folder, kMemoryFolder, threads_of(options),
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
    return fail(Code::kInvalid, kMakeServers,
                "the run samples with top_p {}, top_k {} and min_p {}, and {} does not report log-probabilities "
                "under these: set rollout.top_p: 1, rollout.top_k: 0 and rollout.min_p: 0, or generate with the "
                "built-in engine",
                spec.top_p(), spec.top_k(), spec.min_p(), protocol->name());
  std::vector<std::string> shares{""};  // of the GPUs
  if (!options.command.empty()) {
    const std::vector<std::string> gpus = find_gpus(std::getenv(kVisibleGpusVariable), "/dev");
    ECHO_ASSIGN(shares, distribute_gpus(gpus, options.gpus_per_engine, options.engines));
  }
  ECHO_ASSIGN(auto folder, make_policy_folder(options, task, *protocol));
  if (shares.size() == 1)
    return std::unique_ptr<Engine>(make_folder_engine(options, task, host, std::move(protocol), std::move(folder)));
  log::info("starts {} engines of {}, on the GPUs {}", shares.size(), protocol->name(), fmt::join(shares, " | "));
  std::vector<std::unique_ptr<FolderEngine>> engines;
  for (const std::string& share : shares) {
    EngineOptions own_options = options;
    own_options.visible_gpus = share;
    engines.push_back(make_folder_engine(own_options, task, host, protocol_of(options.kind), folder));
  }
  return std::unique_ptr<Engine>(std::make_unique<EngineSet>(std::move(engines), std::move(folder), host));
}

}  // namespace echoline::worker
