// Writes the files of a tiny run on the test's vast.ai.
#include "tests/cli/vast_run.hpp"

#include <fmt/format.h>

#include <fstream>

namespace echoline::testing {

using nlohmann::json;

void write_json(const std::filesystem::path& file, const json& object) { std::ofstream(file) << object.dump(1); }

json vast_run(const std::filesystem::path& folder, const std::string& url, std::uint64_t first_ask) {
  json offers = {{"schema_version", 1}, {"offers", json::array()}};
  for (std::uint64_t i = 0; i < 8; ++i)
    offers["offers"].push_back({{"id", std::to_string(first_ask + i)},
                                {"provider", "vast"},
                                {"host", fmt::format("h{}", i)},
                                {"gpu", "L4"},
                                {"gpu_count", 1},
                                {"vram_gb", 24},
                                {"up_mbit_per_s", 100},
                                {"down_mbit_per_s", 100},
                                {"reliability", 0.99},
                                {"rollouts_per_s", kVastRolloutsPerSecond},
                                {"rollouts_source", "profile"},
                                {"gpu_usd_per_hour", 0.4},
                                {"storage_usd_per_hour", 0},
                                {"upload_usd_per_gb", 0},
                                {"download_usd_per_gb", 0}});
  write_json(folder / "offers.json", offers);
  return {{"run", {{"name", "night"}, {"folder", (folder / "runs").string()}, {"seed", 7}, {"steps", 100000}}},
          {"model", {{"preset", "tiny-64"}}},
          {"task",
           {{"adapter", "arithmetic"},
            {"options", {{"operations", {"+"}}, {"operand_max", 99}, {"evaluation_problems", 200}}}}},
          {"rollout", {{"prompts_per_step", 4}, {"group_size", 4}, {"response_tokens_max", 4}}},
          {"staleness", {{"budget", 3}, {"publish_every", 1}}},
          {"learner",
           {{"learning_rate", 2e-4},
            {"threads", 1},
            {"checkpoint_every", 4},
            {"warm_start", {{"steps_max", 1}, {"batch", 8}}}}},
          {"network", {{"bind", "::"}, {"uplink", "1 Gbit/s"}}},
          {"fleet",
           {{"offers", (folder / "offers.json").string()},
            {"provider", "vast"},
            {"image", "debian:12"},
            {"vast", {{"url", url}}},
            {"step_time_expected", "1 s"},
            {"headroom", 0.3},
            {"workers_max", 5}}}};
}

}  // namespace echoline::testing
