// Continuous batching: other rows, their order, and shared or evicted pages never change a sequence's result.
#include "model/running_batch.hpp"

#include <c10/core/CPUAllocator.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "base/random.hpp"
#include "helpers.hpp"
#include "model/generate.hpp"
#include "model/paged_cache.hpp"
#include "model/sampler.hpp"
#include "model/weights.hpp"

namespace echoline::model {
namespace {

using torch::Tensor;

std::shared_ptr<Transformer> test_model(std::uint64_t seed = 31) {
  ModelConfig config = small_config(true);
  config.positions_max = 200;
  return random_model(config, seed);
}

// Steps until nothing is left.
std::map<std::uint64_t, Ended> finish(RunningBatch& batch) {
  std::map<std::uint64_t, Ended> out;
  for (int steps = 0; batch.running() + batch.waiting() > 0; ++steps) {
    if (steps == 10000) ADD_FAILURE() << "does not end";
    if (steps == 10000) break;
    for (Ended& ended : batch.step()) out.emplace(ended.id, std::move(ended));
  }
  return out;
}

Generation alone(const std::shared_ptr<Transformer>& model, Sequence sequence) {
  RunningBatch batch(model, {});
  const std::uint64_t id = sequence.id;
  EXPECT_TRUE(batch.add(std::move(sequence)));
  return finish(batch).at(id).generation.value();
}

std::vector<Token> some_prompt(Random& random, std::int64_t tokens) {
  std::vector<Token> prompt;
  while (std::ssize(prompt) < tokens) prompt.push_back(Token(random.below(19)));
  return prompt;
}

// Lengths on both sides of the edges of pages.
std::vector<Sequence> some_sequences(double temperature) {
  Random random(7);
  std::vector<Sequence> out;
  for (const std::int64_t tokens : {1, 15, 16, 17, 31, 32, 33, 5, 70}) {
    Sequence s{.id = 100 + out.size(), .prompt = some_prompt(random, tokens), .sampling = {}};
    s.sampling.temperature = temperature;
    s.sampling.tokens_max = 3 + std::int64_t(random.below(40));
    s.sampling.seed = random.next();
    s.sampling.eos = {4};
    out.push_back(std::move(s));
  }
  return out;
}

void expect_same(const Generation& got, const Generation& want, double tolerance = 2e-5) {
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.finish, want.finish);
  ASSERT_EQ(got.logprobs.size(), want.logprobs.size());
  for (std::size_t i = 0; i < want.logprobs.size(); ++i) EXPECT_NEAR(got.logprobs[i], want.logprobs[i], tolerance) << i;
}

TEST(PagedCache, BothWaysToAttendAgreeWithAForwardPass) {
  torch::NoGradGuard no_grad;
  const auto model = test_model();
  const std::vector<std::int64_t> lengths = {1, 15, 16, 17, 40};
  Random random(1);
  std::vector<std::vector<Token>> texts;
  for (const std::int64_t tokens : lengths) texts.push_back(some_prompt(random, tokens + 20));
  for (const bool gathered : {false, true}) {
    PagedCache cache(model->config(), model->device(), model->dtype(), Bytes{1 << 20});
    ASSERT_TRUE(cache.reserve(40));
    std::vector<Pages> pages(texts.size());
    std::vector<const Pages*> views;
    Tensor ids = torch::zeros({5, 40}, torch::kLong);
    for (std::size_t r = 0; r < texts.size(); ++r) {
      for (std::int64_t t = 0; t < lengths[r]; ++t) ids[std::int64_t(r)][t] = texts[r][std::size_t(t)];
      while (std::ssize(pages[r].list) * PagedCache::kPageTokens < lengths[r] + 20)
        pages[r].list.push_back(cache.take_reserved());
      views.push_back(&pages[r]);
    }
    model->hidden_states(ids, {}, cache.prefill_attention(views, lengths).get());
    for (std::size_t r = 0; r < texts.size(); ++r) pages[r].tokens = lengths[r];
    for (std::int64_t step = 0; step < 20; ++step) {
      Tensor next = torch::zeros({5, 1}, torch::kLong), positions = torch::zeros({5, 1}, torch::kLong);
      for (std::size_t r = 0; r < texts.size(); ++r) {
        next[std::int64_t(r)][0] = texts[r][std::size_t(pages[r].tokens)];
        positions[std::int64_t(r)][0] = pages[r].tokens;
      }
      const Tensor got =
          model->logits(model->hidden_states(next, positions, cache.decode_attention(views, gathered).get()));
      for (std::size_t r = 0; r < texts.size(); ++r) {
        ++pages[r].tokens;
        const std::vector<Token> text(texts[r].begin(), texts[r].begin() + pages[r].tokens);
        EXPECT_LT(distance(got[std::int64_t(r)][0], model->forward(ids_of({text}))[0][pages[r].tokens - 1]), 2e-5)
            << gathered << " " << r << " " << step;
      }
    }
  }
}

TEST(RunningBatch, CompanyChangesNothing) {
  const auto model = test_model();
  for (const double temperature : {0.0, 0.8}) {
    RunningBatch batch(model, {.rows_max = 4, .prefill_tokens_max = 40});
    const auto sequences = some_sequences(temperature);
    std::map<std::uint64_t, Ended> got;
    for (std::size_t i = 0; i < sequences.size(); ++i) {  // they come in one after another
      ASSERT_TRUE(batch.add(sequences[i]));
      for (Ended& ended : batch.step()) got.emplace(ended.id, std::move(ended));
      EXPECT_LE(batch.running(), 4u);
    }
    got.merge(finish(batch));
    for (const Sequence& s : sequences) expect_same(got.at(s.id).generation.value(), alone(model, s));
  }
}

// A CPU computes in fp32 with weights stored in bf16. The result equals that of fp32 weights with these values.
TEST(RunningBatch, WeightsInBf16GiveTheSame) {
  const auto fp32_model = test_model();
  const auto bf16_model = create(fp32_model->config(), torch::kCPU, torch::kBFloat16).value();
  ASSERT_TRUE(load_policy(*bf16_model, export_policy(*fp32_model)->view()));
  for (const double temperature : {0.0, 0.8}) {
    RunningBatch batch(bf16_model, {.rows_max = 6});
    const auto sequences = some_sequences(temperature);
    for (const Sequence& s : sequences) ASSERT_TRUE(batch.add(s));
    const auto got = finish(batch);
    for (const Sequence& s : sequences) {
      const Generation want = alone(fp32_model, s);
      expect_same(got.at(s.id).generation.value(), want, 5e-5);
      const auto scored = score(*bf16_model, s.prompt, want.tokens, temperature == 0 ? 1 : temperature).value();
      for (std::size_t i = 0; i < scored.size(); ++i) EXPECT_NEAR(scored[i], want.logprobs[i], 5e-5);
    }
  }
}

TEST(RunningBatch, AShortOneDoesNotWaitForALongOne) {
  const auto model = test_model();
  RunningBatch batch(model, {.rows_max = 2});
  const auto sequence = [](std::uint64_t id, std::int64_t tokens) {
    Sequence s{.id = id, .prompt = {1, Token(id)}, .sampling = {}};
    s.sampling.tokens_max = tokens;
    return s;
  };
  ASSERT_TRUE(batch.add(sequence(1, 12)));
  for (std::uint64_t id = 2; id < 6; ++id) ASSERT_TRUE(batch.add(sequence(id, 3)));
  std::vector<std::uint64_t> order;
  int steps = 0;
  for (; batch.running() + batch.waiting() > 0; ++steps)
    for (const Ended& ended : batch.step()) order.push_back(ended.id);
  EXPECT_EQ(order, (std::vector<std::uint64_t>{2, 3, 4, 5, 1}));
  EXPECT_EQ(steps, 12);  // the others went by beside the long one
}

TEST(RunningBatch, TheSeedAndThePositionDecideTheTokens) {
  const auto model = test_model();
  Sequence s{.id = 1, .prompt = {3, 1, 4}, .sampling = {.tokens_max = 30, .seed = 5}};
  const Generation first = alone(model, s);
  EXPECT_EQ(alone(model, s).tokens, first.tokens);
  s.sampling.seed = 6;
  EXPECT_NE(alone(model, s).tokens, first.tokens);
}

TEST(RunningBatch, EvictionChangesNothing) {
  const auto model = test_model();
  for (const double temperature : {0.0, 0.8}) {
    auto sequences = some_sequences(temperature);
    for (Sequence& s : sequences) s.sampling.tokens_max = 50, s.sampling.eos.clear();
    const PagedCache unused_cache(model->config(), model->device(), model->dtype(), Bytes{1 << 20});
    RunningBatch batch(model, {.rows_max = 16, .cache_max = Bytes{9 * unused_cache.page_bytes().count}});
    for (const Sequence& s : sequences) ASSERT_TRUE(batch.add(s));
    std::map<std::uint64_t, Ended> got;
    std::size_t evictions = 0;
    for (std::size_t before = 0; batch.running() + batch.waiting() > 0;) {
      before = batch.waiting();
      for (Ended& e : batch.step()) got.emplace(e.id, std::move(e));
      evictions += batch.waiting() > before;
      EXPECT_LE(batch.cache_used().count, 9 * unused_cache.page_bytes().count);
    }
    EXPECT_GT(evictions, 0u);
    for (const Sequence& s : sequences) expect_same(got.at(s.id).generation.value(), alone(model, s), 1e-4);
    EXPECT_EQ(batch.cache_used().count, 0u);
  }
}

TEST(RunningBatch, ASequenceThatNeverFitsEndsAlone) {
  const auto model = test_model();
  const PagedCache unused_cache(model->config(), model->device(), model->dtype(), Bytes{1 << 20});
  RunningBatch batch(model, {.cache_max = Bytes{4 * unused_cache.page_bytes().count}});
  Random random(2);
  ASSERT_TRUE(batch.add({.id = 1, .prompt = some_prompt(random, 10), .sampling = {.tokens_max = 20}}));
  ASSERT_TRUE(batch.add({.id = 2, .prompt = some_prompt(random, 65), .sampling = {.tokens_max = 20}}));   // at once
  ASSERT_TRUE(batch.add({.id = 3, .prompt = some_prompt(random, 10), .sampling = {.tokens_max = 100}}));  // on the way
  ASSERT_TRUE(batch.add({.id = 4, .prompt = some_prompt(random, 10), .sampling = {.tokens_max = 20}}));
  const auto got = finish(batch);
  EXPECT_EQ(got.at(1).generation.value().tokens.size(), 20u);
  EXPECT_EQ(got.at(2).generation.error().code, Code::kExhausted);
  EXPECT_EQ(got.at(3).generation.error().code, Code::kExhausted);
  EXPECT_EQ(got.at(4).generation.value().tokens.size(), 20u);
}

TEST(RunningBatch, AGroupSharesThePagesOfItsPrompt) {
  const auto model = test_model();
  const PagedCache unused_cache(model->config(), model->device(), model->dtype(), Bytes{1 << 20});
  RunningBatch batch(model, {});
  const auto pages = [&] { return batch.cache_used().count / unused_cache.page_bytes().count; };
  Random random(3);
  const std::vector<Token> prompt = some_prompt(random, 40);  // two full pages and a part
  std::vector<Sequence> group;
  for (std::uint64_t id = 0; id < 4; ++id)
    group.push_back({.id = id, .prompt = prompt, .sampling = {.tokens_max = 30, .seed = id}});
  for (const Sequence& s : group) ASSERT_TRUE(batch.add(s));
  batch.step();
  EXPECT_EQ(pages(), 3u);
  batch.step();  // every member writes into a copy of the third page
  EXPECT_EQ(pages(), 3u + 4);
  ASSERT_TRUE(batch.add({.id = 9, .prompt = prompt, .sampling = {.tokens_max = 30, .seed = 9}}));
  batch.step();  // one more needs nothing new but its copy, later
  EXPECT_EQ(pages(), 3u + 4);
  ASSERT_TRUE(batch.abort(0));
  EXPECT_EQ(pages(), 3u + 3);
  batch.set_weights_version(2);  // no sequence has read the prompt under these weights
  ASSERT_TRUE(batch.add({.id = 10, .prompt = prompt, .sampling = {.tokens_max = 30, .seed = 10}}));
  batch.step();
  EXPECT_EQ(pages(), 2u + 3 + 1 + 3);  // the old third page is free
  auto got = finish(batch);
  EXPECT_EQ(pages(), 0u);
  for (std::size_t i = 1; i < 4; ++i) expect_same(got.at(i).generation.value(), alone(model, group[i]));
}

TEST(RunningBatch, SpansNameTheVersions) {
  const auto model = test_model(), other = test_model(32);
  RunningBatch batch(model, {});
  batch.set_weights_version(7);
  const std::vector<Token> prompt = {1, 2, 3};
  ASSERT_TRUE(batch.add({.id = 1, .prompt = prompt, .sampling = {.temperature = 0, .tokens_max = 9}}));
  for (int i = 0; i < 4; ++i) EXPECT_TRUE(batch.step().empty());
  {
    torch::NoGradGuard no_grad;
    for (auto& item : model->named_parameters()) item.value().copy_(other->named_parameters()[item.key()]);
  }
  batch.set_weights_version(9);
  batch.set_weights_version(9);
  ASSERT_TRUE(batch.add({.id = 2, .prompt = prompt, .sampling = {.temperature = 0, .tokens_max = 5}}));
  const auto got = finish(batch);
  EXPECT_EQ(got.at(1).spans, (std::vector<Span>{{7, 4}, {9, 9}}));
  EXPECT_EQ(got.at(2).spans, (std::vector<Span>{{9, 5}}));
  // A sequence that came later uses nothing of the old weights.
  expect_same(got.at(2).generation.value(),
              alone(other, {.id = 2, .prompt = prompt, .sampling = {.temperature = 0, .tokens_max = 5}}));
}

TEST(RunningBatch, AbortsAndInterruptions) {
  const auto model = test_model();
  RunningBatch batch(model, {.rows_max = 2});
  for (std::uint64_t id = 1; id <= 3; ++id)
    ASSERT_TRUE(batch.add({.id = id, .prompt = {1, 2}, .sampling = {.tokens_max = 20, .seed = id}}));
  EXPECT_EQ(batch.add({.id = 3, .prompt = {1}, .sampling = {}}).error().code, Code::kInvalid);
  EXPECT_EQ(batch.add({.id = 4, .prompt = {}, .sampling = {}}).error().code, Code::kInvalid);
  EXPECT_EQ(batch.add({.id = 4, .prompt = {1}, .sampling = {.min_p = 1.5}}).error().code, Code::kInvalid);
  EXPECT_EQ(batch.add({.id = 4, .prompt = {1}, .sampling = {.top_k = -1}}).error().code, Code::kInvalid);
  batch.step();
  batch.step();
  EXPECT_TRUE(batch.abort(1));
  EXPECT_FALSE(batch.abort(1));
  EXPECT_FALSE(batch.abort(4));
  batch.step();
  ASSERT_TRUE(batch.add({.id = 1, .prompt = {1, 2}, .sampling = {.tokens_max = 20, .seed = 1}}));  // a free id again
  const auto ended = batch.interrupt();
  ASSERT_EQ(ended.size(), 3u);
  const std::vector<std::pair<std::uint64_t, std::size_t>> want = {{2, 3}, {3, 1}, {1, 0}};
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(ended[i].id, want[i].first);
    EXPECT_EQ(ended[i].generation.value().tokens.size(), want[i].second);
    EXPECT_EQ(ended[i].generation.value().finish, Finish::kInterrupted);
  }
  EXPECT_EQ(batch.running() + batch.waiting(), 0u);
  EXPECT_EQ(batch.cache_used().count, 0u);
}

