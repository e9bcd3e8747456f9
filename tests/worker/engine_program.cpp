// An inference server as a process: loads a Hugging Face directory with echoline's own model and serves the interface
// of SGLang or vLLM.
//
//   engine_program sglang|vllm|vllm-receiver|vllm-completions MODEL PORT [--hash] [--die-once FILE]
//                  [--damaged-loads COUNT] [--enable-lora --max-loras COUNT --max-lora-rank RANK
//                  --lora-target-modules NAME...]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "base/files.hpp"
#include "delta/checkpoint.hpp"
#include "engine_server.hpp"
#include "model/adapter.hpp"
#include "model/generate.hpp"
#include "model/running_batch.hpp"
#include "model/runtime.hpp"
#include "model/weights.hpp"

namespace echoline::worker {
namespace {

template <class T>
T must(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message());
  return std::move(*result);
}

class Policy final : public ServedModel {
 public:
  void load(const std::filesystem::path& folder) override {
    const delta::Checkpoint checkpoint = must(delta::Checkpoint::open(folder));
    folder_ = folder;
    if (!base_.model) base_ = variant(must(model::ModelFiles::read(folder)).config);
    put(base_, checkpoint.view());
  }
  void load_adapter(const std::string& name, const std::filesystem::path& folder) override {
    model::ModelConfig config = must(model::ModelFiles::read(folder_)).config;
    config.adapter = must(model::AdapterConfig::from_json(must(read_file(folder / model::kAdapterConfigFile))));
    const delta::Checkpoint base = must(delta::Checkpoint::open(folder_));
    const delta::Checkpoint adapter = must(delta::Checkpoint::open(folder / "adapter_model.safetensors"));
    Variant adapted = variant(config);
    put(adapted, must(model::join_adapter(base.view(), adapter.view(), *config.adapter)));
    adapted.batch->set_weights_version(span_);
    adapted_.insert_or_assign(name, std::move(adapted));
  }
  void add(std::uint64_t id, ServedRequest request) override {
    model::Sampling sampling;
    sampling.temperature = request.temperature;
    sampling.tokens_max = request.tokens_max;
    sampling.eos = request.ends;
    // vLLM gets no seed: the responses to one prompt differ all the same.
    sampling.seed = request.seed != 0 ? request.seed : ++unseeded_;
    if (const Status added = named(request.adapter).batch->add({id, request.prompt, sampling}); !added)
      throw std::runtime_error(added.error().message());
  }
  std::map<std::uint64_t, ServedResponse> step() override {
    return of_all([](model::RunningBatch& batch) { return batch.step(); });
  }
  std::map<std::uint64_t, ServedResponse> interrupt() override {
    return of_all([](model::RunningBatch& batch) { return batch.interrupt(); });
  }
  void begin_span(std::uint64_t number) override {
    span_ = number;
    base_.batch->set_weights_version(number);
    for (auto& [name, adapted] : adapted_) adapted.batch->set_weights_version(number);
  }
  std::vector<double> score(const std::vector<std::int32_t>& text, const std::string& adapter) override {
    const auto scores = must(model::score(*named(adapter).model, {text.front()}, {text.begin() + 1, text.end()}));
    return {scores.begin(), scores.end()};
  }
  std::vector<double> top5(const std::vector<std::int32_t>& text, double temperature) override {
    const torch::NoGradGuard no_gradient;
    const auto ids = torch::tensor(std::vector<std::int64_t>(text.begin(), text.end())).unsqueeze(0);
    const auto last_logprobs = torch::log_softmax(base_.model->forward(ids).select(1, -1).squeeze(0) / temperature, -1);
    const auto top = std::get<0>(last_logprobs.topk(5)).to(torch::kFloat64).contiguous();
    return {top.data_ptr<double>(), top.data_ptr<double>() + 5};
  }

