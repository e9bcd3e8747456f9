// A run's task and phrasing, for any trainer: the model's files without its weights, the prompt format, and the task's
// problems. Private to learner/.
#pragma once
#include <memory>
#include <vector>

#include "data_plane/adapters/adapter.hpp"
#include "learner/run_config.hpp"
#include "learner/submission_checker.hpp"
#include "model/model_files.hpp"
#include "model/phrasing.hpp"

namespace echoline::learner {

// Makes the adapter of the run's task, with all its problems.
Result<std::unique_ptr<data_plane::Adapter>> make_task_adapter(const RunConfig& config);

struct RunTask {
  static Result<RunTask> read(const RunConfig& config);

  model::ModelFiles files;
  model::Phrasing phrasing;
  std::unique_ptr<data_plane::Adapter> adapter;
  std::vector<schema::Problem> evaluation;  // the held-out problems on which the run evaluates

  // Makes the check of workers' submissions, from the model's phrasing and the task. It refers to the adapter.
  SubmissionChecker make_submission_checker(const RunConfig& config) const;
  // Fills in the parts of the run's specification on the model and the task.
  void describe(const RunConfig& config, schema::RunSpec& spec) const;
};

}  // namespace echoline::learner
