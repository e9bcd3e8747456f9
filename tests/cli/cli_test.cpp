// The program's verbs from the outside: bad input is named and ends with exit code 2, good input prints data.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
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

// The quickstart with one text replaced, in a folder of its own that contains the offers as well.
class RunFile {
 public:
  RunFile(const std::string& old_text, const std::string& new_text) {
    std::string text = read("configs/quickstart.yaml");
    const std::size_t position = text.find(old_text);
    if (position == std::string::npos) throw std::runtime_error("the quickstart has no '" + old_text + "'");
    std::ofstream(path()) << text.replace(position, old_text.size(), new_text);
    std::filesystem::copy("configs/offers", folder_.path() / "offers", std::filesystem::copy_options::recursive);
  }
  std::string path() const { return (folder_.path() / "run.yaml").string(); }
  const std::filesystem::path& folder() const { return folder_.path(); }

 private:
  TemporaryFolder folder_;
};

// Expects exit code 2 and each of these texts on stderr.
void expect_refused(const std::vector<std::string>& arguments, const std::vector<std::string>& texts) {
  const Outcome outcome = run_program(arguments);
  EXPECT_EQ(outcome.status, 2) << outcome.err << outcome.out;
  EXPECT_EQ(outcome.out, "");
  for (const std::string& text : texts)
    EXPECT_NE(outcome.err.find(text), std::string::npos) << "no '" << text << "' in:\n" << outcome.err;
}

