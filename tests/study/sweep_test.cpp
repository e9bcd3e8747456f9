// Sweeps without processes: expressions, grids, resolved cells, statistics, and their pages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "study/sim_run_config.hpp"
#include "study/sweep_expression.hpp"
#include "study/sweep_grid.hpp"
#include "study/sweep_page.hpp"
#include "study/sweep_plan.hpp"
#include "study/sweep_results.hpp"
#include "tests/fuzz/input.hpp"
#include "tests/overlay/folder.hpp"

namespace echoline::study {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

double value_of(const std::string& text) {
  const auto e = Expression::parse(text);
  EXPECT_TRUE(e) << text << ": " << e.error().detail;
  if (!e) return NAN;
  const auto v = e->value([](const std::string& name) {
    return name == "S" ? std::optional(6.0) : name == "staleness.publish_every" ? std::optional(2.0) : std::nullopt;
  });
  EXPECT_TRUE(v) << text << ": " << v.error().detail;
  return v ? *v : NAN;
}

TEST(Expressions, HaveTheUsualMeaning) {
  EXPECT_EQ(value_of("S-1"), 5);
  EXPECT_EQ(value_of("1 + 2 * 3"), 7);
  EXPECT_EQ(value_of("(1 + 2) * 3"), 9);
  EXPECT_EQ(value_of("8 / 2 / 2"), 2);
  EXPECT_EQ(value_of("8 - 2 - 2"), 4);
  EXPECT_EQ(value_of("-S + --2"), -4);
  EXPECT_EQ(value_of("2 * -3"), -6);
  EXPECT_EQ(value_of("min(S, 2, 9) + max(1, staleness.publish_every)"), 4);
  EXPECT_EQ(value_of("1_000 + 2.5e-1"), 1000.25);
  EXPECT_EQ(value_of("max(1, min(S - 1, 3))"), 3);
}

TEST(Expressions, ErrorsNameTheReason) {
  for (const char* text :
       {"", "S-", "1 2", "(1", "min(1", "min()", "1..2", ")", "2 ** 3", "1e999", "S +* 2", "min", "é"}) {
    const auto e = Expression::parse(text);
    if (std::string(text) == "min") {
      EXPECT_TRUE(e);  // a name like any other without brackets
      continue;
    }
    ASSERT_FALSE(e) << text;
    EXPECT_EQ(e.error().code, Code::kInvalid);
    EXPECT_THAT(e.error().detail, HasSubstr("expected"));
  }
  EXPECT_FALSE(Expression::parse(std::string(kExpressionBytesMax + 1, '1')));
  EXPECT_FALSE(
      Expression::parse(std::string(kExpressionDepthMax + 1, '(') + "1" + std::string(kExpressionDepthMax + 1, ')')));
  const auto none = [](const std::string&) { return std::nullopt; };
  EXPECT_THAT(Expression::parse("1/0")->value(none).error().detail, HasSubstr("division"));
  EXPECT_THAT(Expression::parse("x+1")->value(none).error().detail, HasSubstr("'x'"));
  EXPECT_THAT(Expression::parse("1e300*1e300")->value(none).error().detail, HasSubstr("too large"));
}

std::string cells_of(const std::vector<std::string>& over) {
  std::vector<SweepAxis> axes;
  for (const std::string& text : over) {
    auto axis = parse_over(text);
    if (!axis) return axis.error().detail;
    axes.push_back(std::move(*axis));
  }
  const auto cells =
      expand(axes, [](const std::string& key) { return key == "run.steps" ? std::optional(40.0) : std::nullopt; });
  if (!cells) return cells.error().detail;
  std::string out;
  for (const GridCell& cell : *cells) {
    for (const auto& [key, value] : cell.values) out += short_key(key) + "=" + value + " ";
    out += "| ";
  }
  return out;
}

TEST(Grid, IsEveryCombinationOnce) {
  EXPECT_EQ(cells_of({"staleness.budget=1,3"}), "S=1 | S=3 | ");
  EXPECT_EQ(cells_of({"S=1,3", "a.b=x,y"}), "S=1 a.b=x | S=1 a.b=y | S=3 a.b=x | S=3 a.b=y | ");
  EXPECT_EQ(cells_of({"S=1,3,6", "staleness.publish_every=1,max(1,S-1)"}),
            "S=1 kappa=1 | S=3 kappa=1 | S=3 kappa=2 | S=6 kappa=1 | S=6 kappa=5 | ");
  EXPECT_EQ(cells_of({"kappa=1,S-1", "S=3"}), "kappa=1 S=3 | kappa=2 S=3 | ");  // whichever comes first
  EXPECT_EQ(cells_of({"S=2..3", "kappa=1..S"}),
            "S=2 kappa=1 | S=2 kappa=2 | S=3 kappa=1 | S=3 kappa=2 | S=3 kappa=3 | ");
  EXPECT_EQ(cells_of({"S=run.steps/10"}), "S=4 | ");  // a number of the file
  EXPECT_EQ(cells_of({"S=1,1,2-1"}), "S=1 | ");
}

TEST(Grid, RemembersHowACellWasWritten) {
  const std::vector<SweepAxis> axes{*parse_over("S=2,3"), *parse_over("kappa=1,S-1")};
  const auto cells = expand(axes, [](const std::string&) { return std::nullopt; });
  ASSERT_TRUE(cells);
  ASSERT_EQ(cells->size(), 3u);
  ASSERT_EQ(cells->at(0).written.size(), 2u);
  EXPECT_EQ(cells->at(0).written[1].back().second, "S-1");
  EXPECT_EQ(cells->at(2).written[0].back().second, "S-1");
}

TEST(Grid, TakesTextsLiterally) {
  EXPECT_EQ(cells_of({"network.uplink=24 Mbit/s,1 Gbit/s"}), "network.uplink=24 Mbit/s | network.uplink=1 Gbit/s | ");
  EXPECT_EQ(cells_of({"x=[a, b],[c]"}), "x=[a, b] | x=[c] | ");
  EXPECT_EQ(cells_of({"x={a: 1, b: 2},'S-1, 2'", "S=1"}), "x={a: 1, b: 2} S=1 | x='S-1, 2' S=1 | ");
  EXPECT_EQ(
      cells_of({"learner.learning_rate=2e-4,1_000", "network.topology=echo2,trees"}),
      "learner.learning_rate=2e-4 network.topology=echo2 | learner.learning_rate=2e-4 network.topology=trees | "
      "learner.learning_rate=1_000 network.topology=echo2 | learner.learning_rate=1_000 network.topology=trees | ");
  EXPECT_EQ(cells_of({"model.path=../a/b-c,/d.e"}), "model.path=../a/b-c | model.path=/d.e | ");
  EXPECT_EQ(cells_of({"network.bind=::1,127.0.0.1"}), "network.bind=::1 | network.bind=127.0.0.1 | ");
}

TEST(Grid, ErrorsNameTheReason) {
  EXPECT_THAT(cells_of({"S"}), HasSubstr("KEY=VALUE"));
  EXPECT_THAT(cells_of({"=1"}), HasSubstr("expected a key"));
  EXPECT_THAT(cells_of({"S=1,,2"}), HasSubstr("a value is missing"));
  EXPECT_THAT(cells_of({"S=[1"}), HasSubstr("unclosed bracket"));
  EXPECT_THAT(cells_of({"S=1", "staleness.budget=2"}), HasSubstr("already swept by --over S=1"));
  EXPECT_THAT(cells_of({"S=3", "kappa=S-"}), HasSubstr("expected a number or a name"));
  EXPECT_THAT(cells_of({"S=3", "staleness.publish_every=S-staleness.publish_evry"}),
              HasSubstr("did you mean 'staleness.publish_every'"));
  EXPECT_THAT(cells_of({"S=3", "kappa=1..s"}), HasSubstr("'s' is neither"));
  EXPECT_THAT(cells_of({"S=kappa", "kappa=S"}), HasSubstr("depends"));
  EXPECT_THAT(cells_of({"S=S+1"}), HasSubstr("depends"));
  EXPECT_THAT(cells_of({"S=3", "kappa=1..S/2"}), HasSubstr("whole numbers"));
  EXPECT_THAT(cells_of({"S=1..1000000"}), HasSubstr("at most 10000"));
  EXPECT_THAT(cells_of({"S=1..9999", "kappa=1..9999"}), HasSubstr("at most 10000 cells"));
  EXPECT_THAT(cells_of({"S=1..9999", "kappa=2..1", "G=1..9999"}), HasSubstr("no cell"));
  EXPECT_THAT(cells_of({"S=2..1"}), HasSubstr("every range is empty"));
  EXPECT_THAT(cells_of({"S=a", "kappa=S+1"}), HasSubstr("'S' has no value that is a number"));
}

TEST(Fuzz, AnyTextIsReadOrRefused) {
  std::mt19937 random(7);
  const std::vector<std::string> seeds{"S=1,3,6\nkappa=1,max(1,S-1)", "a.b=[x, y],{a: 1}\nS=1..5",
                                       "min(S,2)*-3.5e2/(1_0-kappa)", "x='a,b',\"c\"\nS=2..G\nG=3..S"};
  const std::string alphabet = "S1,.=()[]{}'\"+-*/ \nkappamin_e9";
  for (int i = 0; i < 20'000; ++i) {
    std::string text = seeds[random() % seeds.size()];
    for (std::size_t n = random() % 6; n > 0; --n) {
      const std::size_t at = random() % (text.size() + 1);
      if (random() % 3 == 0 && at < text.size())
        text.erase(at, 1 + random() % 3);
      else
        text.insert(at, 1, random() % 10 == 0 ? static_cast<char>(random()) : alphabet[random() % alphabet.size()]);
    }
    test::fuzz_input(text);
  }
}

// A run file with the offers it names.
class Plans : public testing::Test {
 protected:
  Plans() {
    std::filesystem::copy("configs/offers", folder_.path() / "offers");
    std::ifstream in("configs/quickstart.yaml");
    text_.assign(std::istreambuf_iterator<char>(in), {});
  }
  SweepArguments arguments(const std::string& more = "") {
    std::ofstream(folder_.path() / "run.yaml") << text_ << more;
    SweepArguments a;
    a.config = folder_.path() / "run.yaml";
    a.out = folder_.path() / "out";
    a.version = "1";
    return a;
  }
  SweepPlan plan(const SweepArguments& a) {
    auto plan = plan_sweep(a);
    EXPECT_TRUE(plan) << plan.error().message();
    return plan ? *std::move(plan) : SweepPlan{};
  }
  std::string refusal(const SweepArguments& a) {
    const auto plan = plan_sweep(a);
    EXPECT_FALSE(plan);
    if (plan) return "";
    EXPECT_EQ(plan.error().code, Code::kInvalid);
    return plan.error().message();
  }

