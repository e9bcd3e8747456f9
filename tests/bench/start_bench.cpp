// Measures the cost of starting the program: time, memory and libraries of `echoline --version`. The baseline also
// loads the libtorch module at start, as if the program were linked with libtorch.
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/program_module.hpp"
#include "tests/bench/measure.hpp"

using namespace echoline;

namespace {

namespace fs = std::filesystem;

struct Start {
  double wall_s = 0, cpu_s = 0, memory_mb = 0;
};

// `log`: a folder for the loader's log of opened files; empty: no log.
Start start(const std::string& preload, const fs::path& log) {
  Start found;
  rusage used{};
  found.wall_s = bench::seconds_of([&] {
    const pid_t pid = ::fork();
    if (pid == 0) {
      if (!preload.empty()) ::setenv("LD_PRELOAD", preload.c_str(), 1);
      if (!log.empty()) {
        ::setenv("LD_DEBUG", "files", 1);
        ::setenv("LD_DEBUG_OUTPUT", (log / "loader").c_str(), 1);
      }
      ::dup2(::open("/dev/null", O_WRONLY), STDOUT_FILENO);
      ::execl(ECHOLINE_PROGRAM, ECHOLINE_PROGRAM, "--version", nullptr);
      ::_exit(127);
    }
    int raw = 0;
    if (::wait4(pid, &raw, 0, &used) != pid || raw != 0) {
      fmt::print(stderr, "start_bench: {} --version failed with status {}\n", ECHOLINE_PROGRAM, raw);
      std::exit(1);
    }
  });
  const auto of = [](const timeval& t) { return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6; };
  found.cpu_s = of(used.ru_utime) + of(used.ru_stime);
  found.memory_mb = static_cast<double>(used.ru_maxrss) * 1024 / 1e6;
  return found;
}

std::size_t libraries(const std::string& preload) {
  std::string name = (fs::temp_directory_path() / "echoline-start-XXXXXX").string();
  const fs::path folder = ::mkdtemp(name.data());
  start(preload, folder);
  std::set<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    std::ifstream in(entry.path());
    for (std::string line; std::getline(in, line);)
      if (const std::size_t at = line.find("calling init: "); at != std::string::npos) found.insert(line.substr(at));
  }
  fs::remove_all(folder);
  return found.size();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("The cost of starting the program, without and with libtorch.");
  int times = 20;
  app.add_option("--times", times, "starts of each kind, in turn")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  std::vector<std::string> preloads{""};
  if (const auto module = find_module(ECHOLINE_PROGRAM, kTorchModule)) preloads.push_back(module->string());
  std::vector<std::vector<double>> wall(preloads.size()), cpu(preloads.size()), memory(preloads.size());
  for (int i = 0; i < times; ++i)
    for (std::size_t k = 0; k < preloads.size(); ++k) {
      const Start s = start(preloads[k], {});
      wall[k].push_back(s.wall_s);
      cpu[k].push_back(s.cpu_s);
      memory[k].push_back(s.memory_mb);
    }
  fmt::print("{:<22}{:>12}{:>12}{:>12}{:>12}\n", "echoline --version", "wall ms", "CPU ms", "memory MB", "libraries");
  for (std::size_t k = 0; k < preloads.size(); ++k)
    fmt::print("{:<22}{:>12.1f}{:>12.1f}{:>12.1f}{:>12}\n", k == 0 ? "as it is" : "with libtorch",
               1e3 * bench::median(wall[k]), 1e3 * bench::median(cpu[k]), bench::median(memory[k]),
               libraries(preloads[k]));
}
