// Checks the pieces of responses that an inference server returns, and joins them. Private to worker/engines/.
#pragma once
#include <vector>

#include "base/result.hpp"
#include "worker/engine.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {

struct Task;

// Appends all tokens of the answer to `response`, and none if a check fails (kCorrupt). `versions`: the versions under
// which the tokens were sampled.
Status append_sampled(const Task& task, const SampleRequest& sample_request, const SampleResponse& sampled,
                      const std::vector<Span>& versions, Response& response);

}  // namespace echoline::worker
