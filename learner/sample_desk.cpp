// Leases a client's requests for samples to workers. The rollout desk calls it for workers' messages, the Tinker API
// for the client's.
#include "learner/sample_desk.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/text.hpp"
#include "data_plane/trajectory.hpp"
#include "model/response_end.hpp"

namespace echoline::learner {
namespace {

constexpr std::string_view kOperation = "sample";

}  // namespace

SampleDesk::SampleDesk(SampleDeskOptions options, model::Tokenizer tokenizer, double now_s, Finished finished)
    : options_(std::move(options)), tokenizer_(std::move(tokenizer)), finished_(std::move(finished)), now_s_(now_s) {}

std::size_t SampleDesk::tokens_of(const SampleRequest& request) {
  return request.prompt.size() + std::size_t{request.samples} * request.tokens_max;
}

bool SampleDesk::serves(const SampleRequest& request, Version version) const {
  return version == request.version || (request.accepts_newer && version > request.version);
}

void SampleDesk::report(std::vector<Ended> ended) {
  for (Ended& request : ended) finished_(request.id, std::move(request.samples));
}

Status SampleDesk::submit(SampleRequest request) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return fail(Code::kUnavailable, kOperation, "{}", *stopped_);
  if (requests_.contains(request.id)) return ok();
  if (!request.accepts_newer && request.version < oldest_)
    return fail(Code::kStale, kOperation,
                "these weights are version {}, and workers hold version {} or newer: make a new sampling client",
                request.version, oldest_);
  if (requests_.size() >= options_.requests_max || tokens_ + tokens_of(request) > options_.tokens_max)
    return fail(Code::kExhausted, kOperation,
                "{} requests with {} tokens wait for workers; the limits are {} and {}: send it again later",
                requests_.size(), tokens_, options_.requests_max, options_.tokens_max);
  const std::string id = request.id;
  tokens_ += tokens_of(request);
  for (std::uint32_t first = 0; first < request.samples; first += options_.samples_per_lease)
    waiting_.push_back(
        {.request = id, .first = first, .count = std::min(options_.samples_per_lease, request.samples - first)});
  Request& added = requests_[id];
  added.samples.resize(request.samples);
  added.unfinished = request.samples;
  added.unleased_since_s = now_s_;
  added.what = std::move(request);
  return ok();
}

void SampleDesk::end_request(const std::string& id, Result<std::vector<Sample>> samples, std::vector<Ended>& ended) {
  const auto it = requests_.find(id);
  if (it == requests_.end()) return;
  tokens_ -= tokens_of(it->second.what);
  requests_.erase(it);
  std::erase_if(waiting_, [&](const Part& part) { return part.request == id; });
  ended.push_back({id, std::move(samples)});
}

void SampleDesk::cancel(const std::string& id) {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    end_request(id, fail(Code::kCancelled, kOperation, "the client cancelled it"), ended);
  }
  report(std::move(ended));
}

bool SampleDesk::awaits_older(Version version) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(requests_.begin(), requests_.end(), [&](const auto& request) {
    return !request.second.what.accepts_newer && request.second.what.version < version;
  });
}

void SampleDesk::replace_versions_before(Version version) {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    oldest_ = std::max(oldest_, version);
    std::vector<std::string> replaced;
    for (const auto& [id, request] : requests_)
      if (!request.what.accepts_newer && request.what.version < version) replaced.push_back(id);
    for (const std::string& id : replaced)
      end_request(id,
                  fail(Code::kStale, kOperation, "version {} was replaced by version {} before workers had sampled it",
                       requests_.at(id).what.version, version),
                  ended);
  }
  report(std::move(ended));
}

std::string SampleDesk::waiting_reason(const std::string& id, std::size_t workers) const {
  const std::lock_guard lock(mutex_);
  const auto it = requests_.find(id);
  if (it == requests_.end() || it->second.leases > 0) return {};
  const double waited_s = std::max(0.0, now_s_ - it->second.unleased_since_s);
  if (workers == 0)
    return fmt::format("no worker has joined the run; waiting for one for {:.0f} s, at most {:.0f} s", waited_s,
                       options_.unleased_s);
  const bool is_installed = std::any_of(asked_.begin(), asked_.end(),
                                        [&](const auto& worker) { return serves(it->second.what, worker.second); });
  if (!is_installed) return fmt::format("version {} is on its way to {} workers", it->second.what.version, workers);
  return fmt::format("{} workers are busy with earlier requests; {} requests are unfinished", workers,
                     requests_.size());
}

void SampleDesk::stop(const std::string& reason) {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = reason;
    while (!requests_.empty())
      end_request(std::string(requests_.begin()->first), fail(Code::kUnavailable, kOperation, "{}", reason), ended);
  }
  report(std::move(ended));
}

