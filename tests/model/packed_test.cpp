// Packed sequences against the same sequences one by one: layout, attention of every set of kernels, scores and
// gradients.
#include "model/packed.hpp"

#include "base/random.hpp"
#include "gradients.hpp"
#include "helpers.hpp"
#include "model/kernels.hpp"
#include "model/training_kernels.hpp"
#include "model/training_ops.hpp"
#include "tests/learner/tensor_count.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

std::vector<std::int64_t> to_vector(const Tensor& t) {
  const Tensor flat = t.flatten().contiguous();
  return {flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + flat.numel()};
}

using Ids = std::vector<std::int64_t>;

TEST(Pack, NeighboursShareTheirPromptAndNothingIsPadded) {
  const Ids a{1, 2, 3, 10, 11}, b{1, 2, 3, 20, 21, 22}, c{4, 5, 30};
  const std::vector<float> mask_b{1, 0, 1};
  const PackedTokens packed = pack({{a, 3, {}}, {b, 3, mask_b}, {c, 2, {}}}, torch::kCPU);
  // The prompt without its last token; that token and the response without its last, twice; a sequence alone.
  EXPECT_EQ(to_vector(packed.ids), (Ids{1, 2, 3, 10, 3, 20, 21, 4, 5}));
  EXPECT_EQ(to_vector(packed.positions), (Ids{0, 1, 2, 3, 2, 3, 4, 0, 1}));
  EXPECT_EQ(to_vector(packed.segments), (Ids{0, 2, -1, 2, 2, 0, 4, 3, 0, 7, 2, -1}));
  EXPECT_EQ(to_vector(packed.scored), (Ids{2, 3, 4, 6, 8}));
  EXPECT_EQ(to_vector(packed.targets), (Ids{10, 11, 20, 22, 30}));
  EXPECT_EQ(packed_size({a, 3, {}}).with_prompt + packed_size({b, 3, mask_b}).without_prompt +
                packed_size({c, 2, {}}).with_prompt,
            9);
}

TEST(Pack, TokensBehindTheLastScoredOneAreLeftOut) {
  const Ids a{1, 2, 3, 4, 5, 6};
  const std::vector<float> mask{0, 1, 0, 0};
  const PackedTokens packed = pack({{a, 2, mask}}, torch::kCPU);
  EXPECT_EQ(to_vector(packed.ids), (Ids{1, 2, 3}));
  EXPECT_EQ(to_vector(packed.scored), (Ids{2}));
  EXPECT_EQ(to_vector(packed.targets), (Ids{4}));
}

TEST(Pack, PromptsOfOneTokenHaveNoPrefix) {
  const Ids a{7, 1}, b{7, 2};
  EXPECT_EQ(to_vector(pack({{a, 1, {}}, {b, 1, {}}}, torch::kCPU).segments), (Ids{0, 1, -1, 1, 1, -1}));
}

// Every implementation of attention with this libtorch.
std::vector<AttentionMethod> attention_methods() {
  std::vector<AttentionMethod> methods{AttentionMethod::kKernels, AttentionMethod::kProducts};
  if (fastest_attention(torch::kCUDA) == AttentionMethod::kFused) methods.push_back(AttentionMethod::kFused);
  return methods;
}

// Families with and without a prefix, around the sizes of blocks.
const Tensor& families() {
  static const Tensor segments =
      torch::tensor(Ids{0, 70, -1, 70, 5, 0, 75, 130, 0, 205, 64, 0, 269, 1, -1, 270, 300, -1, 570, 3, -1, 573, 66, 6})
          .view({-1, 3});
  return segments;
}
constexpr std::int64_t kFamilyTokens = 639;

struct HeadShape {
  std::int64_t heads, kv_heads, dim;
};
const HeadShape kHeadShapes[] = {{4, 2, 6}, {8, 4, 64}, {6, 1, 16}, {1, 1, 20}, {2, 2, 128}};

// No window, windows within a block of keys and over several, and one that only the longest texts exceed.
constexpr std::int64_t kWindows[] = {0, 1, 40, 129, 300};

