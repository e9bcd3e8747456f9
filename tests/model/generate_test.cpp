// Sampling: the drawn tokens, their probabilities, the end of a response, and that batching never matters.
#include "model/generate.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "helpers.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

// The distribution of the next token after `prompt`, by the reference.
std::vector<double> next_token(const Transformer& model, const std::vector<Token>& prompt, double temperature) {
  auto p =
      reference::log_softmax(reference::logits(model.config(), reference_weights(model), prompt).back(), temperature);
  for (double& x : p) x = std::exp(x);
  return p;
}

// Pearson's statistic over bins of at least 10 expected, the rest pooled, divided by its 99.99 % point (by Wilson and
// Hilferty): below 1 unless the counts do not come from p.
double misfit(const std::vector<std::int64_t>& counts, const std::vector<double>& p) {
  const double n = double(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  double statistic = 0, pooled_count = 0, pooled_expected = 0;
  int bins = 0;
  const auto add = [&](double count, double expected) {
    statistic += (count - expected) * (count - expected) / expected;
    ++bins;
  };
  for (std::size_t i = 0; i < p.size(); ++i) {
    if (n * p[i] >= 10) {
      add(double(counts[i]), n * p[i]);
    } else {
      pooled_count += double(counts[i]);
      pooled_expected += n * p[i];
    }
  }
  if (pooled_expected > 1) add(pooled_count, pooled_expected);
  EXPECT_GE(bins, 3);
  const double df = bins - 1, a = 2 / (9 * df);
  return statistic / (df * std::pow(1 - a + 3.719 * std::sqrt(a), 3));
}

std::vector<std::int64_t> count_tokens(const std::vector<Generation>& generations, std::size_t position,
                                       std::int64_t vocab) {
  std::vector<std::int64_t> counts(std::size_t(vocab), 0);
  for (const Generation& g : generations) ++counts[std::size_t(g.tokens.at(position))];
  return counts;
}

// Flat enough for many tokens to be likely.
std::shared_ptr<Transformer> sampling_model() {
  ModelConfig config = small_config(true);
  config.initializer_range = 0.12;
  return random_model(config, 21);
}

TEST(Generate, DrawsFromTheTemperedDistribution) {
  const auto model = sampling_model();
  const std::vector<Token> prompt = {3, 1, 4};
  for (const double temperature : {1.0, 0.5}) {
    Sampling options{.temperature = temperature, .tokens_max = 2, .seed = 99};
    const auto generations = generate(*model, std::vector(20000, prompt), options).value();
    const auto first = next_token(*model, prompt, temperature);
    EXPECT_LT(misfit(count_tokens(generations, 0, 19), first), 1);
    std::vector<double> second(19);  // marginal over the first token: the cached step
    for (Token token = 0; token < 19; ++token) {
      auto longer = prompt;
      longer.push_back(token);
      const auto p = next_token(*model, longer, temperature);
      for (std::size_t i = 0; i < 19; ++i) second[i] += first[std::size_t(token)] * p[i];
    }
    EXPECT_LT(misfit(count_tokens(generations, 1, 19), second), 1);
    // The statistic detects another temperature.
    EXPECT_GT(misfit(count_tokens(generations, 0, 19), next_token(*model, prompt, temperature * 1.3)), 1);
  }
}

TEST(Generate, TopPDrawsFromTheRenormalisedNucleusAndReportsTheFullDistribution) {
  const auto model = sampling_model();
  const std::vector<Token> prompt = {3, 1, 4};
  const double top_p = 0.6;
  const auto p = next_token(*model, prompt, 1.0);
  std::vector<std::size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](auto a, auto b) { return p[a] > p[b]; });
  std::vector<double> nucleus(p.size());
  double mass = 0;
  for (const std::size_t i : order) {
    if (mass >= top_p) break;
    nucleus[i] = p[i];
    mass += p[i];
  }
  for (double& x : nucleus) x /= mass;
  const auto generations =
      generate(*model, std::vector(10000, prompt), {.top_p = top_p, .tokens_max = 1, .seed = 5}).value();
  const auto counts = count_tokens(generations, 0, 19);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (nucleus[i] == 0) {
      EXPECT_EQ(counts[i], 0) << i;
    }
  }
  EXPECT_LT(misfit(counts, nucleus), 1);
  for (const Generation& g : generations) EXPECT_NEAR(g.logprobs[0], std::log(p[std::size_t(g.tokens[0])]), 2e-5);
  // A nucleus below the most likely token's probability still contains that token.
  const auto one = generate(*model, {prompt}, {.top_p = 1e-6, .tokens_max = 1}).value();
  EXPECT_EQ(std::size_t(one[0].tokens[0]), order[0]);
}

