#include "overlay/uv/node.hpp"

#include "base/log.hpp"
#include "overlay/learner_core.hpp"
#include "overlay/member_core.hpp"
#include "overlay/uv/driver.hpp"

namespace echoline::overlay {
namespace {

template <class... F>
struct Overloaded : F... {
  using F::operator()...;
};

template <class Event, class... Args>
void call(const Event& event, Args&&... args) {
  if (event) event(std::forward<Args>(args)...);
}

std::span<const std::byte> view(const std::string& bytes) { return std::as_bytes(std::span(bytes)); }

bool fits(const std::string& bytes) {
  if (bytes.size() <= kApplicationBytesMax) return true;
  log::error("a message of {} bytes is not sent: the limit is {}", bytes.size(), kApplicationBytesMax);
  return false;
}

Status check(const LinkLimits& limits) {
  for (const auto& [rate, what] : {std::pair(limits.up, "up"), std::pair(limits.down, "down")})
    if (rate && !(rate->bits_per_s > 0))
      return fail(Code::kInvalid, "start node", "the {} limit must be positive, found {} (leave it out for no limit)",
                  what, to_text(*rate));
  return ok();
}

Status check(const LearnerOptions& o) {
  constexpr std::string_view op = "start learner";
  ECHO_TRY(check(o.limits));
  if (!(o.chain_rate.bits_per_s > 0))
    return fail(Code::kInvalid, op, "chain_rate must be positive, found {}", to_text(o.chain_rate));
  if (o.chunk.count < kChunkBytesMin || o.chunk.count > kChunkBytesMax)
    return fail(Code::kInvalid, op, "chunk must be {} to {} bytes, found {}", kChunkBytesMin, kChunkBytesMax,
                o.chunk.count);
  if (!(o.quorum > 0 && o.quorum <= 1))
    return fail(Code::kInvalid, op, "quorum must be above 0 and at most 1, found {}", o.quorum);
  if (o.chains_max < 1) return fail(Code::kInvalid, op, "chains_max must be at least 1");
  if (o.heartbeat < std::chrono::milliseconds(1) || o.heartbeat_timeout < 2 * o.heartbeat)
    return fail(Code::kInvalid, op, "heartbeat_timeout ({}) must be at least twice the heartbeat ({})",
                echoline::to_text(o.heartbeat_timeout), echoline::to_text(o.heartbeat));
  return ok();
}

}  // namespace

// ---- learner ----

struct LearnerNode::Impl {
  LearnerOptions options;
  LearnerEvents events;
  std::unique_ptr<Driver> driver;
  std::unique_ptr<LearnerCore> core;

  void on_action(const Action& action) {
    std::visit(Overloaded{
                   [&](const act::Joined& a) { call(events.joined, a.member); },
                   [&](const act::Lost& a) { call(events.lost, a.worker, a.reason); },
                   [&](const act::Acked& a) { call(events.acked, a.worker, a.version, a.policy_digest); },
                   [&](const act::MessageFrom& a) { call(events.message, a.worker, a.bytes); },
                   [&](const act::BroadcastDone& a) { call(events.broadcast_done, a.report); },
                   [&](const act::TopologyChanged& a) { call(events.topology_changed, a.chains); },
                   [&](const act::NeedSnapshot& a) { call(events.need_snapshot, a.current); },
                   [](const auto&) {},
               },
               action);
  }
  // Hashes on the caller's thread; a publication that cannot be is the application's mistake and is reported.
  void offer(const Publication& publication, Status (LearnerCore::*where)(PreparedPublication, TimePoint)) {
    auto prepared = prepare(publication, options.chunk);
    if (!prepared) return log::error("{}", prepared.error().message());
    driver->post([this, where, p = std::make_shared<PreparedPublication>(std::move(*prepared))](TimePoint now) {
      if (const Status done = ((*core).*where)(std::move(*p), now); !done) log::error("{}", done.error().message());
    });
  }
};

LearnerNode::LearnerNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LearnerNode::~LearnerNode() { stop(); }

Result<std::unique_ptr<LearnerNode>> LearnerNode::start(LearnerOptions options, LearnerEvents events) {
  ECHO_TRY(check(options));
  auto impl = std::make_unique<Impl>();
  ECHO_ASSIGN(impl->driver, Driver::listen(options.bind_host, options.port));
  impl->options = std::move(options);
  impl->events = std::move(events);
  const LearnerOptions& o = impl->options;
  LearnerConfig config;
  config.self = impl->driver->endpoint();
  config.run_id = o.run_id;
  config.limits = o.limits;
  config.chain_rate = o.chain_rate;
  config.chains_max = o.chains_max;
  config.policy = o.policy;
  config.heartbeat = o.heartbeat;
  config.heartbeat_timeout = o.heartbeat_timeout;
  config.quorum = o.quorum;
  config.store_bytes_max = o.store_bytes_max;
  config.snapshots_on_demand = static_cast<bool>(impl->events.need_snapshot);
  config.welcome = impl->events.welcome;
  impl->core = std::make_unique<LearnerCore>(std::move(config));
  Impl* self = impl.get();
  impl->driver->run(
      *impl->core, [self](const Action& action) { self->on_action(action); }, [](TimePoint) {});
  return std::unique_ptr<LearnerNode>(new LearnerNode(std::move(impl)));
}

Endpoint LearnerNode::endpoint() const { return impl_->driver->endpoint(); }
void LearnerNode::publish(Publication publication) { impl_->offer(publication, &LearnerCore::publish); }
void LearnerNode::provide_snapshot(Publication full) { impl_->offer(full, &LearnerCore::provide_snapshot); }
void LearnerNode::send(WorkerId worker, std::string bytes) {
  if (!fits(bytes)) return;
  impl_->driver->post([core = impl_->core.get(), worker, bytes = std::move(bytes)](TimePoint now) {
    core->send_message(worker, view(bytes), now);
  });
}
void LearnerNode::expel(WorkerId worker, std::string reason) {
  impl_->driver->post([core = impl_->core.get(), worker, reason = std::move(reason)](TimePoint now) {
    core->expel(worker, reason, now);
  });
}
LearnerStats LearnerNode::stats() const {
  LearnerStats stats;
  if (!impl_->driver->post_and_wait([&](TimePoint) { stats = impl_->core->stats(); })) stats = impl_->core->stats();
  return stats;
}
void LearnerNode::stop() {
  impl_->driver->stop([core = impl_->core.get()](TimePoint now) { core->leave(now); });
}

// ---- worker ----

struct WorkerNode::Impl {
  WorkerEvents events;
  std::unique_ptr<Driver> driver;
  std::unique_ptr<MemberCore> core;

