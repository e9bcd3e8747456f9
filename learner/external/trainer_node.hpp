// The node process of a trainer whose ranks run on several machines: `echoline node`. It serves the ranks of its
// machine the calls for publishing, and passes them to the learner. It also receives every publication and forwards it
// to workers.
#pragma once
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <string>

#include "base/result.hpp"
#include "overlay/uv/node.hpp"

namespace echoline::learner {

struct TrainerNodeOptions {
  overlay::WorkerOptions overlay;  // `name` begins with overlay::kTrainerNodePrefix
  // The ranks of this machine name this folder where they would name the run's. It gets the socket and its address.
  std::filesystem::path folder;
  // Calls of ranks fail if the learner is out of reach for longer; their client then repeats them.
  Duration patience = std::chrono::seconds(60);
};

struct TrainerNodeReport {
  std::uint64_t calls = 0;          // of ranks
  std::uint64_t publications = 0;   // received whole
  Bytes received{0}, forwarded{0};  // of publications
  std::string reason;               // for the end
  bool ended_cleanly = true;        // false: the node has lost its learner for good
};

// Runs until the learner ends the run or is lost for good, or `stop` turns true. kInvalid: the learner refuses the
// node, or the run's trainer has no ranks.
Result<TrainerNodeReport> run_trainer_node(const TrainerNodeOptions& options, const std::atomic<bool>& stop);

}  // namespace echoline::learner
