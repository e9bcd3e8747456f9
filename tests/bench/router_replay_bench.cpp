// Router replay (docs/models.md): distance of the trainer's log-probabilities from the engine's, with the experts that
// the engine used and with the trainer's own, and the size of the experts that travel with a rollout.
//
//   router_replay_bench [--preset tiny-moe] [--steps 6] [--warm-start 300]
//
// Trains a mixture of experts on the quickstart's task: a short warm start, then learner steps whose rollouts come from
// an engine with the same policy in bf16. Each step's rollouts are scored before it trains on them. "fp32" is the
// arithmetic of the built-in engine on a CPU, "bf16" that of an engine on a GPU, by libtorch's operations.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/random.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/policy_input.hpp"
#include "data_plane/routed_experts.hpp"
#include "learner/training/trainer.hpp"
#include "learner/training/warm_start.hpp"
#include "model/running_batch.hpp"
#include "model/tokenizer.hpp"
#include "model/weights.hpp"

namespace echoline {
namespace {

using torch::Tensor;

template <class T>
T must(Result<T> result) {
  if (!result) {
    fmt::print(stderr, "router_replay_bench: {}\n", result.error().message());
    std::exit(exit_code(result.error().code));
  }
  return std::move(result).value();
}

constexpr std::uint64_t kSeed = 7;
constexpr std::size_t kGroups = 64, kGroupSize = 8;
constexpr std::int64_t kResponseTokensMax = 6;

// The distance of log-probabilities, in nats.
struct Distance {
  double sum = 0, worst = 0, count = 0;
  void add(double difference) { sum += std::abs(difference), worst = std::max(worst, std::abs(difference)), ++count; }
};

struct Rollout {
  std::vector<std::int64_t> text;
  std::size_t prompt = 0;
  std::vector<float> logprobs;
  std::vector<std::int16_t> experts;
};

// Adds the distances of the trainer's log-probabilities of the rollout from those given. `changed` counts the choices
// in which the trainer's own experts are others, `choices` all of them.
void add_distances(model::Transformer& trained, const Rollout& rollout, Distance& replayed, Distance& fresh,
                   std::size_t& changed, std::size_t& choices) {
  torch::NoGradGuard no_gradient;
  const std::int64_t per_token = trained.config().expert_choices();
  for (const bool replays : {true, false}) {
    model::ScoredSequence sequence{.tokens = rollout.text, .prompt = rollout.prompt, .mask = {}};
    if (replays) sequence.experts = rollout.experts;
    const Tensor scores = trained.packed_logprobs(model::pack({sequence}, torch::kCPU, per_token)).logprobs;
    for (std::size_t t = 0; t < rollout.logprobs.size(); ++t)
      (replays ? replayed : fresh).add(scores[static_cast<std::int64_t>(t)].item<double>() - rollout.logprobs[t]);
  }
  model::Routing routing;
  routing.records = true;
  trained.hidden_states(torch::tensor(rollout.text).unsqueeze(0), {}, nullptr, &routing);
  const Tensor own = routing.used.contiguous();
  for (std::int64_t i = 0; i < own.numel() - per_token; ++i, ++choices)
    changed += own.data_ptr<std::int16_t>()[i] != rollout.experts[static_cast<std::size_t>(i)] ? 1 : 0;
}

// The same text with the log-probabilities and experts of arithmetic in bf16.
Rollout in_bf16(model::Transformer& engine, const Rollout& rollout) {
  torch::AutoGradMode with_gradients(true);  // without gradients, a CPU would compute in fp32
  model::Routing routing;
  routing.records = true;
  const Tensor ids = torch::tensor(rollout.text).unsqueeze(0);
  const Tensor hidden = engine.hidden_states(ids, {}, nullptr, &routing);
  const Tensor logprobs = engine.logits(hidden).log_softmax(-1)[0].detach();
  Rollout result = rollout;
  for (std::size_t t = 0; t < result.logprobs.size(); ++t) {
    const auto position = static_cast<std::int64_t>(rollout.prompt + t);
    result.logprobs[t] = logprobs[position - 1][rollout.text[static_cast<std::size_t>(position)]].item<float>();
  }
  const Tensor used = routing.used.contiguous();
  result.experts.assign(used.data_ptr<std::int16_t>(), used.data_ptr<std::int16_t>() + used.numel());
  return result;
}

int run(const std::string& preset, std::int64_t steps, std::uint32_t warm_start_steps) {
  model::use_threads(1);
  const model::ModelConfig config = must(model::preset(preset));
  const auto tokenizer = must(model::Tokenizer::characters(model::kCharacterAlphabet));
  const auto phrasing = must(model::Phrasing::from_parts(tokenizer, config.eos, R"({"text":"{prompt}"})"));
  const auto task = must(data_plane::make_adapter(
      "arithmetic", R"({"operations":["+"],"operand_max":99,"carries_forgotten":0.7})", kSeed));
  const std::shared_ptr<model::Transformer> trained = must(model::init(config, kSeed));
  learner::WarmStartConfig warm;
  warm.optimizer.learning_rate = 1.5e-3;
  warm.steps_max = warm_start_steps;
  warm.target_accuracy = 0.99;
  warm.response_tokens_max = kResponseTokensMax;
  if (warm_start_steps > 0)
    must(learner::warm_start(*trained, phrasing, *task, warm, [](const learner::WarmStartProgress&) { return true; }));
  learner::TrainerConfig settings;
  settings.optimizer.learning_rate = 1e-3;
  settings.minibatches = 2;
  settings.seed = kSeed;
  const auto trainer = must(learner::Trainer::create(trained, settings));
  const std::shared_ptr<model::Transformer> engine = must(model::create(config, torch::kCPU, torch::kBFloat16));
  fmt::print("{:>4} {:>8} {:>7} | {:>21} {:>21} {:>9} | {:>21} {:>21} {:>9} | {:>6} {:>6}\n", "step", "reward",
             "tokens", "fp32, replayed", "fp32, own experts", "changed", "bf16, replayed", "bf16, own experts",
             "changed", "raw B", "sent B");
  for (std::int64_t step = 0; step < steps; ++step) {
    if (const Status loaded = model::load_policy(*engine, must(trainer->policy()).view()); !loaded) return 1;
    model::RunningBatch batch(engine, {.rows_max = 256, .records_experts = true});
    std::vector<data_plane::Problem> problems;
    std::vector<std::vector<model::Token>> prompts;
    for (std::size_t group = 0; group < kGroups; ++group) {
      problems.push_back(must(task->problem(static_cast<std::uint64_t>(step) * kGroups + group)));
      prompts.push_back(must(phrasing.prompt(data_plane::prompt_of(problems.back()))));
      for (std::size_t member = 0; member < kGroupSize; ++member) {
        model::Sequence sequence{.id = group * kGroupSize + member, .prompt = prompts.back(), .sampling = {}};
        sequence.sampling.tokens_max = kResponseTokensMax;
        sequence.sampling.eos = config.eos;
        sequence.sampling.seed = mix64(static_cast<std::uint64_t>(step) << 32 | sequence.id);
        if (!batch.add(std::move(sequence))) return 1;
      }
    }
    std::vector<schema::Trajectory> trajectories;
    Distance fp32_replayed, fp32_fresh, bf16_replayed, bf16_fresh;
    std::size_t fp32_changed = 0, bf16_changed = 0, fp32_choices = 0, bf16_choices = 0, raw = 0, sent = 0, tokens = 0;
    while (batch.running() + batch.waiting() > 0)
      for (model::Ended& ended : batch.step()) {
        const model::Generation generation = must(std::move(ended.generation));
        const std::size_t group = ended.id / kGroupSize;
        Rollout rollout{.text = {prompts[group].begin(), prompts[group].end()},
                        .prompt = prompts[group].size(),
                        .logprobs = generation.logprobs,
                        .experts = generation.experts};
        rollout.text.insert(rollout.text.end(), generation.tokens.begin(), generation.tokens.end());
        add_distances(*trained, rollout, fp32_replayed, fp32_fresh, fp32_changed, fp32_choices);
        add_distances(*trained, in_bf16(*engine, rollout), bf16_replayed, bf16_fresh, bf16_changed, bf16_choices);
        schema::Trajectory trajectory;
        trajectory.set_id(fmt::format("{}", ended.id));
        trajectory.set_group(group);
        trajectory.set_finished(generation.finish == model::Finish::kEos);
        trajectory.mutable_prompt_tokens()->Add(prompts[group].begin(), prompts[group].end());
        trajectory.mutable_response_tokens()->Add(generation.tokens.begin(), generation.tokens.end());
        trajectory.mutable_logprobs()->Add(generation.logprobs.begin(), generation.logprobs.end());
        const data_plane::Score score = must(task->score(problems[group], phrasing.answer(generation.tokens)));
        trajectory.set_reward(score.reward);
        trajectory.set_correct(score.correct);
        const data_plane::RoutedExperts experts{static_cast<std::uint32_t>(config.mixture_layers()),
                                                static_cast<std::uint32_t>(config.experts->per_token),
                                                generation.experts};
        trajectory.set_routed_experts(data_plane::pack_experts(experts));
        raw += 2 * experts.values.size(), sent += trajectory.routed_experts().size(), tokens += experts.tokens();
        trajectories.push_back(std::move(trajectory));
      }
    const auto report = must(trainer->step(trajectories));
    const auto text = [](const Distance& distance) {
      return fmt::format("{:.2e} max {:.2e}", distance.sum / distance.count, distance.worst);
    };
    const auto share = [](std::size_t part, std::size_t all) {
      return fmt::format("{:.4f}%", 100.0 * static_cast<double>(part) / static_cast<double>(all));
    };
    fmt::print("{:>4} {:>8.3f} {:>7} | {:>21} {:>21} {:>9} | {:>21} {:>21} {:>9} | {:>6.1f} {:>6.1f}\n", step + 1,
               report.reward_mean, tokens, text(fp32_replayed), text(fp32_fresh), share(fp32_changed, fp32_choices),
               text(bf16_replayed), text(bf16_fresh), share(bf16_changed, bf16_choices),
               static_cast<double>(raw) / static_cast<double>(tokens),
               static_cast<double>(sent) / static_cast<double>(tokens));
  }
  return 0;
}

}  // namespace
}  // namespace echoline

int main(int argc, char** argv) {
  CLI::App app{"Measures router replay on a small mixture of experts"};
  std::string preset = "tiny-moe";
  std::int64_t steps = 6;
  std::uint32_t warm_start = 300;
  app.add_option("--preset", preset, "a mixture of experts");
  app.add_option("--steps", steps, "learner steps");
  app.add_option("--warm-start", warm_start, "updates before the first step");
  CLI11_PARSE(app, argc, argv);
  return echoline::run(preset, steps, warm_start);
}
