// Reads the run file, for every verb that takes one.
#include "learner/run_config.hpp"

#include <algorithm>
#include <cctype>

#include "base/config.hpp"
#include "base/names.hpp"
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

void read_run(ConfigSection section, RunSection& settings) {
  section.require("name", settings.name, "names the run and its folder: letters, digits, '-', '_' and '.'");
  if (!has_only_name_characters(settings.name) || settings.name.starts_with('.') ||
      settings.name.size() > overlay::trust::kRunIdBytesMax)
    section.error("name",
                  fmt::format("expected at most {} letters, digits, '-', '_' and '.', not starting with '.'; it names "
                              "the run and its folder",
                              overlay::trust::kRunIdBytesMax));
  section.read("seed", settings.seed, "the seed of a new model, of the order of problems, and of sampling");
  section.require("steps", settings.steps, {.min = 1, .max = 10'000'000}, "learner steps in the whole run");
  section.read("folder", settings.folder,
               {"where the folders of runs are; this run's is `folder`/`name`", "`runs` in the working directory"});
}

void read_evaluation(ConfigSection section, EvaluationSection& settings) {
  section.read("every", settings.every, {.min = 0, .max = 1'000'000},
               "learner steps from one to the next; 0: only before the first step and after the last");
  section.read("problems", settings.problems, {.min = 1, .max = 1'000'000},
               {"the number of held-out problems, from the first on", "all"});
}

void read_warm_start(ConfigSection section, WarmStartSection& settings) {
  section.read("target_accuracy", settings.target_accuracy, {.min = 0.0, .max = 1.0},
               "it ends when this share of training problems is solved");
  section.read("steps_max", settings.steps_max, {.min = 1, .max = 1'000'000}, "or after this many updates");
  section.read("batch", settings.batch, {.min = 1, .max = 65536}, "problems in an update");
  section.read("learning_rate", settings.learning_rate, {.min = 0.0, .max = 1.0}, "of its updates");
}

void read_device(ConfigSection section, std::string& device, const char* description) {
  section.read("device", device, description);
  constexpr std::string_view kNumberedPrefix = "cuda:";
  constexpr std::size_t kDigitsMax = 2;
  const std::string_view number =
      device.starts_with(kNumberedPrefix) ? std::string_view(device).substr(kNumberedPrefix.size()) : "";
  const bool is_numbered =
      !number.empty() && number.size() <= kDigitsMax &&
      std::all_of(number.begin(), number.end(), [](unsigned char digit) { return std::isdigit(digit) != 0; });
  if (device != "cpu" && device != "cuda" && !is_numbered)
    section.error("device", fmt::format("expected cpu, cuda or cuda:N, found '{}'", device));
}

