// Speed of generation and of a training pass on tiny models: processor time of one thread, printed without limits.
#include <gtest/gtest.h>

#include <cmath>
#include <ctime>
#include <functional>

#include "base/random.hpp"
#include "model/generate.hpp"
#include "model/kernels.hpp"
#include "model/running_batch.hpp"
#include "model/runtime.hpp"
#include "model/weights.hpp"

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
  keep_freed_memory();
  for (const char* name : {"tiny-64", "tiny-128", "tiny-256"}) {
    const auto model = init(preset(name).value(), 1).value();
    std::vector<std::vector<Token>> prompts;  // 64 problems of 5 or 6 tokens, 4 samples each
    for (Token p = 0; p < 256; ++p) {
      std::vector<Token> prompt = {Token(16 + p / 4 % 10), 11, Token(16 + p / 40 % 10), 29, 1};
      if (p % 8 < 4) prompt.insert(prompt.begin(), 17);
      prompts.push_back(prompt);
    }
    const Sampling options{.tokens_max = 8, .seed = 1};  // no ending token: every row runs to the limit
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

// Speed of single rows of a full batch, one token after another.
TEST(Bench, Decoding) {
  use_threads(1);
  keep_freed_memory();
  for (const char* name : {"tiny-64", "tiny-128", "tiny-256"}) {
    const auto model = init(preset(name).value(), 1).value();
    const auto half = create(model->config(), torch::kCPU, torch::kBFloat16).value();
    ASSERT_TRUE(load_policy(*half, export_policy(*model)->view()));
    for (const std::size_t rows : {1u, 16u, 64u}) {
      std::vector<std::vector<Token>> prompts;
      for (std::size_t i = 0; i < rows; ++i) prompts.push_back({Token(16 + i % 10), 11, Token(16 + i / 10), 29, 1});
      const auto speed = [&](Transformer& transformer) {
        return double(rows) * 64 /
               seconds_of([&] { ASSERT_TRUE(generate(transformer, prompts, {.tokens_max = 64, .seed = 1})); });
      };
      std::printf("%-9s batch %3zu: decode %8.0f tokens/s, with bf16 weights %8.0f\n", name, rows, speed(*model),
                  speed(*half));
    }
  }
}

// The cost of a long answer to other rows: 64 rows that are refilled as they end, against batches of 64, each as long
// as its longest row.
TEST(Bench, ContinuousBatching) {
  use_threads(1);
  keep_freed_memory();
  Random random(1);
  const auto lognormal = [&] {  // median 24, a tenth beyond 115
    const double normal = std::sqrt(-2 * std::log(1 - random.uniform())) * std::cos(2 * M_PI * random.uniform());
    return std::clamp<std::int64_t>(std::llround(24 * std::exp(1.22 * normal)), 1, 900);
  };
  const auto mixed = [&]() -> std::int64_t { return random.below(10) == 0 ? 256 : 32; };
  for (const char* name : {"tiny-64", "tiny-256"}) {
    const auto model = std::shared_ptr(init(preset(name).value(), 1).value());
    for (const bool tail : {false, true}) {
      std::vector<Sequence> sequences;
      for (std::uint64_t id = 0; id < 512; ++id) {
        Sequence s{.id = id, .prompt = {Token(16 + id % 10), 11, Token(16 + id / 52), 29, 1}, .sampling = {.seed = id}};
        s.sampling.tokens_max = tail ? lognormal() : mixed();
        sequences.push_back(std::move(s));
      }
      const auto rollouts_per_second = [&](std::size_t at_a_time) {
        RunningBatch batch(model, {.rows_max = 64});
        const std::clock_t begin = std::clock();
        for (std::size_t first = 0; first < sequences.size(); first += at_a_time) {
          for (std::size_t i = first; i < std::min(sequences.size(), first + at_a_time); ++i)
            EXPECT_TRUE(batch.add(sequences[i]));
          while (batch.running() + batch.waiting() > 0) batch.step();
        }
        return double(sequences.size()) * CLOCKS_PER_SEC / double(std::clock() - begin);
      };
      const double batch_after_batch = rollouts_per_second(64), continuous = rollouts_per_second(sequences.size());
      std::printf("%-9s %-34s: batch after batch %6.0f rollouts/s, continuously %6.0f rollouts/s, %.2f x\n", name,
                  tail ? "lognormal, 24 tokens in the middle" : "32 tokens, one in ten 256", batch_after_batch,
                  continuous, continuous / batch_after_batch);
    }
  }
}

// A product with bf16 weights of Qwen3-0.6B's layers by every set of kernels, against libtorch's, which converts the
// weights in every call.
TEST(Bench, Products) {
  use_threads(1);
  torch::NoGradGuard no_grad;
  const std::int64_t in = 1024, out = 3072;
  const torch::Tensor w = torch::randn({out, in}).to(torch::kBFloat16);
  for (const std::int64_t rows : {1, 4, 16, 64, 512}) {
    const torch::Tensor x = torch::randn({rows, in});
    torch::Tensor y = torch::empty({rows, out});
    const double converted = seconds_of([&] { y = torch::linear(x, w.to(torch::kFloat)); });
    const double work = double(rows * in * out) / 1e9;
    std::printf("%3ld rows: libtorch %6.1f GMAC/s", long(rows), work / converted);
    const KernelSets sets = available_kernels();
    for (int i = 0; i < sets.count; ++i) {
      const Kernels& k = *sets.best_first[i];
      const torch::Tensor packed = torch::empty({k.packed_floats(rows, in)});
      const double seconds = seconds_of([&] {
        k.pack(x.data_ptr<float>(), rows, in, 0, rows, packed.data_ptr<float>());
        k.product_bf16(packed.data_ptr<float>(), rows, in, static_cast<const Bf16*>(w.data_ptr()), 0, out,
                       y.data_ptr<float>(), out, false);
      });
      std::printf("   %s %6.1f, %5.2f x", k.name, work / seconds, converted / seconds);
    }
    std::printf("\n");
  }
}

// Qwen3-0.6B's shape with random weights, one thread; takes gigabytes and a minute, so only on demand:
// ECHOLINE_BENCH_QWEN3=fp32 or bf16.
TEST(Bench, Qwen3) {
  const char* const wanted = std::getenv("ECHOLINE_BENCH_QWEN3");
  if (!wanted) GTEST_SKIP() << "ECHOLINE_BENCH_QWEN3 is not set";
  const bool bf16 = std::string_view(wanted) == "bf16";
  use_threads(1);
  keep_freed_memory();
  torch::NoGradGuard no_grad;
  const ModelConfig config = preset("qwen3-0.6b").value();
  const auto model = std::make_shared<Transformer>(config, torch::kCPU, bf16 ? torch::kBFloat16 : torch::kFloat);
  torch::manual_seed(1);
  for (auto& item : model->named_parameters()) {
    if (item.value().dim() == 1) {
      item.value().fill_(1);
    } else {
      item.value().normal_(0, config.initializer_range);
    }
  }
  // The upper bound by memory bandwidth: a sum over the weights.
  const auto seconds_since = [](std::clock_t begin) { return double(std::clock() - begin) / CLOCKS_PER_SEC; };
  double bytes = 0;
  for (const auto& p : model->parameters()) bytes += double(p.numel()) * double(p.element_size());
  double best = 1e9;
  for (int i = 0; i < 3; ++i) {
    const std::clock_t begin = std::clock();
    for (const auto& p : model->parameters()) {
      const torch::Tensor words = torch::from_blob(p.data_ptr(), {p.numel() * p.element_size() / 8}, torch::kLong);
      volatile std::int64_t sum = words.sum().item<std::int64_t>();
      (void)sum;
    }
    best = std::min(best, seconds_since(begin));
  }
  const double bandwidth = bytes / best;
  std::printf("qwen3-0.6b %s: weights %.2f GB, read at %.1f GB/s\n", wanted, bytes / 1e9, bandwidth / 1e9);
  for (const std::size_t rows : {1u, 16u}) {
    RunningBatch batch(model, {.rows_max = 16});
    for (std::uint64_t id = 0; id < rows; ++id) {
      Sequence s{
          .id = id, .prompt = std::vector<Token>(16, Token(1000 + id)), .sampling = {.tokens_max = 33, .seed = id}};
      ASSERT_TRUE(batch.add(std::move(s)));
    }
    const std::clock_t begin = std::clock();
    batch.step();
    const double reading = seconds_since(begin);
    double fastest = 1e9;
    const std::clock_t decoding = std::clock();
    for (int i = 0; i < 32; ++i) {
      const std::clock_t step_begin = std::clock();
      batch.step();
      fastest = std::min(fastest, seconds_since(step_begin));
    }
    const double decode = seconds_since(decoding) / 32;
    std::printf(
        "qwen3-0.6b %s batch %2zu: prompts of 16 tokens read at %6.1f tokens/s; decode %6.2f tokens/s (fastest step "
        "%6.2f), "
        "%3.0f %% of that bandwidth\n",
        wanted, rows, double(16 * rows) / reading, double(rows) / decode, double(rows) / fastest,
        100 * bytes / decode / bandwidth);
  }
}

}  // namespace
}  // namespace echoline::model
