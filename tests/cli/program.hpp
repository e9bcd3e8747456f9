// Runs the built program in tests, and reads its files.
#pragma once
#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace echoline::testing {

// Whether the program has the built-in trainer and engine (ECHOLINE_TORCH).
inline constexpr bool kWithTorch = ECHOLINE_WITH_TORCH;

struct Outcome {
  int status = -1;  // exit code; 128 + signal when it was killed
  std::string out, err;
};

// A run of the program with captured output. The destructor kills what still runs.
class Program {
 public:
  // The program's standard input is empty, or with `own_input` this process's.
  explicit Program(const std::vector<std::string>& arguments, bool own_input = false);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  void signal(int number) const;
  // Waits for the end; after `limit` the program is killed and the status is 128 + SIGKILL.
  Outcome wait(std::chrono::seconds limit);
  bool running();

 private:
  pid_t pid_ = -1;
  int raw_status_ = 0;
  std::filesystem::path out_, err_;
};

Outcome run_program(const std::vector<std::string>& arguments, std::chrono::seconds limit = std::chrono::seconds(60),
                    bool own_input = false);

// Calls `condition` every few milliseconds until it is true or `limit` is over. Returns whether it was true.
bool eventually(std::chrono::seconds limit, const std::function<bool()>& condition);

// A new folder, removed with everything in it at the end.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// The file as JSON; null if it does not exist or is not JSON (yet).
nlohmann::json json_file(const std::filesystem::path& path);
std::vector<nlohmann::json> json_lines(const std::filesystem::path& path);

// Processes of a run by their rented offer, from its events.
std::vector<std::pair<std::string, pid_t>> rented_processes(const std::filesystem::path& run_folder);
bool alive(pid_t pid);

// A port of this machine that was free a moment ago.
std::uint16_t free_port();

}  // namespace echoline::testing