 private:
  // The base, or the base with one adapter: a model of its own, as these are small.
  struct Variant {
    std::shared_ptr<model::Transformer> model;
    std::unique_ptr<model::RunningBatch> batch;
  };
  static Variant variant(const model::ModelConfig& config) {
    Variant made{.model = must(model::create(config, torch::kCPU, torch::kBFloat16)), .batch = nullptr};
    made.batch = std::make_unique<model::RunningBatch>(
        made.model, model::BatchLimits{.rows_max = 256, .cache_max = Bytes{std::uint64_t{1} << 28}});
    return made;
  }
  static void put(Variant& to, const delta::StateView& policy) {
    if (const Status loaded = model::load_policy(*to.model, policy); !loaded)
      throw std::runtime_error(loaded.error().message());
  }
  Variant& named(const std::string& adapter) { return adapter.empty() ? base_ : adapted_.at(adapter); }
  template <class Act>
  std::map<std::uint64_t, ServedResponse> of_all(Act&& act) {
    std::map<std::uint64_t, ServedResponse> ended = responses(act(*base_.batch));
    for (auto& [name, adapted] : adapted_) ended.merge(responses(act(*adapted.batch)));
    return ended;
  }
  static std::map<std::uint64_t, ServedResponse> responses(std::vector<model::Ended> ended_sequences) {
    std::map<std::uint64_t, ServedResponse> ended;
    for (model::Ended& sequence : ended_sequences) {
      const model::Generation generation = must(std::move(sequence.generation));
      ServedResponse& response = ended[sequence.id];
      response = {generation.tokens,
                  {generation.logprobs.begin(), generation.logprobs.end()},
                  generation.finish == model::Finish::kEos,
                  {}};
      for (const model::Span& span : sequence.spans) response.spans.emplace_back(span.version, span.end);
    }
    return ended;
  }
  std::filesystem::path folder_;
  Variant base_;
  std::map<std::string, Variant> adapted_;  // by the adapter's name
  std::uint64_t span_ = 0, unseeded_ = 0;
};

}  // namespace
}  // namespace echoline::worker

int main(int argc, char** argv) {
  using namespace echoline::worker;
  if (argc < 4) return 2;
  const std::string name = argv[1];
  const Speaks speaks = name == "vllm"               ? Speaks::kVllm
                        : name == "vllm-receiver"    ? Speaks::kVllmReceiver
                        : name == "vllm-completions" ? Speaks::kVllmCompletions
                                                     : Speaks::kSglang;
  bool hash = false;
  std::string die_once;
  int damaged_loads = 0, adapters_at_once = 1, rank_max = 16;
  bool takes_adapters = false;
  std::optional<std::vector<std::string>> modules;
  for (int i = 4; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--hash") hash = true;
    if (word == "--die-once") die_once = argv[++i];
    if (word == "--enable-lora") takes_adapters = true;
    if (word == "--max-loras") adapters_at_once = std::atoi(argv[++i]);
    if (word == "--max-lora-rank") rank_max = std::atoi(argv[++i]);
    if (word == "--lora-target-modules")
      for (modules.emplace(); i + 1 < argc && argv[i + 1][0] != '-';) modules->emplace_back(argv[++i]);
    if (word == "--damaged-loads") damaged_loads = std::atoi(argv[++i]);
  }
  echoline::model::use_threads(1);
  try {
    const bool dies = !die_once.empty() && !std::ifstream(die_once);
    EngineServer server(speaks, hash ? hashing_model(96) : std::make_unique<Policy>(), std::atoi(argv[3]), argv[2],
                        [&](const std::string& path, int count) {
                          if (!dies || count < 8 ||
                              (path != "/generate" && path != "/v1/completions" && path != "/inference/v1/generate"))
                            return;
                          std::ofstream{die_once} << "once";
                          ::_exit(9);
                        });
    if (takes_adapters) server.enable_adapters(static_cast<std::size_t>(adapters_at_once), rank_max, modules);
    if (damaged_loads > 0) server.fault({.at = "load", .what = "damaged", .times = damaged_loads});
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