void read_learner(ConfigSection section, const RunSection& run, const model::ModelSettings& model,
                  const data_plane::RolloutSettings& rollout, LearnerSection& settings) {
  section.read_choice(
      "trainer", settings.trainer,
      {{"built_in", TrainerKind::kBuiltIn}, {"external", TrainerKind::kExternal}, {"tinker", TrainerKind::kTinker}},
      "the trainer: this program, or the user's own, which takes batches and publishes policies over `api` "
      "(docs/trainers.md). With an external one, only `api`, `adapter`, `router_replay`, `checkpoint_every`, "
      "`checkpoints_kept` and `usd_per_hour` of the keys below count. tinker: this program computes what a client of "
      "Tinker's API asks for "
      "over `api`, and its workers sample (docs/how-to/train-with-tinker.md); `adapter` is required");
  const bool is_tinker = settings.trainer == TrainerKind::kTinker;
  if (is_tinker) settings.api = "127.0.0.1:0";
  section.read(
      "api", settings.api,
      {"for an external trainer: `socket`, a unix socket in the run's folder, or 127.0.0.1:PORT with a token. For a "
       "Tinker client: HOST:PORT of this machine, with a key; port 0 is any free one. The run's trainer-api.json "
       "contains the address",
       "`socket`; tinker: 127.0.0.1:0"});
  if (is_tinker && settings.api.find(':') == std::string::npos)
    section.error("api", fmt::format("expected HOST:PORT for a Tinker client, found '{}'", settings.api));
  if (settings.trainer == TrainerKind::kExternal && rollout.truncates())
    section.error(
        "trainer",
        fmt::format("an external trainer gets log-probabilities of the whole distribution, and rollout.top_p {}, "
                    "top_k {} and min_p {} draw from a part of it: its importance weights would be wrong. Set them to "
                    "1, 0 and 0",
                    rollout.top_p, rollout.top_k, rollout.min_p));
  std::string_view loss = loss_names().front();  // the default
  section.read_choice(
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
  settings.loss = *loss_named(loss);
  section.read_choice(
      "baseline", settings.loss.baseline,
      {{"mean", Baseline::kMean},
       {"leave_one_out", Baseline::kLeaveOneOut},
       {"length_weighted", Baseline::kLengthWeighted}},
      {"the mean that is subtracted from a reward to get its advantage: of its group, of the others in it, or of the "
       "group weighted by length",
       "`mean`; rloo: leave_one_out, opo: length_weighted"});
  section.read_choice("advantage_scale", settings.loss.advantage_scale,
                      {{"std", AdvantageScale::kStd}, {"none", AdvantageScale::kNone}},
                      {"the divisor of an advantage: the group's standard deviation (std), or 1 (none)",
                       "`std`; dr_grpo, rloo, opo: none"});
  const std::initializer_list<std::pair<std::string_view, Level>> levels{{"token", Level::kToken},
                                                                         {"sequence", Level::kSequence}};
  section.read_choice("ratio_level", settings.loss.ratio_level, levels,
                      {"a probability ratio per token, or per response as the geometric mean over its tokens",
                       "`token`; gspo: sequence"});
  section.read_choice(
      "trust_region", settings.loss.trust_region,
      {{"clip", TrustRegion::kClip},
       {"detached_clip", TrustRegion::kDetachedClip},
       {"second_moment", TrustRegion::kSecondMoment},
       {"none", TrustRegion::kNone}},
      {"the bound of one learner step. clip: the probability ratio is clipped, and with it its gradient. "
       "detached_clip: the ratio is clipped as a weight of the gradient. second_moment: tokens that make the mean "
       "squared log-ratio of their response too large are left out. none: only `importance_cap` bounds the step",
       "`clip`; cispo: detached_clip, m2po: second_moment, rloo, opo, tis, tis_sequence: none"});
  section.read("clip_low", settings.loss.clip_low, {.min = 0.0, .max = 1.0},
               {"a probability ratio counts down to 1 - `clip_low`", "`0.2`; gspo: 0.0003, cispo: 1"});
  section.read("clip_high", settings.loss.clip_high, {.min = 0.0, .max = 100.0},
               {"and up to 1 + `clip_high`", "`0.28`; grpo, dr_grpo: 0.2, gspo: 0.0004, cispo: 4"});
  section.read("second_moment_max", settings.loss.second_moment_max, {.min = 1e-9, .max = 100.0},
               "the mean squared log-ratio that `trust_region: second_moment` allows a response");
  section.read_choice("importance_level", settings.loss.importance_level, levels,
                      {"importance weights per token, or per response as the product over its tokens",
                       "`token`; tis_sequence: sequence"});
  section.read("importance_cap", settings.loss.importance_cap, {.min = 1.0, .max = 1000.0},
               "C: the upper limit of importance weights, which correct for the policy's changes since the rollout");
  section.read_choice(
      "aggregation", settings.loss.aggregation,
      {{"token_mean", Aggregation::kTokenMean},
       {"sequence_mean", Aggregation::kSequenceMean},
       {"sequence_sum", Aggregation::kSequenceSum},
       {"fixed_length", Aggregation::kFixedLength}},
      {"token_mean: every token of a batch has the same weight. sequence_mean: every response has. sequence_sum: the "
       "sum over a response's tokens. fixed_length: that sum, divided by rollout.response_tokens_max",
       "`token_mean`; grpo, gspo: sequence_mean, rloo, opo: sequence_sum, dr_grpo: fixed_length"});
  section.read("kl_coefficient", settings.loss.kl_coefficient, {.min = 0.0, .max = 100.0},
               "beta: weight of the divergence from the policy before the first step; 0 keeps no reference policy");
  section.read_choice(
      "kl_form", settings.loss.kl_form, {{"k3", KlForm::kK3}, {"k2", KlForm::kK2}, {"k1", KlForm::kK1}},
      "the estimate of that divergence: added to the loss (k3, k2), or subtracted from the reward of each token (k1)");
  settings.optimizer.learning_rate = default_learning_rate(model);
  section.read("learning_rate", settings.optimizer.learning_rate, {.min = 0.0, .max = 1.0},
               {"of AdamW, after the warmup",
                "`1e-6` for a model that is loaded (`model.path`), `1e-3` for a new one (`model.preset`)"});
  section.read("learning_rate_warmup_steps", settings.optimizer.warmup_updates, {.min = 0, .max = 1'000'000},
               "updates over which the rate rises from 0");
  section.read_choice(
      "learning_rate_schedule", settings.optimizer.schedule,
      {{"constant", Schedule::kConstant}, {"linear", Schedule::kLinear}, {"cosine", Schedule::kCosine}},
      "then it stays (constant), or falls until the last of run.steps, evenly (linear) or as half a cosine");
  section.read("learning_rate_final", settings.optimizer.final_share, {.min = 0.0, .max = 1.0},
               "the share of `learning_rate` to which it falls");
  section.read("beta1", settings.optimizer.beta1, {.min = 0.0, .max = 0.9999},
               "of AdamW: memory of the gradient's mean");
  section.read("beta2", settings.optimizer.beta2, {.min = 0.0, .max = 0.99999},
               "of AdamW: memory of the gradient's square");
  section.read("weight_decay", settings.optimizer.weight_decay, {.min = 0.0, .max = 10.0}, "of AdamW");
  section.read("gradient_norm_max", settings.optimizer.gradient_norm_max, {.min = 1e-6, .max = 1e6},
               "a longer gradient is scaled down to this norm");
  section.read_choice("truncated", settings.truncated,
                      {{"keep", Truncated::kKeep}, {"mask", Truncated::kMask}, {"penalty", Truncated::kPenalty}},
                      "responses cut by `response_tokens_max`. keep: trained on like others. mask: not trained on, but "
                      "their reward counts in the group's mean. penalty: trained on with a lower reward");
  section.read("truncated_penalty", settings.truncated_penalty, {.min = 0.0, .max = 1000.0},
               "the amount that `truncated: penalty` subtracts from the reward");
  section.read("minibatches", settings.minibatches, {.min = 1, .max = 64}, "updates in a learner step");
  settings.optimizer.updates_expected = static_cast<std::int64_t>(run.steps * settings.minibatches);
  if (settings.optimizer.schedule != Schedule::kConstant &&
      settings.optimizer.updates_expected <= settings.optimizer.warmup_updates)
    section.error("learning_rate_schedule",
                  fmt::format("the warm-up takes {} updates of the run's {}: none are left for the rate to fall",
                              settings.optimizer.warmup_updates, settings.optimizer.updates_expected));
  read_device(section, settings.device, "where the learner computes: cpu, cuda, or cuda:N for one of several");
  settings.threads = settings.device == "cpu" ? 1 : 0;
  section.read(
      "threads", settings.threads, {.min = 0, .max = 1024},
      {"of the learner's computation on a CPU, and of the encoding of policies; 0: as many as this machine has",
       "1 on a CPU, 0 on a GPU"});
  settings.threads = static_cast<int>(thread_count(static_cast<unsigned>(settings.threads)));
  settings.compute = settings.device == "cpu" ? Compute::kFp32 : Compute::kBf16;
  section.read_choice(
      "compute", settings.compute, {{"fp32", Compute::kFp32}, {"bf16", Compute::kBf16}},
      {"the type of weights and activations in training; masters are fp32 in any case, and the policy is bf16",
       "fp32 on a CPU, bf16 on a GPU"});
  section.read(
      "microbatch_tokens", settings.microbatch_tokens, {.min = 1, .max = 1 << 30},
      "tokens per forward and backward pass; a prompt that responses share counts once. A batch takes as many "
      "passes as it needs, and their gradients add up. `echoline model info --train` prints the memory they take");
  section.read(
      "recompute", settings.recompute,
      "store only the activations between layers, and recompute the others for the gradient: a third more time, "
      "far less memory");
  section.read("router_replay", settings.router_replay,
               "for a mixture of experts: workers send the experts that their engine used for each token, and the "
               "built-in trainer uses the same; an external one gets them as `routed_experts`");
  section.read_choice("moments", settings.optimizer.moments, {{"fp32", Moments::kFp32}, {"int8", Moments::kInt8}},
                      "the storage of AdamW's two moments: 8 bytes a parameter, or 2");
  section.read("optimizer_on_host", settings.optimizer.on_host,
               "keep masters and moments in the host's memory and update there, where `device` is a GPU");
  section.read("checkpoint_every", settings.checkpoint_every, {.min = 1, .max = 1'000'000},
               "learner steps from one checkpoint to the next; the last step always has one");
  section.read("checkpoints_kept", settings.checkpoints_kept, {.min = 1, .max = 1000},
               "the newest; older ones are removed");
  section.read("usd_per_hour", settings.usd_per_hour, {.min = 0.0, .max = 1e6},
               "US dollars for the learner's own machine, part of the run's cost");
  model::read(section.section("adapter",
                              "A low-rank adapter (LoRA): two small matrices beside each target, which are trained and "
                              "published in place of the model's weights (models.md, \"Adapters\")."),
              settings.adapter);
  if (is_tinker && settings.adapter.rank == 0)
    section.error("trainer",
                  "a Tinker client trains an adapter: set learner.adapter.rank to the rank that it asks for "
                  "(32 unless it says another)");
  settings.warm_start.enabled = section.has("warm_start");
  read_warm_start(
      section.section("warm_start",
                      "Supervised training on the task's demonstrations before anything is rented, for a model "
                      "that would not find a right answer by itself. Where the section is absent, there is "
                      "none."),
      settings.warm_start);
}

void read_network(ConfigSection section, RunConfig& config) {
  overlay::read(section, config.network);
  provisioner::read(section, config.paths);
}

void read_worker(ConfigSection section, const data_plane::RolloutSettings& rollout, WorkerSection& settings) {
  section.read_choice("engine", settings.engine, {{"builtin", "builtin"}, {"sglang", "sglang"}, {"vllm", "vllm"}},
                      "the engine of a rented worker: the built-in one, or a server that the worker starts");
  section.read(
      "engine_command", settings.engine_command,
      "the shell command that starts sglang or vllm; {model} stands for the directory of the policy, {port} for the "
      "port to listen on, {gpus} for gpus_per_engine; vLLM takes policies fastest with --enable-scale-out and, beside "
      "echoline's client package, "
      "--weight-transfer-config.backend echoline");
  section.read("engine_patience", settings.engine_patience,
               {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)},
               "how long its start, loading a policy, or an answer may take before it counts as hung");
  section.read("gpus_per_engine", settings.gpus_per_engine, {.min = 1, .max = 1024},
               "GPUs of one sglang or vllm: a worker starts as many of them as its machine has GPUs for, each with its "
               "own; for tensor parallelism, e.g. --tensor-parallel-size {gpus} in engine_command");
  section.read("engines", settings.engines, {.min = 1, .max = 1024},
               {"number of sglang or vllm that each worker starts", "GPUs of the machine / gpus_per_engine"});
  read_device(section, settings.device, "where the built-in engine computes: cpu, cuda, or cuda:N for one of several");
  section.read("threads", settings.threads, {.min = 0, .max = 1024},
               {"of a worker: they generate on a CPU, and decode policies; 0: as many as its host has",
                "1 where the built-in engine computes on a CPU, otherwise 0"});
  if (settings.engine != "builtin" && settings.device != "cpu")
    section.error("device", "is only for the built-in engine: a server's own command chooses its device");
  if (settings.engine == "builtin") {
    if (!settings.engine_command.empty())
      section.error("engine_command", "is for an engine that is a server: set worker.engine as well");
    for (const char* key : {"gpus_per_engine", "engines"})
      if (section.has(key)) section.error(key, "is for sglang and vllm: the built-in engine uses one GPU");
    return;
  }
  for (const char* place : {"{model}", "{port}"})
    if (settings.engine_command.find(place) == std::string::npos)
      section.error("engine_command",
                    fmt::format("expected the command that starts {}, with {{model}} and {{port}} in it; {} is missing",
                                settings.engine, place));
  const auto command_has = [&](std::string_view word) {
    return settings.engine_command.find(word) != std::string::npos;
  };
  // The option's names in vLLM and SGLang.
  const bool is_tensor_parallel = command_has("--tensor-parallel-size") || command_has(" --tp") || command_has(" -tp ");
  if (is_tensor_parallel && !command_has("{gpus}") && settings.gpus_per_engine == 1 && !settings.engines)
    section.error("engine_command",
                  "starts an engine on several GPUs, and each gets worker.gpus_per_engine, which is 1: set that to the "
                  "number of GPUs, and write {gpus} in its place here");
  if (rollout.truncates())
    section.error(
        "engine",
        fmt::format(
            "{} does not report log-probabilities under rollout.top_p, top_k and min_p: set them to 1, 0 and 0, "
            "or use the built-in engine",
            settings.engine));
}

