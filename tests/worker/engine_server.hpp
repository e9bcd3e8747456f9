// An inference server on loopback with the part of SGLang's or vLLM's interface that workers use. It misbehaves on
// request. A ServedModel samples the tokens.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace echoline::worker {

struct ServedRequest {
  std::vector<std::int32_t> prompt;
  std::int64_t tokens_max = 0;
  double temperature = 1;
  std::uint64_t seed = 0;
  std::vector<std::int32_t> ends;
  std::string adapter;  // empty: the base
};
struct ServedResponse {
  std::vector<std::int32_t> tokens;
  std::vector<double> logprobs;
  bool ended = false;
  std::vector<std::pair<std::uint64_t, std::size_t>> spans;  // number of the span, and its end
};

// Called by one thread at a time.
class ServedModel {
 public:
  virtual ~ServedModel() = default;
  virtual void load(const std::filesystem::path& folder) = 0;  // throws
  virtual void damage() {}                                     // the loaded weights
  // Adds an adapter in PEFT's format beside the others; throws.
  virtual void load_adapter(const std::string& name, const std::filesystem::path& folder);
  virtual void add(std::uint64_t id, ServedRequest request) = 0;
  // Does some work, and returns the ended responses.
  virtual std::map<std::uint64_t, ServedResponse> step() = 0;
  // Ends all responses with their present tokens.
  virtual std::map<std::uint64_t, ServedResponse> interrupt() = 0;
  // Tokens sampled from now on belong to this span; before the first call, to span 0.
  virtual void begin_span(std::uint64_t number) = 0;
  // The log-probabilities of all tokens but the first. `adapter`: empty: the base.
  virtual std::vector<double> score(const std::vector<std::int32_t>& text, const std::string& adapter) = 0;
  virtual std::vector<double> top5(const std::vector<std::int32_t>& text, double temperature) = 0;  // descending
};

// The interfaces: SGLang; vLLM with --enable-scale-out, without it, and with it and echoline's plug-in.
enum class Speaks { kSglang, kVllm, kVllmCompletions, kVllmReceiver };

// A fault of the server. Faults of the same place happen one after the other.
struct Fault {
  // "draw", "load", "health", "probe", "pause", "version"; of an update by the plug-in also "start" and "finish"
  std::string at;
  // Faults of the connection: "status" answers `status`. "hang" waits for `hangs`, then acts. "disconnect" breaks off
  // in the middle of the body. "html" answers a proxy's page.
  //
  // Faults of loading: "stale" reports a load that did not happen. "fails" reports a failed load. "unnamed" loads, but
  // keeps its version. "renamed" names another version than the given one. "damaged" loads other values than those of
  // the folder. "ignored" reports the load of an adapter, and requests that name it get the base's answers. With
  // "stale" they get the answers of the adapter that was loaded before.
  //
  // Faults of responses: "no_logprobs", "few_logprobs", "nan" and "positive". "reordered" has two choices in the wrong
  // order. "foreign" is for another prompt. "token" is beyond the vocabulary. "long" has too many tokens. "short" has
  // no ending token. "raw" has log-probabilities of temperature 1.
  std::string what;
  int times = 1;
  int status = 503;
  std::chrono::milliseconds hangs{0};
};

class EngineServer {
 public:
  // Listens on `port`, 0: any. `folder` is loaded before the server is healthy, as in a process that has just begun.
  // `seen` is called for every request before it is served, with its path and the number of requests with this path.
  EngineServer(Speaks speaks, std::unique_ptr<ServedModel> model, int port = 0,
               const std::filesystem::path& folder = {},
               std::function<void(const std::string& path, int count)> seen = {});
  ~EngineServer();
  std::string url() const;
  void fault(Fault fault);
  // The server takes adapters, this many in one batch. `modules`: --lora-target-modules, on a CPU. Without this call it
  // was started without --enable-lora.
  void enable_adapters(std::size_t at_once, int rank_max,
                       std::optional<std::vector<std::string>> modules = std::vector<std::string>{"q_proj"});
  std::vector<std::string> adapters() const;        // that requests may name
  void forget_adapters();                           // imitates another process at this address
  int count(const std::string& path) const;         // requests so far
  std::string last(const std::string& path) const;  // body of the last
  // Imitates a worker that ended within an update.
  void leave_update_open();
  // Imitates another process at this address, which has the weights of `folder` and no version.
  void replace(const std::filesystem::path& folder);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Draws by a hash of the weights, without a model: log-probabilities follow from digest, token and position. If
// `held_at` is given, no response grows beyond it. `drawn` counts all tokens.
struct Hold {
  std::atomic<std::int64_t> held_at = std::numeric_limits<std::int64_t>::max(), drawn = 0;
};
std::unique_ptr<ServedModel> hashing_model(std::int32_t vocabulary, std::shared_ptr<Hold> hold = nullptr);

}  // namespace echoline::worker
