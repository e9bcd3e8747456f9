// Workers of a simulated fleet: machines, enrolment, installation of policies, restarts.
#include <algorithm>
#include <cstdio>

#include "overlay/wire/grant.hpp"
#include "sim/fleet_parts.hpp"

namespace echoline::sim {

using namespace overlay;

namespace {

constexpr int kReplacementsMax = 3;  // new machines that a malicious worker gets after it was expelled
constexpr std::uint64_t kHourMs = 3'600'000;
// Random stream of the first worker's malice. The other workers have the streams after it.
constexpr std::uint64_t kMaliceStream = 100;

Slice slice_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return Slice(std::vector<std::byte>(bytes.begin(), bytes.end()));
}

// The numbers at the start of a message of send_periodic_message(). Zeros for another text.
MessageNumber number_of(const std::string& text) {
  unsigned long long process = 0, message = 0;
  if (std::sscanf(text.c_str(), "%llu %llu", &process, &message) != 2) return {};
  return {process, message};
}

}  // namespace

std::size_t Fleet::add_worker(const WorkerOptions& requested) {
  WorkerOptions options = requested;
  const std::size_t i = workers_.size();
  if (options.malice.slander) options.malice.parents = [this, i] { return parents_of(i); };
  options.store.disk = options.disk;
  const HostId host = world_.add_host(options.link, options.clock_skew, options.region);
  world_.set_nat(host, options.behind_nat);
  world_.disk(host).configure(options.disk_options);
  if (options.malice.any())
    world_.set_rewriter(
        host, std::make_unique<MaliciousRewriter>(options.malice, options_.seed, kMaliceStream + i, accomplice_state_));
  if (options.open_files_max) world_.set_connections_max(host, ConnectionLimits::of(*options.open_files_max).total);
  workers_.add(options, host);
  if (options_.message_interval) send_periodic_message(i);
  return i;
}

std::vector<WorkerId> Fleet::parents_of(std::size_t i) {
  std::vector<WorkerId> parents;
  const LearnerCore* core = learner();
  if (!core) return parents;
  const auto parents_by_worker = core->topology().parents();
  if (const auto worker_parents = parents_by_worker.find(worker(i).id()); worker_parents != parents_by_worker.end())
    std::copy_if(worker_parents->second.begin(), worker_parents->second.end(), std::back_inserter(parents),
                 [](WorkerId parent) { return parent != kLearnerId; });
  return parents;
}

MemberCore* Fleet::member(std::size_t i) { return core_on<MemberCore>(world_, workers_[i].host); }

// ---- intruder ----

void Fleet::add_intruder(Duration request_interval) {
  const WorkerId id = identities_.next_id();
  const trust::SigningKey key = new_key();
  intruder_host_ = world_.add_host({});
  const auto now_ms = static_cast<std::uint64_t>(learner_unix_s() * 1e3);
  // A grant is the learner's permission to fetch from certain parents. The intruder has two: one that has expired, and
  // a valid one whose parent does not exist. The first names ids of workers that do not enrol, and ids that the learner
  // gives to those that do. Both grants are for the first stripe only.
  Grant expired;
  expired.run_id = kRunId;
  expired.child = id;
  expired.issued = now_ms - 2 * kHourMs;
  expired.expires_unix_ms = now_ms - kHourMs;
  constexpr std::uint64_t kParentsNamed = 12;
  for (std::uint64_t i = 0; i < kParentsNamed; ++i)
    for (const WorkerId parent : {WorkerId{i}, WorkerId{RunIdentities::kFirstEnrolled + i}})
      expired.from.push_back({.parent = parent, .stripe_mask = 1});
  Grant for_absent_parent = expired;
  for_absent_parent.from = {Grant::From{.parent = WorkerId{RunIdentities::kFirstEnrolled - 1}, .stripe_mask = 1}};
  for_absent_parent.expires_unix_ms = now_ms + 100 * kHourMs;  // after the simulation's end
  const auto living_parents = [this] {
    std::vector<WorkerId> parents{kLearnerId};
    for (const FleetWorker& candidate : workers_)
      if (world_.is_alive(candidate.host) && candidate.state) parents.push_back(candidate.id());
    return parents;
  };
  const auto endpoint = [this](WorkerId parent) -> std::optional<Endpoint> {
    if (parent == kLearnerId) return world_.endpoint_of(learner_machine_.host);
    const auto worker = worker_with_id(parent);
    return worker ? std::optional(world_.endpoint_of(workers_[*worker].host)) : std::nullopt;
  };
  IntruderConfig config{.core = core_options(*intruder_host_, {}),
                        .run_id = kRunId,
                        .id = id,
                        .seed = options_.seed,
                        .key = key,
                        .certificate = identities_.certificate(id, key, learner_unix_s(), std::chrono::hours(1)),
                        .authority = authority().certificate(),
                        .expired_grant = sign(expired, authority().key()),
                        .absent_parent_grant = sign(for_absent_parent, authority().key()),
                        .accomplice_state = accomplice_state_,
                        .interval = request_interval,
                        .checker = identities_.checker(),
                        .parents = living_parents,
                        .endpoint = endpoint};
  auto process = std::make_unique<FleetProcess<Intruder>>(std::move(config), [](Intruder&, Action&&) {});
  Intruder& core = process->core();
  world_.start(*intruder_host_, std::move(process));
  world_.call(*intruder_host_, [&](TimePoint now) { core.start(now); });
}

