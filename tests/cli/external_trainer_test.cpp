// A run whose trainer is another program: examples/pytorch_grpo.py on Debian's PyTorch, and programs that save
// checkpoints into a folder.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <map>

#include "delta/checkpoint.hpp"
#include "tests/cli/unknown_model.hpp"

extern char** environ;

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

// Debian's interpreter, even if another has the same name.
constexpr const char* kPython = "/usr/bin/python3";

class Python {
 public:
  explicit Python(const std::vector<std::string>& arguments) {
    std::vector<char*> words{const_cast<char*>(kPython)};
    for (const std::string& word : arguments) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    if (posix_spawn(&pid_, kPython, nullptr, nullptr, words.data(), environ) != 0) pid_ = -1;
  }
  ~Python() {
    if (pid_ > 0) kill(), ::waitpid(pid_, nullptr, 0);
  }
  void kill() const { ::kill(pid_, SIGKILL); }
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
};

std::vector<std::string> up(const fs::path& folder, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{"up",
                                     "configs/quickstart.yaml",
                                     "--json",
                                     "--set",
                                     "run.folder=" + folder.string(),
                                     "--set",
                                     "learner.trainer=external",
                                     "--set",
                                     "rollout.prompts_per_step=32",
                                     "--set",
                                     "run.steps=6",
                                     "--set",
                                     "learner.checkpoint_every=2"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

std::uint64_t step_of(const fs::path& run) {
  const json status = json_file(run / "status.json");
  return status.is_object() ? status.value("step", std::uint64_t{0}) : 0;
}

class ExternalTrainer : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Python({"-c", "import torch"}).wait() != 0)
      GTEST_SKIP() << "PyTorch is not installed (apt-get install python3-torch)";
  }
  Python trainer() const { return Python({"examples/pytorch_grpo.py", run_.string()}); }

  const TemporaryFolder folder_;
  const fs::path run_ = folder_.path() / "quickstart";
};

TEST_F(ExternalTrainer, DrivesTheQuickstartsFleetAndMayCrash) {
  // A model that answers some problems rightly: with no right answer in a group, there is nothing to learn or compare.
  const Outcome warm =
      run_program({"up", "configs/quickstart.yaml", "--json", "--set", "run.folder=" + folder_.path().string(), "--set",
                   "run.name=warm", "--set", "run.steps=1", "--set", "rollout.prompts_per_step=32", "--set",
                   "learner.warm_start.steps_max=320"});
  ASSERT_EQ(warm.status, 0) << warm.err;
  Program program(up(folder_.path(), {"--set", "model.preset=null", "--set",
                                      "model.path=" + (folder_.path() / "warm" / "model").string()}));
  {
    Python first = trainer();
    ASSERT_TRUE(eventually(seconds(120), [&] { return step_of(run_) >= 2; })) << program.wait(seconds(1)).err;
    first.kill();
  }
  Python second = trainer();
  const Outcome outcome = program.wait(seconds(120));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(second.wait(), 0);
  const json report = json_file(run_ / "report.json");
  EXPECT_EQ(report.at("ended"), "completed");
  EXPECT_EQ(report.at("steps"), 6);
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
  EXPECT_EQ(report.at("weights").at("version"), 6);
  std::size_t steps_with_updates = 0;
  for (const json& row : json_lines(run_ / "metrics.jsonl"))
    if (row.at("kind") == "step") steps_with_updates += row.contains("updates");  // the trainer's own figure
  EXPECT_EQ(steps_with_updates, 6u);
  std::size_t scored = 0;
  for (const json& row : json_lines(run_ / "metrics.jsonl"))
    if (row.at("kind") == "step" && row.value("scored_responses", 0) > 0) {
      ++scored;
      EXPECT_GT(row.at("entropy"), 0);
      EXPECT_LT(row.at("behaviour_kl"), 0.5) << "its log-probabilities are those of the workers' policies";
    }
  EXPECT_GT(scored, 0u);
  // The trainer's answers, graded by the learner, equal those of this program's own engine for the same policies.
  const json eval = report.at("eval");
  EXPECT_GT(eval.at("before"), 0);
  EXPECT_GT(eval.at("after"), 0);
  EXPECT_EQ(eval.at("problems"), 256);
  const Outcome evaluated = run_program({"evaluate", run_.string(), "--json"});
  ASSERT_EQ(evaluated.status, 0) << evaluated.err;
  EXPECT_NEAR(json::parse(evaluated.out).at("accuracy").get<double>(), eval.at("after").get<double>(), 0.02);
  EXPECT_FALSE(fs::exists(run_ / "trainer-api.json"));
}