void SampleDesk::grant(WorkerId worker, Version version, const std::string& policy_digest, std::uint64_t rollouts,
                       double now_s, schema::WorkGrant& answer) {
  const std::lock_guard lock(mutex_);
  asked_[worker] = version;
  now_s_ = now_s;
  std::uint64_t granted = 0;
  for (auto part = waiting_.begin(); part != waiting_.end() && granted < rollouts;) {
    Request& request = requests_.at(part->request);
    if (!serves(request.what, version)) {
      ++part;
      continue;
    }
    const std::uint64_t id = next_lease_++;
    schema::Lease& lease = *answer.add_leases();
    lease.set_id(id);
    lease.set_version(version.value);
    lease.set_policy_digest(policy_digest);
    lease.set_expires_unix_s(now_s + options_.lease_s);
    lease.set_group(id);
    lease.mutable_problem()->set_id(fmt::format("sample/{}", id));
    lease.set_rollouts(part->count);
    lease.set_unscored(true);
    schema::Sampling& sampling = *lease.mutable_sampling();
    for (const model::Token token : request.what.prompt) sampling.add_prompt_tokens(static_cast<std::uint32_t>(token));
    for (const model::Token token : request.what.end_tokens) sampling.add_end_tokens(static_cast<std::uint32_t>(token));
    for (const std::string& stop : request.what.stop) sampling.add_stop(stop);
    sampling.set_tokens_max(request.what.tokens_max);
    sampling.set_temperature(request.what.temperature);
    sampling.set_top_p(request.what.top_p);
    sampling.set_top_k(request.what.top_k);
    sampling.set_seed(request.what.seed + part->first);
    granted += part->count;
    ++request.leases;
    leases_[id] = {.part = *part,
                   .worker = worker,
                   .version = version,
                   .policy_digest = policy_digest,
                   .granted_s = now_s,
                   .expires_s = now_s + options_.lease_s};
    part = waiting_.erase(part);
  }
}

void SampleDesk::renew(WorkerId worker, const std::vector<std::uint64_t>& leases, std::uint64_t progress,
                       double now_s) {
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t id : leases) {
    const auto lease = leases_.find(id);
    if (lease == leases_.end() || lease->second.worker != worker || progress <= lease->second.progress) continue;
    lease->second.progress = progress;
    lease->second.expires_s = now_s + options_.lease_s;
  }
}

// Gives the lease's samples to the next worker, before requests that came later.
void SampleDesk::end_lease(std::uint64_t id, const std::string& failure, double now_s, std::vector<Ended>& ended) {
  const auto lease = leases_.find(id);
  const Part part = lease->second.part;
  leases_.erase(lease);
  const auto it = requests_.find(part.request);
  if (it == requests_.end()) return;
  Request& request = it->second;
  if (--request.leases == 0) request.unleased_since_s = now_s;
  if (!failure.empty() && ++request.failures >= options_.failures_max)
    return end_request(part.request,
                       fail(Code::kUnavailable, kOperation, "workers failed {} times to generate it, the last one: {}",
                            options_.failures_max, failure),
                       ended);
  if (!request.what.accepts_newer && request.what.version < oldest_)
    return end_request(part.request, fail(Code::kStale, kOperation, "version {} was replaced", request.what.version),
                       ended);
  waiting_.push_front(part);
}

void SampleDesk::return_lease(WorkerId worker, std::uint64_t id, const std::string& failure) {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    const auto lease = leases_.find(id);
    if (lease == leases_.end() || lease->second.worker != worker) return;
    end_lease(id, failure, now_s_, ended);
  }
  report(std::move(ended));
}

void SampleDesk::release_worker(WorkerId worker) {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    asked_.erase(worker);
    std::vector<std::uint64_t> held;
    for (const auto& [id, lease] : leases_)
      if (lease.worker == worker) held.push_back(id);
    // A prompt that ends workers must not end all of them, so a lost worker counts as a failure.
    for (const std::uint64_t id : held) end_lease(id, fmt::format("worker {} was lost", worker), now_s_, ended);
  }
  report(std::move(ended));
}

void SampleDesk::expire(double now_s) {
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    now_s_ = now_s;
    std::vector<std::uint64_t> due;
    for (const auto& [id, lease] : leases_)
      if (lease.expires_s <= now_s) due.push_back(id);
    for (const std::uint64_t id : due)
      end_lease(id, fmt::format("worker {} made no progress for {:.0f} s", leases_.at(id).worker, options_.lease_s),
                now_s, ended);
    std::vector<std::string> unleased;
    for (const auto& [id, request] : requests_)
      if (request.leases == 0 && now_s - request.unleased_since_s > options_.unleased_s) unleased.push_back(id);
    for (const std::string& id : unleased)
      end_request(id,
                  fail(Code::kUnavailable, kOperation, "no worker took it within {:.0f} s: has the run workers?",
                       options_.unleased_s),
                  ended);
  }
  report(std::move(ended));
}

std::size_t SampleDesk::leases_held(WorkerId worker) const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(leases_.begin(), leases_.end(), [&](const auto& lease) { return lease.second.worker == worker; }));
}

