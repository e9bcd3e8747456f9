#include "learner/run_config.hpp"

#include <algorithm>
#include <cctype>

#include "base/config.hpp"
#include "overlay/trust/authority.hpp"

namespace echoline::learner {
namespace {

void read_run(ConfigSection s, RunSection& c) {
  s.require("name", c.name);
  const bool plain = std::all_of(c.name.begin(), c.name.end(), [](unsigned char ch) {
    return std::isalnum(ch) != 0 || ch == '-' || ch == '_' || ch == '.';
  });
  if (!plain || c.name.starts_with('.') || c.name.size() > overlay::trust::kRunIdBytesMax)
    s.error("name",
            fmt::format("expected at most {} letters, digits, '-', '_' and '.', not starting with '.'; it names "
                        "the run and its folder",
                        overlay::trust::kRunIdBytesMax));
  s.read("seed", c.seed);
  s.require("steps", c.steps, {.min = 1, .max = 10'000'000});
  s.read("folder", c.folder);
}

void read_model(ConfigSection s, ModelSection& c, const std::filesystem::path& base) {
  s.read("preset", c.preset);
  s.read("path", c.path);
  if (c.preset.has_value() == c.path.has_value())
    s.error("", "expected exactly one of 'preset' (a new model) and 'path' (a Hugging Face directory)");
  if (c.path && c.path->is_relative()) c.path = base / *c.path;
}

void read_rollout(ConfigSection s, RolloutSection& c) {
  s.read("prompts_per_step", c.prompts_per_step, {.min = 1, .max = 1'000'000});
  s.read("group_size", c.group_size, {.min = 2, .max = 1024});
  s.read("temperature", c.temperature, {.min = 1e-3, .max = 10.0});
  s.read("top_p", c.top_p, {.min = 1e-3, .max = 1.0});
  s.read("response_tokens_max", c.response_tokens_max, {.min = 1, .max = 1'000'000});
}

void read_staleness(ConfigSection s, StalenessSection& c) {
  s.require("budget", c.budget, {.min = 0, .max = 1000});
  s.read("publish_every", c.publish_every, {.min = 1, .max = 1000});
  if (c.budget < c.publish_every)
    s.error("budget",
            fmt::format("the staleness budget S = {} is below publish_every (kappa) = {}: a policy that is replaced "
                        "every {} steps is up to {} steps old. Raise budget or lower publish_every",
                        c.budget, c.publish_every, c.publish_every, c.publish_every));
  c.lookahead = c.budget;
  s.read("lookahead", c.lookahead, {.min = 1, .max = 1000});
  if (c.lookahead > c.budget)
    s.error("lookahead", fmt::format("expected at most the budget S = {}, found {}", c.budget, c.lookahead));
}

void read_learner(ConfigSection s, LearnerSection& c) {
  s.read_choice("advantage_scale", c.loss.advantage_scale,
                {{"std", AdvantageScale::kStd}, {"none", AdvantageScale::kNone}});
  s.read_choice("aggregation", c.loss.aggregation,
                {{"token_mean", Aggregation::kTokenMean}, {"sequence_mean", Aggregation::kSequenceMean}});
  s.read("clip_low", c.loss.clip_low, {.min = 0.0, .max = 0.999});
  s.read("clip_high", c.loss.clip_high, {.min = 0.0, .max = 100.0});
  s.read("importance_cap", c.loss.importance_cap, {.min = 1.0, .max = 1000.0});
  s.read("kl_coefficient", c.loss.kl_coefficient, {.min = 0.0, .max = 100.0});
  s.read("learning_rate", c.optimizer.learning_rate, {.min = 0.0, .max = 1.0});
  s.read("learning_rate_warmup_steps", c.optimizer.warmup_updates, {.min = 0, .max = 1'000'000});
  s.read("beta1", c.optimizer.beta1, {.min = 0.0, .max = 0.9999});
  s.read("beta2", c.optimizer.beta2, {.min = 0.0, .max = 0.99999});
  s.read("weight_decay", c.optimizer.weight_decay, {.min = 0.0, .max = 10.0});
  s.read("gradient_norm_max", c.optimizer.gradient_norm_max, {.min = 1e-6, .max = 1e6});
  s.read("minibatches", c.minibatches, {.min = 1, .max = 64});
  s.read("threads", c.threads, {.min = 1, .max = 1024});
  s.read("checkpoint_every", c.checkpoint_every, {.min = 1, .max = 1'000'000});
  s.read("checkpoints_kept", c.checkpoints_kept, {.min = 1, .max = 1000});
  s.read("usd_per_hour", c.usd_per_hour, {.min = 0.0, .max = 1e6});
  ConfigSection w = s.section("warm_start");
  c.warm_start.enabled = s.has("warm_start");
  w.read("target_accuracy", c.warm_start.target_accuracy, {.min = 0.0, .max = 1.0});
  w.read("steps_max", c.warm_start.steps_max, {.min = 1, .max = 1'000'000});
  w.read("batch", c.warm_start.batch, {.min = 1, .max = 65536});
  w.read("learning_rate", c.warm_start.learning_rate, {.min = 0.0, .max = 1.0});
}

void read_network(ConfigSection s, NetworkSection& c) {
  s.read("bind", c.bind);
  std::uint32_t port = c.port;
  s.read("port", port, {.min = 0, .max = 65535});
  c.port = static_cast<std::uint16_t>(port);
  const Limits<BitRate> positive{.min = BitRate{1000}, .max = BitRate{1e12}};
  s.read("uplink", c.uplink, positive);
  s.read("worker_rate", c.worker_rate, positive);
  s.read("chunk", c.chunk, {.min = Bytes{1024}, .max = Bytes{1u << 20}});
  using chains::TopologyPolicy;
  s.read_choice("topology", c.topology,
                {{"echo2", TopologyPolicy::kEcho2},
                 {"best_chains", TopologyPolicy::kBestChains},
                 {"stripes", TopologyPolicy::kStripes},
                 {"trees", TopologyPolicy::kTrees},
                 {"star", TopologyPolicy::kStar}});
  s.read("delay_expected", c.delay_expected, {.min = Duration(0), .max = std::chrono::seconds(60)});
  s.read("heartbeat_timeout", c.heartbeat_timeout,
         {.min = std::chrono::milliseconds(200), .max = std::chrono::hours(1)});
  s.read("quorum", c.quorum, {.min = 0.01, .max = 1.0});
}

void read_fleet(ConfigSection s, FleetSection& c, const std::filesystem::path& base) {
  s.require("offers", c.offers);
  if (c.offers.is_relative()) c.offers = base / c.offers;
  s.read_choice("provider", c.provider, {{"local", ProviderKind::kLocal}, {"none", ProviderKind::kNone}});
  s.read("headroom", c.headroom, {.min = 0.0, .max = 10.0});
  s.require("step_time_expected", c.step_time_expected,
            {.min = std::chrono::microseconds(1), .max = std::chrono::hours(1000)});
  s.read("delta_ratio_expected", c.delta_ratio_expected, {.min = 0.5, .max = 1e6});
  s.read("install_time_expected", c.install_time_expected, {.min = Duration(0), .max = std::chrono::hours(1)});
  s.read("usd_per_hour_max", c.usd_per_hour_max, {.min = 0.0, .max = 1e9});
  s.read("reliability_min", c.reliability_min, {.min = 0.0, .max = 1.0});
  s.read("duration_min", c.duration_min, {.min = Duration(0), .max = std::chrono::hours(24 * 3650)});
  s.read("workers_max", c.workers_max, {.min = 1, .max = 4096});
  s.read("join_timeout", c.join_timeout, {.min = std::chrono::seconds(1), .max = std::chrono::hours(24)});
  s.read("replace_lost", c.replace_lost);
}

}  // namespace

Result<RunConfig> load_run_config(const std::filesystem::path& path,
                                  const std::vector<std::pair<std::string, std::string>>& overrides) {
  auto loaded = ConfigFile::load(path);
  if (!loaded) return as_mistake(std::move(loaded).error());
  ConfigFile file = std::move(*loaded);
  for (const auto& [key, value] : overrides) ECHO_TRY(file.set(key, value));
  ConfigSection root = file.root();
  const std::filesystem::path base = file.folder();
  RunConfig config;
  read_run(root.section("run"), config.run);
  read_model(root.section("model"), config.model, base);
  ConfigSection task = root.section("task");
  task.require("adapter", config.task.adapter);
  config.task.options_json = task.json("options");
  read_rollout(root.section("rollout"), config.rollout);
  read_staleness(root.section("staleness"), config.staleness);
  read_learner(root.section("learner"), config.learner);
  read_network(root.section("network"), config.network);
  read_fleet(root.section("fleet"), config.fleet, base);
  ECHO_TRY(file.finish());
  config.resolved_yaml = file.resolved();
  return config;
}

}  // namespace echoline::learner
