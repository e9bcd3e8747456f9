// The program's verbs from the outside: bad input is named and ends with exit code 2, good input prints data.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;

std::string read(const std::filesystem::path& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// The quickstart with one text replaced, in a folder of its own that holds the offers as well.
class RunFile {
 public:
  RunFile(const std::string& from, const std::string& to) {
    std::string text = read("configs/quickstart.yaml");
    const std::size_t at = text.find(from);
    if (at == std::string::npos) throw std::runtime_error("the quickstart has no '" + from + "'");
    std::ofstream(path()) << text.replace(at, from.size(), to);
    std::filesystem::copy("configs/offers", folder_.path() / "offers", std::filesystem::copy_options::recursive);
  }
  std::string path() const { return (folder_.path() / "run.yaml").string(); }
  const std::filesystem::path& folder() const { return folder_.path(); }

 private:
  TemporaryFolder folder_;
};

void expect_refused(const std::vector<std::string>& arguments, const std::vector<std::string>& texts) {
  const Outcome outcome = run_program(arguments);
  EXPECT_EQ(outcome.status, 2) << outcome.err << outcome.out;
  EXPECT_EQ(outcome.out, "");
  for (const std::string& text : texts)
    EXPECT_NE(outcome.err.find(text), std::string::npos) << "no '" << text << "' in:\n" << outcome.err;
}

TEST(BadInput, UnknownKeyWithASuggestion) {
  const RunFile file("budget: 6 ", "budgte: 6 ");
  expect_refused({"up", file.path()}, {"run.yaml:", "unknown key 'staleness.budgte'; did you mean 'budget'?"});
}

TEST(BadInput, DuplicateKey) {
  const RunFile file("  steps:", "  seed: 8\n  steps:");
  expect_refused({"plan", file.path()}, {"run.yaml:", "seed"});
}

TEST(BadInput, MissingUnit) {
  const RunFile file("24 Mbit/s", "24");
  expect_refused({"up", file.path()}, {"run.yaml:", "'24 Mbit/s'", "found '24'", "unit is missing"});
}

TEST(BadInput, StalenessBudgetBelowPublishPeriod) {
  const RunFile file("publish_every: 1", "publish_every: 7");
  expect_refused({"plan", file.path()}, {"run.yaml:", "S = 6", "kappa"});
}

TEST(BadInput, EveryProblemAtOnce) {
  const RunFile file("  uplink: 24 Mbit/s", "  uplink: 24\n  chnk: 1 KiB");
  expect_refused({"plan", file.path()}, {"found '24'", "unknown key 'network.chnk'"});
}

TEST(BadInput, OffersThatAreNotJson) {
  const RunFile file("name: quickstart", "name: quickstart");
  std::ofstream(file.folder() / "offers/quickstart.json") << "offers: [\n";
  expect_refused({"plan", file.path()}, {"quickstart.json:"});
}

TEST(BadInput, OfferWithoutAPrice) {
  const RunFile file("name: quickstart", "name: quickstart");
  json offers = json::parse(read("configs/offers/quickstart.json"));
  offers.at("offers").at(2).erase("gpu_usd_per_hour");
  std::ofstream(file.folder() / "offers/quickstart.json") << offers.dump(2);
  expect_refused({"plan", file.path()}, {"quickstart.json:", "offers[2].gpu_usd_per_hour"});
}

TEST(BadInput, PortInUse) {
  const int listener = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  socklen_t size = sizeof address;
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string port = std::to_string(ntohs(address.sin_port));
  TemporaryFolder folder;
  // An earlier run of that name stays where it is.
  std::filesystem::create_directories(folder.path() / "quickstart");
  std::ofstream(folder.path() / "quickstart/metrics.jsonl") << "{\"kind\":\"step\",\"step\":1}\n";
  const std::vector<std::string> more{"configs/quickstart.yaml", "--set", "network.port=" + port, "--set",
                                      "run.folder=" + folder.path().string()};
  for (const char* verb : {"up", "plan", "learner"}) {
    std::vector<std::string> arguments{verb};
    arguments.insert(arguments.end(), more.begin(), more.end());
    expect_refused(arguments, {port, "in use"});
  }
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "quickstart/metrics.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "quickstart.1"));
  const Outcome doctor = run_program({"doctor", "configs/quickstart.yaml", "--set", "network.port=" + port});
  EXPECT_EQ(doctor.status, 1);
  EXPECT_NE(doctor.out.find("in use"), std::string::npos) << doctor.out;
  ::close(listener);
}

TEST(BadInput, ModelDirectories) {
  TemporaryFolder folder;
  const std::string model = (folder.path() / "model").string();
  ASSERT_EQ(run_program({"model", "init", "--preset", "tiny-64", "-o", model}).status, 0);
  EXPECT_EQ(run_program({"model", "info", model}).status, 0);

  const std::filesystem::path weights = folder.path() / "model/model.safetensors";
  const auto size = std::filesystem::file_size(weights);
  std::filesystem::resize_file(weights, size - 100);
  expect_refused({"model", "info", model}, {"model.safetensors"});
  std::filesystem::remove(weights);
  std::ofstream(folder.path() / "model/model.safetensors.index.json")
      << R"({"weight_map":{"model.embed_tokens.weight":"model-00001-of-00002.safetensors"}})";
  expect_refused({"model", "info", model}, {"model-00001-of-00002.safetensors"});
  expect_refused({"up", "configs/quickstart.yaml", "--set", "model={path: " + model + "}", "--set",
                  "run.folder=" + folder.path().string()},
                 {"model-00001-of-00002.safetensors"});
}

TEST(BadInput, UnknownVerbAndMissingFile) {
  expect_refused({"upp"}, {"unknown verb 'upp'; did you mean 'up'?"});
  expect_refused({"plan", "no-such.yaml"}, {"no-such.yaml"});
  expect_refused({"plan", "configs/quickstart.yaml", "--set", "fleet.offers=no-such.json"}, {"no-such.json"});
  expect_refused({"up", "configs/quickstart.yaml", "--set", "model={path: no-such-model}"}, {"no-such-model"});
}

TEST(Plan, InfeasibleNamesTheWaysOut) {
  const Outcome outcome = run_program({"plan", "configs/quickstart.yaml", "--set", "fleet.install_time_expected=90 s"});
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_NE(outcome.err.find("kappa"), std::string::npos) << outcome.err;
}

TEST(Plan, JsonAlsoWhenThereIsNone) {
  const Outcome late =
      run_program({"plan", "configs/quickstart.yaml", "--json", "--set", "fleet.install_time_expected=90 s"});
  EXPECT_EQ(late.status, 3) << late.err;
  const json infeasible = json::parse(late.out);
  EXPECT_FALSE(infeasible.at("feasible").get<bool>());
  EXPECT_EQ(infeasible.at("error").at("code"), "infeasible");
  EXPECT_NE(infeasible.at("error").at("problems").at(0).get<std::string>().find("kappa"), std::string::npos);
  for (const char* verb : {"plan", "up", "learner"}) {
    const Outcome wrong = run_program({verb, "configs/quickstart.yaml", "--json", "--set", "run.steps=x", "--set",
                                       "rollout.group_size=y"});
    EXPECT_EQ(wrong.status, 2) << wrong.err;
    EXPECT_EQ(json::parse(wrong.out).at("error").at("problems").size(), 2u) << wrong.out;
  }
  // What the learner finds out is on the standard output of `up` as well.
  TemporaryFolder folder;
  const Outcome up = run_program({"up", "configs/quickstart.yaml", "--json", "--set", "fleet.install_time_expected=90 s",
                                  "--set", "run.folder=" + folder.path().string()});
  EXPECT_EQ(up.status, 3) << up.err;
  EXPECT_EQ(json::parse(up.out).at("error").at("code"), "infeasible");
}

TEST(Plan, SameRunFileSamePlan) {
  const Outcome first = run_program({"plan", "configs/quickstart.yaml", "--json"});
  const Outcome second = run_program({"plan", "configs/quickstart.yaml", "--json"});
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.out, second.out);
  const json plan = json::parse(first.out);
  EXPECT_EQ(plan.at("schema_version"), 2);
  int chosen = 0;
  for (const json& row : plan.at("offers")) {
    chosen += row.at("chosen").get<bool>() ? 1 : 0;
    EXPECT_FALSE(row.at("reason").get<std::string>().empty());
  }
  EXPECT_GE(plan.at("offers").size(), 12u);
  EXPECT_GE(chosen, 6);
}

