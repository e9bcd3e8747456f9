// What an inference server is asked and what it answers, as bytes; no network. Private to worker/.
#pragma once
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "model/config.hpp"

namespace echoline::worker {

struct Call {
  std::string method, path, body;
};

// The next tokens of a sequence. Every token of the vocabulary may come: top_p and the like are not asked for.
struct Draw {
  std::vector<model::Token> context;  // the prompt and what was drawn after it
  std::int64_t tokens_max = 0;
  std::uint64_t seed = 0;
  double temperature = 1;
  std::vector<model::Token> ends;  // a response ends with the first of these
  std::vector<std::string> stop;   // or when its text contains one of these
};

struct Piece {
  std::vector<model::Token> tokens;
  std::vector<double> logprobs;
  bool aborted = false;
  std::optional<std::string> weights;  // the version that the server says it has
};

struct Probed {
  std::vector<double> logprobs;  // of all tokens but the first
  std::optional<std::string> weights;
};

// A call on the way to other weights. What counts as success is for `accepts` to say of an answer with status 200.
struct Step {
  Call call;
  bool optional = false;   // a server that does not know it does without
  bool long_work = false;  // it loads weights
  Status (*accepts)(std::string_view body) = nullptr;
};

// Bodies are read defensively: kCorrupt says what was expected and what was found.
class Protocol {
 public:
  virtual ~Protocol() = default;
  virtual std::string_view name() const = 0;
  virtual std::vector<std::pair<std::string, std::string>> environment() const { return {}; }  // of a child
  virtual Call health() const = 0;                                                             // 200: it can be asked

  virtual Call draw(const Draw& draw) const = 0;
  // Form only: as many log-probabilities as tokens, for the context that was asked about where the server repeats it.
  virtual Result<Piece> drawn(const Draw& draw, std::string_view body) const = 0;

  // Whether its answers name the version of the weights that it was given.
  virtual bool names_versions() const { return false; }
  // Which folder it was started on, where it tells: empty when the answer does not say so.
  virtual std::optional<Call> served_model() const { return std::nullopt; }
  virtual std::filesystem::path served_folder(std::string_view) const { return {}; }

  // What the model says of the tokens of a text.
  virtual Call probe(const std::vector<model::Token>& text) const = 0;
  virtual Result<Probed> probed(const std::vector<model::Token>& text, std::string_view body) const = 0;

  // One token, and how far the most likely token is before the fifth, in nats as log-probabilities are reported.
  virtual Call spread(const std::vector<model::Token>& text, double temperature) const = 0;
  virtual Result<double> spread_of(std::string_view body) const = 0;
  virtual std::string_view temper_how() const = 0;  // what to do where they are not those of the temperature

  // In this order: no response goes on, those under way come back with what they have; other weights; responses are
  // taken again.
  virtual Step pause() const = 0;
  virtual std::vector<Step> load(const std::filesystem::path& folder, Version version) const = 0;
  virtual Step resume() const = 0;
  // What a server that has just begun with the folder is told.
  virtual std::vector<Step> begun(Version version) const = 0;
};

std::unique_ptr<Protocol> sglang_protocol();
std::unique_ptr<Protocol> vllm_protocol();

}  // namespace echoline::worker
