// Speed of generation and of a training pass on tiny models: processor time of one thread; printed, not judged.
#include <gtest/gtest.h>

#include <ctime>
#include <functional>

#include "model/generate.hpp"

namespace echoline::model {
namespace {

double seconds_of(const std::function<void()>& work) {
  work();
  const std::clock_t begin = std::clock();
  int runs = 0;
  std::clock_t spent = 0;
  while (spent < CLOCKS_PER_SEC / 3) {
    work();
    ++runs;
    spent = std::clock() - begin;
  }
  return double(spent) / CLOCKS_PER_SEC / runs;
}

TEST(Bench, TokensPerSecond) {
  use_threads(1);
  for (const char* name : {"tiny-64", "tiny-128", "tiny-256"}) {
    const auto model = init(preset(name).value(), 1).value();
    std::vector<std::vector<Token>> prompts;  // 64 problems of 5 or 6 tokens, 4 samples each
    for (Token p = 0; p < 256; ++p) {
      std::vector<Token> prompt = {Token(16 + p / 4 % 10), 11, Token(16 + p / 40 % 10), 29, 1};
      if (p % 8 < 4) prompt.insert(prompt.begin(), 17);
      prompts.push_back(prompt);
    }
    const SamplingOptions options{.tokens_max = 8, .seed = 1};  // no ending token: every row runs to the limit
    const double generation = seconds_of([&] { ASSERT_TRUE(generate(*model, prompts, options)); });
    const torch::Tensor ids = torch::randint(0, 90, {256, 14}, torch::kLong);
    const double training = seconds_of([&] {
      model->zero_grad();
      model->token_logprobs(ids).logprobs.mean().backward();
    });
    std::printf(
        "%-9s batch 256: generate %8.0f tokens/s (%5.1f ms for 8 tokens each); train %8.0f tokens/s (%5.1f ms)\n", name,
        256 * 8 / generation, 1e3 * generation, 256 * 14 / training, 1e3 * training);
  }
}

// How fast rows of a full batch get their tokens, one after another.
TEST(Bench, Decoding) {
  use_threads(1);
  for (const char* name : {"tiny-64", "tiny-128", "tiny-256"}) {
    const auto model = init(preset(name).value(), 1).value();
    for (const std::size_t rows : {1u, 16u, 64u}) {
      std::vector<std::vector<Token>> prompts;
      for (std::size_t i = 0; i < rows; ++i) prompts.push_back({Token(16 + i % 10), 11, Token(16 + i / 10), 29, 1});
      const double once = seconds_of([&] { ASSERT_TRUE(generate(*model, prompts, {.tokens_max = 64, .seed = 1})); });
      std::printf("%-9s batch %3zu: decode %8.0f tokens/s\n", name, rows, double(rows) * 64 / once);
    }
  }
}

}  // namespace
}  // namespace echoline::model
