// The journey of docs/tutorials/first-rented-run.md, with its run file, a tiny model and the test's vast.ai. Instances
// are processes of this machine, and `vllm` is the test's server.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "base/files.hpp"
#include "overlay/uv/hosts.hpp"
#include "tests/cli/program.hpp"
#include "tests/provisioner/vast_server.hpp"

namespace echoline::testing {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr const char* kRunFile = "configs/vast-vllm-qwen3-8b.yaml";
constexpr const char* kOffers = "configs/offers/vast-search.json";

void write_executable(const fs::path& file, const std::string& text) {
  std::ofstream(file) << text;
  fs::permissions(file, fs::perms::owner_all);
}

// The plan of the tutorial's first command. It needs the model's shape, and no GPU.
TEST(RentedRun, TheRunFileIsPlannedOnAnyMachine) {
  if (!kWithTorch) GTEST_SKIP() << "the program was built without libtorch";
  const std::vector<std::string> arguments{"plan",     kRunFile,          "--json", "--elsewhere",
                                           "--offers", kOffers,           "--set",  "model={preset: qwen3-8b}",
                                           "--set",    "task.chat=false", "--set",  "task.chat_options={}"};
  const Outcome outcome = run_program(arguments);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("vast.key: No such file"));  // printed, and no failure
  const json plan = json::parse(outcome.out);
  int chosen = 0;
  for (const json& offer : plan.at("offers")) {
    const std::string reason = offer.at("reason");
    const bool is_else_fit = offer.at("gpu") == "RTX 4090" && offer.at("verified") == true &&
                             offer.at("gpu_count") == 1 && offer.at("open_ports") > 0;
    if (is_else_fit && offer.at("cuda_max") < 13.0 && offer.at("place").get<std::string>().ends_with("US")) {
      EXPECT_THAT(reason, HasSubstr("its driver supports CUDA"));
    }
    if (!offer.at("chosen").get<bool>()) continue;
    ++chosen;
    EXPECT_EQ(offer.at("gpu"), "RTX 4090");
    EXPECT_EQ(offer.at("gpu_count"), 1);
    EXPECT_EQ(offer.at("verified"), true);
    EXPECT_GE(offer.at("cuda_max"), 13.0);
    EXPECT_GE(offer.at("memory_gb").get<double>() * 1e9, plan.at("header").at("host_bytes_min").get<double>());
  }
  EXPECT_EQ(chosen, plan.at("totals").at("workers"));
  EXPECT_NEAR(chosen, 7, 1);
  // A publication is the adapter of rank 32, 175 MB in bf16, divided by fleet.delta_ratio_expected; a joining worker
  // receives the base too.
  EXPECT_NEAR(plan.at("header").at("delta_bytes").get<double>(), 175e6 / 3, 1e6);
  EXPECT_NEAR(plan.at("header").at("full_bytes").get<double>(), 16.56e9, 0.1e9);
  std::vector<std::string> here = arguments;
  std::erase(here, "--elsewhere");
  EXPECT_EQ(run_program(here).status, 2);
}

