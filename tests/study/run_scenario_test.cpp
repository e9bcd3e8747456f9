// Scenario files of simulated runs: their keys, their errors, and the resulting scenarios.
#include <gtest/gtest.h>

#include <set>

#include "base/files.hpp"
#include "base/random.hpp"
#include "sim/run_tables.hpp"
#include "study/sim_run_config.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::study {
namespace {

constexpr const char* kScenario = R"(run: {name: t, steps: 20}
rollout: {prompts_per_step: 8, group_size: 4, response_tokens_max: 1000}
staleness: {budget: 3}
network: {uplink: 200 Mbit/s, delay_expected: 5 ms, regions: [{name: here}, {name: far, places: [there, elsewhere]}],
          ways: [{from: far, to: here, delay: 80 ms, rate: 20 Mbit/s}]}
fleet: {step_time_expected: 20 s, headroom: 0.2}
simulation:
  parameters: 1e8
  density: 0.05
  tokens: {median: 100, p95: 400}
  market:
    - {region: here, count: 3, usd_per_hour: 0.2, tokens_per_s: 200, up: 50 Mbit/s, down: 50 Mbit/s}
    - {region: there, count: 5, usd_per_hour: 0.1, usd_per_hour_p95: 0.3, tokens_per_s: 100, up: 50 Mbit/s,
       up_p95: 90 Mbit/s, down: 50 Mbit/s}
  churn: {per_hour: 0.5}
)";

std::string with(std::string text, std::string_view from, std::string_view to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

std::string problem(const std::string& text) {
  const auto run = load_sim_run(ConfigFile::parse(text, "s.yaml"));
  if (run) return "";
  EXPECT_EQ(run.error().code, Code::kInvalid);
  return run.error().message();
}

TEST(SimRunConfig, ReadsAScenario) {
  const auto run = load_sim_run(ConfigFile::parse(kScenario, "s.yaml"));
  ASSERT_TRUE(run.has_value()) << run.error().message();
  const sim::RunScenario& s = run->scenario;
  EXPECT_EQ(s.offers.size(), 8u);
  EXPECT_EQ(s.regions, (std::vector<std::string>{"here", "there"}));
  EXPECT_EQ(s.offers[4].region, 1u);
  const provisioner::RegionMap& regions = s.request.paths.regions;
  EXPECT_EQ(regions.of("there"), 1u);
  EXPECT_EQ(regions.of("nowhere"), 0u);
  EXPECT_EQ(regions.graph.links[0][1].delay, std::chrono::milliseconds(80));
  EXPECT_EQ(regions.graph.rate(0, 1), BitRate::from_mbit_per_s(20));
  EXPECT_FALSE(regions.graph.links[0][0].delay);
  EXPECT_EQ(s.request.full_bytes.count, 200'000'000u);
  EXPECT_EQ(s.delta_bytes, (std::vector<Bytes>{Bytes{3'500'001}}));  // 1e8 x 0.05 x 0.7
  EXPECT_EQ(s.request.delta_bytes, s.delta_bytes.front());
  EXPECT_EQ(s.pacing.trajectories_per_step, 32u);
  EXPECT_EQ(s.pacing.staleness.lookahead_steps(), 3u);
  // 200 tokens/s at a mean of some 140 tokens.
  EXPECT_NEAR(s.offers[0].offer.rollouts_per_s * sim::mean_tokens(s), 200, 1e-9);
  const auto result = sim::simulate_run(s);
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->ended, "completed");
}

TEST(SimRunConfig, PlansWithExpectedValuesAndSimulatesActualOnes) {
  const auto plain = load_sim_run(ConfigFile::parse(kScenario, "s.yaml"));
  ASSERT_TRUE(plain.has_value());
  EXPECT_EQ(plain->scenario.step_time, std::chrono::seconds(20));
  EXPECT_FALSE(plain->scenario.install_time);
  std::string text =
      with(kScenario, "headroom: 0.2", "headroom: 0.2, install_time_expected: 1 s, delta_ratio_expected: 4");
  text = with(text, "  density: 0.05",
              "  density: 0.05\n  step_time: 5 s\n  install_time: 2 s\n  work_ahead: 3 s\n  wire_overhead: 0.05");
  const auto run = load_sim_run(ConfigFile::parse(text, "s.yaml"));
  ASSERT_TRUE(run.has_value()) << run.error().message();
  const sim::RunScenario& s = run->scenario;
  EXPECT_EQ(s.step_time, std::chrono::seconds(5));
  EXPECT_EQ(s.request.pace.step_time, std::chrono::seconds(20));
  EXPECT_EQ(s.install_time, std::chrono::seconds(2));
  EXPECT_EQ(s.request.fleet.install_time_expected, std::chrono::seconds(1));
  EXPECT_EQ(s.delta_bytes.front(), Bytes{3'500'001});
  EXPECT_EQ(s.request.delta_bytes, Bytes{50'000'001});
  EXPECT_EQ(s.work_ahead, std::chrono::seconds(3));
  EXPECT_EQ(s.wire_overhead, 0.05);
}