const Intruder* Fleet::intruder() const {
  return intruder_host_ ? core_on<Intruder>(world_, *intruder_host_) : nullptr;
}

void Fleet::start_worker(std::size_t i) {
  Worker& worker = workers_[i];
  if (world_.is_alive(worker.host) || starts_are_blocked_) return;
  if (const auto& bytes = world_.disk(worker.host).state(); worker.options.disk && bytes) {
    auto state = decode_worker_state(*bytes);
    // The host needs a valid certificate to join; its dates are checked by the core.
    const auto identity = state ? trust::check_certificate(state->certificate, authority().public_key(), kRunId,
                                                           /*now_unix_s=*/std::nullopt)
                                : Result<trust::PeerIdentity>(state.error());
    if (identity) return join(i, std::move(*state));
    application_error_ = fmt::format("worker {}: its state file cannot be read: {}", i, identity.error().message());
  }
  if (worker.options.enrols) return enrol(i);
  // A worker that does not enrol starts with an identity that the run has made for it.
  worker.key = new_key();
  WorkerState state;
  state.run_id = kRunId;
  state.worker = identities_.next_id();
  state.authority = authority().certificate();
  state.certificate =
      identities_.certificate(state.worker, *worker.key, learner_unix_s(), options_.certificate_lifetime);
  join(i, std::move(state));
}

void Fleet::enrol(std::size_t i) {
  Worker& worker = workers_[i];
  worker.key = new_key();
  worker.state.reset();
  ++worker.processes;
  ++worker.enrolments;
  const std::string instance = worker.options.name(i);
  trust::Nonce nonce;
  for (std::byte& byte : nonce) byte = static_cast<std::byte>(random_.next());
  auto token = trust::issue_token(authority(), instance, nonce, learner_unix_s());
  ECHO_CHECK(token.has_value());
  EnrolConfig config{.core = core_options(worker.host, worker.options.limits),
                     .learner = world_.endpoint_of(learner_machine_.host),
                     .key = *worker.key,
                     .token = *token,
                     .instance = instance};
  auto process =
      std::make_unique<FleetProcess<EnrolCore>>(std::move(config), [this, i](EnrolCore& enrolment, Action&& action) {
        if (std::holds_alternative<act::ReportEnd>(action)) on_enrolled(i, enrolment.result());
      });
  EnrolCore& core = process->core();
  world_.start(worker.host, std::move(process));
  world_.call(worker.host, [&](TimePoint now) { core.start(now); });
}

void Fleet::on_enrolled(std::size_t i, Result<WorkerState> result) {
  // Waits for the next event, because the process cannot be stopped while its core's actions are performed.
  world_.run_soon([this, i, process = workers_[i].processes, result = std::move(result)]() mutable {
    Worker& worker = workers_[i];
    if (!world_.is_alive(worker.host) || worker.processes != process) return;
    if (!result) return on_process_ended(i, result.error().message());
    world_.stop(worker.host);
    join(i, std::move(*result));
  });
}