TEST_F(ExternalTrainer, AKilledLearnerResumesFromTheLastPublication) {
  {
    Program program(up(folder_.path()));
    Python first = trainer();
    ASSERT_TRUE(eventually(seconds(120), [&] { return step_of(run_) >= 3; }));
    for (const auto& [offer, pid] : rented_processes(run_)) ::kill(pid, SIGKILL);
    program.signal(SIGKILL);
  }
  fs::remove(run_ / "trainer-api.json");  // what is left of it leads nowhere
  Program program(up(folder_.path(), {"--resume"}));
  Python second = trainer();
  const Outcome outcome = program.wait(seconds(120));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(json_file(run_ / "report.json").at("steps"), 6);
  EXPECT_EQ(second.wait(), 0);
}

// Takes batches, and saves a copy of the first policy for every wanted version, the file last.
constexpr const char* kSavingTrainer = R"(
import os, shutil, sys
sys.path.insert(0, "clients/python")
import echoline
run, saved = sys.argv[1:]
client = echoline.Client(run, patience=120)
while True:
    status = client.status()
    folder = os.path.join(saved, f"step_{status.steps}", "hf")
    if status.version_wanted == status.steps and not os.path.exists(folder):
        os.makedirs(folder)
        shutil.copy(os.path.join(status.raw["model"], "model.safetensors"), folder)
    if status.steps >= status.steps_total:
        break
    batch = client.take(wait=0.2)
    if batch is not None:
        client.consume(batch)
)";

// For every version, offers two policies that cannot generate, and then the run's first policy.
constexpr const char* kDivergingTrainer = R"(
import os, struct, sys
sys.path.insert(0, "clients/python")
import echoline
client = echoline.Client(sys.argv[1], patience=120)
with open(os.path.join(client.status().raw["model"], "model.safetensors"), "rb") as file:
    good, _ = echoline.unpack(file.read())
def bad(name, change):
    data = bytearray(good[name].data)
    change(data)
    return dict(good, **{name: good[name]._replace(data=memoryview(bytes(data)))})
def nan(data):
    data[2 * 5:2 * 6] = struct.pack("<H", 0x7fc0)
def huge(data):
    data[:] = struct.pack("<H", 0x7f00) * (len(data) // 2)
def refused(version, policy, words):
    try:
        client.publish(version, policy)
    except echoline.Error as error:
        assert error.code == "invalid" and words in str(error), error
    else:
        sys.exit(f"version {version} was taken: {words}")
while True:
    status = client.status()
    if status.version_wanted == status.steps:
        name = "model.norm.weight"
        refused(status.steps, bad(name, nan), f"tensor '{name}' holds 1 values that are NaN, infinite or too large for "
                                              "bf16, the first at index 5 of")
        refused(status.steps, bad("model.layers.0.mlp.up_proj.weight", huge), "log-probabilities are not finite")
        assert client.status().version_wanted == status.steps
        client.publish(status.steps, good)
    if status.steps >= status.steps_total:
        break
    batch = client.take(wait=1)
    if batch is not None:
        client.consume(batch)
)";

TEST(Publish, RefusesAPolicyThatCannotGenerate) {
  const TemporaryFolder folder;
  const fs::path run = folder.path() / "quickstart";
  Python trainer({"-c", kDivergingTrainer, run.string()});
  Program program(up(folder.path(), {"--set", "run.steps=3"}));
  const Outcome outcome = program.wait(seconds(180));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(trainer.wait(), 0);
  const json report = json_file(run / "report.json");
  EXPECT_EQ(report.at("ended"), "completed");
  EXPECT_EQ(report.at("weights").at("version"), 3);
  EXPECT_EQ(report.at("groups_set_aside").at("count"), 0);
  std::map<std::uint64_t, int> refused;
  for (const json& row : json_lines(run / "events.jsonl"))
    if (row.at("event") == "policy_refused") ++refused[row.at("version")];
  EXPECT_EQ(refused, (std::map<std::uint64_t, int>{{1, 2}, {2, 2}, {3, 2}}));
}