TEST(SimRunConfig, ErrorsNameTheirPlaceAndReason) {
  const auto says = [](const std::string& text, std::string_view what) {
    const std::string found = problem(text);
    EXPECT_NE(found.find(what), std::string::npos) << "expected: " << what << "\nfound: " << found;
  };
  says(with(kScenario, "density: 0.05", "desnity: 0.05"),
       "s.yaml:9:3: unknown key 'simulation.desnity'; did you mean 'density'?");
  says(with(kScenario, "density: 0.05", "density: 2"), "s.yaml:9:12:");
  says(with(kScenario, "  parameters: 1e8\n", ""), "expected the number of the model's values");
  says(with(kScenario, "budget: 3", "budget: -1"), "s.yaml:3:21:");
  says(with(kScenario, "count: 3, ", ""), "count");
  says(with(kScenario, "count: 3", "count: 100001"), "100000");
  says(with(kScenario, "count: 3", "count: 99_999"), "expected at most 100000 machines in all");
  says(with(kScenario, "p95: 400", "p95: 50"),
       "expected a value from the median, 100, to 1000 times the median, found 50");
  says(with(kScenario, "usd_per_hour_p95: 0.3", "usd_per_hour_p95: 1000"), "to 1000 times the median");
  says(with(kScenario, "{median: 100, p95: 400}", "{p95: 400}"), "median");
  says(with(kScenario, "{median: 100, p95: 400}", "{histogram: /nowhere/lengths.csv}"), "/nowhere/lengths.csv");
  says(with(kScenario, "to: here", "to: hre"), "no region 'hre' in network.regions; did you mean 'here'?");
  says(with(kScenario, "region: there, c", "region: thre, c"),
       "the regions of network.regions do not include the place 'thre'");
  says(with(kScenario, "headroom: 0.2", "headroom: 0.2, offers: o.json"),
       "expected either fleet.offers (a file) or simulation.market");
  says(with(kScenario, "headroom: 0.2", "headroom: 0.2, search: true"), "a simulated market is not searched");
  says(with(kScenario, "steps: 20", "steps: 2000000"), "at most 1000000 steps");
  says(with(with(kScenario, "density: 0.05", "activation: random"), "headroom: 0.2", "headroom: 0.2, usd_max: 5"),
       "remove these limits");
  says(with(kScenario, "simulation:", "simulaton:"), "unknown key 'simulaton'");
  says(with(kScenario, "simulation:", "simulaton:"), "expected a section `simulation`");
}

TEST(SimRunTables, ReadsLengthsPreemptionsAndSlowdowns) {
  const auto lengths = sim::parse_lengths("tokens,weight\n# a remark\n100, 3\n\n200,1 # and another\r\n", "l.csv");
  ASSERT_TRUE(lengths.has_value()) << lengths.error().message();
  EXPECT_EQ(lengths->values, (std::vector<double>{100, 200}));
  EXPECT_EQ(lengths->cumulative_weights, (std::vector<double>{3, 4}));
  const std::vector<std::string> regions{"here", "there"};
  const auto trace = sim::parse_preemptions("60,0.5\n90,1,there\n", "p.csv", regions);
  ASSERT_TRUE(trace.has_value());
  EXPECT_EQ(trace->at(1).region, 1u);
  EXPECT_FALSE(trace->at(0).region.has_value());
  const auto slow = sim::parse_slowdowns(
      "seconds,share,tokens,links,lasts,region\n60,0.5,0.25,1,30\n90,1,1,0.1,0,there\n", "s.csv", regions);
  ASSERT_TRUE(slow.has_value()) << slow.error().message();
  EXPECT_EQ(slow->at(0).token_rate_left, 0.25);
  EXPECT_EQ(slow->at(0).lasts, std::chrono::seconds(30));
  EXPECT_EQ(slow->at(1).link_rate_left, 0.1);
  EXPECT_FALSE(slow->at(1).lasts.has_value());
  EXPECT_EQ(slow->at(1).region, 1u);
}

