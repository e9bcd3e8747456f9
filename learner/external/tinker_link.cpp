// Sessions, operations and answers of a Tinker client. TinkerServer and TinkerLoop call it.
#include "learner/external/tinker_link.hpp"

#include <algorithm>
#include <utility>

#include "base/random_bits.hpp"
#include "base/text.hpp"
#include "learner/run_record.hpp"

namespace echoline::learner::tinker {
namespace {

constexpr int kSessionWords = 3;  // length of a session's id, in words of 32 random bits

}  // namespace

std::string model_id(const std::string& session, std::uint64_t number) {
  return fmt::format("{}:train:{}", session, number);
}

std::string request_id(const std::string& model, std::uint64_t number) { return fmt::format("{}:{}", model, number); }

Answer json_answer(const nlohmann::json& value) { return {json_text(value) + "\n", false}; }

Answer error_answer(const Error& error) {
  const bool is_clients = error.code == Code::kInvalid || error.code == Code::kNotFound || error.code == Code::kStale;
  return json_answer({{"error", error.message()}, {"category", is_clients ? "user" : "server"}});
}

Result<bool> Futures::begin(const std::string& id) {
  const std::lock_guard lock(mutex_);
  if (by_id_.contains(id)) return false;
  if (by_id_.size() - order_.size() >= kPendingMax)
    return echoline::fail(Code::kExhausted, "request", "{} requests are pending: send it again later", kPendingMax);
  by_id_[id] = std::nullopt;
  return true;
}

void Futures::answer(const std::string& id, Answer answer) {
  const std::lock_guard lock(mutex_);
  const auto it = by_id_.find(id);
  if (it == by_id_.end() || it->second) return;
  answer_bytes_ += answer.bytes.size();
  it->second = std::move(answer);
  order_.push_back(id);
  while (order_.size() > 1 && (order_.size() > kAnswersMax || answer_bytes_ > kAnswerBytesMax)) {
    const auto oldest = by_id_.find(order_.front());
    answer_bytes_ -= oldest->second->bytes.size();
    by_id_.erase(oldest);
    order_.pop_front();
  }
  answered_.notify_all();
}

void Futures::fail(const std::string& id, const Error& error) { answer(id, error_answer(error)); }

void Futures::drop(const std::string& id) {
  const std::lock_guard lock(mutex_);
  if (const auto it = by_id_.find(id); it != by_id_.end() && !it->second) by_id_.erase(it);
}

Futures::State Futures::wait(const std::string& id, Duration wait, Answer& answer) {
  std::unique_lock lock(mutex_);
  const auto is_pending = [&] {
    const auto it = by_id_.find(id);
    return it != by_id_.end() && !it->second;
  };
  answered_.wait_for(lock, wait, [&] { return stopped_ || !is_pending(); });
  const auto it = by_id_.find(id);
  if (it == by_id_.end()) return State::kUnknown;
  if (!it->second) return State::kPending;
  answer = *it->second;
  return State::kAnswered;
}

void Futures::stop() {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  answered_.notify_all();
}

Result<std::string> TinkerLink::create_session() {
  const std::lock_guard lock(mutex_);
  std::erase_if(sessions_, [&](const auto& session) { return clock_.now() - session.second > limits_.session_kept; });
  if (sessions_.size() >= limits_.sessions_max)
    return fail(Code::kExhausted, "create_session", "{} sessions are open, which is the limit", limits_.sessions_max);
  std::string id = random_hex(kSessionWords);
  sessions_[id] = clock_.now();
  return id;
}

bool TinkerLink::is_alive(const std::string& session) const {
  const auto it = sessions_.find(session);
  return it != sessions_.end() && clock_.now() - it->second < limits_.session_silence;
}

bool TinkerLink::renew_session(const std::string& session) {
  const std::lock_guard lock(mutex_);
  const auto it = sessions_.find(session);
  if (it == sessions_.end()) return false;
  it->second = clock_.now();
  return true;
}

void TinkerLink::end_session(const std::string& session) {
  const std::lock_guard lock(mutex_);
  // The client reports the end after an exception of the user's program as well, which may go on.
  if (const auto it = sessions_.find(session); it != sessions_.end())
    it->second = std::min(it->second, clock_.now() - limits_.session_silence);
  changed_.notify_all();
}

bool TinkerLink::has_live_session() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& session) { return is_alive(session.first); });
}

Result<std::string> TinkerLink::submit(Numbered request) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return fail(Code::kUnavailable, "request", "{}", *stopped_);
  const bool makes_model = !request.session.empty();
  if (makes_model && !sessions_.contains(request.session))
    return fail(Code::kNotFound, "session_id", "no session '{}' is open: make a new ServiceClient",
                printable(request.session));
  if (makes_model) sessions_[request.session] = clock_.now();
  const std::string model = makes_model ? model_id(request.session, request.model_number) : request.model;
  if (!makes_model && (!model_ || model_->id != model))
    return fail(Code::kNotFound, "model_id", "the run does not train model '{}' (any more): {}", printable(model),
                model_ ? "it trains '" + model_->id + "'" : "create one");
  if (!makes_model) {
    model_->last_request_unix_s = clock_.unix_seconds();
    sessions_[model_->session] = clock_.now();
  }
  const std::string id = request_id(model, makes_model ? 0 : request.number);
  if (operations_.size() + new_models_.size() >= limits_.operations_max)
    return fail(Code::kExhausted, "request", "{} operations wait, which is the limit: send it again later",
                limits_.operations_max);
  ECHO_ASSIGN(const bool is_new, futures_.begin(id));
  if (!is_new) return id;
  if (makes_model)
    new_models_.emplace_back(clock_.now(), DueOperation{id, model, request.session, std::move(request.operation)});
  else
    operations_[request.number] = std::move(request.operation);
  changed_.notify_all();
  return id;
}

