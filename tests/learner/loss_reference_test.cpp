// Learner steps of every named loss on ragged rollouts of several turns, against gradients of a second implementation.
// It runs every trajectory alone through the model, and computes its loss token by token from the formulas of the
// papers (docs/losses.md has the references). The test uses no code of learner/training but the trainer.
#include <gtest/gtest.h>

#include <cmath>

#include "base/random.hpp"
#include "learner/training/trainer.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

using torch::Tensor;

constexpr std::int64_t kVocabulary = 23, kFixedLength = 30;
constexpr double kTemperature = 0.9, kImportanceCap = 2.0, kBeta1 = 0.9;

std::shared_ptr<model::Transformer> fresh_model() {
  model::ModelConfig shape;
  shape.vocab_size = kVocabulary;
  shape.hidden_size = 16;
  shape.intermediate_size = 24;
  shape.layers = 2;
  shape.heads = 4;
  shape.kv_heads = 2;
  shape.head_dim = 6;
  shape.positions_max = 80;
  shape.tie_embeddings = true;
  shape.initializer_range = 0.3;
  return model::init(shape, 21).value();
}

// Log-probabilities of the response's tokens, one trajectory at a time.
std::vector<Tensor> response_logprobs(model::Transformer& model, const schema::Trajectory& trajectory) {
  const auto &prompt = trajectory.prompt_tokens(), &response = trajectory.response_tokens();
  std::vector<std::int64_t> ids(prompt.begin(), prompt.end());
  ids.insert(ids.end(), response.begin(), response.end());
  const Tensor vocabulary_logprobs =  // at each position, of the token after it
      (model.forward(torch::tensor(ids, torch::kLong).unsqueeze(0))[0].to(torch::kDouble) / kTemperature)
          .log_softmax(-1);
  std::vector<Tensor> logprobs;
  for (int i = 0; i < response.size(); ++i)
    logprobs.push_back(vocabulary_logprobs[prompt.size() + i - 1][static_cast<std::int64_t>(response[i])]);
  return logprobs;
}

// Four groups of two to six responses of one to four turns. Observations between the turns are masked and have no
// log-probability; all rewards of the third group are equal. The behaviour policy differs from the model's.
std::vector<schema::Trajectory> several_turns() {
  Random random(6);
  const auto model = fresh_model();
  torch::NoGradGuard no_gradient;
  std::vector<schema::Trajectory> batch;
  for (std::uint64_t group = 0; group < 4; ++group) {
    std::vector<std::uint32_t> prompt;
    for (std::uint64_t token = 0; token < 1 + 4 * group; ++token)
      prompt.push_back(static_cast<std::uint32_t>(random.below(kVocabulary)));
    for (std::uint64_t member = 0; member < 2 + (group * 3) % 5; ++member) {
      schema::Trajectory trajectory;
      trajectory.set_id(fmt::format("{}-{}", group, member));
      trajectory.set_group(10 + group);
      trajectory.set_finished(member != 1);
      trajectory.set_reward(group == 2 ? 1.0 : static_cast<double>(random.below(5)) / 4);
      trajectory.mutable_prompt_tokens()->Add(prompt.begin(), prompt.end());
      const std::uint64_t turns = 1 + random.below(4);
      for (std::uint64_t turn = 0; turn < turns; ++turn) {
        for (std::uint64_t token = 0; token < 1 + random.below(7); ++token) {
          trajectory.add_response_tokens(static_cast<std::uint32_t>(random.below(kVocabulary)));
          trajectory.add_loss_mask(1);
        }
        for (std::uint64_t token = 0; turn + 1 < turns && token < 1 + random.below(9); ++token) {
          trajectory.add_response_tokens(static_cast<std::uint32_t>(random.below(kVocabulary)));
          trajectory.add_loss_mask(0);
        }
      }
      const auto logprobs = response_logprobs(*model, trajectory);
      for (std::size_t i = 0; i < logprobs.size(); ++i)
        trajectory.add_logprobs(trajectory.loss_mask(static_cast<int>(i)) > 0
                                    ? static_cast<float>(logprobs[i].item<double>() + 1.6 * random.uniform() - 0.8)
                                    : 0.0f);
      batch.push_back(std::move(trajectory));
    }
  }
  std::swap(batch[0], batch[9]);  // because a group need not be contiguous
  return batch;
}

// One response's counted tokens: log-probabilities now (with a gradient), when the step began, and as they were drawn.
struct Response {
  std::vector<Tensor> now;
  std::vector<double> old, drawn;
  double reward = 0, advantage = 0;
  double tokens() const { return static_cast<double>(now.size()); }
};

Tensor constant(double value) { return torch::full({}, value, torch::kDouble); }
double value_of(const Tensor& t) { return t.item<double>(); }
Tensor smaller(const Tensor& a, const Tensor& b) { return value_of(a) < value_of(b) ? a : b; }
Tensor clipped(const Tensor& x, double low, double high) {
  return value_of(x) < low ? constant(low) : value_of(x) > high ? constant(high) : x;
}

