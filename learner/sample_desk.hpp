// Requests of a training API's client for samples from the policy. Workers generate them under leases, like groups of
// the run's task, but prompt and settings are the client's and results go back to the client instead of the replay
// buffer.
#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "base/result.hpp"
#include "data_plane/schema.pb.h"
#include "model/tokenizer.hpp"

namespace echoline::learner {

struct SampleRequest {
  std::string id;  // chosen by the caller, unique
  std::vector<model::Token> prompt;
  std::uint32_t samples = 1;
  std::uint32_t tokens_max = 1;
  double temperature = 1;
  double top_p = 1;
  std::uint32_t top_k = 0;  // 0: all tokens
  std::vector<model::Token> end_tokens;
  std::vector<std::string> stop;
  std::uint64_t seed = 0;
  Version version;             // the policy to sample from
  bool accepts_newer = false;  // samples of newer versions do as well
};

struct Sample {
  std::vector<model::Token> tokens;
  std::vector<float> logprobs;  // nats, at the request's temperature, over the whole vocabulary
  bool ended = false;           // by an ending token or stop string, not by tokens_max
};

struct SampleDeskOptions {
  std::int64_t vocab_size = 0;
  std::uint32_t samples_per_lease = 8;  // a request with more is split over several leases
  std::size_t requests_max = 4096;      // unfinished
  std::size_t tokens_max = 16 << 20;    // of their prompts and responses
  double lease_s = 60;                  // renewed while the worker makes progress
  double unleased_s = 900;              // a request that no worker takes in this time fails
  std::uint32_t failures_max = 5;       // of one lease's samples, before the request fails
};

// Thread-safe. Times are seconds of the clock of the desk's thread, which never runs backwards.
class SampleDesk {
 public:
  using Finished = std::function<void(const std::string& id, Result<std::vector<Sample>> samples)>;
  // `finished` is called once per request, without a lock held. `tokenizer` finds stop strings in results.
  SampleDesk(SampleDeskOptions options, model::Tokenizer tokenizer, double now_s, Finished finished);

  // ---- any thread ----

  // kExhausted: too many requests are unfinished. kStale: the request's version was replaced by a newer one.
  Status submit(SampleRequest request);
  void cancel(const std::string& id);
  // Whether requests for exactly one version before `version` are unfinished.
  bool awaits_older(Version version) const;
  // Fails the requests for exactly one version before `version`, and refuses further ones.
  void replace_versions_before(Version version);
  // Why the request is unfinished, for its client. `workers`: how many are connected.
  std::string waiting_reason(const std::string& id, std::size_t workers) const;
  // Fails all requests, now and later.
  void stop(const std::string& reason);

  // ---- the desk's thread ----

  // Adds leases for about `rollouts` samples of `version` to the answer.
  void grant(WorkerId worker, Version version, const std::string& policy_digest, std::uint64_t rollouts, double now_s,
             schema::WorkGrant& answer);
  void renew(WorkerId worker, const std::vector<std::uint64_t>& leases, std::uint64_t progress, double now_s);
  // The worker gives leases back. `failure`: why, if it counts against the request; empty otherwise.
  void return_lease(WorkerId worker, std::uint64_t lease, const std::string& failure);
  void release_worker(WorkerId worker);
  // Returns leases whose time has run out, and fails requests that no worker takes.
  void expire(double now_s);
  std::size_t leases_held(WorkerId worker) const;

  struct Verdict {
    bool accepted = false;
    std::string reason;  // of a refusal; stable text
    std::string detail;
    double lease_seconds = 0;  // from the grant to the result
  };
  Verdict store(WorkerId worker, const schema::Submission& submission, double now_s);

  void check() const;  // aborts if its parts disagree

 private:
  struct Request {
    SampleRequest what;
    std::vector<std::optional<Sample>> samples;
    std::size_t unfinished = 0;  // samples
    std::uint32_t failures = 0;
    double unleased_since_s = 0;  // while it has no lease and no sample
    std::size_t leases = 0;
  };
  // Consecutive samples of a request that a worker generates, or is to generate.
  struct Part {
    std::string request;
    std::uint32_t first = 0, count = 0;
  };
  struct Lease {
    Part part;
    WorkerId worker;
    Version version;
    std::string policy_digest;
    double granted_s = 0, expires_s = 0;
    std::uint64_t progress = 0;
  };
  struct Ended {
    std::string id;
    Result<std::vector<Sample>> samples;
  };
  // The methods below need the lock.
  void end_request(const std::string& id, Result<std::vector<Sample>> samples, std::vector<Ended>& ended);
  void end_lease(std::uint64_t lease, const std::string& failure, double now_s, std::vector<Ended>& ended);
  bool serves(const SampleRequest& request, Version version) const;
  Result<std::vector<Sample>> read_samples(const Lease& lease, const SampleRequest& request,
                                           const schema::Submission& submission) const;
  static std::size_t tokens_of(const SampleRequest& request);
  void report(std::vector<Ended> ended);

  const SampleDeskOptions options_;
  const model::Tokenizer tokenizer_;
  const Finished finished_;
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  std::map<std::string, Request> requests_;
  std::deque<Part> waiting_;  // for a worker; parts of ended requests are dropped when they are met
  std::map<std::uint64_t, Lease> leases_;
  std::map<WorkerId, Version> asked_;  // the newest version under which each worker asked for work
  std::size_t tokens_ = 0;
  std::uint64_t next_lease_ = 1;
  Version oldest_;  // requests for exactly one version need at least this one
  double now_s_;    // at the last call of the desk's thread
  std::optional<std::string> stopped_;
};

}  // namespace echoline::learner
