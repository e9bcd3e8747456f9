// Mutated files of models and adapters are read or refused.
#include <gtest/gtest.h>

#include "base/random.hpp"
#include "model/config.hpp"
#include "tests/fuzz/input.hpp"
#include "tests/fuzz/mutated_json.hpp"

namespace echoline::model {
namespace {

// Fields that a file of either kind may have, beside those that this program writes.
constexpr std::string_view kFields[] = {
    R"("rope_scaling": {"rope_type": "yarn", "factor": 4.0})",
    R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
        "original_max_position_embeddings": 8192})",
    R"("text_config": {"vocab_size": 100, "max_position_embeddings": 64})",
    R"("sliding_window": 4096)",
    R"("eos_token_id": [1, 2])",
    R"("quantization_config": {"quant_method": "fp8"})",
    R"("target_modules": "all-linear")",
    R"("rank_pattern": {"q_proj": 4})",
    R"("use_rslora": true)",
    R"("modules_to_save": ["lm_head"])",
};

std::vector<std::string> valid_files() {
  std::vector<std::string> files = {
      AdapterConfig{.rank = 8, .alpha = 16, .base_model = "base"}.to_json(),
      AdapterConfig{.rank = 1, .alpha = 0.5, .targets = {"q_proj"}, .base_model = {}}.to_json()};
  for (const char* name : {"tiny-64", "qwen3-0.6b", "qwen2.5-0.5b", "llama-3.2-1b"})
    files.push_back(preset(name).value().to_json());
  return files;
}

TEST(ModelFiles, MutatedFilesAreReadOrRefused) {
  Random random(3);
  for (const std::string& whole : valid_files()) {
    test::fuzz_input(whole);
    for (const std::string_view field : kFields)
      test::fuzz_input("{" + std::string(field) + "," + whole.substr(whole.find('{') + 1));
    for (int round = 0; round < 300; ++round) test::fuzz_input(test::mutated_json(whole, random));
  }
}

}  // namespace
}  // namespace echoline::model
