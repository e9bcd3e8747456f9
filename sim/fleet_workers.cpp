// Workers of a simulated fleet: machines, enrolment, installation of policies, restarts.
#include <algorithm>
#include <cstdio>

#include "overlay/wire/grant.hpp"
#include "sim/fleet_parts.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

constexpr int kReplacements = 3;

Slice slice_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return Slice(std::vector<std::byte>(bytes.begin(), bytes.end()));
}

}  // namespace

std::size_t Fleet::add_worker(const WorkerOptions& asked) {
  WorkerOptions options = asked;
  const std::size_t i = workers_.size();
  if (options.malice.slander) options.malice.parents = [this, i] { return parents_of(i); };
  auto worker = std::make_unique<Worker>();
  worker->options = options;
  worker->host = world_.add_host(options.link, options.clock_skew, options.region);
  worker->options.store.disk = options.disk;
  world_.set_nat(worker->host, options.nat);
  world_.disk(worker->host).configure(options.disk_options);
  if (options.malice.any())
    world_.set_malice(worker->host,
                      std::make_unique<Malicious>(options.malice, options_.seed, 100 + i, accomplice_state_));
  if (options.open_files_max)
    world_.set_connections_max(worker->host, ConnectionLimits::of(*options.open_files_max).total);
  by_host_[worker->host.value] = i;
  workers_.push_back(std::move(worker));
  if (options_.message_every) send_periodic_message(i);
  return i;
}

std::optional<std::size_t> Fleet::worker_on(HostId host) const {
  const auto it = by_host_.find(host.value);
  return it == by_host_.end() ? std::nullopt : std::optional(it->second);
}

std::optional<std::size_t> Fleet::worker_of(WorkerId id) const {
  const auto it = by_id_.find(id);
  return it == by_id_.end() ? std::nullopt : std::optional(it->second);
}

std::vector<WorkerId> Fleet::parents_of(std::size_t i) {
  std::vector<WorkerId> parents;
  const LearnerCore* core = learner();
  const auto parents_by_worker = core ? core->topology().parents() : decltype(core->topology().parents()){};
  if (const auto worker_parents = parents_by_worker.find(worker(i).id()); worker_parents != parents_by_worker.end())
    std::copy_if(worker_parents->second.begin(), worker_parents->second.end(), std::back_inserter(parents),
                 [](WorkerId parent) { return parent != kLearnerId; });
  return parents;
}

MemberCore* Fleet::member(std::size_t i) {
  auto* process = dynamic_cast<MemberProcess*>(world_.process(workers_[i]->host));
  return process ? &process->core() : nullptr;
}

// ---- intruder ----