TEST(BadInput, UnknownKeyWithASuggestion) {
  const RunFile file("budget: 3 ", "budgte: 3 ");
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
  const RunFile file("publish_every: 1", "publish_every: 8");
  expect_refused({"plan", file.path()}, {"run.yaml:", "S = 3", "(kappa) - 1 = 7"});
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

TEST(BadInput, OfferWithAnImpossiblePrice) {
  const RunFile file("name: quickstart", "name: quickstart");
  json offers = json::parse(read("configs/offers/quickstart.json"));
  offers.at("offers").at(2)["gpu_usd_per_hour"] = -1;
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
  // An earlier run of that name is not moved.
  std::filesystem::create_directories(folder.path() / "quickstart");
  std::ofstream(folder.path() / "quickstart/metrics.jsonl") << "{\"kind\":\"step\",\"step\":1}\n";
  const std::vector<std::string> run{"configs/quickstart.yaml", "--set", "network.port=" + port, "--set",
                                     "run.folder=" + folder.path().string()};
  for (const char* verb : {"up", "plan", "learner"}) {
    std::vector<std::string> arguments{verb};
    arguments.insert(arguments.end(), run.begin(), run.end());
    expect_refused(arguments, {port, "in use"});
  }
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "quickstart/metrics.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "quickstart.1"));
  const Outcome doctor = run_program({"doctor", "configs/quickstart.yaml", "--set", "network.port=" + port});
  EXPECT_EQ(doctor.status, 1);
  EXPECT_NE(doctor.out.find("in use"), std::string::npos) << doctor.out;
  ::close(listener);
}

// All verbs share one preflight: `plan` and `doctor` refuse the same runs as `up`, and an earlier run of that name is
// not moved.
TEST(BadInput, EveryVerbRefusesAMissingDeviceBeforeAnythingChanges) {
  if (!kWithTorch) GTEST_SKIP() << "the program was built without libtorch";
  TemporaryFolder folder;
  std::filesystem::create_directories(folder.path() / "quickstart");
  std::ofstream(folder.path() / "quickstart/metrics.jsonl") << "{\"kind\":\"step\",\"step\":1}\n";
  for (const char* key : {"learner.device", "worker.device"}) {
    const std::vector<std::string> run{"configs/quickstart.yaml", "--set", fmt::format("{}=cuda:97", key), "--set",
                                       "run.folder=" + folder.path().string()};
    for (const char* verb : {"up", "plan", "learner"}) {
      std::vector<std::string> arguments{verb};
      arguments.insert(arguments.end(), run.begin(), run.end());
      expect_refused(arguments, {key, "cuda:97 does not exist"});
    }
    std::vector<std::string> arguments{"doctor"};
    arguments.insert(arguments.end(), run.begin(), run.end());
    const Outcome doctor = run_program(arguments);
    EXPECT_EQ(doctor.status, 1);
    EXPECT_NE(doctor.out.find("cuda:97 does not exist"), std::string::npos) << doctor.out;
  }
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "quickstart/metrics.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "quickstart.1"));
}

TEST(BadInput, ModelDirectories) {
  TemporaryFolder folder;
  const std::string model = (folder.path() / "model").string();
  ASSERT_EQ(run_program({"model", "init", "--preset", "tiny-64", "-o", model}).status, 0);
  EXPECT_EQ(run_program({"model", "info", model}).status, 0);

  // A directory of another family is described, with the field that is not implemented.
  const std::filesystem::path config = folder.path() / "model/config.json";
  const std::string text = read(config);
  json other = json::parse(text);
  other["model_type"] = "gpt_oss";
  std::ofstream(config) << other;
  const Outcome carried = run_program({"model", "info", model});
  EXPECT_EQ(carried.status, 0) << carried.err;
  for (const char* part : {"'model_type' is \"gpt_oss\"", "BF16", "mlp.down_proj.weight, BF16 [64, 192]", "vocabulary"})
    EXPECT_NE(carried.out.find(part), std::string::npos) << part << " is not in\n" << carried.out;
  const json described = json::parse(run_program({"model", "info", model, "--json"}).out);
  EXPECT_EQ(described["computable"], false);
  EXPECT_EQ(described["tensors"], 35);
  EXPECT_EQ(described["dtypes"]["BF16"]["bytes"], described["policy_bytes"]);
  expect_refused({"model", "info", model, "--train"}, {"model_type"});
  std::ofstream(config) << text;
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

TEST(Model, GeneratesAndScoresItsOwnText) {
  if (!kWithTorch) GTEST_SKIP() << "the program was built without libtorch";
  TemporaryFolder folder;
  const std::string model = (folder.path() / "model").string();
  ASSERT_EQ(run_program({"model", "init", "--preset", "bytes-64", "-o", model}).status, 0);
  const std::vector<std::string> verb{"model", "generate",      model, "--prompt", "Zoë: 1+1=", "--max-tokens",
                                      "12",    "--temperature", "0.7", "--seed",   "3",         "--json"};
  const Outcome first = run_program(verb), second = run_program(verb);
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.out, second.out);
  const json generated = json::parse(first.out);
  EXPECT_EQ(generated.at("prompt_tokens").size(), std::string("Zoë: 1+1=").size());
  ASSERT_GE(generated.at("tokens").size(), 1u);
  // A given text is scored token by token.
  std::vector<std::string> score{"model", "generate", model, "--prompt", "1+1=", "--continuation", "2!", "--json"};
  const json scored = json::parse(run_program(score).out);
  EXPECT_EQ(scored.at("finish"), "given");
  ASSERT_EQ(scored.at("tokens").size(), 2u);
  EXPECT_EQ(scored.at("tokens")[1].at("text"), "!");
  EXPECT_LT(scored.at("tokens")[1].at("logprob"), 0);
  score.back() = "--logprobs";
  EXPECT_NE(run_program(score).out.find("\"!\""), std::string::npos);
  // The chat template goes around the prompt.
  const json chat = json::parse(
      run_program({"model", "generate", model, "--prompt", "hi", "--chat", "--max-tokens", "1", "--json"}).out);
  EXPECT_EQ(chat.at("prompt"), "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n");
  expect_refused({"model", "generate", model, "--prompt", "x", "--system", "y"}, {"task.chat"});
  expect_refused({"model", "generate", model, "--prompt", ""}, {"empty"});
  // On a device: the CPU is the default.
  std::vector<std::string> on_cpu = verb;
  on_cpu.insert(on_cpu.end(), {"--device", "cpu"});
  EXPECT_EQ(run_program(on_cpu).out, first.out);
  const Outcome elsewhere = run_program({"model", "generate", model, "--prompt", "x", "--device", "cuda:97"});
  EXPECT_EQ(elsewhere.status, 1);
  EXPECT_NE(elsewhere.err.find("cuda:97 does not exist"), std::string::npos) << elsewhere.err;
  expect_refused({"model", "generate", model, "--prompt", "x", "--continuation", "y", "--device", "gpu"},
                 {"expected cpu, cuda or cuda:N, found 'gpu'"});
}

TEST(BadInput, VerbsThatNeedLibtorchSayThatItIsMissing) {
  if (kWithTorch) GTEST_SKIP() << "the program has it";
  const TemporaryFolder folder;
  const std::string runs = (folder.path() / "runs").string();
  expect_refused({"up", "configs/quickstart.yaml", "--set", "run.folder=" + runs}, {"ECHOLINE_TORCH=ON"});
  EXPECT_FALSE(std::filesystem::exists(runs)) << "no run was begun";
  expect_refused({"worker", "--join", "127.0.0.1:1"}, {"ECHOLINE_TORCH=ON", "--engine"});
}

// A run file that searches the market is planned with a file of offers instead.
TEST(Plan, OffersOfTheCommandLineReplaceASearch) {
  const RunFile file("  offers: offers/quickstart.json", "  search: true");
  const auto planned = run_program({"plan", file.path(), "--offers", "configs/offers/quickstart.json"});
  EXPECT_EQ(planned.status, 0) << planned.err;
}

TEST(BadInput, UnknownVerbAndMissingFile) {
  expect_refused({"upp"}, {"unknown verb 'upp'; did you mean 'up'?"});
  expect_refused({"plan", "no-such.yaml"}, {"no-such.yaml"});
  expect_refused({"plan", "configs/quickstart.yaml", "--set", "fleet.offers=no-such.json"}, {"no-such.json"});
  expect_refused({"up", "configs/quickstart.yaml", "--set", "model={path: no-such-model}"}, {"no-such-model"});
  expect_refused({"model", "export", "no-such-run@3", "-o", "x"}, {"no-such-run"});
  expect_refused({"model", "export", "no-such-run@x", "-o", "x"}, {"RUN@STEP"});
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
    const Outcome wrong = run_program(
        {verb, "configs/quickstart.yaml", "--json", "--set", "run.steps=x", "--set", "rollout.group_size=y"});
    EXPECT_EQ(wrong.status, 2) << wrong.err;
    EXPECT_EQ(json::parse(wrong.out).at("error").at("problems").size(), 2u) << wrong.out;
    EXPECT_FALSE(json::parse(wrong.out).contains("feasible"))
        << "no plan was made, so the error must not call it infeasible";
  }
  // `up` prints the learner's error on standard output as well.
  TemporaryFolder folder;
  const Outcome up = run_program({"up", "configs/quickstart.yaml", "--json", "--set",
                                  "fleet.install_time_expected=90 s", "--set", "run.folder=" + folder.path().string()});
  EXPECT_EQ(up.status, 3) << up.err;
  EXPECT_EQ(json::parse(up.out).at("error").at("code"), "infeasible");
}