void read_tasks(ConfigSection root, RunConfig& config) {
  ConfigSection task = root.section("task", "The task that the model learns.");
  data_plane::read(task, config.task, root.has("tasks"));
  model::read_prompts(task, config.prompts);
  data_plane::read_list(root, config.task);
}

void read_rollout(ConfigSection section, RunConfig& config) {
  data_plane::read(section, config.rollout);
  model::read_stop(section, config.prompts);
  replay_buffer::read(section, config.lease);
}

void read_all(ConfigSection root, RunConfig& config) {
  read_run(root.section("run", "The run itself."), config.run);
  model::read(root.section("model", "The model that is trained. Exactly one of the two keys is needed."), config.model);
  read_tasks(root, config);
  read_evaluation(root.section("evaluation", "Greedy evaluation on held-out problems during the run."),
                  config.evaluation);
  read_rollout(root.section("rollout", "How responses are generated."), config);
  replay_buffer::read(root.section("staleness", "How old a policy may be whose trajectories are trained on."),
                      config.staleness);
  read_learner(root.section("learner", "Loss, optimiser, checkpoints."), config.run, config.model, config.rollout,
               config.learner);
  config.learner.loss.fixed_length = config.rollout.response_tokens_max;
  read_network(root.section("network", "How policies and trajectories travel."), config);
  provisioner::read(root.section("fleet", "The rented fleet: offers, provider, limits."), config.fleet);
  store::read(root.section("store", "Where every published version is kept as well; see store.md."), config.store);
  ConfigSection worker = root.section("worker", "The engine of rented workers; see engines.md.");
  read_worker(worker, config.rollout, config.worker);
  if (config.learner.trainer == TrainerKind::kTinker && config.worker.engine != "builtin")
    worker.error("engine", fmt::format("{} samples only with the run's own settings, and a Tinker client sends its own "
                                       "with each request: use builtin",
                                       config.worker.engine));
}

}  // namespace