std::optional<ClientModel> TinkerLink::model() const {
  const std::lock_guard lock(mutex_);
  return model_;
}

Result<std::string> TinkerLink::create_sampler(const SamplingSession& request, const std::string& base_model) {
  const std::lock_guard lock(mutex_);
  if (!sessions_.contains(request.session))
    return fail(Code::kNotFound, "session_id", "no session '{}' is open: make a new ServiceClient",
                printable(request.session));
  SamplerWeights weights{.version = published_, .accepts_newer = false, .path = request.model_path};
  if (!request.model_path.empty()) {
    const auto path = sampler_paths_.find(request.model_path);
    if (path == sampler_paths_.end())
      return fail(Code::kNotFound, "model_path",
                  "'{}' was not saved for sampling by this learner: save_weights_for_sampler gives a path",
                  printable(request.model_path));
    weights.version = path->second;
    if (path->second < published_)
      return fail(Code::kStale, "model_path",
                  "'{}' is version {}, and workers hold version {}: only the newest weights can be sampled",
                  request.model_path, path->second, published_);
  } else if (published_ != Version{0}) {
    return fail(Code::kStale, "base_model",
                "workers hold version {} of the trained policy, not '{}': the base can be sampled before the first "
                "save_weights_for_sampler",
                published_, base_model);
  }
  return put_sampler(request.session, request.number, std::move(weights));
}

std::string TinkerLink::put_sampler(const std::string& session, std::uint64_t number, SamplerWeights weights) {
  if (samplers_.size() >= limits_.samplers_max) samplers_.erase(samplers_.begin());
  std::string id = fmt::format("{}:sample:{}", session, number);
  samplers_[id] = std::move(weights);
  return id;
}

std::optional<SamplerWeights> TinkerLink::sampler(const std::string& id) const {
  const std::lock_guard lock(mutex_);
  const auto it = samplers_.find(id);
  return it == samplers_.end() ? std::nullopt : std::optional(it->second);
}

// A new model waits while another client's session trains the run's model.
std::optional<DueOperation> TinkerLink::take_due() {
  if (const auto next = operations_.find(next_number_); next != operations_.end()) {
    DueOperation due{request_id(model_->id, next_number_), model_->id, model_->session, std::move(next->second)};
    operations_.erase(next);
    ++next_number_;
    return due;
  }
  while (!new_models_.empty()) {
    auto& [requested_at, operation] = new_models_.front();
    const bool is_free = !model_ || model_->session == operation.session || !is_alive(model_->session);
    if (!is_free && clock_.now() - requested_at < limits_.model_wait) return std::nullopt;
    DueOperation due = std::move(operation);
    new_models_.pop_front();
    if (is_free) return due;
    futures_.fail(due.id, Error{Code::kUnavailable, "create_model",
                                fmt::format("the session of model '{}' is still open, and a run trains one model: end "
                                            "that client first",
                                            model_->id)});
  }
  return std::nullopt;
}

std::optional<DueOperation> TinkerLink::next_operation(Duration wait) {
  std::unique_lock lock(mutex_);
  std::optional<DueOperation> due = take_due();
  if (due) return due;
  changed_.wait_for(lock, wait);
  return take_due();
}

void TinkerLink::drop_operations(const std::string& reason) {
  for (const auto& [number, operation] : operations_)
    futures_.fail(request_id(model_->id, number), Error{Code::kStale, "request", reason});
  operations_.clear();
}

void TinkerLink::set_model(const std::string& id, const std::string& session) {
  const std::lock_guard lock(mutex_);
  drop_operations(fmt::format("model '{}' replaced this one", id));
  model_ = {.id = id, .session = session, .last_request_unix_s = clock_.unix_seconds()};
  next_number_ = 1;
}

std::string TinkerLink::add_sampler_path(const std::string& model, const std::string& name, Version version) {
  const std::lock_guard lock(mutex_);
  if (sampler_paths_.size() >= limits_.samplers_max) sampler_paths_.erase(sampler_paths_.begin());
  std::string path = to_text({model, name}, "sampler_weights");
  sampler_paths_[path] = version;
  return path;
}

std::string TinkerLink::add_sampler(const std::string& session, std::uint64_t number, Version version,
                                    bool accepts_newer) {
  const std::lock_guard lock(mutex_);
  return put_sampler(session, number, {.version = version, .accepts_newer = accepts_newer, .path = {}});
}

void TinkerLink::set_published(Version version) {
  const std::lock_guard lock(mutex_);
  published_ = version;
}

void TinkerLink::stop(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  stopped_ = reason;
  drop_operations(reason);
  for (const auto& [requested_at, operation] : new_models_)
    futures_.fail(operation.id, Error{Code::kUnavailable, "create_model", reason});
  new_models_.clear();
  changed_.notify_all();
}

}  // namespace echoline::learner::tinker
