// An engine that is a server, over HTTP: SGLang or vLLM.
#pragma once
#include <memory>

#include "worker/engines/make.hpp"

namespace echoline::worker {

// As Engine says, and: it keeps the policy as a directory that the server reads, starts the server with the first
// policy (or waits for one that is started by others), lets it load what is installed, and looks whether it has. Where
// the server dies, hangs or has other weights than it should, what is inside is drawn again elsewhere or later, from
// where it was. kInvalid: the run samples in a way that such an engine does not report the log-probabilities of.
Result<std::unique_ptr<Engine>> make_remote_engine(const EngineOptions& options, const Task& task,
                                                   const EngineHost& host);

}  // namespace echoline::worker