TEST(Publish, WatchesAFolderThatAnotherTrainerSavesInto) {
  const TemporaryFolder folder;
  const fs::path run = folder.path() / "quickstart", saved = folder.path() / "saved";
  fs::create_directories(saved);
  Program watch({"publish", run.string(), "--watch", saved.string()});  // it may come first
  const Python trainer({"-c", kSavingTrainer, run.string(), saved.string()});
  Program program(up(folder.path(), {"--set", "run.steps=2"}));
  const Outcome outcome = program.wait(seconds(120));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(json_file(run / "report.json").at("weights").at("version"), 2);
  const Outcome watched = watch.wait(seconds(60));
  EXPECT_EQ(watched.status, 0);
  EXPECT_THAT(watched.err, HasSubstr("version 1 is published from"));
}

// Publishes a policy of a family that the program does not know, with tensors of many types. In version 2 a tensor
// comes, one goes and one grows.
constexpr const char* kCarryingTrainer = R"(
import os, random, sys
sys.path.insert(0, "clients/python")
import echoline
from echoline.safetensors import Tensor
client = echoline.Client(sys.argv[1], patience=120)
with open(os.path.join(client.status().raw["model"], "model.safetensors"), "rb") as file:
    policy = dict(echoline.unpack(file.read())[0])
draws = random.Random(1)
while True:
    status = client.status()
    if status.version_wanted == status.steps:
        for name, tensor in policy.items():
            data = bytearray(tensor.data)
            if tensor.dtype not in ("BF16", "F32"):
                data[draws.randrange(len(data))] ^= 1
            policy[name] = tensor._replace(data=memoryview(bytes(data)))
        if status.steps == 2:
            del policy["scales"]
            policy["experts.9.down"] = Tensor("F4", (4, 6), memoryview(bytes(range(12))))
            policy["packed"] = Tensor("I32", (3, 5), memoryview(bytes(60)))
        client.publish(status.steps, policy)
    if status.steps >= status.steps_total:
        break
    batch = client.take(wait=1)
    if batch is not None:
        client.consume(batch)
)";

// The folder of a model that no part of the program can compute, with the tokenizer of another.
void make_unknown_model(const fs::path& folder) {
  ASSERT_NO_FATAL_FAILURE(make_unknown_family(folder, "mixture_of_tomorrow", "TomorrowForCausalLM"));
  std::ofstream(folder / "chat_template.jinja") << "{{ messages[0]['content'] }}";
  const std::vector<std::byte> bytes(96, std::byte{0x21});
  const auto tensor = [&](const char* name, delta::DType type, std::vector<std::int64_t> shape) {
    const auto size = static_cast<std::size_t>(*delta::tensor_bytes(type, shape));
    return delta::TensorView{name, type, std::move(shape), std::span(bytes).first(size)};
  };
  const Status written = delta::write_safetensors(
      folder / "model.safetensors",
      *delta::canonical({tensor("embed", delta::DType::kBF16, {8, 4}),
                         tensor("experts.0.up", delta::DType::kF8E4M3, {6, 4}),
                         tensor("packed", delta::DType::kI32, {3, 4}), tensor("scales", delta::DType::kF8E8M0, {6}),
                         tensor("mask", delta::DType::kBool, {5}), tensor("norm", delta::DType::kF32, {7})}));
  ASSERT_TRUE(written) << written.error().message();
}

TEST(CarriedPolicy, AnUnknownFamilyIsTrainedElsewhereAndGeneratesOnServers) {
  const TemporaryFolder folder;
  const fs::path run = folder.path() / "quickstart", model = folder.path() / "tomorrow";
  make_unknown_model(model);
  const Python trainer({"-c", kCarryingTrainer, run.string()});
  const std::string engine = std::string(ECHOLINE_ENGINE_PROGRAM) + " vllm {model} {port} --hash";
  Program program(
      up(folder.path(), {"--set", "run.steps=4", "--set", "model.path=" + model.string(), "--set", "model.preset=null",
                         "--set", "worker.engine=vllm", "--set", "worker.engine_command=" + engine, "--set",
                         "rollout.prompts_per_step=8", "--set", "fleet.workers_max=2"}));
  const Outcome outcome = program.wait(seconds(180));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const json report = json_file(run / "report.json");
  EXPECT_EQ(report.at("weights").at("version"), 4);
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
  EXPECT_THAT(outcome.err,
              HasSubstr("version 2 has other tensors than version 1: tensors: 1 new ('experts.9.down'), "
                        "1 gone ('scales'), 1 of another type or shape ('packed: I32 [3, 4] before, I32 [3, 5] now')"));
  // The export is what the trainer published, with the model's own configuration.
  EXPECT_EQ(json_file(run / "model" / "config.json").at("model_type"), "mixture_of_tomorrow");
  const auto saved = delta::Checkpoint::open(run / "model");
  ASSERT_TRUE(saved) << saved.error().message();
  std::vector<std::string> tensors;
  for (const delta::TensorView& t : saved->view())
    tensors.push_back(fmt::format("{} {} [{}]", t.name, delta::dtype_name(t.dtype), fmt::join(t.shape, ", ")));
  EXPECT_EQ(tensors,
            (std::vector<std::string>{"embed BF16 [8, 4]", "experts.0.up F8_E4M3 [6, 4]", "experts.9.down F4 [4, 6]",
                                      "mask BOOL [5]", "norm F32 [7]", "packed I32 [3, 5]"}));
}

