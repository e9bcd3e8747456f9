// The libraries that the program loads: libtorch only for verbs that compute in tensors.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <set>

#include "base/files.hpp"
#include "tests/cli/program.hpp"

namespace echoline::testing {
namespace {

namespace fs = std::filesystem;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

struct StartedProgram {
  int status = -1;
  std::set<std::string> libraries;  // names of the files that the loader opened
  long memory_kib = 0;              // largest resident set, at least that of this process before exec
};

// Runs the program with the loader's log of opened files.
StartedProgram start_program(const std::vector<std::string>& arguments) {
  const TemporaryFolder folder;
  std::vector<std::string> words{ECHOLINE_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::setenv("LD_DEBUG", "files", 1);
    ::setenv("LD_DEBUG_OUTPUT", (folder.path() / "loader").c_str(), 1);
    const int null = ::open("/dev/null", O_RDWR);
    for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) ::dup2(null, fd);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  StartedProgram program;
  int raw = 0;
  rusage used{};
  if (::wait4(pid, &raw, 0, &used) != pid) return program;
  program.status = WIFEXITED(raw) ? WEXITSTATUS(raw) : 128 + WTERMSIG(raw);
  program.memory_kib = used.ru_maxrss;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    const auto log = read_file(entry.path());
    if (!log) continue;
    constexpr std::string_view kMark = "file=";
    for (std::size_t position = 0; (position = log->find(kMark, position)) != std::string::npos;) {
      position += kMark.size();
      const fs::path file = log->substr(position, log->find(' ', position) - position);
      program.libraries.insert(file.filename());
    }
  }
  return program;
}

bool has_torch(const StartedProgram& program) {
  for (const std::string& name : program.libraries)
    if (name.starts_with("libtorch") || name == "echoline_torch.so") return true;
  return false;
}

TEST(Start, VerbsThatComputeInNoTensorLoadNoLibtorch) {
  const TemporaryFolder folder;
  const std::string model = (folder.path() / "model").string();
  for (const std::vector<std::string>& arguments : std::vector<std::vector<std::string>>{
           {"--version"},
           {"--help"},
           {"plan", "configs/quickstart.yaml"},
           {"config"},
           {"sim", "--workers", "2", "--payload", "1 kB"},
           {"adapter", "list"},
           {"model", "init", model},
           {"model", "info", model},
           {"status", "/nonexistent"},
           {"report", "/nonexistent"},
           {"delta", "--help"},
           {"bundle", "--without-engine", "-o", "/nonexistent/bundle.tar"},
           {"worker", "--join", "nowhere", "--engine", "vllm"},
       }) {
    const StartedProgram program = start_program(arguments);
    EXPECT_NE(program.status, 127);
    EXPECT_TRUE(program.libraries.contains("libc.so.6")) << arguments[0] << ": the loader's log was not found";
    EXPECT_FALSE(has_torch(program)) << arguments[0];
  }
}

TEST(Start, VersionNeedsLittleMemoryAndFewLibraries) {
  const StartedProgram program = start_program({"--version"});
  EXPECT_EQ(program.status, 0);
  EXPECT_LT(program.libraries.size(), 80u);
  if (kSanitized) GTEST_SKIP() << "sanitizers need memory of their own";
  EXPECT_LT(program.memory_kib, 30 * 1024);
}

TEST(Start, DoctorFindsTheModule) {
  if (!kWithTorch) GTEST_SKIP() << "built without libtorch";
  const StartedProgram program = start_program({"doctor"});
  EXPECT_TRUE(has_torch(program));
}

TEST(Start, AMissingModuleIsNamed) {
  if (!kWithTorch) GTEST_SKIP() << "built without libtorch";
  const TemporaryFolder folder;
  ::setenv("ECHOLINE_PROGRAM", (folder.path() / "bin/echoline").c_str(), 1);  // as the launcher of a bundle does
  const Outcome worker = run_program({"worker", "--join", "127.0.0.1:1", "--token", "t"});
  const Outcome learner = run_program({"learner", "configs/quickstart.yaml"});
  ::unsetenv("ECHOLINE_PROGRAM");
  for (const Outcome& outcome : {worker, learner}) {
    EXPECT_EQ(outcome.status, 2);
    EXPECT_NE(outcome.err.find((folder.path() / "lib/echoline/echoline_torch.so").string()), std::string::npos)
        << outcome.err;
  }
}

}  // namespace
}  // namespace echoline::testing