TEST(Sim, SameSeedSameTrace) {
  const std::vector<std::string> verb{"sim",    "--workers", "8", "--payload", "4 MB",
                                      "--json", "--seed",    "5", "--jitter",  "3 ms"};
  const Outcome first = run_program(verb), second = run_program(verb);
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.out, second.out);
  const json rows = json::parse(first.out).at("rows");
  ASSERT_EQ(rows.size(), 3u);
  for (const std::size_t other : {1, 2})  // chains and stripes beat the star
    EXPECT_LT(rows[other].at("last_seconds").get<double>(), rows[0].at("last_seconds").get<double>());
}

TEST(Report, DrawsARunAndSaysWhenThereIsNone) {
  TemporaryFolder folder;
  std::ofstream(folder.path() / "metrics.jsonl")
      << R"({"kind":"step","step":1,"reward_mean":0.25,"wait_seconds":0.5,"train_seconds":0.5,"staleness":{"1":8}})"
      << "\n"
      << R"({"kind":"evaluation","when":"before","step":0,"accuracy":0.5})"
      << "\n";
  const std::string svg = (folder.path() / "run.svg").string();
  const Outcome drawn = run_program({"report", folder.path().string(), "--svg", svg});
  EXPECT_EQ(drawn.status, 0) << drawn.err;
  EXPECT_NE(read(svg).find("<path"), std::string::npos);
  EXPECT_NE(read(svg).find("<circle"), std::string::npos);
  const Outcome none = run_program({"report", folder.path().string()});
  EXPECT_EQ(none.status, 1);
  EXPECT_NE(none.err.find("no report yet"), std::string::npos) << none.err;
}

