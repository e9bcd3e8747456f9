// Sliding windows of Mistral, Qwen and Gemma 3: a forward pass against the reference; generation, and responses that
// share a prompt, against a forward pass.
#include "base/random.hpp"
#include "gradients.hpp"
#include "helpers.hpp"
#include "model/generate.hpp"
#include "model/paged_cache.hpp"
#include "model/weights.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

// A window within a page of the cache, one of several pages, and one of a whole page.
struct WindowCase {
  Family family;
  SlidingWindow window;
};
class Windows : public testing::TestWithParam<WindowCase> {
 protected:
  static ModelConfig config() {
    ModelConfig c = small_config(GetParam().family, /*tied=*/GetParam().family == Family::kGemma3);
    c.layers = 3;
    c.positions_max = 200;
    c.sliding_window = GetParam().window;
    return c;
  }
  static std::vector<Token> random_text(std::size_t tokens, std::uint64_t seed) {
    Random random(seed);
    std::vector<Token> text;
    while (text.size() < tokens) text.push_back(Token(random.below(19)));
    return text;
  }
};
INSTANTIATE_TEST_SUITE_P(Families, Windows,
                         testing::Values(WindowCase{Family::kMistral, {.tokens = 5, .full_layers = {}}},
                                         WindowCase{Family::kQwen2, {.tokens = 37, .full_layers = {0}}},
                                         WindowCase{Family::kQwen3, {.tokens = 16, .full_layers = {0, 1}}},
                                         WindowCase{Family::kGemma3, {.tokens = 21, .full_layers = {2}}}),
                         [](const auto& p) { return std::string(family_name(p.param.family)); });

TEST_P(Windows, LogitsMatchThePlainReference) {
  const auto model = random_model(config(), 5);
  const std::vector<Token> text = random_text(90, 1);
  const auto want = reference::logits(config(), reference_weights(*model), text);
  for (const bool gradients : {false, true}) {
    torch::AutoGradMode mode(gradients);
    const Tensor got = model->forward(ids_of({text})).detach()[0];
    double worst = 0;
    for (std::size_t t = 0; t < want.size(); ++t)
      for (std::size_t v = 0; v < want[t].size(); ++v)
        worst = std::max(worst, std::abs(want[t][v] - got[std::int64_t(t)][std::int64_t(v)].item<double>()));
    EXPECT_LT(worst, 3e-5);
  }
  ModelConfig without = config();
  without.sliding_window->tokens = 200;
  const auto wide = reference::logits(without, reference_weights(*model), text);
  EXPECT_GT(std::abs(wide.back()[0] - want.back()[0]), 1e-4) << "the window hides tokens that matter";
}

// Decoding reads the last pages only, by the kernel and, as on a GPU, by libtorch's products.
TEST_P(Windows, GenerationHasTheProbabilitiesOfAForwardPass) {
  const auto model = random_model(config(), 7);
  const std::vector<std::vector<Token>> prompts{random_text(40, 2), random_text(3, 3)};
  const auto drawn = generate(*model, prompts, {.tokens_max = 100, .seed = 5});
  ASSERT_TRUE(drawn) << drawn.error().message();
  for (std::size_t row = 0; row < prompts.size(); ++row) {
    std::vector<Token> text = prompts[row];
    text.insert(text.end(), (*drawn)[row].tokens.begin(), (*drawn)[row].tokens.end());
    const Tensor scores = model->token_logprobs(ids_of({text})).logprobs[0];
    const auto skip = std::int64_t(prompts[row].size()) - 1;
    for (std::size_t t = 0; t < (*drawn)[row].logprobs.size(); ++t)
      ASSERT_NEAR((*drawn)[row].logprobs[t], scores[skip + std::int64_t(t)].item<double>(), 3e-5) << t;
  }
}

TEST_P(Windows, BothWaysToReadPagesAgree) {
  torch::NoGradGuard no_grad;
  const auto model = random_model(config(), 8);
  const std::vector<Token> text = random_text(101, 4);
  const Tensor want = model->forward(ids_of({text}))[0][100];
  for (const bool gathered : {false, true}) {
    PagedCache cache(config(), torch::kCPU, torch::kFloat, Bytes{1 << 20}, /*by_token=*/gathered);
    ASSERT_TRUE(cache.reserve(7));
    Pages pages;
    for (int page = 0; page < 7; ++page) pages.list.push_back(cache.take_reserved());
    const auto prefill = cache.prefill_attention({&pages}, {100});
    model->hidden_states(ids_of({{text.begin(), text.end() - 1}}), {}, prefill.get());
    pages.tokens = 100;
    const auto decode = cache.decode_attention({&pages}, gathered);
    const Tensor hidden =
        model->hidden_states(ids_of({{text.back()}}), torch::tensor({{std::int64_t{100}}}), decode.get());
    EXPECT_LT(distance(model->logits(hidden)[0][0], want), 3e-5) << gathered;
  }
}

// Responses of a shared prompt, packed: log-probabilities and gradients as of each text alone.
TEST_P(Windows, PackedResponsesScoreLikeWholeTexts) {
  const auto model = random_model(config(), 9);
  const std::vector<Token> prompt = random_text(50, 5);
  std::vector<std::vector<std::int64_t>> texts(3, {prompt.begin(), prompt.end()});
  std::vector<ScoredSequence> sequences;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    for (const Token token : random_text(30 + 20 * i, 6 + i)) texts[i].push_back(token);
    sequences.push_back({.tokens = texts[i], .prompt = prompt.size(), .mask = {}});
  }
  const Tensor packed = model->packed_logprobs(pack(sequences, torch::kCPU)).logprobs;
  packed.sum().backward();
  std::map<std::string, Tensor> gradients;
  for (const auto& item : model->named_parameters()) gradients[item.key()] = gradient_of(item.value());
  model->zero_grad();
  std::int64_t begin = 0;
  for (const auto& text : texts) {
    const auto count = std::int64_t(text.size() - prompt.size());
    const Tensor whole = model->token_logprobs(torch::tensor(text, torch::kLong).unsqueeze(0)).logprobs[0];
    const Tensor response = whole.narrow(0, std::int64_t(prompt.size()) - 1, count);
    response.sum().backward();
    EXPECT_LT(distance(packed.narrow(0, begin, count).detach(), response.detach()), 3e-5);
    begin += count;
  }
  for (const auto& item : model->named_parameters())
    EXPECT_LT(distance(gradients.at(item.key()), gradient_of(item.value())),
              1e-4 * std::max(1.0, gradients.at(item.key()).abs().max().item<double>()))
        << item.key();
}

}  // namespace
}  // namespace echoline::model