TEST(Generate, GreedyTakesTheMostLikelyTokenEveryTime) {
  const auto model = random_model(small_config(false), 22);
  std::vector<Token> text = {2, 7, 1};
  const auto got = generate(*model, {text}, {.temperature = 0, .tokens_max = 8}).value();
  ASSERT_EQ(got[0].tokens.size(), 8u);
  EXPECT_EQ(got[0].finish, Finish::kLength);
  for (std::size_t i = 0; i < 8; ++i) {
    const auto p = next_token(*model, text, 1.0);
    const auto best = std::max_element(p.begin(), p.end());
    EXPECT_EQ(got[0].tokens[i], best - p.begin());
    EXPECT_NEAR(got[0].logprobs[i], std::log(*best), 5e-5);
    text.push_back(got[0].tokens[i]);
  }
}

// The property the importance ratio rests on: an unchanged policy scores its own samples as it drew them.
TEST(Generate, BehaviourLogprobsEqualRecomputedLogprobs) {
  torch::NoGradGuard no_grad;
  const auto model = sampling_model();
  const std::vector<std::vector<Token>> prompts = {{1}, {2, 3, 4, 5, 6}, {7, 8}, {7, 8}, {9, 10, 11}};
  for (const double temperature : {1.0, 1.4}) {
    const Sampling options{.temperature = temperature, .top_p = 0.9, .tokens_max = 12, .eos = {0, 4}, .seed = 6};
    const auto generations = generate(*model, prompts, options).value();
    for (std::size_t r = 0; r < prompts.size(); ++r) {
      auto text = prompts[r];
      text.insert(text.end(), generations[r].tokens.begin(), generations[r].tokens.end());
      const Tensor scores = model->token_logprobs(ids_of({text}), temperature).logprobs[0];
      ASSERT_EQ(generations[r].tokens.size(), generations[r].logprobs.size());
      for (std::size_t i = 0; i < generations[r].tokens.size(); ++i) {
        EXPECT_NEAR(generations[r].logprobs[i], scores[std::int64_t(prompts[r].size() + i) - 1].item<float>(), 1e-5);
      }
    }
  }
}

TEST(Generate, ABatchOfDifferentLengthsEqualsSingleRows) {
  const auto model = random_model(small_config(true), 23);
  const std::vector<std::vector<Token>> prompts = {
      {1}, {2, 3, 4, 5, 6, 7, 8}, {9, 10}, {2, 3, 4, 5, 6, 7, 8}, {11, 12, 13}};
  const Sampling options{.temperature = 0, .tokens_max = 10, .eos = {5}};
  const auto batch = generate(*model, prompts, options).value();
  for (std::size_t r = 0; r < prompts.size(); ++r) {
    const auto alone = generate(*model, {prompts[r]}, options).value();
    EXPECT_EQ(batch[r].tokens, alone[0].tokens) << r;
    EXPECT_EQ(batch[r].finish, alone[0].finish) << r;
    for (std::size_t i = 0; i < alone[0].logprobs.size(); ++i) {
      EXPECT_NEAR(batch[r].logprobs[i], alone[0].logprobs[i], 1e-5) << r;
    }
  }
}

TEST(Generate, RowsEndAtTheFirstEndingToken) {
  const auto model = sampling_model();
  const Sampling options{.tokens_max = 30, .eos = {3, 5, 7, 9}, .seed = 1};
  const auto generations = generate(*model, std::vector<std::vector<Token>>(200, {1, 2}), options).value();
  const auto ends = [&](Token t) { return std::find(options.eos.begin(), options.eos.end(), t) != options.eos.end(); };
  std::size_t ended = 0;
  for (const Generation& g : generations) {
    ASSERT_FALSE(g.tokens.empty());
    EXPECT_TRUE(std::none_of(g.tokens.begin(), g.tokens.end() - 1, ends));
    EXPECT_EQ(g.finish == Finish::kEos, ends(g.tokens.back()));
    if (g.finish == Finish::kLength) {
      EXPECT_EQ(g.tokens.size(), 30u);
    }
    ended += g.finish == Finish::kEos;
  }
  EXPECT_GT(ended, 100u);
  // All rows ended: no further token is computed.
  int steps = 0;
  std::vector<Token> every(19);
  std::iota(every.begin(), every.end(), 0);
  const auto short_ones =
      generate(*model, {{1}, {2}}, {.tokens_max = 30, .eos = every}, [&] { return ++steps, false; });
  EXPECT_EQ(short_ones.value()[0].tokens.size(), 1u);
  EXPECT_EQ(steps, 0);
}

