// Checks the sequences for an inference server and the pieces of responses that it returns, and joins the pieces.
// Private to worker/engines/.
#pragma once
#include <string_view>
#include <vector>

#include "base/result.hpp"
#include "model/config.hpp"
#include "worker/engine.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {

struct Task;

// kInvalid: the model cannot compute the sequence, or it has settings of its own. `server`: the kind, for the error.
Status check_sequence(const Sequence& sequence, const model::ModelConfig& model, std::string_view server);

// Appends all tokens of the answer to `response`, or none if a check fails (kCorrupt). `versions`: the versions under
// which the answer's tokens were sampled.
Status append_sampled(const Task& task, const SampleRequest& sample_request, const SampleResponse& sampled,
                      const std::vector<Span>& versions, Response& response);

}  // namespace echoline::worker