TEST(RentedRun, FromThePlanToTheExportedPolicyAndAnEmptyBill) {
  if (!kWithTorch) GTEST_SKIP() << "the program was built without libtorch";
  if (overlay::remote_endpoints_of({"::", 1}).empty())
    GTEST_SKIP() << "rented hosts need an address that is not loopback";
  const TemporaryFolder folder;
  const fs::path in = folder.path();
  fs::create_directories(in / "bin");
  // `vllm serve MODEL --host H --port P ...`
  write_executable(in / "bin/vllm", "#!/bin/sh\nmodel=$2 port=$6; shift 6\nexec '" ECHOLINE_ENGINE_PROGRAM
                                    "' vllm \"$model\" \"$port\" \"$@\"\n");
  fs::create_directories(in / "echoline-worker/bin");
  write_executable(in / "echoline-worker/bin/echoline", "#!/bin/sh\nexec '" ECHOLINE_PROGRAM "' \"$@\"\n");
  ASSERT_EQ(std::system(fmt::format("tar czf {0}/bundle.tar.gz -C {0} echoline-worker", in.string()).c_str()), 0);
  std::ofstream(in / "vast.key") << provisioner::VastServer::kKey << "\n";
  fs::permissions(in / "vast.key", fs::perms::owner_read);

  provisioner::VastServer server;
  server.offer(json_file(kOffers).at("offers").dump());
  server.run_commands(in, {{"PATH", fmt::format("{}:{}", (in / "bin").string(), std::getenv("PATH"))}});
  const auto with_run = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin() + 1, kRunFile);
    for (const std::string& set :
         {"run.folder=" + (in / "runs").string(), std::string("run.steps=3"),
          // A model that two cores train, in place of Qwen3-8B on an H100, and sums, of which it learns some before.
          std::string("model={preset: tiny-64}"),
          std::string("task={adapter: arithmetic, options: {operations: [\"+\"], partial_credit: 0.5}}"),
          std::string("learner.warm_start={steps_max: 60}"), std::string("learner.device=cpu"),
          std::string("learner.adapter.rank=8"), std::string("rollout.prompts_per_step=4"),
          std::string("rollout.group_size=4"), std::string("rollout.response_tokens_max=6"),
          std::string("evaluation.problems=8"), std::string("network.port=0"), "fleet.vast.url=" + server.url(),
          "fleet.vast.key_file=" + (in / "vast.key").string(), "fleet.bundle=" + (in / "bundle.tar.gz").string(),
          // Two machines are needed: the predicted speed is that of a GPU, which the long responses use up.
          std::string("fleet.step_time_expected=1 s"), std::string("fleet.response_tokens_expected=3000"),
          std::string("fleet.headroom=0")}) {
      arguments.emplace_back("--set");
      arguments.push_back(set);
    }
    return run_program(arguments, seconds(120));
  };

  const Outcome plan = with_run({"plan", "-o", (in / "plan.json").string()});
  ASSERT_EQ(plan.status, 0) << plan.err;
  const json planned = json_file(in / "plan.json");
  EXPECT_EQ(planned.at("totals").at("workers"), 2) << plan.out;
  const json asked = json::parse(server.searches().at(0));
  EXPECT_EQ(asked.at("gpu_name").at("in"), json({"RTX 4090"}));
  EXPECT_EQ(asked.at("cuda_max_good").at("gte"), 13.0);
  EXPECT_EQ(asked.at("direct_port_count").at("gte"), 1);
  EXPECT_EQ(asked.at("verified").at("eq"), true);
  EXPECT_EQ(server.count("create"), 0);

  const Outcome doctor = with_run({"doctor"});
  EXPECT_EQ(doctor.status, 0) << doctor.out;
  EXPECT_THAT(doctor.out, HasSubstr("vast accepts the key, credit $100.00"));

  const Outcome up = with_run({"up", "--json"});
  std::string logs;
  for (const auto& entry : fs::directory_iterator(in))
    if (entry.path().extension() == ".log") logs += *read_file(entry.path());
  ASSERT_EQ(up.status, 0) << up.err << logs;
  const json report = json::parse(up.out);
  EXPECT_EQ(report.at("steps"), 3);
  EXPECT_EQ(report.at("ended"), "completed");
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
  EXPECT_EQ(report.at("fleet").at("workers_started"), 2);
  EXPECT_NE(report.at("reward").at("first"), 0);
  // A delta has the adapter of rank 8 alone.
  EXPECT_GT(report.at("broadcast").at("delta_bytes_mean"), 10'000);
  EXPECT_LT(report.at("broadcast").at("delta_bytes_mean"), 60'000);
  EXPECT_GT(report.at("cost").at("usd_total").get<double>(), 0);
  EXPECT_EQ(server.count("create"), 2);
  EXPECT_TRUE(server.rented().empty());

  const std::string run = (in / "runs/qwen3-8b").string();
  const Outcome exported = run_program({"model", "export", run, "-o", (in / "trained").string(), "--adapter"});
  EXPECT_EQ(exported.status, 0) << exported.err;
  EXPECT_TRUE(fs::exists(in / "trained/adapter_model.safetensors"));

  setenv("VAST_API_KEY", provisioner::VastServer::kKey, 1);
  const Outcome costs = run_program({"ledger", "costs", run, "--charges"});
  const Outcome down = run_program({"down", run});
  unsetenv("VAST_API_KEY");
  EXPECT_EQ(costs.status, 0) << costs.err;
  EXPECT_THAT(costs.out, HasSubstr("charged"));
  EXPECT_EQ(down.status, 0) << down.err;
  EXPECT_THAT(down.out, HasSubstr("is rented"));
  if (std::getenv("ECHOLINE_SHOW") != nullptr)  // for the tutorial
    std::printf("%s\n---\n%s\n---\n%s\n---\n%s\n---\n%s\n---\n%s\n", plan.out.c_str(), doctor.out.c_str(),
                up.err.c_str(), run_program({"report", run}).out.c_str(), costs.out.c_str(), down.out.c_str());
  for (const json& offer : planned.at("offers"))
    if (offer.at("chosen").get<bool>())
      fs::remove_all(fmt::format("/var/tmp/echoline-{}", offer.at("offer").get<std::string>()));
}

}  // namespace
}  // namespace echoline::testing
