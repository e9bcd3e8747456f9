// The quickstart recipe in one process: supervised warm start, then GRPO on rollouts of policies that lag behind. One
// thread; times are processor time.
// Without arguments a tiny run that only proves the parts fit together; with key=value arguments (see Recipe) the real
// one, for example:
//   recipe_bench rl_steps=120 seed=3
// Prints a table of accuracy, time and delta density.
#include <gtest/gtest.h>

#include <cstdio>
#include <ctime>
#include <deque>
#include <functional>
#include <map>

#include "base/random.hpp"
#include "data_plane/policy_input.hpp"
#include "learner/training/trainer.hpp"
#include "learner/training/warm_start.hpp"
#include "model/generate.hpp"
#include "model/weights.hpp"

namespace echoline::learner {
namespace {

struct Recipe {
  std::string adapter = R"({"operations":["+"],"operand_max":99,"evaluation_problems":256,"carries_forgotten":0.7})";
  std::string preset = "tiny-64";
  WarmStartConfig warm;
  TrainerConfig train;
  std::int64_t groups = 256, group_size = 8;
  std::int64_t rl_steps = 120;
  std::int64_t lag_min = 2, lag_max = 6;  // steps between the policy that generates and the one that learns
  std::int64_t tokens_max = 6;
  std::int64_t evaluate_every = 20;
  double stop_at = 2.0;  // held-out accuracy that ends the run early
  std::uint64_t seed = 1;
  bool quiet = false;