TEST(Generate, TheSeedDecides) {
  const auto model = sampling_model();
  const std::vector<std::vector<Token>> prompts(20, {1, 2});
  const auto run = [&](std::uint64_t seed) {
    std::vector<std::vector<Token>> out;
    const auto generations = generate(*model, prompts, {.tokens_max = 10, .seed = seed}).value();
    for (const Generation& g : generations) out.push_back(g.tokens);
    return out;
  };
  const auto a = run(1);
  torch::randn({5});  // the global generator plays no part
  EXPECT_EQ(a, run(1));
  EXPECT_NE(a, run(2));
  EXPECT_NE(a[0], a[1]);  // equal prompts are drawn independently
}

TEST(Generate, InterruptionKeepsDrawnTokens) {
  const auto model = sampling_model();
  int calls = 0;
  const auto generations =
      generate(*model, {{1}, {2, 3}}, {.tokens_max = 20, .seed = 3}, [&] { return ++calls == 4; }).value();
  for (const Generation& g : generations) {
    EXPECT_EQ(g.tokens.size(), 4u);
    EXPECT_EQ(g.logprobs.size(), 4u);
    EXPECT_EQ(g.finish, Finish::kInterrupted);
  }
}

TEST(Generate, RefusesBadInput) {
  const auto model = sampling_model();
  const auto code_of = [&](const std::vector<std::vector<Token>>& prompts, const Sampling& options) {
    const auto r = generate(*model, prompts, options);
    return r ? Code::kInternal : r.error().code;
  };
  EXPECT_EQ(code_of({{}}, {}), Code::kInvalid);
  EXPECT_EQ(code_of({{19}}, {}), Code::kInvalid);
  EXPECT_EQ(code_of({{-1}}, {}), Code::kInvalid);
  EXPECT_EQ(code_of({{1}}, {.temperature = -1}), Code::kInvalid);
  EXPECT_EQ(code_of({{1}}, {.temperature = NAN}), Code::kInvalid);
  EXPECT_EQ(code_of({{1}}, {.top_p = 0}), Code::kInvalid);
  EXPECT_EQ(code_of({{1}}, {.top_p = 1.01}), Code::kInvalid);
  EXPECT_EQ(code_of({{1}}, {.tokens_max = 0}), Code::kInvalid);
  EXPECT_EQ(code_of({{1}}, {.tokens_max = 64}), Code::kInvalid);  // 65 > positions_max
  EXPECT_EQ(code_of({{1}}, {.tokens_max = INT64_MAX}), Code::kInvalid);
  EXPECT_TRUE(generate(*model, {}, {}).value().empty());
  EXPECT_EQ(generate(*model, {{1}}, {.tokens_max = 63}).value()[0].tokens.size(), 63u);
}

TEST(Generate, ScoresItsOwnTokens) {
  const auto model = sampling_model();
  for (const double temperature : {1.0, 0.6}) {
    const auto got = generate(*model, {{1, 2, 3}}, {.temperature = temperature, .tokens_max = 9, .seed = 4}).value()[0];
    const auto scored = score(*model, {1, 2, 3}, got.tokens, temperature).value();
    ASSERT_EQ(scored.size(), got.tokens.size());
    for (std::size_t i = 0; i < scored.size(); ++i) EXPECT_NEAR(scored[i], got.logprobs[i], 1e-4) << i;
  }
  EXPECT_EQ(score(*model, {}, {1}).error().code, Code::kInvalid);
  EXPECT_EQ(score(*model, {1}, {}).error().code, Code::kInvalid);
  EXPECT_EQ(score(*model, {1}, {4000}).error().code, Code::kInvalid);
  EXPECT_TRUE(score(*model, {1}, std::vector<Token>(63, 2)));
  EXPECT_EQ(score(*model, {1}, std::vector<Token>(64, 2)).error().code, Code::kInvalid);
}

TEST(Generate, WeightsThatAreNotFiniteAreAnError) {
  const auto model = sampling_model();
  {
    torch::NoGradGuard no_grad;
    model->named_parameters()["model.norm.weight"].fill_(NAN);
  }
  const auto got = generate(*model, {{1}}, {.tokens_max = 4});
  ASSERT_FALSE(got);
  EXPECT_EQ(got.error().code, Code::kCorrupt);
}

}  // namespace
}  // namespace echoline::model
