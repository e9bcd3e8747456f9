// A trainer whose ranks run on two machines: rank 0 beside the learner, rank 1 beside a node (`echoline node`). The
// ranks are the Python client without torch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>

#include "delta/checkpoint.hpp"
#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

// Trains nothing: every version changes one number of each tensor. Rank 1 holds the second half of each tensor's rows.
// Writes each version whole, to compare. Before version 2 it creates the file `kill` and waits for `killed`: the test
// kills the node meanwhile.
constexpr const char* kRanks = R"(
import os, pathlib, sys, time
sys.path.insert(0, "clients/python")
import echoline
from echoline.shards import Shard
from echoline.safetensors import Tensor
run, node, here = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
ranks = [echoline.Client(run, patience=60), echoline.Client(node, patience=60)]
with open(os.path.join(ranks[0].status().raw["model"], "model.safetensors"), "rb") as file:
    policy = {name: Tensor(t.dtype, tuple(t.shape), bytes(t.data))
              for name, t in echoline.unpack(file.read())[0].items()}

def part(rank, changed=False):
    shards = {}
    for name, tensor in policy.items():
        rows = tensor.shape[0]
        begin, end = (0, rows // 2) if rank == 0 else (rows // 2, rows)
        row_bytes = len(tensor.data) // rows
        data = bytearray(tensor.data[begin * row_bytes:end * row_bytes])
        if changed:
            data[0] ^= 1
        if end > begin:
            shards[name] = Shard(Tensor(tensor.dtype, (end - begin,) + tensor.shape[1:], memoryview(bytes(data))),
                                 tensor.shape, (begin,) + (0,) * (len(tensor.shape) - 1))
    return shards

def refused(call, text):
    try:
        call()
    except echoline.Error as error:
        if text in str(error):
            return
        sys.exit(f"expected '{text}', found: {error}")
    sys.exit(f"expected '{text}', but the call succeeded")

while True:
    status = ranks[1].status()
    version = status.steps
    if status.version_wanted == version:
        for name, tensor in policy.items():
            data = bytearray(tensor.data)
            data[0] ^= 1
            policy[name] = tensor._replace(data=bytes(data))
        (here / f"{version}.safetensors").write_bytes(echoline.pack(
            {name: tensor._replace(data=memoryview(tensor.data)) for name, tensor in policy.items()}))
        if version == 1:  # a rank dies: the others' parts are of no use to the next attempt
            ranks[1].publish_shards(version, part(1, changed=True), 1, 2, "dead")
            ranks[1].publish_shards(version, part(1), 1, 2, "first")
            ranks[1].publish_shards(version, part(1), 1, 2, "first")  # again: no effect
            refused(lambda: ranks[1].publish_shards(version, part(1, changed=True), 1, 2, "first"),
                    "rank 1 hands in other shards for version 1 than before")
            if ranks[0].status().raw["shards"]["missing"] != [0]:
                sys.exit(f"missing: {ranks[0].status().raw}")
            ranks[0].publish_shards(version, part(0), 0, 2, "first")
        else:
            ranks[0].publish_shards(version, part(0), 0, 2, "first")
            if version == 2:
                (here / "kill").touch()
                while not (here / "killed").exists():
                    time.sleep(0.05)
            bad = part(1)
            name = sorted(bad)[0]
            bad[name] = bad[name]._replace(offset=(10**6,) + tuple(bad[name].offset[1:]))
            refused(lambda: ranks[1].publish_shards(version, bad, 1, 2, "first"), f"rank 1, piece '{name}'")
            ranks[1].publish_shards(version, part(1), 1, 2, "first")
        refused(lambda: ranks[1].take(wait=0), "is for the learner's machine")
    if status.steps >= status.steps_total:
        break
    batch = ranks[0].take(wait=1)
    if batch is not None:
        ranks[0].consume(batch)
)";

std::string address_of(const fs::path& run) {
  for (const json& event : json_lines(run / "events.jsonl"))
    if (event.at("event") == "listening") return event.at("at");
  return {};
}

