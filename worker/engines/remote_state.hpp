// The parts of a remote engine's state. The engine brings its server to a policy by a script: a list of errands, each
// an HTTP call. A probe among them requests log-probabilities of a fixed text, which show whether the server has the
// right weights. Private to worker/engines/.
#pragma once
#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "base/http.hpp"
#include "base/ids.hpp"
#include "base/result.hpp"
#include "base/text.hpp"
#include "overlay/types.hpp"
#include "worker/engine.hpp"
#include "worker/engines/fingerprints.hpp"
#include "worker/engines/learner_comparison.hpp"
#include "worker/engines/protocol.hpp"

namespace echoline::worker {

inline constexpr std::string_view kEngineOperation = "engine";  // the operation in errors

// The error of a call that got no answer (status 0). `path` names the call.
inline Error no_answer(const HttpAnswer& answer, std::string_view path) {
  return fail(Code::kUnavailable, kEngineOperation, "{}: {}", path, answer.trouble);
}

// A sequence that the server has not finished.
struct UnfinishedSequence {
  Sequence sequence;
  Response response;          // what was generated so far
  std::uint64_t request = 0;  // number of the sequence's request at the HTTP client; 0: in the queue
  Version requested_under{};  // the server's version at the last request; with an adapter, the adapter's version
  std::string adapter;        // the adapter under which the last tokens were requested
  int losses = 0;             // number of the sequence's requests that failed or were lost with the server
};

// Names of the two errands that a script treats differently from the others.
inline constexpr std::string_view kResumeErrand = "resume", kProbeErrand = "probe";

// One step of a script: a call, and the function that takes the answer. An errand without a call waits until the
// responses that a pause has aborted have returned.
struct Errand {
  std::string_view name;  // for the log; that of the resumption and the probe also for the script
  std::optional<Call> call;
  std::function<Status(const HttpAnswer&)> on_answer;
  bool long_work = false;    // loads weights or reads a text: its timeout is options.patience
  bool by_receiver = false;  // a call of hand_over(); fall_back_to_reload() replaces it
};

// Health checks during a call that takes long.
struct Watch {
  std::uint64_t request = 0;  // of the health check; 0: none is in progress
  TimePoint next_check{};
  int failed_in_a_row = 0;
};

struct Script {
  std::deque<Errand> errands;         // not answered yet
  std::uint64_t request = 0;          // of the first errand, or of a health check; 0: none is in progress
  TimePoint drain_deadline = kNever;  // of a wait for aborted responses; kNever: there is none
  // The request of the probe if advance_script() has sent it early, before the resumption that precedes it in the
  // script; 0: it has not.
  std::uint64_t early_probe = 0;
  std::optional<HttpAnswer> early_probe_answer;
  TimePoint begun{}, errand_begun{};
  std::vector<std::pair<std::string_view, Duration>> times;  // of the finished errands, by name
  Watch watch;
  bool handed_over = false;         // the receiver (see Handover) loads the policy
  bool sampling_continues = false;  // new requests are sent during the script, under the previous adapter

  // Returns the probe if it can be sent before the resumption that precedes it, otherwise null. The server then reads
  // the text in its first step, without a wait behind the resumed responses. Before the resumption, no errand may still
  // change weights: a single errand there that is no long work only names the weights or empties a cache.
  const Errand* find_early_probe() const {
    const auto probe = std::ranges::find(errands, kProbeErrand, &Errand::name);
    if (early_probe != 0 || probe == errands.end()) return nullptr;  // sent already, or there is none
    if (probe == errands.begin() || (probe - 1)->name != kResumeErrand) return nullptr;
    const auto before_resumption = probe - 1 - errands.begin();  // number of errands
    const bool may_change_weights = before_resumption > 1 || (before_resumption == 1 && errands.front().long_work);
    return may_change_weights ? nullptr : &*probe;
  }
  void add_time(std::string_view name, Duration time) {
    auto entry = std::ranges::find(times, name, [](const auto& named_time) { return named_time.first; });
    if (entry == times.end()) entry = times.insert(entry, {name, Duration{}});
    entry->second += time;
  }
  // Returns ", <name> <seconds>" for each name, for the log.
  std::string times_to_text() const {
    std::string text;
    for (const auto& [name, time] : times) text += fmt::format(", {} {:.3f}", name, seconds(time));
    return text;
  }
};

// Attempts to get a healthy server with the right policy.
struct Attempts {
  int failed = 0;                                             // consecutive failed attempts
  TimePoint next_attempt{}, deadline{}, next_health_check{};  // `deadline`: of the current attempt
  TimePoint wait_begun{};                                     // when the engine began to wait for a server
  TimePoint next_log = kNever;                                // when that wait is logged next; kNever: there is no wait
  std::string last_health_answer = "no answer";               // for messages
};

// The policy that the server is to have (target), and the one that it has.
struct ServerPolicy {
  std::optional<Version> target, version;  // what the current or last script loads; what is loaded
  overlay::Digest digest{};                // of `version`
  std::set<Version> possible_versions;     // versions under which unfinished responses may have been drawn

  // The version under which each token was drawn. kStale: a version that the server cannot have.
  Result<std::vector<Span>> versions_of(const SampleResponse& sampled) const {
    if (sampled.spans.empty())  // the server reports no versions
      return std::vector<Span>{{version.value_or(Version{}), sampled.tokens.size()}};
    std::vector<Span> spans;
    for (const SampleResponse::WeightSpan& span : sampled.spans) {
      const auto known_version = std::ranges::find_if(
          possible_versions, [&](Version possible) { return fmt::format("{}", possible) == span.weights_name; });
      if (known_version == possible_versions.end())
        return fail(Code::kStale, kEngineOperation, "it answered with version '{}', but version {} is loaded",
                    printable(span.weights_name, 40), target.value_or(Version{}));
      spans.push_back({*known_version, span.end});
    }
    return spans;
  }
};

// Knowledge about the current server, gathered since it started or came back.
struct Server {
  bool are_features_known = false;          // load() has asked for the server's interface, receiver and limits
  bool has_receiver = false;                // see Handover
  std::optional<Version> receiver_version;  // the version that the receiver has loaded
  std::uint64_t receiver_revision = 0;      // PolicyFolder::revision() at that time
  // The folder changed while the server started, so it may have weights of several versions.
  bool read_changing_files = false;
  std::vector<double> base_logprobs;  // of the probe's text without an adapter
  ProbeNoise noise;
};

// Evidence that the server has the right weights: its log-probabilities of a text.
struct Proof {
  std::vector<model::Token> text;
  std::vector<double> learner_logprobs;  // of the text under the policy in the folder; empty: the learner sent none
  LearnerComparison comparison;
  Fingerprints fingerprints;
  double spread_at_1 = 0;            // nats: the result of Protocol::parse_spread() at temperature 1
  bool temperature_checked = false;  // the log-probabilities are known to be those of the run's temperature
};

// How the server got its weights.
enum class WeightsSource {
  kStarted,  // it has read this folder at its start, and no other weights since
  kLoaded,   // it was told to load them
  kUnknown,  // another process may have changed them
};

}  // namespace echoline::worker
