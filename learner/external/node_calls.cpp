// Passes calls of ranks from a node to the learner. TrainerServer executes them there.
#include "learner/external/node_calls.hpp"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.hpp"
#include "base/random_bits.hpp"
#include "learner/external/node.pb.h"

namespace echoline::learner {
namespace {

constexpr std::size_t kPathBytesMax = 256, kIdBytesMax = 64;
constexpr Duration kCheckInterval = std::chrono::milliseconds(200);  // how often a waiting call checks its patience
constexpr int kInvalid = 400, kTooLarge = 413, kUnavailable = 503, kNoSpace = 507;

}  // namespace

TrainerAnswer error_answer(int status, std::string_view code, const std::string& message) {
  const nlohmann::json error = {{"error", {{"code", code}, {"message", message}}}};
  return {status, error.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace) + "\n"};
}

// ---- the learner's end ----

void NodeCalls::open(Execute execute, Bytes body_max, const std::filesystem::path& folder) {
  const std::lock_guard lock(mutex_);
  if (closed_ || execute_) return;
  execute_ = std::move(execute);
  body_max_ = body_max;
  folder_ = folder;
  thread_ = std::thread([this] { execute_calls(); });
  for (const auto& [id, node] : nodes_)
    if (node.session) send_terms(id);
}

void NodeCalls::refuse(std::string reason) {
  const std::lock_guard lock(mutex_);
  refusal_ = std::move(reason);
  for (const auto& [id, node] : nodes_)
    if (node.session) send_terms(id);
}

void NodeCalls::close() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    thread = std::move(thread_);
  }
  changed_.notify_all();
  if (thread.joinable()) thread.join();
}

void NodeCalls::send(WorkerId id, const node::ToNode& message) { send_(id, message.SerializeAsString()); }

void NodeCalls::send_terms(WorkerId id) {
  node::ToNode message;
  message.mutable_terms()->set_body_bytes_max(body_max_.count);
  message.mutable_terms()->set_refusal(refusal_);
  send(id, message);
}

