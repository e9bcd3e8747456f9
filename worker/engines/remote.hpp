// Engines that are HTTP servers: SGLang or vLLM.
#pragma once
#include <memory>

#include "worker/engines/make.hpp"
#include "worker/engines/policy_folder.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {

// An engine with one inference server, which reads a policy folder. Several engines of a worker may share the folder.
// Private to worker/engines/.
class FolderEngine : public Engine {
 public:
  enum class State {
    kStarting,  // there is no policy or no healthy server yet
    kLoading,   // the server loads a policy
    kReady,
    kBroken,  // for good
  };

  virtual State state() const = 0;
  // Call before the folder's files change. In the state kLoading, this resets the engine, which then starts or contacts
  // its server again. To avoid that, first advance() until the state is another one.
  virtual void release_folder() = 0;
  // Begins to load the policy that was installed in the folder from `publication`. advance() continues the load.
  virtual void begin_load(const overlay::Publication& publication) = 0;
  // Handles answers of the server, for which it waits for at most `wait`, and sends what is due.
  virtual void advance(Duration wait) = 0;
};

// Makes an engine that keeps the policy as a directory, which the server reads. With the first policy, the engine
// starts the server or waits for a running one. It lets the server load each installed policy, and verifies the result.
// If the server dies, hangs or has wrong weights, unfinished sequences continue from their last tokens once the server
// works again.
std::unique_ptr<FolderEngine> make_folder_engine(const EngineOptions& options, const Task& task, const EngineHost& host,
                                                 std::unique_ptr<Protocol> protocol,
                                                 std::shared_ptr<PolicyFolder> folder);

// Makes the engine of a worker that generates with inference servers: a folder engine, or a set of them that share the
// folder. kInvalid: the server cannot report log-probabilities for the run's sampling, or there are too few GPUs.
Result<std::unique_ptr<Engine>> make_remote_engine(const EngineOptions& options, const Task& task,
                                                   const EngineHost& host);

}  // namespace echoline::worker
