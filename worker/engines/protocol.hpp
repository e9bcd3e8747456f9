// The requests to an inference server and its answers, as bytes; no network. Private to worker/.
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

// A request for the next tokens of a sequence. Every token of the vocabulary may be drawn: no top_p or the like.
struct Draw {
  std::vector<model::Token> context;  // the prompt and the tokens drawn so far
  std::int64_t tokens_max = 0;
  std::uint64_t seed = 0;
  std::string weights;  // name of the weights; a server caches keys and values by it
  double temperature = 1;
  std::vector<model::Token> ends;  // the first of these tokens ends the response
  std::vector<std::string> stop;   // the first of these strings in its text ends it, too
};

// The answer to a Draw. If `aborted`, the server returned it before the end, for example at a pause.
struct Piece {
  // Tokens drawn under the version that the server calls `weights`: from the end of the previous span up to `end`.
  struct WeightSpan {
    std::string weights;
    std::size_t end = 0;
  };
  std::vector<model::Token> tokens;
  std::vector<double> logprobs;
  bool aborted = false;
  std::vector<WeightSpan> spans;  // covers all tokens, if the server reports spans
};

// The log-probabilities of a given text.
struct Probed {
  std::vector<double> logprobs;  // of all tokens except the first
  std::optional<std::string> weights;
};

// One of the calls that change the server's weights. `accepts` decides whether an answer with status 200 means success.
struct Step {
  Call call;
  bool optional = false;   // skipped if the server does not know the call
  bool long_work = false;  // it loads weights, so it gets the longer timeout
  Status (*accepts)(std::string_view body) = nullptr;
};

// The policy in the folder, for a receiver inside the server.
struct Handover {
  Version version;
  // The version that the receiver has loaded, and the tensors that differ from it; absent: all may.
  std::optional<Version> base;
  std::vector<std::string> changed;
};

// Parses answers defensively. kCorrupt with the expected and the found value.
class Protocol {
 public:
  virtual ~Protocol() = default;
  virtual std::string_view name() const = 0;
  // Environment variables for a server that the worker starts.
  virtual std::vector<std::pair<std::string, std::string>> environment() const { return {}; }
  virtual Call health() const = 0;  // 200: the server takes requests

  virtual Call draw(const Draw& draw) const = 0;
  // Parses the answer to draw(). Checks only the form: one log-probability per token, and the right context if the
  // server repeats it.
  virtual Result<Piece> drawn(const Draw& draw, std::string_view body) const = 0;

  // The folder with which the server was started; empty: the answer does not contain it.
  virtual std::optional<Call> served_model() const { return std::nullopt; }
  virtual std::filesystem::path served_folder(std::string_view) const { return {}; }
  // Asks for the server's interface, if releases differ. settle_interface() takes the answer, of any status; later
  // calls use that interface.
  virtual std::optional<Call> which_interface() const { return std::nullopt; }
  virtual Status settle_interface(int, std::string_view) { return ok(); }
  // Asks a receiver inside the server, if there is one, to take policies from `folder`. settle_receiver() takes the
  // answer, of any status. An error says why the server has no receiver.
  virtual std::optional<Call> which_receiver(const std::filesystem::path&) const { return std::nullopt; }
  virtual Status settle_receiver(int, std::string_view) { return ok(); }
  // Whether a tied model's weights must contain the output head as a separate tensor.
  virtual bool wants_own_head() const { return false; }

  // Asks for the log-probabilities of a text; probed() parses the answer.
  virtual Call probe(const std::vector<model::Token>& text) const = 0;
  virtual Result<Probed> probed(const std::vector<model::Token>& text, std::string_view body) const = 0;

  // Draws one token at a temperature. spread_of() returns the difference between the highest and the fifth reported
  // log-probability, in nats. Its change with the temperature shows whether log-probabilities follow that.
  virtual Call spread(const std::vector<model::Token>& text, double temperature) const = 0;
  virtual Result<double> spread_of(std::string_view body) const = 0;
  virtual std::string_view temper_how() const = 0;  // advice if log-probabilities ignore the temperature

  // Called in this order: pause all responses, load other weights, resume. If keeps_responses(), unfinished responses
  // continue after that. Otherwise they return at the pause with the tokens drawn so far.
  virtual bool keeps_responses() const { return false; }
  virtual Step pause() const = 0;
  virtual std::vector<Step> load(const std::filesystem::path& folder, Version version) const = 0;
  // The same by the receiver. After a failure of one step, give_up_handing_over() and load() bring the server to a
  // known policy.
  virtual std::vector<Step> hand_over(const Handover&) const { return {}; }
  virtual std::vector<Step> give_up_handing_over() const { return {}; }
  virtual Step resume() const = 0;
  // Calls that tell the server which version its current weights are. Needed after it has started on the folder, and if
  // a version has the weights of the one before. Empty: the server has no such call.
  virtual std::vector<Step> name_weights(Version version) const = 0;
};

std::unique_ptr<Protocol> sglang_protocol();
std::unique_ptr<Protocol> vllm_protocol();

}  // namespace echoline::worker