  overlay::TemporaryFolder folder_;
  std::string text_;
};

TEST_F(Plans, CellsAreRunFilesOfTheirOwn) {
  SweepArguments a = arguments();
  a.over = {"S=1,3", "kappa=S"};
  a.seeds = 2;
  const SweepPlan p = plan(a);
  ASSERT_EQ(p.cells.size(), 2u);
  EXPECT_EQ(p.kind, SweepKind::kReal);
  EXPECT_EQ(p.cells[1].name(), "S=3 kappa=3");
  ASSERT_EQ(p.cells[1].runs.size(), 2u);
  const SweepRun& run = p.cells[1].runs[1];
  EXPECT_EQ(run.seed, 8u);  // the file's is 7
  EXPECT_THAT(run.config, HasSubstr("budget: 3"));
  EXPECT_THAT(run.config, HasSubstr("publish_every: 3"));
  EXPECT_THAT(run.config, HasSubstr("seed: 8"));
  EXPECT_THAT(run.config, HasSubstr("name: " + run.digest));
  EXPECT_EQ(run.folder, a.out / "cells" / run.digest);
}

TEST_F(Plans, FilesOfOneNameHaveFoldersOfTheirOwn) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::create_directory(folder_.path() / "other");
  SweepPlan first = {}, second = {};
  first.config = folder_.path() / "run.yaml";
  second.config = folder_.path() / "other" / "run.yaml";
  std::filesystem::current_path(folder_.path());
  const auto taken = [](SweepPlan& plan) {
    plan.out = default_sweep_folder(plan.config);
    std::filesystem::create_directories(plan.out);
    EXPECT_TRUE(write_sweep_source(plan));
    return plan.out;
  };
  const auto sweeps = std::filesystem::current_path() / "sweeps";
  EXPECT_EQ(taken(first), sweeps / "run");
  EXPECT_EQ(taken(second), sweeps / "run-2");
  EXPECT_EQ(default_sweep_folder("other/../run.yaml"), sweeps / "run") << "the same file again";
  EXPECT_EQ(default_sweep_folder("other/run.yaml"), sweeps / "run-2");
  EXPECT_EQ(default_sweep_folder("other/run.yml"), sweeps / "run-3");
  std::filesystem::current_path(before);
}