void Fleet::join(std::size_t i, WorkerState state) {
  Worker& worker = workers_[i];
  ++worker.processes;
  const bool is_new_identity = workers_.set_state(i, state);
  worker.installed.reset();
  worker.active.reset();
  worker.delivered.reset();
  worker.joined = worker.awaits_snapshot = false;
  worker.messages_sent = worker.last_answered_message = 0;
  if (is_new_identity && observer_) observer_->on_new_identity(i, state.worker);
  MemberConfig config{
      .core = core_options(worker.host, worker.options.limits, worker.options.open_files_max.value_or(kOpenFilesMax)),
      .learner = world_.endpoint_of(learner_machine_.host),
      .data = world_.endpoint_of(worker.host),
      .name = worker.options.name(i),
      .key = *worker.key,
      .state = std::move(state),
      .checker = identities_.checker(),
      .store = worker.options.store,
      .durable = worker.options.disk,
      .join_timeout = std::chrono::seconds(10),
      .away_max = std::nullopt};
  if (options_.learner.regions.several()) config.place = std::to_string(worker.options.region);
  auto process = std::make_unique<FleetProcess<MemberCore>>(
      std::move(config), [this, i](MemberCore&, Action&& action) { on_member_action(i, std::move(action)); });
  MemberCore& core = process->core();
  world_.start(worker.host, std::move(process));
  if (worker.options.disk)
    for (const PublicationId& id : world_.disk(worker.host).spools()) {
      // End of the last chunk that the core can use; 0 if it can use only frames without payload. Absent if it can use
      // no frame: trim_spool() then removes the whole spool.
      std::optional<std::uint64_t> payload_end;
      for (Frame& frame : world_.disk(worker.host).read_spool(id)) {
        const std::uint64_t chunk_end =
            frame.type == FrameType::kChunk ? frame.chunk.index * chunk_bytes() + frame.body.size() : 0;
        world_.call(worker.host, [&](TimePoint now) {
          if (core.recover(std::move(frame), now)) payload_end = std::max(payload_end.value_or(0), chunk_end);
        });
      }
      world_.disk(worker.host).trim_spool(id, payload_end);
    }
  world_.call(worker.host, [&](TimePoint now) { core.start(now); });
}

void Fleet::kill_worker(std::size_t i, Death death) {
  Worker& worker = workers_[i];
  worker.joined = false;
  world_.kill(worker.host, death);
}

void Fleet::drain_worker(std::size_t i) {
  workers_[i].should_run = false;
  if (member(i)) world_.call(workers_[i].host, [&](TimePoint now) { member(i)->drain(now); });
}

void Fleet::retire_worker(std::size_t i) {
  workers_[i].should_run = false;
  kill_worker(i, Death::kPowerLoss);  // the provider takes the machine: its peers get no notice
}

// The process has ended by itself; the operator restarts it after a while.
void Fleet::on_process_ended(std::size_t i, const std::string& reason) {
  Worker& worker = workers_[i];
  worker.last_end_reason = reason;
  worker.joined = false;
  world_.note(fmt::format("worker {} ends: {}", i, reason));
  world_.stop(worker.host);
  if (reason.find("has revoked") != std::string::npos && !workers_.is_lost(worker.id()))
    application_error_ =
        fmt::format("worker {} considers itself revoked, but the learner has expelled no worker of its name", i);
  const bool must_enrol_again = reason.find("a join token is needed") != std::string::npos;
  if (std::exchange(worker.expelled, false) || must_enrol_again) {
    world_.disk(worker.host).wipe();  // a new machine, with an empty disk, replaces it
    if (++worker.replacements > kReplacementsMax && worker.options.malice.any()) worker.should_run = false;
  }
  world_.run_at(world_.now() + worker.options.restart_delay, [this, i, process = worker.processes] {
    if (workers_[i].should_run && workers_[i].processes == process) start_worker(i);
  });
}

void Fleet::on_member_action(std::size_t i, Action&& action) {
  Worker& worker = workers_[i];
  if (std::holds_alternative<act::ReportWelcome>(action)) {
    worker.joined = true;
  } else if (std::holds_alternative<act::ReportLearnerAway>(action)) {
    worker.joined = false;
  } else if (const auto* message = std::get_if<act::DeliverLearnerMessage>(&action)) {
    on_answer(i, message->bytes);
  } else if (auto* delivered = std::get_if<act::DeliverPublication>(&action)) {
    deliver(i, std::move(*delivered));
  } else if (const auto* disconnected = std::get_if<act::ReportEnd>(&action)) {
    world_.run_soon([this, i, process = worker.processes, reason = disconnected->reason] {
      if (workers_[i].processes == process && world_.is_alive(workers_[i].host)) on_process_ended(i, reason);
    });
  }
}