// Attention with a mask of all pairs of tokens, in fp64.
Tensor plain_attention(const Tensor& qkv, HeadShape n, std::int64_t window = 0) {
  const Tensor segments = families();
  Tensor ahead = torch::ones({kFamilyTokens, kFamilyTokens}, torch::kBool);
  const auto fields = segments.accessor<std::int64_t, 2>();
  for (std::int64_t s = 0; s < segments.size(0); ++s) {
    const std::int64_t begin = fields[s][0], count = fields[s][1];
    ahead.narrow(0, begin, count).narrow(1, begin, count).copy_(torch::ones({count, count}, torch::kBool).triu(1));
    if (fields[s][2] >= 0)
      ahead.narrow(0, begin, count).narrow(1, fields[fields[s][2]][0], fields[fields[s][2]][1]).zero_();
  }
  if (window > 0) {
    const Tensor positions = torch::empty({kFamilyTokens}, torch::kLong);
    for (std::int64_t s = 0; s < segments.size(0); ++s) {
      const std::int64_t first = fields[s][2] >= 0 ? fields[fields[s][2]][1] : 0;
      positions.narrow(0, fields[s][0], fields[s][1]).copy_(torch::arange(first, first + fields[s][1]));
    }
    ahead = ahead.logical_or(positions.unsqueeze(1) - positions.unsqueeze(0) >= window);
  }
  const Tensor q = qkv.narrow(1, 0, n.heads).transpose(0, 1);
  const auto keys = [&](std::int64_t first) {
    return qkv.narrow(1, first, n.kv_heads).transpose(0, 1).repeat_interleave(n.heads / n.kv_heads, 0);
  };
  const Tensor scores = torch::matmul(q, keys(n.heads).transpose(1, 2)).masked_fill(ahead, -INFINITY);
  return torch::matmul(scores.softmax(-1), keys(n.heads + n.kv_heads)).transpose(0, 1).flatten(1);
}

TEST(PackedAttention, EveryWayMatchesAPlainFormula) {
  torch::manual_seed(1);
  for (const HeadShape n : kHeadShapes) {
    const Tensor x = torch::randn({kFamilyTokens, n.heads + 2 * n.kv_heads, n.dim}, torch::kDouble) * 0.7;
    const Tensor slope = torch::randn({kFamilyTokens, n.heads * n.dim}, torch::kDouble);
    for (const std::int64_t window : kWindows) {
      const Tensor exact = x.clone().requires_grad_(true);
      const Tensor want = plain_attention(exact, n, window);
      want.backward(slope);
      for (const AttentionMethod method : attention_methods()) {
        if (window > 0 && method == AttentionMethod::kFused) continue;
        const Tensor fp32 = x.to(torch::kFloat).requires_grad_(true);
        const Tensor got = attend_packed(fp32, n.heads, n.kv_heads, families(), method, window);
        got.backward(slope.to(torch::kFloat));
        EXPECT_LT(distance(got.to(torch::kDouble), want), 1e-5)
            << n.dim << " " << window << " " << static_cast<int>(method);
        EXPECT_LT(distance(fp32.grad().to(torch::kDouble), exact.grad()), 1e-4)
            << n.dim << " " << window << " " << static_cast<int>(method);
      }
    }
  }
}

// From 512 to 2,048 tokens, scores of all pairs would take sixteen times as much.
TEST(PackedAttention, MemoryIsLinearInTheLength) {
  ModelConfig config = small_config(true);
  config.positions_max = 4096;
  const auto model = random_model(config, 5);
  const auto peak_bytes = [&](std::int64_t tokens) {
    const Tensor ids = torch::randint(0, config.vocab_size, {1, tokens}, torch::kLong);
    model->token_logprobs(ids).logprobs.sum().backward();  // makes gradients and rotations
    const auto counter = std::make_shared<TensorCount>();
    const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, counter);
    model->token_logprobs(ids).logprobs.sum().backward();
    return counter->most();
  };
  EXPECT_LT(peak_bytes(2048) / peak_bytes(512), 4.5);
}

TEST(PackedAttention, TakesBf16) {
  torch::manual_seed(2);
  const HeadShape n{4, 2, 16};
  const Tensor x = (torch::randn({kFamilyTokens, n.heads + 2 * n.kv_heads, n.dim}) * 0.5).to(torch::kBFloat16);
  const Tensor exact = x.to(torch::kDouble).requires_grad_(true);
  const Tensor want = plain_attention(exact, n), slope = torch::randn_like(want);
  want.backward(slope);
  for (const AttentionMethod method : attention_methods()) {
    const Tensor half = x.clone().requires_grad_(true);
    const Tensor got = attend_packed(half, n.heads, n.kv_heads, families(), method);
    got.backward(slope.to(torch::kBFloat16));
    EXPECT_EQ(got.scalar_type(), torch::kBFloat16);
    EXPECT_LT(distance(got.to(torch::kDouble), want), 0.03);
    EXPECT_LT(distance(half.grad().to(torch::kDouble), exact.grad()), 0.02 * exact.grad().abs().max().item<double>());
  }
}