void NodeCalls::on_message(WorkerId id, std::string_view bytes) {
  node::FromNode message;
  if (bytes.size() > kNodeMessageBytesMax || !message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return log::warn("node {}: a message of {} bytes is not understood: do learner and node have one version?", id,
                     bytes.size());
  const std::lock_guard lock(mutex_);
  if (!nodes_.contains(id) && nodes_.size() >= kNodesMax)
    return log::warn("node {} is ignored: the trainer has {} nodes, which is the limit", id, nodes_.size());
  Node& node = nodes_[id];
  if (message.has_hello()) {
    if (node.session != message.hello().session()) {  // another process: its ranks' calls ended with the earlier one
      for (auto& [call_id, call] : node.calls) forget(call);
      node.calls.clear();
      node.session = message.hello().session();
    }
    if (execute_ || !refusal_.empty()) send_terms(id);  // otherwise open() or refuse() does
    return;
  }
  if (!node.session || !execute_) return;  // it has not read the terms yet
  if (message.has_begin()) begin(id, message.begin());
  if (message.has_part()) add_part(id, message.part());
  if (!message.has_drop()) return;
  const auto call = node.calls.find(message.drop().call());
  if (call == node.calls.end()) return;
  forget(call->second);
  node.calls.erase(call);
}

void NodeCalls::on_lost(WorkerId id) {
  const std::lock_guard lock(mutex_);
  const auto node = nodes_.find(id);
  if (node == nodes_.end()) return;
  for (auto& [call_id, call] : node->second.calls) forget(call);
  nodes_.erase(node);
}

// Before the call is erased or answered: its body counts no longer.
void NodeCalls::forget(Call& call) {
  if (call.state == State::kAnswered) return;
  bytes_held_ -= call.body_bytes;
  call.call.body = {};
  call.body = ArrivingBody();
  call.state = State::kAnswered;
}

void NodeCalls::begin(WorkerId id, const node::Begin& begin) {
  Node& node = nodes_.at(id);
  if (const auto known = node.calls.find(begin.call()); known != node.calls.end()) {  // the connection was lost
    if (known->second.state == State::kAnswered) return answer(id, begin.call(), known->second.answer);
    return report_received(id, begin.call(), known->second.body.size());
  }
  if (node.calls.size() >= kCallsMax) {
    const auto answered = std::find_if(node.calls.begin(), node.calls.end(),
                                       [](const auto& call) { return call.second.state == State::kAnswered; });
    if (answered == node.calls.end())
      return answer(id, begin.call(),
                    error_answer(kUnavailable, "busy",
                                 fmt::format("{} calls of this node are open, which is the limit: send it again later",
                                             node.calls.size())));
    node.calls.erase(answered);
  }
  if (begin.method().size() > kPathBytesMax || begin.path().size() > kPathBytesMax ||
      begin.request_id().size() > kIdBytesMax)
    return answer(id, begin.call(), error_answer(kInvalid, "invalid", "the method, path or request id is too long"));
  if (begin.body_bytes() > body_max_.count)
    return answer(id, begin.call(),
                  error_answer(kTooLarge, "invalid",
                               fmt::format("the body has {}, the limit is {}", to_text(Bytes{begin.body_bytes()}),
                                           to_text(body_max_))));
  if (begin.body_bytes() > 2 * body_max_.count - bytes_held_)
    return answer(id, begin.call(),
                  error_answer(kUnavailable, "busy",
                               fmt::format("shards of more than {} are arriving at once; send it again later",
                                           to_text(Bytes{2 * body_max_.count}))));
  bytes_held_ += begin.body_bytes();
  Call& call = node.calls[begin.call()];
  call.call = {.method = begin.method(), .path = begin.path(), .request_id = begin.request_id(), .body = {}};
  call.body_bytes = begin.body_bytes();
  call.body = ArrivingBody(call.body_bytes, folder_);
  if (call.body_bytes == 0) return on_arrived(id, begin.call());
  report_received(id, begin.call(), 0);
}

void NodeCalls::add_part(WorkerId id, const node::Part& part) {
  Node& node = nodes_.at(id);
  const auto found = node.calls.find(part.call());
  if (found == node.calls.end() || found->second.state != State::kArriving) return;  // late, after a new connection
  Call& call = found->second;
  // A part of a broken connection was lost, or has come on the old one as well: the node continues from here.
  if (part.offset() != call.body.size()) return report_received(id, part.call(), call.body.size());
  if (part.body().size() > call.body_bytes - call.body.size()) {
    forget(call);
    call.answer = error_answer(kInvalid, "invalid", "the body is longer than announced");
    return answer(id, part.call(), call.answer);
  }
  if (const Status stored = call.body.append(part.body()); !stored) {
    forget(call);
    call.answer = error_answer(kNoSpace, "exhausted", stored.error().message());
    return answer(id, part.call(), call.answer);
  }
  report_received(id, part.call(), call.body.size());
  if (call.body.size() == call.body_bytes) on_arrived(id, part.call());
}

void NodeCalls::on_arrived(WorkerId id, std::uint64_t call_id) {
  Call& call = nodes_.at(id).calls.at(call_id);
  call.call.body = call.body.finish();
  call.state = State::kWaiting;
  waiting_.emplace_back(id, call_id);
  changed_.notify_all();
}

void NodeCalls::report_received(WorkerId id, std::uint64_t call_id, std::uint64_t bytes) {
  node::ToNode message;
  message.mutable_received()->set_call(call_id);
  message.mutable_received()->set_bytes(bytes);
  send(id, message);
}

void NodeCalls::answer(WorkerId id, std::uint64_t call_id, const TrainerAnswer& answer) {
  node::ToNode message;
  message.mutable_answer()->set_call(call_id);
  message.mutable_answer()->set_status(static_cast<std::uint32_t>(answer.status));
  message.mutable_answer()->set_body(answer.body);
  send(id, message);
}

std::uint64_t NodeCalls::bytes_held() const {
  const std::lock_guard lock(mutex_);
  return bytes_held_;
}

void NodeCalls::execute_calls() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closed_ || !waiting_.empty(); });
    if (closed_) return;
    const auto [id, call_id] = waiting_.front();
    waiting_.pop_front();
    const auto find = [&, id = id, call_id = call_id]() -> Call* {
      const auto node = nodes_.find(id);
      if (node == nodes_.end()) return nullptr;
      const auto call = node->second.calls.find(call_id);
      return call == node->second.calls.end() || call->second.state != State::kWaiting ? nullptr : &call->second;
    };
    Call* call = find();
    if (!call) continue;  // the node has dropped it, or is lost
    TrainerCall complete = std::exchange(call->call, {});
    lock.unlock();
    TrainerAnswer result = execute_(std::move(complete));
    lock.lock();
    call = find();
    if (!call) continue;
    forget(*call);
    call->answer = std::move(result);
    answer(id, call_id, call->answer);
  }
}

// ---- the node's end ----

