// An inference server as a process: loads a Hugging Face directory with echoline's own model and serves the interface
// of SGLang or vLLM.
//
//   engine_program sglang|vllm|vllm-receiver|vllm-completions MODEL PORT [--hash] [--die-once FILE]
//                  [--damaged-loads COUNT]
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "delta/checkpoint.hpp"
#include "engine_server.hpp"
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
    if (!model_) {
      const model::ModelFiles files = must(model::ModelFiles::read(folder));
      model_ = must(model::create(files.config, torch::kCPU, torch::kBFloat16));
      batch_.emplace(model_, model::BatchLimits{.rows_max = 256, .cache_max = Bytes{std::uint64_t{1} << 30}});
    }
    if (const Status loaded = model::load_policy(*model_, checkpoint.view()); !loaded)
      throw std::runtime_error(loaded.error().message());
  }
  void add(std::uint64_t id, ServedRequest request) override {
    model::Sampling sampling;
    sampling.temperature = request.temperature;
    sampling.tokens_max = request.tokens_max;
    sampling.eos = request.ends;
    sampling.seed = request.seed;
    if (const Status added = batch_->add({id, request.prompt, sampling}); !added)
      throw std::runtime_error(added.error().message());
  }
  std::map<std::uint64_t, ServedResponse> step() override { return responses(batch_->step()); }
  std::map<std::uint64_t, ServedResponse> interrupt() override { return responses(batch_->interrupt()); }
  void begin_span(std::uint64_t number) override { batch_->set_weights_version(number); }
  std::vector<double> score(const std::vector<std::int32_t>& text, const std::string&) override {
    const auto scores = must(model::score(*model_, {text.front()}, {text.begin() + 1, text.end()}));
    return {scores.begin(), scores.end()};
  }
  std::vector<double> top5(const std::vector<std::int32_t>& text, double temperature) override {
    const torch::NoGradGuard no_gradient;
    const auto ids = torch::tensor(std::vector<std::int64_t>(text.begin(), text.end())).unsqueeze(0);
    const auto last_logprobs = torch::log_softmax(model_->forward(ids).select(1, -1).squeeze(0) / temperature, -1);
    const auto top = std::get<0>(last_logprobs.topk(5)).to(torch::kFloat64).contiguous();
    return {top.data_ptr<double>(), top.data_ptr<double>() + 5};
  }

 private:
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
  std::shared_ptr<model::Transformer> model_;
  std::optional<model::RunningBatch> batch_;
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
  int damaged_loads = 0;
  for (int i = 4; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--hash") hash = true;
    if (word == "--die-once") die_once = argv[++i];
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
    if (damaged_loads > 0) server.fault({.at = "load", .what = "damaged", .times = damaged_loads});
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