TEST_F(Plans, DigestsFollowFromTheResolvedRun) {
  SweepArguments a = arguments();
  a.seeds = 2;
  const auto digests = [&](const SweepArguments& arguments) {
    std::vector<std::string> out;
    const SweepPlan p = plan(arguments);
    for (const SweepRun& run : p.cells.at(0).runs) out.push_back(run.digest);
    return out;
  };
  const auto first = digests(a);
  ASSERT_EQ(first.size(), 2u);
  EXPECT_NE(first[0], first[1]);
  EXPECT_EQ(digests(a), first);
  a.out = folder_.path() / "elsewhere";
  EXPECT_EQ(digests(a), first);  // wherever it lies
  SweepArguments newer = a;
  newer.version = "2";
  EXPECT_THAT(digests(newer), Not(testing::Contains(first[0])));
  text_ += "\n# a comment\nevaluation:\n  every: 0\n";  // the default
  EXPECT_EQ(digests([&] {
              auto b = arguments();
              b.seeds = 2;
              return b;
            }()),
            first);
  a.over = {"learner.learning_rate=2e-4"};
  EXPECT_EQ(digests(a), first);  // what the file says as well
  a.over = {"learner.learning_rate=3e-4"};
  EXPECT_THAT(digests(a), Not(testing::Contains(first[0])));
}