LearnerCalls::LearnerCalls(const Clock& clock, Send send, Duration patience)
    : clock_(clock), send_(std::move(send)), patience_(patience), session_(random_bits64()), away_since_(clock.now()) {}

void LearnerCalls::send(const node::FromNode& message) const { send_(message.SerializeAsString()); }

void LearnerCalls::begin(std::uint64_t id, const Pending& pending) {
  node::FromNode message;
  node::Begin& begin = *message.mutable_begin();
  begin.set_call(id);
  begin.set_method(pending.call->method);
  begin.set_path(pending.call->path);
  begin.set_request_id(pending.call->request_id);
  begin.set_body_bytes(pending.call->body.size());
  send(message);
}

void LearnerCalls::send_parts(std::uint64_t id, Pending& pending) {
  const overlay::Slice& body = pending.call->body;
  while (pending.sent < body.size() && pending.sent - pending.confirmed < kWindowBytes) {
    const std::size_t bytes = std::min<std::size_t>(kNodePartBytes, body.size() - pending.sent);
    node::FromNode message;
    message.mutable_part()->set_call(id);
    message.mutable_part()->set_offset(pending.sent);
    message.mutable_part()->set_body(body.data() + pending.sent, bytes);
    send(message);
    pending.sent += bytes;
  }
}

TrainerAnswer LearnerCalls::execute(TrainerCall call) {
  std::unique_lock lock(mutex_);
  if (ended_) return error_answer(kUnavailable, "unavailable", *ended_);
  const std::uint64_t id = next_call_++;
  Pending& pending = pending_[id];
  pending.call = &call;
  if (accepted_) begin(id, pending);
  TrainerAnswer answer;
  for (;;) {
    changed_.wait_for(lock, kCheckInterval, [&] { return pending.answer || ended_; });
    if (pending.answer) {
      answer = std::move(*pending.answer);
      break;
    }
    if (ended_) {
      answer = error_answer(kUnavailable, "unavailable", *ended_);
      break;
    }
    if (!accepted_ && clock_.now() - away_since_ > patience_) {
      answer = error_answer(kUnavailable, "unavailable",
                            fmt::format("this node cannot reach the learner since {}; send the call again",
                                        to_text(clock_.now() - away_since_)));
      break;
    }
  }
  if (accepted_) {
    node::FromNode message;
    message.mutable_drop()->set_call(id);
    send(message);
  }
  pending_.erase(id);
  return answer;
}

void LearnerCalls::on_joined() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(accepted_, false)) away_since_ = clock_.now();
  node::FromNode message;
  message.mutable_hello()->set_session(session_);
  send(message);
}

void LearnerCalls::on_away() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(accepted_, false)) away_since_ = clock_.now();
}

void LearnerCalls::on_message(std::string_view bytes) {
  node::ToNode message;
  if (bytes.size() > kNodeMessageBytesMax || !message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return log::warn("a message of the learner is not understood: do learner and node have one version?");
  const std::lock_guard lock(mutex_);
  if (message.has_terms()) {
    if (!message.terms().refusal().empty()) {
      refusal_ = message.terms().refusal();
      changed_.notify_all();
      return;
    }
    body_max_ = Bytes{message.terms().body_bytes_max()};
    accepted_ = true;
    for (auto& [id, pending] : pending_) {
      pending.accepted = false;
      if (!pending.answer) begin(id, pending);
    }
    return;
  }
  const std::uint64_t id = message.has_received() ? message.received().call() : message.answer().call();
  const auto found = pending_.find(id);
  if (found == pending_.end() || found->second.answer) return;
  Pending& pending = found->second;
  if (message.has_answer()) {
    pending.answer = {static_cast<int>(message.answer().status()), message.answer().body()};
    changed_.notify_all();
    return;
  }
  const std::uint64_t received = message.received().bytes();
  if (received > pending.call->body.size()) return log::warn("the learner confirms more than was sent: ignored");
  // The first report on a connection says where to continue. A later one that goes back says so, too.
  if (!std::exchange(pending.accepted, true) || received < pending.confirmed) pending.sent = received;
  pending.confirmed = received;
  pending.sent = std::max(pending.sent, received);
  send_parts(id, pending);
}

void LearnerCalls::end(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (!ended_) ended_ = reason;
  changed_.notify_all();
}

std::optional<Bytes> LearnerCalls::body_max() const {
  const std::lock_guard lock(mutex_);
  return body_max_;
}

std::optional<std::string> LearnerCalls::refusal() const {
  const std::lock_guard lock(mutex_);
  return refusal_;
}

}  // namespace echoline::learner