TEST(CarriedPolicy, IsRefusedWhereItWouldHaveToBeComputed) {
  const TemporaryFolder folder;
  const fs::path model = folder.path() / "tomorrow";
  make_unknown_model(model);
  const std::vector<std::string> arguments =
      up(folder.path(), {"--set", "model.path=" + model.string(), "--set", "model.preset=null"});
  const Outcome on_workers = run_program(arguments);
  EXPECT_EQ(on_workers.status, 2);
  EXPECT_THAT(on_workers.err, HasSubstr("worker.engine: the built-in engine cannot generate with this model: "
                                        "'model_type' is \"mixture_of_tomorrow\", expected"));
  std::vector<std::string> built_in = arguments;
  built_in.insert(built_in.end(), {"--set", "learner.trainer=built_in"});
  const Outcome in_trainer = run_program(built_in);
  EXPECT_EQ(in_trainer.status, 2);
  EXPECT_THAT(in_trainer.err, HasSubstr("'model_type' is \"mixture_of_tomorrow\", expected"));
}

// Saves policies with "module." in front of every name. The learner refuses the first one and names the option.
constexpr const char* kPrefixingTrainer = R"(
import os, sys
sys.path.insert(0, "clients/python")
import echoline
run, saved = sys.argv[1:]
client = echoline.Client(run, patience=120)
while True:
    status = client.status()
    folder = os.path.join(saved, f"global_step_{status.steps + 1}", "actor", "huggingface")
    if status.version_wanted == status.steps and not os.path.exists(folder):
        with open(os.path.join(status.raw["model"], "model.safetensors"), "rb") as file:
            policy, _ = echoline.unpack(file.read())
        data = echoline.pack({"module." + name: tensor for name, tensor in policy.items()})
        if status.steps == 1:
            with open(os.path.join(saved, "wrapped.safetensors"), "wb") as file:
                file.write(data)
            try:
                client.publish(1, os.path.join(saved, "wrapped.safetensors"))
                sys.exit("a policy with other names was taken")
            except echoline.Error as error:
                assert "publish with --strip-prefix module." in str(error), error
        os.makedirs(folder)
        with open(os.path.join(folder, "model.safetensors"), "wb") as file:
            file.write(data)
    if status.steps >= status.steps_total:
        break
    batch = client.take(wait=0.2)
    if batch is not None:
        client.consume(batch)
)";

TEST(Publish, NamesWithAPrefixAreExplainedAndStripped) {
  const TemporaryFolder folder;
  const fs::path run = folder.path() / "quickstart", saved = folder.path() / "saved";
  fs::create_directories(saved);
  Program watch(
      {"publish", run.string(), "--watch", saved.string(), "--strip-prefix", "module.", "--version-offset", "1"});
  const Python trainer({"-c", kPrefixingTrainer, run.string(), saved.string()});
  Program program(up(folder.path(), {"--set", "run.steps=2"}));
  const Outcome outcome = program.wait(seconds(120));
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(json_file(run / "report.json").at("weights").at("version"), 2);
  const Outcome watched = watch.wait(seconds(60));
  EXPECT_EQ(watched.status, 0);
  EXPECT_THAT(watched.err, AnyOf(HasSubstr("the learner wants no policy now"),
                                 HasSubstr("has no subfolder whose name ends in a number")));
  EXPECT_THAT(watched.err, HasSubstr("version 2 is published from"));
  EXPECT_THAT(watched.err, HasSubstr("global_step_3/actor/huggingface"));
}

TEST(Publish, MissingArgumentsAreNamed) {
  EXPECT_EQ(run_program({"publish", "nowhere", "x", "--version", "1"}).status, 2);
  const TemporaryFolder folder;
  fs::create_directories(folder.path() / "run");
  EXPECT_THAT(run_program({"publish", (folder.path() / "run").string(), "x"}).err, HasSubstr("--version"));
}

}  // namespace
}  // namespace echoline::testing