void read_simulated_run(ConfigSection root, RunConfig& config) {
  read_run(root.section("run"), config.run);
  if (root.has("model")) model::read(root.section("model"), config.model);
  if (root.has("task") || root.has("tasks")) read_tasks(root, config);
  if (root.has("evaluation")) read_evaluation(root.section("evaluation"), config.evaluation);
  read_rollout(root.section("rollout"), config);
  replay_buffer::read(root.section("staleness"), config.staleness);
  read_learner(root.section("learner"), config.run, config.model, config.rollout, config.learner);
  read_network(root.section("network"), config);
  provisioner::read(root.section("fleet"), config.fleet, /*simulated=*/true);
  if (root.has("worker")) read_worker(root.section("worker"), config.rollout, config.worker);
  if (root.has("store")) store::read(root.section("store"), config.store);
}

replay_buffer::Pacing RunConfig::pacing() const {
  return {.staleness = staleness,
          .trajectories_per_step = static_cast<std::uint32_t>(rollout.trajectories_per_step()),
          .steps_total = run.steps,
          .group_size = rollout.group_size};
}

std::vector<std::string> WorkerSection::arguments(bool with_engine_command) const {
  std::vector<std::string> words;
  if (engine != "builtin") {
    words = {"--engine", engine};
    if (with_engine_command) words.insert(words.end(), {"--engine-command", engine_command});
    words.insert(words.end(), {"--engine-patience", fmt::format("{} s", seconds(engine_patience))});
  } else if (device != "cpu") {
    words = {"--device", device};
  }
  if (gpus_per_engine != 1) words.insert(words.end(), {"--gpus-per-engine", fmt::format("{}", gpus_per_engine)});
  if (threads) words.insert(words.end(), {"--threads", fmt::format("{}", *threads)});
  return words;
}

