// Decoding on a GPU: its kernels on an emulated device, and on a GPU if the machine has one.
#include <gmock/gmock.h>
#include <torch/cuda.h>

#include <cmath>

#include "base/random.hpp"
#include "decode_emulation.hpp"
#include "helpers.hpp"
#include "model/cuda/decoder.hpp"
#include "model/generate.hpp"
#include "model/running_batch.hpp"
#include "model/training_ops.hpp"

namespace echoline::model::cuda {
namespace {

using test::EmulatedBackend;
using test::LoopBlock;
using torch::Tensor;

// A configuration with a shape that the kernels support.
ModelConfig decoded_config(Family family, std::int64_t dim = 16) {
  ModelConfig c = small_config(family, family == Family::kQwen3);
  c.vocab_size = 43;
  c.hidden_size = 64;
  c.intermediate_size = 96;
  c.head_dim = dim;
  c.heads = 4;
  c.positions_max = 800;
  c.initializer_range = 0.15;
  return c;
}

std::shared_ptr<Transformer> half_model(const ModelConfig& config, std::uint64_t seed,
                                        torch::Device device = torch::kCPU) {
  const auto fp32_model = random_model(config, seed);
  const auto half = create(config, device, torch::kBFloat16).value();
  EXPECT_TRUE(load_policy(*half, export_policy(*fp32_model)->view()));
  return half;
}

Tensor random_halves(const std::vector<std::int64_t>& shape, double scale = 1) {
  return (torch::randn(shape) * scale).to(torch::kBFloat16);
}

const Bf16* bf16_data(const Tensor& t) { return static_cast<const Bf16*>(t.data_ptr()); }
Bf16* bf16_out(const Tensor& t) { return static_cast<Bf16*>(t.data_ptr()); }

// The largest difference, in units of the last bf16 place of the larger value.
double steps_apart(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to(torch::kFloat), y = b.to(torch::kFloat);
  return ((x - y).abs() / (torch::maximum(x.abs(), y.abs()) / 128 + 1e-3)).max().item<double>();
}

TEST(DecodeKernels, NormGateAndProductRoundAsTheTrainingPassDoes) {
  torch::NoGradGuard no_grad;
  torch::manual_seed(3);
  for (const std::int64_t rows : {1, 5, 16}) {
    EmulatedBackend backend(4);
    const std::int64_t in = 96, out = 43, stride = 48;
    const Tensor x = random_halves({rows, in}), addend = random_halves({rows, in}), norm = random_halves({in});
    const Tensor weight = random_halves({out, in}, 0.2), other = random_halves({out, in}, 0.2);
    const Tensor bias = random_halves({out}), residual = random_halves({rows, stride});
    const auto product = [&](const Tensor& from, const Tensor& w) {
      return torch::linear(from.to(torch::kFloat), w.to(torch::kFloat)).to(torch::kBFloat16);
    };
    const auto r = static_cast<std::uint32_t>(rows);

    const Tensor added = x.clone(), normed = torch::zeros_like(x);
    backend.run(NormJob{bf16_out(added), bf16_data(addend), bf16_data(norm), bf16_out(normed), r, 96, 1e-6f});
    EXPECT_TRUE(added.equal(x + addend));
    EXPECT_LE(steps_apart(normed, rms_norm(x + addend, norm, 1e-6)), 1.01);

    for (const std::uint32_t parts : {1u, 2u}) {
      Tensor got = torch::full({rows, stride}, NAN, torch::kBFloat16);
      backend.run(ProductJob{bf16_data(x), bf16_data(norm), bf16_data(weight), nullptr, bf16_data(bias),
                             bf16_data(residual), bf16_out(got), r, 96, 43, 48, parts, 1e-6f});
      const Tensor want = residual.narrow(1, 0, out) + (product(rms_norm(x, norm, 1e-6), weight) + bias);
      EXPECT_LE(steps_apart(got.narrow(1, 0, out), want), 8) << rows;
      EXPECT_TRUE(got.narrow(1, out, stride - out).isnan().all().item<bool>());

      backend.run(ProductJob{bf16_data(x), nullptr, bf16_data(weight), bf16_data(other), nullptr, nullptr,
                             bf16_out(got), r, 96, 43, 48, parts, 1e-6f});
      EXPECT_LE(steps_apart(got.narrow(1, 0, out), model::gated(product(x, weight), product(x, other))), 3) << rows;
    }

    const Tensor gate = random_halves({rows, 2 * in}), act = torch::zeros({rows, in}, torch::kBFloat16);
    backend.run(GateJob{bf16_data(gate), bf16_data(gate) + in, bf16_out(act), r, 96, 192});
    EXPECT_LE(steps_apart(act, model::gated(gate.narrow(1, 0, in), gate.narrow(1, in, in))),
              3);  // libtorch 1.13's silu
  }
}

// Draws the same as model/sampler on a CPU from the same logits.
TEST(DecodeKernels, DrawsTheSameTokensAsTheCpu) {
  torch::NoGradGuard no_grad;
  torch::manual_seed(5);
  Random random(8);
  for (const std::int64_t vocab : {43, 4096, 9001}) {
    const std::int64_t rows = 24, stride = (vocab + 7) / 8 * 8;
    Tensor logits = random_halves({rows, stride}, 3);
    logits[3].narrow(0, 0, vocab).fill_(1);  // all alike
    logits[4][vocab - 1] = INFINITY;
    logits[5][0] = NAN;
    logits[6].narrow(0, 0, vocab - 1).fill_(-INFINITY);
    std::vector<Sampling> sampling(static_cast<std::size_t>(rows));
    std::vector<SampleRequest> requests;
    std::vector<float> temperatures;
    std::vector<double> uniforms;
    for (std::size_t i = 0; i < sampling.size(); ++i) {
      sampling[i].temperature = std::vector<double>{1, 0, 0.7, 1.5}[i % 4];
      uniforms.push_back(i == 8 ? 0 : i == 10 ? std::nextafter(1.0, 0.0) : random.uniform());
      temperatures.push_back(static_cast<float>(sampling[i].temperature));
      requests.push_back({&sampling[i], uniforms.back()});
    }
    const std::size_t shares = 24 * kSampleWarps * sample_blocks(static_cast<unsigned>(vocab));
    std::vector<float> max_logits(shares), sums(shares), logprobs(24);
    std::vector<unsigned> arrived(24, 0);
    std::vector<std::int32_t> tokens(24, -1);
    EmulatedBackend(4).run(SampleJob{bf16_data(logits), temperatures.data(), uniforms.data(), max_logits.data(),
                                     sums.data(), arrived.data(), tokens.data(), logprobs.data(), 24,
                                     static_cast<std::uint32_t>(vocab), static_cast<std::uint32_t>(stride)});
    const SampledTokens want = sample_tokens(logits.narrow(1, 0, vocab).to(torch::kFloat).contiguous(), requests);
    for (std::size_t i = 0; i < 24; ++i) {
      ASSERT_EQ(arrived[i], 0u);
      ASSERT_EQ(std::isfinite(logprobs[i]), std::isfinite(want.logprobs[i])) << vocab << " " << i;
      if (!std::isfinite(want.logprobs[i])) continue;
      const std::int64_t row = static_cast<std::int64_t>(i), token = tokens[i];
      if (i != 10) {  // there, rounding decides
        EXPECT_EQ(token, want.tokens[i]) << vocab << " " << i;
      }
      ASSERT_TRUE(token >= 0 && token < vocab);
      const double scale = temperatures[i] == 0 ? 1 : double(temperatures[i]);
      const Tensor log_p = (logits[row].narrow(0, 0, vocab).to(torch::kDouble) / scale).log_softmax(0);
      EXPECT_NEAR(logprobs[i], log_p[token].item<double>(), 2e-5) << vocab << " " << i;
    }
  }
}

// Rows that are decoded token by token from an empty cache, with the sampling rules of the tests.
struct Texts {
  PagedCache cache;
  std::vector<Pages> pages;
  std::vector<std::vector<Token>> tokens;  // of each text, and one more than its pages hold
  Sampling sampling;

