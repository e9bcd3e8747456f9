// A task that is a program in a sandbox, whatever it is that runs there: supplies problems to the learner, scores
// responses or plays episodes on the workers. Private to data_plane/.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data_plane/adapters/adapter_config.hpp"
#include "data_plane/sandbox/sandbox.hpp"

namespace echoline::data_plane::process {

// Options that all such tasks have.
struct TaskOptions {
  std::vector<std::string> readable;
  std::string settings_json = "{}";
  std::uint32_t processes = 1, batch = 64;
  Duration deadline = std::chrono::seconds(30), start_deadline = std::chrono::seconds(30);
  Bytes memory{512u << 20};
  std::uint32_t threads = 64;

  void read(ConfigSection& s);
};

// Starts it. `command`: what runs, with its files; the options' limits are set here. `name`: the adapter's, which
// outlives it. `for_workers`: the options that workers make theirs from.
Result<std::unique_ptr<Adapter>> make_task(std::string_view name, sandbox::Command command, const TaskOptions& options,
                                           std::string for_workers, std::uint64_t seed, AdapterUse use);

}  // namespace echoline::data_plane::process