// A NaN in a key reaches the outputs of all tokens that attend to it, and no others.
TEST(PackedAttention, NanReachesItsReadersOnly) {
  Tensor x = torch::randn({kFamilyTokens, 4, 8});
  x[80][2][3] = NAN;  // a key in the third segment
  const Tensor leaf = x.clone().requires_grad_(true);
  const Tensor y = attend_packed(leaf, 2, 1, families(), AttentionMethod::kKernels);
  const Tensor bad = y.isnan().any(1);
  for (std::int64_t t = 0; t < kFamilyTokens; ++t) EXPECT_EQ(bad[t].item<bool>(), t >= 80 && t < 205) << t;
}

class TrainingKernelTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const KernelSets sets = available_kernels();
    for (int i = 0; i < sets.count; ++i)
      if (std::string_view(sets.best_first[i]->name) == GetParam()) forward_set = sets.best_first[i];
    if (forward_set == nullptr) GTEST_SKIP() << "not on this processor";
    set = &training_kernels_named(GetParam());
    ASSERT_STREQ(set->name, GetParam());
    torch::manual_seed(4);
  }
  const Kernels* forward_set = nullptr;
  const TrainingKernels* set = nullptr;
};
INSTANTIATE_TEST_SUITE_P(Sets, TrainingKernelTest, testing::Values("avx512", "avx2", "portable"));

TEST_P(TrainingKernelTest, Attention) {
  const auto* const segments = reinterpret_cast<const Segment*>(families().data_ptr<std::int64_t>());
  for (std::size_t i = 0; i < 2 * std::size(kHeadShapes); ++i) {
    const HeadShape n = kHeadShapes[i / 2];
    const std::int64_t window = i % 2 == 0 ? 0 : kWindows[1 + i / 2 % (std::size(kWindows) - 1)];
    const std::int64_t group = n.heads / n.kv_heads, all_heads = n.heads + 2 * n.kv_heads;
    const Tensor x = torch::randn({kFamilyTokens, all_heads, n.dim}) * 0.7,
                 slope = torch::randn({kFamilyTokens, n.heads * n.dim});
    const Tensor exact = x.to(torch::kDouble).requires_grad_(true);
    const Tensor want = plain_attention(exact, n, window);
    want.backward(slope.to(torch::kDouble));
    const Tensor out = torch::full_like(slope, NAN), sums = torch::full({kFamilyTokens, n.heads}, NAN),
                 d = torch::full_like(x, NAN);
    const auto head_data = [&](const Tensor& t, std::int64_t head) { return t.data_ptr<float>() + head * n.dim; };
    for (const auto& [first, count] : {std::pair{0, 4}, {4, 1}, {5, 1}, {6, 2}})
      for (std::int64_t kv = 0; kv < n.kv_heads; ++kv) {
        const AttentionHead head{head_data(x, kv * group),
                                 head_data(x, n.heads + kv),
                                 head_data(x, n.heads + n.kv_heads + kv),
                                 all_heads * n.dim,
                                 group,
                                 n.dim,
                                 window};
        float* const sum = sums.data_ptr<float>() + kv * group;
        set->attend(head, segments + first, count, head_data(out, kv * group), n.heads * n.dim, sum, n.heads);
        set->attend_backward(head, segments + first, count, head_data(out, kv * group), head_data(slope, kv * group),
                             n.heads * n.dim, sum, n.heads, head_data(d, kv * group), head_data(d, n.heads + kv),
                             head_data(d, n.heads + n.kv_heads + kv));
      }
    EXPECT_LT(distance(out.to(torch::kDouble), want), 1e-5) << n.dim;
    EXPECT_LT(distance(d.to(torch::kDouble), exact.grad()), 1e-4) << n.dim;
  }
}

