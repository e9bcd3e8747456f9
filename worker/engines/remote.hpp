// An engine that is an HTTP server: SGLang or vLLM.
#pragma once
#include <memory>

#include "worker/engines/make.hpp"

namespace echoline::worker {

// Implements Engine. It keeps the policy as a directory that the server reads. It starts the server with the first
// policy, or waits for a running one, has it load each installed policy, and verifies the result. If the server dies,
// hangs or has wrong weights, the sequences inside are continued later from their last tokens. kInvalid: the engine
// cannot report log-probabilities for the run's sampling.
Result<std::unique_ptr<Engine>> make_remote_engine(const EngineOptions& options, const Task& task,
                                                   const EngineHost& host);

}  // namespace echoline::worker
