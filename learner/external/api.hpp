// The HTTP+JSON interface for external trainers, on a unix socket or on loopback with a token: docs/trainers.md.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/result.hpp"
#include "base/units.hpp"
#include "learner/external/exchange.hpp"

namespace echoline::learner {

struct ApiOptions {
  // "socket": a unix socket in `folder`, for its owner only; or HOST:PORT of this machine, with a token. Port 0: any
  // free one.
  std::string listen = "socket";
  std::filesystem::path folder;  // of the run
  Bytes body_max{1ull << 40};
  Duration idle_max = std::chrono::minutes(10);  // of a connection, between two calls
  Duration stall_max =
      std::chrono::seconds(60);  // a call's body, or its answer, takes no longer than this and a second per 10 MB
  nlohmann::json about;          // what never changes of a run, in answers to /v1/status
  // Bytes of a safetensors file, or a path of one or of a folder, as the run's policy of `version`, which workers can
  // generate with. Of any thread.
  std::function<Result<delta::OwnedState>(Version version, std::string bytes)> parse_policy;
  std::function<Result<delta::OwnedState>(Version version, const std::filesystem::path& path)> read_policy;
  // What a trainer has to know that evaluates, and what its answers are worth: {"responses": {problem: tokens or
  // text}}, or its own word {"accuracy", "problems", "reward_mean"}. Of any thread.
  std::function<nlohmann::json()> held_out;
  std::function<Result<PolicyEvaluation>(const nlohmann::json& body)> grade;
};

// Answers on threads of its own until it is destroyed.
class Api {
 public:
  // kInvalid for an address that is none, not of this machine, or taken; kIo.
  static Result<std::unique_ptr<Api>> start(ApiOptions options, Exchange& exchange);
  ~Api();
  Api(const Api&) = delete;
  Api& operator=(const Api&) = delete;
  // What a client has to know, as it stands in the file kTrainerAddressFile.
  const nlohmann::json& address() const;

 private:
  struct State;
  explicit Api(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace echoline::learner
