// Reads a scenario file for `echoline sim run` and for sweeps: the section `simulation`, and from it the scenario.
#include "study/sim_run_config.hpp"

#include <algorithm>
#include <cmath>

#include "base/files.hpp"
#include "learner/planning.hpp"
#include "provisioner/throughput.hpp"
#include "sim/run_tables.hpp"

namespace echoline::study {
namespace {

constexpr double kBytesPerChange = 0.7;  // default: bytes of a delta for each changed value
constexpr std::uint64_t kStepsMax = 1'000'000, kMachinesMax = 100'000;
// Each use of random numbers has a stream of its own, so that one use does not change the numbers of another.
constexpr std::uint64_t kMarketStream = 11, kRateErrorStream = 12;
constexpr Duration kUnlimitedRental = std::chrono::hours(24 * 3650);  // ten years
const Limits<BitRate> kLinkLimits{.min = BitRate{1000}, .max = BitRate{1e12}};

// Generated machines of one kind.
struct MachineKind {
  std::string region;
  std::uint32_t count = 1;
  sim::Lognormal usd_per_hour{}, tokens_per_s{}, up{}, down{};
  double upload_usd_per_gb = 0, download_usd_per_gb = 0, reliability = 1;
};

// The section `simulation` as read.
struct SimulationSection {
  sim::RunScenario scenario;
  std::optional<double> parameters, snapshot_bytes, density;  // here and below, absent: not in the file
  std::vector<double> densities;
  double bytes_per_change = kBytesPerChange;
  std::optional<Duration> step_time, install_time;
  bool has_delta_ratio_expected = false;  // the file sets fleet.delta_ratio_expected
  Duration step_time_per_1k_tokens{}, boot = std::chrono::seconds(30);
  std::optional<Duration> boot_p95;
  double tokens_median = 0;
  std::optional<double> tokens_p95;
  std::optional<std::filesystem::path> lengths, preemptions, slowdowns;
  double rate_error = 0;
  std::vector<MachineKind> market;
};

// A spread is a median and a 95th percentile, which may be at most this many times the median.
constexpr double kP95OverMedianMax = 1000;
void check_spread(ConfigSection& section, const char* key_p95, double median, double p95) {
  if (p95 > median && !(median > 0))
    section.error(key_p95, "expected nothing, or a median above 0");
  else if (p95 < median || p95 > kP95OverMedianMax * median)
    section.error(key_p95, fmt::format("expected a value from the median, {}, to {:.0f} times the median, found {}",
                                       median, kP95OverMedianMax, p95));
}

// Reads `key` as the median and `key_p95` as the 95th percentile. Without the second, all values are the median.
void read_spread(ConfigSection& section, const char* key, const char* key_p95, sim::Lognormal& value,
                 Limits<double> limits, ConfigDoc doc) {
  section.require(key, value.median, limits, doc);
  std::optional<double> p95;
  section.read(key_p95, p95, limits, {"95th percentile", "all alike"});
  value.p95 = p95.value_or(value.median);
  check_spread(section, key_p95, value.median, value.p95);
}
void read_link(ConfigSection& section, const char* key, const char* key_p95, sim::Lognormal& value, ConfigDoc doc) {
  BitRate rate;
  std::optional<BitRate> p95;
  section.require(key, rate, kLinkLimits, doc);
  section.read(key_p95, p95, kLinkLimits, {"95th percentile", "all alike"});
  value = {rate.bits_per_s, p95.value_or(rate).bits_per_s};
  check_spread(section, key_p95, value.median, value.p95);
}

void read_market(ConfigSection simulation, const provisioner::RegionMap& map, SimulationSection& section) {
  for (ConfigSection kind :
       simulation.sections("market", "kinds of generated machines that can be rented; not with fleet.offers")) {
    MachineKind machines;
    kind.read("region", machines.region, {"region of the machines; any name", "one region for all"});
    kind.require("count", machines.count, {.min = 1, .max = 100'000}, "number of these machines");
    read_spread(kind, "usd_per_hour", "usd_per_hour_p95", machines.usd_per_hour, {.min = 0.0, .max = 1e6},
                "rent of a machine, median");
    read_spread(kind, "tokens_per_s", "tokens_per_s_p95", machines.tokens_per_s, {.min = 1e-3, .max = 1e9},
                "tokens/s that a machine generates for all its responses together, median");
    read_link(kind, "up", "up_p95", machines.up, "uplink");
    read_link(kind, "down", "down_p95", machines.down, "downlink");
    const Limits<double> usd{.min = 0.0, .max = 1e6};
    kind.read("upload_usd_per_gb", machines.upload_usd_per_gb, usd, "price of sent data; 1 GB is 10^9 bytes");
    kind.read("download_usd_per_gb", machines.download_usd_per_gb, usd, "price of received data");
    kind.read("reliability", machines.reliability, {.min = 0.0, .max = 1.0},
              "reliability that the market states; decides the worker's place in the topology");
    if (!map.regions.empty() && !machines.region.empty() && !map.find(machines.region)) {
      std::vector<std::string> names;
      for (const provisioner::Region& region : map.regions) names.push_back(region.name);
      kind.error("region", fmt::format("the regions of network.regions do not include the place '{}'{}",
                                       machines.region, did_you_mean(machines.region, names)));
    }
    section.market.push_back(std::move(machines));
  }
}

void read_churn_and_faults(ConfigSection churn, ConfigSection faults, SimulationSection& section) {
  sim::RunChurn& scenario_churn = section.scenario.churn;
  churn.read("per_hour", scenario_churn.per_hour, {.min = 0.0, .max = 3600.0},
             "how often a machine is taken away per hour; 0.2: once in five hours");
  churn.read("announced", scenario_churn.announced, {.min = 0.0, .max = 1.0},
             "share of these machines that get a notice");
  churn.read("notice", scenario_churn.notice, {.min = Duration(0), .max = std::chrono::hours(1)},
             "time from the notice to the loss");
  churn.read("returns_after", scenario_churn.returns_after,
             {.min = std::chrono::seconds(1), .max = std::chrono::hours(1000)},
             "time until the machine is offered again");
  churn.read("trace", section.preemptions,
             {"file of rows `seconds,share[,region]`: at that time this share of the machines is taken away", "none"});
  sim::RunFaults& scenario_faults = section.scenario.faults;
  faults.read("refused", scenario_faults.refused, {.min = 0.0, .max = 1.0},
              "share of the attempts to rent that fail because the offer was taken");
  faults.read("never_joins", scenario_faults.never_joins, {.min = 0.0, .max = 1.0},
              "share of the rented machines whose worker never joins");
  faults.read("hangs_per_hour", scenario_faults.hangs_per_hour, {.min = 0.0, .max = 3600.0},
              "how often a worker stops answering per hour, while its machine still costs");
  faults.read(
      "slowdowns", section.slowdowns,
      {"file of rows `seconds,share,tokens,links,lasts[,region]`: from that time, for `lasts` seconds (0: forever), "
       "this share of the machines keeps only the share `tokens` of its tokens/s and `links` of its links",
       "none"});
}

void read_simulation(ConfigSection simulation, const learner::RunConfig& config, SimulationSection& section) {
  sim::RunScenario& scenario = section.scenario;
  scenario.seed = config.run.seed;
  simulation.read("seed", scenario.seed, {"seed of everything random", "run.seed"});
  simulation.read("parameters", section.parameters, {.min = 1e3, .max = 1e13},
                  {"number of the model's values, of two bytes each", "from the section `model`"});
  simulation.read(
      "snapshot_bytes", section.snapshot_bytes, {.min = 1.0, .max = 2e13},
      {"bytes of a whole policy as it is sent; a real run's encoding shortens it", "two for each parameter"});
  simulation.read(
      "density", section.density, {.min = 0.0, .max = 1.0},
      {"share of the values that change between two publications", "computed from fleet.delta_ratio_expected"});
  simulation.read("densities", section.densities,
                  {"the same for each publication; the last one also counts for all later ones", "`density`"});
  simulation.read("bytes_per_change", section.bytes_per_change, {.min = 0.01, .max = 16.0},
                  "bytes of a delta for each changed value");
  simulation.read_choice("publish", scenario.publication_form,
                         {{"delta", sim::PublicationForm::kDelta}, {"snapshot", sim::PublicationForm::kSnapshot}},
                         "a publication is a delta or the whole policy (snapshot)");
  simulation.read_choice("activation", scenario.offer_choice,
                         {{"cheapest", sim::OfferChoice::kCheapest}, {"random", sim::OfferChoice::kRandom}},
                         "which offers are rented: those that cost least per rollout (cheapest), or random ones");
  simulation.read_choice("fleet_size", scenario.fleet_size,
                         {{"by_need", sim::FleetSize::kByNeed}, {"planned", sim::FleetSize::kPlanned}},
                         "whether machines are rented and released as the learner and the workers wait (by_need), or "
                         "only lost ones are replaced (planned)");
  simulation.read_choice("shares", scenario.lease_shares,
                         {{"by_speed", sim::LeaseShares::kBySpeed}, {"equal", sim::LeaseShares::kEqual}},
                         "a worker's share of a batch: by its speed, or equal for all workers");
  simulation.read_choice(
      "leases", scenario.lease_rule, {{"in_time", sim::LeaseRule::kInTime}, {"any_age", sim::LeaseRule::kAnyAge}},
      "which work is handed out: only work that is fresh enough when it returns (in_time), or all, and stale "
      "rollouts are rejected (any_age)");
  simulation.read("step_time", section.step_time,
                  {.min = std::chrono::microseconds(1), .max = std::chrono::hours(1000)},
                  {"actual time T of a learner step without waiting; the plan uses fleet.step_time_expected",
                   "fleet.step_time_expected"});
  simulation.read("step_seconds", scenario.step_seconds,
                  {"the same for each step, in seconds; after the last one, the first follows again", "`step_time`"});
  for (const double step_s : scenario.step_seconds)
    if (!(step_s > 0 && step_s <= 3.6e6))
      simulation.error("step_seconds", fmt::format("expected seconds above 0, at most 3600000, found {}", step_s));
  simulation.read("step_time_per_1k_tokens", section.step_time_per_1k_tokens,
                  {.min = Duration(0), .max = std::chrono::hours(1)},
                  "additional step time for every 1,000 tokens trained on");
  simulation.read("install_time", section.install_time, {.min = Duration(0), .max = std::chrono::hours(1)},
                  {"actual time to install a policy", "fleet.install_time_expected"});
  simulation.read("encode_time", scenario.encode_time, {.min = Duration(0), .max = std::chrono::hours(1)},
                  "from the end of a step until its policy is encoded and can be sent; the next step runs meanwhile");
  simulation.read("acknowledge_time", scenario.acknowledge_time, {.min = Duration(0), .max = std::chrono::hours(1)},
                  "from a worker's installation of a policy until the learner knows of it; part of T_b");
  simulation.read("wire_overhead", scenario.wire_overhead, {.min = 0.0, .max = 1.0},
                  "headers and encryption as a share of the bytes sent; real nodes assume 0.05");
  simulation.read("groups_at_once", scenario.groups_at_once, {.min = 1, .max = 1024},
                  "groups that a worker holds at once: the current one and the next");
  simulation.read(
      "work_ahead", scenario.work_ahead, {.min = Duration(0), .max = std::chrono::hours(1)},
      "a worker holds one group and all it completes in this time, if those are more than `groups_at_once`");
  simulation.read("sequence_tokens_per_s", scenario.sequence_tokens_per_s, {.min = 1e-3, .max = 1e6},
                  {"limit of a single response; with it, a long response is late even on a fast machine", "no limit"});
  simulation.read("rate_error", section.rate_error, {.min = 0.0, .max = 0.95},
                  "a machine's speed differs at most by this share from the promised one; 0.1 is 10 %");
  simulation.read("boot", section.boot, {.min = Duration(0), .max = std::chrono::hours(24)},
                  "from renting a machine until its worker joins, median");
  simulation.read("boot_p95", section.boot_p95, {.min = Duration(0), .max = std::chrono::hours(24)},
                  {"95th percentile", "always `boot`"});
  simulation.read("time_max", scenario.time_max, {.min = std::chrono::seconds(1), .max = std::chrono::hours(100'000)},
                  "limit of virtual time, at which the run ends");
  ConfigSection tokens = simulation.section("tokens", "Length of responses; limited by rollout.response_tokens_max.");
  const bool has_histogram = tokens.has("histogram");
  tokens.read("histogram", section.lengths, {"file of rows `tokens,weight`", "`median`"});
  if (has_histogram)
    tokens.read("median", section.tokens_median, {.min = 1.0, .max = 1e7});
  else
    tokens.require("median", section.tokens_median, {.min = 1.0, .max = 1e7},
                   "median; half of the responses are shorter");
  tokens.read("p95", section.tokens_p95, {.min = 1.0, .max = 1e7},
              {"95th percentile; the lengths are lognormal", "all are alike"});
  if (section.tokens_p95 && !has_histogram) check_spread(tokens, "p95", section.tokens_median, *section.tokens_p95);
  if (has_histogram && (tokens.has("median") || section.tokens_p95))
    tokens.error("histogram", "expected either `histogram` or `median`, found both");
  read_churn_and_faults(simulation.section("churn", "Machines that are taken away from the run."),
                        simulation.section("faults", "Other faults."), section);
  read_market(simulation, config.paths.regions, section);
  for (const double density : section.densities)
    if (!(density >= 0 && density <= 1))
      simulation.error("densities", fmt::format("expected numbers from 0 to 1, found {}", density));
  if (section.boot_p95) check_spread(simulation, "boot_p95", seconds(section.boot), seconds(*section.boot_p95));
  if (config.run.steps > kStepsMax)
    simulation.error(
        "", fmt::format("run.steps: a simulated run has at most {} steps, found {}", kStepsMax, config.run.steps));
  std::uint64_t machine_count = 0;
  for (const MachineKind& kind : section.market) machine_count += kind.count;
  if (machine_count > kMachinesMax)
    simulation.error("market",
                     fmt::format("expected at most {} machines in all, found {}", kMachinesMax, machine_count));
  // Random activation ignores prices, so it cannot keep to limits on them.
  if (scenario.offer_choice == sim::OfferChoice::kRandom && (config.fleet.usd_per_hour_max || config.fleet.usd_max))
    simulation.error(
        "activation",
        "random activation ignores prices, so it cannot keep to fleet.usd_per_hour_max and usd_max; remove these "
        "limits");
}

// Returns the index of the region, which is added if it is new.
std::uint32_t region_of(sim::RunScenario& scenario, const std::string& name) {
  const auto it = std::find(scenario.regions.begin(), scenario.regions.end(), name);
  if (it != scenario.regions.end()) return static_cast<std::uint32_t>(it - scenario.regions.begin());
  scenario.regions.push_back(name);
  return static_cast<std::uint32_t>(scenario.regions.size() - 1);
}

void add_generated_offers(const SimulationSection& section, double tokens_mean, sim::RunScenario& scenario) {
  sim::Draws draws(scenario.seed, kMarketStream);
  std::size_t machine_number = 0;
  for (const MachineKind& kind : section.market) {
    const std::uint32_t region = region_of(scenario, kind.region);
    for (std::uint32_t i = 0; i < kind.count; ++i) {
      sim::RunOffer run_offer;
      run_offer.region = region;
      run_offer.offer.id = kind.region.empty() ? fmt::format("m{}", ++machine_number)
                                               : fmt::format("{}-{}", kind.region, ++machine_number);
      run_offer.offer.provider = "sim";
      run_offer.offer.place = kind.region;
      run_offer.offer.up = BitRate{draws.lognormal(kind.up)};
      run_offer.offer.down = BitRate{draws.lognormal(kind.down)};
      run_offer.offer.rollouts_per_s = draws.lognormal(kind.tokens_per_s) / tokens_mean;
      run_offer.offer.rollouts_source = provisioner::RateSource::kMeasured;
      run_offer.offer.rollouts_uncertainty = section.rate_error;
      run_offer.offer.gpu_usd_per_hour = draws.lognormal(kind.usd_per_hour);
      run_offer.offer.storage_usd_per_hour = 0;
      run_offer.offer.upload_usd_per_gb = kind.upload_usd_per_gb;
      run_offer.offer.download_usd_per_gb = kind.download_usd_per_gb;
      run_offer.offer.reliability = kind.reliability;
      run_offer.offer.duration_max = kUnlimitedRental;
      scenario.offers.push_back(std::move(run_offer));
    }
  }
}

Status read_offers(const learner::RunConfig& config, double parameters, double tokens_mean,
                   sim::RunScenario& scenario) {
  auto list = provisioner::load_offers(config.fleet.offers, config.fleet.reading());
  if (!list) return as_user_error(std::move(list).error());
  std::optional<provisioner::ThroughputProfile> profile;
  if (config.fleet.profile) {
    auto loaded = provisioner::ThroughputProfile::load(*config.fleet.profile);
    if (!loaded) return as_user_error(std::move(loaded).error());
    profile = std::move(*loaded);
  }
  // A simulated worker has the figures of the profile unless the run file names another engine than the default.
  provisioner::Workload workload{.parameters = parameters, .tokens_per_rollout = tokens_mean};
  if (config.worker.engine != "builtin" || config.worker.device != "cpu")
    workload.engines = config.worker.worker_engines();
  provisioner::predict_throughput(list->offers, workload, profile ? &*profile : nullptr, {});
  for (provisioner::Offer& offer : list->offers) {
    if (config.fleet.pricing == provisioner::Pricing::kBid && offer.bid_usd_per_hour_min)
      offer.bid_usd_per_hour = *offer.bid_usd_per_hour_min * (1 + config.fleet.bid_over_min);
    sim::RunOffer run_offer;
    run_offer.region = region_of(scenario, offer.place);
    run_offer.offer = std::move(offer);
    scenario.offers.push_back(std::move(run_offer));
  }
  return ok();
}

// The size of a delta in which the share `density` of the values changes; at most the size of a snapshot.
Bytes delta_size(double parameters, double density, double bytes_per_change) {
  const double snapshot_bytes = 2 * parameters;  // two bytes for each value
  const double delta_bytes = std::min(snapshot_bytes, parameters * density * bytes_per_change);
  return Bytes{static_cast<std::uint64_t>(delta_bytes) + 1};  // rounded up
}

Status build_scenario(const SimulationSection& section, SimRun& run) {
  const learner::RunConfig& config = run.config;
  sim::RunScenario& scenario = run.scenario;
  scenario.pacing = config.pacing();
  scenario.lease = config.lease_length();
  scenario.on_new_policy = config.rollout.on_new_policy == schema::ON_NEW_POLICY_ABORT    ? sim::OnNewPolicy::kAbort
                           : config.rollout.on_new_policy == schema::ON_NEW_POLICY_FINISH ? sim::OnNewPolicy::kFinish
                                                                                          : sim::OnNewPolicy::kContinue;
  if (section.lengths) {
    auto text = read_file(*section.lengths, sim::kTableBytesMax);
    if (!text) return as_user_error(std::move(text).error());
    ECHO_ASSIGN(scenario.token_histogram, sim::parse_lengths(*text, section.lengths->string()));
  }
  scenario.tokens = {section.tokens_median, section.tokens_p95.value_or(section.tokens_median)};
  scenario.install_time = section.install_time;
  scenario.step_time = section.step_time.value_or(config.fleet.step_time_expected);
  scenario.step_s_per_token = seconds(section.step_time_per_1k_tokens) / 1000;
  scenario.boot_s = {seconds(section.boot), seconds(section.boot_p95.value_or(section.boot))};
  scenario.heartbeat_timeout = config.network.heartbeat_timeout;
  scenario.regions.clear();
  const double tokens_mean = sim::mean_tokens(scenario);
  if (section.market.empty())
    ECHO_TRY(read_offers(config, run.parameters, tokens_mean, scenario));
  else
    add_generated_offers(section, tokens_mean, scenario);
  if (scenario.regions.empty()) scenario.regions.push_back("");  // one region for all
  sim::Draws rate_error_draws(scenario.seed, kRateErrorStream);
  for (sim::RunOffer& run_offer : scenario.offers) {
    if (section.rate_error > 0) run_offer.rate_share = 1 + section.rate_error * (2 * rate_error_draws.uniform() - 1);
    run.prices_known = run.prices_known && run_offer.offer.usd_per_hour().has_value();
  }
  if (section.preemptions) {
    auto text = read_file(*section.preemptions, sim::kTableBytesMax);
    if (!text) return as_user_error(std::move(text).error());
    ECHO_ASSIGN(scenario.churn.preemptions,
                sim::parse_preemptions(*text, section.preemptions->string(), scenario.regions));
  }
  if (section.slowdowns) {
    auto text = read_file(*section.slowdowns, sim::kTableBytesMax);
    if (!text) return as_user_error(std::move(text).error());
    ECHO_ASSIGN(scenario.faults.slowdowns, sim::parse_slowdowns(*text, section.slowdowns->string(), scenario.regions));
  }

  const Bytes policy_bf16{static_cast<std::uint64_t>(2 * run.parameters)};
  scenario.request = learner::plan_request(config, policy_bf16, /*trained=*/policy_bf16);
  scenario.request.fleet.provider = "none";  // then offers of all providers are eligible
  if (section.snapshot_bytes) scenario.snapshot_bytes = Bytes{static_cast<std::uint64_t>(*section.snapshot_bytes)};
  if (section.densities.empty() && section.density)
    scenario.delta_bytes = {delta_size(run.parameters, *section.density, section.bytes_per_change)};
  for (const double density : section.densities)
    scenario.delta_bytes.push_back(delta_size(run.parameters, density, section.bytes_per_change));
  if (scenario.delta_bytes.empty()) scenario.delta_bytes = {scenario.request.delta_bytes};
  if (scenario.publication_form == sim::PublicationForm::kSnapshot)
    scenario.request.delta_bytes = scenario.request.full_bytes;
  else if (!section.has_delta_ratio_expected)
    scenario.request.delta_bytes = scenario.delta_bytes.front();  // otherwise the plan uses fleet.delta_ratio_expected
  scenario.request.pace.step_time =
      config.fleet.step_time_expected +
      from_seconds(scenario.step_s_per_token * tokens_mean * scenario.request.pace.rollouts_per_step);
  scenario.request.run_time =
      from_seconds(static_cast<double>(config.run.steps) * seconds(scenario.request.pace.step_time));
  return ok();
}

Result<SimRun> read_sim_run(ConfigFile file) {
  SimRun run;
  learner::read_simulated_run(file.root(), run.config);
  SimulationSection section;
  if (!file.root().has("simulation"))
    file.root().error(
        "", "expected a section `simulation` that describes the world, found none; see configs/sim/small.yaml");
  ConfigSection simulation = file.root().section("simulation");
  read_simulation(simulation, run.config, section);
  section.has_delta_ratio_expected = file.root().section("fleet").has("delta_ratio_expected");
  const bool has_model = run.config.model.preset || run.config.model.path;
  if (!section.parameters && !has_model)
    simulation.error("parameters", "expected the number of the model's values, because there is no section `model`");
  if (section.market.empty() == run.config.fleet.offers.empty())
    simulation.error("market", "expected either fleet.offers (a file) or simulation.market (generated)");
  ECHO_TRY(file.finish());
  run.config.resolved_yaml = file.resolved();
  run.scenario = section.scenario;
  if (section.parameters) {
    run.parameters = *section.parameters;
  } else {
    ECHO_ASSIGN(const auto shape, learner::run_model_config(run.config));
    run.parameters = static_cast<double>(shape.parameters());
  }
  ECHO_TRY(build_scenario(section, run));
  return run;
}

}  // namespace

Result<SimRun> load_sim_run(Result<ConfigFile> loaded,
                            const std::vector<std::pair<std::string, std::string>>& overrides) {
  if (!loaded) return as_user_error(std::move(loaded).error());
  for (const auto& [key, value] : overrides) ECHO_TRY(loaded->set(key, value));
  (void)loaded->split("sweep");  // removes the section, because only `echoline sweep` reads it
  return read_sim_run(std::move(*loaded));
}

std::vector<ConfigKey> simulation_keys() {
  ConfigFile blank = ConfigFile::blank();
  SimulationSection unused_values;
  read_simulation(blank.root().section("simulation"), {}, unused_values);
  return blank.keys();
}

}  // namespace echoline::study