std::string token(const fs::path& run, const std::string& instance) {
  std::string text = run_program({"token", run.string(), "--instance", instance}).out;
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

std::vector<std::string> node(const std::string& address, const fs::path& folder, const std::string& join_token) {
  std::vector<std::string> arguments{"node", address, "--name", "b", "--folder", folder.string()};
  if (!join_token.empty()) arguments.insert(arguments.end(), {"--token", join_token});
  return arguments;
}

std::vector<std::string> up(const fs::path& folder, const std::string& trainer) {
  return {"up",
          "configs/quickstart.yaml",
          "--json",
          "--set",
          "run.folder=" + folder.string(),
          "--set",
          "learner.trainer=" + trainer,
          "--set",
          "rollout.prompts_per_step=16",
          "--set",
          "run.steps=3",
          "--set",
          "fleet.workers_max=2"};
}

class Ranks {
 public:
  explicit Ranks(const std::vector<std::string>& arguments) {
    std::string command = "exec /usr/bin/python3 -c \"$ECHOLINE_TEST_RANKS\"";
    for (const std::string& argument : arguments) command += " '" + argument + "'";
    ::setenv("ECHOLINE_TEST_RANKS", kRanks, /*overwrite=*/1);
    file_ = ::popen((command + " 2>&1").c_str(), "r");
  }
  // The exit code and what they printed.
  std::pair<int, std::string> wait() {
    std::string text;
    char buffer[4096];
    for (std::size_t size; (size = std::fread(buffer, 1, sizeof buffer, file_)) > 0;) text.append(buffer, size);
    const int status = ::pclose(file_);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text};
  }

 private:
  std::FILE* file_ = nullptr;
};

TEST(TrainerNode, RanksOnTwoMachinesPublishAndANodeMayDie) {
  const TemporaryFolder folder;
  const fs::path run = folder.path() / "quickstart", node_folder = folder.path() / "node-b";
  Program learner(up(folder.path(), "external"));
  ASSERT_TRUE(eventually(seconds(60), [&] { return !address_of(run).empty() && fs::exists(run / "status.json"); }));
  const std::string address = address_of(run);

  // The token decides who is a node.
  const Outcome wrong = run_program(node(address, folder.path() / "wrong", token(run, "my-gpu")));
  EXPECT_NE(wrong.status, 0);
  EXPECT_THAT(wrong.err, HasSubstr("token"));

  auto process = std::make_unique<Program>(node(address, node_folder, token(run, "node:b")));
  Ranks ranks({run.string(), node_folder.string(), folder.path().string()});
  EXPECT_TRUE(eventually(seconds(120), [&] { return fs::exists(folder.path() / "kill"); }));
  process->signal(SIGKILL);
  process->wait(seconds(10));
  std::ofstream(folder.path() / "killed") << "\n";
  Program again(node(address, node_folder, ""));  // it still has its certificate
  const auto [code, text] = ranks.wait();
  EXPECT_EQ(code, 0) << text;

  const Outcome outcome = learner.wait(seconds(120));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const Outcome ended = again.wait(seconds(30));
  EXPECT_EQ(ended.status, 0) << ended.err;
  const json report = json_file(run / "report.json");
  EXPECT_EQ(report.at("weights").at("version"), 3);
  EXPECT_TRUE(report.at("weights").at("all_workers_identical"));
  const auto expected = delta::Checkpoint::open(folder.path() / "3.safetensors");
  ASSERT_TRUE(expected.has_value());
  EXPECT_EQ(report.at("weights").at("digest"), delta::copy_of(expected->view())->digest().hex());
  // The node is shown by its name, and is no worker.
  for (const json& worker : report.at("workers")) EXPECT_NE(worker.at("offer"), "node:b");
  ASSERT_EQ(report.at("nodes").size(), 1u);
  EXPECT_EQ(report.at("nodes")[0].at("name"), "node:b");
  EXPECT_GE(report.at("nodes")[0].at("version"), 1);  // the end of a run does not wait for nodes
  EXPECT_EQ(json_file(run / "status.json").at("nodes").size(), 1u);
  int joined = 0;
  for (const json& event : json_lines(run / "events.jsonl")) joined += event.at("event") == "node_joined";
  EXPECT_EQ(joined, 2);
}

TEST(TrainerNode, ARunWithoutRanksRefusesNodes) {
  if (!kWithTorch) GTEST_SKIP() << "built without libtorch";
  const TemporaryFolder folder;
  const fs::path run = folder.path() / "quickstart";
  Program learner(up(folder.path(), "built_in"));
  ASSERT_TRUE(eventually(seconds(60), [&] { return !address_of(run).empty() && fs::exists(run / "status.json"); }));
  const Outcome refused = run_program(node(address_of(run), folder.path() / "node-b", token(run, "node:b")));
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.err, HasSubstr("`learner.trainer` is not `external`"));
}

}  // namespace
}  // namespace echoline::testing
