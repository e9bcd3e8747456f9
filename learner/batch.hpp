// Checks trajectories before training, and computes a step's figures from them, without tensors. Private to learner/.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "base/result.hpp"
#include "data_plane/trajectory.hpp"
#include "model/config.hpp"

namespace echoline::learner {

// kInvalid if a model of this shape could not train on the trajectory.
Status check_trainable(const schema::Trajectory& trajectory, const model::ModelConfig& shape);

// A learner step's figures that need only its trajectories, as in docs/run-folder.md: rewards, lengths, groups with
// different rewards. `batch` is not empty.
nlohmann::json batch_figures(const std::vector<schema::Trajectory>& batch);

}  // namespace echoline::learner
