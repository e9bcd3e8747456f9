// Reads the run file, for every verb that takes one.
#include "learner/run_config.hpp"

#include <algorithm>
#include <cctype>

#include "base/config.hpp"
#include "base/parallel.hpp"
#include "base/suggest.hpp"
#include "base/text.hpp"
#include "chains/planner.hpp"
#include "overlay/trust/authority.hpp"
#include "replay_buffer/rules.hpp"

namespace echoline::learner {
namespace {

constexpr const char* kResolvedHead =
    "# The resolved run file, with --set applied: every default is written out, every path is absolute. It is itself "
    "a\n"
    "# run file for `echoline up` from any folder.\n";

void read_run(ConfigSection s, RunSection& c) {
  s.require("name", c.name, "names the run and its folder: letters, digits, '-', '_' and '.'");
  const bool plain = std::all_of(c.name.begin(), c.name.end(), [](unsigned char ch) {
    return std::isalnum(ch) != 0 || ch == '-' || ch == '_' || ch == '.';
  });
  if (!plain || c.name.starts_with('.') || c.name.size() > overlay::trust::kRunIdBytesMax)
    s.error("name",
            fmt::format("expected at most {} letters, digits, '-', '_' and '.', not starting with '.'; it names "
                        "the run and its folder",
                        overlay::trust::kRunIdBytesMax));
  s.read("seed", c.seed, "the seed of a new model, of the order of problems, and of sampling");
  s.require("steps", c.steps, {.min = 1, .max = 10'000'000}, "learner steps in the whole run");
  s.read("folder", c.folder,
         {"where the folders of runs are; this run's is `folder`/`name`", "`runs` in the working directory"});
}

void read_evaluation(ConfigSection s, EvaluationSection& c) {
  s.read("every", c.every, {.min = 0, .max = 1'000'000},
         "learner steps from one to the next; 0: only before the first step and after the last");
  s.read("problems", c.problems, {.min = 1, .max = 1'000'000},
         {"the number of held-out problems, from the first on", "all"});
}

void read_warm_start(ConfigSection s, WarmStartSection& c) {
  s.read("target_accuracy", c.target_accuracy, {.min = 0.0, .max = 1.0},
         "it ends when this share of training problems is solved");
  s.read("steps_max", c.steps_max, {.min = 1, .max = 1'000'000}, "or after this many updates");
  s.read("batch", c.batch, {.min = 1, .max = 65536}, "problems in an update");
  s.read("learning_rate", c.learning_rate, {.min = 0.0, .max = 1.0}, "of its updates");
}

void read_device(ConfigSection s, std::string& device, const char* description) {
  s.read("device", device, description);
  const bool numbered =
      device.starts_with("cuda:") && device.size() > 5 && device.size() <= 7 &&
      std::all_of(device.begin() + 5, device.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
  if (device != "cpu" && device != "cuda" && !numbered)
    s.error("device", fmt::format("expected cpu, cuda or cuda:N, found '{}'", device));
}

void read_learner(ConfigSection s, const RunSection& run, const model::ModelSettings& model,
                  const data_plane::RolloutSettings& rollout, LearnerSection& c) {
  s.read_choice("trainer", c.trainer, {{"built_in", TrainerKind::kBuiltIn}, {"external", TrainerKind::kExternal}},
                "the trainer: this program, or the user's own, which takes batches and publishes policies over `api` "
                "(docs/trainers.md). With an external one, only `api`, `checkpoint_every`, `checkpoints_kept` and "
                "`usd_per_hour` of the keys below count");
  s.read("api", c.api,
         "for an external trainer: `socket`, a unix socket in the run's folder, or 127.0.0.1:PORT with a token; the "
         "run's trainer-api.json contains the address");
  if (c.trainer == TrainerKind::kExternal && rollout.truncates())
    s.error("trainer",
            fmt::format("an external trainer gets log-probabilities of the whole distribution, and rollout.top_p {}, "
                        "top_k {} and min_p {} "
                        "draw from a part of it: its importance weights would be wrong. Set them to 1, 0 and 0",
                        rollout.top_p, rollout.top_k, rollout.min_p));
  std::string_view loss = loss_names().front();
  s.read_choice(
      "loss", loss,
      {{"dapo", "dapo"},
       {"grpo", "grpo"},
       {"dr_grpo", "dr_grpo"},
       {"rloo", "rloo"},
       {"opo", "opo"},
       {"gspo", "gspo"},
       {"cispo", "cispo"},
       {"tis", "tis"},
       {"tis_sequence", "tis_sequence"},
       {"m2po", "m2po"}},
      "a published loss by its name, with its own defaults for the keys that follow, down to `kl_form`; their "
      "formulas are in docs/losses.md");
  c.loss = *loss_named(loss);
  s.read_choice(
      "baseline", c.loss.baseline,
      {{"mean", Baseline::kMean},
       {"leave_one_out", Baseline::kLeaveOneOut},
       {"length_weighted", Baseline::kLengthWeighted}},
      {"the mean that is subtracted from a reward to get its advantage: of its group, of the others in it, or of the "
       "group weighted by length",
       "`mean`; rloo: leave_one_out, opo: length_weighted"});
  s.read_choice("advantage_scale", c.loss.advantage_scale,
                {{"std", AdvantageScale::kStd}, {"none", AdvantageScale::kNone}},
                {"the divisor of an advantage: the group's standard deviation (std), or 1 (none)",
                 "`std`; dr_grpo, rloo, opo: none"});
  const std::initializer_list<std::pair<std::string_view, Level>> levels{{"token", Level::kToken},
                                                                         {"sequence", Level::kSequence}};
  s.read_choice("ratio_level", c.loss.ratio_level, levels,
                {"a probability ratio per token, or per response as the geometric mean over its tokens",
                 "`token`; gspo: sequence"});
  s.read_choice(
      "trust_region", c.loss.trust_region,
      {{"clip", TrustRegion::kClip},
       {"detached_clip", TrustRegion::kDetachedClip},
       {"second_moment", TrustRegion::kSecondMoment},
       {"none", TrustRegion::kNone}},
      {"the bound of one learner step. clip: the probability ratio is clipped, and with it its gradient. "
       "detached_clip: the ratio is clipped as a weight of the gradient. second_moment: tokens that make the mean "
       "squared log-ratio of their response too large are left out. none: only `importance_cap` bounds the step",
       "`clip`; cispo: detached_clip, m2po: second_moment, rloo, opo, tis, tis_sequence: none"});
  s.read("clip_low", c.loss.clip_low, {.min = 0.0, .max = 1.0},
         {"a probability ratio counts down to 1 - `clip_low`", "`0.2`; gspo: 0.0003, cispo: 1"});
  s.read("clip_high", c.loss.clip_high, {.min = 0.0, .max = 100.0},
         {"and up to 1 + `clip_high`", "`0.28`; grpo, dr_grpo: 0.2, gspo: 0.0004, cispo: 4"});
  s.read("second_moment_max", c.loss.second_moment_max, {.min = 1e-9, .max = 100.0},
         "the mean squared log-ratio that `trust_region: second_moment` allows a response");
  s.read_choice("importance_level", c.loss.importance_level, levels,
                {"importance weights per token, or per response as the product over its tokens",
                 "`token`; tis_sequence: sequence"});
  s.read("importance_cap", c.loss.importance_cap, {.min = 1.0, .max = 1000.0},
         "C: the upper limit of importance weights, which correct for the policy's changes since the rollout");
  s.read_choice(
      "aggregation", c.loss.aggregation,
      {{"token_mean", Aggregation::kTokenMean},
       {"sequence_mean", Aggregation::kSequenceMean},
       {"sequence_sum", Aggregation::kSequenceSum},
       {"fixed_length", Aggregation::kFixedLength}},
      {"token_mean: every token of a batch has the same weight. sequence_mean: every response has. sequence_sum: the "
       "sum over a response's tokens. fixed_length: that sum, divided by rollout.response_tokens_max",
       "`token_mean`; grpo, gspo: sequence_mean, rloo, opo: sequence_sum, dr_grpo: fixed_length"});
  s.read("kl_coefficient", c.loss.kl_coefficient, {.min = 0.0, .max = 100.0},
         "beta: weight of the divergence from the policy before the first step; 0 keeps no reference policy");
  s.read_choice(
      "kl_form", c.loss.kl_form, {{"k3", KlForm::kK3}, {"k2", KlForm::kK2}, {"k1", KlForm::kK1}},
      "the estimate of that divergence: added to the loss (k3, k2), or subtracted from the reward of each token (k1)");
  c.optimizer.learning_rate = default_learning_rate(model);
  s.read("learning_rate", c.optimizer.learning_rate, {.min = 0.0, .max = 1.0},
         {"of AdamW, after the warmup",
          "`1e-6` for a model that is loaded (`model.path`), `1e-3` for a new one (`model.preset`)"});
  s.read("learning_rate_warmup_steps", c.optimizer.warmup_updates, {.min = 0, .max = 1'000'000},
         "updates over which the rate rises from 0");
  s.read_choice("learning_rate_schedule", c.optimizer.schedule,
                {{"constant", Schedule::kConstant}, {"linear", Schedule::kLinear}, {"cosine", Schedule::kCosine}},
                "then it stays (constant), or falls until the last of run.steps, evenly (linear) or as half a cosine");
  s.read("learning_rate_final", c.optimizer.final_share, {.min = 0.0, .max = 1.0},
         "the share of `learning_rate` to which it falls");
  s.read("beta1", c.optimizer.beta1, {.min = 0.0, .max = 0.9999}, "of AdamW: memory of the gradient's mean");
  s.read("beta2", c.optimizer.beta2, {.min = 0.0, .max = 0.99999}, "of AdamW: memory of the gradient's square");
  s.read("weight_decay", c.optimizer.weight_decay, {.min = 0.0, .max = 10.0}, "of AdamW");
  s.read("gradient_norm_max", c.optimizer.gradient_norm_max, {.min = 1e-6, .max = 1e6},
         "a longer gradient is scaled down to this norm");
  s.read_choice("truncated", c.truncated,
                {{"keep", Truncated::kKeep}, {"mask", Truncated::kMask}, {"penalty", Truncated::kPenalty}},
                "responses cut by `response_tokens_max`. keep: trained on like others. mask: not trained on, but "
                "their reward counts in the group's mean. penalty: trained on with a lower reward");
  s.read("truncated_penalty", c.truncated_penalty, {.min = 0.0, .max = 1000.0},
         "the amount that `truncated: penalty` subtracts from the reward");
  s.read("minibatches", c.minibatches, {.min = 1, .max = 64}, "updates in a learner step");
  c.optimizer.updates_expected = static_cast<std::int64_t>(run.steps * c.minibatches);
  if (c.optimizer.schedule != Schedule::kConstant && c.optimizer.updates_expected <= c.optimizer.warmup_updates)
    s.error("learning_rate_schedule",
            fmt::format("the warm-up takes {} updates of the run's {}: none are left for the rate to fall",
                        c.optimizer.warmup_updates, c.optimizer.updates_expected));
  read_device(s, c.device, "where the learner computes: cpu, cuda, or cuda:N for one of several");
  c.threads = c.device == "cpu" ? 1 : 0;
  s.read("threads", c.threads, {.min = 0, .max = 1024},
         {"of the learner's computation on a CPU, and of the encoding of policies; 0: as many as this machine has",
          "1 on a CPU, 0 on a GPU"});
  c.threads = static_cast<int>(thread_count(static_cast<unsigned>(c.threads)));
  c.compute = c.device == "cpu" ? Compute::kFp32 : Compute::kBf16;
  s.read_choice(
      "compute", c.compute, {{"fp32", Compute::kFp32}, {"bf16", Compute::kBf16}},
      {"the type of weights and activations in training; masters are fp32 in any case, and the policy is bf16",
       "fp32 on a CPU, bf16 on a GPU"});
  s.read("microbatch_tokens", c.microbatch_tokens, {.min = 1, .max = 1 << 30},
         "tokens per forward and backward pass; a prompt that responses share counts once. A batch takes as many "
         "passes as it needs, and their gradients add up. `echoline model info --train` prints the memory they take");
  s.read("recompute", c.recompute,
         "store only the activations between layers, and recompute the others for the gradient: a third more time, "
         "far less memory");
  s.read_choice("moments", c.optimizer.moments, {{"fp32", Moments::kFp32}, {"int8", Moments::kInt8}},
                "the storage of AdamW's two moments: 8 bytes a parameter, or 2");
  s.read("optimizer_on_host", c.optimizer.on_host,
         "keep masters and moments in the host's memory and update there, where `device` is a GPU");
  s.read("checkpoint_every", c.checkpoint_every, {.min = 1, .max = 1'000'000},
         "learner steps from one checkpoint to the next; the last step always has one");
  s.read("checkpoints_kept", c.checkpoints_kept, {.min = 1, .max = 1000}, "the newest; older ones are removed");
  s.read("usd_per_hour", c.usd_per_hour, {.min = 0.0, .max = 1e6},
         "US dollars for the learner's own machine, part of the run's cost");
  c.warm_start.enabled = s.has("warm_start");
  read_warm_start(s.section("warm_start",
                            "Supervised training on the task's demonstrations before anything is rented, for a model "
                            "that would not find a right answer by itself. Where the section is absent, there is "
                            "none."),
                  c.warm_start);
}

void read_network(ConfigSection s, RunConfig& c) {
  overlay::read(s, c.network);
  provisioner::read(s, c.paths);
}

void read_worker(ConfigSection s, const data_plane::RolloutSettings& rollout, WorkerSection& c) {
  s.read_choice("engine", c.engine, {{"builtin", "builtin"}, {"sglang", "sglang"}, {"vllm", "vllm"}},
                "the engine of a rented worker: the built-in one, or a server that the worker starts");
  s.read(
      "engine_command", c.engine_command,
      "the shell command that starts sglang or vllm; {model} stands for the directory of the policy, {port} for the "
      "port to listen on; vLLM takes policies fastest with --enable-scale-out and, beside echoline's client package, "
      "--weight-transfer-config.backend echoline");
  s.read("engine_patience", c.engine_patience, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)},
         "how long its start, loading a policy, or an answer may take before it counts as hung");
  read_device(s, c.device, "where the built-in engine computes: cpu, cuda, or cuda:N for one of several");
  s.read("threads", c.threads, {.min = 0, .max = 1024},
         {"of a worker: they generate on a CPU, and decode policies; 0: as many as its host has",
          "1 where the built-in engine computes on a CPU, otherwise 0"});
  if (c.engine != "builtin" && c.device != "cpu")
    s.error("device", "is only for the built-in engine: a server's own command chooses its device");
  if (c.engine == "builtin") {
    if (!c.engine_command.empty())
      s.error("engine_command", "is for an engine that is a server: set worker.engine as well");
    return;
  }
  for (const char* place : {"{model}", "{port}"})
    if (c.engine_command.find(place) == std::string::npos)
      s.error("engine_command",
              fmt::format("expected the command that starts {}, with {{model}} and {{port}} in it; {} is missing",
                          c.engine, place));
  if (rollout.truncates())
    s.error("engine",
            fmt::format(
                "{} does not report log-probabilities under rollout.top_p, top_k and min_p: set them to 1, 0 and 0, "
                "or use the built-in engine",
                c.engine));
}

void read_tasks(ConfigSection root, RunConfig& c) {
  ConfigSection task = root.section("task", "The task that the model learns.");
  data_plane::read(task, c.task, root.has("tasks"));
  model::read_prompts(task, c.prompts);
  data_plane::read_list(root, c.task);
}

void read_rollout(ConfigSection s, RunConfig& c) {
  data_plane::read(s, c.rollout);
  model::read_stop(s, c.prompts);
  replay_buffer::read(s, c.lease);
}

void read_all(ConfigSection root, RunConfig& c) {
  read_run(root.section("run", "The run itself."), c.run);
  model::read(root.section("model", "The model that is trained. Exactly one of the two keys is needed."), c.model);
  read_tasks(root, c);
  read_evaluation(root.section("evaluation", "Greedy evaluation on held-out problems during the run."), c.evaluation);
  read_rollout(root.section("rollout", "How responses are generated."), c);
  replay_buffer::read(root.section("staleness", "How old a policy may be whose trajectories are trained on."),
                      c.staleness);
  read_learner(root.section("learner", "Loss, optimiser, checkpoints."), c.run, c.model, c.rollout, c.learner);
  c.learner.loss.fixed_length = c.rollout.response_tokens_max;
  read_network(root.section("network", "How policies and trajectories travel."), c);
  provisioner::read(root.section("fleet", "The rented fleet: offers, provider, limits."), c.fleet);
  read_worker(root.section("worker", "The engine of rented workers; see engines.md."), c.rollout, c.worker);
}

}  // namespace

