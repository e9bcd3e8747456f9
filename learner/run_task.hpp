// What the policies of a run are asked, and in whose tokens: the model's files but not its weights, how problems are
// put to it, and the task's problems. The same whoever trains. Private to learner/.
#pragma once
#include <memory>
#include <vector>

#include "data_plane/adapters/adapter.hpp"
#include "learner/door.hpp"
#include "learner/run_config.hpp"
#include "model/model_files.hpp"
#include "model/phrasing.hpp"

namespace echoline::learner {

// The run's task, its problems and all.
Result<std::unique_ptr<data_plane::Adapter>> run_adapter(const RunConfig& config);

struct RunTask {
  static Result<RunTask> read(const RunConfig& config);

  model::ModelFiles files;
  model::Phrasing phrasing;
  std::unique_ptr<data_plane::Adapter> adapter;
  std::vector<schema::Problem> evaluation;  // held-out problems, as many as the run wants

  // What workers hand in is looked at with the model's and the task's own eyes. It refers to the adapter.
  Door door(const RunConfig& config) const;
  // The part of the run's specification that is about the model and the task.
  void describe(const RunConfig& config, schema::RunSpec& spec) const;
};

}  // namespace echoline::learner
