// The HTTP interface for Tinker's Python client, on an address of this machine with a key: docs/how-to/
// train-with-tinker.md.
#pragma once
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/result.hpp"
#include "learner/external/tinker_link.hpp"
#include "learner/sample_desk.hpp"

namespace echoline::learner::tinker {

struct ServerOptions {
  std::string listen = "127.0.0.1:0";  // port 0: any free port
  std::string key;                     // empty: a new random one
  std::string base_model;              // the name of the run's model
  std::string tokenizer;               // a folder that the client's transformers can load
  std::int64_t adapter_rank = 0;
  bool adapts_mlp = false, adapts_attention = false, adapts_unembedding = false;
  Limits limits;
  std::vector<model::Token> ending_tokens;  // the run's
  std::function<std::size_t()> workers;     // how many are connected; any thread
};

// Any thread; runs until it is destroyed.
class Server {
 public:
  // The link and the desk outlive the server.
  static Result<std::unique_ptr<Server>> start(ServerOptions options, TinkerLink& link, SampleDesk& samples);
  ~Server();
  // The url and the key for clients.
  const nlohmann::json& address() const;

 private:
  struct State;
  explicit Server(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

// The answers to a finished request.
Answer sample_answer(const std::vector<Sample>& samples);
Answer forward_backward_answer(const DatumBatch& batch, const DatumResult& result);

}  // namespace echoline::learner::tinker
