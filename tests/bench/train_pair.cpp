// Writes two neighbouring policy versions of a small real training run, for delta_bench --pair.
//
//   delta_train_pair --out=FOLDER --regime=pure|master [--updates=12] [--warmup=40]
//
// Trains a transformer of 26 million parameters to add numbers. Supervised steps come first, so that weights and
// masters are those of a trained model. Policy-gradient steps follow: eight sampled answers per group, rewarded by
// closeness, advantages within the group, AdamW at a learning rate of 3e-6 and β = (0.9, 0.99). FOLDER gets
// prev.safetensors and cur.safetensors, the policy before and after the last update.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "base/files.hpp"
#include "base/random.hpp"
#include "delta/safetensors.hpp"
#include "learner/training/trainer.hpp"
#include "model/weights.hpp"

namespace echoline {
namespace {

using torch::Tensor;

constexpr std::int64_t kNumbers = 1000, kPlus = 2000, kEquals = 2001;  // a number is one token, sums included
constexpr std::int64_t kProblems = 8, kTokensPerProblem = 5;           // "a + b = c", several in a row
constexpr std::int64_t kRows = 32, kGroup = 8;

template <class T>
T must(Result<T> result) {
  if (!result) {
    fmt::print(stderr, "delta_train_pair: {}\n", result.error().message());
    std::exit(exit_code(result.error().code));
  }
  return std::move(result).value();
}
void must(const Status& status) {
  if (status) return;
  fmt::print(stderr, "delta_train_pair: {}\n", status.error().message());
  std::exit(exit_code(status.error().code));
}

model::ModelConfig shape() {
  model::ModelConfig config;
  config.vocab_size = 2048;
  config.hidden_size = 512;
  config.intermediate_size = 1536;
  config.layers = 8;
  config.heads = 8;
  config.kv_heads = 4;
  config.head_dim = 64;
  config.positions_max = 64;
  config.initializer_range = 0.016;
  config.tie_embeddings = true;
  return config;
}

// [rows, problems · 5] tokens of correct additions.
Tensor additions(Random& random) {
  Tensor ids = torch::empty({kRows, kProblems * kTokensPerProblem}, torch::kLong);
  auto* at = ids.data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < kRows * kProblems; ++i) {
    const std::int64_t a = random.between(0, kNumbers - 1), b = random.between(0, kNumbers - 1);
    for (const std::int64_t token : {a, kPlus, b, kEquals, a + b}) *at++ = token;
  }
  return ids;
}

Tensor supervised_loss(model::Transformer& model, Random& random) {
  return -model.token_logprobs(additions(random)).logprobs.mean();
}

// Answers to the last problem of each row, sampled from the model.
Tensor policy_gradient_loss(model::Transformer& model, Random& random) {
  const Tensor ids = additions(random);
  const std::int64_t length = ids.size(1);
  const Tensor correct = ids.select(1, length - 1).unsqueeze(1);
  const Tensor hidden = model.hidden_states(ids.narrow(1, 0, length - 1));
  const Tensor log_p = model.logits(hidden.select(1, length - 2)).log_softmax(-1);
  const Tensor answers = log_p.detach().exp().multinomial(kGroup, true);
  const Tensor reward = (-(answers - correct).abs().to(torch::kFloat) / 100.0).exp();
  const Tensor advantage = (reward - reward.mean(1, true)) / (reward.std(1, false, true) + 1e-6);
  return -(advantage * log_p.gather(1, answers)).mean();
}

std::vector<Tensor> masters(learner::AdamW& optimizer) {
  std::vector<Tensor> all;
  for (const auto& slot : optimizer.slots()) all.push_back(slot.master.clone());
  return all;
}

void run(const std::string& out, bool pure, int updates, int warmup, std::uint64_t seed) {
  torch::manual_seed(seed);
  Random random(seed);
  auto model = must(model::init(shape(), seed));
  fmt::print("{} parameters, {} regime\n", model->config().parameters(), pure ? "pure bf16" : "fp32 master");
  learner::OptimizerConfig config{.learning_rate = 1e-3, .beta2 = 0.99, .warmup_updates = 10};
  learner::AdamW optimizer(learner::named_parameters(*model), config);
  for (int i = 0; i < warmup; ++i) {
    const Tensor loss = supervised_loss(*model, random);
    loss.backward();
    optimizer.step();
    if ((i + 1) % 10 == 0) fmt::print("supervised update {}: loss {:.3f}\n", i + 1, loss.item<double>());
  }

  // New moments and rate. The masters keep their supervised values between bf16 values.
  const std::vector<Tensor> trained = masters(optimizer);
  config = {.learning_rate = 3e-6, .beta2 = 0.99, .gradient_norm_max = 1e9};
  optimizer.reset(config);
  torch::NoGradGuard no_gradient;
  if (!pure)
    for (std::size_t i = 0; i < trained.size(); ++i) optimizer.slots()[i].master.copy_(trained[i]);
  optimizer.round_parameters();

  delta::OwnedState prev = must(model::export_policy(*model));
  for (int i = 0; i < updates; ++i) {
    must(model::export_policy(*model, prev));
    {
      torch::AutoGradMode gradient(true);
      const Tensor loss = policy_gradient_loss(*model, random);
      loss.backward();
      fmt::print("policy update {}: loss {:.4f}\n", i + 1, loss.item<double>());
    }
    optimizer.step();
    if (pure)  // what rounding took away is gone
      for (auto& slot : optimizer.slots()) slot.master.copy_(slot.parameter);
  }
  const delta::OwnedState cur = must(model::export_policy(*model));
  must(make_folders(out));
  must(delta::write_safetensors(out + "/prev.safetensors", prev.view()));
  must(delta::write_safetensors(out + "/cur.safetensors", cur.view()));
}

}  // namespace
}  // namespace echoline

int main(int argc, char** argv) {
  std::string out, regime = "pure";
  int updates = 12, warmup = 40, threads = 2;
  std::uint64_t seed = 1;
  CLI::App app{"Two neighbouring policy versions of a small training run"};
  app.add_option("--out", out, "folder for prev.safetensors and cur.safetensors")->required();
  app.add_option("--regime", regime, "pure: bf16 weights; master: fp32 masters")
      ->check(CLI::IsMember({"pure", "master"}));
  app.add_option("--updates", updates, "policy-gradient updates")->check(CLI::Range(1, 10'000));
  app.add_option("--warmup", warmup, "supervised updates before them")->check(CLI::Range(0, 10'000));
  app.add_option("--threads", threads, "threads of the tensor library")->check(CLI::Range(1, 256));
  app.add_option("--seed", seed, "seed of weights, problems and samples");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  }
  echoline::model::use_threads(threads);
  echoline::run(out, regime == "pure", updates, warmup, seed);
  return 0;
}