Result<std::vector<Sample>> SampleDesk::read_samples(const Lease& lease, const SampleRequest& request,
                                                     const schema::Submission& submission) const {
  const auto malformed = [](std::string text) { return fail(Code::kInvalid, kOperation, "{}", text); };
  if (submission.trajectories_size() != static_cast<int>(lease.part.count))
    return malformed(fmt::format("{} responses, expected {}", submission.trajectories_size(), lease.part.count));
  std::vector<Sample> samples(lease.part.count);
  std::set<std::uint32_t> members;
  for (const schema::Trajectory& trajectory : submission.trajectories()) {
    ECHO_TRY(data_plane::check(trajectory, data_plane::TrajectoryLimits{}));
    if (trajectory.member() >= lease.part.count || !members.insert(trajectory.member()).second)
      return malformed(fmt::format("member {} is missing or there twice", trajectory.member()));
    if (trajectory.policy_digest() != lease.policy_digest) return malformed("its policy has another digest");
    if (!std::equal(trajectory.prompt_tokens().begin(), trajectory.prompt_tokens().end(), request.prompt.begin(),
                    request.prompt.end(),
                    [](std::uint32_t a, model::Token b) { return static_cast<std::int64_t>(a) == b; }))
      return malformed("its prompt is not the request's");
    for (const schema::VersionSpan& span : trajectory.spans())
      if (Version{span.version()} != lease.version && !request.accepts_newer)
        return malformed(fmt::format("tokens of version {}, expected {}", span.version(), lease.version));
    Sample& sample = samples[trajectory.member()];
    for (const std::uint32_t token : trajectory.response_tokens()) {
      if (token >= static_cast<std::uint64_t>(options_.vocab_size))
        return malformed(fmt::format("token {}, the vocabulary ends at {}", token, options_.vocab_size - 1));
      sample.tokens.push_back(static_cast<model::Token>(token));
    }
    sample.logprobs.assign(trajectory.logprobs().begin(), trajectory.logprobs().end());
    const auto end = model::response_end(tokenizer_, sample.tokens, request.end_tokens, request.stop);
    sample.ended = end.has_value();
    if (end && *end != sample.tokens.size()) return malformed("it goes on after its end");
    if (sample.tokens.size() > request.tokens_max || (!end && sample.tokens.size() != request.tokens_max))
      return malformed(
          fmt::format("it has {} tokens, expected an end or {}", sample.tokens.size(), request.tokens_max));
  }
  return samples;
}

SampleDesk::Verdict SampleDesk::store(WorkerId worker, const schema::Submission& submission, double now_s) {
  std::vector<Ended> ended;
  Verdict verdict;
  {
    const std::lock_guard lock(mutex_);
    now_s_ = now_s;
    const std::uint64_t id = submission.lease();
    const auto lease = leases_.find(id);
    if (lease == leases_.end() || lease->second.worker != worker) {
      verdict.reason = "expired";  // another worker has the lease now, or its request has ended
      return verdict;
    }
    verdict.lease_seconds = now_s - lease->second.granted_s;
    const auto it = requests_.find(lease->second.part.request);
    if (it == requests_.end()) {
      leases_.erase(lease);
      verdict.reason = "expired";
      return verdict;
    }
    Request& request = it->second;
    const Part part = lease->second.part;
    auto samples = read_samples(lease->second, request.what, submission);
    if (!samples) {
      verdict.reason = "malformed";
      verdict.detail = samples.error().detail;
      end_lease(id, verdict.detail, now_s, ended);
    } else {
      verdict.accepted = true;
      leases_.erase(lease);
      --request.leases;
      request.unleased_since_s = now_s;
      for (std::uint32_t i = 0; i < part.count; ++i) request.samples[part.first + i] = std::move((*samples)[i]);
      request.unfinished -= part.count;
      if (request.unfinished == 0) {
        std::vector<Sample> all;
        for (auto& sample : request.samples) all.push_back(std::move(*sample));
        end_request(part.request, std::move(all), ended);
      }
    }
  }
  report(std::move(ended));
  return verdict;
}

void SampleDesk::check() const {
  const std::lock_guard lock(mutex_);
  std::size_t tokens = 0, leases = 0;
  for (const auto& [id, request] : requests_) {
    tokens += tokens_of(request.what);
    leases += request.leases;
    ECHO_CHECK(request.unfinished > 0, "request {} is finished and was not reported", id);
  }
  const auto of_requests = std::count_if(
      leases_.begin(), leases_.end(), [&](const auto& lease) { return requests_.contains(lease.second.part.request); });
  ECHO_CHECK(tokens == tokens_, "{} tokens are counted as {}", tokens, tokens_);
  ECHO_CHECK(leases == static_cast<std::size_t>(of_requests), "{} leases are counted as {}", of_requests, leases);
  for (const Part& part : waiting_) ECHO_CHECK(requests_.contains(part.request), "a part of an ended request waits");
}

}  // namespace echoline::learner