  Texts(const Transformer& model, std::size_t rows)
      : cache(model.config(), model.device(), torch::kBFloat16, Bytes{1 << 24}, /*by_token=*/true), pages(rows) {
    for (std::size_t i = 0; i < rows; ++i) tokens.push_back({static_cast<Token>(i % 40)});
  }
  ~Texts() {
    for (Pages& p : pages) cache.release(p);
  }

  // Decodes one step of the first `rows` rows, and appends the drawn tokens.
  std::optional<SampledTokens> step(Decoder& decoder, std::size_t rows, std::uint64_t seed) {
    std::vector<DecodeRow> decode_rows;
    for (std::size_t i = 0; i < rows; ++i) {
      if (PagedCache::pages_for(pages[i].tokens + 1) > std::ssize(pages[i].list)) {
        EXPECT_TRUE(cache.reserve(1));
        pages[i].list.push_back(cache.take_reserved());
      }
      const double uniform = Random(seed + i, static_cast<std::uint64_t>(pages[i].tokens)).uniform();
      decode_rows.push_back({.id = tokens[i].back(), .text = &pages[i], .request = {&sampling, uniform}});
    }
    std::optional<SampledTokens> drawn = decoder.step(decode_rows);
    for (std::size_t i = 0; drawn && i < rows; ++i) {
      tokens[i].push_back(drawn->tokens[i]);
      ++pages[i].tokens;
    }
    return drawn;
  }
};

// Against passes over the whole texts in fp32 with the same weights: 2^-8 is one rounding to bf16.
TEST(Decoder, GivesTheLogProbabilitiesOfAPassOverTheWholeText) {
  torch::NoGradGuard no_grad;
  for (const Family family : {Family::kQwen3, Family::kQwen2, Family::kLlama, Family::kMistral}) {
    for (const std::size_t rows : {3, 11, 19}) {  // few rows, and more than the products for few are for
      const auto model = half_model(decoded_config(family), 11);
      Texts texts(*model, rows);
      Decoder decoder(*model, texts.cache, std::make_unique<EmulatedBackend>(4));
      std::vector<std::vector<float>> logprobs(rows);
      for (int step = 0; step < 20; ++step) {
        const auto drawn = texts.step(decoder, rows, 70);
        ASSERT_TRUE(drawn);
        for (std::size_t i = 0; i < rows; ++i) logprobs[i].push_back(drawn->logprobs[i]);
      }
      const Tensor want = model->token_logprobs(ids_of(texts.tokens)).logprobs;
      double worst = 0, sum = 0;
      for (std::size_t i = 0; i < rows; ++i)
        for (std::size_t t = 0; t < logprobs[i].size(); ++t) {
          const double difference =
              std::abs(double(logprobs[i][t]) - want[std::int64_t(i)][std::int64_t(t)].item<double>());
          worst = std::max(worst, difference), sum += difference;
        }
      EXPECT_LT(worst, 0.12) << family_name(family) << " " << rows;
      EXPECT_LT(sum / double(20 * rows), 0.02) << family_name(family) << " " << rows;
    }
  }
}

// Reading a text and continuing it equals decoding it token by token.
TEST(Decoder, ReadsTextsAndContinuesThem) {
  torch::NoGradGuard no_grad;
  for (const Family family : {Family::kQwen3, Family::kQwen2}) {
    const auto model = half_model(decoded_config(family, 32), 16);
    const std::vector<std::int64_t> lengths = {1, 16, 17, 40};
    Texts texts(*model, lengths.size());
    Decoder decoder(*model, texts.cache, std::make_unique<EmulatedBackend>(4));
    Tensor ids = torch::zeros({4, 40}, torch::kLong);
    std::vector<const Pages*> pages;
    ASSERT_TRUE(texts.cache.reserve(20));
    Random random(2);
    for (std::size_t r = 0; r < 4; ++r) {
      texts.tokens[r].clear();
      for (std::int64_t t = 0; t < lengths[r]; ++t) {
        texts.tokens[r].push_back(static_cast<Token>(random.below(43)));
        ids[std::int64_t(r)][t] = texts.tokens[r].back();
      }
      for (std::int64_t n = 0; n < PagedCache::pages_for(lengths[r] + 1); ++n)
        texts.pages[r].list.push_back(texts.cache.take_reserved());
      texts.pages[r].tokens = lengths[r];
      pages.push_back(&texts.pages[r]);
    }
    const std::optional<Tensor> hidden = decoder.prefill(ids, lengths, pages);
    ASSERT_TRUE(hidden);
    for (std::size_t r = 0; r < 4; ++r) {
      const Tensor want = model->hidden_states(ids_of({texts.tokens[r]}))[0][lengths[r] - 1];
      EXPECT_LT(((*hidden)[std::int64_t(r)] - want).norm().item<double>(), 0.03 * want.norm().item<double>()) << r;
      texts.tokens[r].push_back(7);
    }
    std::vector<std::vector<float>> logprobs(4);
    for (int step = 0; step < 4; ++step) {
      const auto drawn = texts.step(decoder, 4, 5);
      ASSERT_TRUE(drawn);
      for (std::size_t r = 0; r < 4; ++r) logprobs[r].push_back(drawn->logprobs[r]);
    }
    for (std::size_t r = 0; r < 4; ++r) {
      const Tensor want = model->token_logprobs(ids_of({texts.tokens[r]})).logprobs[0];
      for (std::int64_t t = 0; t < 4; ++t)
        EXPECT_NEAR(logprobs[r][std::size_t(t)], want[lengths[r] + t].item<double>(), 0.1) << r << " " << t;
    }
  }
}

TEST(Decoder, LongTextsAreSharedAmongBlocks) {
  torch::NoGradGuard no_grad;
  constexpr int kSteps = 150;
  for (const std::int64_t dim : {64, 128}) {
    ModelConfig config = decoded_config(Family::kQwen3, dim);
    if (dim == 128) config.heads = 6, config.kv_heads = 1;
    const auto model = half_model(config, 12);
    Texts texts(*model, 2);
    Decoder decoder(*model, texts.cache, std::make_unique<EmulatedBackend>(3));
    std::vector<float> last;
    for (int step = 0; step < kSteps; ++step) {
      const auto drawn = texts.step(decoder, step < 20 ? 2 : 1, 3);
      ASSERT_TRUE(drawn);
      last.push_back(drawn->logprobs[0]);
    }
    const Tensor want = model->token_logprobs(ids_of({texts.tokens[0]})).logprobs[0];
    double sum = 0;
    for (std::size_t t = 0; t < last.size(); ++t)
      sum += std::abs(double(last[t]) - want[std::int64_t(t)].item<double>());
    EXPECT_LT(sum / kSteps, 0.02) << dim;
  }
}

// Rows that leave and return do not change other rows, nor does another order of blocks.
TEST(Decoder, CompanyAndRepetitionChangeNothing) {
  torch::NoGradGuard no_grad;
  const auto model = half_model(decoded_config(Family::kQwen3), 13);
  std::vector<std::vector<Token>> got[2];
  for (auto& tokens : got) {
    Texts texts(*model, 9);
    Decoder decoder(*model, texts.cache, std::make_unique<EmulatedBackend>(4));
    for (int step = 0; step < 12; ++step) ASSERT_TRUE(texts.step(decoder, step % 3 == 0 ? 9 : 5, 40));
    tokens = texts.tokens;
  }
  EXPECT_EQ(got[0], got[1]);
}

TEST(Decoder, RecordsAgainAfterTheCacheHasMoved) {
  torch::NoGradGuard no_grad;
  const auto model = half_model(decoded_config(Family::kQwen3), 14);
  Texts texts(*model, 6);
  auto owned_backend = std::make_unique<EmulatedBackend>(4);
  EmulatedBackend& backend = *owned_backend;
  Decoder decoder(*model, texts.cache, std::move(owned_backend));
  for (int step = 0; step < 4; ++step) ASSERT_TRUE(texts.step(decoder, 6, 1));
  EXPECT_EQ(backend.recorded(), 1);
  EXPECT_EQ(decoder.kernels(), 2u * 5 + 4);
  ASSERT_TRUE(texts.step(decoder, 2, 1));
  EXPECT_EQ(backend.recorded(), 2);
  ASSERT_TRUE(texts.cache.reserve(100));  // more than the first 64 pages
  const auto moved = texts.step(decoder, 6, 1);
  ASSERT_TRUE(moved);
  EXPECT_EQ(backend.recorded(), 3);
  const Tensor want = model->token_logprobs(ids_of({texts.tokens[0]})).logprobs[0];
  EXPECT_NEAR(moved->logprobs[0], want[want.size(0) - 1].item<double>(), 0.1);
}

TEST(Decoder, AFailureLeavesTheStepToOthersForAWhile) {
  torch::NoGradGuard no_grad;
  const auto model = half_model(decoded_config(Family::kQwen3), 15);
  Texts texts(*model, 2);
  auto owned_backend = std::make_unique<EmulatedBackend>(4);
  EmulatedBackend& backend = *owned_backend;
  Decoder decoder(*model, texts.cache, std::move(owned_backend));
  backend.fail_recordings(1);
  int steps = 0;
  while (!texts.step(decoder, 2, 1) && steps < 2000) ++steps;
  EXPECT_GT(steps, 100);
  EXPECT_LT(steps, 1000);
}

TEST(Decoder, NamesUnsupportedModels) {
  ModelConfig config = decoded_config(Family::kQwen3);
  const auto message = [](const ModelConfig& c, torch::ScalarType type = torch::kBFloat16) {
    const Status status = Decoder::check(*create(c, torch::kCPU, type).value());
    return status ? "" : status.error().message();
  };
  EXPECT_EQ(message(config), "");
  EXPECT_THAT(message(config, torch::kFloat), testing::HasSubstr("not in bf16"));
  config.head_dim = 24;
  EXPECT_THAT(message(config),
              testing::HasSubstr("heads have 24 values (expected 16, 32, 64 or 128), and 2 query heads"));
  config = decoded_config(Family::kQwen3);
  config.intermediate_size = 100;
  EXPECT_THAT(message(config), testing::HasSubstr("100 inputs, expected a multiple of 32"));
  config = decoded_config(Family::kQwen3);
  config.vocab_size = (1 << 20) + 1;
  EXPECT_THAT(message(config), testing::HasSubstr("1048577 tokens, expected at most 1048576"));
}

// ---- on a GPU ----

class OnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "there is no CUDA device, or libtorch is without CUDA";
  }