TEST(Plan, IsKeptLookedIntoAndAppliedToTheOffersOfToday) {
  const RunFile file("name: quickstart", "name: quickstart");
  const std::string plan_file = (file.folder() / "plan.json").string();
  const Outcome planned =
      run_program({"plan", file.path(), "-o", plan_file, "--sensitivity", "--assume", "storage_usd_per_hour=0.01"});
  ASSERT_EQ(planned.status, 0) << planned.err;
  EXPECT_NE(planned.out.find("traffic for nothing"), std::string::npos);
  EXPECT_NE(planned.out.find("idle against price"), std::string::npos);
  EXPECT_GT(json::parse(read(plan_file)).at("idle_curve").size(), 4u);
  EXPECT_NE(planned.err.find("echoline apply"), std::string::npos);
  const Outcome why = run_program({"plan", file.path(), "--explain", "q08"});
  EXPECT_NE(why.out.find("it would be rented at $"), std::string::npos) << why.out << why.err;
  const Outcome typo = run_program({"plan", file.path(), "--explain", "q5"});
  EXPECT_EQ(typo.status, 2);
  EXPECT_NE(typo.err.find("did you mean 'q05'"), std::string::npos) << typo.err;

  const Outcome same = run_program({"apply", plan_file, "--check", "--json"});
  ASSERT_EQ(same.status, 0) << same.err;
  EXPECT_TRUE(json::parse(same.out).at("changes").empty()) << same.out;
  // A rented offer is gone, another is dearer: both are planned again, within the limits.
  const json before = json::parse(read(plan_file));
  json offers = json::parse(read("configs/offers/quickstart.json"));
  const std::string removed = before.at("offers").at(0).at("offer"), dearer = before.at("offers").at(1).at("offer");
  json remaining = json::array();
  for (json& offer : offers.at("offers")) {
    if (offer.at("id") == removed) continue;
    if (offer.at("id") == dearer) offer["gpu_usd_per_hour"] = 5;
    remaining.push_back(offer);
  }
  offers["offers"] = remaining;
  std::ofstream(file.folder() / "offers/quickstart.json") << offers.dump();
  const Outcome changed = run_program({"apply", plan_file, "--check", "--json", "--price-tolerance", "0.5"});
  ASSERT_EQ(changed.status, 0) << changed.err;
  EXPECT_NE(changed.err.find(removed + " is not offered any more"), std::string::npos) << changed.err;
  EXPECT_NE(changed.err.find(dearer + " costs $5."), std::string::npos) << changed.err;
  const json applied = json::parse(changed.out);
  for (const json& row : applied.at("offers")) EXPECT_FALSE(row.at("chosen") && row.at("offer") == dearer);
  EXPECT_TRUE(applied.at("learner").at("idle_fraction").is_number()) << "predicted for today's offers";
  const Outcome refused = run_program({"apply", plan_file, "--price-tolerance", "0"});
  EXPECT_EQ(refused.status, 3) << refused.err;
  EXPECT_NE(refused.err.find("--price-tolerance"), std::string::npos) << refused.err;
  EXPECT_EQ(run_program({"apply", file.path()}).status, 2);
}

