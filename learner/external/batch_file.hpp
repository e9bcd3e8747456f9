// A batch for an external trainer: one safetensors file, which numpy reads without copying.
#pragma once
#include <string>
#include <vector>

#include "base/result.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::learner {

// The file has n trajectories in the given order, with P prompt tokens and N response tokens in all, as
// docs/trainers.md describes:
//
//   prompt_tokens I32 [P], prompt_ends I64 [n]            where each prompt ends
//   response_tokens I32 [N], response_ends I64 [n]
//   logprobs F32 [N], versions I64 [N], loss_mask U8 [N]  of each response token
//   group, member, worker I64 [n], reward F64 [n], correct, finished U8 [n]
//   routed_experts I16 [P + N, layers, experts per token]: of each trajectory's prompt, then of its response; -1: not
//     known. Only if the engine told the experts of at least one trajectory.
//
// The metadata's "problems" is a JSON list of the problems' ids. kInvalid for an empty batch; kExhausted if it does
// not fit into memory.
Result<std::string> pack_batch(const std::vector<schema::Trajectory>& batch);

}  // namespace echoline::learner