TEST_P(TrainingKernelTest, NormsRotationsAndGates) {
  for (const std::int64_t count : {2, 6, 16, 20, 64, 130}) {
    const auto make = [&] { return torch::randn({count}); };
    const auto doubled = [](const Tensor& t) { return t.to(torch::kDouble).requires_grad_(true); };
    const auto same = [](const Tensor& got, const Tensor& want) { return distance(got.to(torch::kDouble), want); };
    const Tensor x = make(), weight = make(), dy = make(), cos = make(), sin = make();
    for (const bool normed : {false, true}) {
      const Tensor dx = x.clone(), wx = doubled(x), ww = doubled(weight);
      const Tensor y = normed ? wx * torch::rsqrt(wx.square().mean() + 1e-6) * ww : wx;
      const Tensor turned = y * cos.to(torch::kDouble) + y.roll(count / 2) * sin.to(torch::kDouble);
      turned.backward(dy.to(torch::kDouble));
      const float* const w = normed ? weight.data_ptr<float>() : nullptr;
      const Tensor forward = x.clone(), d = dy.clone(), dw = torch::zeros({count});
      forward_set->rotate(forward.data_ptr<float>(), w, count, 1e-6f, cos.data_ptr<float>(), sin.data_ptr<float>());
      set->rotate_backward(x.data_ptr<float>(), w, count, 1e-6f, cos.data_ptr<float>(), sin.data_ptr<float>(),
                           d.data_ptr<float>(), dw.data_ptr<float>());
      EXPECT_LT(same(forward, turned), 1e-5);
      EXPECT_LT(same(d, wx.grad()), 2e-5) << count << normed;
      if (normed) {
        EXPECT_LT(same(dw, ww.grad()), 2e-5) << count;
      }
    }
    {
      const Tensor wx = doubled(x), ww = doubled(weight), dx = make(), dw = torch::ones({count});
      (wx * torch::rsqrt(wx.square().mean() + 1e-6) * ww).backward(dy.to(torch::kDouble));
      set->rms_norm_backward(x.data_ptr<float>(), weight.data_ptr<float>(), dy.data_ptr<float>(), count, 1e-6f,
                             dx.data_ptr<float>(), dw.data_ptr<float>());
      EXPECT_LT(same(dx, wx.grad()), 2e-5) << count;
      EXPECT_LT(same(dw - 1, ww.grad()), 2e-5) << count;  // added to what was there
    }
    {
      const Tensor wg = doubled(x), wu = doubled(weight), out = make(), dg = make(), du = make();
      const Tensor y = torch::silu(wg) * wu;
      y.backward(dy.to(torch::kDouble));
      set->gate(x.data_ptr<float>(), weight.data_ptr<float>(), count, out.data_ptr<float>());
      set->gate_backward(x.data_ptr<float>(), weight.data_ptr<float>(), dy.data_ptr<float>(), count,
                         dg.data_ptr<float>(), du.data_ptr<float>());
      EXPECT_LT(same(out, y), 1e-5);
      EXPECT_LT(same(dg, wg.grad()), 1e-5);
      EXPECT_LT(same(du, wu.grad()), 1e-5);
    }
  }
}

TEST_P(TrainingKernelTest, ScoresOverAVocabulary) {
  for (const std::int64_t count : {3, 16, 17, 1024, 1025, 5000}) {
    const Tensor logits = torch::randn({count}) * 4 + 30;
    const std::int64_t target = count / 3;
    const double temperature = 0.7, gradient = -1.25;
    const Tensor exact = logits.to(torch::kDouble).requires_grad_(true);
    const Tensor log_p = (exact / temperature).log_softmax(0);
    (log_p[target] * gradient).backward();
    float logprob = 0, entropy = 0, log_sum = 0;
    const Tensor d = logits.clone();
    set->score(logits.data_ptr<float>(), count, static_cast<float>(1 / temperature), target, &logprob, &entropy,
               &log_sum);
    set->score_backward(d.data_ptr<float>(), count, static_cast<float>(1 / temperature), target, log_sum,
                        static_cast<float>(gradient));
    EXPECT_NEAR(logprob, log_p[target].item<double>(), 2e-5) << count;
    EXPECT_NEAR(entropy, -(log_p.exp() * log_p).sum().item<double>(), 2e-5) << count;
    EXPECT_LT(distance(d.to(torch::kDouble), exact.grad()), 2e-5) << count;
  }
}

// Groups of several prompts, ragged, with masks; packed in one row against every sequence in a row of its own.
class PackedScores : public testing::TestWithParam<std::tuple<Family, bool>> {};
INSTANTIATE_TEST_SUITE_P(Families, PackedScores,
                         testing::Combine(testing::Values(Family::kQwen3, Family::kQwen3Moe, Family::kQwen2,
                                                          Family::kLlama, Family::kMistral, Family::kGemma3),
                                          testing::Bool()),
                         [](const auto& p) {
                           return fmt::format("{}_{}", family_name(std::get<0>(p.param)),
                                              std::get<1>(p.param) ? "tied" : "untied");
                         });

