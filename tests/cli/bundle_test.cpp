// echoline bundle, from the outside: the bundle runs on a machine with nothing else.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "base/files.hpp"
#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

namespace fs = std::filesystem;

int shell(const std::string& command) {
  const int raw = std::system(command.c_str());
  return WIFEXITED(raw) ? WEXITSTATUS(raw) : -1;
}

TEST(Bundle, RunsOnAnEmptySystem) {
  const TemporaryFolder folder;
  const fs::path archive = folder.path() / "bundle.tar", root = folder.path() / "echoline-worker";
  const Outcome made = run_program({"bundle", "-o", archive.string()}, std::chrono::seconds(120));
  ASSERT_EQ(made.status, 0) << made.err;
  EXPECT_EQ(shell("cd " + folder.path().string() + " && echo '" + made.out.substr(0, made.out.find('\n')) +
                  "' | sha256sum --check --quiet"),
            0)
      << made.out;
  ASSERT_EQ(shell("tar xf " + archive.string() + " -C " + folder.path().string()), 0);
  fs::remove(archive);
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(root / "lib/echoline"))) << "the program itself, not a link to it";
  const std::string run = "env -i PATH=/bin:/usr/bin " + (root / "bin/echoline").string() + " --version > ";
  ASSERT_EQ(shell(run + (folder.path() / "version").string()), 0);
  EXPECT_EQ(*read_file(folder.path() / "version"), run_program({"--version"}).out);
  if (::geteuid() != 0) GTEST_SKIP() << "only root may change its root folder: the rest is not tried";
  // No library, no shell, no /proc: the bundle alone.
  std::string loader;
  for (const auto& entry : fs::directory_iterator(root / "lib"))
    if (entry.path().filename().string().starts_with("ld-")) loader = entry.path().filename();
  ASSERT_FALSE(loader.empty());
  const std::string alone =
      "chroot " + root.string() + " /lib/" + loader + " --library-path /lib /lib/echoline --version > ";
  ASSERT_EQ(shell(alone + (folder.path() / "alone").string()), 0);
  EXPECT_EQ(*read_file(folder.path() / "alone"), *read_file(folder.path() / "version"));
}

TEST(Bundle, WithoutTheEngineItIsSmall) {
  const TemporaryFolder folder;
  const fs::path archive = folder.path() / "bundle.tar.gz", root = folder.path() / "echoline-worker";
  const Outcome made = run_program({"bundle", "--without-engine", "-o", archive.string()}, std::chrono::seconds(120));
  ASSERT_EQ(made.status, 0) << made.err;
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(fs::file_size(archive), 30'000'000u) << "in the format that every machine can unpack";
#endif
  ASSERT_EQ(shell("tar xf " + archive.string() + " -C " + folder.path().string()), 0);
  for (const auto& entry : fs::directory_iterator(root / "lib"))
    EXPECT_EQ(entry.path().filename().string().find("torch"), std::string::npos) << entry.path();
  EXPECT_EQ(shell("env -i PATH=/bin:/usr/bin " + (root / "bin/echoline").string() + " --version > /dev/null"), 0);
  if (kWithTorch) {  // the missing engine is reported before the worker joins
    EXPECT_EQ(shell((root / "bin/echoline").string() + " worker --join 127.0.0.1:1 --token t 2> " +
                    (folder.path() / "said").string()),
              2);
    EXPECT_NE(read_file(folder.path() / "said")->find("--without-engine"), std::string::npos);
  }
}

TEST(Bundle, AnUnwritablePathIsNamed) {
  const Outcome nowhere = run_program({"bundle", "-o", "/nonexistent/folder/bundle.tar"});
  EXPECT_EQ(nowhere.status, 1);
  EXPECT_NE(nowhere.err.find("/nonexistent/folder"), std::string::npos) << nowhere.err;
}

}  // namespace
}  // namespace echoline::testing
