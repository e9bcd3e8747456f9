// The overlay of a run: its options, and the figures of a broadcast. Private to learner/.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "chains/broadcast_model.hpp"
#include "learner/run_config.hpp"
#include "overlay/uv/node.hpp"
#include "provisioner/plan.hpp"

namespace echoline::learner {

// `run_folder`: where the overlay keeps its files. `resumed_at`: the newest version of a run that goes on.
Result<overlay::LearnerOptions> overlay_options(const RunConfig& config, const provisioner::Plan& plan,
                                                const std::filesystem::path& run_folder,
                                                std::optional<Version> resumed_at);

// The row of metrics.jsonl for a broadcast. `links`: those of the topology's workers, in order. `nodes_up`: the uplinks
// of the trainer's nodes, which feed workers as the learner does.
nlohmann::json broadcast_row(const RunConfig& config, const overlay::BroadcastReport& report,
                             std::span<const chains::WorkerLink> links, BitRate nodes_up);

}  // namespace echoline::learner
