// A child process that ends, with its descendants, when this process ends. Private to worker/.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace echoline::worker {

// Returns a port of this machine without a listener; 0 if there is none.
int free_port();
// Replaces {model} by the quoted path of the folder, {port} by `port`, and {gpus} by `gpus`, the number of the server's
// GPUs.
std::string server_command(std::string command, const std::filesystem::path& model_folder, int port, std::size_t gpus);

// A small guard process stands between this process and the child. It waits until one of the two ends. Then the guard
// ends the child's process group: by SIGTERM, and after five seconds by SIGKILL. If this process was killed, the guard
// also removes the folder `remove_after`.
class Child {
 public:
  // Runs `command` in the shell, with its output on this process's standard error. `environment`: variables that
  // replace or extend those of this process. `remove_after`: may be empty.
  static Result<std::unique_ptr<Child>> start(const std::string& command,
                                              const std::vector<std::pair<std::string, std::string>>& environment,
                                              const std::filesystem::path& remove_after);
  ~Child();  // ends the child; waits up to 6 s: five until SIGKILL, and one for the guard to notice
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // How the child ended, such as "exited with status 1"; absent while it runs.
  std::optional<std::string> how_ended();

 private:
  Child(int guard, int socket) : guard_(guard), socket_(socket) {}
  int guard_, socket_;  // process id; file descriptor whose closing makes the guard end the child
  std::optional<std::string> how_ended_;
};

}  // namespace echoline::worker
