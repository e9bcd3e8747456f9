// From leases to scored rollouts, without a network: encoding, generation, scoring, and what becomes of work that fails.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/adapters/adapter.hpp"
#include "data_plane/schema.pb.h"
#include "model/generate.hpp"
#include "model/phrasing.hpp"

namespace echoline::worker {

// What the run told this worker, made usable.
struct Task {
  schema::RunSpec spec;
  std::unique_ptr<data_plane::Adapter> adapter;
  std::optional<model::Phrasing> phrasing;
  std::shared_ptr<model::Transformer> model;
  model::SamplingOptions sampling;
};

Result<Task> make_task(schema::RunSpec spec);

// Every lease of a batch is in exactly one of the two lists, unless the work was interrupted.
struct Produced {
  std::vector<schema::Submission> submissions;
  std::vector<schema::WorkFailed> failures;
  std::uint64_t rollouts = 0;  // in `submissions`
  bool interrupted = false;    // nothing of the batch is to be used
};

// Generates whole batches where it can. A bad group is found by generating each group alone, a batch that does not fit
// into memory is halved, down to one rollout, and the size that worked is remembered for the batches after it (twice as
// much is tried now and then). Never fails itself: a group that cannot be had is reported as such. One thread.
class Producer {
 public:
  using Generate = std::function<Result<std::vector<model::Generation>>(
      const std::vector<std::vector<model::Token>>& prompts, const model::SamplingOptions& options,
      const std::function<bool()>& interrupted)>;

  // The task must outlive the producer. Without `generate`, the task's model generates.
  explicit Producer(const Task& task, Generate generate = {});

  // `tick` is called whenever some work has been done; true interrupts.
  Produced produce(const std::vector<schema::Lease>& leases, WorkerId worker, const std::function<bool()>& tick);

  // Rollouts that are generated together at most; absent as long as memory has sufficed.
  std::optional<std::size_t> rows_max() const { return rows_max_; }

 private:
  struct Batch;
  void generate_rows(Batch& batch, std::size_t begin, std::size_t end);
  void out_of_memory(Batch& batch, std::size_t begin, std::size_t end, const Error& error);
  schema::Submission scored(const Batch& batch, std::size_t lease, WorkerId worker) const;

  const Task& task_;
  Generate generate_;
  std::optional<std::size_t> rows_max_;
  std::uint32_t full_batches_ = 0;  // of rows_max_ rollouts that succeeded in a row
};

}  // namespace echoline::worker