  // Sequences of all lengths and sampling rules through the built-in engine.
  static std::map<std::uint64_t, Generation> generated(const std::shared_ptr<Transformer>& model, std::int64_t rows,
                                                       std::size_t count) {
    RunningBatch batch(model, {.rows_max = rows});
    Random random(4);
    for (std::size_t i = 0; i < count; ++i) {
      Sequence s{.id = i, .prompt = {}, .sampling = {}};
      for (std::uint64_t t = 0, n = 1 + random.below(70); t < n; ++t) s.prompt.push_back(Token(random.below(43)));
      s.sampling.tokens_max = 20 + std::int64_t(random.below(60));
      s.sampling.temperature = i % 5 == 0 ? 0 : i % 5 == 1 ? 0.7 : 1;
      if (i % 7 == 3) s.sampling.top_p = 0.8;
      if (i % 7 == 5) s.sampling.top_k = 5;
      s.sampling.seed = random.next();
      EXPECT_TRUE(batch.add(std::move(s)));
    }
    std::map<std::uint64_t, Generation> out;
    while (batch.running() + batch.waiting() > 0)
      for (Ended& ended : batch.step()) out.emplace(ended.id, ended.generation.value());
    return out;
  }
};

TEST_F(OnGpu, GivesTheLogProbabilitiesOfATrainingPass) {
  torch::NoGradGuard no_grad;
  for (const Family family : {Family::kQwen3, Family::kQwen2, Family::kLlama, Family::kMistral})
    for (const std::int64_t rows : {1, 7, 16, 40}) {
      const auto model = half_model(decoded_config(family, 64), 21, torch::kCUDA);
      PagedCache cache(model->config(), model->device(), torch::kBFloat16, Bytes{1 << 20});
      ASSERT_NE(Decoder::open_if_supported(*model, cache), nullptr);
      const auto first = generated(model, rows, 60), again = generated(model, rows, 60);
      Random random(4);
      double sum = 0, worst = 0, count = 0;
      for (const auto& [id, generation] : first) {
        EXPECT_EQ(generation.tokens, again.at(id).tokens);
        EXPECT_EQ(generation.logprobs, again.at(id).logprobs);
        std::vector<std::int64_t> ids;
        for (std::uint64_t t = 0, n = 1 + random.below(70); t < n; ++t) ids.push_back(std::int64_t(random.below(43)));
        const std::size_t prompt = ids.size();
        random.below(60), random.next();
        ids.insert(ids.end(), generation.tokens.begin(), generation.tokens.end());
        const double temperature = id % 5 == 1 ? 0.7 : 1;
        const Tensor want = model
                                ->token_logprobs(torch::tensor(ids, torch::kLong).unsqueeze(0).to(model->device()),
                                                 temperature, {}, /*as_trained=*/true)
                                .logprobs.cpu();
        for (std::size_t t = 0; t < generation.tokens.size(); ++t) {
          const double difference =
              std::abs(double(generation.logprobs[t]) - want[0][std::int64_t(prompt + t) - 1].item<double>());
          sum += difference, worst = std::max(worst, difference), ++count;
        }
      }
      EXPECT_LT(sum / count, 0.02) << family_name(family) << " " << rows;
      EXPECT_LT(worst, 0.2) << family_name(family) << " " << rows;
      RecordProperty("mean", std::to_string(sum / count));
    }
}

}  // namespace
}  // namespace echoline::model::cuda
