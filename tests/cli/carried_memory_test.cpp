// A run carries a policy of 480 MB. Neither its learner nor its workers hold a policy in anonymous memory, so that a
// policy may be larger than a machine's memory.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <map>
#include <thread>

#include "base/random.hpp"
#include "delta/checkpoint.hpp"
#include "delta/digest.hpp"
#include "tests/cli/unknown_model.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;
using std::chrono::seconds;
namespace fs = std::filesystem;

constexpr std::uint64_t kTensors = 300, kTensorBytes = 1'600'000;
constexpr std::uint64_t kEngineFolderBytes = 4 * kTensors * kTensorBytes;  // of two workers, with room to install
// The program itself, its threads' buffers, and the first 64 MiB of bodies, policies and new values, which are in
// ordinary memory (base/file_memory.hpp).
constexpr std::uint64_t kLearnerMemoryMax = 120'000'000;
// The same, and the chunks that a worker keeps in memory for its disk and its engine (overlay/sizes.hpp).
constexpr std::uint64_t kWorkerMemoryMax = 320'000'000;

// A model that this program cannot compute, with values that do not compress.
void write_model(const fs::path& folder) {
  ASSERT_NO_FATAL_FAILURE(make_unknown_family(folder, "carried_test", "CarriedTestForCausalLM"));
  Random random(11);
  std::vector<std::byte> values(kTensorBytes + kTensors);
  for (std::size_t i = 0; i + 8 <= values.size(); i += 8) {
    const std::uint64_t bits = random.next();
    std::memcpy(values.data() + i, &bits, sizeof bits);
  }
  delta::StateView tensors;
  for (std::uint64_t i = 0; i < kTensors; ++i)
    tensors.push_back({.name = fmt::format("layers.{}.weight", i),
                       .dtype = delta::DType::kI8,
                       .shape = {static_cast<std::int64_t>(kTensorBytes)},
                       .bytes = std::span(values).subspan(i, kTensorBytes)});
  ASSERT_TRUE(delta::write_safetensors(folder / "model.safetensors", tensors));
}

// Changes a thousandth of the values for every version, and in the last one every tensor's name, so that it travels as
// a snapshot. Sends odd versions as tensors, and the others as a file.
constexpr const char* kTrainer = R"(
import mmap, os, pathlib, random, sys, time
sys.path.insert(0, "clients/python")
import echoline
run, model = pathlib.Path(sys.argv[1]), sys.argv[2]
while not (run / "trainer-api.json").exists():
    time.sleep(0.05)
