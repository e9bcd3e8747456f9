// The task of docs/tutorials/own-task.md, made from the page alone, in the quickstart's run.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "data_plane/sandbox/sandbox.hpp"
#include "tests/cli/program.hpp"
#include "tests/data_plane/page_blocks.hpp"

namespace echoline::testing {
namespace {

TEST(TaskPage, ItsRunFileTakesTheQuickstartsPlace) {
  if (const auto pool = sandbox::Pool::start(); !pool) GTEST_SKIP() << pool.error().message();
  const TemporaryFolder folder;
  auto files = page_blocks("docs/tutorials/own-task.md");
  for (const char* file : {"sort.py", "sort.yaml"}) std::ofstream(folder.path() / file) << files.at(file);
  std::filesystem::create_directory_symlink(std::filesystem::absolute("configs"), folder.path() / "configs");
  const auto outcome = run_program(
      {"up", (folder.path() / "sort.yaml").string(), "--json", "--set", "run.folder=" + folder.path().string(), "--set",
       "run.steps=2", "--set", "rollout.prompts_per_step=16", "--set", "learner.warm_start.steps_max=20"},
      std::chrono::seconds(240));
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto report = json_file(folder.path() / "sort" / "report.json");
  EXPECT_EQ(report.at("ended"), "completed");
  EXPECT_EQ(report.at("steps"), 2);
  EXPECT_EQ(report.at("eval").at("problems"), 256);
  EXPECT_TRUE(report.at("weights").at("all_workers_identical").get<bool>());
}

}  // namespace
}  // namespace echoline::testing
