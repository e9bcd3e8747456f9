// A batch as an external trainer gets it: one safetensors file, which numpy reads without copying.
#pragma once
#include <string>
#include <vector>

#include "base/result.hpp"
#include "data_plane/trajectory.hpp"

namespace echoline::learner {

// n trajectories in the order given, P prompt tokens, N response tokens in all. docs/trainers.md has the table:
//   prompt_tokens I32 [P], prompt_ends I64 [n]            where each prompt ends
//   response_tokens I32 [N], response_ends I64 [n]
//   logprobs F32 [N], versions I64 [N], loss_mask U8 [N]  of each response token
//   group, member, worker I64 [n], reward F64 [n], correct, finished U8 [n]
// and in the metadata "problems": a JSON list of the problems' ids. kInvalid for an empty batch, kExhausted for one
// that does not fit into memory.
Result<std::string> pack_batch(const std::vector<schema::Trajectory>& batch);

}  // namespace echoline::learner
