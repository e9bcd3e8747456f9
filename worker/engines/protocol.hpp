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
#include "data_plane/routed_experts.hpp"
#include "model/config.hpp"

namespace echoline::worker {

// An HTTP request.
struct Call {
  std::string method, path, body;
};

// A request for the next tokens of a sequence. Only temperature sampling is supported: every token of the vocabulary
// may be sampled, since there is no top_p, top_k or min_p.
struct SampleRequest {
  std::vector<model::Token> context;  // the prompt and the tokens sampled so far
  std::int64_t tokens_max = 0;
  std::uint64_t seed = 0;
  std::string weights_name;  // of the server's weights; the server caches keys and values by this name
  double temperature = 1;
  std::vector<model::Token> end_tokens;   // the first of these tokens ends the response
  std::vector<std::string> stop_strings;  // the first of these strings in the response's text ends it, too
  std::string adapter;                    // loaded by load_adapter(); empty: none
};

// The server's answer to a SampleRequest. `aborted`: the server stopped before the response's end, for example at a
// pause.
struct SampleResponse {
  // The tokens from the end of the previous span up to `end`, sampled under the weights that the server calls
  // `weights_name`.
  struct WeightSpan {
    std::string weights_name;
    std::size_t end = 0;
  };
  std::vector<model::Token> tokens;
  std::vector<double> logprobs;
  bool aborted = false;
  std::vector<WeightSpan> spans;  // covers all tokens, if the server reports spans
  // The experts of the first tokens of the context followed by `tokens`; empty if the server does not report them.
  data_plane::RoutedExperts experts = {};
};

// The log-probabilities of a given text.
struct TextScores {
  std::vector<double> logprobs;             // of all tokens except the first
  std::optional<std::string> weights_name;  // of the server's weights, if the server reports it
};

// One of the calls that change the server's weights. `check_answer` decides whether an answer with status 200 means
// success.
struct Step {
  Call call;
  bool optional = false;                                    // not an error if the server does not know the call
  bool long_work = false;                                   // the call loads weights, so it gets the longer timeout
  Status (*check_answer)(std::string_view body) = nullptr;  // null: status 200 is enough
};

// An update for a receiver: echoline's plug-in in the server, which reads changed tensors from the policy's folder.
struct Handover {
  Version version;
  std::optional<Version> base;       // the version that the receiver has loaded; absent: all tensors may differ
  std::vector<std::string> changed;  // names of the tensors that differ from `base`
};

// Limits of the adapters (LoRA) that the server takes.
struct AdapterLimits {
  std::size_t at_once = 1;  // most different adapters in one batch
  // The next two are absent if the server does not report them, or takes all.
  std::optional<std::int64_t> rank;                 // the highest rank
  std::optional<std::vector<std::string>> modules;  // the modules to which the server applies adapters
};

// Forms the calls of one kind of server, and parses its answers defensively: the error kCorrupt names the expected and
// the found value.
class Protocol {
 public:
  virtual ~Protocol() = default;
  virtual std::string_view name() const = 0;
  // Environment variables for a server that the worker starts.
  virtual std::vector<std::pair<std::string, std::string>> environment() const { return {}; }
  // Options that the server's command needs for adapters of this rank, for messages.
  virtual std::string adapter_options(std::int64_t rank) const = 0;
  virtual Call health() const = 0;  // 200: the server takes requests

  virtual Call sample_call(const SampleRequest& request) const = 0;
  // Parses the answer to `request`. Checks only the form: one log-probability per token, and the right context if the
  // server repeats it.
  virtual Result<SampleResponse> parse_sample_response(const SampleRequest& request, std::string_view body) const = 0;

  // Requests the path of the folder that the server was started with; absent if there is no such call.
  // parse_served_folder() returns an empty path if the answer names no folder.
  virtual std::optional<Call> served_folder_request() const { return std::nullopt; }
  virtual std::filesystem::path parse_served_folder(std::string_view) const { return {}; }
  // A call whose answer shows which interface the server's release has; absent if all releases have one.
  // on_interface_response() takes the answer, of any status; later calls use that interface.
  virtual std::optional<Call> interface_request() const { return std::nullopt; }
  virtual Status on_interface_response(int, std::string_view) { return ok(); }
  // Requests a receiver (see Handover) inside the server to take policies from `folder`; absent if no server of this
  // kind has a receiver.
  // on_receiver_response() takes the answer, of any status. An error says why the server has no receiver.
  virtual std::optional<Call> receiver_request(const std::filesystem::path&) const { return std::nullopt; }
  virtual Status on_receiver_response(int, std::string_view) { return ok(); }
  // Whether the files must contain the output head as a separate tensor even if the model ties it to the embedding.
  virtual bool needs_separate_head() const { return false; }

  // Requests the log-probabilities of a text under an adapter (empty: under the base). parse_scores() parses the
  // answer; kStale: the server says that they are of another adapter.
  virtual Call scores_request(const std::vector<model::Token>& text, const std::string& adapter) const = 0;
  virtual Result<TextScores> parse_scores(const std::vector<model::Token>& text, const std::string& adapter,
                                          std::string_view body) const = 0;

  // Shows whether the server's log-probabilities depend on the temperature. Requests one token, sampled at
  // `temperature`. parse_spread() returns the difference between the highest and the fifth log-probability in the
  // answer, in nats. It changes with the temperature if the log-probabilities do.
  virtual Call spread_request(const std::vector<model::Token>& text, double temperature) const = 0;
  virtual Result<double> parse_spread(std::string_view body) const = 0;
  virtual std::string_view temperature_logprobs_hint() const = 0;  // advice if log-probabilities ignore the temperature

  // Called in this order: pause() all responses, load() other weights, resume(). If keeps_responses(), unfinished
  // responses continue after resume(). Otherwise they return at the pause with the tokens sampled so far.
  virtual bool keeps_responses() const { return false; }
  virtual Step pause() const = 0;
  virtual std::vector<Step> load(const std::filesystem::path& folder, Version version) const = 0;
  // Like load(), but the receiver loads the weights. After a failure of one step, abort_handover() and load() bring the
  // server to a known policy.
  virtual std::vector<Step> hand_over(const Handover&) const { return {}; }
  virtual std::vector<Step> abort_handover() const { return {}; }
  virtual Step resume() const = 0;

  // Adapters are loaded beside each other, while responses go on under earlier ones. adapter_limits() parses the answer
  // to adapter_limits_request(), of any status. kInvalid: the server was started without adapters, or would crash under
  // them.
  virtual Call adapter_limits_request() const = 0;
  virtual Result<AdapterLimits> adapter_limits(int status, std::string_view body) const = 0;
  virtual Step load_adapter(const std::string& name, const std::filesystem::path& folder) const = 0;
  virtual Call unload_adapter(const std::string& name) const = 0;

  // Calls that tell the server which version its current weights are. Needed after the server has started with the
  // folder as its model, and if a version has the same weights as the previous version. Empty: the server has no call
  // for this.
  virtual std::vector<Step> name_weights(Version version) const = 0;
};

std::unique_ptr<Protocol> sglang_protocol();
std::unique_ptr<Protocol> vllm_protocol();

}  // namespace echoline::worker
