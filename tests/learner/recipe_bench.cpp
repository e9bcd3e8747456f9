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
bool assign(Recipe& r, const std::string& key, const std::string& value) {
  const auto real = [&](double& x) { return [&x, value] { x = std::stod(value); }; };
  const auto whole = [&](auto& x) {
    return [&x, value] { x = static_cast<std::remove_reference_t<decltype(x)>>(std::stoll(value)); };
  };
  const std::map<std::string, std::function<void()>> keys = {
      {"adapter", [&] { r.adapter = value; }},
      {"preset", [&] { r.preset = value; }},
      {"warm_lr", real(r.warm.optimizer.learning_rate)},
      {"warm_steps", whole(r.warm.steps_max)},
      {"warm_batch", whole(r.warm.batch_problems)},
      {"warm_target", real(r.warm.target_accuracy)},
      {"warm_probe_every", whole(r.warm.probe_every)},
      {"warm_warmup", whole(r.warm.optimizer.warmup_updates)},
      {"warm_decay", real(r.warm.optimizer.weight_decay)},
      {"warm_beta2", real(r.warm.optimizer.beta2)},
      {"warm_clip", real(r.warm.optimizer.gradient_norm_max)},
      {"lr", real(r.train.optimizer.learning_rate)},
      {"beta2", real(r.train.optimizer.beta2)},
      {"decay", real(r.train.optimizer.weight_decay)},
      {"warmup", whole(r.train.optimizer.warmup_updates)},
      {"grad_clip", real(r.train.optimizer.gradient_norm_max)},
      {"minibatches", whole(r.train.minibatches)},
      {"passes", whole(r.train.passes)},
      {"micro", whole(r.train.microbatch_tokens)},
      {"clip_low", real(r.train.loss.clip_low)},
      {"clip_high", real(r.train.loss.clip_high)},
      {"cap", real(r.train.loss.importance_cap)},
      {"temperature", real(r.train.temperature)},
      {"scale", [&] { r.train.loss.advantage_scale = value == "std" ? AdvantageScale::kStd : AdvantageScale::kNone; }},
      {"groups", whole(r.groups)},
      {"group_size", whole(r.group_size)},
      {"rl_steps", whole(r.rl_steps)},
      {"lag_min", whole(r.lag_min)},
      {"lag_max", whole(r.lag_max)},
      {"tokens_max", whole(r.tokens_max)},
      {"evaluate_every", whole(r.evaluate_every)},
      {"stop_at", real(r.stop_at)},
      {"seed", [&] { r.seed = std::stoull(value); }},
      {"quiet", [&] { r.quiet = value == "1"; }},
  };
  const auto it = keys.find(key);
  if (it == keys.end()) return false;
  it->second();
  return true;
}

struct Outcome {
  double before = 0, after = 0, density_mean = 0, step_s = 0;
  std::int64_t warm_steps = 0, steps_to_90 = 0;
};

// Generates whole groups with `actor` for problems index .. index + groups - 1.
Result<std::vector<schema::Trajectory>> rollouts(model::Transformer& actor, const model::Phrasing& phrasing,
                                                 const data_plane::Adapter& adapter, const Recipe& r,
                                                 std::uint64_t index, std::int64_t groups) {
  std::vector<schema::Problem> problems;
  std::vector<std::vector<model::Token>> prompts;
  for (std::int64_t g = 0; g < groups; ++g) {
    ECHO_ASSIGN(auto problem, adapter.problem(index + static_cast<std::uint64_t>(g)));
    ECHO_ASSIGN(const auto prompt, phrasing.prompt(data_plane::prompt_of(problem)));
    prompts.insert(prompts.end(), static_cast<std::size_t>(r.group_size), prompt);
    problems.push_back(std::move(problem));
  }
  model::Sampling sampling;
  sampling.temperature = r.train.temperature;
  sampling.tokens_max = r.tokens_max;
  sampling.eos = phrasing.eos();
  sampling.seed = mix64(r.seed * 1'000'003 + index);
  ECHO_ASSIGN(const auto generations, model::generate(actor, prompts, sampling));
  std::vector<schema::Trajectory> batch;
  for (std::size_t i = 0; i < generations.size(); ++i) {
    const std::size_t g = i / static_cast<std::size_t>(r.group_size);
    ECHO_ASSIGN(const data_plane::Score score, adapter.score(problems[g], phrasing.answer(generations[i].tokens)));
    schema::Trajectory t;
    t.set_id(fmt::format("{}/{}", index + g, i));
    t.set_group(index + g);
    t.mutable_prompt_tokens()->Add(prompts[i].begin(), prompts[i].end());
    t.mutable_response_tokens()->Add(generations[i].tokens.begin(), generations[i].tokens.end());
    t.mutable_logprobs()->Add(generations[i].logprobs.begin(), generations[i].logprobs.end());
    t.set_reward(score.reward);
    t.set_correct(score.correct);
    batch.push_back(std::move(t));
  }
  return batch;
}

// Share of bf16 values that differ.
double changed(const delta::OwnedState& a, const delta::OwnedState& b) {
  std::size_t different = 0, total = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const auto x = a.bytes(i), y = b.bytes(i);
    for (std::size_t k = 0; k + 1 < x.size(); k += 2, ++total) different += x[k] != y[k] || x[k + 1] != y[k + 1];
  }
  return static_cast<double>(different) / static_cast<double>(total);
}