void read_simulated_run(ConfigSection root, RunConfig& c) {
  read_run(root.section("run"), c.run);
  if (root.has("model")) model::read(root.section("model"), c.model);
  if (root.has("task") || root.has("tasks")) read_tasks(root, c);
  if (root.has("evaluation")) read_evaluation(root.section("evaluation"), c.evaluation);
  read_rollout(root.section("rollout"), c);
  replay_buffer::read(root.section("staleness"), c.staleness);
  read_learner(root.section("learner"), c.run, c.model, c.rollout, c.learner);
  read_network(root.section("network"), c);
  provisioner::read(root.section("fleet"), c.fleet, true);
  if (root.has("worker")) read_worker(root.section("worker"), c.rollout, c.worker);
}

replay_buffer::Pacing RunConfig::pacing() const {
  return {staleness, static_cast<std::uint32_t>(rollout.trajectories_per_step()), run.steps, rollout.group_size};
}

std::vector<std::string> WorkerSection::arguments() const {
  std::vector<std::string> words;
  if (engine != "builtin")
    words = {"--engine",          engine,
             "--engine-command",  engine_command,
             "--engine-patience", fmt::format("{} s", seconds(engine_patience))};
  else if (device != "cpu")
    words = {"--device", device};
  if (threads) words.insert(words.end(), {"--threads", fmt::format("{}", *threads)});
  return words;
}

