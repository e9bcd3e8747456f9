#include "model/ask.hpp"

#include "model/generate.hpp"
#include "model/weights.hpp"

namespace echoline::model {

Result<Generation> ask(const std::filesystem::path& folder, const std::vector<Token>& prompt, const Sampling& sampling) {
  ECHO_ASSIGN(const LoadedModel loaded, load_model(folder));
  ECHO_ASSIGN(auto generations, generate(*loaded.transformer, {prompt}, sampling));
  return std::move(generations.front());
}

Result<std::vector<float>> score(const std::filesystem::path& folder, const std::vector<Token>& prompt,
                                 const std::vector<Token>& continuation, double temperature) {
  ECHO_ASSIGN(const LoadedModel loaded, load_model(folder));
  return score(*loaded.transformer, prompt, continuation, temperature);
}

}  // namespace echoline::model
