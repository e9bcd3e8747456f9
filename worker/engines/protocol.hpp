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
  std::string weights;  // other weights have another name: a server keeps keys and values of a context apart by it
  double temperature = 1;
  std::vector<model::Token> ends;  // a response ends with the first of these
  std::vector<std::string> stop;   // or when its text contains one of these
};

struct Piece {
  // Tokens up to `end`, from the end of the span before, were drawn under the version that the server calls `weights`.
  struct WeightSpan {
    std::string weights;
    std::size_t end = 0;
  };
  std::vector<model::Token> tokens;
  std::vector<double> logprobs;
  bool aborted = false;
  std::vector<WeightSpan> spans;  // of all tokens, where the server says them
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

  // The folder that it was started on; empty: the answer does not say it.
  virtual std::optional<Call> served_model() const { return std::nullopt; }
  virtual std::filesystem::path served_folder(std::string_view) const { return {}; }
  // Asks which interface the server has, where releases differ. settle_interface() takes the answer, of any status, and
  // later calls are of that interface.
  virtual std::optional<Call> which_interface() const { return std::nullopt; }
  virtual Status settle_interface(int, std::string_view) { return ok(); }
  // Whether the weights of a tied model have to contain the output head as a tensor of its own.
  virtual bool wants_own_head() const { return false; }

  // What the model says of the tokens of a text.
  virtual Call probe(const std::vector<model::Token>& text) const = 0;
  virtual Result<Probed> probed(const std::vector<model::Token>& text, std::string_view body) const = 0;

  // One token, and how far the most likely token is before the fifth, in nats as log-probabilities are reported.
  virtual Call spread(const std::vector<model::Token>& text, double temperature) const = 0;
  virtual Result<double> spread_of(std::string_view body) const = 0;
  virtual std::string_view temper_how() const = 0;  // what to do where they are not those of the temperature

  // In this order: no response goes on; other weights; responses are taken again. Responses under way go on then where
  // the server keeps them; otherwise they come back at the pause with the tokens they have.
  virtual bool keeps_responses() const { return false; }
  virtual Step pause() const = 0;
  virtual std::vector<Step> load(const std::filesystem::path& folder, Version version) const = 0;
  virtual Step resume() const = 0;
  // Gives the weights that the server has their version: of a server that has just begun with the folder, or where
  // versions have the same weights. None: it cannot be told.
  virtual std::vector<Step> name_weights(Version version) const = 0;
};

std::unique_ptr<Protocol> sglang_protocol();
std::unique_ptr<Protocol> vllm_protocol();

}  // namespace echoline::worker
