// Memory of a long run: a real learner and two real workers make thousands of small steps, and none of the three may
// keep memory of past steps.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <map>
#include <thread>

#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

using nlohmann::json;

constexpr double kGrowthMax = 1000;  // bytes a step
constexpr std::size_t kWindows = 12;

// Bytes in use by step, of one process.
using Samples = std::vector<std::pair<double, double>>;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Growth in bytes per step. Uses the minimum of each window of steps, because a batch, a policy or a checkpoint in
// progress is no growth, and the median of the slopes between any two windows (Theil and Sen).
double growth_per_step(const Samples& samples, double from, double to) {
  std::map<std::size_t, std::pair<double, double>> minima;  // window -> step, bytes
  for (const auto& [step, bytes] : samples) {
    if (step < from || step >= to) continue;
    const auto window = static_cast<std::size_t>((step - from) / (to - from) * kWindows);
    const auto [it, added] = minima.try_emplace(window, step, bytes);
    if (!added && bytes < it->second.second) it->second = {step, bytes};
  }
  std::vector<double> slopes;
  for (auto a = minima.begin(); a != minima.end(); ++a)
    for (auto b = std::next(a); b != minima.end(); ++b)
      slopes.push_back((b->second.second - a->second.second) / (b->second.first - a->second.first));
  return slopes.empty() ? 1e300 : median(slopes);
}

constexpr const char* kOffer =
    R"({{"id": "{}", "provider": "local", "host": "{}", "gpu": "RTX 4090", "gpu_count": 1, "vram_gb": 24, "place": "DE",
  "up_mbit_per_s": 1000, "down_mbit_per_s": 1000, "reliability": 0.999, "duration_days_max": 90,
  "rollouts_per_s": 250, "rollouts_source": "profile",
  "gpu_usd_per_hour": 0.1, "storage_usd_per_hour": 0.001, "upload_usd_per_gb": 0.001, "download_usd_per_gb": 0.001}})";

constexpr const char* kRun = R"(
run: {{name: soak, folder: {0}, steps: {1}}}
model: {{preset: tiny-64}}
task: {{adapter: arithmetic, options: {{evaluation_problems: 200}}}}
evaluation: {{problems: 8}}
rollout: {{prompts_per_step: 2, group_size: 2, response_tokens_max: 4}}
staleness: {{budget: 3}}
learner: {{checkpoint_every: 50, learning_rate: 1e-5}}
fleet: {{offers: {0}/offers.json, provider: local, headroom: 0.5, join_timeout: 2 min,
        step_time_expected: 20 ms, delta_ratio_expected: 10, install_time_expected: 1 ms}}
)";

TEST(Soak, NeitherLearnerNorWorkersGrowWithTheSteps) {
  const char* steps_text = std::getenv("ECHOLINE_SOAK_STEPS");
  const std::uint64_t steps = steps_text != nullptr ? std::strtoull(steps_text, nullptr, 10) : 1600;
  ASSERT_GE(steps, 1000u);
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "offers.json")
      << R"({"schema_version": 1, "offers": [)" << fmt::format(kOffer, "a", "h1") << ","
      << fmt::format(kOffer, "b", "h2") << "]}";
  std::ofstream(folder.path() / "run.yaml") << fmt::format(kRun, folder.path().string(), steps);
  Program learner({"learner", (folder.path() / "run.yaml").string()});
  const auto run = folder.path() / "soak";
  std::map<std::string, Samples> processes;
  while (learner.running()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const json status = json_file(run / "status.json");
    if (!status.is_object()) continue;
    const double step = status.at("step");
    const auto record = [&](const std::string& name, const json& bytes) {
      Samples& samples = processes[name];
      if (bytes.is_number() && (samples.empty() || samples.back().first < step))
        samples.emplace_back(step, bytes.get<double>());
    };
    record("learner", status.at("heap_bytes"));
    for (const json& worker : status.at("workers"))
      record("worker " + worker.at("offer").get<std::string>(), worker.at("heap_bytes"));
  }
  const Outcome ended = learner.wait(std::chrono::seconds(60));
  ASSERT_EQ(ended.status, 0) << ended.err;
  const json report = json_file(run / "report.json");
  EXPECT_GT(report.at("memory").at("learner_bytes_max"), 0);
  EXPECT_GT(report.at("memory").at("worker_bytes_max"), 0);
  ASSERT_EQ(processes.size(), 3u);
  // Publications, statistics and histories of limited length fill up in the first half.
  for (const auto& [name, samples] : processes) {
    const double bytes = growth_per_step(samples, static_cast<double>(steps) / 2, static_cast<double>(steps));
    fmt::print("{}: {:.0f} bytes a step, {} samples\n", name, bytes, samples.size());
    EXPECT_LE(bytes, kGrowthMax) << name;
    EXPECT_GE(samples.size(), 2 * kWindows) << name;
  }
}

}  // namespace
}  // namespace echoline::testing