Result<Outcome> run(const Recipe& r) {
  model::use_threads(1);
  const double begin = processor_s();
  const auto say = [&](const std::string& line) {
    if (!r.quiet) std::printf("%6.1f s  %s\n", processor_s() - begin, line.c_str()), std::fflush(stdout);
  };
  ECHO_ASSIGN(const auto adapter, data_plane::make_adapter("arithmetic", r.adapter, r.seed));
  ECHO_ASSIGN(const auto files, model::ModelFiles::of_preset("tiny-64"));
  ECHO_ASSIGN(const auto phrasing, model::Phrasing::make(files, {}));
  ECHO_ASSIGN(const model::ModelConfig shape, model::preset(r.preset));
  ECHO_ASSIGN(const auto learner, model::init(shape, r.seed));
  ECHO_ASSIGN(const auto actor, model::init(shape, r.seed));
  say(fmt::format("{} parameters, bf16 policy {} kB, {} rollouts per step", shape.parameters(),
                  shape.parameters() * 2 / 1000, r.groups * r.group_size));

  Outcome outcome;
  const auto held_out = adapter->evaluation();
  EvaluationOptions greedy;
  greedy.response_tokens_max = r.tokens_max;
  WarmStartConfig warm = r.warm;
  warm.response_tokens_max = r.tokens_max;
  ECHO_ASSIGN(const auto warmed, warm_start(*learner, phrasing, *adapter, warm, [&](const WarmStartProgress& p) {
                if (p.steps % (warm.probe_every) == 0)
                  say(fmt::format("warm start step {:4d} loss {:.3f} accuracy {:.3f}", p.steps, p.loss, p.accuracy));
                return true;
              }));
  ECHO_ASSIGN(const auto before, evaluate(*learner, phrasing, *adapter, held_out, greedy));
  outcome.before = outcome.after = before.accuracy();
  outcome.warm_steps = warmed.steps;
  say(fmt::format("warm start ended after {} steps: training slice {:.3f}, held out {:.3f}", warmed.steps,
                  warmed.accuracy, before.accuracy()));

  TrainerConfig train = r.train;
  train.seed = r.seed;
  ECHO_ASSIGN(const auto trainer, Trainer::create(learner, train));
  std::deque<delta::OwnedState> policies;  // newest first
  ECHO_ASSIGN(auto first, trainer->policy());
  policies.push_front(std::move(first));
  Random random(r.seed, 77);
  std::uint64_t next_problem = 1'000'000;
  double train_s = 0, generate_s = 0, density_sum = 0;
  constexpr std::int64_t kParts = 4;  // of a batch, each from a policy of another age
  for (std::int64_t step = 1; step <= r.rl_steps; ++step) {
    const double t0 = processor_s();
    std::vector<schema::Trajectory> batch;
    for (std::int64_t part = 0; part < kParts; ++part) {
      const auto lag =
          std::min<std::size_t>(static_cast<std::size_t>(random.between(r.lag_min, r.lag_max)), policies.size() - 1);
      ECHO_TRY(model::load_policy(*actor, policies[lag].view()));
      const std::int64_t groups = (part + 1) * r.groups / kParts - part * r.groups / kParts;
      if (groups == 0) continue;
      ECHO_ASSIGN(auto rolled, rollouts(*actor, phrasing, *adapter, r, next_problem, groups));
      next_problem += static_cast<std::uint64_t>(groups);
      std::move(rolled.begin(), rolled.end(), std::back_inserter(batch));
    }
    const double t1 = processor_s();
    ECHO_ASSIGN(const StepReport report, trainer->step(batch));
    const double t2 = processor_s();
    generate_s += t1 - t0;
    train_s += t2 - t1;
    ECHO_ASSIGN(auto policy, trainer->policy());
    const double density = changed(policies.front(), policy);
    density_sum += density;
    policies.push_front(std::move(policy));
    while (static_cast<std::int64_t>(policies.size()) > r.lag_max + 1) policies.pop_back();
    if (step % r.evaluate_every != 0 && step != r.rl_steps) continue;
    ECHO_ASSIGN(const auto now, evaluate(*learner, phrasing, *adapter, held_out, greedy));
    outcome.after = now.accuracy();
    if (outcome.steps_to_90 == 0 && outcome.after >= 0.9) outcome.steps_to_90 = step;
    say(fmt::format(
        "step {:3d} eval {:.3f} sampled {:.3f} reward {:.3f} informative {:2d}/{} entropy {:.3f} kl {:.4f} "
        "ratio {:.2f} clip {:.3f} cap {:.3f} grad {:.3f} density {:.3f} | train {:.3f} s/step, {:.0f} rollouts/s",
        step, outcome.after, report.accuracy, report.reward_mean, report.informative_groups, report.groups,
        report.entropy, report.behaviour_kl, report.ratio_mean, report.clip_fraction, report.capped_fraction,
        report.gradient_norm, density, train_s / static_cast<double>(step),
        static_cast<double>(step * r.groups * r.group_size) / generate_s));
    if (outcome.after >= r.stop_at) break;
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