Result<RunConfig> load_run_config(const std::filesystem::path& path,
                                  const std::vector<std::pair<std::string, std::string>>& overrides) {
  auto loaded = ConfigFile::load(path);
  if (!loaded) return as_mistake(std::move(loaded).error());
  ConfigFile file = std::move(*loaded);
  for (const auto& [key, value] : overrides) ECHO_TRY(file.set(key, value));
  (void)file.split("sweep");  // read by `echoline sweep`
  RunConfig config;
  read_all(file.root(), config);
  ECHO_TRY(file.finish());
  config.resolved_yaml = kResolvedHead + file.resolved();
  return config;
}

std::vector<ConfigKey> run_file_keys() {
  ConfigFile blank = ConfigFile::blank();
  RunConfig ignored;
  read_all(blank.root(), ignored);
  std::vector<ConfigKey> keys, options;
  for (const std::string& name : data_plane::adapter_names()) {
    ConfigFile file = ConfigFile::blank();
    ConfigSection task = file.root().section("task");
    ECHO_CHECK(data_plane::read_adapter_options(name, task), "{} is built in", name);
    for (ConfigKey& option : file.keys()) {
      if (option.path == "task") continue;
      option.when = "adapter: " + name;
      options.push_back(std::move(option));
    }
  }
  std::size_t end_of_task = 0;  // sections follow the keys of their own level
  for (ConfigKey& key : blank.keys()) {
    if (key.path == "task.options") continue;
    const bool of_task = key.path.starts_with("task.");
    keys.push_back(std::move(key));
    if (of_task) end_of_task = keys.size();
  }
  keys.insert(keys.begin() + static_cast<std::ptrdiff_t>(end_of_task), options.begin(), options.end());
  return keys;
}

}  // namespace echoline::learner