TEST(Plan, ApplyRentsThePlannedOffers) {
  if (!kWithTorch) GTEST_SKIP() << "the program was built without libtorch";
  TemporaryFolder folder;
  const std::string plan_file = (folder.path() / "plan.json").string();
  const Outcome planned =
      run_program({"plan", "configs/quickstart.yaml", "-o", plan_file, "--set", "run.steps=1", "--set",
                   "learner.warm_start.steps_max=1", "--set", "run.folder=" + folder.path().string(), "--set",
                   "fleet.places=[US, SE, DE, NL, IS, FR, CZ, PL, CA]"});
  ASSERT_EQ(planned.status, 0) << planned.err;
  const Outcome applied = run_program({"apply", plan_file, "--json"}, std::chrono::seconds(90));
  ASSERT_EQ(applied.status, 0) << applied.err;
  std::set<std::string> wanted, rented;
  const json plan = json::parse(read(plan_file));
  for (const json& row : plan.at("offers"))
    if (row.at("chosen")) wanted.insert(row.at("offer").get<std::string>());
  const json report = json::parse(applied.out);
  for (const json& worker : report.at("workers")) rented.insert(worker.at("offer").get<std::string>());
  EXPECT_EQ(rented, wanted);
}

TEST(Plan, SameRunFileSamePlan) {
  const Outcome first = run_program({"plan", "configs/quickstart.yaml", "--json"});
  const Outcome second = run_program({"plan", "configs/quickstart.yaml", "--json"});
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.out, second.out);
  const json plan = json::parse(first.out);
  EXPECT_EQ(plan.at("schema_version"), 5);
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