provisioner::WorkerEngines WorkerSection::worker_engines() const {
  if (engine != "builtin") return {.name = engine, .gpus_per_engine = gpus_per_engine, .count = engines};
  return {.name = engine, .on_cpu = device == "cpu", .gpus_per_engine = 1, .count = 1};
}

Result<RunConfig> load_run_config(const std::filesystem::path& path,
                                  const std::vector<std::pair<std::string, std::string>>& overrides) {
  auto loaded = ConfigFile::load(path);
  if (!loaded) return as_user_error(std::move(loaded).error());
  ConfigFile file = std::move(*loaded);
  for (const auto& [key, value] : overrides) ECHO_TRY(file.set(key, value));
  (void)file.split("sweep");  // drops the section, which only `echoline sweep` reads
  RunConfig config;
  read_all(file.root(), config);
  ECHO_TRY(file.finish());
  config.resolved_yaml = kResolvedHead + file.resolved();
  return config;
}

std::vector<ConfigKey> run_file_keys() {
  ConfigFile blank = ConfigFile::blank();  // reading it declares every key
  RunConfig ignored;
  read_all(blank.root(), ignored);
  std::vector<ConfigKey> keys, options;
  for (const std::string& name : data_plane::adapter_names()) {
    ConfigFile file = ConfigFile::blank();
    ConfigSection task = file.root().section("task");
    ECHO_CHECK(data_plane::read_adapter_options(name, task), "{} is built in", name);
    for (ConfigKey& option : file.keys()) {
      if (option.path == "task") continue;  // the section itself
      option.when = "adapter: " + name;
      options.push_back(std::move(option));
    }
  }
  std::size_t end_of_task = 0;  // where the adapters' options belong in `keys`: behind the other keys of `task`
  for (ConfigKey& key : blank.keys()) {
    if (key.path == "task.options") continue;  // the adapters' options are listed in its place
    const bool is_of_task = key.path.starts_with("task.");
    keys.push_back(std::move(key));
    if (is_of_task) end_of_task = keys.size();
  }
  keys.insert(keys.begin() + static_cast<std::ptrdiff_t>(end_of_task), options.begin(), options.end());
  return keys;
}

}  // namespace echoline::learner