TEST_F(Plans, TheFileMayStateTheSweep) {
  const std::string section =
      "\nsweep:\n  seeds: 3\n  over:\n    S: [3, 6]\n    kappa: 1..2\n    fleet.offers: [offers/quickstart.json]\n  "
      "measures: [fleet.workers_lost]\n";
  SweepPlan p = plan(arguments(section));
  EXPECT_EQ(p.cells.size(), 4u);
  EXPECT_EQ(p.seeds, 3u);
  EXPECT_THAT(p.measures, ElementsAre("fleet.workers_lost"));
  EXPECT_THAT(p.cells[0].runs[0].config, HasSubstr((folder_.path() / "offers/quickstart.json").string()));
  SweepArguments a = arguments(section);
  a.over = {"staleness.budget=4"};  // the command line counts
  a.seeds = 1;
  p = plan(a);
  EXPECT_EQ(p.cells.size(), 2u);
  EXPECT_EQ(p.seeds, 1u);
  p =
      plan(arguments("\nsweep:\n  cells:\n    - {staleness.budget: 3, kappa: S - 1}\n    - {staleness.budget: 6}\n  "
                     "over: {G: [8, 16]}\n"));
  ASSERT_EQ(p.cells.size(), 4u);
  EXPECT_EQ(p.cells[0].name(), "G=8 S=3 kappa=2");
  EXPECT_EQ(p.cells[3].name(), "G=16 S=6");
}