TEST(Report, DrawsARunAndRefusesAnAbsentOne) {
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

TEST(Status, ShowsTheStateOfARun) {
  TemporaryFolder folder;
  std::ofstream(folder.path() / "status.json")
      << R"({"run":"mine","step":3,"steps":8,"phase":"training","reward":0.5,)"
      << R"("accuracy":{"before":0.387,"after":0.984},)"
      << R"("workers":[{"id":1,"offer":"q01","rollouts":16,"version":3,"bytes_in":1000,)"
      << R"("bytes_forwarded":0,"lost":false},)"
      << R"({"id":2,"offer":"q02","rollouts":8,"version":null,"bytes_in":0,"bytes_forwarded":0,"lost":true}],)"
      << R"("topology":"learner -> 1"})";
  const Outcome begun = run_program({"status", folder.path().string()});
  EXPECT_NE(begun.out.find("no checkpoint to go on from; start it again with: echoline up"), std::string::npos)
      << begun.out;
  EXPECT_EQ(begun.out.find("--resume"), std::string::npos) << begun.out;
  std::filesystem::create_directories(folder.path() / "checkpoints/step-000000002");
  std::ofstream(folder.path() / "checkpoints/step-000000002/trainer.json")
      << R"({"format":2,"steps":2,"policy_digest":"d"})";
  const Outcome outcome = run_program({"status", folder.path().string()});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  for (const char* text : {"not running", "go on with: echoline up", "/config.yaml --resume", "step 3 of 8",
                           "accuracy before 0.387", "accuracy after 0.984", "q02", "lost"})
    EXPECT_NE(outcome.out.find(text), std::string::npos) << text << " in:\n" << outcome.out;
}

TEST(Doctor, ChecksMachineAndRunFile) {
  const Outcome outcome = run_program({"doctor", "configs/quickstart.yaml", "--json"});
  EXPECT_EQ(outcome.status, 0) << outcome.out;
  EXPECT_TRUE(json::parse(outcome.out).at("ok").get<bool>());
  const RunFile file("budget: 3 ", "budgte: 3 ");
  const Outcome bad = run_program({"doctor", file.path(), "--json"});
  EXPECT_EQ(bad.status, 1);
  EXPECT_FALSE(json::parse(bad.out).at("ok").get<bool>());
}

TEST(ConfigReference, IsThePageAboutRunFiles) {
  const Outcome page = run_program({"config", "reference"});
  EXPECT_EQ(page.status, 0) << page.err;
  EXPECT_EQ(page.out, read("docs/run-file.md"))
      << "docs/run-file.md is out of date: echoline config reference writes it";
  const Outcome listed = run_program({"config", "reference", "--json"});
  const json keys = json::parse(listed.out).at("keys");
  EXPECT_TRUE(std::any_of(keys.begin(), keys.end(), [](const json& key) {
    return key.at("path") == "network.chunk" && key.at("type") == "size" && key.at("range") == "1 KiB to 1 MiB";
  })) << listed.out;
}

// The part of the schema for a key of the reference; null if there is none. `adapter`: the one whose options the key is
// among.
json schema_of_key(const json& schema, std::string path, const std::string& adapter) {
  json part = schema;
  while (!path.empty()) {
    const std::size_t dot = std::min(path.find('.'), path.size());
    std::string name = path.substr(0, dot);
    path.erase(0, std::min(dot + 1, path.size()));
    const bool is_list = name.ends_with("[]");
    if (is_list) name.resize(name.size() - 2);
    if (!part.contains("properties") || !part["properties"].contains(name)) return nullptr;
    json child = part["properties"][name];
    if (name == "options" && part.contains("allOf"))
      for (const json& rule : part["allOf"])
        if (rule["if"]["properties"]["adapter"]["const"] == adapter) child = rule["then"]["properties"]["options"];
    part = is_list ? child.at("items") : child;
  }
  return part;
}

TEST(ConfigReference, TheSchemaHasEveryKeyWithItsRange) {
  const json schema = json::parse(run_program({"config", "schema"}).out);
  const json keys = json::parse(run_program({"config", "reference", "--json"}).out).at("keys");
  ASSERT_GT(keys.size(), 100u);
  for (const json& key : keys) {
    const std::string when = key.value("when", "");
    const json found = schema_of_key(schema, key["path"], when.empty() ? when : when.substr(std::strlen("adapter: ")));
    ASSERT_FALSE(found.is_null()) << key;
    EXPECT_FALSE(found.empty()) << key;
  }
  const json group_size = schema_of_key(schema, "rollout.group_size", "");
  EXPECT_EQ(group_size["minimum"], 2);
  EXPECT_EQ(group_size["maximum"], 1024);
  EXPECT_EQ(schema_of_key(schema, "task.options.partial_credit", "arithmetic")["maximum"], 1);
  const json loss = schema_of_key(schema, "learner.loss", "")["enum"];
  EXPECT_NE(std::find(loss.begin(), loss.end(), "grpo"), loss.end()) << loss;
  const std::regex chunk(schema_of_key(schema, "network.chunk", "")["pattern"].get<std::string>());
  EXPECT_TRUE(std::regex_match("64 KiB", chunk));
  EXPECT_FALSE(std::regex_match("64", chunk));
  EXPECT_EQ(schema["properties"]["rollout"]["additionalProperties"], false);
}

// Runs a command line in bash; $ECHOLINE is the program.
Outcome run_in_bash(const std::string& command) {
  TemporaryFolder folder;
  const std::string out = (folder.path() / "out").string(), err = (folder.path() / "err").string();
  std::ofstream(folder.path() / "script") << "ECHOLINE='" << ECHOLINE_PROGRAM << "'\n" << command << "\n";
  const std::string line = "bash '" + (folder.path() / "script").string() + "' >'" + out + "' 2>'" + err + "'";
  const int raw = std::system(line.c_str());
  return {WIFEXITED(raw) ? WEXITSTATUS(raw) : 128, read(out), read(err)};
}

// Every verb with its path, from the help of each: "delta", "delta diff".
std::vector<std::string> all_verbs(const std::string& path = "") {
  std::vector<std::string> words, verbs;
  std::istringstream split(path);
  for (std::string word; split >> word;) words.push_back(word);
  words.emplace_back("--help");
  const Outcome help = run_program(words);
  EXPECT_EQ(help.status, 0) << path;
  EXPECT_NE(help.out.find("Usage"), std::string::npos) << path;
  const std::size_t list_start = help.out.find("Subcommands:\n");
  if (list_start == std::string::npos) return verbs;
  std::istringstream lines(help.out.substr(list_start));
  std::string line;
  for (std::getline(lines, line); std::getline(lines, line) && line.starts_with("  ");) {
    if (line[2] == ' ') continue;  // the rest of a long description
    const std::string verb = (path.empty() ? "" : path + " ") + line.substr(2, line.find(' ', 2) - 2);
    verbs.push_back(verb);
    for (const std::string& subcommand : all_verbs(verb)) verbs.push_back(subcommand);
  }
  return verbs;
}

TEST(Help, EveryVerbExplainsItselfHasAPageAndIsCompleted) {
  const std::vector<std::string> verbs = all_verbs();
  for (const char* verb : {"up", "config reference", "delta diff", "sim soak", "completion", "man"})
    EXPECT_TRUE(std::find(verbs.begin(), verbs.end(), verb) != verbs.end()) << verb;
  EXPECT_NE(run_program({"--help"}).out.find("echoline up"), std::string::npos);

  TemporaryFolder folder;
  ASSERT_EQ(run_program({"man", "--folder", folder.path().string()}).status, 0);
  std::map<std::string, std::string> scripts;
  for (const char* name : {"bash", "zsh", "fish"}) scripts[name] = run_program({"completion", name}).out;
  for (const std::string& verb : verbs) {
    std::string name = "echoline-" + verb;
    std::replace(name.begin(), name.end(), ' ', '-');
    const std::string page = read(folder.path() / (name + ".1"));
    EXPECT_TRUE(page.starts_with(".TH ")) << name;
    const std::string last_word = verb.substr(verb.rfind(' ') + 1);
    for (const auto& [script, text] : scripts)
      EXPECT_NE(text.find(last_word), std::string::npos) << verb << " is unknown to " << script;
    // Every option of its help.
    std::istringstream help(run_in_bash("$ECHOLINE " + verb + " --help").out);
    for (std::string line; std::getline(help, line);) {
      const std::size_t start = line.find("--");
      if (!line.starts_with("  -") || start == std::string::npos) continue;
      const std::string option = line.substr(start, line.find_first_of(" ,", start) - start);
      std::string escaped;
      for (const char c : option) escaped += c == '-' ? "\\-" : std::string(1, c);
      EXPECT_NE(page.find(escaped), std::string::npos) << option << " is not in " << name << ".1";
      EXPECT_NE(scripts["bash"].find(option), std::string::npos) << option;
      EXPECT_NE(scripts["zsh"].find(option), std::string::npos) << option;
      EXPECT_NE(scripts["fish"].find("-l " + option.substr(2)), std::string::npos) << option;
    }
  }
  EXPECT_EQ(run_program({"man", "delta", "diff"}).out, read(folder.path() / "echoline-delta-diff.1"));
  EXPECT_EQ(run_program({"man", "nothing"}).status, 2);
}

TEST(Completion, WorksInBash) {
  const auto completes = [](const std::string& words, const std::string& current) {
    const Outcome outcome = run_in_bash(
        "bash -n <($ECHOLINE completion bash) && source <($ECHOLINE completion bash)\n"
        "COMP_WORDS=(echoline " +
        words + " " + current +
        ")\n"
        "COMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_echoline\necho ${COMPREPLY[@]}");
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return outcome.out;
  };
  EXPECT_EQ(completes("", "pl"), "plan\n");
  EXPECT_EQ(completes("delta", "di"), "diff\n");
  EXPECT_EQ(completes("plan x.yaml --set", "run.st"), "run.steps=\n");
  EXPECT_EQ(completes("up", "--res"), "--resume\n");
}

TEST(Output, AFailedWriteIsAnError) {
  for (const char* verb : {"config reference", "--help", "plan configs/quickstart.yaml --json", "completion bash"}) {
    const Outcome full = run_in_bash(std::string("$ECHOLINE ") + verb + " >/dev/full");
    EXPECT_EQ(full.status, 1) << verb;
    EXPECT_NE(full.err.find("cannot write to standard output: No space left on device"), std::string::npos)
        << verb << ": " << full.err;
    EXPECT_EQ(run_in_bash(std::string("$ECHOLINE ") + verb + " >&-").status, 1) << verb;
  }
  // A reader that closes the pipe early causes no message.
  const Outcome gone = run_in_bash("trap '' PIPE; exec 4> >(:); wait $!; $ECHOLINE config reference >&4");
  EXPECT_EQ(gone.status, 1);
  EXPECT_EQ(gone.err, "");
  EXPECT_EQ(run_in_bash("$ECHOLINE config reference 2>&-").status, 0);
}

}  // namespace
}  // namespace echoline::testing
