// The interface to a kind of inference server: forms the requests to it and parses its answers, as bytes. No network.
// Private to worker/.
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

// An HTTP request.
struct Call {
  std::string method, path, body;
};

// A request for the next tokens of a sequence. Only temperature sampling is supported: every token of the vocabulary
// may be drawn, since there is no top_p, top_k or min_p.
struct Draw {
  std::vector<model::Token> context;  // the prompt and the tokens sampled so far
  std::int64_t tokens_max = 0;
  std::uint64_t seed = 0;
  std::string weights;  // name of the weights that the server has; it caches keys and values under that name
  double temperature = 1;
  std::vector<model::Token> ends;  // the first of these tokens ends the response
  std::vector<std::string> stop;   // the first of these strings in the response's text ends it, too
};

// The answer to a Draw. If `aborted`, the server returned it before the response's end, for example at a pause.
struct Piece {
  // The tokens from the end of the previous span up to `end`, sampled under the version that the server calls
  // `weights`.
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
struct TextScores {
  std::vector<double> logprobs;        // of all tokens except the first
  std::optional<std::string> weights;  // their name, if the server reports it
};

// One of the calls that change the server's weights. `accepts` decides whether an answer with status 200 means success.
struct Step {
  Call call;
  bool optional = false;   // skipped if the server does not know the call
  bool long_work = false;  // the call loads weights, so it gets the longer timeout
  Status (*accepts)(std::string_view body) = nullptr;
};

// An update for a receiver: a plug-in of the server that reads changed tensors from the policy's folder.
struct Handover {
  Version version;
  // The version that the receiver has loaded, and the names of the tensors that differ from it. Absent: all may differ.
  std::optional<Version> base;
  std::vector<std::string> changed;
};

// Parses answers defensively. The error kCorrupt names the expected and the found value.
class Protocol {
 public:
  virtual ~Protocol() = default;
  virtual std::string_view name() const = 0;
  // Environment variables for a server that the worker starts.
  virtual std::vector<std::pair<std::string, std::string>> environment() const { return {}; }
  virtual Call health() const = 0;  // 200: the server takes requests

  virtual Call draw(const Draw& draw) const = 0;
  // Parses the answer to `draw`. Checks only the form: one log-probability per token, and the right context if the
  // server repeats it.
  virtual Result<Piece> parse_piece(const Draw& draw, std::string_view body) const = 0;

  // Requests the path of the folder that the server was started with. served_folder() parses the answer; empty: it has
  // no folder.
  virtual std::optional<Call> served_model() const { return std::nullopt; }
  virtual std::filesystem::path served_folder(std::string_view) const { return {}; }
  // A call whose answer shows which interface the server's release has; absent if all releases have one.
  // on_interface_response() takes the answer, of any status; later calls use that interface.
  virtual std::optional<Call> interface_request() const { return std::nullopt; }
  virtual Status on_interface_response(int, std::string_view) { return ok(); }
  // Requests a receiver (see Handover) inside the server, if there is one, to take policies from `folder`.
  // on_receiver_response() takes the answer, of any status. An error says why the server has no receiver.
  virtual std::optional<Call> receiver_request(const std::filesystem::path&) const { return std::nullopt; }
  virtual Status on_receiver_response(int, std::string_view) { return ok(); }
  // Whether the files must contain the output head as a separate tensor even if the model ties it to the embedding.
  virtual bool needs_separate_head() const { return false; }

  // Requests the log-probabilities of a text; parse_scores() parses the answer.
  virtual Call probe(const std::vector<model::Token>& text) const = 0;
  virtual Result<TextScores> parse_scores(const std::vector<model::Token>& text, std::string_view body) const = 0;

  // Samples one token at a temperature. parse_spread() parses the answer: the difference between the highest and the
  // fifth reported log-probability, in nats. Its change with the temperature shows whether log-probabilities depend on
  // that.
  virtual Call spread(const std::vector<model::Token>& text, double temperature) const = 0;
  virtual Result<double> parse_spread(std::string_view body) const = 0;
  virtual std::string_view temperature_logprobs_hint() const = 0;  // advice if log-probabilities ignore the temperature

  // Called in this order: pause all responses, load other weights, resume. If keeps_responses(), unfinished responses
  // continue after that. Otherwise they return at the pause with the tokens drawn so far.
  virtual bool keeps_responses() const { return false; }
  virtual Step pause() const = 0;
  virtual std::vector<Step> load(const std::filesystem::path& folder, Version version) const = 0;
  // Like load(), but by the receiver. After a failure of one step, abort_handover() and load() bring the server
  // to a known policy.
  virtual std::vector<Step> hand_over(const Handover&) const { return {}; }
  virtual std::vector<Step> abort_handover() const { return {}; }
  virtual Step resume() const = 0;
  // Calls that tell the server which version its current weights are. They are needed after it has started on the
  // folder, and if a version has the same weights as the previous one. Empty: the server has no such call.
  virtual std::vector<Step> name_weights(Version version) const = 0;
};

std::unique_ptr<Protocol> sglang_protocol();
std::unique_ptr<Protocol> vllm_protocol();

}  // namespace echoline::worker