TEST(Status, ShowsHowARunStands) {
  TemporaryFolder folder;
  std::ofstream(folder.path() / "status.json")
      << R"({"run":"mine","step":3,"steps":8,"phase":"training","reward":0.5,"accuracy":{"before":0.387,"after":0.984},)"
      << R"("workers":[{"id":1,"offer":"q01","rollouts":16,"version":3,"bytes_in":1000,"bytes_forwarded":0,"lost":false},)"
      << R"({"id":2,"offer":"q02","rollouts":8,"version":null,"bytes_in":0,"bytes_forwarded":0,"lost":true}],)"
      << R"("topology":"learner -> 1"})";
  const Outcome outcome = run_program({"status", folder.path().string()});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  for (const char* text :
       {"not running", "step 3 of 8", "accuracy before 0.387", "accuracy after 0.984", "q02", "lost"})
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text << " in:\n" << outcome.out;
}

TEST(Doctor, ChecksMachineAndRunFile) {
  const Outcome outcome = run_program({"doctor", "configs/quickstart.yaml", "--json"});
  EXPECT_EQ(outcome.status, 0) << outcome.out;
  EXPECT_TRUE(json::parse(outcome.out).at("ok").get<bool>());
  const RunFile file("budget: 6 ", "budgte: 6 ");
  const Outcome bad = run_program({"doctor", file.path(), "--json"});
  EXPECT_EQ(bad.status, 1);
  EXPECT_FALSE(json::parse(bad.out).at("ok").get<bool>());
}

TEST(Help, EveryVerbExplainsItself) {
  for (const char* verb : {"up", "learner", "worker", "plan", "model", "sim", "status", "report", "doctor", "delta"}) {
    const Outcome outcome = run_program({verb, "--help"});
    EXPECT_EQ(outcome.status, 0) << verb;
    EXPECT_NE(outcome.out.find("Usage"), std::string::npos) << verb;
  }
  EXPECT_NE(run_program({"--help"}).out.find("echoline up"), std::string::npos);
}

}  // namespace
}  // namespace echoline::testing
