// A process of this one, with whatever it starts, that does not outlive it. Private to worker/.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.hpp"

namespace echoline::worker {

// A small process stands between: it waits for the end of either, then ends the other with its process group: by
// SIGTERM, and after five seconds by SIGKILL. Where this process was the one that died, it removes a folder that this
// one left.
class Child {
 public:
  // Runs `command` by the shell, with its output on our standard error. `environment` is added to ours.
  static Result<std::unique_ptr<Child>> start(const std::string& command,
                                              const std::vector<std::pair<std::string, std::string>>& environment,
                                              const std::filesystem::path& remove_after);
  ~Child();  // ends it; waits up to 6 s
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // How it ended, once it has: "exited with status 1".
  std::optional<std::string> ended();

 private:
  Child(int guard, int socket) : guard_(guard), socket_(socket) {}
  int guard_, socket_;
  std::optional<std::string> ended_;
};

}  // namespace echoline::worker