// Sends a numbered message at each `message_interval`. Between a worker and the learner, messages arrive complete, once
// and in order, or not at all; on_message() and on_answer() check that.
void Fleet::send_periodic_message(std::size_t i) {
  Worker& worker = workers_[i];
  world_.run_at(world_.now() + *options_.message_interval, [this, i] { send_periodic_message(i); });
  MemberCore* core = member(i);
  if (!core || !worker.joined || messages_stopped_) return;
  std::string text = fmt::format("{} {} ", worker.processes, ++worker.messages_sent);
  constexpr std::uint64_t kUsualBytesMax = 2'000, kRareBytesMax = 1'000'000;
  const std::uint64_t padding_bytes_max = random_.below(100) == 0 ? kRareBytesMax : kUsualBytesMax;
  text.resize(text.size() + random_.below(padding_bytes_max), '.');
  world_.call(worker.host, [&](TimePoint now) { core->send_message(slice_of(text), now); });
}

void Fleet::on_message(WorkerId from, const std::string& text) {
  const auto worker = worker_with_id(from);
  if (worker && workers_[*worker].options.malice.any()) return;
  const MessageNumber number = number_of(text);
  MessageNumber& last_number = learner_machine_.last_messages[from];
  if (number <= last_number) application_error_ = fmt::format("a message of worker {} arrived out of order", from);
  last_number = number;
  world_.run_soon([this, from, text] {
    if (!learner()) return;
    world_.call(learner_machine_.host, [&](TimePoint now) { learner()->send_message(from, slice_of(text), now); });
  });
}

void Fleet::on_answer(std::size_t i, const std::string& text) {
  Worker& worker = workers_[i];
  const auto [process, message] = number_of(text);
  // An answer to a message of an earlier process may still arrive. Messages are numbered from 1, so 0 is a damaged
  // text.
  const bool is_out_of_order = process == worker.processes && message <= worker.last_answered_message;
  if (message == 0 || is_out_of_order || process > worker.processes)
    application_error_ = fmt::format("an answer to worker {} arrived out of order", i);
  if (process == worker.processes) worker.last_answered_message = message;
}

void Fleet::deliver(std::size_t i, act::DeliverPublication delivery) {
  Worker& worker = workers_[i];
  if (observer_) observer_->on_delivered(i, delivery);
  const Publication& publication = delivery.publication;
  // After a failed installation only a snapshot helps, because a delta needs an intact base.
  if (worker.awaits_snapshot && publication.base) return;
  worker.awaits_snapshot = false;
  if (publication.base && publication.base != worker.delivered)
    application_error_ =
        fmt::format("worker {} received version {} on {}, but has {}", i, publication.version, *publication.base,
                    worker.delivered ? fmt::format("version {}", *worker.delivered) : "nothing");
  worker.delivered = publication.version;
  // Waits for the installation; the payload would occupy memory.
  Publication without_payload{.id = publication.id,
                              .version = publication.version,
                              .base = publication.base,
                              .policy_digest = publication.policy_digest,
                              .note = {},
                              .payload = {},
                              .activate = publication.activate};
  // If the payload was damaged on the worker's own disk, the result does not have the announced digest.
  bool is_intact = true;
  if (delivery.spooled && world_.disk(worker.host).is_corrupted()) {
    const std::vector<Slice> pieces = world_.disk(worker.host).pieces(*delivery.spooled);
    is_intact = published_content_.matches({publication.version, publication.base}, publication.policy_digest, pieces);
  }
  world_.run_at(world_.now() + worker.options.install_time,
                [this, i, process = worker.processes, without_payload, is_intact] {
                  install(i, process, without_payload, is_intact);
                });
}

void Fleet::install(std::size_t i, std::uint64_t process, const Publication& publication, bool is_intact) {
  Worker& worker = workers_[i];
  MemberCore* core = member(i);
  if (!core || worker.processes != process || (worker.awaits_snapshot && publication.base)) return;
  // After a failed installation, only the snapshot that was delivered since then may be installed.
  if (worker.awaits_snapshot && worker.delivered != publication.version) return;
  if (!is_intact || (!faults_->stopped && random_.uniform() < worker.options.install_failure_share)) {
    world_.note(fmt::format("worker {} fails to install version {}", i, publication.version));
    worker.awaits_snapshot = true;
    worker.delivered.reset();
    return world_.call(worker.host,
                       [&](TimePoint now) { core->install_failed(publication.version, "simulated failure", now); });
  }
  worker.installed = Installed{publication.version, publication.policy_digest};
  worker.installed_at.try_emplace(publication.version, world_.now());
  if (publication.activate) {
    worker.active = worker.installed;
    if (observer_) observer_->on_activated(i, *worker.active);
  }
  world_.call(worker.host,
              [&](TimePoint now) { core->installed(publication.version, publication.policy_digest, now); });
}

}  // namespace echoline::sim