TEST_F(Plans, MistakesHaveTheirPlace) {
  SweepArguments a = arguments();
  EXPECT_THAT(refusal(a), HasSubstr("nothing to sweep"));
  a.over = {"stalness.budget=1"};
  EXPECT_THAT(refusal(a), HasSubstr("--over stalness.budget=1: unknown key 'stalness'; did you mean 'staleness'?"));
  a.over = {"S=1,3,5000,6000"};
  EXPECT_THAT(refusal(a), HasSubstr("--over staleness.budget=5000: expected 0 to 1000, found '5000' (cell S=5000)"));
  a.over = {"run.seed=1,2"};
  EXPECT_THAT(refusal(a), HasSubstr("--seeds"));
  a.over = {"S=0..1000"};
  a.seeds = 1000;
  EXPECT_THAT(refusal(a), HasSubstr("at most 20000 runs"));
  EXPECT_THAT(refusal(arguments("\nsweep:\n  ovr: {}\n")), HasSubstr("unknown key 'sweep.ovr'; did you mean 'over'?"));
  EXPECT_THAT(refusal(arguments("\nsweep:\n  seeds: 0\n")), HasSubstr("sweep.seeds: expected 1 to 1000"));
  EXPECT_THAT(refusal(arguments("\nsweep:\n  over:\n    S: [1, 3\n")), HasSubstr("run.yaml:"));
  EXPECT_THAT(refusal(arguments("\nsweep:\n  over:\n    S: [~]\n")), HasSubstr("run.yaml:"));
  EXPECT_THAT(refusal(arguments("\nsweep:\n  over:\n    S: [1, 3]\n    kappa: [S - nonsense]\n")),
              HasSubstr("sweep.over.kappa"));
  text_ += "\nsurprise: 1\n";
  a = arguments();
  a.over = {"S=1,3"};
  const std::string all = refusal(a);
  EXPECT_THAT(all, HasSubstr("unknown key 'surprise'"));
  EXPECT_EQ(all.find("surprise"), all.rfind("surprise")) << "once for all cells:\n" << all;
}

TEST_F(Plans, ScenariosAreReadByTheSimulator) {
  std::ofstream(folder_.path() / "churn.csv") << "60,0.5\n";
  text_ += "\nsimulation:\n  seed: 11\n  tokens: {median: 20}\n  churn: {per_hour: 0.5, trace: churn.csv}\n";
  SweepArguments a = arguments("\nsweep:\n  over: {simulation.churn.per_hour: [0.5, 1]}\n");
  const SweepPlan p = plan(a);
  EXPECT_EQ(p.kind, SweepKind::kSimulated);
  const std::string& config = p.cells.at(1).runs.at(0).config;
  EXPECT_THAT(config, HasSubstr("per_hour: 1\n"));
  EXPECT_THAT(config, HasSubstr("trace: " + (folder_.path() / "churn.csv").string()));
  EXPECT_THAT(config, HasSubstr("offers: " + (folder_.path() / "offers/quickstart.json").string()));
  EXPECT_EQ(p.cells[1].runs[0].seed, 11u);
  EXPECT_NE(p.cells[0].runs[0].digest, p.cells[1].runs[0].digest);
  // A resolved cell is a scenario again and resolves to itself.
  const auto again = load_sim_run(ConfigFile::parse(config, "cell"));
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_EQ(again->config.resolved_yaml, config);
  a.over = {"simulation.chrun.per_hour=1"};
  EXPECT_THAT(refusal(a),
              HasSubstr("--over simulation.chrun.per_hour=1: unknown key 'simulation.chrun'; did you mean 'churn'?"));
}

}  // namespace
}  // namespace echoline::study
