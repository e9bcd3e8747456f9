// The HTTP+JSON interface for external trainers, on a unix socket, or on loopback with a token: docs/trainers.md.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/result.hpp"
#include "base/units.hpp"
#include "learner/external/trainer_link.hpp"

namespace echoline::learner {

struct ApiOptions {
  // "socket": a unix socket in `folder`, for its owner only. HOST:PORT: an address of this machine, with a token; port
  // 0: any free port.
  std::string listen = "socket";
  std::filesystem::path folder;  // of the run
  Bytes body_max{1ull << 40};
  Duration idle_max = std::chrono::minutes(10);  // of a connection between two calls
  // Timeout of a call's body, and of its answer; a second more is allowed per 10 MB.
  Duration stall_max = std::chrono::seconds(60);
  nlohmann::json run_facts;  // the run's constant facts, for answers to /v1/status
  // Reads the policy of `version` from the bytes of a safetensors file. Returns an error if workers could not generate
  // with it. Called on any thread, as are the next two.
  std::function<Result<delta::OwnedState>(Version version, std::string bytes)> parse_policy;
  // The same from the path of a file or folder. `strip_prefix` is removed from the tensors' names.
  std::function<Result<delta::OwnedState>(Version version, const std::filesystem::path& path,
                                          const std::string& strip_prefix)>
      read_policy;
  // Checks a policy that was joined from the shards of several ranks, and returns it.
  std::function<Result<delta::OwnedState>(Version version, const delta::OwnedState& joined)> check_policy;
  // Returns the held-out problems, for a trainer that evaluates. Called on any thread.
  std::function<nlohmann::json()> held_out;
  // Grades the trainer's answer: {"responses": {problem: tokens or text}}, or the trainer's own figures {"accuracy",
  // "problems", "reward_mean"}. Called on any thread.
  std::function<Result<PolicyEvaluation>(const nlohmann::json& body)> grade;
};

// Answers on its own threads until it is destroyed.
class Api {
 public:
  // kInvalid for an address that is malformed, not of this machine, or taken; kIo.
  static Result<std::unique_ptr<Api>> start(ApiOptions options, TrainerLink& trainer_link);
  ~Api();
  Api(const Api&) = delete;
  Api& operator=(const Api&) = delete;
  // The address for clients, as in the file kTrainerAddressFile.
  const nlohmann::json& address() const;

 private:
  struct State;
  explicit Api(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace echoline::learner