TEST(RunningBatch, TheOwnerMayEndASequence) {
  const auto model = test_model();
  RunningBatch batch(model, {});
  ASSERT_TRUE(batch.add({.id = 1, .prompt = {1}, .sampling = {.tokens_max = 20}, .ends = [](std::span<const Token> t) {
                           return t.size() == 5;
                         }}));
  ASSERT_TRUE(
      batch.add({.id = 2, .prompt = {1}, .sampling = {.tokens_max = 20}, .ends = [](std::span<const Token>) -> bool {
                   throw std::runtime_error("no");
                 }}));
  ASSERT_TRUE(batch.add({.id = 3, .prompt = {1}, .sampling = {.tokens_max = 20}}));
  const auto got = finish(batch);
  EXPECT_EQ(got.at(1).generation.value().tokens.size(), 5u);
  EXPECT_EQ(got.at(1).generation.value().finish, Finish::kStopped);
  EXPECT_EQ(got.at(2).generation.error().code, Code::kInternal);
  EXPECT_EQ(got.at(3).generation.value().tokens.size(), 20u);
}

TEST(RunningBatch, LogitsThatAreNotFiniteEndTheirSequenceOnly) {
  const auto untied =
      random_model(small_config(false), 5);  // with tied embeddings, the damage would affect every sequence
  {
    torch::NoGradGuard no_grad;
    untied->named_parameters()["model.embed_tokens.weight"][7].fill_(NAN);
  }
  RunningBatch batch(untied, {});
  ASSERT_TRUE(batch.add({.id = 1, .prompt = {1, 2}, .sampling = {.tokens_max = 1}}));
  ASSERT_TRUE(batch.add({.id = 2, .prompt = {1, 7, 2}, .sampling = {.tokens_max = 1}}));
  ASSERT_TRUE(batch.add({.id = 3, .prompt = {3, 4, 5, 6}, .sampling = {.tokens_max = 1}}));
  const auto got = finish(batch);
  EXPECT_TRUE(got.at(1).generation);
  EXPECT_EQ(got.at(2).generation.error().code, Code::kCorrupt);
  EXPECT_TRUE(got.at(3).generation);
}

