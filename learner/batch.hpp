// What can be said without a tensor of trajectories that are to be trained on. Private to learner/.
#pragma once
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "base/result.hpp"
#include "data_plane/trajectory.hpp"
#include "model/config.hpp"

namespace echoline::learner {

// Whether a step of a model of this shape could train on it, kInvalid when not.
Status check_trainable(const schema::Trajectory& trajectory, const model::ModelConfig& shape);

// The figures of a learner step that its trajectories alone have, as docs/run-folder.md says: rewards, lengths, groups
// that differ. `batch` is not empty.
nlohmann::json batch_figures(const std::vector<schema::Trajectory>& batch);

}  // namespace echoline::learner
