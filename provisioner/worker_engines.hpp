// The engines that a worker runs on a rented machine. They decide the throughput that a plan pays for.
#pragma once
#include <optional>
#include <string>

namespace echoline::provisioner {

struct WorkerEngines {
  std::string name = "vllm";  // builtin, sglang or vllm: of WorkerSection, and of a throughput profile
  bool on_cpu = false;        // only the built-in engine; the GPUs are idle then
  int gpus_per_engine = 1;
  std::optional<int> count = {};  // engines of a machine; absent: as many as its GPUs suffice for

  bool is_builtin() const { return name == "builtin"; }
  // As ledgers record it: a measurement corrects only predictions of the same engines.
  std::string text() const { return on_cpu ? name + " on a CPU" : name; }
  // Number of engines on a machine with so many GPUs; 0: it has too few.
  int count_on(int gpu_count) const {
    const int most = gpu_count / gpus_per_engine;
    const int wanted = count.value_or(most);
    return wanted <= most ? wanted : 0;
  }
  int gpus_used_on(int gpu_count) const { return on_cpu ? 0 : count_on(gpu_count) * gpus_per_engine; }
};

}  // namespace echoline::provisioner