TEST_P(PackedScores, AreThoseOfSequencesOneByOneWithTheSameGradients) {
  const ModelConfig config = small_config(std::get<0>(GetParam()), std::get<1>(GetParam()));
  Random random(9);
  struct Case {
    Ids tokens;
    std::size_t prompt;
    std::vector<float> mask;
  };
  std::vector<Case> cases;
  for (const std::size_t prompt : {1u, 2u, 9u, 5u}) {
    Ids shared;
    for (std::size_t t = 0; t < prompt; ++t) shared.push_back(static_cast<std::int64_t>(random.below(19)));
    for (std::size_t member = 0; member < (prompt == 5 ? 1u : 4u); ++member) {
      Case c{shared, prompt, {}};
      for (std::size_t t = 0; t < 1 + random.below(20); ++t) {
        c.tokens.push_back(static_cast<std::int64_t>(random.below(19)));
        c.mask.push_back(t % 5 == member ? 0 : 1);  // observations
      }
      c.mask[c.mask.size() / 2] = 1;
      cases.push_back(std::move(c));
    }
  }
  for (const bool recompute : {false, true}) {
    const auto model = random_model(config, 17);
    model->recompute_layers(recompute);
    const auto gradients = [&] {
      std::map<std::string, Tensor> by_name;
      for (const auto& item : model->named_parameters()) by_name[item.key()] = gradient_of(item.value());
      model->zero_grad();
      return by_name;
    };
    std::vector<double> want, want_entropy;
    std::vector<ScoredSequence> sequences;
    const auto weight_of = [](std::size_t score) { return 0.5 + static_cast<double>(score % 7) - 2; };
    for (const Case& c : cases) {
      sequences.push_back({c.tokens, c.prompt, c.mask});
      const TokenScores one = model->token_logprobs(torch::tensor(c.tokens, torch::kLong).unsqueeze(0), 0.8);
      Tensor sum = torch::zeros({});
      for (std::size_t t = 0; t < c.mask.size(); ++t) {
        if (c.mask[t] == 0) continue;
        const auto index = static_cast<std::int64_t>(c.prompt + t) - 1;
        sum = sum + one.logprobs[0][index] * weight_of(want.size());
        want.push_back(one.logprobs[0][index].item<double>());
        want_entropy.push_back(one.entropy[0][index].item<double>());
      }
      sum.backward();
    }
    const auto one_by_one = gradients();
    const PackedTokens packed = pack(sequences, torch::kCPU);
    const TokenScores scores = model->packed_logprobs(packed, 0.8);
    ASSERT_EQ(scores.logprobs.numel(), std::ssize(want));
    Tensor sum = torch::zeros({});
    for (std::size_t s = 0; s < want.size(); ++s) {
      const auto index = static_cast<std::int64_t>(s);
      EXPECT_NEAR(scores.logprobs[index].item<double>(), want[s], 2e-5);
      EXPECT_NEAR(scores.entropy[index].item<double>(), want_entropy[s], 2e-5);
      sum = sum + scores.logprobs[index] * weight_of(s);
    }
    sum.backward();
    for (const auto& [name, gradient] : gradients()) {
      const double size = one_by_one.at(name).abs().max().item<double>();
      if (!may_be_unused(name)) {
        EXPECT_GT(size, 1e-3) << name;
      }
      EXPECT_LT(distance(gradient, one_by_one.at(name)), 2e-5 * std::max(1.0, size)) << name;
    }
    torch::NoGradGuard no_gradient;
    EXPECT_LT(distance(model->packed_logprobs(packed, 0.8).logprobs, scores.logprobs.detach()), 1e-5);
  }
}

// Gradients of a token's loss are summed in the same order for any number of threads. OpenBLAS's kernels for AVX2 round
// products differently if threads divide a matrix elsewhere, so the last bits may differ.
TEST(PackedScoresDeterminism, ThreadsDoNotChangeTheOrderOfSums) {
  const auto model = random_model(small_config(true), 3);
  Random random(2);
  std::vector<Ids> texts(12);
  std::vector<ScoredSequence> sequences;
  for (Ids& text : texts) {
    for (int t = 0; t < 40; ++t) text.push_back(static_cast<std::int64_t>(random.below(19)));
    sequences.push_back({text, 3, {}});
  }
  const auto gradients = [&](int threads) {
    use_threads(threads);
    model->zero_grad();
    model->packed_logprobs(pack(sequences, torch::kCPU)).logprobs.sum().backward();
    use_threads(1);
    std::vector<Tensor> all;
    for (const auto& p : model->parameters()) all.push_back(p.grad().clone());
    return all;
  };
  const auto one = gradients(1), two = gradients(2);
  for (std::size_t i = 0; i < one.size(); ++i)
    EXPECT_LE(distance(one[i], two[i]), 1e-5 * one[i].abs().max().item<double>()) << i;
}

}  // namespace
}  // namespace echoline::model