void Fleet::add_intruder(Duration every) {
  const WorkerId id{next_id_++};
  const trust::SigningKey key = new_key();
  trust::CertificateRequest request;
  request.subject = key.public_key();
  request.kind = trust::PeerIdentity::Kind::kWorker;
  request.worker = id;
  request.serial = id.value;
  request.now_unix_s = learner_unix_s();
  request.lifetime = std::chrono::hours(1);
  auto certificate = authority_->issue(request);
  ECHO_CHECK(certificate.has_value(), "{}", certificate ? "" : certificate.error().message());
  intruder_host_ = world_.add_host({});
  const auto now_ms = static_cast<std::uint64_t>(learner_unix_s() * 1e3);
  Grant grant{kRunId, id, now_ms - 7'200'000, now_ms - 3'600'000, 1, {}, {}, false};
  // The intruder has two grants: one that has expired, and a valid one (`grant_elsewhere`) with a parent that does not
  // exist. The first names the ids of the initial workers, and ids that the learner gives to newcomers.
  for (std::uint64_t i = 0; i < 12; ++i)
    grant.from.push_back({WorkerId{i}, 1}), grant.from.push_back({WorkerId{1'000'000 + i}, 1});
  Grant grant_elsewhere = grant;
  grant_elsewhere.from = {{WorkerId{999'999}, 1}};
  grant_elsewhere.expires_unix_ms = now_ms + 360'000'000;
  IntruderConfig config{core_options(*intruder_host_, {}),
                        kRunId,
                        id,
                        options_.seed,
                        key,
                        std::move(*certificate),
                        authority_->certificate(),
                        sign(grant, authority_->key()),
                        sign(grant_elsewhere, authority_->key()),
                        accomplice_state_,
                        every,
                        checker_,
                        [this] {
                          std::vector<WorkerId> parents{kLearnerId};
                          for (const auto& w : workers_)
                            if (world_.alive(w->host) && w->state) parents.push_back(w->id());
                          return parents;
                        },
                        [this](WorkerId of) -> std::optional<Endpoint> {
                          if (of == kLearnerId) return world_.endpoint_of(learner_host_);
                          const auto worker = worker_of(of);
                          return worker ? std::optional(world_.endpoint_of(workers_[*worker]->host)) : std::nullopt;
                        }};
  auto process = std::make_unique<IntruderProcess>(std::move(config));
  Intruder& core = process->core();
  world_.start(*intruder_host_, std::move(process));
  world_.call(*intruder_host_, [&](TimePoint now) { core.start(now); });
}

const Intruder* Fleet::intruder() const {
  if (!intruder_host_) return nullptr;
  auto* process = dynamic_cast<IntruderProcess*>(world_.process(*intruder_host_));
  return process ? &process->core() : nullptr;
}

void Fleet::start_worker(std::size_t i) {
  Worker& w = *workers_[i];
  if (world_.alive(w.host) || starts_blocked_) return;
  if (const auto& bytes = world_.disk(w.host).state(); w.options.disk && bytes) {
    auto state = decode_worker_state(*bytes);
    const auto identity =
        state ? trust::check_certificate(state->certificate, authority_->public_key(), kRunId, std::nullopt)
              : Result<trust::PeerIdentity>(state.error());
    if (identity) return join(i, std::move(*state));
    if (!identity)
      application_error_ = fmt::format("worker {}: its state file cannot be read: {}", i, identity.error().message());
  }
  if (w.options.enrol) return enrol(i);
  // A worker that does not enrol starts with an identity that the run has made for it.
  w.key = new_key();
  WorkerState state;
  state.run_id = kRunId;
  state.worker = WorkerId{next_id_++};
  state.authority = authority_->certificate();
  trust::CertificateRequest request;
  request.subject = w.key->public_key();
  request.kind = trust::PeerIdentity::Kind::kWorker;
  request.worker = state.worker;
  request.serial = state.worker.value;
  request.now_unix_s = learner_unix_s();
  request.lifetime = options_.certificate_lifetime;
  auto certificate = authority_->issue(request);
  ECHO_CHECK(certificate.has_value(), "{}", certificate ? "" : certificate.error().message());
  state.certificate = std::move(*certificate);
  join(i, std::move(state));
}

void Fleet::enrol(std::size_t i) {
  Worker& w = *workers_[i];
  w.key = new_key();
  w.state.reset();
  ++w.processes;
  ++w.enrolments;
  const std::string instance = fmt::format("simulated-{}", i);
  trust::Nonce nonce;
  for (std::byte& b : nonce) b = static_cast<std::byte>(random_.next());
  auto token = trust::issue_token(*authority_, instance, nonce, learner_unix_s());
  ECHO_CHECK(token.has_value());
  EnrolConfig config{core_options(w.host, w.options.limits), world_.endpoint_of(learner_host_), *w.key, *token,
                     instance};
  auto process = std::make_unique<EnrolProcess>(*this, i, std::move(config));
  EnrolCore& core = process->core();
  world_.start(w.host, std::move(process));
  world_.call(w.host, [&](TimePoint now) { core.start(now); });
}

void Fleet::on_enrolled(std::size_t i, Result<WorkerState> result, TimePoint) {
  world_.post([this, i, process = workers_[i]->processes, result = std::move(result)]() mutable {
    Worker& w = *workers_[i];
    if (!world_.alive(w.host) || w.processes != process) return;
    if (!result) return on_process_ended(i, result.error().message());
    world_.stop(w.host);
    join(i, std::move(*result));
  });
}

void Fleet::join(std::size_t i, WorkerState state) {
  Worker& w = *workers_[i];
  ++w.processes;
  const bool known = by_id_.contains(state.worker);
  by_id_[state.worker] = i;
  w.state = state;
  w.installed.reset();
  w.active.reset();
  w.delivered.reset();
  w.joined = w.awaits_snapshot = false;
  w.messages_sent = w.last_answered = 0;
  if (!known && observer_) observer_->on_identity(i, state.worker);
  MemberConfig config{core_options(w.host, w.options.limits, w.options.open_files_max.value_or(65536)),
                      world_.endpoint_of(learner_host_),
                      world_.endpoint_of(w.host),
                      fmt::format("simulated-{}", i),
                      *w.key,
                      std::move(state),
                      checker_,
                      w.options.store,
                      w.options.disk,
                      std::chrono::seconds(10),
                      std::nullopt};
  if (options_.learner.regions.several()) config.place = std::to_string(w.options.region);
  auto process = std::make_unique<MemberProcess>(*this, i, std::move(config));
  MemberCore& core = process->core();
  world_.start(w.host, std::move(process));
  if (w.options.disk)
    for (const PublicationId& id : world_.disk(w.host).spools()) {
      std::optional<std::uint64_t> end;  // of the usable payload
      for (Frame& frame : world_.disk(w.host).read_spool(id)) {
        const std::uint64_t to =
            frame.type == FrameType::kChunk ? frame.chunk.index * chunk_bytes() + frame.body.size() : 0;
        world_.call(w.host, [&](TimePoint now) {
          if (core.recover(std::move(frame), now)) end = std::max(end.value_or(0), to);
        });
      }
      world_.disk(w.host).trim_spool(id, end);
    }
  world_.call(w.host, [&](TimePoint now) { core.start(now); });
}

void Fleet::kill_worker(std::size_t i, Death death) {
  Worker& w = *workers_[i];
  w.joined = false;
  world_.kill(w.host, death);
}

void Fleet::drain_worker(std::size_t i) {
  workers_[i]->wanted = false;
  if (member(i)) world_.call(workers_[i]->host, [&](TimePoint now) { member(i)->drain(now); });
}

void Fleet::retire_worker(std::size_t i) {
  workers_[i]->wanted = false;
  kill_worker(i, Death::kPowerLoss);
}

// The process has ended by itself; the operator restarts it after a while.
void Fleet::on_process_ended(std::size_t i, const std::string& reason) {
  Worker& w = *workers_[i];
  w.last_end = reason;
  w.joined = false;
  world_.note(fmt::format("worker {} ends: {}", i, reason));
  world_.stop(w.host);
  if (reason.find("has revoked") != std::string::npos && !lost_workers_.contains(w.id()))
    application_error_ =
        fmt::format("worker {} considers itself revoked, but the learner has expelled no worker of its name", i);
  const bool forgotten = reason.find("a join token is needed") != std::string::npos;
  if (std::exchange(w.expelled, false) || forgotten) {
    world_.disk(w.host).wipe();  // a new machine replaces it; a malicious worker is replaced only kReplacements times
    if (++w.replacements > kReplacements && w.options.malice.any()) w.wanted = false;
  }
  world_.at(world_.now() + w.options.restart_after, [this, i, process = w.processes] {
    if (workers_[i]->wanted && workers_[i]->processes == process) start_worker(i);
  });
}

void Fleet::on_member_action(std::size_t i, Action&& action, TimePoint) {
  Worker& w = *workers_[i];
  if (std::holds_alternative<act::Welcomed>(action)) {
    w.joined = true;
  } else if (std::holds_alternative<act::Away>(action)) {
    w.joined = false;
  } else if (const auto* message = std::get_if<act::Message>(&action)) {
    on_answer(i, message->bytes);
  } else if (auto* delivered = std::get_if<act::Deliver>(&action)) {
    deliver(i, std::move(*delivered));
  } else if (const auto* gone = std::get_if<act::Disconnected>(&action)) {
    world_.post([this, i, process = w.processes, reason = gone->reason] {
      if (workers_[i]->processes == process && world_.alive(workers_[i]->host)) on_process_ended(i, reason);
    });
  }
}

// Messages are numbered. Between a worker and the learner they arrive complete, once and in order, or not at all.
void Fleet::send_periodic_message(std::size_t i) {
  Worker& w = *workers_[i];
  world_.at(world_.now() + *options_.message_every, [this, i] { send_periodic_message(i); });
  MemberCore* core = member(i);
  if (!core || !w.joined || messages_stopped_) return;
  std::string text = fmt::format("{} {} ", w.processes, ++w.messages_sent);
  text.resize(text.size() + random_.below(random_.below(100) == 0 ? 1'000'000 : 2'000), '.');
  world_.call(w.host, [&](TimePoint now) { core->send_message(slice_of(text), now); });
}

void Fleet::on_message(WorkerId from, const std::string& text) {
  unsigned long long process = 0, number = 0;
  const bool parsed = std::sscanf(text.c_str(), "%llu %llu", &process, &number) == 2;
  auto& last_number = last_messages_[from];
  const std::pair<std::uint64_t, std::uint64_t> message_number{process, number};
  const auto worker = worker_of(from);
  if (worker && workers_[*worker]->options.malice.any()) return;
  if (!parsed || message_number <= last_number)
    application_error_ = fmt::format("a message of worker {} arrived out of order", from);
  last_number = message_number;
  world_.post([this, from, text] {
    if (!learner()) return;
    world_.call(learner_host_, [&](TimePoint t) { learner()->send_message(from, slice_of(text), t); });
  });
}

void Fleet::on_answer(std::size_t i, const std::string& text) {
  Worker& w = *workers_[i];
  unsigned long long process = 0, number = 0;
  const bool parsed = std::sscanf(text.c_str(), "%llu %llu", &process, &number) == 2;
  if (!parsed || (process == w.processes && number <= w.last_answered) || process > w.processes)
    application_error_ = fmt::format("an answer to worker {} arrived out of order", i);
  if (process == w.processes) w.last_answered = number;
}

void Fleet::deliver(std::size_t i, act::Deliver delivery) {
  Worker& w = *workers_[i];
  if (observer_) observer_->on_delivered(i, delivery);
  const Publication& p = delivery.publication;
  if (w.awaits_snapshot && p.base) return;
  w.awaits_snapshot = false;
  if (p.base && p.base != w.delivered)
    application_error_ = fmt::format("worker {} received version {} on {}, but has {}", i, p.version, *p.base,
                                     w.delivered ? fmt::format("version {}", *w.delivered) : "nothing");
  w.delivered = p.version;
  Publication installed{p.id, p.version, p.base, p.policy_digest, {}, {}, p.activate};
  // If the payload was damaged on the worker's own disk, the result does not have the announced digest.
  bool sound = true;
  if (delivery.spooled && world_.disk(w.host).rotten()) {
    const std::vector<Slice> pieces = world_.disk(w.host).pieces(*delivery.spooled);
    sound = published_content_.matches({p.version, p.base}, p.policy_digest, pieces);
  }
  world_.at(world_.now() + w.options.install_time,
            [this, i, process = w.processes, installed, sound] { install(i, process, installed, sound); });
}

void Fleet::install(std::size_t i, std::uint64_t process, const Publication& p, bool sound) {
  Worker& w = *workers_[i];
  MemberCore* core = member(i);
  if (!core || w.processes != process || (w.awaits_snapshot && p.base)) return;
  if (w.awaits_snapshot && w.delivered != p.version) return;
  if (!sound || (!random_faults_stopped_ && random_.uniform() < w.options.install_failure_share)) {
    world_.note(fmt::format("worker {} fails to install version {}", i, p.version));
    w.awaits_snapshot = true;
    w.delivered.reset();
    return world_.call(w.host, [&](TimePoint now) { core->install_failed(p.version, "simulated failure", now); });
  }
  w.installed = Installed{p.version, p.policy_digest};
  w.installed_at.try_emplace(p.version, world_.now());
  if (p.activate) {
    w.active = w.installed;
    if (observer_) observer_->on_activated(i, *w.active);
  }
  world_.call(w.host, [&](TimePoint now) { core->installed(p.version, p.policy_digest, now); });
}

}  // namespace echoline::sim