  Recipe() {
    warm.optimizer.learning_rate = 1.5e-3;
    warm.steps_max = 1100;
    warm.batch_problems = 128;
    warm.target_accuracy = 1.0;  // never: the teacher's slips keep it far below, the steps decide
    warm.probe_every = 50;
    train.optimizer.learning_rate = 2e-4;
    train.optimizer.beta2 = 0.99;
    train.optimizer.warmup_updates = 10;
    train.minibatches = 2;
  }
};

double processor_s() {
  return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;  // processor time: other programs do not count
}

// Sets one "key=value"; false when there is no such key.
bool assign(Recipe& recipe, const std::string& key, const std::string& value) {
  const auto real = [&](double& setting) { return [&setting, value] { setting = std::stod(value); }; };
  const auto whole = [&](auto& setting) {
    return [&setting, value] { setting = static_cast<std::remove_reference_t<decltype(setting)>>(std::stoll(value)); };
  };
  const std::map<std::string, std::function<void()>> keys = {
      {"adapter", [&] { recipe.adapter = value; }},
      {"preset", [&] { recipe.preset = value; }},
      {"warm_lr", real(recipe.warm.optimizer.learning_rate)},
      {"warm_steps", whole(recipe.warm.steps_max)},
      {"warm_batch", whole(recipe.warm.batch_problems)},
      {"warm_target", real(recipe.warm.target_accuracy)},
      {"warm_probe_every", whole(recipe.warm.probe_every)},
      {"warm_warmup", whole(recipe.warm.optimizer.warmup_updates)},
      {"warm_decay", real(recipe.warm.optimizer.weight_decay)},
      {"warm_beta2", real(recipe.warm.optimizer.beta2)},
      {"warm_clip", real(recipe.warm.optimizer.gradient_norm_max)},
      {"lr", real(recipe.train.optimizer.learning_rate)},
      {"beta2", real(recipe.train.optimizer.beta2)},
      {"decay", real(recipe.train.optimizer.weight_decay)},
      {"warmup", whole(recipe.train.optimizer.warmup_updates)},
      {"grad_clip", real(recipe.train.optimizer.gradient_norm_max)},
      {"minibatches", whole(recipe.train.minibatches)},
      {"passes", whole(recipe.train.passes)},
      {"micro", whole(recipe.train.microbatch_tokens)},
      {"clip_low", real(recipe.train.loss.clip_low)},
      {"clip_high", real(recipe.train.loss.clip_high)},
      {"cap", real(recipe.train.loss.importance_cap)},
      {"temperature", real(recipe.train.temperature)},
      {"scale",
       [&] { recipe.train.loss.advantage_scale = value == "std" ? AdvantageScale::kStd : AdvantageScale::kNone; }},
      {"groups", whole(recipe.groups)},
      {"group_size", whole(recipe.group_size)},
      {"rl_steps", whole(recipe.rl_steps)},
      {"lag_min", whole(recipe.lag_min)},
      {"lag_max", whole(recipe.lag_max)},
      {"tokens_max", whole(recipe.tokens_max)},
      {"evaluate_every", whole(recipe.evaluate_every)},
      {"stop_at", real(recipe.stop_at)},
      {"seed", [&] { recipe.seed = std::stoull(value); }},
      {"quiet", [&] { recipe.quiet = value == "1"; }},
  };
  const auto found = keys.find(key);
  if (found == keys.end()) return false;
  found->second();
  return true;
}

struct Outcome {
  double before = 0, after = 0;  // held-out accuracy, before and after GRPO
  double density_mean = 0;       // share of values that a step changes
  double step_s = 0;             // processor time
  std::int64_t warm_steps = 0;
  std::int64_t steps_to_90 = 0;  // until the held-out accuracy is 90 %; 0: it was never
};

// Generates whole groups with `actor` for problems first_problem .. first_problem + groups - 1.
Result<std::vector<schema::Trajectory>> rollouts(model::Transformer& actor, const model::Phrasing& phrasing,
                                                 const data_plane::Adapter& adapter, const Recipe& recipe,
                                                 std::uint64_t first_problem, std::int64_t groups) {
  std::vector<schema::Problem> problems;
  std::vector<std::vector<model::Token>> prompts;
  for (std::int64_t group = 0; group < groups; ++group) {
    ECHO_ASSIGN(auto problem, adapter.problem(first_problem + static_cast<std::uint64_t>(group)));
    ECHO_ASSIGN(const auto prompt, phrasing.prompt(data_plane::prompt_of(problem)));
    prompts.insert(prompts.end(), static_cast<std::size_t>(recipe.group_size), prompt);
    problems.push_back(std::move(problem));
  }
  model::Sampling sampling;
  sampling.temperature = recipe.train.temperature;
  sampling.tokens_max = recipe.tokens_max;
  sampling.eos = phrasing.eos();
  sampling.seed = mix64(recipe.seed * 1'000'003 + first_problem);
  ECHO_ASSIGN(const auto generations, model::generate(actor, prompts, sampling));
  std::vector<schema::Trajectory> batch;
  for (std::size_t i = 0; i < generations.size(); ++i) {
    const std::size_t group = i / static_cast<std::size_t>(recipe.group_size);
    ECHO_ASSIGN(const data_plane::Score score, adapter.score(problems[group], phrasing.answer(generations[i].tokens)));
    schema::Trajectory trajectory;
    trajectory.set_id(fmt::format("{}/{}", first_problem + group, i));
    trajectory.set_group(first_problem + group);
    trajectory.mutable_prompt_tokens()->Add(prompts[i].begin(), prompts[i].end());
    trajectory.mutable_response_tokens()->Add(generations[i].tokens.begin(), generations[i].tokens.end());
    trajectory.mutable_logprobs()->Add(generations[i].logprobs.begin(), generations[i].logprobs.end());
    trajectory.set_reward(score.reward);
    trajectory.set_correct(score.correct);
    batch.push_back(std::move(trajectory));
  }
  return batch;
}

// Share of bf16 values that differ.
double changed_share(const delta::OwnedState& before, const delta::OwnedState& after) {
  std::size_t different = 0, total = 0;
  for (std::size_t tensor = 0; tensor < before.size(); ++tensor) {
    const auto old_bytes = before.bytes(tensor), new_bytes = after.bytes(tensor);
    for (std::size_t k = 0; k + 1 < old_bytes.size(); k += 2, ++total)
      different += old_bytes[k] != new_bytes[k] || old_bytes[k + 1] != new_bytes[k + 1];
  }
  return static_cast<double>(different) / static_cast<double>(total);
}

Result<Outcome> run(const Recipe& recipe) {
  model::use_threads(1);
  const double began_s = processor_s();
  const auto print_line = [&](const std::string& line) {
    if (!recipe.quiet) std::printf("%6.1f s  %s\n", processor_s() - began_s, line.c_str()), std::fflush(stdout);
  };
  ECHO_ASSIGN(const auto adapter, data_plane::make_adapter("arithmetic", recipe.adapter, recipe.seed));
  ECHO_ASSIGN(const auto files, model::ModelFiles::of_preset("tiny-64"));
  ECHO_ASSIGN(const auto phrasing, model::Phrasing::make(files, {}));
  ECHO_ASSIGN(const model::ModelConfig shape, model::preset(recipe.preset));
  ECHO_ASSIGN(const auto learner, model::init(shape, recipe.seed));
  ECHO_ASSIGN(const auto actor, model::init(shape, recipe.seed));
  print_line(fmt::format("{} parameters, bf16 policy {} kB, {} rollouts per step", shape.parameters(),
                         shape.parameters() * 2 / 1000, recipe.groups * recipe.group_size));

  Outcome outcome;
  const auto held_out = adapter->evaluation();
  EvaluationOptions evaluation_options;
  evaluation_options.response_tokens_max = recipe.tokens_max;
  WarmStartConfig warm = recipe.warm;
  warm.response_tokens_max = recipe.tokens_max;
  ECHO_ASSIGN(const auto warm_report,
              warm_start(*learner, phrasing, *adapter, warm, [&](const WarmStartProgress& progress) {
                if (progress.steps % (warm.probe_every) == 0)
                  print_line(fmt::format("warm start step {:4d} loss {:.3f} accuracy {:.3f}", progress.steps,
                                         progress.loss, progress.accuracy));
                return true;
              }));
  ECHO_ASSIGN(const auto before_training, evaluate(*learner, phrasing, *adapter, held_out, evaluation_options));
  outcome.before = outcome.after = before_training.accuracy();
  outcome.warm_steps = warm_report.steps;
  print_line(fmt::format("warm start ended after {} steps: training slice {:.3f}, held out {:.3f}", warm_report.steps,
                         warm_report.accuracy, before_training.accuracy()));

  TrainerConfig train = recipe.train;
  train.seed = recipe.seed;
  ECHO_ASSIGN(const auto trainer, Trainer::create(learner, train));
  std::deque<delta::OwnedState> policies;  // newest first
  ECHO_ASSIGN(auto first_policy, trainer->policy());
  policies.push_front(std::move(first_policy));
  Random random(recipe.seed, 77);
  std::uint64_t next_problem = 1'000'000;
  double train_s = 0, generate_s = 0, density_sum = 0;
  constexpr std::int64_t kParts = 4;  // of a batch, each from a policy of another age
  for (std::int64_t step = 1; step <= recipe.rl_steps; ++step) {
    const double generate_began_s = processor_s();
    std::vector<schema::Trajectory> batch;
    for (std::int64_t part = 0; part < kParts; ++part) {
      const auto lag = std::min<std::size_t>(static_cast<std::size_t>(random.between(recipe.lag_min, recipe.lag_max)),
                                             policies.size() - 1);
      ECHO_TRY(model::load_policy(*actor, policies[lag].view()));
      const std::int64_t groups = (part + 1) * recipe.groups / kParts - part * recipe.groups / kParts;
      if (groups == 0) continue;
      ECHO_ASSIGN(auto part_rollouts, rollouts(*actor, phrasing, *adapter, recipe, next_problem, groups));
      next_problem += static_cast<std::uint64_t>(groups);
      std::move(part_rollouts.begin(), part_rollouts.end(), std::back_inserter(batch));
    }
    const double train_began_s = processor_s();
    ECHO_ASSIGN(const StepReport report, trainer->step(batch));
    const double train_ended_s = processor_s();
    generate_s += train_began_s - generate_began_s;
    train_s += train_ended_s - train_began_s;
    ECHO_ASSIGN(auto policy, trainer->policy());
    const double density = changed_share(policies.front(), policy);
    density_sum += density;
    policies.push_front(std::move(policy));
    while (static_cast<std::int64_t>(policies.size()) > recipe.lag_max + 1) policies.pop_back();
    if (step % recipe.evaluate_every != 0 && step != recipe.rl_steps) continue;
    ECHO_ASSIGN(const auto evaluation, evaluate(*learner, phrasing, *adapter, held_out, evaluation_options));
    outcome.after = evaluation.accuracy();
    if (outcome.steps_to_90 == 0 && outcome.after >= 0.9) outcome.steps_to_90 = step;
    print_line(fmt::format(
        "step {:3d} eval {:.3f} sampled {:.3f} reward {:.3f} informative {:2d}/{} entropy {:.3f} kl {:.4f} "
        "ratio {:.2f} clip {:.3f} cap {:.3f} grad {:.3f} density {:.3f} | train {:.3f} s/step, {:.0f} rollouts/s",
        step, outcome.after, report.accuracy, report.reward_mean, report.informative_groups, report.groups,
        report.entropy, report.behaviour_kl, report.ratio_mean, report.clip_fraction, report.capped_fraction,
        report.gradient_norm, density, train_s / static_cast<double>(step),
        static_cast<double>(step * recipe.groups * recipe.group_size) / generate_s));
    if (outcome.after >= recipe.stop_at) break;
  }
  const auto steps = static_cast<double>(trainer->steps());
  outcome.step_s = train_s / steps;
  outcome.density_mean = density_sum / steps;
  return outcome;
}

}  // namespace
}  // namespace echoline::learner