// libtorch's allocator for CPUs, with a limit on one allocation.
struct LimitedAllocator : c10::Allocator {
  explicit LimitedAllocator(std::size_t bytes) : bytes_max(bytes), original(c10::GetCPUAllocator()) {
    c10::SetCPUAllocator(this, 1);
  }
  ~LimitedAllocator() override { c10::SetCPUAllocator(original, 1); }
#if TORCH_VERSION_MAJOR >= 2
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  c10::DataPtr allocate(std::size_t bytes) override {
#else
  c10::DataPtr allocate(std::size_t bytes) const override {
#endif
    TORCH_CHECK(bytes <= bytes_max, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes,
                " bytes.");
    return original->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return original->raw_deleter(); }
  std::size_t bytes_max;
  c10::Allocator* original;
};

TEST(RunningBatch, MemoryThatIsShortMakesItSmaller) {
  ModelConfig config = small_config(true);
  config.vocab_size = 5000;  // logits take most: 20 kB a row
  const auto model = random_model(config, 5);
  std::vector<Sequence> sequences;
  for (std::uint64_t id = 0; id < 32; ++id)
    sequences.push_back({.id = id, .prompt = {1, Token(id / 4)}, .sampling = {.tokens_max = 6, .seed = id}});
  std::map<std::uint64_t, Generation> want;
  for (const Sequence& s : sequences) want.emplace(s.id, alone(model, s));
  RunningBatch batch(model, {.rows_max = 32});
  for (const Sequence& s : sequences) ASSERT_TRUE(batch.add(s));
  EXPECT_TRUE(batch.step().empty());
  std::map<std::uint64_t, Ended> got;
  {
    LimitedAllocator limited(250'000);  // 12 rows
    for (Ended& e : batch.step()) got.emplace(e.id, std::move(e));
    EXPECT_EQ(batch.rows_max(), 8u);
    EXPECT_LE(batch.running(), 8u);
    got.merge(finish(batch));
    EXPECT_EQ(batch.rows_max(), 8u);
  }
  ASSERT_EQ(got.size(), sequences.size());
  for (const Sequence& s : sequences) expect_same(got.at(s.id).generation.value(), want.at(s.id), 1e-4);

  LimitedAllocator too_small(15'000);  // less than one row needs
  ASSERT_TRUE(batch.add(sequences[0]));
  ASSERT_TRUE(batch.add(sequences[1]));
  got = finish(batch);
  EXPECT_EQ(got.at(0).generation.error().code, Code::kExhausted);
  EXPECT_EQ(got.at(1).generation.error().code, Code::kExhausted);
}

TEST(RunningBatch, AFailedPassEndsItsSequences) {
  const auto model = test_model();
  RunningBatch batch(model, {.rows_max = 2});
  for (std::uint64_t id = 1; id <= 3; ++id)
    ASSERT_TRUE(batch.add({.id = id, .prompt = {1, 2}, .sampling = {.tokens_max = 5, .seed = id}}));
  batch.step();
  Tensor norm = model->named_parameters()["model.norm.weight"];
  const Tensor original_norm = norm.data();
  norm.set_data(torch::ones({21}));  // no longer of the shape that it has to have
  std::vector<std::uint64_t> failed;
  for (const Ended& ended : batch.step()) {
    failed.push_back(ended.id);
    EXPECT_EQ(ended.generation.error().code, Code::kInternal);
  }
  EXPECT_EQ(failed, (std::vector<std::uint64_t>{1, 2, 3}));  // two that ran, one that was read
  norm.set_data(original_norm);
  ASSERT_TRUE(batch.add({.id = 4, .prompt = {1, 2}, .sampling = {.tokens_max = 5}}));
  EXPECT_TRUE(finish(batch).at(4).generation);
}

// The distribution after filtering, by the definition.
std::vector<double> kept_distribution(const Tensor& logits, const Sampling& s) {
  const Tensor p64 = (logits.to(torch::kDouble) / s.temperature).softmax(-1);
  std::vector<double> p(p64.data_ptr<double>(), p64.data_ptr<double>() + p64.numel()), out(p.size());
  std::vector<std::size_t> order(p.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return p[a] > p[b]; });
  if (s.top_k > 0) order.resize(std::min(order.size(), std::size_t(s.top_k)));
  double total = 0, mass = 0, sum = 0;
  for (const std::size_t i : order) total += p[i];
  for (const std::size_t i : order) {
    if (s.top_p < 1 && mass >= s.top_p * total) break;
    mass += p[i];
    if (p[i] >= s.min_p * p[order[0]]) sum += out[i] = p[i];
  }
  for (double& x : out) x /= sum;
  return out;
}

TEST(Sampler, DrawsFromTheKeptTokens) {
  torch::manual_seed(3);
  const Tensor logits = torch::randn({1, 200}) * 1.5;
  const std::vector<Sampling> rules = {{},
                                       {.temperature = 0.7},
                                       {.top_p = 0.5},
                                       {.top_k = 7},
                                       {.min_p = 0.2},
                                       {.temperature = 1.3, .top_p = 0.8, .top_k = 30, .min_p = 0.05},
                                       {.top_p = 0.999},
                                       {.top_k = 1},
                                       {.top_p = 1e-9},
                                       {.min_p = 1}};
  constexpr int kDraws = 4000;
  for (const Sampling& s : rules) {
    const auto want = kept_distribution(logits, s);
    const Tensor full = (logits / s.temperature).log_softmax(-1);
    std::vector<SampleRequest> requests;
    for (int i = 0; i < kDraws; ++i)
      requests.push_back({&s, (i + 0.5) / kDraws});  // evenly: counts differ by 1 at most
    for (const bool batched : {false, true}) {
      const SampledTokens got = sample_tokens(logits.expand({kDraws, 200}).contiguous(), requests, batched);
      std::vector<int> counts(200);
      for (int i = 0; i < kDraws; ++i) {
        ++counts[std::size_t(got.tokens[std::size_t(i)])];
        EXPECT_NEAR(got.logprobs[std::size_t(i)], full[0][got.tokens[std::size_t(i)]].item<float>(), 1e-5);
      }
      for (std::size_t t = 0; t < 200; ++t) {
        EXPECT_NEAR(counts[t], kDraws * want[t], 1.1) << t;
        if (want[t] == 0) {
          EXPECT_EQ(counts[t], 0) << t;
        }
      }
    }
  }
}

// Vocabularies larger than a block, and rows of all kinds beside each other: both ways draw the same tokens as for
// single rows.
TEST(Sampler, RowsDoNotSeeEachOther) {
  torch::manual_seed(4);
  const Tensor logits = torch::randn({24, 3000}) * 3;
  const std::vector<Sampling> rules = {{}, {.temperature = 0}, {.top_p = 0.9}, {.temperature = 0.5, .top_k = 100}};
  Random random(5);
  std::vector<SampleRequest> requests;
  for (std::size_t i = 0; i < 24; ++i) requests.push_back({&rules[i % 4], random.uniform()});
  const SampledTokens rows = sample_tokens(logits, requests), batched = sample_tokens(logits, requests, true);
  EXPECT_EQ(rows.tokens, batched.tokens);
  for (std::size_t i = 0; i < 24; ++i) {
    EXPECT_NEAR(rows.logprobs[i], batched.logprobs[i], 1e-5) << i;
    const SampledTokens one = sample_tokens(logits.narrow(0, std::int64_t(i), 1), std::span(requests).subspan(i, 1));
    EXPECT_EQ(one.tokens[0], rows.tokens[i]);
    EXPECT_EQ(one.logprobs[0], rows.logprobs[i]);
    if (i % 4 == 1) {
      EXPECT_EQ(one.tokens[0], logits[std::int64_t(i)].argmax().item<std::int64_t>());
    }
  }
}

TEST(Sampler, EqualTokensAreTakenInTheirOrder) {
  const Tensor logits = torch::zeros({1, 1000});
  const Sampling greedy{.temperature = 0}, few{.top_k = 4};
  for (const bool batched : {false, true}) {
    const std::vector<SampleRequest> one = {{&greedy, 0.9}}, four = {{&few, 0.99}};
    EXPECT_EQ(sample_tokens(logits, one, batched).tokens[0], 0);
    EXPECT_EQ(sample_tokens(logits, four, batched).tokens[0], 3);
  }
}

}  // namespace
}  // namespace echoline::model