  void on_action(const Action& action) {
    std::visit(Overloaded{
                   [&](const act::Welcomed& a) { call(events.joined, a.self, a.welcome); },
                   [&](const act::Deliver& a) { call(events.publication, a.publication); },
                   [&](const act::Message& a) { call(events.message, a.bytes); },
                   [&](const act::Disconnected& a) { call(events.disconnected, a.reason); },
                   [](const auto&) {},
               },
               action);
  }
};

WorkerNode::WorkerNode(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
WorkerNode::~WorkerNode() { stop(); }

Result<std::unique_ptr<WorkerNode>> WorkerNode::start(WorkerOptions options, WorkerEvents events) {
  ECHO_TRY(check(options.limits));
  auto impl = std::make_unique<Impl>();
  ECHO_ASSIGN(impl->driver, Driver::listen(options.bind_host, 0));
  impl->events = std::move(events);
  MemberConfig config{options.learner, impl->driver->endpoint(), options.run_id,      options.name,
                      options.limits,  options.store_bytes_max,  options.join_timeout};
  impl->core = std::make_unique<MemberCore>(std::move(config));
  Impl* self = impl.get();
  impl->driver->run(
      *impl->core, [self](const Action& action) { self->on_action(action); },
      [self](TimePoint now) { self->core->start(now); });
  return std::unique_ptr<WorkerNode>(new WorkerNode(std::move(impl)));
}

void WorkerNode::installed(Version version, const Digest& policy_digest) {
  impl_->driver->post([core = impl_->core.get(), version, policy_digest](TimePoint now) {
    core->installed(version, policy_digest, now);
  });
}
void WorkerNode::install_failed(Version version, std::string why) {
  impl_->driver->post([core = impl_->core.get(), version, why = std::move(why)](TimePoint now) {
    core->install_failed(version, why, now);
  });
}
void WorkerNode::send(std::string bytes) {
  if (!fits(bytes)) return;
  impl_->driver->post(
      [core = impl_->core.get(), bytes = std::move(bytes)](TimePoint now) { core->send_message(view(bytes), now); });
}
void WorkerNode::set_heartbeat(std::string app_bytes) {
  if (app_bytes.size() > kHeartbeatApplicationBytesMax)
    return log::error("a heartbeat of {} bytes is not sent: the limit is {}", app_bytes.size(),
                      kHeartbeatApplicationBytesMax);
  impl_->driver->post(
      [core = impl_->core.get(), bytes = std::move(app_bytes)](TimePoint) { core->set_heartbeat(bytes); });
}
WorkerStats WorkerNode::stats() const {
  WorkerStats stats;
  if (!impl_->driver->post_and_wait([&](TimePoint) { stats = impl_->core->stats(); })) stats = impl_->core->stats();
  return stats;
}
void WorkerNode::stop() {
  impl_->driver->stop([core = impl_->core.get()](TimePoint now) { core->leave("it was stopped", now); });
}

}  // namespace echoline::overlay