void set_advantages(std::string_view name, std::vector<Response*>& group) {
  const auto size = static_cast<double>(group.size());
  double sum = 0, tokens = 0, token_weighted_sum = 0, squares = 0;
  for (const Response* response : group)
    sum += response->reward, tokens += response->tokens(), token_weighted_sum += response->reward * response->tokens();
  for (const Response* response : group) squares += (response->reward - sum / size) * (response->reward - sum / size);
  const double deviation = std::sqrt(squares / size) + 1e-6;
  for (Response* response : group) {
    if (squares == 0)
      response->advantage = 0;
    else if (name == "rloo")  // the mean of the others
      response->advantage = response->reward - (sum - response->reward) / (size - 1);
    else if (name == "opo")  // every response weighs by the tokens that the policy drew
      response->advantage = response->reward - token_weighted_sum / tokens;
    else if (name == "dr_grpo")
      response->advantage = response->reward - sum / size;
    else
      response->advantage = (response->reward - sum / size) / deviation;
  }
}

// One response's term of the objective that is maximised, before the division by a count of the whole batch.
Tensor objective(std::string_view name, const Response& r) {
  const double a = r.advantage;
  Tensor total = constant(0);
  const auto weight_old = [&](std::size_t t) { return std::min(std::exp(r.old[t] - r.drawn[t]), kImportanceCap); };
  const auto weight_now = [&](std::size_t t) {
    return std::min(std::exp(value_of(r.now[t]) - r.drawn[t]), kImportanceCap);
  };
  const auto ratio = [&](std::size_t t) { return (r.now[t] - r.old[t]).exp(); };
  if (name == "dapo" || name == "grpo" || name == "dr_grpo") {
    const double high = name == "dapo" ? 1.28 : 1.2;
    for (std::size_t t = 0; t < r.now.size(); ++t)
      total = total + weight_old(t) * smaller(ratio(t) * a, clipped(ratio(t), 0.8, high) * a);
    return name == "grpo" ? total / r.tokens() : total;
  }
  if (name == "gspo") {
    Tensor mean = constant(0);
    for (std::size_t t = 0; t < r.now.size(); ++t) mean = mean + (r.now[t] - r.old[t]) / r.tokens();
    const Tensor s = mean.exp(), bounded = smaller(s * a, clipped(s, 1 - 3e-4, 1 + 4e-4) * a);
    for (std::size_t t = 0; t < r.now.size(); ++t) total = total + weight_old(t) * bounded / r.tokens();
    return total;
  }
  if (name == "cispo") {
    for (std::size_t t = 0; t < r.now.size(); ++t)
      total = total + weight_old(t) * std::min(value_of(ratio(t)), 5.0) * a * r.now[t];
    return total;
  }
  if (name == "tis_sequence") {
    double log_weight = 0;
    for (std::size_t t = 0; t < r.now.size(); ++t) log_weight += value_of(r.now[t]) - r.drawn[t];
    for (const Tensor& now : r.now) total = total + std::min(std::exp(log_weight), kImportanceCap) * a * now;
    return total;
  }
  std::vector<bool> left(r.now.size(), true);
  while (name == "m2po") {  // the largest leaves until the mean of squared log-ratios is at most 0.04
    double sum = 0, count = 0, worst = 0;
    std::size_t which = left.size();
    for (std::size_t t = 0; t < left.size(); ++t) {
      const double log_ratio = value_of(r.now[t]) - r.drawn[t];
      if (!left[t]) continue;
      sum += log_ratio * log_ratio, count += 1;
      if (log_ratio * a > 0 && std::abs(log_ratio) > worst) worst = std::abs(log_ratio), which = t;
    }
    if (count == 0 || sum / count <= 0.04 || which == left.size()) break;
    left[which] = false;
  }
  for (std::size_t t = 0; t < r.now.size(); ++t)  // rloo, opo, tis, m2po
    if (left[t]) total = total + weight_now(t) * a * r.now[t];
  return total;
}

double divisor(std::string_view name, double tokens, double sequences) {
  if (name == "grpo" || name == "gspo" || name == "rloo" || name == "opo") return sequences;
  if (name == "dr_grpo") return sequences * kFixedLength;
  return tokens;
}

using Gradients = std::map<std::string, Tensor>;

// The loss and its gradient at `model`; `before` is the model when the learner step began.
double reference(std::string_view name, const std::vector<schema::Trajectory>& batch, model::Transformer& model,
                 model::Transformer& before, Gradients& gradients) {
  std::vector<Response> responses(batch.size());
  std::map<std::uint64_t, std::vector<Response*>> groups;
  double tokens = 0;
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const auto now = response_logprobs(model, batch[i]), old = response_logprobs(before, batch[i]);
    Response& r = responses[i];
    r.reward = batch[i].reward();
    for (std::size_t t = 0; t < now.size(); ++t) {
      if (batch[i].loss_mask(static_cast<int>(t)) == 0) continue;
      r.now.push_back(now[t]);
      r.old.push_back(value_of(old[t]));
      r.drawn.push_back(static_cast<double>(batch[i].logprobs(static_cast<int>(t))));
    }
    tokens += r.tokens();
    groups[batch[i].group()].push_back(&r);
  }
  for (auto& [id, group] : groups) set_advantages(name, group);
  Tensor loss = constant(0);
  for (const Response& r : responses)
    loss = loss - objective(name, r) / divisor(name, tokens, static_cast<double>(responses.size()));
  model.zero_grad();
  loss.backward();
  for (const auto& item : model.named_parameters())
    gradients[item.key()] = item.value().grad().to(torch::kDouble).clone();
  return value_of(loss);
}