TEST(SimRunTables, NamesTheInvalidLine) {
  const std::vector<std::string> regions{"here", "there"};
  EXPECT_EQ(sim::parse_lengths("", "l.csv").error().message(), "l.csv:0: no rows; expected tokens,weight");
  EXPECT_EQ(sim::parse_lengths("1,1\n2\n", "l.csv").error().message(), "l.csv:2: expected tokens,weight");
  EXPECT_EQ(sim::parse_lengths("1,1\n0,1\n", "l.csv").error().message(),
            "l.csv:2: tokens: expected a number from 1 to 10000000, found '0'");
  EXPECT_EQ(
      sim::parse_lengths("1,nan\n", "l.csv").error().message(),
      "l.csv:1: weight: expected a number from 0 to 1000000000000, found 'nan'\nl.csv:1: no row has a weight above 0");
  EXPECT_EQ(sim::parse_lengths("1,0\n", "l.csv").error().message(), "l.csv:1: no row has a weight above 0");
  EXPECT_EQ(sim::parse_preemptions("9,0.5\n8,0.5\n", "p.csv", regions).error().message(),
            "p.csv:2: rows must be ordered by time: 8 comes after 9");
  EXPECT_EQ(sim::parse_preemptions("9,0.5,ther\n", "p.csv", regions).error().message(),
            "p.csv:1: no region 'ther'; did you mean 'there'?");
  EXPECT_EQ(sim::parse_slowdowns("9,1,0.5\n", "s.csv", regions).error().message(),
            "s.csv:1: expected seconds,share,tokens,links,lasts or seconds,share,tokens,links,lasts,region");
  EXPECT_EQ(sim::parse_slowdowns("9,1,0,1,5\n", "s.csv", regions).error().message(),
            "s.csv:1: tokens: expected a number from 0.001 to 1, found '0'");
}

TEST(SimRunConfig, TheDrawnFollowTheirDistribution) {
  sim::Draws draws(5, 1);
  std::vector<double> values;
  double sum = 0;
  for (int i = 0; i < 50'000; ++i) values.push_back(draws.lognormal({100, 400})), sum += draws.exponential(7);
  std::sort(values.begin(), values.end());
  EXPECT_NEAR(values[25'000], 100, 2);
  EXPECT_NEAR(values[47'500], 400, 12);
  EXPECT_NEAR(sum / 50'000, 7, 0.15);
  for (const double x : {1e-300, 1e-3, 0.5, 1.0, 2.718281828459045, 12345.678, 1e300})
    EXPECT_NEAR(sim::portable_log(x), std::log(x), 1e-13 * std::max(1.0, std::abs(std::log(x)))) << x;
  for (const double x : {-600.0, -1.0, 0.0, 1.0, 0.3, 25.0, 600.0})
    EXPECT_NEAR(sim::portable_exp(x) / std::exp(x), 1, 1e-13) << x;
}

TEST(SimRunConfig, EveryKeyIsDocumented) {
  const auto page = read_file("docs/simulation.md");
  ASSERT_TRUE(page.has_value());
  std::size_t keys = 0;
  for (const ConfigKey& key : simulation_keys()) {
    if (!key.path.starts_with("simulation.")) continue;
    ++keys;
    EXPECT_NE(page->find("| `" + key.path.substr(11) + "` | " + std::string(key.meaning)), std::string::npos)
        << key.path;
  }
  EXPECT_GT(keys, 40u);
}

TEST(SimRunConfig, AnyBytesAreReadOrRefused) {
  std::vector<std::string> seeds{kScenario, kScenario, "tokens,weight\n100,3\n200,1\n", "60,0.5\n90,1,there\n",
                                 "60,0.5,0.5,1,0\n90,1,1,0.1,30,there\n"};
  for (const char* name : {"configs/sim/small.yaml", "configs/sim/regions.yaml"}) {
    const auto text = read_file(name);
    ASSERT_TRUE(text.has_value());
    seeds.push_back(*text);
  }
  Random random(3);
  const std::string_view kPieces[] = {"-1", "1e309", "0", "nan", ":",  "\n",         "  ",   "[",      "{",
                                      "}",  "]",     ",", "#",   "\"", "simulation", "null", "1e-320", "9999999999999"};
  for (int round = 0; round < 1500; ++round) {
    std::string text = seeds[random.below(seeds.size())];
    for (std::uint64_t changes = random.below(4); changes-- > 0 && !text.empty();) {
      const std::size_t at = random.below(text.size());
      switch (random.below(4)) {
        case 0:
          text[at] = static_cast<char>(random.below(256));
          break;
        case 1:
          text.erase(at, random.below(20));
          break;
        case 2:
          text.insert(at, kPieces[random.below(std::size(kPieces))]);
          break;
        default: {  // another number
          const std::size_t digit = text.find_first_of("0123456789", at);
          if (digit != std::string::npos) text.replace(digit, 1, kPieces[random.below(std::size(kPieces))]);
        }
      }
    }
    test::fuzz_input(text);
  }
}

}  // namespace
}  // namespace echoline::study