int main(int argc, char** argv) {
  using namespace echoline::learner;
  Recipe recipe;
  if (argc == 1) {
    for (const auto& [key, value] :
         std::map<std::string, std::string>{{"warm_steps", "40"}, {"rl_steps", "3"}, {"groups", "16"}})
      assign(recipe, key, value);
  }
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto equals = argument.find('=');
    if (equals == std::string::npos || !assign(recipe, argument.substr(0, equals), argument.substr(equals + 1))) {
      std::fprintf(stderr, "unknown argument '%s', expected key=value with a key of struct Recipe\n", argv[i]);
      return 2;
    }
  }
  const auto outcome = run(recipe);
  if (!outcome) {
    std::fprintf(stderr, "%s\n", outcome.error().message().c_str());
    return 1;
  }
  std::printf("seed %llu before %.3f after %.3f warm_steps %lld steps_to_90 %lld density %.3f step_s %.3f\n",
              static_cast<unsigned long long>(recipe.seed), outcome->before, outcome->after,
              static_cast<long long>(outcome->warm_steps), static_cast<long long>(outcome->steps_to_90),
              outcome->density_mean, outcome->step_s);
  if (argc == 1 && !(outcome->warm_steps == 40 && outcome->density_mean > 0 && outcome->density_mean < 1)) {
    std::fprintf(stderr, "expected 40 warm-start steps and a policy that changes in part at every step\n");
    return 1;
  }
  return 0;
}
