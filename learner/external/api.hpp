// The HTTP+JSON interface for external trainers, on a unix socket, or on loopback with a token: docs/trainers.md.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/result.hpp"
#include "base/units.hpp"
#include "learner/external/node_calls.hpp"
#include "learner/external/trainer_link.hpp"

namespace echoline::learner {

struct TrainerServerOptions {
  // "socket": a unix socket in `folder`, for its owner only. HOST:PORT: an address of this machine, with a token; port
  // 0: any free port.
  std::string listen = "socket";
  std::filesystem::path folder;                  // of the run
  Bytes body_max{1ull << 40};                    // of one call
  Duration idle_max = std::chrono::minutes(10);  // of a connection between two calls
  // The time limit for a call's body, and that for its answer, is this plus one second per 10 MB.
  Duration transfer_time_base = std::chrono::seconds(60);
  nlohmann::json run_facts;  // what does not change during the run, such as its name; part of answers to /v1/status
  // Reads the policy of `version` from the bytes of a safetensors file. Returns an error if workers could not generate
  // with it. The policy may share the bytes' memory. Called on any thread, as are the next two.
  std::function<Result<delta::OwnedState>(Version version, const overlay::Slice& bytes)> parse_policy;
  // Reads the policy of `version` from a file or folder instead. `strip_prefix` is removed from the tensors' names.
  std::function<Result<delta::OwnedState>(Version version, const std::filesystem::path& path,
                                          const std::string& strip_prefix)>
      read_policy;
  // Checks a policy that was joined from the shards of several ranks, and returns it.
  std::function<Result<delta::OwnedState>(Version version, delta::OwnedState joined)> check_policy;
  // Returns the held-out problems, for a trainer that evaluates. Called on any thread.
  std::function<nlohmann::json()> held_out;
  // Returns the evaluation of a policy: grades the responses {"responses": {problem: tokens or text}}, or takes the
  // trainer's own figures {"accuracy", "problems", "reward_mean"}. Called on any thread.
  std::function<Result<PolicyEvaluation>(const nlohmann::json& body)> grade;
};

// The HTTP server for external trainers. It answers on its own threads until it is destroyed.
class TrainerServer {
 public:
  // kInvalid: the address is malformed, not of this machine, or taken. kIo: the socket cannot be made.
  static Result<std::unique_ptr<TrainerServer>> start(TrainerServerOptions options, TrainerLink& trainer_link);
  ~TrainerServer();
  TrainerServer(const TrainerServer&) = delete;
  TrainerServer& operator=(const TrainerServer&) = delete;
  // Answers a call that came over a node of the trainer; any thread. /v1/status and shards only.
  TrainerAnswer answer_node(TrainerCall call);
  // The address for clients, as in the file kTrainerAddressFile.
  const nlohmann::json& address() const;

 private:
  struct State;
  explicit TrainerServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace echoline::learner
