// A task that runs as a program in a sandbox (a user's program or a shared library). It supplies problems to the
// learner, and scores responses or plays episodes on the workers. Private to data_plane/.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/sandbox/sandbox.hpp"

namespace echoline::data_plane::process {

struct TaskOptions {
  std::vector<std::string> readable;  // folders that the program may read besides the system's
  std::string settings_json = "{}";
  std::uint32_t processes = 1;                         // copies of the program
  std::uint32_t batch = 64;                            // responses in a request, at most
  Duration deadline = std::chrono::seconds(30);        // time-out of each request
  Duration start_deadline = std::chrono::seconds(30);  // time-out from the program's start to its hello
  Bytes memory{512u << 20};                            // of a program with its child processes
  std::uint32_t threads = 64;                          // threads and processes of a program

  void read(ConfigSection& s);
};

// Starts the task. `command`: the program and its files; this function sets the options' limits. `name`: the adapter's
// name, which must outlive the task. `worker_options`: the options for a worker's copy.
Result<std::unique_ptr<Adapter>> make_task(std::string_view name, sandbox::Command command, const TaskOptions& options,
                                           std::string worker_options, std::uint64_t seed, AdapterUse use);

}  // namespace echoline::data_plane::process