client = echoline.Client(run, patience=120)
draws = random.Random(7)
while True:
    status = client.status()
    if status.version_wanted == status.steps:
        with open(model, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            begin = 8 + int.from_bytes(data[:8], "little")
            for _ in range((len(data) - begin) // 1000):
                data[draws.randrange(begin, len(data))] ^= 1
            data.flush()
            tensors = echoline.unpack(data)[0]
            if status.steps == status.steps_total:
                tensors = {"new." + name: tensor for name, tensor in tensors.items()}
            if status.steps % 2 == 1:
                client.publish(status.steps, tensors, keep_types=True)
            else:
                client.publish(status.steps, model)
            del tensors
    if status.steps >= status.steps_total:
        break
    batch = client.take(wait=1)
    if batch is not None:
        client.consume(batch)
)";

std::string command_of(const fs::path& process) {
  std::ifstream file(process / "cmdline");
  std::string command;
  std::getline(file, command);  // nothing if the process has just ended
  return command;
}

// Anonymous memory of a process.
std::uint64_t memory_of(const fs::path& process) {
  std::ifstream file(process / "status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("RssAnon:")) return 1024 * std::stoull(line.substr(line.find_first_of("0123456789")));
  return 0;
}

// Raises the peaks, by the verb of the process, for all processes of the run.
void add_memory(std::map<std::string, std::uint64_t>& peaks, const fs::path& run) {
  std::error_code error;
  for (fs::directory_iterator it("/proc", error), end; !error && it != end; it.increment(error)) {
    const std::string command = command_of(it->path());
    for (const char* verb : {"learner", "worker"})
      if (command.find(fmt::format("echoline{0}{1}{0}", '\0', verb)) != std::string::npos &&
          command.find(run.parent_path().string()) != std::string::npos)
        peaks[verb] = std::max(peaks[verb], memory_of(it->path()));
  }
}

TEST(CarriedMemory, NoProcessHoldsAPolicy) {
  std::error_code error;
  if (const auto room = fs::space("/dev/shm", error); error || room.available < kEngineFolderBytes)
    GTEST_SKIP() << "/dev/shm has no room for the policies of two engines";
  const TemporaryFolder folder;
  const fs::path model = folder.path() / "source", run = folder.path() / "carried";
  write_model(model);
  json offers = json::array();
  for (const char* id : {"a", "b"})
    offers.push_back({{"id", id},
                      {"provider", "local"},
                      {"host", id},
                      {"gpu", "RTX 4090"},
                      {"gpu_count", 1},
                      {"vram_gb", 80},
                      {"place", "DE"},
                      {"up_mbit_per_s", 10'000},
                      {"down_mbit_per_s", 10'000},
                      {"reliability", 0.999},
                      {"duration_days_max", 90},
                      {"rollouts_per_s", 5},
                      {"rollouts_source", "profile"},
                      {"gpu_usd_per_hour", 0.1},
                      {"storage_usd_per_hour", 0.001},
                      {"upload_usd_per_gb", 0},
                      {"download_usd_per_gb", 0}});
  std::ofstream(folder.path() / "offers.json") << json{{"schema_version", 1}, {"offers", offers}};
  std::ofstream(folder.path() / "run.yaml") << fmt::format(
      R"(run: {{name: carried, folder: {0}, steps: 3}}
model: {{path: {0}/source}}
task: {{adapter: arithmetic, options: {{evaluation_problems: 200}}}}
rollout: {{prompts_per_step: 4, group_size: 4, response_tokens_max: 16}}
staleness: {{budget: 3}}
learner: {{trainer: external}}
worker: {{engine: vllm, engine_command: '{1} vllm {{model}} {{port}} --hash', engine_patience: 2 min}}
network: {{uplink: 10 Gbit/s}}
fleet: {{offers: {0}/offers.json, provider: local, headroom: 0.5, join_timeout: 2 min, workers_max: 2,
        step_time_expected: 10 s, delta_ratio_expected: 10, install_time_expected: 2 s}}
)",
      folder.path().string(), ECHOLINE_ENGINE_PROGRAM);
  ::setenv("ECHOLINE_TEST_TRAINER", kTrainer, /*overwrite=*/1);
  std::FILE* const trainer =
      ::popen(fmt::format("exec /usr/bin/python3 -c \"$ECHOLINE_TEST_TRAINER\" {} {}/model.safetensors 2>&1",
                          run.string(), model.string())
                  .c_str(),
              "r");
  Program program({"learner", (folder.path() / "run.yaml").string()});
  std::map<std::string, std::uint64_t> peaks;
  EXPECT_TRUE(eventually(seconds(240), [&] {
    add_memory(peaks, run);
    return !program.running();
  }));
  const Outcome outcome = program.wait(seconds(1));
  std::string trained;
  char buffer[4096];
  if (outcome.status == 0)
    for (std::size_t size; (size = std::fread(buffer, 1, sizeof buffer, trainer)) > 0;) trained.append(buffer, size);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  if (outcome.status == 0) {
    EXPECT_EQ(::pclose(trainer), 0) << trained;
  }

  const json report = json_file(run / "report.json");
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
  EXPECT_EQ(report.at("weights").at("version"), 3);
  std::map<std::uint64_t, bool> snapshots;
  for (const json& row : json_lines(run / "metrics.jsonl"))
    if (row.at("kind") == "publication") snapshots[row.at("version")] = row.at("snapshot");
  EXPECT_EQ(snapshots, (std::map<std::uint64_t, bool>{{0, true}, {1, false}, {2, false}, {3, true}}));
  // The run ends with the tensors that the trainer published last.
  const auto source = delta::Checkpoint::open(model), published = delta::Checkpoint::open(run / "model");
  ASSERT_TRUE(source && published);
  ASSERT_EQ(published->view().size(), kTensors);
  for (const delta::TensorView& tensor : published->view()) {
    const auto same = std::ranges::find(source->view(), tensor.name.substr(4), &delta::TensorView::name);
    ASSERT_NE(same, source->view().end()) << tensor.name;
    ASSERT_TRUE(std::ranges::equal(same->bytes, tensor.bytes)) << tensor.name;
  }
  EXPECT_EQ(peaks.size(), 2u) << "the processes were not found";
  EXPECT_LT(peaks["learner"], kLearnerMemoryMax);
  EXPECT_LT(peaks["worker"], kWorkerMemoryMax);
  RecordProperty("learner_bytes", std::to_string(peaks["learner"]));
  RecordProperty("worker_bytes", std::to_string(peaks["worker"]));
}

}  // namespace
}  // namespace echoline::testing