TrainerConfig settings(std::string_view name, std::int64_t passes) {
  TrainerConfig config;
  config.loss = *loss_named(name);
  config.loss.fixed_length = kFixedLength;
  config.temperature = kTemperature;
  config.passes = passes;
  config.microbatch_tokens = 60;  // groups are cut in the middle
  config.optimizer.learning_rate = 0.02;
  config.optimizer.beta1 = kBeta1;
  config.optimizer.gradient_norm_max = 1e9;
  return config;
}

Gradients first_moments(const Trainer& trainer) {
  Gradients moments;
  for (const auto& slot : trainer.optimizer().slots()) moments[slot.name] = slot.moment1.to(torch::kDouble);
  return moments;
}

// The length of the difference, as a share of the length of `expected`.
double relative_error(const Gradients& actual, const Gradients& expected) {
  double difference_square = 0, expected_square = 0;
  for (const auto& [name, gradient] : expected) {
    difference_square += (actual.at(name) - gradient).square().sum().item<double>();
    expected_square += gradient.square().sum().item<double>();
  }
  return std::sqrt(difference_square / expected_square);
}

class NamedLoss : public testing::TestWithParam<std::string_view> {
 protected:
  void SetUp() override { model::use_threads(1); }
};
INSTANTIATE_TEST_SUITE_P(All, NamedLoss, testing::ValuesIn(loss_names()),
                         [](const auto& p) { return std::string(p.param); });

TEST_P(NamedLoss, HasTheGradientOfItsFormulaOnRolloutsOfSeveralTurns) {
  const auto batch = several_turns();
  // The first update is at the policy of the step's beginning, the second away from it, where a trust region is met.
  const auto model = fresh_model(), other_model = fresh_model();
  const auto with_one_pass = Trainer::create(model, settings(GetParam(), 1)).value(),
             with_two_passes = Trainer::create(other_model, settings(GetParam(), 2)).value();
  const auto report = with_one_pass->step(batch), second_report = with_two_passes->step(batch);
  ASSERT_TRUE(report && second_report);
  Gradients first = first_moments(*with_one_pass), second = first_moments(*with_two_passes);
  for (auto& [name, gradient] : second) gradient = (gradient - kBeta1 * first.at(name)) / (1 - kBeta1);
  for (auto& [name, gradient] : first) gradient = gradient / (1 - kBeta1);

  Gradients expected_first, expected_second;
  const double loss = reference(GetParam(), batch, *fresh_model(), *fresh_model(), expected_first);
  const double second_loss = reference(GetParam(), batch, *model, *fresh_model(), expected_second);
  EXPECT_LT(relative_error(first, expected_first), 1e-5);
  EXPECT_LT(relative_error(second, expected_second), 1e-4);
  EXPECT_NEAR(report->loss, loss, 1e-5 * std::max(1.0, std::abs(loss)));
  EXPECT_NEAR(second_report->loss, (loss + second_loss) / 2, 1e-5 * std::max(1.0, std::abs(loss)));
  EXPECT_GT(relative_error(expected_first, expected_second), 0.01) << "one comparison would repeat the other";
  const auto config = settings(GetParam(), 2).loss;
  if (config.trust_region == TrustRegion::kClip) {
    EXPECT_GT(second_report->clip_fraction, 0);
  }
}

// A response without a token that counts, because the length limit cut it, has no weight in the baseline by length.
TEST(LengthWeightedBaseline, LeavesOutTheTokensTheLossLeavesOut) {
  std::vector<schema::Trajectory> batch;
  for (const schema::Trajectory& t : several_turns())
    if (t.group() == 13) batch.push_back(t);
  ASSERT_GE(batch.size(), 4u);
  TrainerConfig config = settings("opo", 1);
  config.truncated = Truncated::kMask;
  const auto trainer = Trainer::create(fresh_model(), config).value();
  ASSERT_TRUE(trainer->step(batch));
  Gradients actual = first_moments(*trainer), expected;
  for (auto& [name, gradient] : actual) gradient = gradient / (1 - kBeta1) * static_cast<double>(batch.size());
  std::erase_if(batch, [](const schema::Trajectory& t) { return !t.finished(); });
  reference("opo", batch, *fresh_model(), *fresh_model(), expected);
  for (auto& [name, gradient] : expected) gradient = gradient * static_cast<double>(batch.size());
  EXPECT_LT(relative_error(actual, expected), 1e-5);
}

}  // namespace
}  // namespace echoline::learner
