// Implements the functions behind `echoline model generate` and `echoline evaluate`, which are compiled without
// libtorch.
#include "model/ask.hpp"

#include "model/generate.hpp"
#include "model/running_batch.hpp"
#include "model/weights.hpp"

namespace echoline::model {

Result<Generation> ask(const std::filesystem::path& folder, const std::string& device, const std::vector<Token>& prompt,
                       const Sampling& sampling) {
  ECHO_ASSIGN(const torch::Device torch_device, device_named(device));
  ECHO_ASSIGN(const LoadedModel loaded, load_model(folder, torch_device));
  ECHO_ASSIGN(auto generations, generate(*loaded.transformer, {prompt}, sampling));
  return std::move(generations.front());
}

Status ask_all(const std::filesystem::path& folder, const Questions& questions) {
  use_threads(questions.threads);
  ECHO_ASSIGN(const torch::Device device, device_named(questions.device));
  ECHO_ASSIGN(const LoadedModel loaded, load_model(folder, device, torch::kBFloat16));
  RunningBatch batch(loaded.transformer, {.rows_max = static_cast<std::int64_t>(questions.in_flight_max)});
  for (;;) {
    while (batch.running() + batch.waiting() < questions.in_flight_max) {
      std::optional<Question> question = questions.next();
      if (!question) break;
      const std::uint64_t id = question->id;
      Sequence sequence{.id = id,
                        .prompt = std::move(question->prompt),
                        .sampling = std::move(question->sampling),
                        .ends = questions.ends};
      if (Status added = batch.add(std::move(sequence)); !added)
        ECHO_TRY(questions.on_answer(id, std::move(added).error()));
    }
    if (batch.running() + batch.waiting() == 0) break;
    for (Ended& ended : batch.step()) ECHO_TRY(questions.on_answer(ended.id, std::move(ended.generation)));
  }
  return ok();
}

Result<std::vector<float>> score(const std::filesystem::path& folder, const std::string& device,
                                 const std::vector<Token>& prompt, const std::vector<Token>& continuation,
                                 double temperature) {
  ECHO_ASSIGN(const torch::Device torch_device, device_named(device));
  ECHO_ASSIGN(const LoadedModel loaded, load_model(folder, torch_device));
  return score(*loaded.transformer, prompt, continuation, temperature);
}

}  // namespace echoline::model
